"""The loop of a sweep: send missing runs, write their results and tables, predict its time.

All runs of one seed serve the same requests, whatever the policy (common random numbers): the
logarithm of a metric's ratio is taken seed by seed, and its mean gets a Student-t interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.simulator.views.metric_registry import STEADY
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.base import Source
from ..config.deployment import deploy
from ..results import SUMMARY, SWEEP_FORMAT, json_bytes, parquet_bytes
from ..run.ranking import half_width
from .backends import Backend, Bundles
from .jobs import Job
from .plan import Run, SweepPlan, coordinates
from .store import RESULTS, Store

PATIENCE_S = 60.0
"""Seconds without any result after which it is said what is under way; then twice as many."""
ATTEMPTS = 3
"""Attempts for a run whose worker dies. At the last one nothing else runs beside it, so that a run
that kills its worker is told from runs that died beside it."""


@dataclass
class Report:
    """The outcome of a sweep. ``run_s`` are the seconds of all runs, ``busy`` the share of the
    workers' time spent in them."""

    total: int
    finished: int = 0
    earlier: int = 0
    lost_workers: int = 0
    wall_s: float = 0.0
    run_s: float = 0.0
    busy: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    def line(self, workers: int) -> str:
        """Finished runs, time, and the workers' share of time in runs."""
        ran = self.finished - self.earlier
        parts = [f"{self.finished} of {self.total} runs finished"]
        if self.earlier:
            parts.append(f"{self.earlier} of them earlier")
        if ran:
            parts.append(
                f"{duration(self.wall_s)} on {workers} worker{'s' if workers > 1 else ''}, "
                f"{100 * self.busy:.0f} % of the time in runs"
            )
        if self.lost_workers:
            parts.append(f"{self.lost_workers} bundles of runs were sent again after a worker died")
        return ", ".join(parts)


def failed_runs(report: Report, folder: Path) -> list[str]:
    """A line for some of the failed runs, and where their tracebacks are."""
    said, count = [], len(report.failures)
    said += [f"failed: run {key}: {error}" for key, error in list(report.failures.items())[:5]]
    said += [f"... and {count - 5} more"] if count > 5 else []
    whole = f"{count} of {report.total} runs failed; their tracebacks are in {folder}"
    return [*said, f"{whole}; --resume tries them again"] if said else []


