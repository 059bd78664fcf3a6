"""The time of a batch, and of a step of ranks: dense tables, filled once from the op times."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sarathi_sim.policies.batch import Batch
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from ..loop.clock import QUANTUM_S, ROUNDER, quantize
from ..loop.group import Step
from ..loop.records import Floats, Ints
from ..loop.replica import Nominal
from .iteration import (
    NO_HOST,
    HostTime,
    IterationCost,
)
from .op_times import SUM, OpTimes

ROW_STEP, MOST_POINTS = 32, 1024
"""Tokens of context between two points of an attention row (more for very long contexts)."""

CHUNK_BLOCK = 32
_SAVED_BLOCK = 1024  # a call takes 5 ms, a size 4 us
"""Chunk sizes whose rows are tabulated at a time."""


@dataclass(frozen=True)
class TableSizes:
    """The sizes of a predictor's tables: row counts up to ``tokens`` at least, contexts up to
    ``max_length``, and up to ``sequences`` in a micro-batch. They grow when a batch needs more.

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
    def token_rows(self) -> int:
        """Row counts: a power of two, so that workloads share them."""
        return _power_of_two(self.tokens)

    @property
    def whole_prompts(self) -> int:
        """Lengths of prompts processed whole: a power of two, so that workloads share them."""
        if self.max_prompt is None:
            return self.max_length
        return min(self.max_length, _power_of_two(self.max_prompt))

    @property
    def decode_points(self) -> int:
        """Points of the decodes' table."""
        return self.sequences * self.row_points

    @property
    def chunk_points(self) -> int:
        """Points of the chunks' rows; a run computes only the rows that it needs."""
        return self.chunk_blocks * CHUNK_BLOCK * self.row_points


