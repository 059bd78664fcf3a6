"""The output of a run: progress while it lasts, tables at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from experiments.config.deployment import Deployment
from experiments.results import SUMMARY
from experiments.run.experiment import ExperimentResult
from experiments.run.rich_table import rich_table
from simulator.views.metric_registry import STEADY, Quantity, known, number_text

Number = float | list[float] | None
"""A cell: a number, the two ends of a band, or nothing."""

SHOWN = (
    *("makespan_s", "makespan_s_band", "requests_per_s", "tokens_per_s", "tokens_per_s_band"),
    *("mfu", "mean_batch", "hit_rate", "preemption_rate", "recomputed_share", "empty_iterations"),
    *("ttft_s.p50", "ttft_s.p99", "tbt_s.p50", "tbt_s.p99"),
    *("latency_s.p50", "latency_s.p99", "bubble_s.p50", "bubble_share", "rejected"),
)
"""Paths of the metrics that the table shows; with ``_band`` at its end, its 90 % band."""
_WHERE_ANY = (
    *("bubble_s.p50", "bubble_share", "rejected"),
    *("hit_rate", "preemption_rate", "recomputed_share", "empty_iterations"),
)
"""Those that are shown where some scenario has any."""


def shown_row(path: str, summaries: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """A row of the results: name, unit, the scenarios' numbers. None where no scenario has any."""
    metric = known(path.removesuffix("_band"))
    values = [_value(summary, path, metric) for summary in summaries]
    nothing = (None, "0") if path in _WHERE_ANY else (None,)
    if all(value in nothing for value in values):
        return None
    band = ", 90 % band" if path.endswith("_band") else ""
    cells = ("-" if value is None else value for value in values)
    return [metric.label + band, metric.metric.unit, *cells]


def _value(summary: Mapping[str, Any], path: str, quantity: Quantity) -> str | None:
    """A cell. Latencies are of the steady part of a run that has one, none of an overloaded one."""
    metric, state = quantity.metric, summary["steady"]["state"]
    if metric.grows and state == "overloaded":
        return None
    found: Any = summary["steady"] if metric.grows and state == "steady" else summary
    for part in path.split("."):
        found = found.get(part)
    if isinstance(found, list):
        return " to ".join(map(quantity.text, found))
    return None if found is None else quantity.text(found)


OF_ARRIVALS = 0.9
"""With this share of the makespan before the last arrival, the arrivals set the throughput."""
_KEPT_ARRIVALS = (
    "the 90 % bands are too narrow: they keep the arrivals as they were, although with slower ops "
    "the clients would send later"
)
_SET_BY_ARRIVALS = (
    "the 90 % bands are narrow because the arrivals set makespan and throughput, not because op "
    "times are sure; they say nothing of latencies"
)


def load_notes(summaries: Mapping[str, Mapping[str, Any]], written: Path) -> list[str]:
    """A note for each overloaded run, with the place of its numbers.

    ``written`` is the folder of the result.
    """
    return [
        f"{name} is overloaded: its queue grows while requests arrive (Kendall's S "
        f"{summary['steady']['kendall_s']} of 45 over ten blocks). Its latencies depend on the "
        f"length of the run and are not printed. Those over all its {summary['finished']:,} "
        f"requests are in {written / SUMMARY} (scenarios.{name}: {', '.join(STEADY)})"
        for name, summary in summaries.items()
        if summary["steady"]["state"] == "overloaded"
    ]


def band_notes(outcome: ExperimentResult) -> list[str]:
    """Why the bands of some runs are narrow although their op times are not that sure: a note for
    each reason."""
    said: dict[str, list[str]] = {}
    for name, run in outcome.runs.items():
        workload, sent_s = run.deployment.scenario.workload, run.analysis.records.arrival_s
        if run.uncertainty is None:
            continue
        if workload.sessions is not None or workload.arrivals.kind == "closed_loop":
            said.setdefault(_KEPT_ARRIVALS, []).append(name)
        elif float(sent_s.max() - sent_s.min()) > OF_ARRIVALS * run.summary["makespan_s"]:
            said.setdefault(_SET_BY_ARRIVALS, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in said.items()]


def results_table(outcome: ExperimentResult) -> Table:
    """The scenarios side by side."""
    summaries = outcome.summary()["scenarios"]
    return rich_table(
        ("", "unit"),
        list(summaries),
        filter(None, (shown_row(path, summaries.values()) for path in SHOWN)),
        title=outcome.experiment.name,
        title_style="bold",
        caption="Every number is defined in docs/metrics.md.",
    )


