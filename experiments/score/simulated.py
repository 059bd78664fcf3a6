"""Measured rows simulated: a run for each row and host, like a sweep, kept for the next time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.config.deployment import Deployment, deploy
from experiments.config.errors import ConfigError
from experiments.config.host_time import HostConstants
from experiments.config.loading import Source, check_scenario
from experiments.score.deployments import scenario_of
from experiments.score.errors import ServerTimes
from experiments.score.measured import Measured
from experiments.score.server_bands import OpShares, op_shares
from experiments.sweeps.backends import Backend
from experiments.sweeps.execute import Report, execute
from experiments.sweeps.identity import run_key
from experiments.sweeps.plan import Run, SharedRequests, SweepPlan
from experiments.sweeps.store import Store
from profiler.storage.progress import Progress, Say
from simulator.op_times.cache import cache_folder

NAME = "server"
"""What each run's scenario is called: rows that describe the same one share a run."""
FULL = 0.98
"""From this share of its KV cache on a server counts as full."""

Host = Callable[[Measured], HostConstants | None]
"""The constants that a row is simulated with; None if it is not."""


class RowPlan:
    """The runs of each host by row's id, the rows that have none with the reason, and the shares of
    the ops in each row's times."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.hosts = hosts
        self.runs: dict[str, dict[str, Run]] = {name: {} for name in hosts}
        self.refused: dict[str, str] = {}
        self.shares: dict[str, OpShares] = {}

    def add(self, file: str, row: Measured, requests_of: SharedRequests) -> None:
        """RowPlan a row's runs, or note why it has none."""
        source = Source(f"{file}: {row.id}", NAME, {}, ())
        try:
            given = {name: host(row) for name, host in self.hosts.items()}
            for name, host in given.items():
                if host is None:
                    continue
                scenario = check_scenario(scenario_of(row, host), source)
                found = deploy(scenario, source, requests_of)
                self.runs[name][row.id] = _run(found)
                if row.id not in self.shares:
                    self.shares[row.id] = op_shares(found, row)
        except ConfigError as error:
            self.refused[row.id] = str(error).removeprefix(f"{file}: {row.id}: ")


def _run(found: Deployment) -> Run:
    scenario = found.scenario
    return Run(run_key(found, NAME), NAME, scenario.seed, {}, scenario)


def plan_rows(
    file: str, rows: Sequence[Measured], progress: Progress, hosts: Mapping[str, Host]
) -> RowPlan:
    """A run for each row and host. Rows of one server follow each other: they share op times, and
    workers take runs in this order."""
    plan, requests_of = RowPlan(hosts), SharedRequests()
    alike = sorted(rows, key=lambda r: (r.system, r.backend, r.model, r.precision, r.tp or 0))
    for done, row in enumerate(alike):
        progress("checking", done, len(alike))
        plan.add(file, row, requests_of)
    return plan


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
    plan: RowPlan, folder: Path, backend: Backend, progress: Progress, say: Say
) -> tuple[dict[str, dict[str, ServerTimes]], dict[str, str]]:
    """Predictions by host and id, and errors of runs that failed. ``folder`` keeps finished runs.

    Of a failed row there is no prediction with any host.
    """
    every = [run for id in next(iter(plan.runs.values())) for run in _of(plan, id)]
    distinct = {run.key: run for run in every}
    sweep = SweepPlan("", "score", "", (), None, tuple(distinct.values()), ())
    store, report = Store(folder), Report(len(distinct))
    store.open(resume=True)
    with store.locked():
        execute(sweep, store, backend, progress, report, say)
        failed = {
            id: report.failures[run.key]
            for runs in plan.runs.values()
            for id, run in runs.items()
            if run.key in report.failures
        }
        found = {
            name: {
                id: _prediction(store.summary(run.key, run.name))
                for id, run in runs.items()
                if id not in failed and id not in plan.refused
            }
            for name, runs in plan.runs.items()
        }
    return found, failed


def _of(plan: RowPlan, id: str) -> list[Run]:
    return [runs[id] for runs in plan.runs.values() if id in runs]


def _prediction(summary: dict[str, Any]) -> ServerTimes:
    ttft, tpot = (1e3 * summary[name]["mean"] for name in ("ttft_s", "tpot_s"))
    return ServerTimes(ttft, tpot, kv_full=summary["kv_peak_share"] >= FULL)
