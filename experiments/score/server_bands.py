"""Bands of 90 % for predicted TTFT and TPOT: joint draws of everything that may be off.

A row's times are divided among the ops of its bundle, as they stand in the life of a request beside
its neighbours: its own prompt and the others' that run meanwhile, and its decodes. Each op's error
is drawn from the half-width of its kernels on rows left out of their fits, the host's from a factor
of two. What the errors of scored servers show beyond that is the error of the stack: its settings,
its version and its scheduler. It is calibrated on servers other than the row's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.config.deployment import Deployment
from experiments.score.errors import METRICS, ServerTimes
from experiments.score.measured import Measured
from simulator.confidence.bands import UNKNOWN
from simulator.loop.records import Floats
from simulator.op_times.iteration import LAST, HostTime, IterationCost

DRAWS = 512
"""Joint draws: an end of a 90 % band is then known to about a twentieth of its width."""
NORMAL_90 = 1.645
HOST = "host"
HOST_SIGMA = float(np.log(2)) / NORMAL_90
"""Of the host's time: a factor of two either way. Assumed."""
LARGEST_SIGMA = 2.0


@dataclass(frozen=True)
class OpShares:
    """The shares of ops and host in a metric's time, and the standard deviations of the logarithm
    of each op's time; both by op, ``shares`` by metric."""

    shares: Mapping[str, Mapping[str, float]]
    sigmas: Mapping[str, float]


def op_shares(deployment: Deployment, row: Measured) -> OpShares:
    """Of one row. A request decodes ``osl`` tokens beside ``concurrency`` others (or as many as fit
    into the memory), and meanwhile each of them processes one prompt."""
    engine, meta = deployment.scenario.engine, deployment.ops.bundle.meta
    host = HostTime(engine.host_iteration_s or 0.0, engine.host_sequence_s or 0.0)
    cost = IterationCost(deployment.ops, host=host)
    context = row.isl + row.osl / 2
    fitting = max(1, int(deployment.kv_capacity // (row.isl + row.osl)))
    beside = float(min(row.concurrency, fitting))
    layers = sum(deployment.layers)
    none, chunk = np.zeros(1), np.array([float(row.isl)])
    batch = np.array([beside])

    def parts(
        rows: Floats, prefill_s: Floats, decode_s: Floats, outputs: Floats
    ) -> dict[str, float]:
        found = cost.layer_parts(rows, prefill_s, decode_s)
        times = {op: layers * float(time_s[0]) for op, time_s in found.items()}
        times[LAST[0]] = float(cost.last_s(outputs)[0])
        times[HOST] = float(cost.host_s(outputs)[0])
        return times

    prompt = parts(chunk, cost.prefill_s(chunk, none), none, np.ones(1))
    decode = parts(batch, none, cost.decode_s(batch, np.array([context])), batch)
    life = {op: beside * prompt[op] + row.osl * decode[op] for op in prompt}
    half = meta.kernels.half_width_pct if meta.kernels is not None else {}
    return OpShares(
        {"ttft": _of_one(prompt), "tpot": _of_one(life)},
        {
            op: HOST_SIGMA
            if op == HOST
            else np.log1p(half.get(op, 100 * UNKNOWN) / 100) / NORMAL_90
            for op in prompt
        },
    )


def _of_one(times: Mapping[str, float]) -> dict[str, float]:
    total = sum(times.values())
    return {op: time_s / total for op, time_s in times.items() if time_s}


def draws(found: OpShares, metric: str) -> Floats:
    """The logarithm of a metric's factor under each joint draw of op errors. An op has the same
    draws in both metrics and in all rows."""
    factors = np.zeros(DRAWS)
    for op, share in found.shares[metric].items():
        factors += share * np.exp(found.sigmas[op] * _normals(op))
    return np.asarray(np.log(factors))


def _normals(name: str) -> Floats:
    half = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(DRAWS // 2)
    return np.concatenate([half, -half])


def stack_sigma(off: Floats, known: Sequence[Floats], share: float = 0.9) -> float:
    """The standard deviation of a stack's own error with which ``share`` of the errors ``off`` (log
    of measured / predicted) lie inside their bands; ``known`` are the ops' draws of each row.

    0 where the ops' errors alone cover them.
    """
    if not len(off):
        return float(np.log1p(UNKNOWN)) / NORMAL_90
    low, high = 0.0, LARGEST_SIGMA
    if _covered(off, known, low) >= share:
        return 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if _covered(off, known, middle) >= share else (middle, high)
    return high


def _covered(off: Floats, known: Sequence[Floats], sigma: float) -> float:
    ends = np.array([_ends(one, sigma) for one in known])
    return float(np.mean((ends[:, 0] <= off) & (off <= ends[:, 1])))


def _ends(known: Floats, sigma: float) -> tuple[float, float]:
    low, high = np.quantile(known + sigma * _normals("stack"), (0.05, 0.95))
    return float(low), float(high)


def with_bands(
    predictions: Mapping[str, ServerTimes],
    shares: Mapping[str, OpShares],
    sigma_of: Mapping[str, Mapping[str, float]],
) -> dict[str, ServerTimes]:
    """The predictions with bands; ``sigma_of`` holds the stack's standard deviation by id and
    metric."""
    found = {}
    for id, times in predictions.items():
        ttft, tpot = (
            np.exp(_ends(draws(shares[id], metric), sigma_of[id][metric])) for metric in METRICS
        )
        found[id] = replace(
            times,
            ttft_band_ms=(times.ttft_ms * ttft[0], times.ttft_ms * ttft[1]),
            tpot_band_ms=(times.tpot_ms * tpot[0], times.tpot_ms * tpot[1]),
        )
    return found
