"""The time of a run in parts, which add up to its wall clock and to the mean latency.

Durations are whole quanta, so the sums here are sums of integers and close exactly. Two breakdowns
answer two questions:

*Of the stages' time* (per stage, averaged over stages and replicas), which adds up to the wall
clock: the bubble ledger, with ``busy`` divided into ops.

*Of the requests' latency* (the mean over those that finished): the engine's frontend; queueing;
for each micro-batch of a request, the ops of the whole micro-batch, its transfers, and its waits
for a stage that another micro-batch occupies, or for the slowest rank of its step; and the time
until the request's next micro-batch.

Of one layer's recorded time, ``linear`` is the linear ops and others, ``mixing``
the extra time of a chunk and decodes in one batch, and ``prefill_attention`` the rest. ``chunking``
is the prefill attention beyond that of the same prompts taken whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sarathi_sim.profiler.facts.ops import (
    ALL_REDUCE,
    ATTENTION,
    DECODE,
    OPS,
    PREFILL,
    SEND_RECV,
    with_account,
)
from ..loop.clock import QUANTUM_S
from ..loop.records import Floats, Ints, ReplicaLog
from ..op_times.iteration import FIRST, LAST, MIXING, IterationCost
from ..op_times.predictor import ROWS_OF, BundlePredictor
from .ledger import ACCOUNTS, WAITS, Spans
from .metrics import Analysis


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
    """Extra seconds of a layer for a chunk and decodes in one batch; ``used`` is its breakdown. The
    breakdown counts them as prefill attention."""
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


# A layer's accounts: those computed from its rows, then decodes; prefill attention is the rest.
_ROWS = [op.account for op in OPS.values() if op.part == "layer" and op.name not in ATTENTION]
_KNOWN = tuple(dict.fromkeys([*_ROWS, "decode_attention"]))
_LINEAR, *_BESIDE = (name for name in _KNOWN if name != "decode_attention")
OP_ACCOUNTS = (
    *(_LINEAR, "prefill_attention", "decode_attention", MIXING, *_BESIDE),
    "embedding_and_head",
    "drafter",
    "host",
)
STAGE_PARTS = (*OP_ACCOUNTS, "chunking", "jitter", "sending", *WAITS, "fill", "drain", "no_work")
LATENCY_PARTS = (
    "frontend",
    "queueing",
    *OP_ACCOUNTS,
    "jitter",
    "transfers",
    "waiting_for_stages",
    "slowest_rank",
    "between_iterations",
)

Parts = dict[str, Fraction]


@dataclass(frozen=True)
class Explanation:
    """Exact seconds. ``stages`` adds up to ``wall``, ``latency`` to ``mean_latency``."""

    wall: Fraction
    stages: Parts
    mean_latency: Fraction
    latency: Parts


def explain(analysis: Analysis, predict: BundlePredictor) -> Explanation:
    """Divide a run's time. ``predict`` is the predictor of its simulation."""
    records = analysis.records
    logs = records.replicas
    stages = sum(log.num_stages for log in logs)
    totals = dict.fromkeys(STAGE_PARTS, 0)
    latency = dict.fromkeys(LATENCY_PARTS, 0)
    spent = 0
    for log, spans, split in zip(logs, analysis.spans, analysis.gaps, strict=True):
        if not log.num_iterations:
            continue
        parts = _iteration_parts(log, predict)
        busy = _quanta(log.stage_durations()).sum(axis=1)
        parts["jitter"] = busy - sum(parts[name] for name in OP_ACCOUNTS)
        for name, per_iteration in parts.items():
            totals[name] += int(per_iteration.sum())
        totals["chunking"] += _chunking(parts, analysis, spans, log, predict)
        times = split.times
        start = _quanta(times.start[:, 0])
        inside = _quanta(times.finish[:, -1]) - start
        parts["transfers"] = (log.num_stages - 1) * _quanta(log.iterations["send_s"])
        waited = log.waited_s if log.waited_s is not None else np.zeros(log.num_iterations)
        parts["slowest_rank"] = _quanta(waited)
        parts["waiting_for_stages"] = inside - busy - parts["transfers"] - parts["slowest_rank"]
        for name, per_iteration in parts.items():
            latency[name] += int(_along(spans, per_iteration).sum())
        row = np.searchsorted(records.request_id, spans.requests)
        arrival = _quanta(records.arrival_s[row])
        latency["queueing"] += int((start[spans.first_row()] - arrival).sum())
        spent += int((_quanta(spans.finish_s()) - arrival).sum())
    totals["prefill_attention"] -= totals["chunking"]
    latency["between_iterations"] = spent - sum(latency.values())
    for name in ACCOUNTS:
        if name != "busy":
            column = analysis.ledger[f"{name}_s"].to_numpy(np.float64)
            totals[name] += sum(int(quanta) for quanta in _quanta(column))
    finished = int((records.replica >= 0).sum())
    frontend = Fraction(records.frontend_s if finished else 0)
    finished = max(finished, 1)
    return Explanation(
        wall=_seconds(int(_quanta(np.array([records.end_s]))[0]), 1),
        stages={name: _seconds(value, stages) for name, value in totals.items()},
        mean_latency=_seconds(spent, finished) + frontend,
        latency={name: _seconds(value, finished) for name, value in latency.items()}
        | {"frontend": frontend},
    )


