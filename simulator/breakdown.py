"""Where the time of a run went, in parts that add up: to its makespan, and to a request's latency.

Durations are whole quanta, so the sums here are sums of integers and close exactly. Two breakdowns
answer two questions:

*Of the stages' time* (per stage, averaged over stages and replicas), which adds up to the wall
clock: the bubble ledger, with ``busy`` divided into ops.

*Of the requests' latency* (the mean over those that finished): queueing, then for each micro-batch
that a request rode in the ops of the whole micro-batch, its transfers, its waits for a stage that
another micro-batch occupied, and the time from one micro-batch to the request's next one.

Of one layer's recorded time, ``linear`` is the linear ops and others at the micro-batch's token
rows, ``all_reduce`` its collectives, ``layer_overhead`` and ``mixing`` what layers take beyond
their ops (``interaction.py``), ``decode_attention`` that of its decodes, and ``prefill_attention``
what is left. ``chunking`` is the prefill attention beyond what the same prompts would take whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from simulator.interaction import SUM, WholeLayer
from simulator.ledger import ACCOUNTS, WAITS
from simulator.metrics import Analysis
from simulator.quantum import QUANTUM_S, quantize
from simulator.records import Floats, Ints, ReplicaLog
from simulator.regression import OpTimes
from simulator.rides import Rides

OPS = (
    *("linear", "prefill_attention", "decode_attention", "mixing", "all_reduce"),
    *("layer_overhead", "embedding_and_head"),
)
STAGE_PARTS = (
    *("linear", "prefill_attention", "chunking", "decode_attention", "mixing", "all_reduce"),
    *(
        "layer_overhead",
        "embedding_and_head",
        "jitter",
        "sending",
        *WAITS,
        "fill",
        "drain",
        "no_work",
    ),
)
LATENCY_PARTS = (
    "queueing",
    *OPS,
    "jitter",
    "transfers",
    "waiting_for_stages",
    "between_iterations",
)

Parts = dict[str, Fraction]


@dataclass(frozen=True)
class Breakdown:
    """Seconds, exactly. ``stages`` adds up to ``wall``, ``latency`` to ``mean_latency``."""

    wall: Fraction
    stages: Parts
    mean_latency: Fraction
    latency: Parts


def breakdown(analysis: Analysis, ops: OpTimes, layer: WholeLayer = SUM) -> Breakdown:
    """Divide a run's time. ``ops`` and ``layer`` are what it was simulated with."""
    records = analysis.records
    logs = records.replicas
    stages = sum(log.num_stages for log in logs)
    totals = dict.fromkeys(STAGE_PARTS, 0)
    latency = dict.fromkeys(LATENCY_PARTS, 0)
    spent = 0
    for log, rides, split in zip(logs, analysis.rides, analysis.gaps, strict=True):
        if not log.num_iterations:
            continue
        parts = _iteration_parts(log, ops, layer)
        busy = _quanta(log.stage_durations()).sum(axis=1)
        parts["jitter"] = busy - sum(parts[name] for name in OPS)
        for name, per_iteration in parts.items():
            totals[name] += int(per_iteration.sum())
        totals["chunking"] += _chunking(parts, analysis, rides, log, ops, layer.scale)
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


def _iteration_parts(log: ReplicaLog, ops: OpTimes, whole: WholeLayer) -> dict[str, Ints]:
    """The predicted time of every micro-batch by op, over all stages, in quanta."""
    columns = log.iterations
    decodes, layer_s = columns["decodes"], columns["layer_s"]
    tokens = (columns["prefill_tokens"] + decodes).astype(np.int64)
    mixed = np.flatnonzero((columns["prefill_tokens"] > 0) & (decodes > 0))
    decode_s = np.zeros(len(layer_s))
    mean_context = columns["decode_context"][mixed] / decodes[mixed]
    decode_s[mixed] = whole.scale * ops.decode(decodes[mixed], mean_context)

    def linear_s(sizes: Ints) -> Floats:
        return whole.scale * sum((op(sizes) for op in ops.linear.values()), np.zeros(len(sizes)))

    def reduce_s(sizes: Ints) -> Floats:
        if ops.all_reduce is None:
            return np.zeros(len(sizes))
        return 2 * ops.all_reduce(sizes * (ops.model.hidden_size * ops.dtype_bytes))

    beside_s = whole.extra_s + reduce_s(tokens[mixed])
    # layer = alone + both * (alone - beside) + decode * decode_attention, solved for alone.
    known = layer_s[mixed] + whole.both * beside_s - whole.decode * decode_s[mixed]
    mixing_s = np.zeros(len(layer_s))
    mixing_s[mixed] = layer_s[mixed] - known / (1 + whole.both)

    left = _quanta(layer_s)
    parts: dict[str, Ints] = {}
    overhead = np.full(len(left), _quanta(np.array([quantize(whole.extra_s)]))[0])
    for name, quanta in (
        ("mixing", _quanta(quantize(mixing_s))),
        ("linear", _by_size(linear_s, tokens)),
        ("all_reduce", _by_size(reduce_s, tokens)),
        ("layer_overhead", overhead),
    ):
        # What is rounded apart may exceed the whole by a quantum.
        parts[name] = np.minimum(quanta, left) if name != "mixing" else quanta
        left = left - parts[name]
    only_decodes = columns["prefill_tokens"] == 0
    attention = np.where(only_decodes, left, np.minimum(_quanta(quantize(decode_s)), left))
    parts |= {"decode_attention": attention, "prefill_attention": left - attention}
    found: dict[str, Ints] = {name: sum(log.layers) * quanta for name, quanta in parts.items()}
    found["embedding_and_head"] = _quanta(columns["first_s"] + columns["last_s"])
    return found


def _chunking(
    parts: dict[str, Ints],
    analysis: Analysis,
    rides: Rides,
    log: ReplicaLog,
    ops: OpTimes,
    scale: float,
) -> int:
    """Quanta of prefill attention beyond that of the replica's prompts taken whole."""
    records = analysis.records
    prompts = records.prompt_tokens[np.searchsorted(records.request_id, rides.requests)]
    whole = _by_size(lambda tokens: scale * ops.prefill(tokens, 0), prompts)
    return int(parts["prefill_attention"].sum()) - sum(log.layers) * int(whole.sum())


def _by_size(time_s: Callable[[Ints], Floats], sizes: Ints) -> Ints:
    """Quanta at each size; every distinct size is asked for once."""
    distinct, place = np.unique(sizes, return_inverse=True)
    return np.asarray(_quanta(quantize(time_s(distinct)))[place], np.int64)


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
