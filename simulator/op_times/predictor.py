"""The time of a batch: dense tables, filled once from the regressions, looked up per batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from policies.batch import Batch
from simulator.loop.quantum import QUANTUM_S, ROUNDER, quantize
from simulator.loop.records import Floats, Ints
from simulator.op_times.iteration import SUM, IterationCost, counted_context
from simulator.op_times.regression import OpTimes

ROW_STEP, MOST_POINTS = 32, 1024
"""Attention rows hold a time every so many tokens of context, or coarser for very long ones."""

CHUNK_BLOCK = 32
"""Chunk sizes whose rows are tabulated at a time."""


@dataclass(frozen=True)
class TableSizes:
    """What a predictor tabulates: row counts up to ``tokens``, contexts up to ``max_length``, and
    up to ``sequences`` in a micro-batch. It tabulates more when a batch needs them.

    ``max_prompt`` is the longest prompt (None: ``max_length``), and ``chunk_blocks`` the largest
    number of blocks of chunk sizes.
    """

    tokens: int
    max_length: int
    sequences: int
    max_prompt: int | None = None
    chunk_blocks: int = 0

    @property
    def step(self) -> int:
        """Tokens of context between two points of an attention row."""
        return max(ROW_STEP, -(-self.max_length // MOST_POINTS))

    @property
    def row_points(self) -> int:
        """Points of an attention row."""
        return self.max_length // self.step + 2

    @property
    def whole_prompts(self) -> int:
        """Lengths of prompts processed whole: a power of two, so that workloads share them."""
        if self.max_prompt is None:
            return self.max_length
        return min(self.max_length, 1 << (self.max_prompt - 1).bit_length())

    @property
    def decode_points(self) -> int:
        """Points of the decodes' table."""
        return self.sequences * self.row_points

    @property
    def chunk_points(self) -> int:
        """Points of the chunks' rows; a run makes only those that it needs."""
        return self.chunk_blocks * CHUNK_BLOCK * self.row_points


