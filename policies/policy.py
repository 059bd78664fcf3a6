"""The contract of a scheduling policy: a read-only view in, a plan out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, KeysView, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from sarathi_sim.policies.request import Sequence


@dataclass(slots=True, eq=False)
class View:
    """What a policy sees when the next micro-batch is formed. Policies only read it.

    ``waiting``     sequences not admitted yet, oldest first (shared by all micro-batches)
    ``prefilling``  members of this micro-batch whose prompt is unfinished, in order of joining it
    ``decoding``    members of this micro-batch that generate, in the order of their first tokens
                    (with a free pool: the slot's own before members of other slots)
    ``num_decodes`` number of decodes (with finished members that are held as padding)
    ``max_batch``   most sequences one micro-batch may hold
    ``free_slots``  sequences that may still join the micro-batch
    ``free_kv``     KV tokens that are not reserved; admitting ``s`` takes ``s.kv_tokens``
    ``cost``        ``cost(s, n)``: seconds that the slowest stage would take for ``n`` prompt
                    tokens of ``s`` and all decodes; None in a real engine, which does not know
    """

    waiting: deque[Sequence]
    prefilling: list[Sequence]
    decoding: KeysView[Sequence]
    max_batch: int
    num_decodes: int = 0
    free_slots: int = 0
    free_kv: int = 0
    cost: Callable[[Sequence, int], float] | None = None

    def next_waiting(self) -> Sequence | None:
        """The oldest waiting sequence if it can be admitted now, else None.

        Strictly first come, first served: a request that does not fit is not overtaken, so that
        none starves (invariant 8).
        """
        if self.waiting and self.free_slots > 0:
            head = self.waiting[0]
            if head.kv_tokens <= self.free_kv:
                return head
        return None

    def admissible(self) -> list[Sequence]:
        """The longest first-come-first-served prefix of the queue that can be admitted now."""
        found: list[Sequence] = []
        free_kv = self.free_kv
        for sequence in self.waiting:
            if len(found) == self.free_slots or sequence.kv_tokens > free_kv:
                break
            free_kv -= sequence.kv_tokens
            found.append(sequence)
        return found


@dataclass(slots=True, eq=False)
class Plan:
    """What one iteration of a micro-batch does.

    ``chunks`` are ``(sequence, tokens)``: the next ``tokens`` prompt tokens of a prefilling or a
    waiting sequence (which is thereby admitted). All decodes run, except those in ``skip``.
    """

    chunks: tuple[tuple[Sequence, int], ...] = ()
    skip: tuple[Sequence, ...] = ()


DECODES = Plan()
"""The plan that only runs the decodes."""


class Chunking(NamedTuple):
    """The sizes of the chunks that a policy cuts prompts into.

    ``tokens`` is the largest chunk when decodes leave room for it. ``rows`` is the largest number
    of prompt tokens in an iteration, with any number of decodes.
    """

    tokens: int
    rows: int


@dataclass(frozen=True)
class Longest:
    """The lengths that a policy must cope with, in tokens: the longest ``prompt``, the longest
    request with its output, and a KV block. ``remote`` prompts are computed elsewhere."""

    prompt: int
    max_length: int
    block_size: int
    remote: bool = False


class AnyPolicy(Protocol):
    """What a policy says of itself. A class of one's own may leave out what has a default here.

    ``pooled``       whether it is a :class:`~sarathi_sim.policies.pool.PoolPolicy`
    ``chunking``     the sizes of its chunks, which set the size of tables; None for whole prompts
    ``needs``        parameters that act only beside something else: another parameter, or
                     ``priorities``, ``users`` or ``ranks``
    ``needs_costs``  whether it needs the time of an iteration (``View.cost``)
    ``version``      the version of the engine whose policy this is
    ``speculates``   whether it counts the tokens of decodes with drafts
    ``looks_ahead``  whether it takes KV for the tokens of a drafter beforehand
    """

    pooled: bool = False
    chunking: Chunking | None = None
    needs: ClassVar[Mapping[str, str]] = {}
    needs_costs: bool = False
    version: str = ""
    speculates: bool = False
    looks_ahead: bool = False


class Policy(AnyPolicy, Protocol):
    """Decides what the next iteration of a micro-batch does.

    A policy is pure: the same view gives the same plan. With ``holds_finished`` the members of a
    micro-batch leave together; those that finish early compute padding until then.
    """

    holds_finished: bool = False

    def plan(self, view: View) -> Plan | None:
        """The plan, or None when there is nothing this micro-batch could do now."""
        ...


_Builder = TypeVar("_Builder", bound=Callable[..., AnyPolicy])


def named(name: str) -> Callable[[_Builder], _Builder]:
    """Registers a policy (a class, or a function that makes one) under ``name``, by which
    simulator and engine find it (``catalogue.py``)."""

    def mark(builder: _Builder) -> _Builder:
        builder.policy_name = name  # type: ignore[attr-defined]
        return builder

    return mark
