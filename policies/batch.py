"""One micro-batch: what the scheduler decided, the predictor times and the engine executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.request import Sequence

if TYPE_CHECKING:
    from policies.group import Group

Chunk = tuple[Sequence, int, int]
"""A sequence, how many of its prompt tokens are processed, and how many are cached already."""


class Batch:
    """One iteration of one group of sequences.

    ``chunks``          prefill chunks; their linear ops are fused with those of the decodes
    ``num_decodes``     sequences that process one token each
    ``decode_context``  KV tokens those hold before this iteration, summed
    ``longest_context`` KV tokens of the decode that holds the most
    ``padding``         how many of the decodes are finished sequences held as padding
    ``skip``            decoding members of the group that sit this iteration out
    """

    __slots__ = (
        "chunks",
        "decode_context",
        "group",
        "longest_context",
        "num_decodes",
        "padding",
        "prefill_tokens",
        "skip",
    )

    def __init__(
        self,
        group: Group,
        chunks: tuple[Chunk, ...],
        prefill_tokens: int,
        num_decodes: int,
        decode_context: int,
        longest_context: int,
        padding: int = 0,
        skip: tuple[Sequence, ...] = (),
    ) -> None:
        self.group = group
        self.chunks = chunks
        self.prefill_tokens = prefill_tokens
        self.num_decodes = num_decodes
        self.decode_context = decode_context
        self.longest_context = longest_context
        self.padding = padding
        self.skip = skip

    @property
    def num_tokens(self) -> int:
        """Rows of the fused linear operations."""
        return self.prefill_tokens + self.num_decodes

    @property
    def decodes(self) -> list[Sequence]:
        """The sequences that decode. Valid until the batch is completed."""
        skipped = set(self.skip)
        return [s for s in self.group.decoding if s not in skipped]
