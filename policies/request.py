"""What arrives, and what a policy may know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request, as the workload describes it.

    ``output_tokens`` is the true number of tokens it will generate. Only the scheduler's
    book-keeping and the engine read it; a policy is handed a :class:`Sequence`, which carries
    the declared ``max_tokens`` instead (invariant 6).

    Token convention (used everywhere): the iteration that finishes the prompt yields the first
    output token, and each decode yields one more, so a request takes ``output_tokens - 1`` decodes
    and processes ``prompt_tokens + output_tokens - 1`` tokens in all (invariant 1).
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int

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


class Sequence:
    """A request as policies see it: prompt, declared limit, and how much of the prompt is done.

    ``kv_tokens`` is what admitting it reserves in the KV cache, in tokens.
    """

    __slots__ = (
        "_first_ride",
        "_group",
        "_next_ride",
        "id",
        "kv_tokens",
        "max_tokens",
        "prefilled",
        "prompt_tokens",
    )

    def __init__(self, id: int, prompt_tokens: int, max_tokens: int, kv_tokens: int) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.kv_tokens = kv_tokens
        self.prefilled = 0
        # Where it rides, kept by the scheduler: the group (-1: none yet), and the first and next
        # iterations of the run of consecutive iterations it is in.
        self._group = -1
        self._first_ride = 0
        self._next_ride = 0

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens not processed yet."""
        return self.prompt_tokens - self.prefilled

    def __repr__(self) -> str:
        return f"Sequence({self.id}, prompt={self.prefilled}/{self.prompt_tokens})"
