"""One micro-batch: the scheduler forms it, the predictor times it, the engine executes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .request import Sequence

Chunk = tuple[Sequence, int, int]
"""A sequence, how many of its prompt tokens are processed, and how many are cached already."""


@dataclass(slots=True, eq=False)
class Batch:
    """One iteration of one micro-batch slot.

    ``slot``            number of the micro-batch slot
    ``chunks``          prefill chunks; their linear ops are fused with those of the decodes
    ``prefill_tokens``  tokens of the chunks, summed
    ``num_decodes``     sequences that process one token each
    ``decode_context``  KV tokens the decodes hold before this iteration, summed
    ``longest_context`` KV tokens of the decode with the longest context
    ``padding``         decodes that are finished sequences held as padding
    ``skip``            decoding members of the slot that sit this iteration out
    ``members``         returns the slot's decoding sequences: an engine that executes the batch
                        needs them, the predictor does not
    ``yields``          in a pool, sequences whose last chunk is in the batch: it yields a token
    ``iteration``       in a pool, number of the iteration within its slot
    ``verified``        with speculation, the decodes: each processes one token and its drafts
    ``drafts``          these drafts, summed
    """

    slot: int
    chunks: tuple[Chunk, ...]
    prefill_tokens: int
    num_decodes: int
    decode_context: int
    longest_context: int
    padding: int = 0
    skip: tuple[Sequence, ...] = ()
    members: Callable[[], Iterable[Sequence]] = tuple
    yields: tuple[Sequence, ...] = ()
    iteration: int = -1
    verified: tuple[Chunk, ...] = ()
    drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of the fused linear operations."""
        return self.prefill_tokens + self.num_decodes + self.drafts

    @property
    def decodes(self) -> list[Sequence]:
        """The sequences that decode. Valid until the batch is completed."""
        skipped = set(self.skip)
        return [s for s in self.members() if s not in skipped]
