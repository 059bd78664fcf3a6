"""Requests, the sequences that policies see, and the cohorts in which sequences decode."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, KeysView
from dataclasses import dataclass, field
from operator import itemgetter

Prefix = tuple[tuple[Hashable, int], ...]
"""The prefixes a prompt shares: names, each with the token up to which it holds, ascending.

Sequences that carry the same name agree in all tokens up to there."""

_until = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request, as the workload describes it.

    ``output_tokens`` is the true number of tokens it will generate. Only the scheduler's
    bookkeeping and the engine read it. A policy gets a :class:`Sequence` with the declared
    ``max_tokens`` instead (invariant 6).

    Token convention (used everywhere): the iteration that finishes the prompt yields the first
    output token, and each decode yields one more, so a request takes ``output_tokens - 1`` decodes
    and processes ``prompt_tokens + output_tokens - 1`` tokens in all (invariant 1).

    Where prompts and decodes have workers of their own, a request of the workload is one request on
    each. On a prefill worker it ``sends_kv``: it ends with its first token, and its KV is held
    until :meth:`~sarathi_sim.policies.pool.Pool.sent`. On a decode worker the KV of its first
    ``remote_tokens`` prompt tokens is computed elsewhere and sent here. If these are all, its first
    token is known, too: its first decode yields the second one.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: Prefix = ()
    user: int = 0
    remote_tokens: int = 0
    sends_kv: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"request {self.id}: prompt_tokens and output_tokens must be at least 1, "
                f"not {self.prompt_tokens} and {self.output_tokens}"
            )
        if self.max_tokens < self.output_tokens:
            raise ValueError(
                f"request {self.id}: generates {self.output_tokens} tokens "
                f"but declares at most {self.max_tokens}"
            )
        if not 0 <= self.remote_tokens <= self.prompt_tokens:
            raise ValueError(
                f"request {self.id}: remote_tokens must lie between 0 and its {self.prompt_tokens} "
                f"prompt tokens, not {self.remote_tokens}"
            )
        if self.remote_tokens == self.prompt_tokens and self.output_tokens == 1:
            raise ValueError(
                f"request {self.id}: its only output token is known where its whole prompt was "
                "computed, so it has nothing to do elsewhere"
            )


def release_of(version: str) -> tuple[int, ...]:
    """``0.33.1rc2`` as 0, 33, 1. Raises ValueError for a text that does not begin with a number."""
    if not (found := re.match(r"\d+(\.\d+)*", version)):
        raise ValueError(f"version must begin with a number, as in 0.33, not {version!r}")
    return tuple(map(int, found[0].split(".")))


def check_at_least_1(**values: int) -> None:
    """Raises ValueError, naming it, for the first value that is less than 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def too_long(request: Request, max_length: int) -> str | None:
    """The reason why a request may become longer than ``max_length``, or None."""
    length = request.prompt_tokens + request.max_tokens
    if length <= max_length:
        return None
    return (
        f"needs {length} tokens (prompt {request.prompt_tokens} + declared maximum "
        f"{request.max_tokens}), but max_length is {max_length}"
    )


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A request as policies see it: prompt, declared limit, and processed prompt tokens.

    ``kv_tokens`` is what its admission reserves in the KV cache, in tokens. ``target`` is the
    number of tokens to process before it decodes: its prompt and, after a preemption, its
    generated tokens. ``prefilled`` of them are processed. The KV of the first ``remote`` tokens
    comes from elsewhere; ``arrived`` says that it is there, and that the sequence does not run yet.
    Its own KV is held after its end if it ``sends`` it.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    kv_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    prefix: Prefix = ()
    user: int = 0
    remote: int = 0
    sends: bool = False
    target: int = field(init=False)
    shared_tokens: int = field(init=False)
    prefilled: int = field(default=0, init=False)
    # Its chunks, kept by the scheduler: their slot (-1: none), the first iteration of their span,
    # and the iteration after the span's last one so far.
    _group: int = field(default=-1, init=False)
    _span_first: int = field(default=0, init=False)
    _next_iteration: int = field(default=0, init=False)
    # Its place in the order of admission; the cohort it decodes in; its context minus the cohort's
    # iteration; chunk tokens in flight; tokens in flight from before a preemption; whether its
    # first token is in flight; the tokens it has blocks for while its prompt is processed; the
    # tokens that its last preemption lost.
    order: int = field(default=-1, init=False)
    cohort: Cohort | None = field(default=None, init=False)
    offset: int = field(default=0, init=False)
    awaited: int = field(default=0, init=False)
    stale: int = field(default=0, init=False)
    yielding: bool = field(default=False, init=False)
    held: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    # Of its tokens, those whose blocks count as known; with drafts, the tokens in flight that it
    # has yielded if every draft holds; and its drafted and accepted tokens so far.
    known: int = field(default=0, init=False)
    hoped: int = field(default=0, init=False)
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    arrived: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.target = self.prompt_tokens
        self.shared_tokens = self.prefix[-1][1] if self.prefix else 0

    @property
    def remaining_prompt(self) -> int:
        """Tokens to process before it decodes."""
        return self.target - self.prefilled

    def content(self, index: int, block_size: int) -> Hashable:
        """The content of its block ``index``: equal for sequences that agree up to the block's
        end."""
        end = (index + 1) * block_size
        if end > self.shared_tokens:
            return (self, index)
        return (self.prefix[bisect_left(self.prefix, end, key=_until)][0], index)

    def __repr__(self) -> str:
        return f"Sequence({self.id}, prompt={self.prefilled}/{self.target})"


