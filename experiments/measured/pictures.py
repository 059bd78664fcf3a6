"""Figures of measurements beside simulations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from sarathi_sim.experiments.figures.slices import Window, stage_slices
from sarathi_sim.experiments.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    KIND_COLOURS,
    PURPLE,
    VERMILION,
    line_styles,
    save,
    styled,
)
from sarathi_sim.experiments.figures.timeline import stage_timeline
from sarathi_sim.experiments.measured.mlperf_score import BOUND, CAPACITY, ScoredMlperf
from sarathi_sim.experiments.measured.recorded import MEASURES, VARIANTS, ScoredRun, ScoredRuns
from sarathi_sim.experiments.measured.scoring import ScoredRows
from sarathi_sim.experiments.measured.servers import METRICS, Measured, ServerTimes
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import METRICS as METRICS_BY_KEY
from sarathi_sim.simulator.views.metrics import Analysis

if TYPE_CHECKING:
    from sarathi_sim.experiments.lab.engines.session import Comparison

_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}
_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"color": BLACK, "linestyle": "-"},
    "zero": {"color": BLUE, "linestyle": "--"},
    "configured": {"color": GREEN, "linestyle": "-."},
    "fitted": {"color": VERMILION, "linestyle": ":"},
    "left_out": {"color": PURPLE, "linestyle": (0, (5, 1, 1, 1))},
}
_MARKS = {"prefill": "s", "mixed": "D", "decode": "o"}


def _save(figures: Mapping[str, Figure], folder: Path) -> None:
    folder.mkdir()
    for name, figure in figures.items():
        save(figure, folder, name)


def _draw_equality(
    axes: Axes, times: Sequence[float] | Floats, factors: Iterable[float], title: str
) -> None:
    """Logarithmic axes with a line of equal predicted and measured ``times``, and lines at
    ``factors`` of it."""
    ends = np.array([min(times), max(times)])
    axes.plot(ends, ends, "-", color=BLACK, linewidth=1.0)
    for factor in factors:
        axes.plot(ends, factor * ends, ":", color=GREY, linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
    axes.set_title(title)


# Scores -----------------------------------------------------------------------------------------


def draw_score(found: ScoredRows | ScoredRuns | ScoredMlperf, folder: Path) -> None:
    """The distributions of each recorded run; of servers predicted over measured, a point a row
    without flags, and the errors by concurrency; of audited runs the capacities."""
    with styled():
        if isinstance(found, ScoredMlperf):
            if found.best:
                _save({"capacity": audited_capacities(found)}, folder)
        elif isinstance(found, ScoredRuns):
            runs = {each.case.name.replace(", ", "_"): each for each in found.runs}
            _save({name: distributions(each) for name, each in runs.items()}, folder)
        elif plain := [row for row in found.rows if not row.flags and row.id in found.best]:
            figures = {
                "measured_predicted": measured_against_predicted(plain, found.best),
                "error_by_concurrency": error_by_concurrency(plain, found.best),
            }
            _save(figures, folder)


def audited_capacities(found: ScoredMlperf) -> Figure:
    """A line a system and scenario: the predicted capacity with its band over the measured rate,
    beside the bracket from the rate to Offline. Runs of one system stand on one line."""
    runs = [run for run in found.runs if run.id in found.best]
    names = sorted({f"{run.cell}, {run.scenario}" for run in runs})
    figure = Figure(figsize=(9.6, 1.4 + 0.32 * len(names)), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        at = names.index(f"{run.cell}, {run.scenario}")
        known = found.best[run.id].numbers[CAPACITY]
        most = run.offline_samples_per_s / run.rate
        axes.plot([1, most], [at, at], "-", color=GREY, linewidth=7, alpha=0.3, zorder=1)
        ends = [known.low / run.rate, known.high / run.rate]
        axes.plot(ends, [at, at], "-", color=BLUE, linewidth=1.2, zorder=2)
        mark, colour = ("o", BLUE) if run.stress >= BOUND else ("D", GREEN)
        axes.plot(known.value / run.rate, at, mark, color=colour, markersize=5, zorder=3)
    for mark, colour, label in (
        ("o", BLUE, f"P99 at {BOUND:g} of a limit or more"),
        ("D", GREEN, "no limit near"),
    ):
        axes.plot([], [], mark, color=colour, label=f"predicted, {label}")
    axes.plot([], [], "-", color=GREY, linewidth=7, alpha=0.3, label="measured: rate to Offline")
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel="capacity over the measured rate (90 % bands)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside upper left", ncols=3, fontsize=11)
    return figure


def measured_against_predicted(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes]
) -> Figure:
    """A point a row, a colour an engine, both axes logarithmic. The line is equality; the dotted
    lines are off by a quarter."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        for engine, style in zip(_engines(rows), line_styles(), strict=False):
            x, y = _pairs([row for row in rows if row.backend == engine], predictions, metric)
            axes.plot(x, y, ".", color=style["color"], markersize=4, alpha=0.6, label=engine)
        both = _pairs(rows, predictions, metric)
        _draw_equality(axes, [*both[0], *both[1]], (0.8, 1.25), _NAMES[metric])
        axes.legend(loc="upper left")
    return figure