def duration(seconds: float) -> str:
    """Seconds as text with a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


Follow = Callable[[Run], Iterable[Run]]
"""Called with each finished or failed run; returns further runs that follow from its result."""


def execute(
    plan: SweepPlan,
    store: Store,
    backend: Backend,
    progress: Progress = silent,
    report: Report | None = None,
    say: Say = silent,
    follow: Follow | None = None,
) -> Generator[Report, None, None]:
    """Simulate the missing runs of the folder and write its tables, however the sweep ends. Yields
    the ``report``, which is filled in on the way, whenever something has come, and about once a
    second. ``say`` gets messages for the user. With ``follow`` results lead to further runs; they
    come last in the tables, sorted by key."""
    unique = {run.key: run for run in plan.runs}
    report = report or Report(len(unique))
    store.drop_failures()
    began, base = time.monotonic(), str(Path.cwd())
    before_s = report.run_s

    def missing(runs: Iterable[Run]) -> list[Job]:
        """The jobs of unfinished runs, and of the runs that follow from finished ones."""
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

    lost = missing(unique.values())

    def taken_in(what: list[Job], attempt: int) -> Generator[Report, None, list[Job]]:
        """One pass over jobs; returns the jobs whose workers died."""
        lost, patience_s = list[Job](), PATIENCE_S
        bundles = Bundles(what, backend.workers, single=attempt > 0)
        ahead = 1 if attempt == ATTEMPTS - 1 else 2 * backend.workers
        with closing(backend.run(bundles, ahead=ahead)) as outcomes:
            for kind, jobs, value in outcomes:
                if kind == "raised":
                    raise value
                elif kind == "waiting":
                    if value >= patience_s:
                        say(waited_for(jobs, value))
                        patience_s *= 2
                elif kind == "lost":
                    lost += jobs
                    report.lost_workers += 1
                else:
                    patience_s = PATIENCE_S
                    bundles.took(value)
                    for result in value:
                        report.run_s += result.seconds
                        if result.error:
                            report.failures[result.key] = result.error
                            store.write_failure(result.key, result.details)
                        else:
                            store.write(result)
                            report.finished += 1
                        if follow is not None:
                            more = list(follow(unique[result.key]))
                            report.total += len(more)
                            bundles.add(missing(more))
                    progress("runs", report.finished + len(report.failures), report.total)
                yield report
        return lost

    try:
        for attempt in range(ATTEMPTS):
            if lost:
                lost = yield from taken_in(lost, attempt)
        for job in lost:
            text = f"its worker died {ATTEMPTS} times, the last time with nothing else running"
            report.failures[job.run.key] = text
            store.write_failure(job.run.key, text + "\n")
    finally:
        report.wall_s = time.monotonic() - began
        work_s = report.run_s - before_s
        report.busy = work_s / (report.wall_s * backend.workers) if report.wall_s else 0.0
        planned = {run.key for run in plan.runs}
        further = [unique[key] for key in sorted(unique.keys() - planned)]
        write_tables(replace(plan, runs=(*plan.runs, *further)), store, report.failures)
    yield report


def waited_for(under_way: dict[str, list[Job]], seconds: float) -> str:
    """The message that no result came for a while, with the missing runs by worker."""
    parts = []
    for who, jobs in under_way.items():
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        parts.append(f"run {jobs[0].run.key} ({jobs[0].run.name}){more} with {who}")
    return f"no result for {seconds:.0f} s; waiting for {'; '.join(parts)}"


def write_tables(plan: SweepPlan, store: Store, failures: dict[str, str]) -> None:
    """Write the table of all finished runs, and the sweep's summary, with the keys and points of
    the runs without a result and, if they failed, why. Both are made from the runs' folders, so
    they do not depend on when and where runs were simulated."""
    finished = store.finished()
    rows = [
        {"run": run.key, "name": run.name, **coordinates(run, plan.axes)}
        | flat(store.summary(run.key, run.name))
        for run in plan.runs
        if run.key in finished
    ]
    table = pd.DataFrame(rows)
    store.replace(RESULTS, table.to_parquet(index=False))
    content = {
        "format": SWEEP_FORMAT,
        "name": plan.name,
        "description": plan.description,
        "notes": list(plan.notes),
        "axes": list(plan.axes),
        "contrast": plan.contrast,
        "runs": len(plan.runs),
        "finished": len(rows),
        "missing": {
            run.key: {"point": coordinates(run, plan.axes), "error": failures.get(run.key)}
            for run in plan.runs
            if run.key not in finished
        },
        "paired": paired_differences(table, plan.contrast, plan.axes),
    }
    store.replace(SUMMARY, json_bytes(content))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


METRICS = (
    "makespan_s",
    "output_tokens_per_s",
    "ttft_s.p50",
    "ttft_s.p99",
    "tbt_s.p50",
    "tbt_s.p99",
    "latency_s.p50",
    "bubble_s.p50",
)


def paired_differences(
    table: pd.DataFrame, contrast: str | None, axes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The ratio of each metric between every value of ``contrast`` and its first one: an entry a
    point of the other axes but the seed. ``ratios``: metric -> ``ratio`` (geometric mean over the
    seeds), ``low`` and ``high`` (95 % interval, None with a single seed) and ``unpaired`` (how many
    times as wide the interval would be if the seeds were not paired). A metric that is 0 or missing
    somewhere is left out, as are latencies where a run is overloaded."""
    if contrast is None or table.empty:
        return []
    # As text, because a value may be missing (null), and a missing one does not equal itself.
    level_of = table[contrast].map(str)
    levels = list(dict.fromkeys(level_of))
    others = [axis for axis in axes if axis not in (contrast, "seed")]
    found = []
    groups = table.assign(_point=table[others].map(str).agg("|".join, axis=1) if others else "")
    for _, group in groups.groupby("_point", sort=False):
        base = _by_seed(group[level_of[group.index] == levels[0]])
        for level in levels[1:]:
            other = _by_seed(group[level_of[group.index] == level])
            seeds = [seed for seed in base.index if seed in other.index]
            if not seeds:
                continue
            runs = pd.concat([base.loc[seeds], other.loc[seeds]])
            growing = "steady.state" in runs and (runs["steady.state"] == "overloaded").any()
            ratios = {
                metric: entry
                for metric in METRICS
                if not (growing and metric.startswith(STEADY))
                and (entry := _ratio(base.loc[seeds, metric], other.loc[seeds, metric])) is not None
            }
            entry = {
                "point": {axis: _plain(other[axis].iloc[0]) for axis in others},
                "value": _plain(other[contrast].iloc[0]),
                "against": _plain(base[contrast].iloc[0]),
                "seeds": len(seeds),
                "ratios": ratios,
            }
            found.append(entry)
    return found


def _by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.set_index(pd.Index(rows["seed"] if "seed" in rows else [0] * len(rows)))


def _plain(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _ratio(base: pd.Series[float], other: pd.Series[float]) -> dict[str, Any] | None:
    below, above = base.to_numpy(np.float64), other.to_numpy(np.float64)
    if not ((below > 0).all() and (above > 0).all()):  # NaN is not above 0 either
        return None
    logs = np.log(above) - np.log(below)
    mean, count = float(logs.mean()), len(logs)
    entry: dict[str, Any] = {
        "ratio": math.exp(mean),
        "low": None,
        "high": None,
        "unpaired": None,
    }
    if count > 1:
        half = half_width(float(logs.std(ddof=1)), count, count - 1)
        entry |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
        # Two samples have more degrees of freedom than their differences, which narrows it.
        apart = math.hypot(float(np.log(below).std(ddof=1)), float(np.log(above).std(ddof=1)))
        entry["unpaired"] = half_width(apart, count, 2 * (count - 1)) / half if half else None
    return entry


PROBES, PROBE_REQUESTS = 6, 200


def seconds_of_work(plan: SweepPlan) -> float:
    """Predicted seconds of one processor for all of the runs. The :data:`PROBES` runs are spread
    evenly over the plan and cut to :data:`PROBE_REQUESTS` requests; the rest is proportional. This
    is approximate: short runs do not show how queues and batches grow."""
    step = max(1, len(plan.runs) // PROBES)
    probed = plan.runs[step // 2 :: step][:PROBES]
    seconds = 0.0
    for run in probed:
        deployment = deploy(run.scenario, Source(plan.file, run.name, {}, ()))
        few = replace(deployment, requests=deployment.requests[:PROBE_REQUESTS])
        _ = few.predictor  # tabulated once in each worker, not once in each run
        began = time.perf_counter()
        analysis = Analysis(few.simulate())
        few.summary(analysis)
        parquet_bytes(analysis.request_columns)
        took = time.perf_counter() - began
        seconds += took * len(deployment.requests) / max(len(few.requests), 1)
    return seconds / max(len(probed), 1) * len(plan.runs)
