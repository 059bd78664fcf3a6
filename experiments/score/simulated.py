"""Measured rows simulated: a run a row, like a sweep, kept by content for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config.deployment import deploy
from experiments.config.errors import ConfigError
from experiments.config.loading import Source, check_scenario
from experiments.score.deployments import scenario_of
from experiments.score.errors import Prediction
from experiments.score.measured import Measured
from experiments.sweeps.backends import Backend
from experiments.sweeps.execute import Progress, Report, Say, execute
from experiments.sweeps.identity import run_key
from experiments.sweeps.plan import Run, SharedRequests, SweepPlan
from experiments.sweeps.store import Store

NAME = "server"
"""What each run's scenario is called: rows that describe the same one share a run."""


def plan_rows(
    file: str, rows: Sequence[Measured], progress: Progress
) -> tuple[dict[str, Run], dict[str, str]]:
    """A run for each row that can be simulated, and why others cannot, by id."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    requests_of = SharedRequests()
    order = sorted(rows, key=lambda row: (row.system, row.backend, row.model, row.precision, row.tp))
    for done, row in enumerate(order):
        progress("checking", done, len(order))
        try:
            source = Source(f"{file}: {row.id}", NAME, {}, ())
            deployment = deploy(check_scenario(scenario_of(row), source), source, requests_of)
        except ConfigError as error:
            refused[row.id] = str(error).removeprefix(f"{file}: {row.id}: ")
            continue
        scenario = deployment.scenario
        runs[row.id] = Run(run_key(deployment, NAME), NAME, scenario.seed, {}, scenario)
    return runs, refused


def simulate_rows(
    runs: dict[str, Run], folder: Path, backend: Backend, progress: Progress, say: Say
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predictions by id, and errors of runs that failed. ``folder`` keeps finished runs."""
    distinct = {run.key: run for run in runs.values()}
    plan = SweepPlan("", "score", "", (), None, tuple(distinct.values()), ())
    store, report = Store(folder), Report(len(distinct))
    store.open(resume=True)
    with store.locked():
        execute(plan, store, backend, progress, report, say)
        found = {
            name: _prediction(store.summary(run.key, run.name))
            for name, run in runs.items()
            if run.key not in report.failures
        }
    failed = {n: report.failures[r.key] for n, r in runs.items() if r.key in report.failures}
    return found, failed


def _prediction(summary: dict[str, Any]) -> Prediction:
    return Prediction(1e3 * summary["ttft_s"]["mean"], 1e3 * summary["tpot_s"]["mean"])
