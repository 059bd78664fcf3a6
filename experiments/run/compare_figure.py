"""The parts of two results side by side, as bars; and the folder that keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from sarathi_sim.experiments.figures.style import policy_styles, save, styled
from sarathi_sim.experiments.results import FIGURES_FORMAT, result_folder, write_summary
from sarathi_sim.experiments.run.compare import TITLES, by_difference, part_label, percent

SMALLEST = 0.005
"""Parts below this share of both totals are not drawn."""
_SIDES = (("a", -0.2), ("b", 0.2))


def write_comparison(result: Mapping[str, Any], out: Path) -> None:
    """Write :func:`sarathi_sim.experiments.run.compare.compare`'s result and figure, completely or
    not at all.

    Raises ConfigError where ``out`` holds something else than an earlier one.
    """
    with result_folder(out, FIGURES_FORMAT) as folder:
        plotted = {"plotted": [result["a"], result["b"]]}
        write_summary(folder, FIGURES_FORMAT, plotted | dict(result))
        (folder / "figures").mkdir()
        with styled():
            save(parts_figure(result), folder / "figures", "comparison")


def parts_figure(result: Mapping[str, Any]) -> Figure:
    """A pair of bars for each part of the wall clock and of the mean latency, in seconds."""
    shown = {key: drawn_parts(result[key]) for key in TITLES}
    heights = [len(names) + 1.5 for names in shown.values()]
    layout = ConstrainedLayoutEngine(w_pad=0.2)  # text is not as wide on paper as on screen
    figure = Figure(figsize=(10, 1.6 + 0.42 * sum(heights)), layout=layout)
    panels = figure.subplots(len(shown), 1, height_ratios=heights)
    colours = [style["color"] for style in policy_styles(result["policies"])]
    for axes, (key, names) in zip(panels, shown.items(), strict=True):
        _bars(axes, key, names, result[key], colours)
    handles = [
        Patch(color=colour, label=f"{side.upper()}: {result[side]}")
        for (side, _), colour in zip(_SIDES, colours, strict=True)
    ]
    figure.legend(handles=handles, loc="outside upper left", fontsize=11)
    return figure


def drawn_parts(breakdown: Mapping[str, Any]) -> list[str]:
    """The parts worth drawing, the largest difference first."""
    parts, total = breakdown["parts"], breakdown["total"]
    least = SMALLEST * max(total["a_s"], total["b_s"])
    return [
        name
        for name in by_difference(parts)
        if max(abs(parts[name]["a_s"]), abs(parts[name]["b_s"])) >= least
    ]


def _bars(
    axes: Axes, key: str, names: list[str], breakdown: Mapping[str, Any], colours: list[str]
) -> None:
    parts, total = breakdown["parts"], breakdown["total"]
    rows = np.arange(len(names))
    for (side, shift), colour in zip(_SIDES, colours, strict=True):
        seconds = [parts[name][f"{side}_s"] for name in names]
        axes.barh(rows + shift, seconds, 0.38, color=colour)
    for row, name in enumerate(names):
        part = parts[name]
        end = max(part["a_s"], part["b_s"], 0.0)
        axes.annotate(
            _signed(part["difference_s"]),
            (end, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(rows, [part_label(key, name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.16)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.set_xlabel("time (s); beside the bars B - A")
    axes.set_title(
        f"{TITLES[key]}:\nA {total['a_s']:,.4g} s, B {total['b_s']:,.4g} s, "
        f"B - A {_signed(total['difference_s'])} s "
        f"({percent(total['difference_s'], total['a_s'])} of A)"
    )


def _signed(seconds: float) -> str:
    return f"{seconds:+,.0f}" if abs(seconds) >= 100 else f"{seconds:+.3g}"
