"""The uncertainty of a run: its 90 % bands, and batches outside the measured region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sarathi_sim.profiler.facts.ops import SEND_RECV
from sarathi_sim.simulator.confidence.coverage import Outside, queries_outside
from sarathi_sim.simulator.confidence.op_errors import LayerError, OpError, layer_error, op_errors
from sarathi_sim.simulator.confidence.run_band import WHOLE_LAYER, Errors, makespan_samples
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.breakdown import OpUse, breakdown, whole_layer
from sarathi_sim.simulator.op_times.op_times import SUM, OpTimes
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis

if TYPE_CHECKING:  # else the process that draws would import all of it
    from sarathi_sim.experiments.config.deployment import Deployment

PER_MAKESPAN = ("requests_per_s", "tokens_per_s", "output_tokens_per_s", "mfu")
"""The numbers of a summary that are inversely proportional to the makespan."""

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


def uncertainty(deployment: Deployment, analysis: Analysis) -> Uncertainty | None:
    """The uncertainty of a run; None where nothing ran, and of two pools: a worker's requests come
    when another one has done with them, which no re-timing moves."""
    if analysis.records.handovers is not None:
        return None
    return uncertainty_of(*timing(deployment), analysis)


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
    uses: list[dict[str, OpUse]] = [
        breakdown(log, predictor) if log.num_iterations else {} for log in records.replicas
    ]
    errors = dict(_errors(ops))
    scoped = errors.get(f"{SEND_RECV}_{scope}")
    if scoped is not None:
        errors[SEND_RECV] = scoped
    key = ops.meta.content_sha256
    tables = {op: error.table for op, error in errors.items()}
    outside = queries_outside([use for use in uses if use], tables)
    everything: Errors = errors
    if predictor.layer != SUM:
        everything = errors | {WHOLE_LAYER: _layer_error(ops)}
        for log, use in zip(records.replicas, uses, strict=True):
            if use:
                use[WHOLE_LAYER] = whole_layer(log, use)
    samples = makespan_samples(records, analysis.spans, uses, everything, key)
    makespan = records.end_s - float(records.arrival_s.min())
    return Uncertainty(samples / makespan, outside)


def ratio_band(
    metric: str, ratio: float, above: Uncertainty | None, below: Uncertainty | None
) -> list[float] | None:
    """The band of a metric's ratio of two runs; None if it does not follow from the makespan.

    Both runs are re-timed under the same draws, so common errors cancel.
    """
    if above is None or below is None:
        return None
    over, under = above.factors(metric), below.factors(metric)
    return None if over is None or under is None else _band(ratio * over / under)


def _band(values: Floats) -> list[float]:
    return [float(v) for v in np.quantile(values, QUANTILES)]


@lru_cache(maxsize=8)
def _errors(ops: OpTimes) -> dict[str, OpError]:
    return op_errors(ops)


@lru_cache(maxsize=8)
def _layer_error(ops: OpTimes) -> LayerError:
    return layer_error(ops)
