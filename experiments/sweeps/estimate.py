"""The expected time of a sweep: a few shortened runs are simulated and scaled up."""

from __future__ import annotations

import time
from dataclasses import replace

from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.results import parquet_bytes
from sarathi_sim.experiments.sweeps.plan import SweepPlan
from sarathi_sim.simulator.views.metrics import Analysis

PROBES, PROBE_REQUESTS = 6, 200


def seconds_of_work(plan: SweepPlan) -> float:
    """Predicted seconds of one processor for all of the runs.

    The :data:`PROBES` runs are spread evenly over the plan and cut to :data:`PROBE_REQUESTS`
    requests; the rest is proportional. This is approximate: short runs do not show how queues and
    batches grow.
    """
    step = max(1, len(plan.runs) // PROBES)
    probed = plan.runs[step // 2 :: step][:PROBES]
    seconds = 0.0
    for run in probed:
        deployment = deploy(run.scenario, Source(plan.file, run.name, {}, ()))
        few = replace(deployment, requests=deployment.requests[:PROBE_REQUESTS])
        _ = few.predictor  # tabulated once in each worker, not once in each run
        began = time.perf_counter()
        analysis = Analysis(few.simulate())
        analysis.summary(few.model, few.device, run.scenario.cluster.tp)
        parquet_bytes(analysis.request_columns)
        took = time.perf_counter() - began
        seconds += took * len(deployment.requests) / max(len(few.requests), 1)
    return seconds / max(len(probed), 1) * len(plan.runs)
