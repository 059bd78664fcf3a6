"""Figures of measurements beside simulations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis
from ...figures.slices import Window, stage_slices
from ...figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    KIND_COLOURS,
    line_styles,
    save,
    styled,
)
from ...figures.timeline import stage_timeline
from .mlperf import BOUND, CAPACITY, ScoredMlperf
from .rows import Measured, ServerTimes
from .score import ScoredRows

if TYPE_CHECKING:
    from ..engines.session import Comparison

_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}
_MARKS = {"prefill": "s", "mixed": "D", "decode": "o"}


def _save(figure: Figure, folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    save(figure, folder, name)


def _plain_ticks(axis: Axis, subs: Sequence[float]) -> None:
    """Of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_equality(axes: Axes, times: Floats, factors: Iterable[float]) -> None:
    """Logarithmic axes with a line of equality, and lines at ``factors`` of it."""
    ends = np.array([times.min(), times.max()])
    axes.plot(ends, ends, "-", color=BLACK, linewidth=1.0)
    for factor in factors:
        axes.plot(ends, factor * ends, ":", color=GREY, linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")


# Scores -----------------------------------------------------------------------------------------


def draw_score(found: ScoredRows | ScoredMlperf, folder: Path) -> None:
    """Of servers a point a row without flags; of audited runs the capacities."""
    with styled():
        if isinstance(found, ScoredMlperf):
            if found.best:
                _save(audited_capacities(found), folder, "capacity")
        elif rows := [row for row in found.rows if not row.flags and row.id in found.best]:
            _save(_measured_predicted(rows, found.best), folder, "measured_predicted")


def _measured_predicted(rows: Sequence[Measured], best: Mapping[str, ServerTimes]) -> Figure:
    """A panel a metric, a point a row, a colour an engine; dotted lines are off by a quarter."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    engines = zip(sorted({row.backend for row in rows}), line_styles(), strict=False)
    colours = {engine: style["color"] for engine, style in engines}
    for axes, (metric, name) in zip(figure.subplots(1, len(_NAMES)), _NAMES.items(), strict=True):
        pairs = np.array([(row.of(metric), best[row.id].of(row, metric)) for row in rows], float)
        for engine, colour in colours.items():
            own = pairs[[row.backend == engine for row in rows]].T
            axes.plot(*own, ".", color=colour, markersize=4, alpha=0.6, label=engine)
        _draw_equality(axes, pairs, (0.8, 1.25))
        axes.set_title(name)
        axes.legend()
    return figure


def audited_capacities(found: ScoredMlperf) -> Figure:
    """A line a system and scenario: the predicted capacity with its band over the measured rate,
    beside the bracket from the rate to Offline."""
    runs = [run for run in found.runs if run.id in found.best]
    names = sorted({f"{run.cell}, {run.scenario}" for run in runs})
    figure = Figure(figsize=(9.6, 1.4 + 0.32 * len(names)), layout="constrained")
    axes = figure.subplots()
    marks = {
        True: ("o", BLUE, f"P99 at {BOUND:g} of a limit or more"),
        False: ("D", GREEN, "no limit near"),
    }
    for run in runs:
        at = names.index(f"{run.cell}, {run.scenario}")
        value, *ends = (number / run.rate for number in found.best[run.id].numbers[CAPACITY])
        most = run.offline_samples_per_s / run.rate
        axes.plot([1, most], [at, at], "-", color=GREY, linewidth=7, alpha=0.3, zorder=1)
        axes.plot(ends, [at, at], "-", color=BLUE, linewidth=1.2, zorder=2)
        mark, colour, _ = marks[run.stopped]
        axes.plot(value, at, mark, color=colour, markersize=5, zorder=3)
    for mark, colour, label in marks.values():
        axes.plot([], [], mark, color=colour, label=f"predicted, {label}")
    axes.plot([], [], "-", color=GREY, linewidth=7, alpha=0.3, label="measured: rate to Offline")
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel="capacity over the measured rate (90 % bands)")
    _plain_ticks(axes.xaxis, (1, 1.5, 2, 3, 5, 7))
    figure.legend(loc="outside upper left", ncols=3, fontsize=11)
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
        _save(iterations_figure(middle), folder, "iterations")
        if pipelines:
            _save(timelines_figure(pipelines), folder, "timelines")


def iterations_figure(outcomes: Mapping[str, Comparison]) -> Figure:
    """A panel a cell: every micro-batch's time, predicted over measured; the line is equality."""
    across = min(2, len(outcomes))
    down = -(-len(outcomes) // across)
    figure = Figure(figsize=(5 * across, 0.6 + 4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(outcomes) :]:
        axes.remove()
    look: dict[str, Any] = {"markeredgecolor": BLACK, "markeredgewidth": 0.5, "markersize": 6}
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=False):
        measured = 1e3 * outcome.measured_iterations
        predicted = 1e3 * outcome.iterations["calibrated"]
        for label, mark in _MARKS.items():
            some = (outcome.steps["kind"] == label).to_numpy()
            if some.any():
                look |= {"color": KIND_COLOURS[label], "label": label}
                axes.plot(measured[some], predicted[some], mark, **look)
        _draw_equality(axes, np.concatenate([measured, predicted]), (0.9, 1.1))
        axes.set_title(name)
        for axis in (axes.xaxis, axes.yaxis):
            _plain_ticks(axis, (1, 2, 5))
        axes.legend(loc="upper left", title="dotted: 10 % off")
    return figure


def timelines_figure(outcomes: Mapping[str, Comparison]) -> Figure:
    """Measured and simulated stages above each other, cell by cell, in the middle of the run."""
    runs = {}
    for name, outcome in outcomes.items():
        runs[f"{name}: measured"] = Analysis(outcome.records["measured"])
        runs[f"{name}: simulated"] = Analysis(outcome.records["calibrated"])
    shortest = min(analysis.records.end_s for analysis in runs.values())
    window = Window(0.3 * shortest, 0.25 * shortest)
    panels = {name: stage_slices(analysis, window) for name, analysis in runs.items()}
    return stage_timeline(panels, window)
