"""Measured rows simulated: a run a row, like a sweep, kept by content for the next time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.config.deployment import deploy
from experiments.config.errors import ConfigError
from experiments.config.loading import Source, check_scenario
from experiments.score.deployments import scenario_of
from experiments.score.errors import ServerTimes
from experiments.score.measured import Measured
from experiments.sweeps.backends import Backend
from experiments.sweeps.execute import Report, execute
from experiments.sweeps.identity import run_key
from experiments.sweeps.plan import Run, SharedRequests, SweepPlan
from experiments.sweeps.store import Store
from profiler.storage.progress import Progress, Say
from simulator.op_times.cache import cache_folder

NAME = "server"
"""What each run's scenario is called: rows that describe the same one share a run."""


def plan_rows(
    file: str, rows: Sequence[Measured], progress: Progress
) -> tuple[dict[str, Run], dict[str, str]]:
    """A run for each row that can be simulated, and why others cannot, by id."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    requests_of = SharedRequests()
    # Those of one server together: they share op times, and workers take runs in this order.
    alike = sorted(rows, key=lambda r: (r.system, r.backend, r.model, r.precision, r.tp or 0))
    for done, row in enumerate(alike):
        progress("checking", done, len(alike))
        try:
            source = Source(f"{file}: {row.id}", NAME, {}, ())
            deployment = deploy(check_scenario(scenario_of(row), source), source, requests_of)
        except ConfigError as error:
            refused[row.id] = str(error).removeprefix(f"{file}: {row.id}: ")
            continue
        scenario = deployment.scenario
        runs[row.id] = Run(run_key(deployment, NAME), NAME, scenario.seed, {}, scenario)
    return runs, refused


@contextmanager
def runs_folder() -> Iterator[Path]:
    """Where finished runs are kept: in the cache, or nowhere if there is none."""
    kept = cache_folder()
    if kept is not None:
        yield kept / "scores"
        return
    with TemporaryDirectory() as scratch:
        yield Path(scratch) / "scores"


def simulate_rows(
    runs: dict[str, Run], folder: Path, backend: Backend, progress: Progress, say: Say
) -> tuple[dict[str, ServerTimes], dict[str, str]]:
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


def _prediction(summary: dict[str, Any]) -> ServerTimes:
    return ServerTimes(1e3 * summary["ttft_s"]["mean"], 1e3 * summary["tpot_s"]["mean"])
