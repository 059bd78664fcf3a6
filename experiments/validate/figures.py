"""Figures of a validation: each iteration measured against predicted, and the two timelines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sarathi_sim.experiments.figures.gantt import stage_timeline
from sarathi_sim.experiments.figures.slices import Window, stage_slices
from sarathi_sim.experiments.figures.style import BLACK, GREY, KIND_COLOURS
from sarathi_sim.experiments.validate.differences import Comparison
from sarathi_sim.simulator.views.metrics import Analysis

_MARKS = {"prefill": "s", "mixed": "D", "decode": "o"}


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
        kind = np.array(outcome.kinds)
        for label, mark in _MARKS.items():
            some = kind == label
            if some.any():
                axes.plot(
                    measured[some], predicted[some], mark, color=KIND_COLOURS[label],
                    markeredgecolor=BLACK, markeredgewidth=0.5, markersize=6, label=label,
                )  # fmt: skip
        ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
        axes.plot(ends, ends, "-", color=BLACK, linewidth=1.2)
        for factor in (0.9, 1.1):
            axes.plot(ends, [factor * end for end in ends], ":", color=GREY, linewidth=1.2)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set(title=name, xlabel="measured (ms)", ylabel="predicted (ms)")
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
