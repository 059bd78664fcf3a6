"""The 90 % bands of a run and of a capacity, and a run's batches outside the measured region."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.ops import SEND_RECV
from sarathi_sim.profiler.storage.plain_yaml import load_shipped
from sarathi_sim.profiler.storage.strict import strict_dataclass
from sarathi_sim.simulator.confidence.coverage import Outside, queries_outside
from sarathi_sim.simulator.confidence.op_errors import layer_error, op_errors
from sarathi_sim.simulator.confidence.run_band import (
    WHOLE_LAYER,
    Errors,
    makespan_samples,
    op_time_samples,
)
from sarathi_sim.simulator.loop.records import Floats, ReplicaLog
from sarathi_sim.simulator.op_times.op_times import SUM
from sarathi_sim.simulator.views.explain import OpUse, breakdown, whole_layer
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.deployment import Deployment

PER_MAKESPAN = ("requests_per_s", "tokens_per_s", "output_tokens_per_s", "mfu")
"""The numbers of a summary that are inversely proportional to the makespan."""

LATENCIES = ("ttft_s", "slot_s", "transfer_s", "tbt_s", "latency_s")
"""The latencies that get bands in a run of two pools."""

QUANTILES = (0.05, 0.95)


@dataclass(frozen=True)
class Uncertainty:
    """The effect of op errors on one run. ``slower``: the makespan over the simulated one in each
    joint draw; ``outside``: ops with sizes outside the measured region."""

    slower: Floats
    outside: list[Outside]

    @property
    def factors(self) -> dict[str, Floats]:
        """The factor of each draw on the numbers of a summary that follow from the makespan."""
        return {"makespan_s": self.slower, **dict.fromkeys(PER_MAKESPAN, 1 / self.slower)}

    def as_json(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """``<metric>_band`` for makespan and throughputs, and ``outside_profile``."""
        bands = {f"{name}_band": _band(summary[name] * by) for name, by in self.factors.items()}
        return {**bands, "outside_profile": [asdict(outside) for outside in self.outside]}


@dataclass(frozen=True)
class PoolsUncertainty:
    """The effect of op errors on a run of two pools: the summaries of the same run, simulated again
    as a worker's requests come from another, with all ops of both pools slower, and faster, by the
    wider 90 % band of the two. ``outside`` is that of both pools."""

    summaries: tuple[Mapping[str, Any], Mapping[str, Any]]
    outside: list[Outside]

    def as_json(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """``<metric>_band`` for makespan, throughputs and latencies, and ``outside_profile``. The
        latencies of a run's steady part may leave out more of a slower one, so a band holds the
        run's own number as well. Its upper end is infinite where the slower run is overloaded."""

        def banded(of: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
            """The latencies of a part of the summary, with the bands of their quantiles."""
            runs, found = [of(one) for one in (summary, *self.summaries)], {}
            for name in filter(runs[0].__contains__, LATENCIES):
                found[name] = dict(runs[0][name])
                for quantile, value in runs[0][name].items():
                    values = [one[name][quantile] for one in runs]
                    # Overloaded: latencies without a limit.
                    most = max(values) if np.isfinite(values).all() else math.inf
                    if np.isfinite(value):
                        found[name][f"{quantile}_band"] = [np.nanmin(values), most]
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
        return uncertainty_of(deployment, analysis)
    slow, fast = (
        one.summary(Analysis(one.simulate(progress)))
        for one in map(deployment.slowed, reversed(op_factors(deployment, analysis)))
    )
    pools = _by_pool(deployment, analysis)
    return PoolsUncertainty((slow, fast), [each for pool in pools for each in _used(*pool)[2]])


def op_factors(deployment: Deployment, analysis: Analysis) -> list[float]:
    """The ends of the 90 % band of the factor by which op errors lengthen a run: its makespan, or
    of two pools their ops (:func:`op_time_factors`). Empty: nothing ran."""
    if analysis.records.handovers is None:
        found = uncertainty_of(deployment, analysis)
        return [] if found is None else _band(found.slower)
    return op_time_factors(deployment, analysis)


def op_time_factors(deployment: Deployment, analysis: Analysis) -> list[float]:
    """The ends of the 90 % band of the factor by which op errors lengthen a run's ops, whatever its
    arrivals: of two pools' bands the lower end and the upper end."""
    ends = []
    for pool, logs in _by_pool(deployment, analysis):
        uses, errors, _ = _used(pool, logs)
        samples = op_time_samples(uses, errors, pool.ops.meta.content_sha256, sum(pool.layers))
        ends.append(_band(samples))
    return [min(low for low, _ in ends), max(high for _, high in ends)]


def _by_pool(
    deployment: Deployment, analysis: Analysis
) -> list[tuple[Deployment, Sequence[ReplicaLog]]]:
    logs, first = analysis.records.replicas, analysis.records.prefill_logs
    parts = (logs,) if analysis.records.handovers is None else (logs[:first], logs[first:])
    return list(zip(deployment.pools, parts, strict=True))


def uncertainty_of(deployment: Deployment, analysis: Analysis) -> Uncertainty | None:
    """The uncertainty of a run of one pool."""
    records = analysis.records
    if not any(log.num_iterations for log in records.replicas):
        return None
    uses, errors, outside = _used(deployment, records.replicas)
    key = deployment.ops.meta.content_sha256
    samples = makespan_samples(records, analysis.spans, uses, errors, key)
    makespan = records.end_s - float(records.arrival_s.min())
    return Uncertainty(samples / makespan, outside)


def _used(
    deployment: Deployment, logs: Sequence[ReplicaLog]
) -> tuple[list[dict[str, OpUse]], Errors, list[Outside]]:
    """Each replica's ops, their errors, and those with sizes outside the measured region."""
    predictor = deployment.predictor
    uses = [breakdown(log, predictor) if log.num_iterations else {} for log in logs]
    errors = dict(op_errors(deployment.ops))
    if (scoped := errors.get(f"{SEND_RECV}_{deployment.scope}")) is not None:
        errors[SEND_RECV] = scoped
    tables = {op: error.table for op, error in errors.items()}
    outside = queries_outside([use for use in uses if use], tables)
    if predictor.layer == SUM:
        return uses, errors, outside
    for log, use in zip(logs, uses, strict=True):
        if use:
            use[WHOLE_LAYER] = whole_layer(log, use)
    return uses, errors | {WHOLE_LAYER: layer_error(deployment.ops)}, outside


def ratio_band(
    metric: str, ratio: float, above: AnyUncertainty | None, below: AnyUncertainty | None
) -> list[float] | None:
    """The band of a metric's ratio of two runs; None if it does not follow from the makespan. Both
    runs are re-timed under the same draws, so common errors cancel."""
    if not isinstance(above, Uncertainty) or not isinstance(below, Uncertainty):
        return None  # of two pools: errors are not drawn together
    if metric not in above.factors:
        return None
    return _band(ratio * above.factors[metric] / below.factors[metric])


AnyUncertainty = Uncertainty | PoolsUncertainty


def _band(values: Floats) -> list[float]:
    return [float(v) for v in np.quantile(values, QUANTILES)]


@strict_dataclass
class CapacityDiscrepancy:
    """The error of predicted capacities, as ``fitted_to`` measured ones on ``date``: of the
    engine's model, of host times, and of op times. ``half_width`` is that of the 90 % interval of
    ln(measured / predicted), of ``dense`` models and of a ``mixture`` of experts. ``inside``: the
    measured ones within the interval that is fitted without their own system."""

    fitted_to: str
    date: str
    half_width: dict[str, float]
    inside: int


@lru_cache(maxsize=1)
def capacity_error() -> CapacityDiscrepancy:
    """The shipped one, ``data/capacity_error.yaml``."""
    return load_shipped(CapacityDiscrepancy, "capacity_error.yaml")


def capacity_interval(
    capacity: float, error: float, *intervals: Sequence[float]
) -> tuple[float, float]:
    """The 90 % interval of a predicted capacity C > 0, in its unit.

    C exp(-sqrt(e**2 + sum(ln(C / low)**2))) and C exp(sqrt(e**2 + sum(ln(high / C)**2))), with the
    ``error`` e of predicted capacities (:class:`CapacityDiscrepancy`), and the ``intervals`` (low,
    high) of what is independent of it: sampling, op times."""
    with np.errstate(divide="ignore"):  # a low end of 0
        off = np.log(np.reshape(intervals, (-1, 2)) / capacity) * (-1, 1)
    low, high = np.sqrt(error**2 + (np.maximum(off, 0) ** 2).sum(axis=0))
    return capacity * math.exp(-low), capacity * math.exp(high)