def error_by_concurrency(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes]
) -> Figure:
    """Median absolute error over the clients of the closed loop, a line an engine."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        for engine, style in zip(_engines(rows), line_styles(), strict=False):
            own = [row for row in rows if row.backend == engine]
            clients = sorted({row.concurrency for row in own})
            medians = []
            for count in clients:
                x, y = _pairs([r for r in own if r.concurrency == count], predictions, metric)
                medians.append(100 * np.median(np.abs(np.array(y) / np.array(x) - 1)))
            axes.plot(clients, medians, marker=".", label=engine, **style)
        axes.set(xscale="log", xlabel="clients", ylabel="median absolute error (%)")
        axes.set_ylim(bottom=0)
        axes.set_title(_NAMES[metric])
        axes.legend()
    return figure


def _engines(rows: Sequence[Measured]) -> list[str]:
    return sorted({row.backend for row in rows})


def _pairs(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes], metric: str
) -> tuple[list[float], list[float]]:
    answered = [row for row in rows if row.id in predictions]
    key = f"{metric}_ms"
    measured = [getattr(row, key) for row in answered]
    return measured, [getattr(predictions[row.id], key) for row in answered]


def distributions(scored: ScoredRun) -> Figure:
    """A panel for each measure: the share of requests up to each time."""
    tables = {"measured": scored.case.run.requests}
    tables |= {name: each.requests for name, each in scored.simulated.items()}
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        scale = 1e3 if key == "tpot_s" else 1.0
        for name, table in tables.items():
            values = np.sort(scale * table[key].dropna().to_numpy(np.float64))
            share = np.arange(1, len(values) + 1) / len(values)
            label, style = VARIANTS[name], _STYLES[name]
            axes.step(values, share, where="post", linewidth=1.8, label=label, **style)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=f"{METRICS_BY_KEY[key].name} ({'ms' if scale > 1 else 's'})", ylim=(0, 1))
    figure.axes[0].set_ylabel("share of requests")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=11)
    return figure


# Validations ------------------------------------------------------------------------------------


def draw_validation(outcomes: Mapping[str, Sequence[Comparison]], folder: Path) -> None:
    """The repeat of each cell with the middle makespan."""
    middle = {
        name: sorted(repeats, key=lambda o: o.measured["makespan"])[len(repeats) // 2]
        for name, repeats in outcomes.items()
    }
    pipelines = {name: one for name, one in middle.items() if "bubble_stage1" in one.measured}
    with styled():
        figures = {"iterations": iterations_figure(middle, "calibrated")}
        if pipelines:
            figures["timelines"] = timelines_figure(pipelines, "calibrated")
        _save(figures, folder)


def iterations_figure(outcomes: Mapping[str, Comparison], prediction: str) -> Figure:
    """A panel a cell: every micro-batch's time, predicted over measured; the line is equality."""
    across = min(2, len(outcomes))
    down = -(-len(outcomes) // across)
    figure = Figure(figsize=(5 * across, 0.6 + 4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(outcomes) :]:
        axes.remove()
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=False):
        measured = 1e3 * outcome.measured_iterations
        predicted = 1e3 * outcome.iterations[prediction]
        kind = outcome.steps["kind"].to_numpy()
        for label, mark in _MARKS.items():
            some = kind == label
            if some.any():
                axes.plot(
                    measured[some], predicted[some], mark, color=KIND_COLOURS[label],
                    markeredgecolor=BLACK, markeredgewidth=0.5, markersize=6, label=label,
                )  # fmt: skip
        _draw_equality(axes, np.concatenate([measured, predicted]), (0.9, 1.1), name)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.legend(loc="upper left", title="dotted: 10 % off")
    return figure


def timelines_figure(outcomes: Mapping[str, Comparison], prediction: str) -> Figure:
    """Measured and simulated stages above each other, cell by cell, in the middle of the run."""
    runs = {}
    for name, outcome in outcomes.items():
        runs[f"{name}: measured"] = Analysis(outcome.records["measured"])
        runs[f"{name}: simulated"] = Analysis(outcome.records[prediction])
    shortest = min(analysis.records.end_s for analysis in runs.values())
    window = Window(0.3 * shortest, 0.25 * shortest)
    panels = {name: stage_slices(analysis, window) for name, analysis in runs.items()}
    return stage_timeline(panels, window)
