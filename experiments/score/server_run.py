"""The simulation of the requests that a real server served, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.score.server_files import ServerRun, Ticks
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis

MEASURES = ("ttft_s", "tpot_s", "latency_s")
STATISTICS = ("mean", "p50", "p90", "p99")
NUMBERS = (
    *("makespan_s", "output_tokens_per_s"),
    *(f"{key}.{each}" for key in MEASURES for each in STATISTICS),
)
COUNTS = ("preemptions", "hit_rate", "num_blocks")


def replay_server(
    experiment: Experiment, run: ServerRun, ticks: Ticks | None = None
) -> dict[str, Any]:
    """Every scenario under the run's requests, beside what was measured.

    ``measured`` and each of ``scenarios`` hold the :data:`MEASURES` (mean and quantiles over
    requests, seconds) and ``makespan_s``. A scenario also has ``off_pct``, how far each is from
    the measured one, ``per_request_pct``, the median over requests of the absolute difference,
    ``preemptions``, ``hit_rate`` and, with paged memory, ``num_blocks``; ``notes`` are what to
    know of it. With ``ticks`` both have the keys of :data:`TICK_LABELS`, too. Raises ConfigError as
    :func:`deploy` does.
    """
    deployments = {
        name: deploy(from_queue(scenario), experiment.sources[name], run.for_scenario)
        for name, scenario in experiment.scenarios.items()
    }
    measured = numbers_of(run.requests) | (ticks.means() if ticks is not None else {})
    scenarios = {}
    for name, deployment in deployments.items():
        analysis = Analysis(deployment.simulate())
        tables, more = (analysis.iterations, analysis.requests), dict[str, Any]()
        if ticks is not None:
            more = simulated_ticks(ticks.t, *tables, deployment.kv_capacity).means()
        found = beside(analysis.requests, run, measured, more)
        scenarios[name] = found | counts_of(deployment, analysis)
    return {"requests": len(run.requests), "measured": measured, "scenarios": scenarios}


def from_queue(scenario: Scenario) -> Scenario:
    """Without the frontend, unless it is given: what lies before the scheduler is not in every
    recorded run."""
    engine = scenario.engine.model_copy(update={"frontend_s": scenario.engine.frontend_s or 0.0})
    return scenario.model_copy(update={"engine": engine})


def beside(
    table: pd.DataFrame, run: ServerRun, measured: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers of simulated requests, and ``more``; how far they are off ``measured``."""
    found = {**numbers_of(table), **more}
    off = {key: _median_off(table[key], run.requests[key]) for key in MEASURES}
    return {**found, "off_pct": _off(found, measured), "per_request_pct": off}


def counts_of(deployment: Deployment, analysis: Analysis) -> dict[str, Any]:
    """The :data:`COUNTS` of a simulation, as far as it has them, and its ``notes``."""
    tp, cache = deployment.scenario.cluster.tp, deployment.scenario.kv_cache
    counts = analysis.summary(deployment.model, deployment.device, tp)
    counts |= {"num_blocks": cache.num_blocks} if cache is not None else {}
    found = {key: counts[key] for key in COUNTS if key in counts}
    return {**found, "notes": list(deployment.remarks)}


def numbers_of(table: pd.DataFrame) -> dict[str, Any]:
    """The :data:`NUMBERS` of a table of requests, measured or simulated."""
    makespan = float((table["arrival_s"] + table["latency_s"]).max())
    found: dict[str, Any] = {
        "makespan_s": makespan,
        "output_tokens_per_s": int(table["output_tokens"].sum()) / makespan,
    }
    for key in MEASURES:
        values = table[key].dropna().to_numpy(np.float64)
        quantiles = np.quantile(values, [0.5, 0.9, 0.99]).tolist() if len(values) else [None] * 3
        mean = float(values.mean()) if len(values) else None
        found[key] = dict(zip(STATISTICS, [mean, *quantiles], strict=True))
    return found


def _off(found: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Percent, number by number."""
    return {
        key: _off(found[key], value)
        if isinstance(value, dict)
        else None
        if not value or found[key] is None
        else 100 * (found[key] / value - 1)
        for key, value in measured.items()
    }


def _median_off(found: pd.Series[float], measured: pd.Series[float]) -> float:
    return float((100 * (found / measured - 1).abs()).median())


def simulated_ticks(
    t: Floats, iterations: pd.DataFrame, requests: pd.DataFrame, kv_capacity: int
) -> Ticks:
    """What the server's log would be of a simulated run: at the times ``t``, from its tables and
    the KV tokens that it has room for."""
    size = (iterations["chunks"] + iterations["decodes"]).to_numpy(np.float64)
    start, finish = (iterations[name].to_numpy() for name in ("start_s", "finish_s"))
    running = _until(t, start, size) - _until(t, finish, size)
    arrival, one = requests["arrival_s"].to_numpy(), np.ones(len(requests))
    inside = _until(t, arrival, one) - _until(t, arrival + requests["latency_s"].to_numpy(), one)
    formed = np.searchsorted(np.sort(start), t, "right") - 1
    kv_tokens = iterations["kv_tokens"].to_numpy(np.float64)[np.argsort(start, kind="stable")]
    in_use = np.where(running > 0, kv_tokens[np.maximum(formed, 0)], 0.0)
    prompt, generated = (
        np.diff(_until(t, finish, iterations[name].to_numpy(np.float64)), prepend=0.0)
        for name in ("prefill_tokens", "decodes")
    )
    share = 100 * in_use / kv_capacity
    return Ticks(t, prompt, generated, running, inside - running, share)


def _until(t: Floats, when: Floats, amount: Floats) -> Floats:
    """The amounts of everything that happened by each time."""
    order = np.argsort(when, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    return np.asarray(total[np.searchsorted(when[order], t, "right")])
