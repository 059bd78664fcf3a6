"""Where the time of a run went, in parts that add up: to its makespan, and to a request's latency.

Durations are whole quanta, so the sums here are sums of integers and close exactly. Two breakdowns
answer two questions:

*Of the stages' time* (per stage, averaged over stages and replicas), which adds up to the wall
clock: the bubble ledger, with ``busy`` divided into ops.

*Of the requests' latency* (the mean over those that finished): queueing, then for each micro-batch
that a request rode in the ops of the whole micro-batch, its transfers, its waits for a stage that
another micro-batch occupied, and the time from one micro-batch to the request's next one.

Of one layer's recorded time, ``linear`` is the linear ops and others at the micro-batch's token
rows, ``all_reduce`` its collectives, ``decode_attention`` that of its decodes, and
``prefill_attention`` what is left (with what a mixed batch costs beyond the sum of its parts).
``chunking`` is the prefill attention beyond what the same prompts would take whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from simulator.ledger import ACCOUNTS, WAITS
from simulator.metrics import Analysis
from simulator.quantum import QUANTUM_S, quantize
from simulator.records import Floats, Ints, ReplicaLog
from simulator.regression import OpTimes
from simulator.rides import Rides

OPS = ("linear", "prefill_attention", "decode_attention", "all_reduce", "embedding_and_head")
STAGE_PARTS = (
    *("linear", "prefill_attention", "chunking", "decode_attention", "all_reduce"),
    *("embedding_and_head", "jitter", "sending", *WAITS, "fill", "drain", "no_work"),
)
LATENCY_PARTS = ("queueing", *OPS, "jitter", "transfers", "waiting_for_stages", "between_iterations")

Parts = dict[str, Fraction]


@dataclass(frozen=True)
class Breakdown:
    """Seconds, exactly. ``stages`` adds up to ``wall``, ``latency`` to ``mean_latency``."""

    wall: Fraction
    stages: Parts
    mean_latency: Fraction
    latency: Parts


def breakdown(analysis: Analysis, ops: OpTimes) -> Breakdown:
    """Divide a run's time. ``ops`` are the op times it was simulated with."""
    records = analysis.records
    logs = records.replicas
    stages = sum(log.num_stages for log in logs)
    totals = dict.fromkeys(STAGE_PARTS, 0)
    latency = dict.fromkeys(LATENCY_PARTS, 0)
    spent = 0
    for log, rides, split in zip(logs, analysis.rides, analysis.gaps, strict=True):
        if not log.num_iterations:
            continue
        parts = _iteration_parts(log, ops)
        busy = _quanta(log.stage_durations()).sum(axis=1)
        parts["jitter"] = busy - sum(parts[name] for name in OPS)
        for name, per_iteration in parts.items():
            totals[name] += int(per_iteration.sum())
        totals["chunking"] += _chunking(parts, analysis, rides, log, ops)
        times = split.times
        start = _quanta(times.start[:, 0])
        inside = _quanta(times.finish[:, -1]) - start
        parts["transfers"] = (log.num_stages - 1) * _quanta(log.iterations["send_s"])
        parts["waiting_for_stages"] = inside - busy - parts["transfers"]
        for name, per_iteration in parts.items():
            latency[name] += int(_along(rides, per_iteration).sum())
        row = np.searchsorted(records.request_id, rides.requests)
        arrival = _quanta(records.arrival_s[row])
        latency["queueing"] += int((start[rides.first_row()] - arrival).sum())
        spent += int((_quanta(rides.finish_s()) - arrival).sum())
    totals["prefill_attention"] -= totals["chunking"]
    latency["between_iterations"] = spent - sum(latency.values())
    for name in ACCOUNTS:
        if name != "busy":
            column = analysis.ledger[f"{name}_s"].to_numpy(np.float64)
            totals[name] += sum(int(quanta) for quanta in _quanta(column))
    finished = max(int((records.replica >= 0).sum()), 1)
    return Breakdown(
        wall=_seconds(int(_quanta(np.array([records.end_s]))[0]), 1),
        stages={name: _seconds(value, stages) for name, value in totals.items()},
        mean_latency=_seconds(spent, finished),
        latency={name: _seconds(value, finished) for name, value in latency.items()},
    )


def _iteration_parts(log: ReplicaLog, ops: OpTimes) -> dict[str, Ints]:
    """The predicted time of every micro-batch by op, over all stages, in quanta."""
    columns = log.iterations
    decodes = columns["decodes"]
    tokens = (columns["prefill_tokens"] + decodes).astype(np.int64)
    layer = _quanta(columns["layer_s"])
    linear = _by_size(lambda m: sum((op(m) for op in ops.linear.values()), np.zeros(len(m))), tokens)
    linear = np.minimum(linear, layer)
    reduce = ops.all_reduce
    collectives = np.zeros_like(layer)
    if reduce is not None:
        width = ops.model.hidden_size * ops.dtype_bytes
        collectives = np.minimum(_by_size(lambda m: 2 * reduce(m * width), tokens), layer - linear)
    rest = layer - linear - collectives
    decode = rest.copy()
    mixed = np.flatnonzero(columns["prefill_tokens"] > 0)
    alone = np.zeros(len(mixed))
    with_decodes = decodes[mixed] > 0
    rows = mixed[with_decodes]
    alone[with_decodes] = ops.decode(decodes[rows], columns["decode_context"][rows] / decodes[rows])
    decode[mixed] = np.minimum(_quanta(quantize(alone)), rest[mixed])
    layers = sum(log.layers)
    return {
        "linear": layers * linear,
        "prefill_attention": layers * (rest - decode),
        "decode_attention": layers * decode,
        "all_reduce": layers * collectives,
        "embedding_and_head": _quanta(columns["first_s"] + columns["last_s"]),
    }


def _chunking(
    parts: dict[str, Ints], analysis: Analysis, rides: Rides, log: ReplicaLog, ops: OpTimes
) -> int:
    """Quanta of prefill attention beyond that of the replica's prompts taken whole."""
    records = analysis.records
    prompts = records.prompt_tokens[np.searchsorted(records.request_id, rides.requests)]
    whole = _by_size(lambda tokens: ops.prefill(tokens, 0), prompts)
    return int(parts["prefill_attention"].sum()) - sum(log.layers) * int(whole.sum())


def _by_size(time_s: object, sizes: Ints) -> Ints:
    """Quanta at each size; every distinct size is asked for once."""
    assert callable(time_s)
    distinct, place = np.unique(sizes, return_inverse=True)
    return np.asarray(_quanta(quantize(np.asarray(time_s(distinct), np.float64)))[place], np.int64)


def _quanta(seconds: Floats) -> Ints:
    """Whole quanta as integers: those of all requests together are more than a double holds."""
    return np.asarray(np.rint(seconds / QUANTUM_S), np.int64)


def _along(rides: Rides, per_iteration: Ints) -> Ints:
    """Sum of integers over the iterations that each request took part in."""
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_iteration[rides.by_group])])
    along = until[rides.last + 1] - until[rides.first]
    return np.asarray(np.add.reduceat(along, rides.starts))


def _seconds(quanta: int, among: int) -> Fraction:
    return Fraction(quanta, among * round(1 / QUANTUM_S))