@dataclass(slots=True, eq=False)
class Cohort:
    """Sequences of one slot that decode together, counted so that an iteration costs the same
    whatever their number.

    Every iteration each member's context grows by one token, so a member's context minus
    ``iteration`` stays constant (its ``offset``). Which members open a new KV block in an iteration
    depends only on ``(offset + iteration) mod block_size``: they are kept by that phase.

    ``iteration``   number of the next iteration to be formed
    ``outstanding`` iterations in flight
    ``opens``       the scheduling step from which on the next iteration may be formed
    ``context``     KV tokens of the members before the next iteration, summed
    ``members``     in the order of joining, each with the first iteration it decodes in
    ``keys``        returns the members alone
    ``offsets``     of the members, ascending (moving the tail of a short list is quicker than
                    keeping a heap)
    ``stops``       by iteration, the members whose tokens are all scheduled by then
    ``drained``     the :meth:`part` of sequences that stopped decoding, because all their tokens
                    are scheduled, and wait for the last one to return
    """

    index: int
    _block_size: int
    iteration: int = 0
    outstanding: int = 0
    opens: int = 0
    context: int = 0
    members: dict[Sequence, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    stops: dict[int, list[Sequence]] = field(default_factory=dict)
    drained: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    keys: Callable[[], KeysView[Sequence]] = field(init=False)
    _phases: list[dict[Sequence, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = self.members.keys
        self._phases = [{} for _ in range(self._block_size)]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    def context_of(self, sequence: Sequence) -> int:
        """KV tokens of a member before the next iteration, or of a drained sequence at its end."""
        stop = self.part(sequence)[1] if self.drained else self.iteration
        return sequence.offset + stop

    def part(self, sequence: Sequence) -> tuple[int, int]:
        """The first iteration in which a member or drained sequence decodes here, and the iteration
        after its last one so far."""
        return self.drained.get(sequence) or (self.members[sequence], self.iteration)

    def at_block_end(self, ahead: int = 0) -> dict[Sequence, None]:
        """Members whose context is a multiple of the block size, ``ahead`` iterations from now."""
        return self._phases[(self.iteration + ahead) % self._block_size]

    def join(self, sequence: Sequence, context: int) -> None:
        """Let a sequence that holds ``context`` tokens decode from the next iteration on."""
        self.members[sequence] = self.iteration
        self.context += context
        offset = sequence.offset = context - self.iteration
        insort(self.offsets, offset)
        if self._phases:
            self._phases[-offset % self._block_size][sequence] = None

    def drain(self, sequence: Sequence) -> None:
        """Stop a member's decoding; it leaves later."""
        self.drained[sequence] = self.leave(sequence)

    def leave(self, sequence: Sequence) -> tuple[int, int]:
        """Take a member or a drained sequence out; returns its :meth:`part`."""
        if self.drained and (part := self.drained.pop(sequence, None)):
            return part
        offset, iteration = sequence.offset, self.iteration
        self.context -= offset + iteration
        del self.offsets[bisect_left(self.offsets, offset)]
        if self._phases:
            del self._phases[-offset % self._block_size][sequence]
        return self.members.pop(sequence), iteration

    def members_at(self, iteration: int) -> list[Sequence]:
        """The members that decode in ``iteration``."""
        return [sequence for sequence, first in self.members.items() if first <= iteration]
