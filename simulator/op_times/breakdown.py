"""What each op took in the recorded iterations, recovered from the columns after the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from profiler.facts.ops import OPS
from simulator.loop.records import Floats, Ints, ReplicaLog
from simulator.op_times.predictor import BundlePredictor


@dataclass(frozen=True)
class OpUse:
    """One op in the recorded iterations.

    ``time_s`` is its part of the layer's (first stage's, last stage's, transfer's) time and
    ``size`` what it is a function of: shape (iterations, 1 or 2), in the units of the bundle's
    columns. Rows of iterations without the op hold time 0 and sizes without meaning.
    """

    time_s: Floats
    size: Floats


def breakdown(log: ReplicaLog, predict: BundlePredictor) -> dict[str, OpUse]:
    """Every op's use, by name. The layer's ops add up to ``layer_s`` (``others`` once a layer).

    Linear ops and all-reduces are known from the token rows, decode attention from the decodes and
    their mean context. What remains of a layer is prefill attention where there are chunks (whose
    sizes are the *mean* chunk and its mean context), with what mixing adds; else decode attention
    (unequal contexts). What a whole layer takes beyond its ops is in ``others``.
    """
    ops, layer, columns = predict.ops, predict.layer, log.iterations
    decodes, chunks = columns["decodes"], columns["chunks"]
    tokens = columns["prefill_tokens"] + decodes
    used: dict[str, OpUse] = {}
    for op, times in ops.linear.items():
        extra_s = layer.extra_s if OPS[op].rest else 0.0
        time_s = layer.scale * _by_token(times, tokens) + extra_s
        used[op] = OpUse(time_s, tokens[:, None])
    num_bytes = tokens * ops.model.hidden_size * ops.dtype_bytes
    if ops.all_reduce is not None:
        used["all_reduce"] = OpUse(2 * _by_token(ops.all_reduce, num_bytes), num_bytes[:, None])
    mean_context = columns["decode_context"] / np.maximum(decodes, 1)
    attention = predict.decode_s(decodes, mean_context)
    known = sum((use.time_s for use in used.values()), attention)
    rest = np.maximum(columns["layer_s"] - known, 0)
    attention = attention + np.where((chunks == 0) & (decodes > 0), rest, 0)
    used["attn_decode"] = OpUse(attention, np.stack([decodes, mean_context], axis=1))
    size = np.stack([columns["prefill_tokens"], columns["prefill_context"]], axis=1)
    used["attn_prefill"] = OpUse(
        np.where(chunks > 0, rest, 0), size / np.maximum(chunks, 1)[:, None]
    )
    used["embedding"] = OpUse(columns["first_s"], tokens[:, None])
    # The prompts that end in a batch are not recorded apart from the chunks.
    used["lm_head"] = OpUse(columns["last_s"], (decodes + chunks)[:, None])
    used["send_recv"] = OpUse(columns["send_s"], (num_bytes / ops.tp)[:, None])
    return used


def whole_layer(log: ReplicaLog, used: dict[str, OpUse]) -> OpUse:
    """A layer without its all-reduces, as bundles time whole ones; ``used`` is its breakdown."""
    columns = log.iterations
    reduce_s = used["all_reduce"].time_s if "all_reduce" in used else 0.0
    tokens = columns["prefill_tokens"] + columns["decodes"]
    return OpUse(columns["layer_s"] - reduce_s, tokens[:, None])


def distinct_sizes(sizes: Floats) -> tuple[Floats, Ints]:
    """The distinct rows of ``sizes``, rounded to whole numbers, and which of them each row is."""
    whole = np.round(sizes).astype(np.int64)
    # As one number a row: np.unique over rows takes ten times as long.
    span = int(whole[:, -1].max(initial=0)) + 1
    key = whole[:, 0] * span + whole[:, -1]
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return whole[first].astype(np.float64), which.astype(np.int64)


def _by_token(times: Callable[[Floats], Floats], sizes: Floats) -> Floats:
    distinct, which = np.unique(sizes, return_inverse=True)
    return np.asarray(times(distinct)[which], np.float64)
