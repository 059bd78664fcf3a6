"""A micro-batch as an engine's stages need it: block tables, lengths, token ids. No torch.

The scheduler speaks of sequences; the stages know only blocks of the KV cache.
:class:`~sarathi_sim.profiler.engine.book.Book` translates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.ops import names
from sarathi_sim.profiler.planning.journal import ProfileError

Words = npt.NDArray[np.int32]

#: What a stage times within its layers, summed over them.
TIMED_OPS = names(lambda op: op.part == "layer" and not op.rest)


Table = tuple[int, ...]
"""The KV blocks of a sequence, in the order of its tokens."""


class EngineError(ProfileError):
    """The engine cannot start or continue; the message says why."""


@dataclass(frozen=True)
class Work:
    """One micro-batch to execute; its rows are the chunks' tokens, then one for each decode.

    ``chunks``   ``(table, tokens, context, yields)``: ``yields`` is 1 where it ends its prompt
    ``decodes``  ``(table, context)``: the new token is written after ``context`` cached ones
    ``tokens``   the token id of every row, int32
    """

    index: int
    chunks: tuple[tuple[Table, int, int, int], ...]
    decodes: tuple[tuple[Table, int], ...]
    tokens: Words

    @property
    def num_tokens(self) -> int:
        """Rows of the fused linear ops."""
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Rows that yield a token."""
        return sum(chunk[3] for chunk in self.chunks) + len(self.decodes)

    def encode(self) -> Words:
        """As int32 words; :meth:`decode` is the inverse."""
        flat = [self.index, len(self.chunks), len(self.decodes)]
        for table, count, context, yields in self.chunks:
            flat += [count, context, yields, len(table), *table]
        for table, context in self.decodes:
            flat += [context, len(table), *table]
        return np.concatenate([np.array(flat, np.int32), self.tokens])

    @staticmethod
    def decode(words: Words) -> Work:
        """The work that :meth:`encode` wrote."""
        flat = words.tolist()
        index, num_chunks, num_decodes = flat[:3]
        at = 3

        def entry(numbers: int) -> tuple[Table, list[int]]:
            nonlocal at
            found, first = flat[at : at + numbers], at + numbers + 1
            at = first + flat[first - 1]
            return tuple(flat[first:at]), found

        chunks, decodes = [], []
        for _ in range(num_chunks):
            table, (count, context, yields) = entry(3)
            chunks.append((table, count, context, yields))
        for _ in range(num_decodes):
            table, (context,) = entry(1)
            decodes.append((table, context))
        return Work(index, tuple(chunks), tuple(decodes), words[at:])
