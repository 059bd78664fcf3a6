"""The contract of a scheduling policy: a read-only view in, a plan out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, KeysView
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeGuard, TypeVar, cast

from sarathi_sim.policies.kv import CachedBlocks
from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.radix import RadixBlocks
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


def chunking_of(policy: Policy | PoolPolicy) -> Chunking | None:
    """A policy's attribute ``chunking``; None if it has none and takes whole prompts."""
    found = getattr(policy, "chunking", None)
    return found if isinstance(found, Chunking) else None


class Policy(Protocol):
    """Decides what the next iteration of a micro-batch does.

    A policy is pure: the same view gives the same plan. With ``holds_finished`` (default: False)
    the members of a micro-batch leave together; those that finish early compute padding until then.
    A policy that cuts prompts has the attribute ``chunking`` (:class:`Chunking`), which sets the
    size of tables.
    """

    holds_finished: bool

    def plan(self, view: View) -> Plan | None:
        """The plan, or None when there is nothing this micro-batch could do now."""
        ...


def is_pooled(policy: Policy | PoolPolicy) -> TypeGuard[PoolPolicy]:
    """Whether a policy acts on a :class:`~sarathi_sim.policies.pool.Pool`, not on one
    micro-batch."""
    return bool(getattr(policy, "pooled", False))


def memory_share_of(policy: PoolPolicy) -> str:
    """The engine's name for the share of the memory that it takes: attribute ``memory_share``."""
    return str(getattr(policy, "memory_share", "gpu_memory_utilization"))


def version_of(policy: Policy | PoolPolicy) -> str:
    """The version of the engine whose policy this is: attribute ``version``; empty without."""
    return str(getattr(policy, "version", ""))


def cached_blocks_of(policy: PoolPolicy) -> type[CachedBlocks] | type[RadixBlocks]:
    """The policy's blocks with prefix caching: attribute ``cached_blocks``."""
    found: type[CachedBlocks] | type[RadixBlocks] = getattr(policy, "cached_blocks", CachedBlocks)
    return found


@dataclass(frozen=True)
class Longest:
    """The lengths that a policy must cope with, in tokens: the longest ``prompt``, the longest
    request with its output, and a KV block. ``remote`` prompts are computed elsewhere."""

    prompt: int
    max_length: int
    block_size: int
    remote: bool = False


def refusal_of(policy: PoolPolicy, longest: Longest) -> tuple[str, str] | None:
    """The setting with which the engine would refuse these lengths, and its allowed value; None if
    it accepts them. The policy's method ``refusal`` decides; without it nothing is refused."""
    refusal: Callable[[Longest], tuple[str, str] | None] | None = getattr(policy, "refusal", None)
    return None if refusal is None else refusal(longest)


def speculates(policy: Policy | PoolPolicy) -> bool:
    """Whether a policy counts the tokens of decodes with drafts."""
    return bool(getattr(policy, "speculates", False))


def looks_ahead(policy: Policy | PoolPolicy) -> bool:
    """Whether a policy takes KV for the tokens of a drafter beforehand."""
    return bool(getattr(policy, "looks_ahead", False))


def needs_costs(policy: Policy | PoolPolicy) -> bool:
    """Whether a policy needs the time of an iteration (``View.cost``): attribute
    ``needs_costs``."""
    return bool(getattr(policy, "needs_costs", False))


def of_micro_batches(policy: Policy | PoolPolicy) -> Policy:
    """The policy, if it plans for one micro-batch. Raises ValueError for one that acts on a
    pool."""
    if is_pooled(policy):
        raise ValueError("this policy acts on a pool with paged memory")
    return cast(Policy, policy)


def needs_of(policy: Policy | PoolPolicy) -> dict[str, tuple[str, bool]]:
    """Parameters that act only beside something else: by parameter, what it needs, and whether this
    is an attribute of the policy that is set. The policy's attribute ``needs`` names it: another
    parameter, or ``priorities``, ``users`` or ``ranks``."""
    needs: dict[str, str] = getattr(policy, "needs", {})
    return {key: (need, bool(getattr(policy, need, False))) for key, need in needs.items()}


def complete(policy: Policy | PoolPolicy) -> Policy | PoolPolicy:
    """The policy, with the usual attributes that its class lacks. Raises TypeError where one is
    missing that has no default."""
    _with_defaults(type(policy))
    needed = ["plan", "max_num_seqs"] if is_pooled(policy) else ["plan"]
    if missing := [name for name in needed if not hasattr(policy, name)]:
        raise TypeError(f"it has no attribute {missing[0]}; needed: {' and '.join(needed)}")
    return policy


def _with_defaults(kind: type) -> None:
    for name, value in (("holds_finished", False), ("ahead", False), ("order", None)):
        if not hasattr(kind, name):
            setattr(kind, name, value)


Builder = Callable[..., Policy | PoolPolicy]
_Named = TypeVar("_Named", bound=Builder)


def named(name: str) -> Callable[[_Named], _Named]:
    """Registers a policy (a class, or a function that makes one) under ``name``; a class gets the
    defaults of what it leaves out.

    Simulator and engine find it by that name (``policies/catalogue.py``).
    """

    def mark(builder: _Named) -> _Named:
        builder.policy_name = name  # type: ignore[attr-defined]
        if isinstance(builder, type):
            _with_defaults(builder)
        return builder

    return mark