NOTHING: Nominal = (0.0, 0.0, 0.0, 0.0)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class BundlePredictor:
    """Times a :class:`~sarathi_sim.policies.batch.Batch`.

    It tabulates :class:`~sarathi_sim.simulator.op_times.iteration.IterationCost`. One layer of a
    batch with M token rows takes the linear ops and elementwise ones of M tokens (fused over chunks
    and decodes), two all-reduces of M * hidden numbers (TP > 1), the attention of each chunk, and
    one attention of all decodes. The first stage adds the embedding of M tokens and the time of the
    ``host``, the last the LM head for the rows that yield a token. Each rank sends M * hidden / TP
    numbers to the next stage. Where calls of several chunks were measured, each chunk takes its
    share of such a call (:mod:`sarathi_sim.simulator.op_times.op_times`).

    A decode with drafts has a row for its token and for each draft in all linear ops, in the
    experts and in the LM head. Its attention is assumed to read the KV cache once: it takes the
    larger of what plain decodes take, and of the FLOPs of all its queries. (Recurrent states are
    read and written once, too.) The time of the ``drafter`` is added on the last stage.

    If the bundle timed whole layers, ``layer_time`` "measured" corrects this sum by them, also for
    the extra time of a chunk and decodes in one batch
    (:mod:`sarathi_sim.simulator.op_times.interaction`); "sum" does not. A layer with chunks takes
    at least the time in which the ``host`` launches its kernels.

    ``max_tokens`` is the most token rows and ``max_batch`` the most decodes tabulated beforehand
    (more are tabulated when met), ``max_length`` the longest context, ``max_prompt`` the longest
    prompt (None: ``max_length``).
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
        host: HostTime = NO_HOST,
        drafter: Drafter | None = None,
    ) -> None:
        self.ops = ops
        self.drafter = drafter
        layer = ops.whole_layer if layer_time == "measured" else SUM
        self.layer = layer = replace(layer, both_s=float(quantize(layer.both_s)))
        self.cost = IterationCost(ops, layer, scope if num_stages > 1 else None, include_head, host)
        self._mixes = layer.mixes
        self._has_host = bool(host.iteration_s or host.sequence_s)
        self._launch_s = host.launch_layer_s
        size = TableSizes(max_tokens, max_length, max_batch, max_prompt)
        self._per_step = 1.0 / size.step
        self._contexts = (size.row_points, size.step)
        self._context_grid = _context_grid(*self._contexts)
        self._tabulate_tokens(size.token_rows)
        self._whole, self._chunk_rows = _prefill_rows(
            ops, max_length, size.whole_prompts, layer.scale
        )
        self._batches = ops.together.batches.tolist()
        self._saved = _saved_rows(self.cost)
        self._query: list[float] = []
        self._head: list[float] = []
        self._tabulate_decodes(max_batch)

    def __call__(self, batch: Batch) -> Nominal:
        """Seconds: one layer; extra on the first stage; extra on the last; transfer to the next."""
        chunks, decodes, drafts = batch.chunks, batch.num_decodes, batch.drafts
        rows = sequences = decodes
        if drafts:
            rows += drafts
        tokens = batch.prefill_tokens + rows
        if tokens > self._most_tokens:
            self._tabulate_tokens(2 * tokens)
        layer_s, first_s, send_s = self._by_tokens[tokens]
        if chunks:
            sequences += len(chunks)
            for sequence, chunk, context in chunks:
                if context:
                    row = self._chunk_rows.get(chunk) or self._tabulate_chunks(chunk)
                    position = context * self._per_step
                    low = int(position)
                    layer_s += row[low] + (row[low + 1] - row[low]) * (position - low)
                else:
                    layer_s += self._whole[chunk]
                if chunk + context == sequence.target:
                    rows += 1  # the last token of a prompt yields a token too
            if len(chunks) > 1 and self._batches:
                layer_s -= self._saved_s(batch)
        if sequences > self._most_sequences:
            self._tabulate_decodes(2 * sequences)
        if self._has_host:
            first_s += self._host[sequences]
        if decodes:
            row = self._decode_rows[decodes]
            position = batch.decode_context / decodes * self._per_step
            low = int(position)
            start = row[low]
            decode_s = start + (row[low + 1] - start) * (position - low)
            if self._skew:
                decode_s += self._skew[decodes] * (self._longest_s(batch) - decode_s)
            if drafts:
                decode_s = max(decode_s, (decodes + drafts) * self._query_s(position))
            layer_s += decode_s
            if chunks and self._mixes:
                layer_s += self.layer.mixing_s(layer_s - self._beside_ops[tokens], decode_s)
        if chunks and layer_s < self._launch_s:
            layer_s = self._launch_s
        last_s = self.head_s(rows) if drafts else self._head[rows]
        if self.drafter is not None:
            last_s += self.drafter([batch])[0]
        return (layer_s + ROUNDER) - ROUNDER, first_s, last_s, send_s

    def _longest_s(self, batch: Batch) -> float:
        """Decode attention where all contexts are as long as the longest."""
        row, position = self._decode_rows[batch.num_decodes], batch.longest_context * self._per_step
        low = int(position)
        start = row[low]
        return start + (row[low + 1] - start) * (position - low)

    def _query_s(self, position: float) -> float:
        """:meth:`~sarathi_sim.simulator.op_times.iteration.IterationCost.query_s` at a place
        between two points of an attention row."""
        if not self._query:
            self._query = self.cost.query_s(self._context_grid).tolist()
        low = int(position)
        start = self._query[low]
        return start + (self._query[low + 1] - start) * (position - low)

    def head_s(self, rows: int) -> float:
        """Seconds of the LM head for so many rows."""
        if rows >= len(self._head):
            self._head = _head_rows(self.cost, 2 * rows)
        return self._head[rows]

    def of_each(self, batches: Iterable[Batch | None]) -> list[Nominal]:
        """The times of many batches, zeros for None."""
        return [NOTHING if batch is None else self(batch) for batch in batches]

    def _saved_s(self, batch: Batch) -> float:
        """:meth:`~sarathi_sim.simulator.op_times.iteration.IterationCost.saved_s` of a batch."""
        tokens, whole = batch.prefill_tokens, self._whole
        saved = alone = longest = 0.0
        for _, chunk, _ in batch.chunks:
            row = self._saved.get(chunk) or self._tabulate_saved(chunk)
            gain, launch = row[bisect(self._batches, tokens // chunk)]
            saved += gain - launch / tokens
            time = whole[chunk]
            alone += time
            if time > longest:
                longest = time
        return min(saved, alone - longest)

    def decode_s(self, decodes: Floats, mean_context: Floats, drafts: Floats) -> Floats:
        """Seconds of decode attention of many batches at once, their contexts equal."""
        position = mean_context * self._per_step
        low, row = position.astype(np.intp), decodes.astype(np.intp)
        first, second = self._decode_table[row, low], self._decode_table[row, low + 1]
        read_s = np.asarray(first + (second - first) * (position - low))
        if not drafts.any():
            return read_s
        queries_s = (decodes + drafts) * self.cost.query_s(np.maximum(mean_context, 1.0))
        return np.where(drafts > 0, np.maximum(read_s, queries_s), read_s)

    def host_s(self, sequences: Ints) -> Floats:
        """Host seconds of iterations of ``sequences`` sequences; whole quanta."""
        return quantize(self.cost.host_s(sequences))

    def whole_prompt_s(self, tokens: Ints) -> Floats:
        """Seconds of attention of many prompts, each processed whole."""
        if tokens.max(initial=0) < len(self._whole):
            return np.array(self._whole)[tokens]
        distinct, which = np.unique(tokens, return_inverse=True)  # longer than any chunk may be
        whole = self.ops.prefill.table(distinct.astype(float), np.zeros(1))[:, 0]
        return np.asarray(self.layer.scale * whole[which])

    def _tabulate_chunks(self, chunk: int) -> list[float]:
        """Fill the rows of the block of chunk sizes around ``chunk``."""
        first = (chunk - 1) // CHUNK_BLOCK * CHUNK_BLOCK + 1
        sizes = np.arange(first, first + CHUNK_BLOCK)
        rows = self.layer.scale * self.ops.prefill.table(sizes.astype(float), self._context_grid)
        self._chunk_rows.update(zip(sizes.tolist(), rows.tolist(), strict=True))
        return self._chunk_rows[chunk]

    def _tabulate_saved(self, chunk: int) -> list[tuple[float, float]]:
        """The time that chunks of the sizes around ``chunk`` save in a batch with others."""
        first = (chunk - 1) // _SAVED_BLOCK * _SAVED_BLOCK + 1
        sizes = np.arange(first, min(first + _SAVED_BLOCK, len(self._whole)))
        alone_s = np.array(self._whole[first : first + _SAVED_BLOCK])
        rows = self.cost.saved(sizes.astype(float), alone_s).tolist()
        self._saved.update(zip(sizes.tolist(), rows, strict=True))
        return self._saved[chunk]

    def _tabulate_decodes(self, most: int) -> None:
        self._decode_table, self._decode_rows = _decode_rows(self.cost, most, *self._contexts)
        self._head = _head_rows(self.cost, most)
        self._most_sequences = most
        skew = self.ops.skew
        self._skew = [skew.of(max(1, batch)) for batch in range(most + 1)] if skew.share else []
        self._host = self.host_s(np.arange(most + 1)).tolist()

    def _tabulate_tokens(self, most: int) -> None:
        self._by_tokens, self._beside_ops = _token_rows(self.cost, most)
        self._most_tokens = len(self._by_tokens) - 1


OfEach = Callable[[Sequence[Batch | None]], list[Nominal]]
"""The times of the batches of ranks that run in lock-step."""


@dataclass(frozen=True)
class Drafter:
    """The time in which a drafter proposes ``length`` tokens for each sequence, one by one.

    ``of_each`` times a pass through its layers, of which there are ``layers``, for the batches of
    ranks that run in lock-step, or of one replica. The first pass takes all rows of the batch, as
    the drafter needs their KV, too, and ``slots`` more of each sequence
    (:class:`~sarathi_sim.policies.pool.Pool`); each further one a row of each sequence that yields
    a token. Every pass begins with the embedding of its rows, and ends with the LM head for those
    sequences. In each pass the experts see the tokens of all ranks; but the ranks wait for each
    other once, at the end of the whole draft, not in each of its layers. Source: vLLM 0.32,
    ``vllm/v1/spec_decode/``.
    """

    of_each: OfEach
    layers: int
    length: int
    slots: int = 0

    def __call__(self, batches: Sequence[Batch | None]) -> list[float]:
        """Seconds for each batch, whole quanta."""
        slots, rest = self.slots, self.length - 1
        if slots:
            batches = [batch and _with_rows(batch, slots) for batch in batches]
        further = [_one_more(batch) for batch in batches]
        passes = zip(self.of_each(batches), self.of_each(further), strict=True)
        return [
            self.layers * (first[0] + rest * more[0])
            + first[1]
            + rest * more[1]
            + self.length * more[2]
            for first, more in passes
        ]


def _with_rows(batch: Batch, rows: int) -> Batch:
    return replace(
        batch,
        chunks=tuple((sequence, chunk + rows, held) for sequence, chunk, held in batch.chunks),
        prefill_tokens=batch.prefill_tokens + rows * len(batch.chunks),
        drafts=batch.drafts + rows * batch.num_decodes,
    )


def _one_more(batch: Batch | None) -> Batch | None:
    """A decode of each sequence for which a batch yields a token; None if it yields none."""
    if batch is None:
        return None
    context, longest, sequences = batch.decode_context, batch.longest_context, batch.num_decodes
    for sequence, chunk, cached in batch.chunks:
        if sequence in batch.yields:
            sequences += 1
            context += chunk + cached
            longest = max(longest, chunk + cached)
    return Batch(batch.slot, (), 0, sequences, context, longest) if sequences else None


# All predictors of the same op times and sizes share these tables: a sweep makes hundreds.


def _context_grid(points: int, step: int) -> Floats:
    """The contexts of an attention row. The first point is one cached token. A context of 0 may run
    a faster kernel, so it has a table of its own."""
    return np.maximum(np.arange(points) * step, 1.0)


@lru_cache(maxsize=16)
def _token_rows(
    cost: IterationCost, most: int
) -> tuple[list[tuple[float, float, float]], list[float]]:
    """By number of token rows: layer, first stage and transfer; and the part of the layer without
    scale and mixing."""
    tokens = np.arange(1, most + 1)
    layer = sum(cost.layer_parts(tokens).values(), np.zeros(most))
    first, send = quantize(cost.first_s(tokens)), quantize(cost.transfer_s(tokens))
    table = np.stack([np.maximum(layer, QUANTUM_S), first, send])
    beside = [0.0, *cost.beside_s(tokens).tolist()]
    return [(0.0, 0.0, 0.0), *map(tuple, table.T.tolist())], beside


@lru_cache(maxsize=16)
def _decode_rows(
    cost: IterationCost, most: int, points: int, step: int
) -> tuple[Floats, list[list[float]]]:
    sizes, contexts = np.arange(1.0, most + 1), _context_grid(points, step)
    decode = cost.layer.scale * cost.ops.decode.table(sizes, contexts)
    table = np.vstack([np.zeros(points), decode])
    return table, table.tolist()


@lru_cache(maxsize=16)
def _head_rows(cost: IterationCost, most: int) -> list[float]:
    return [0.0, *quantize(cost.last_s(np.arange(1.0, most + 1))).tolist()]


@lru_cache(maxsize=16)
def _prefill_rows(
    ops: OpTimes, max_length: int, whole_prompts: int, scale: float
) -> tuple[list[float], dict[int, list[float]]]:
    """Times of prompts processed whole (context 0), by tokens; and the chunk rows so far."""
    whole = scale * ops.prefill.table(np.arange(1.0, whole_prompts + 1), np.zeros(1))
    return [0.0, *whole[:, 0].tolist()], {}


@lru_cache(maxsize=16)
def _saved_rows(cost: IterationCost) -> dict[int, list[tuple[float, float]]]:
    """By chunk, the time it saves in a batch with others; empty at first."""
    return {}


ROWS_OF = {MOE: "all_tokens", ALL_TO_ALL: "most_tokens"}
"""The ops that the ranks share, and the column of a rank's log with their token rows."""


