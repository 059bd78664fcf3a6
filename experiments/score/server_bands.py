"""Bands of 90 % for predicted TTFT, TPOT, latency and throughput: joint draws of what may be off.

A row's times are divided among the ops of its bundle, as they stand in the life of a request beside
its neighbours: its own prompt and the others' that run meanwhile, and its decodes. Each op's error
is drawn from the half-width of its kernels on rows left out of their fits, the host's from a factor
of two. What the errors of scored servers show beyond that is the error of the stack: its settings,
its version and its scheduler. It is calibrated on servers other than the row's own. A latency has
the draws of TTFT and TPOT together. In a closed loop throughput goes as one over the latency.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.experiments.score.errors import ServerTimes
from sarathi_sim.experiments.score.measured import METRICS, SCORED, Measured
from sarathi_sim.profiler.storage.strict import STRICT
from sarathi_sim.simulator.confidence.bands import UNKNOWN
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import LAST, IterationCost

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

    __pydantic_config__: ClassVar[Any] = STRICT

    shares: Mapping[str, Mapping[str, float]]
    sigmas: Mapping[str, float]


def op_shares(deployment: Deployment, row: Measured) -> OpShares:
    """Of one row. A request decodes ``osl`` tokens beside ``concurrency`` others (or as many as fit
    into the memory), and meanwhile each of them processes one prompt."""
    engine, meta = deployment.scenario.engine, deployment.ops.meta
    host = host_of(engine)
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


Draws = Mapping[str, Mapping[str, Floats]]
"""Logarithms of the factors on a row's times under each joint draw, by id and metric."""


def draws(found: OpShares) -> dict[str, Floats]:
    """The logarithm of each metric's factor under each joint draw of op errors. An op has the same
    draws in all metrics and rows."""
    factors = {metric: np.zeros(DRAWS) for metric in METRICS}
    for op, sigma in found.sigmas.items():
        factor = np.exp(sigma * normals(op))
        for metric in METRICS:
            factors[metric] += found.shares[metric].get(op, 0.0) * factor
    return {metric: np.asarray(np.log(factors[metric])) for metric in METRICS}


@lru_cache(maxsize=256)
def normals(name: str) -> Floats:
    """The draws of what has that name: pairs of opposite sign."""
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
    low, high = np.quantile(known + sigma * normals("stack"), (0.05, 0.95))
    return float(low), float(high)


def with_bands(
    rows: Iterable[Measured],
    predictions: Mapping[str, ServerTimes],
    known: Draws,
    sigma_of: Mapping[str, Mapping[str, float]],
) -> dict[str, ServerTimes]:
    """The predictions of these rows with bands; ``known`` are the draws of what is known to be off,
    ``sigma_of`` holds the stack's standard deviation by id and metric."""
    return {
        row.id: replace(
            predictions[row.id],
            bands=_bands(row, predictions[row.id], known[row.id], sigma_of[row.id]),
        )
        for row in rows
        if row.id in predictions
    }


def _bands(
    row: Measured,
    times: ServerTimes,
    known: Mapping[str, Floats],
    sigma: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    ttft, tpot = (
        getattr(times, SCORED[metric]) * np.exp(known[metric] + sigma[metric] * normals("stack"))
        for metric in METRICS
    )
    latency = row.latency_of(ttft, tpot)
    drawn = {"ttft": ttft, "tpot": tpot, "latency": latency}
    if times.output_tokens_per_s is not None:
        slower = latency / row.latency_of(times.ttft_ms, times.tpot_ms)
        drawn["throughput"] = times.output_tokens_per_s / slower
    ends = np.quantile(np.stack([*drawn.values()]), (0.05, 0.95), axis=1).T.tolist()
    return {metric: (low, high) for metric, (low, high) in zip(drawn, ends, strict=True)}