class BundlePredictor:
    """Times a :class:`~policies.batch.Batch` from a bundle's regressions.

    It tabulates :class:`~simulator.op_times.iteration.IterationCost`. One layer of a batch with M
    token rows takes the linear ops and elementwise ones of M tokens (fused over chunks and
    decodes), two all-reduces of M * hidden numbers (TP > 1), the attention of each chunk, and one
    attention of all decodes. The first stage adds the embedding of M tokens, the last the LM head
    for the rows that yield a token. To the next stage goes M * hidden / TP numbers per rank.

    If the bundle timed whole layers, ``layer_time`` "measured" corrects this sum by them, also for
    the extra time of a chunk and decodes in one batch (:mod:`simulator.op_times.interaction`);
    "sum" does not.

    ``max_tokens`` is the most token rows and ``max_batch`` the most decodes tabulated beforehand
    (more are tabulated when met), ``max_length`` the longest context, ``max_prompt`` the longest
    prompt (None: that long).
    """

    def __init__(
        self,
        ops: OpTimes,
        *,
        max_tokens: int,
        max_length: int,
        max_batch: int,
        max_prompt: int | None = None,
        scope: str = "inter_node",
        num_stages: int = 1,
        include_head: bool = True,
        layer_time: str = "measured",
    ) -> None:
        self.ops = ops
        layer = ops.whole_layer if layer_time == "measured" else SUM
        self.layer = layer = replace(layer, both_s=float(quantize(layer.both_s)))
        self.cost = IterationCost(ops, layer, scope if num_stages > 1 else None, include_head)
        self._skew = ops.skew
        self._mixes = layer.mixes
        self._max_length = max_length
        size = TableSizes(max_tokens, max_length, max_batch, max_prompt)
        self._per_step = 1.0 / size.step
        # The first time is that of one cached token: none at all may be a faster kernel, and is
        # tabulated apart.
        self._context_grid = np.maximum(np.arange(size.row_points) * size.step, 1.0)
        self._by_tokens: list[tuple[float, float, float]] = []
        self._beside_ops: list[float] = []
        self._tabulate_tokens(max_tokens)
        self._whole, self._chunk_rows = _prefill_rows(
            ops, max_length, size.whole_prompts, layer.scale
        )
        self._decode_rows: list[list[float]] = []
        self._head: list[float] = []
        self._tabulate_decodes(max_batch)

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """Seconds: one layer; extra on the first stage; extra on the last; transfer to the next."""
        decodes = batch.num_decodes
        tokens = batch.prefill_tokens + decodes
        if tokens >= len(self._by_tokens):
            self._tabulate_tokens(2 * tokens)
        layer_s, first_s, send_s = self._by_tokens[tokens]
        rows = decodes
        if decodes + len(batch.chunks) >= len(self._head):
            self._tabulate_decodes(2 * (decodes + len(batch.chunks)))
        for sequence, chunk, context in batch.chunks:
            if context:
                row = self._chunk_rows.get(chunk) or self._tabulate_chunks(chunk)
                position = context * self._per_step
                low = int(position)
                layer_s += row[low] + (row[low + 1] - row[low]) * (position - low)
            else:
                layer_s += self._whole[chunk]
            if chunk + context == sequence.target:
                rows += 1  # the last token of a prompt yields a token too
        if decodes:
            row = self._decode_rows[decodes]
            position = batch.decode_context / decodes * self._per_step
            if self._skew:
                longest = batch.longest_context * self._per_step
                position = counted_context(position, longest, self._skew)
            low = int(position)
            decode_s = row[low] + (row[low + 1] - row[low]) * (position - low)
            layer_s += decode_s
            if self._mixes and batch.chunks:
                layer_s += self.layer.mixing_s(layer_s - self._beside_ops[tokens], decode_s)
        return (layer_s + ROUNDER) - ROUNDER, first_s, self._head[rows], send_s

    def decode_s(self, decodes: Floats, mean_context: Floats) -> Floats:
        """Seconds of decode attention of many batches at once, their contexts equal."""
        position = mean_context * self._per_step
        low, row = position.astype(np.intp), decodes.astype(np.intp)
        first, second = self._decode_table[row, low], self._decode_table[row, low + 1]
        return np.asarray(first + (second - first) * (position - low))

    def whole_prompt_s(self, tokens: Ints) -> Floats:
        """Seconds of attention of many prompts, each processed whole."""
        return np.array(self._whole)[tokens]

    def _tabulate_chunks(self, chunk: int) -> list[float]:
        """Fill the rows of the block of chunk sizes around ``chunk``."""
        first = (chunk - 1) // CHUNK_BLOCK * CHUNK_BLOCK + 1
        sizes = np.arange(first, first + CHUNK_BLOCK)
        rows = self.layer.scale * self.ops.prefill_table(sizes.astype(float), self._context_grid)
        self._chunk_rows.update(zip(sizes.tolist(), rows.tolist(), strict=True))
        return self._chunk_rows[chunk]

    def _tabulate_decodes(self, most: int) -> None:
        """Fill what depends on the number of sequences: decode attention, and the LM head."""
        ops, sizes = self.ops, np.arange(1.0, most + 1)
        # Row d: the time of d decodes by their mean context.
        decode = self.layer.scale * ops.decode_table(sizes, self._context_grid)
        self._decode_table = np.vstack([np.zeros(len(self._context_grid)), decode])
        self._decode_rows = self._decode_table.tolist()
        self._head = [0.0, *quantize(self.cost.last_s(sizes)).tolist()]

    def _tabulate_tokens(self, max_tokens: int) -> None:
        """Fill what depends on the number of token rows alone: layer, embedding, transfer."""
        cost, tokens = self.cost, np.arange(1, max_tokens + 1)
        layer = sum(cost.layer_parts(tokens).values(), np.zeros(max_tokens))
        first, send = quantize(cost.first_s(tokens)), quantize(cost.transfer_s(tokens))
        table = np.stack([np.maximum(layer, QUANTUM_S), first, send])
        self._beside_ops = [0.0, *cost.beside_s(tokens).tolist()]
        self._by_tokens = [(0.0, 0.0, 0.0), *map(tuple, table.T.tolist())]


@lru_cache(maxsize=8)
def _prefill_rows(
    ops: OpTimes, max_length: int, whole_prompts: int, scale: float
) -> tuple[list[float], dict[int, list[float]]]:
    """Times of prompts processed whole (context 0), by tokens; and the chunk rows tabulated so far.

    All predictors of the same op times and lengths share them: a sweep makes hundreds.
    """
    whole = scale * ops.prefill_table(np.arange(1.0, whole_prompts + 1), np.zeros(1))
    return [0.0, *whole[:, 0].tolist()], {}