@lru_cache(maxsize=16)
def beside_experts(ops: OpTimes) -> OpTimes:
    """The op times of one rank where what the ranks share takes none."""
    return ops.scaled(dict.fromkeys(ROWS_OF, 0.0))


class GroupPredictor:
    """Times a step (a :class:`~sarathi_sim.simulator.loop.group.StepPredictor`) of ranks with
    data-parallel attention.

    The ranks meet in every layer: the experts compute the tokens of all ranks, and the exchange
    takes as long as that of the rank with most tokens. So one layer takes the longest of the ranks'
    other ops, each at its own tokens and contexts, plus the exchange and the experts once.
    Embedding, host and LM head take as long as those of the slowest rank. Of DeepEP's two modes the
    experts take that of the ranks' mean tokens, and the exchange that of the most: where these lie
    on either side of the limit, two modes are charged for one step.

    ``cost`` is that of an iteration with all its ops; ``alone`` times a rank's batch by
    :func:`beside_experts`, without the host's launches: a layer with chunks takes at least
    ``cost.host.launch_layer_s``, experts included. The passes of a ``drafter`` are each rank's own:
    the ranks wait for each other after the last one.
    """

    def __init__(
        self, cost: IterationCost, alone: BundlePredictor, drafter: Drafter | None = None
    ) -> None:
        self.cost = cost
        self.drafter = drafter
        self._alone = alone.of_each
        self._tables: dict[str, list[float]] = {}
        self._launch_s = float(quantize(cost.host.launch_layer_s))

    def __call__(self, step: Step) -> tuple[list[Nominal], Nominal]:
        """Seconds of each rank, if no other took longer, and of the step."""
        ranks, launch_s = self.of_each(step), self._launch_s
        if launch_s:
            for rank, batch in enumerate(step):
                if batch is not None and batch.chunks:
                    layer, first, last, send = ranks[rank]
                    ranks[rank] = max(layer, launch_s), first, last, send
        if self.drafter is not None:
            for rank, drafts_s in enumerate(self.drafter(step)):
                layer, first, last, send = ranks[rank]
                ranks[rank] = layer, first, last + drafts_s, send
        layer, first, last, send = map(max, zip(*ranks, strict=True))
        return ranks, (layer, first, last, send)

    def of_each(self, step: Step) -> list[Nominal]:
        """Seconds of each rank, if no other took longer, without the drafter."""
        tokens = [0 if batch is None else batch.num_tokens for batch in step]
        shared = self._shared(MOE, sum(tokens)) + self._shared(ALL_TO_ALL, max(tokens))
        alone = self._alone(step)
        return [(layer + shared, first, last, send) for layer, first, last, send in alone]

    def _shared(self, op: str, rows: int) -> float:
        """Seconds of an op that the ranks share, in a mean layer."""
        table = self._tables.get(op, [])
        if rows >= len(table):
            most = max(1024, 1 << (rows - 1).bit_length()) if rows else 1
            self._tables[op] = table = _shared_rows(self.cost, op, most)
        return table[rows]


@lru_cache(maxsize=64)
def _shared_rows(cost: IterationCost, op: str, most: int) -> list[float]:
    """By token rows, up to ``most``; zeros where the model has no such op."""
    if op not in cost.ops.by_rows:
        return [0.0] * (most + 1)
    return [0.0, *quantize(cost.op_s(op, np.arange(1, most + 1))).tolist()]
