"""Predicted beside measured, and errors by concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.figures.style import BLACK, line_styles
from experiments.score.errors import ServerTimes
from experiments.score.measured import METRICS, Measured

_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}


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
