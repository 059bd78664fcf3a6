"""Distributions over a run's requests, measured and simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.figures.style import BLACK, BLUE, GREEN, PURPLE, VERMILION
from experiments.score.runs import Scored
from experiments.score.server_run import MEASURES
from simulator.views.metric_registry import METRICS

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
        axes.set(xlabel=f"{METRICS[key].name} ({'ms' if scale > 1 else 's'})", ylim=(0, 1))
    figure.axes[0].set_ylabel("share of requests")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=11)
    return figure
