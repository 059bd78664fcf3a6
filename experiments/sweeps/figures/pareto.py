"""The Pareto front of a sweep: the points that no other one beats in both of two metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_sim.experiments.config.parameter_names import parameter
from sarathi_sim.experiments.sweeps.figures.drawing import (
    groups,
    heading,
    label,
    legend,
    overload_note,
    panel_size,
    panels,
    scale,
    shown,
)
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import Better, quantity

Places = np.ndarray[tuple[int], np.dtype[np.intp]]
_MARKERS = "os^Dv"
_OFFSETS = [(x, y) for far in (9, 20, 31) for y in (far, -far) for x in (9, -9, 20, -20)]
"""From a point to its letter, in points; the first that is free is taken."""
_ALL_LABELLED = 12
"""Points of a panel up to which all of them are labelled, not only those of the front."""


def better(metric: str) -> Better:
    """The better direction, from :mod:`sarathi_sim.simulator.views.metric_registry`."""
    found = quantity(metric)
    return Better.NEITHER if found is None else found.metric.better


def pareto_front(cost: Floats, gain: Floats) -> Places:
    """Indices of the points that no other one beats (as cheap and better, or as good and cheaper).

    In order of cost.
    """
    order = np.lexsort((-gain, cost))
    best = np.maximum.accumulate(gain[order])
    before = np.concatenate([[-np.inf], best[:-1]])
    return np.asarray(order[gain[order] > before], np.intp)


def seed_means(table: pd.DataFrame, metrics: Sequence[str], axes: Sequence[str]) -> pd.DataFrame:
    """A row per point of the ``axes`` but the seed: of each metric the mean over the seeds, and its
    smallest and largest value as ``NAME low`` and ``NAME high``.

    A point that lacks a metric for some seed is left out: its other seeds may be better than
    average.
    """
    keys = [axis for axis in axes if axis != "seed"]
    if not keys:
        table, keys = table.assign(_all=0), ["_all"]
    found = []
    for _, rows in table.groupby(keys, dropna=False, sort=False):
        row = rows.iloc[0].copy()
        for metric in metrics:
            values = shown(rows, metric)
            row[metric] = values.mean(skipna=False)
            row[f"{metric} low"], row[f"{metric} high"] = values.min(), values.max()
        found.append(row)
    return pd.DataFrame(found).dropna(subset=list(metrics))


def pareto(
    table: pd.DataFrame,
    x: str,
    y: str,
    axes: Sequence[str],
    by: str | None,
    panel_by: str | None,
) -> Figure:
    """Two metrics of every point of the swept ``axes``, coloured by ``by``, with the front.

    A point is the mean over its seeds, its whiskers their smallest and largest value. There is a
    panel per value of ``panel_by``, because points of different workloads do not compete. A letter
    stands for the other swept values of a point, such as its layout. Both metrics must have a
    better direction.
    """
    points = seed_means(table, (x, y), axes)
    swept = [axis for axis in axes if axis not in (by, panel_by, "seed")]
    points["_layout"] = layouts(points, [a for a in swept if points[a].map(str).nunique() > 1])
    parts = groups(points, panel_by, most=None)
    figure = Figure(figsize=panel_size(len(parts), 4.4, 2.2), layout="constrained")
    drawn = panels(figure, len(parts), sharex=True)
    # The groups of all panels in every one, also where they are empty: a colour stays theirs.
    lines = groups(points, by)
    labelled = []
    for panel, (name, rows, _) in zip(drawn, parts, strict=True):
        for number, (line, all_of_it, style) in enumerate(lines):
            found = all_of_it[all_of_it.index.isin(rows.index)]
            _points(panel, found, x, y, line, style["color"], _MARKERS[number % len(_MARKERS)])
        front = _front(panel, rows, x, y)
        labelled.append(rows if len(rows) <= _ALL_LABELLED else rows.iloc[front])
        scale(panel, "x", points[x])
        scale(panel, "y", rows[y])
        panel.margins(x=0.1, y=0.1)
        panel.tick_params(labelbottom=True)
        panel.set_title("" if panel_by is None else parameter(panel_by).called(name), fontsize=12)
        panel.set_xlabel(f"{label(x)},\n{better(x)} is better", fontsize=12)
        panel.set_ylabel(f"{label(y)},\n{better(y)} is better", fontsize=12)
    letters = _letters(pd.concat(labelled)["_layout"])
    for panel, rows in zip(drawn, labelled, strict=True):
        _write_letters(panel, rows, x, y, letters)
    legend(figure, drawn[0], by)
    seeds = table["seed"].nunique() if "seed" in axes else 1
    said = f"mean over {seeds} seeds; whiskers: smallest and largest" if seeds > 1 else ""
    # No-break spaces: a line ends between layouts.
    entries = (
        f"{letter}: {layout}".replace(" ", "\N{NO-BREAK SPACE}")
        for layout, letter in letters.items()
    )
    key = "; ".join(entries)
    heading(figure, said, key, overload_note(table, [x, y]))
    return figure


def layouts(points: pd.DataFrame, swept: Sequence[str]) -> list[str]:
    """The other swept values of each point, in words: ``TP 4, PP 2``."""
    return [
        ", ".join(parameter(axis).value(row[axis]) for axis in swept if not pd.isna(row[axis]))
        for _, row in points.iterrows()
    ]


def _letters(layouts: pd.Series[str]) -> dict[str, str]:
    """A letter for each layout, two from the 27th on."""
    names = [layout for layout in dict.fromkeys(layouts) if layout]
    letters = [*ascii_uppercase, *(a + b for a in ascii_uppercase for b in ascii_uppercase)]
    return dict(zip(names, letters, strict=False))


def _points(
    panel: Axes, rows: pd.DataFrame, x: str, y: str, name: str, colour: str, marker: str
) -> None:
    look: dict[str, Any] = {"color": colour, "linewidth": 1.4, "alpha": 0.6}
    panel.hlines(rows[y], rows[f"{x} low"], rows[f"{x} high"], **look)
    panel.vlines(rows[x], rows[f"{y} low"], rows[f"{y} high"], **look)
    panel.plot(rows[x], rows[y], marker, markersize=7, label=name, color=colour)


def _front(panel: Axes, rows: pd.DataFrame, x: str, y: str) -> Places:
    horizontal, vertical = rows[x].to_numpy(np.float64), rows[y].to_numpy(np.float64)
    front = pareto_front(
        horizontal if better(x) is Better.LESS else -horizontal,
        vertical if better(y) is Better.MORE else -vertical,
    )
    panel.plot(
        horizontal[front],
        vertical[front],
        drawstyle="steps-post",
        color="k",
        linewidth=1.2,
        label="front",
    )
    return front


def _write_letters(
    panel: Axes, rows: pd.DataFrame, x: str, y: str, letters: Mapping[str, str]
) -> None:
    """Write a letter beside each point, above or below, where there is no other letter yet."""
    panel.autoscale_view()
    fractions = (panel.transScale + panel.transLimits).transform(rows[[x, y]].to_numpy(np.float64))
    positions = fractions * (280, 250)  # about as many points wide and high is a panel
    taken: list[Floats] = []
    for position, (_, row) in zip(positions, rows.iterrows(), strict=True):
        if row["_layout"] not in letters:
            continue
        offset = next(
            (o for o in _OFFSETS if all(np.abs(position + o - t).max() > 10 for t in taken)),
            _OFFSETS[0],
        )
        taken.append(position + offset)
        panel.annotate(
            letters[row["_layout"]],
            (row[x], row[y]),
            offset,
            textcoords="offset points",
            fontsize=11,
            ha="center",
            va="center",
        )
