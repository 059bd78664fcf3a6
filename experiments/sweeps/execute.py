"""The loop of a sweep: send missing runs, write their results, and report failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.experiments.results import SUMMARY, SWEEP_FORMAT, json_bytes
from sarathi_sim.experiments.sweeps.backends import Backend, Bundles, LostJobs, Waiting
from sarathi_sim.experiments.sweeps.jobs import Job, JobResult
from sarathi_sim.experiments.sweeps.paired import paired_differences
from sarathi_sim.experiments.sweeps.plan import Run, SweepPlan, coordinates
from sarathi_sim.experiments.sweeps.store import RESULTS, Store
from sarathi_sim.profiler.storage.child import Progress, Say, silent

ATTEMPTS = 3
"""How often a run is started whose worker dies. The last time nothing else runs beside it, so that
a run that kills its worker is told from those that only were there."""


@dataclass
class Report:
    """The outcome of a sweep. ``busy`` is the share of the workers' time that was spent in runs."""

    total: int
    finished: int = 0
    earlier: int = 0
    lost_workers: int = 0
    wall_s: float = 0.0
    busy: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Runs without a result."""
        return self.total - self.finished


Follow = Callable[[Run], Iterable[Run]]
"""The runs that the result of one leads to: called with each that is finished, or failed."""


def execute(
    plan: SweepPlan,
    store: Store,
    backend: Backend,
    progress: Progress = silent,
    report: Report | None = None,
    say: Say = silent,
    follow: Follow | None = None,
) -> Report:
    """Simulate the missing runs of the folder and write its tables.

    ``report`` is filled in on the way, so it shows the progress of an interrupted sweep. ``say``
    gets messages for the user. The tables of the finished runs are written however the sweep ends.
    With ``follow`` results lead to further runs; they come last in the tables, sorted by key.
    """
    unique = {run.key: run for run in plan.runs}
    report = report or Report(len(unique))
    store.drop_failures()
    began, base = time.monotonic(), str(Path.cwd())
    work_s = 0.0

    def missing(runs: Iterable[Run]) -> list[Job]:
        """The jobs of runs that are not finished; what follows from the others, too."""
        waiting, todo = list(runs), []
        while waiting:
            unique.update({run.key: run for run in waiting})
            done = store.intact((run.key for run in waiting), say)
            report.finished += len(done)
            report.earlier += len(done)
            todo += [Job(run, base) for run in waiting if run.key not in done]
            waiting = [run for run in waiting if run.key in done]
            waiting = [more for run in waiting for more in follow(run)] if follow else []
            report.total += len(waiting)
        return todo

    todo = missing(unique.values())

    def taken_in(what: list[Job], attempt: int) -> list[Job]:
        """One pass over jobs; returns those that were lost."""
        nonlocal work_s
        lost: list[Job] = []
        bundles = Bundles(what, backend.workers, single=attempt > 0)
        ahead = 1 if attempt == ATTEMPTS - 1 else 2 * backend.workers
        with closing(backend.run(bundles, ahead=ahead)) as outcomes:
            for results in outcomes:
                if isinstance(results, Waiting):
                    say(waited_for(results))
                    continue
                if isinstance(results, LostJobs):
                    lost += results.jobs
                    report.lost_workers += 1
                    continue
                bundles.took(results)
                work_s += sum(result.seconds for result in results)
                for result in results:
                    _keep(result, store, report)
                    if follow is not None:
                        more = list(follow(unique[result.key]))
                        report.total += len(more)
                        bundles.add(missing(more))
                progress("runs", report.finished + len(report.failures), report.total)
        return lost

    try:
        lost = todo
        for attempt in range(ATTEMPTS):
            if lost:
                lost = taken_in(lost, attempt)
        for job in lost:
            text = f"its worker died {ATTEMPTS} times, the last time with nothing else running"
            report.failures[job.run.key] = text
            store.write_failure(job.run.key, text + "\n")
    finally:
        backend.close()
        report.wall_s = time.monotonic() - began
        report.busy = work_s / (report.wall_s * backend.workers) if report.wall_s else 0.0
        planned = {run.key for run in plan.runs}
        further = sorted((run for key, run in unique.items() if key not in planned), key=_key)
        write_tables(replace(plan, runs=(*plan.runs, *further)), store, report.failures)
    return report


def _key(run: Run) -> str:
    return run.key


def waited_for(waiting: Waiting) -> str:
    """The message that no result has come for a while, with the missing runs."""
    parts = []
    for who, jobs in waiting.under_way.items():
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        parts.append(f"run {jobs[0].run.key} ({jobs[0].run.name}){more} with {who}")
    return f"no result for {waiting.seconds:.0f} s; waiting for {'; '.join(parts)}"


def _keep(result: JobResult, store: Store, report: Report) -> None:
    if result.error:
        report.failures[result.key] = result.error
        store.write_failure(result.key, result.details)
    else:
        store.write(result)
        report.finished += 1


def write_tables(plan: SweepPlan, store: Store, failures: dict[str, str]) -> None:
    """Write the table of all finished runs, and the sweep's summary.

    Both are made from the runs' folders, so they do not depend on when and where each was
    simulated.
    """
    finished = store.finished()
    rows = [_row(run, plan, store) for run in plan.runs if run.key in finished]
    table = pd.DataFrame(rows)
    store.replace(RESULTS, table.to_parquet(index=False))
    paired = paired_differences(table, plan.contrast, plan.axes)
    content = {
        "format": SWEEP_FORMAT,
        "name": plan.name,
        "description": plan.description,
        "axes": list(plan.axes),
        "contrast": plan.contrast,
        "runs": len(plan.runs),
        "finished": len(rows),
        # Keys of the runs without a result, and why they failed if they did.
        "missing": {r.key: failures.get(r.key) for r in plan.runs if r.key not in finished},
        "paired": paired,
    }
    store.replace(SUMMARY, json_bytes(content))


def _row(run: Run, plan: SweepPlan, store: Store) -> dict[str, Any]:
    numbers = flat(store.summary(run.key, run.name))
    return {"run": run.key, "name": run.name, **coordinates(run, plan.axes), **numbers}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
