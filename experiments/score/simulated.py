"""Measured rows simulated: a run for each row and variant, like a sweep, kept for the next time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.score.errors import ServerTimes
from sarathi_sim.experiments.score.measured import Measured
from sarathi_sim.experiments.score.row_cache import RowCache, RowOutcome, outcome_key
from sarathi_sim.experiments.score.server_bands import OpShares, op_shares
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.experiments.sweeps.execute import Report, execute
from sarathi_sim.experiments.sweeps.plan import Run, SharedRequests, SweepPlan, run_key
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.simulator.op_times.cache import VARIABLE, cache_folder

NAME = "server"
"""What each run's scenario is called: rows that describe the same one share a run."""
FULL = 0.98
"""From this share of its KV cache on a server counts as full."""

Variant = Callable[[Measured], dict[str, Any] | None]
"""The scenario that a row is simulated as; None if it is not. Raises ConfigError, as
``scenario_of`` does."""


class RowPlan:
    """What each row is simulated as, by variant and id: ``known`` outcomes of earlier calls, and
    the ``runs`` of others. ``refused`` rows have none, with the reason."""

    def __init__(self, variants: Mapping[str, Variant], kept: RowCache) -> None:
        self.variants, self.kept = variants, kept
        self.known: dict[str, dict[str, RowOutcome]] = {name: {} for name in variants}
        self.runs: dict[str, dict[str, Run]] = {name: {} for name in variants}
        self.refused: dict[str, str] = {}
        self._pending: dict[tuple[str, str], tuple[str, OpShares]] = {}

    def add(self, file: str, row: Measured, requests_of: SharedRequests) -> None:
        """Look a row's outcomes up, plan the runs of others, or note why it has none."""
        source = Source(f"{file}: {row.id}", NAME, {}, ())
        for name, variant in self.variants.items():
            try:
                scenario = variant(row)
                if scenario is not None:
                    self._add(name, row, scenario, source, requests_of)
            except ConfigError as error:
                self.refused[row.id] = str(error).replace(f"{source.file}: ", "")
                self.drop(row.id)
                return

    def drop(self, id: str) -> None:
        """Forget a row: it has no outcome in any variant."""
        for name in self.variants:
            self.known[name].pop(id, None)
            self.runs[name].pop(id, None)

    def _add(
        self,
        name: str,
        row: Measured,
        scenario: Mapping[str, Any],
        source: Source,
        requests_of: SharedRequests,
    ) -> None:
        key = outcome_key(scenario)
        outcome = self.kept.read(key)
        if outcome is None:
            try:
                found = deploy(check_scenario(scenario, source), source, requests_of)
            except ConfigError as error:
                outcome = RowOutcome(refused=str(error).replace(f"{source.file}: ", ""))
                self.kept.write(key, outcome)
            else:
                self.runs[name][row.id] = _run(found)
                self._pending[name, row.id] = key, op_shares(found, row)
                return
        if outcome.refused:
            raise ConfigError(outcome.refused)
        self.known[name][row.id] = outcome

    def finished(self, name: str, id: str, summary: Mapping[str, Any]) -> None:
        """Take the summary of a run in, and keep its outcome."""
        key, shares = self._pending[name, id]
        cache = self.runs[name][id].scenario.kv_cache
        numbers = {
            "ttft_ms": 1e3 * summary["ttft_s"]["mean"],
            "tpot_ms": 1e3 * summary["tpot_s"]["mean"],
            "output_tokens_per_s": summary["output_tokens_per_s"],
            "kv_peak_share": summary["kv_peak_share"],
            "num_blocks": float(cache.num_blocks or 0) if cache is not None else 0.0,
        }
        self.known[name][id] = RowOutcome(numbers, shares)
        self.kept.write(key, self.known[name][id])


def _run(found: Deployment) -> Run:
    scenario = found.scenario
    return Run(run_key(found, NAME), NAME, scenario.seed, {}, scenario)


def plan_rows(
    file: str,
    rows: Sequence[Measured],
    progress: Progress,
    variants: Mapping[str, Variant],
    kept: RowCache,
) -> RowPlan:
    """What is known of each row and variant, and runs of the rest. Rows of one server follow each
    other: they share op times, and workers take runs in this order."""
    plan, requests_of = RowPlan(variants, kept), SharedRequests()
    alike = sorted(rows, key=lambda r: (r.system, r.backend, r.model, r.precision, r.tp or 0))
    for done, row in enumerate(alike):
        progress("checking", done, len(alike))
        plan.add(file, row, requests_of)
    return plan


@contextmanager
def kept_runs() -> Iterator[tuple[Path, RowCache]]:
    """The folder of finished runs and the outcomes, in the cache, or nowhere if there is none."""
    cache = cache_folder()
    if cache is not None:
        yield cache / "scores", RowCache(cache / "outcomes")
        return
    with TemporaryDirectory() as scratch:
        yield Path(scratch) / "scores", RowCache(None)


def simulate_rows(
    plan: RowPlan, folder: Path, backend: Backend, progress: Progress, say: Say
) -> dict[str, str]:
    """Simulate the planned runs; ``plan`` then knows all outcomes. Returns the errors of runs that
    failed, by id: such a row has no outcome in any variant. ``folder`` keeps finished runs."""
    every = [run for id in _ids(plan) for runs in plan.runs.values() if (run := runs.get(id))]
    distinct = {run.key: run for run in every}
    if not distinct:
        return {}
    sweep = SweepPlan("", "score", "", (), None, tuple(distinct.values()), ())
    store, report = Store(folder, f"{VARIABLE}: {folder}"), Report(len(distinct))
    store.open(resume=True)
    with store.locked(f"another score is at work: wait for it, or set {VARIABLE}=off"):
        execute(sweep, store, backend, progress, report, say)
        planned = [(name, id, run) for name, runs in plan.runs.items() for id, run in runs.items()]
        failed = {
            id: report.failures[run.key] for _, id, run in planned if run.key in report.failures
        }
        for name, id, run in planned:
            if id not in failed:
                plan.finished(name, id, store.summary(run.key, run.name))
    for id in failed:
        plan.drop(id)
    return failed


def _ids(plan: RowPlan) -> Iterable[str]:
    return dict.fromkeys(id for runs in plan.runs.values() for id in runs)


def times_of(outcome: RowOutcome) -> ServerTimes:
    """The predictions of an outcome, without bands."""
    numbers = outcome.numbers
    ttft, tpot, rate = (numbers[name] for name in ("ttft_ms", "tpot_ms", "output_tokens_per_s"))
    return ServerTimes(ttft, tpot, rate, kv_full=numbers["kv_peak_share"] >= FULL)
