"""What arrives, and what a policy may know of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.cohort import Cohort

Prefix = tuple[tuple[Hashable, int], ...]
"""What a prompt shares with others: names, each with the token up to which it holds, ascending.

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
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: Prefix = ()
    user: int = 0

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
    number of tokens to process before it decodes: its prompt and, after a preemption, what it had
    generated. ``prefilled`` of them are processed.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    kv_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    prefix: Prefix = ()
    user: int = 0
    target: int = field(init=False)
    shared_tokens: int = field(init=False)
    prefilled: int = field(default=0, init=False)
    # Where it takes part, kept by the scheduler: the group (-1: none yet), the iteration that
    # its span began with, and the one after its last so far.
    _group: int = field(default=-1, init=False)
    _span_first: int = field(default=0, init=False)
    _next_iteration: int = field(default=0, init=False)
    # In a pool: its place in the order of admission; the cohort that it decodes in; its context
    # less that one's iteration; chunk tokens in flight; those of them from before a preemption;
    # whether its first token is on the way; the tokens that it has blocks for while its prompt
    # is processed.
    order: int = field(default=-1, init=False)
    cohort: Cohort | None = field(default=None, init=False)
    offset: int = field(default=0, init=False)
    awaited: int = field(default=0, init=False)
    stale: int = field(default=0, init=False)
    yielding: bool = field(default=False, init=False)
    held: int = field(default=0, init=False)

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
