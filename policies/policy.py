"""The contract of a scheduling policy: a read-only view in, a plan out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, KeysView, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from .kv import CachedBlocks
from .radix import RadixBlocks
from .request import Sequence


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
        """The oldest waiting sequence if it can be admitted now, else None. Strictly first come,
        first served: a request that does not fit is not overtaken, so that none starves (invariant
        8)."""
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

    ``chunking``        the sizes of its chunks, which set the size of tables; None: whole prompts
    ``needs``           parameters that act only beside something else: another parameter, or
                        ``priorities``, ``users`` or ``ranks``
    ``version``         the version of the engine whose policy this is

    Of one that plans for a micro-batch:

    ``holds_finished``  whether the members of a micro-batch leave together; those that finish early
                        compute padding until then
    ``needs_costs``     whether it needs the time of an iteration (``View.cost``)

    Of one that acts on a :class:`~sarathi_sim.policies.pool.Pool` (``pooled``):

    ``ahead``           whether a sequence's next iteration may be formed before the token of its
                        last one is known, as many steps later as there are stages
    ``order``           the key that sorts the waiting requests, smallest first; None: first come,
                        first served
    ``drops``           whether a preempted sequence loses its tokens in flight
    ``memory_share``    the engine's name for its share of the memory
    ``cached_blocks``   its kind of blocks with prefix caching
    ``speculates``      whether it counts the tokens of decodes with drafts
    ``looks_ahead``     whether it takes KV for the tokens of a drafter beforehand
    ``agree``           gets the pools of all ranks of data-parallel attention before they form a
                        step; ``plan`` never returns True then
    """

    pooled: bool = False
    chunking: Chunking | None = None
    needs: ClassVar[Mapping[str, str]] = {}
    version: str = ""
    holds_finished: bool = False
    needs_costs: bool = False
    ahead: bool = False
    order: Callable[[Sequence], Any] | None = None
    drops: bool = False
    memory_share: str = "gpu_memory_utilization"
    cached_blocks: type[CachedBlocks] | type[RadixBlocks] = CachedBlocks
    speculates: bool = False
    looks_ahead: bool = False
    agree: Callable[[Any], None] | None = None

    def refusal(self, longest: Longest) -> tuple[str, str] | None:
        """The setting with which the engine would refuse these lengths, and its allowed value; None
        if it accepts them."""
        return None


class Policy(AnyPolicy, Protocol):
    """Decides what the next iteration of a micro-batch does. It is pure: the same view gives the
    same plan."""

    def plan(self, view: View) -> Plan | None:
        """The plan, or None when there is nothing this micro-batch could do now."""
        ...


_Builder = TypeVar("_Builder", bound=Callable[..., AnyPolicy])


def named(name: str) -> Callable[[_Builder], _Builder]:
    """Registers a policy (a class, or a function that makes one) under ``name``; a class gets the
    defaults of what it leaves out. Simulator and engine find it by that name (``catalogue.py``)."""

    def mark(builder: _Builder) -> _Builder:
        builder.policy_name = name  # type: ignore[attr-defined]
        if isinstance(builder, type):
            add_defaults(builder)
        return builder

    return mark


def add_defaults(kind: type) -> None:
    """Give a class of policies the default of every attribute that it leaves out."""
    for name, default in vars(AnyPolicy).items():
        if not name.startswith("_") and not hasattr(kind, name):
            setattr(kind, name, default)