def ratios_table(outcome: ExperimentResult) -> Table | None:
    """The ratios of the ``compare`` section beside the paper's, or None if there are none."""
    compare = outcome.experiment.compare
    if not compare:
        return None
    bands = outcome.ratio_bands
    found = outcome.summary()
    scenarios, ratios = found["scenarios"], found["ratios"]
    stated = any(ratio.paper is not None for ratio in compare.values())
    rows = []
    for name, ratio in compare.items():
        growing = ratio.metric.startswith(STEADY) and any(
            scenarios[over]["steady"]["state"] == "overloaded" for over in ratio.over
        )
        value: float | None = None if growing else ratios[name]
        label = ratio.label or f"{known(ratio.metric).label}, {' / '.join(ratio.over)}"
        simulated = "overloaded" if growing else number_or_dash(value)
        cells = [name, label, simulated, number_or_dash(bands.get(name))]
        if stated:
            off = ""
            if ratio.paper is not None and value is not None:
                off = f"{100 * (value / ratio.paper - 1):+.0f} %"
            cells += [number_or_dash(ratio.paper), off]
        rows.append(cells)
    headings = ("simulated", "90 % band", "paper", "difference")
    return rich_table(("ratio", "of what"), headings[: 4 if stated else 2], rows)


def print_warnings(outcome: ExperimentResult) -> None:
    """Print, on stderr, each op with batches outside the measured region once."""
    said: dict[str, list[str]] = {}
    for name, run in outcome.runs.items():
        for outside in run.uncertainty.outside if run.uncertainty is not None else ():
            said.setdefault(f"{run.deployment.bundle_name}: {outside}", []).append(name)
    for text, names in said.items():
        typer.echo(f"warning: {', '.join(names)}: {text}", err=True)


def number_or_dash(value: Number) -> str:
    """A cell of a table: a number, or the two ends of a band."""
    if value is None:
        return "-"
    return " to ".join(map(number_text, value if isinstance(value, list) else [value]))


class ProgressBar:
    """Shows the current step and its expected time, after the first second.

    Use as a context manager, and call it with the step, its progress and its length.
    """

    def __init__(self, console: Console, enabled: bool) -> None:
        # A log file needs no escape sequences.
        self._enabled = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self._shown = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)
        if not self._shown and time.monotonic() - self._began > 1:
            self._shown = True
            self._progress.start()


def deployments_table(deployments: Mapping[str, Deployment]) -> Table:
    """The deployment of each scenario, side by side."""
    rows: dict[str, Callable[[Deployment], str]] = {
        "model": lambda d: d.model.name,
        "device": lambda d: d.device.name,
        "policy": lambda d: d.scenario.policy.name,
        "TP x PP x replicas": lambda d: (
            f"{d.scenario.cluster.tp} x {d.scenario.cluster.pp} x {d.scenario.cluster.replicas}"
        ),
        "max batch": lambda d: str(d.scenario.batching.max_batch),
        "micro-batches in flight": lambda d: str(d.scenario.batching.max_in_flight),
        "KV tokens": lambda d: f"{d.kv_capacity:,}",
        "requests": lambda d: f"{len(d.requests):,}",
    }
    cells = [[label, *map(cell, deployments.values())] for label, cell in rows.items()]
    return rich_table([""], list(deployments), cells)


def bench_table(numbers: Mapping[str, Any]) -> Table:
    """The benchmark's numbers."""
    policies = list(numbers["loop_s"])
    simple = {
        "event loop (s)": ("loop_s", "{:.3f}"),
        "textbook SimPy (s)": ("oracle_s", "{:.2f}"),
        "times faster": ("speedup_vs_oracle", "{:.1f}"),
        "per-stage traces, share of the loop's time": ("trace_share", "{:.2f}"),
        "stage executions a second": ("stage_executions_per_s", "{:,.0f}"),
        "us an iteration": ("loop_iteration_us", "{:.2f}"),
        "that, times reserved memory": ("over_reserved", "{:.2f}"),
    }
    rows = [
        [
            label,
            *(form.format(numbers[key][p]) if p in numbers[key] else "-" for p in policies),
        ]
        for label, (key, form) in simple.items()
    ]
    by_batch = numbers["iteration_us"]
    for batch in max(by_batch.values(), key=len):
        times = (by_batch[policy].get(batch) for policy in policies)
        cells = ("-" if time_us is None else f"{time_us:.2f}" for time_us in times)
        rows.append([f"us an iteration at batch {batch}", *cells])
    memory = f"peak memory of the process: {numbers['peak_rss_mb']:.0f} MB"
    return rich_table([""], policies, rows, caption=memory)
