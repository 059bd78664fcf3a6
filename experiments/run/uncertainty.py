"""The uncertainty of a run: its 90 % bands, and batches outside the measured region."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.ops import SEND_RECV
from sarathi_sim.simulator.confidence.coverage import Outside, queries_outside
from sarathi_sim.simulator.confidence.op_errors import LayerError, OpError, layer_error, op_errors
from sarathi_sim.simulator.confidence.run_band import (
    WHOLE_LAYER,
    Errors,
    makespan_samples,
    op_time_samples,
)
from sarathi_sim.simulator.loop.records import Floats, ReplicaLog
from sarathi_sim.simulator.op_times.breakdown import OpUse, breakdown, whole_layer
from sarathi_sim.simulator.op_times.op_times import SUM, OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.deployment import Deployment

PER_MAKESPAN = ("requests_per_s", "tokens_per_s", "output_tokens_per_s", "mfu")
"""The numbers of a summary that are inversely proportional to the makespan."""

LATENCIES = ("ttft_s", "slot_s", "transfer_s", "tbt_s", "latency_s")
"""The latencies that get bands in a run of two pools."""

QUANTILES = (0.05, 0.95)


@dataclass(frozen=True)
class Uncertainty:
    """The effect of op errors on one run.

    ``slower`` is the makespan over the simulated one under each joint draw of the op errors.
    ``outside`` are the ops with sizes outside the measured region.
    """

    slower: Floats
    outside: list[Outside]

    def factors(self, metric: str) -> Floats | None:
        """The factor of each draw on a summary's number; None if it is unknown."""
        if metric == "makespan_s":
            return self.slower
        return 1 / self.slower if metric in PER_MAKESPAN else None

    def as_json(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """``<metric>_band`` for makespan and throughputs, and ``outside_profile``."""
        found: dict[str, Any] = {}
        for metric in ("makespan_s", *PER_MAKESPAN):
            factors = self.factors(metric)
            assert factors is not None
            found[f"{metric}_band"] = _band(summary[metric] * factors)
        found["outside_profile"] = [asdict(outside) for outside in self.outside]
        return found


@dataclass(frozen=True)
class PoolsUncertainty:
    """The effect of op errors on a run of two pools: the summaries of the same run with all ops of
    both pools slower, and faster, by the wider 90 % band of the two.

    A worker's requests come when another one has done with them, so a run is simulated again and
    not re-timed. ``outside`` is that of both pools.
    """

    summaries: tuple[Mapping[str, Any], Mapping[str, Any]]
    outside: list[Outside]

    def factors(self, metric: str) -> None:
        """None: two runs' errors are not drawn together."""

    def as_json(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """``<metric>_band`` for makespan, throughputs and latencies, and ``outside_profile``.

        The latencies of a run's steady part may leave out more of a slower one, so a band holds the
        run's own number as well. Its upper end is infinite where the slower run is overloaded.
        """

        def banded(of: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
            """The latencies of a part of the summary, with the bands of their quantiles."""
            runs, found = [of(one) for one in (summary, *self.summaries)], {}
            for name in filter(runs[0].__contains__, LATENCIES):
                bands = {}
                for quantile, value in runs[0][name].items():
                    values = [one[name][quantile] for one in runs]
                    over = not np.isfinite(values).all()  # overloaded: latencies without a limit
                    if np.isfinite(value):
                        bands[f"{quantile}_band"] = [
                            np.nanmin(values),
                            math.inf if over else max(values),
                        ]
                found[name] = {**runs[0][name], **bands}
            return found

        found: dict[str, Any] = banded(lambda one: one)
        for metric in ("makespan_s", *PER_MAKESPAN):
            found[f"{metric}_band"] = sorted(one[metric] for one in self.summaries)
        found["steady"] = {**summary["steady"], **banded(lambda one: one["steady"])}
        found["outside_profile"] = [asdict(outside) for outside in self.outside]
        return found


def uncertainty(
    deployment: Deployment, analysis: Analysis, progress: Callable[[int], None] | None = None
) -> Uncertainty | PoolsUncertainty | None:
    """The uncertainty of a run; None where nothing ran. That of two pools simulates it twice;
    ``progress`` gets the number of finished requests then."""
    if analysis.records.handovers is None:
        return uncertainty_of(*timing(deployment), analysis)
    slow, fast = (
        deployment.slowed(times) for times in reversed(factors_of_pools(deployment, analysis))
    )
    summaries = [one.summary(Analysis(one.simulate(progress))) for one in (slow, fast)]
    outside = [
        each
        for pool, logs in _by_pool(deployment, analysis)
        for each in _used(*timing(pool), logs)[2]
    ]
    return PoolsUncertainty((summaries[0], summaries[1]), outside)


def factors_of_pools(deployment: Deployment, analysis: Analysis) -> list[float]:
    """The ends of the 90 % band of the factor by which op errors lengthen a run's ops: of two
    pools' bands the lower end and the upper end."""
    ends = []
    for pool, logs in _by_pool(deployment, analysis):
        uses, errors, _ = _used(*timing(pool), logs)
        samples = op_time_samples(uses, errors, pool.ops.meta.content_sha256, sum(pool.layers))
        ends.append(_band(samples))
    return [min(low for low, _ in ends), max(high for _, high in ends)]


def _by_pool(
    deployment: Deployment, analysis: Analysis
) -> list[tuple[Deployment, Sequence[ReplicaLog]]]:
    logs, first = analysis.records.replicas, analysis.records.prefill_logs
    parts = (logs,) if analysis.records.handovers is None else (logs[:first], logs[first:])
    return list(zip(deployment.pools, parts, strict=True))


def timing(deployment: Deployment) -> tuple[OpTimes, BundlePredictor, str]:
    """The inputs of a run's uncertainty: op times, predictor, kind of its links."""
    return deployment.ops, deployment.predictor, deployment.scope


def uncertainty_of(
    ops: OpTimes,
    predictor: BundlePredictor,
    scope: str,
    analysis: Analysis,
    _told: object = None,
) -> Uncertainty | None:
    """The uncertainty of a run of a deployment with this :func:`timing`."""
    records = analysis.records
    if not any(log.num_iterations for log in records.replicas):
        return None
    uses, errors, outside = _used(ops, predictor, scope, records.replicas)
    key = ops.meta.content_sha256
    samples = makespan_samples(records, analysis.spans, uses, errors, key)
    makespan = records.end_s - float(records.arrival_s.min())
    return Uncertainty(samples / makespan, outside)


def _used(
    ops: OpTimes, predictor: BundlePredictor, scope: str, logs: Sequence[ReplicaLog]
) -> tuple[list[dict[str, OpUse]], Errors, list[Outside]]:
    """Each replica's ops, their errors, and those with sizes outside the measured region."""
    uses: list[dict[str, OpUse]] = [
        breakdown(log, predictor) if log.num_iterations else {} for log in logs
    ]
    errors = dict(_errors(ops))
    scoped = errors.get(f"{SEND_RECV}_{scope}")
    if scoped is not None:
        errors[SEND_RECV] = scoped
    tables = {op: error.table for op, error in errors.items()}
    outside = queries_outside([use for use in uses if use], tables)
    if predictor.layer == SUM:
        return uses, errors, outside
    for log, use in zip(logs, uses, strict=True):
        if use:
            use[WHOLE_LAYER] = whole_layer(log, use)
    return uses, errors | {WHOLE_LAYER: _layer_error(ops)}, outside


def ratio_band(
    metric: str, ratio: float, above: AnyUncertainty | None, below: AnyUncertainty | None
) -> list[float] | None:
    """The band of a metric's ratio of two runs; None if it does not follow from the makespan.

    Both runs are re-timed under the same draws, so common errors cancel.
    """
    if above is None or below is None:
        return None
    over, under = above.factors(metric), below.factors(metric)
    return None if over is None or under is None else _band(ratio * over / under)


AnyUncertainty = Uncertainty | PoolsUncertainty


def _band(values: Floats) -> list[float]:
    return [float(v) for v in np.quantile(values, QUANTILES)]


@lru_cache(maxsize=8)
def _errors(ops: OpTimes) -> dict[str, OpError]:
    return op_errors(ops)


@lru_cache(maxsize=8)
def _layer_error(ops: OpTimes) -> LayerError:
    return layer_error(ops)
