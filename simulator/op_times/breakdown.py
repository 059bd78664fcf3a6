"""The time of each op in the recorded iterations, recovered from the columns after the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, PREFILL, SEND_RECV
from ..loop.records import Floats, Ints, ReplicaLog
from .iteration import FIRST, LAST, IterationCost
from .predictor import ROWS_OF, BundlePredictor


@dataclass(frozen=True)
class OpUse:
    """One op in the recorded iterations.

    ``time_s`` is its part of the time of the layer (first stage, last stage, transfer). ``size``
    holds the sizes that it depends on: shape (iterations, 1 or 2), in the units of the bundle's
    columns; ops of the same sizes share the array. Rows of iterations without the op hold time 0
    and sizes without meaning.
    """

    time_s: Floats
    size: Floats


def breakdown(log: ReplicaLog, predict: BundlePredictor) -> dict[str, OpUse]:
    """Every op's use, by name. The layer's ops add up to ``layer_s``.

    Linear ops and all-reduces follow from the token rows, decode attention from the decodes and
    their mean context. If there are chunks, the rest of a layer is prefill attention with the extra
    time of mixing, and the launch time that exceeds the kernels' time; its sizes are the
    *mean* chunk and its mean context. Else the rest is decode attention (unequal contexts). The
    time of a whole layer beyond its ops is in the op ``others``, and that of a drafter in the LM
    head. On a rank with data-parallel attention the experts' time is that of all ranks' tokens.
    """
    cost, columns = predict.cost, log.iterations
    decodes, chunks, drafts = columns["decodes"], columns["chunks"], columns["drafts"]
    tokens = columns["prefill_tokens"] + decodes + drafts
    rows, num_bytes = tokens[:, None], cost.num_bytes(tokens)[:, None]
    distinct, which = np.unique(tokens, return_inverse=True)  # empty iterations take no time
    used = {
        op: OpUse(
            np.where(distinct > 0, time_s, 0.0)[which], num_bytes if op == ALL_REDUCE else rows
        )
        for op, time_s in cost.layer_parts(distinct).items()
        if op in (*cost.ops.linear, ALL_REDUCE)
    }
    for op, column in ROWS_OF.items():  # on ranks: the rows of all of them, or of the largest
        if op in used and column in columns:
            distinct, which = np.unique(columns[column], return_inverse=True)
            time_s = np.where(distinct > 0, cost.op_s(op, distinct), 0.0)
            used[op] = OpUse(time_s[which], columns[column][:, None])
    mean_context = columns["decode_context"] / np.maximum(decodes, 1)
    attention = predict.decode_s(decodes, mean_context, drafts)
    known = sum((use.time_s for use in used.values()), attention)
    rest = np.maximum(columns["layer_s"] - known, 0)
    attention = attention + np.where((chunks == 0) & (decodes > 0), rest, 0)
    used[DECODE] = OpUse(attention, np.stack([decodes, mean_context], axis=1))
    size = np.stack([columns["prefill_tokens"], columns["prefill_context"]], axis=1)
    used[PREFILL] = OpUse(np.where(chunks > 0, rest, 0), size / np.maximum(chunks, 1)[:, None])
    # The log counts a batch's chunks, but not how many of them end their prompt.
    outputs = decodes + chunks
    embedding_s = columns["first_s"] - predict.host_s(outputs.astype(np.int64))
    used |= _divided(embedding_s, FIRST, rows, cost)
    used |= _divided(columns["last_s"], LAST, (outputs + drafts)[:, None], cost)
    used[SEND_RECV] = OpUse(columns["send_s"], num_bytes / cost.ops.tp)
    return used


def _divided(
    time_s: Floats, ops: tuple[str, ...], rows: Floats, cost: IterationCost
) -> dict[str, OpUse]:
    """The recorded time beside the layers of one stage, by op."""
    if len(ops) == 1:
        return {ops[0]: OpUse(time_s, rows)}
    alone = {op: cost.ops.by_rows[op](rows[:, 0]) for op in ops}
    share = time_s / sum(alone.values(), np.zeros(len(rows)))
    return {op: OpUse(share * own, rows) for op, own in alone.items()}


def mixing_s(log: ReplicaLog, predict: BundlePredictor, used: dict[str, OpUse]) -> Floats:
    """Extra seconds of a layer for a chunk and decodes in one batch; ``used`` is its breakdown.

    The breakdown counts them as prefill attention.
    """
    columns = log.iterations
    mixed = (columns["prefill_tokens"] > 0) & (columns["decodes"] > 0)
    tokens = columns["prefill_tokens"] + columns["decodes"] + columns["drafts"]
    ops_s = columns["layer_s"] - predict.cost.beside_s(tokens)
    return np.where(mixed, predict.layer.mixing_within_s(ops_s, used[DECODE].time_s), 0.0)


def whole_layer(log: ReplicaLog, used: dict[str, OpUse]) -> OpUse:
    """A layer without its all-reduces, as bundles time whole ones; ``used`` is its breakdown."""
    columns = log.iterations
    reduce_s = used[ALL_REDUCE].time_s if ALL_REDUCE in used else 0.0
    tokens = columns["prefill_tokens"] + columns["decodes"] + columns["drafts"]
    return OpUse(columns["layer_s"] - reduce_s, tokens[:, None])


def distinct_sizes(sizes: Floats) -> tuple[Floats, Ints]:
    """The distinct rows of ``sizes``, rounded to whole numbers, and each row's index in them."""
    whole = np.round(sizes).astype(np.int64)
    # As one number a row: np.unique over rows takes ten times as long.
    span = int(whole[:, -1].max(initial=0)) + 1
    key = whole[:, 0] * span + whole[:, -1]
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return whole[first].astype(np.float64), which.astype(np.int64)