def _iteration_parts(log: ReplicaLog, predict: BundlePredictor) -> dict[str, Ints]:
    """The predicted time of every micro-batch by op, over all stages, in quanta."""
    columns, used = log.iterations, breakdown(log, predict)
    with_chunks = columns["prefill_tokens"] > 0
    left = _quanta(columns["layer_s"])
    parts: dict[str, Ints] = {MIXING: _quanta(mixing_s(log, predict, used))}
    left = left - parts[MIXING]
    for name in _KNOWN:
        times = (used[op].time_s for op in with_account(name) if op in used)
        # Parts are rounded one by one, so their sum may exceed the whole by a quantum.
        parts[name] = np.minimum(_quanta(sum(times, np.zeros(log.num_iterations))), left)
        left = left - parts[name]
    parts["decode_attention"] += np.where(with_chunks, 0, left)
    parts["prefill_attention"] = np.where(with_chunks, left, 0)
    found: dict[str, Ints] = {name: sum(log.layers) * quanta for name, quanta in parts.items()}
    sequences = (columns["decodes"] + columns["chunks"]).astype(np.int64)
    found["host"] = _quanta(predict.host_s(sequences))
    # The drafter's is the rest beside the model's own LM head, as if every chunk ended its prompt.
    last_s = columns["last_s"]
    head_s = last_s
    if predict.drafter is not None:
        head_s = np.minimum(predict.cost.last_s(sequences + columns["drafts"]), last_s)
    found["drafter"] = _quanta(last_s - head_s)
    beside = _quanta(columns["first_s"] + last_s) - found["drafter"]
    found["embedding_and_head"] = beside - found["host"]
    return found


def _chunking(
    parts: dict[str, Ints],
    analysis: Analysis,
    spans: Spans,
    log: ReplicaLog,
    predict: BundlePredictor,
) -> int:
    """Quanta of prefill attention beyond that of the replica's prompts taken whole, each alone."""
    records = analysis.records
    prompts = records.prompt_tokens[np.searchsorted(records.request_id, spans.requests)]
    whole = _quanta(predict.whole_prompt_s(prompts))
    return int(parts["prefill_attention"].sum()) - sum(log.layers) * int(whole.sum())


def _quanta(seconds: Floats) -> Ints:
    """Whole quanta as integers: a double could not hold the sum over all requests."""
    return np.asarray(np.rint(seconds / QUANTUM_S), np.int64)


def _along(spans: Spans, per_iteration: Ints) -> Ints:
    """Sum of integers over the iterations that each request took part in."""
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_iteration[spans.by_group])])
    along = until[spans.last + 1] - until[spans.first]
    return np.asarray(np.add.reduceat(along, spans.starts))


def _seconds(quanta: int, among: int) -> Fraction:
    return Fraction(quanta, among * round(1 / QUANTUM_S))
