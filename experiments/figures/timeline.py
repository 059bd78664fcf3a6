"""The figures of a run: stage timeline and use of paged memory; :func:`draw` draws all figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sarathi_sim.simulator.loop.records import Floats
from .distributions import run_figures
from .slices import KINDS, Drawing, MemoryCurves, StageSlices, Window
from .style import (
    BLACK,
    GREY,
    KIND_COLOURS,
    VERMILION,
    policy_colour,
    policy_styles,
    save,
    styled,
)

_MOST_ROWS = 16
_BUBBLE: dict[str, Any] = {
    "facecolor": "#fdeee6",
    "edgecolor": VERMILION,
    "hatch": "////",
    "linewidth": 0.0,
}


def stage_timeline(
    panels: Mapping[str, list[StageSlices]],
    window: Window,
    policies: Mapping[str, str] | None = None,
) -> Figure:
    """One panel per scenario, one row per stage (or replica); time runs to the right.

    ``panels`` are the scenarios' slices in the window. A title has the colour of the scenario's
    policy, where ``policies`` names that.
    """
    rows = [min(len(stages), _MOST_ROWS) for stages in panels.values()]
    heights = [max(count, 2) for count in rows]
    height = 1.5 + 0.27 * sum(heights) + 0.35 * len(rows)
    figure = Figure(figsize=(10, height), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights).ravel()
    for axes, (name, stages) in zip(grid, panels.items(), strict=True):
        draw_stages(
            axes, name, stages, BLACK if policies is None else policy_colour(policies[name])
        )
    grid[-1].set(xlim=(window.start_s, window.end_s), xlabel="time (s)")
    grid[-1].ticklabel_format(axis="x", useOffset=False)
    drawn = [stage for stages in panels.values() for stage in stages[:_MOST_ROWS]]
    kinds = {kind for stage in drawn for kind in stage.kind}
    handles = [
        Patch(facecolor=KIND_COLOURS[label], label=label)
        for kind, label in enumerate(KINDS)
        if kind in kinds
    ]
    if any((stage.bubble_s > 0).any() for stage in drawn):
        handles.append(Patch(label="bubble", **_BUBBLE))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def draw_stages(axes: Axes, name: str, stages: list[StageSlices], colour: str = BLACK) -> None:
    """One panel of :func:`stage_timeline`, on given axes; the caller sets the limits of x."""
    shown = stages[:_MOST_ROWS]
    for kind, label in enumerate(KINDS):
        boxes = [
            _boxes(s.start[s.kind == kind], s.finish[s.kind == kind], row)
            for row, s in enumerate(shown)
        ]
        # White edges keep neighbouring micro-batches apart.
        axes.add_collection(
            PolyCollection(
                np.concatenate(boxes),  # type: ignore[arg-type]
                facecolors=KIND_COLOURS[label],
                edgecolors="white",
                linewidths=0.5,
            )
        )
    idle = [
        _boxes(s.bubble_start[s.bubble_s > 0], s.start[s.bubble_s > 0], row)
        for row, s in enumerate(shown)
    ]
    bubbles = PolyCollection(np.concatenate(idle), zorder=0.5, **_BUBBLE)  # type: ignore[arg-type]
    axes.add_collection(bubbles)
    pipeline = len({s.stage for s in stages}) > 1
    one_replica = len({s.replica for s in stages}) == 1
    if shown and shown[0].rank:
        row_name, labels = "replica", [s.label for s in shown]
    elif one_replica:
        row_name, labels = "stage", [str(s.stage) for s in shown]
    elif pipeline:
        row_name, labels = "replica:stage", [f"{s.called}:{s.stage}" for s in shown]
    else:
        row_name, labels = "replica", [s.called for s in shown]
    hidden = len(stages) - len(shown)
    more = f" (first {len(shown)} of {len(stages)} rows)" if hidden else ""
    axes.set_title(name + more, color=colour)
    axes.set_ylabel(row_name)
    axes.set_yticks(range(len(shown)), labels, fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False)


def _boxes(start: Floats, finish: Floats, row: int) -> Floats:
    """Corner points of rectangles, shape (n, 4, 2)."""
    low, high = np.full(len(start), row - 0.43), np.full(len(start), row + 0.43)
    x = np.stack([start, finish, finish, start], axis=1)
    y = np.stack([low, low, high, high], axis=1)
    return np.stack([x, y], axis=2)


def occupancy(
    curves: Mapping[str, MemoryCurves], policies: Mapping[str, str], budgets: Mapping[str, int]
) -> Figure:
    """KV occupancy, tokens of an iteration and running sequences of the runs with paged memory.

    Over simulated time, one line per scenario. ``policies`` are the scenarios'. ``budgets`` are the
    largest numbers of tokens in an iteration, of the scenarios that have one: dotted lines.
    """
    figure = Figure(figsize=(8.0, 8.4), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    styles = policy_styles([policies[name] for name in curves])
    for (name, values), style in zip(curves.items(), styles, strict=True):
        for axes, curve in zip(panels, values, strict=True):
            axes.plot(*curve, label=name, drawstyle="steps-mid", **style)
    for number, budget in enumerate(sorted(set(budgets.values()))):
        label = "" if number else "token budget of an iteration"
        panels[1].axhline(budget, color=GREY, linestyle=":", label=label)
    panels[0].set(ylabel="KV blocks in use (%)", ylim=(0, 102))
    panels[1].set_ylabel("tokens of an iteration")
    panels[2].set(ylabel="sequences of an iteration", xlabel="time (s)")
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    handles = panels[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=2)
    return figure


Drawn = Callable[[int, int], object]
"""Called with the number of drawn figures, and the number of all."""


def draw(drawing: Drawing, folder: Path, drawn: Drawn) -> None:
    """Draw all figures of a run into ``folder``. Raises OSError."""
    tables = drawing.tables
    policies = {name: table.policy for name, table in tables.items()}
    figures = {
        **run_figures(tables),
        "timeline": lambda: stage_timeline(drawing.slices, drawing.window, policies),
    }
    if drawing.memory:
        figures["occupancy"] = lambda: occupancy(drawing.memory, policies, drawing.budgets)
    draw_figures(figures, folder, drawn)


def draw_figures(
    figures: Mapping[str, Callable[[], Figure]], folder: Path, drawn: Drawn | None = None
) -> list[Path]:
    """Draw figures by file name; returns the written paths. Raises OSError."""
    folder.mkdir(exist_ok=True)
    written = []
    for done, (name, figure) in enumerate(figures.items()):
        if drawn is not None:
            drawn(done, len(figures))
        with styled():
            written += save(figure(), folder, name)
    return written
