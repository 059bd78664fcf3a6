"""Figures of scores: predicted beside measured, errors by concurrency, distributions of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sarathi_sim.experiments.figures.style import BLACK, BLUE, GREEN, PURPLE, VERMILION, line_styles
from sarathi_sim.experiments.score.errors import ServerTimes
from sarathi_sim.experiments.score.measured import METRICS, Measured
from sarathi_sim.experiments.score.server_run import MEASURES
from sarathi_sim.simulator.views.metric_registry import METRICS as METRICS_BY_KEY

if TYPE_CHECKING:
    from sarathi_sim.experiments.score.runs import Scored

_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}


_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"color": BLACK, "linestyle": "-"},
    "zero": {"color": BLUE, "linestyle": "--"},
    "configured": {"color": GREEN, "linestyle": "-."},
    "fitted": {"color": VERMILION, "linestyle": ":"},
    "left_out": {"color": PURPLE, "linestyle": (0, (5, 1, 1, 1))},
}
LABELS = {
    "measured": "measured",
    "zero": "no host time",
    "configured": "as configured",
    "fitted": "fitted to these",
    "left_out": "fitted to others",
}


def measured_against_predicted(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes]
) -> Figure:
    """A point a row, a colour an engine, both axes logarithmic. The line is where both are equal;
    the dotted ones are off by a quarter."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        ends = [np.inf, 0.0]
        for engine, style in zip(_engines(rows), line_styles(), strict=False):
            x, y = _pairs([row for row in rows if row.backend == engine], predictions, metric)
            axes.plot(x, y, ".", color=style["color"], markersize=4, alpha=0.6, label=engine)
            ends = [min(ends[0], *x, *y, np.inf), max(ends[1], *x, *y, 0.0)]
        for factor, line in ((0.8, ":"), (1.0, "-"), (1.25, ":")):
            axes.plot(ends, [factor * end for end in ends], line, color=BLACK, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
        axes.set_title(_NAMES[metric])
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
            clients = sorted({row.concurrency for row in own if row.id in predictions})
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


def distributions(scored: Scored) -> Figure:
    """A panel for each measure: the share of requests up to each time."""
    tables = {"measured": scored.case.run.requests}
    tables |= {name: each.requests for name, each in scored.simulated.items()}
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        scale = 1e3 if key == "tpot_s" else 1.0
        for name, table in tables.items():
            values = np.sort(scale * table[key].dropna().to_numpy(np.float64))
            share = np.arange(1, len(values) + 1) / len(values)
            label = LABELS[name]
            axes.step(values, share, where="post", linewidth=1.8, label=label, **_STYLES[name])
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=f"{METRICS_BY_KEY[key].name} ({'ms' if scale > 1 else 's'})", ylim=(0, 1))
    figure.axes[0].set_ylabel("share of requests")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=11)
    return figure
