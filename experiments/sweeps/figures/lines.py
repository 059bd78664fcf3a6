"""Figures of a sweep, from its table and, for the distributions, from its runs' requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sarathi_sim.experiments.config.parameter_names import value_name
from sarathi_sim.experiments.sweeps.figures.drawing import (
    groups,
    heading,
    label,
    legend,
    overload_note,
    overloaded,
    panel_size,
    panels,
    scale,
    shown,
    ticks_at,
)

LOWER, UPPER, LEAST_FOR_PERCENTILES = 0.1, 0.9, 10
_PANEL = (5.6, 4.4)
_MOST_POINTS = 600


def lines(table: pd.DataFrame, x: str, by: str | None, metrics: Sequence[str]) -> Figure:
    """Each metric over one axis, a line per value of another.

    The line is the median over the other axes and the seeds, the band its 10th to 90th percentile;
    of fewer than ten values somewhere, from the smallest to the largest.
    """
    figure = Figure(figsize=(_PANEL[0] * len(metrics), _PANEL[1] + 1.0), layout="constrained")
    drawn = figure.subplots(1, len(metrics), squeeze=False).ravel()
    known = table.dropna(subset=[x])
    keys = [x, "_by"]
    fewest = known.assign(_by="" if by is None else known[by].map(value_name)).groupby(keys).size()
    many = fewest.min() >= LEAST_FOR_PERCENTILES
    lower, upper = (LOWER, UPPER) if many else (0.0, 1.0)
    band = "10th to 90th percentile" if many else "smallest to largest"
    said = f"median over the other axes and seeds; band: {band}" if fewest.max() > 1 else ""
    for axes, metric in zip(drawn, metrics, strict=True):
        found_groups = groups(known, by)
        alpha = 0.15 if len(found_groups) < 5 else 0.06
        for name, rows, style in found_groups:
            found = shown(rows, metric).groupby(rows[x])
            middle = found.median().dropna()
            low, high = found.quantile(lower), found.quantile(upper)
            axes.plot(middle.index, middle, marker="o", markersize=5, label=name, **style)
            axes.fill_between(low.index, low, high, color=style["color"], alpha=alpha, linewidth=0)
        scale(axes, "x", known[x])
        ticks_at(axes, known[x])
        scale(axes, "y", shown(known, metric))
        axes.set(xlabel=label(x), ylabel=label(metric))
    legend(figure, drawn[0], by)
    heading(figure, said, overload_note(known, metrics))
    return figure


def heat_maps(table: pd.DataFrame, x: str, y: str, by: str | None, metric: str) -> Figure:
    """A metric over two axes, a panel per value of a third; the median over the other axes."""
    known = table.dropna(subset=[x, y])
    known = known.assign(**{metric: shown(known, metric)})
    parts = [group for group in groups(known, by) if group.rows[metric].notna().any()]
    figure = Figure(figsize=panel_size(len(parts), 3.8, 0.6), layout="constrained")
    drawn = panels(figure, len(parts))
    grids = [part.rows.groupby([y, x])[metric].median().unstack(x) for part in parts]
    values = np.concatenate([grid.to_numpy().ravel() for grid in grids])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    image = None
    for axes, part, grid in zip(drawn, parts, grids, strict=True):
        image = axes.imshow(
            grid, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high
        )
        axes.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
        axes.set_yticks(range(len(grid.index)), [f"{v:g}" for v in grid.index])
        axes.grid(False)
        axes.set_title(part.name, fontsize=12)
        axes.set_xlabel(label(x), fontsize=12)
        axes.set_ylabel(label(y), fontsize=12)
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            ink = "w" if value < (low + high) / 2 else "k"
            text = "" if np.isnan(value) else _short(value)
            axes.text(column, row, text, ha="center", va="center", fontsize=10, color=ink)
    if image is not None:
        figure.colorbar(image, ax=drawn, label=label(metric))
    heading(figure, overload_note(known, [metric]))
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cdfs(
    table: pd.DataFrame,
    requests: Mapping[str, pd.DataFrame],
    columns: Sequence[str],
    by: str | None,
) -> Figure:
    """CDFs over the requests of all runs with the same value of ``by``, which are in ``requests``.

    NaNs are left out. The name of a line gives the number of its overloaded runs: without its
    heaviest loads a line looks better than it is.
    """
    growing = overloaded(table)
    figure = Figure(figsize=(_PANEL[0] * len(columns), _PANEL[1] + 0.8), layout="constrained")
    drawn = figure.subplots(1, len(columns), squeeze=False).ravel()
    styles = {name: style for name, _, style in groups(table, by, most=None)}
    for axes, column in zip(drawn, columns, strict=True):
        seen = []
        for name, rows in requests.items():
            values = np.sort(rows[column].dropna().to_numpy())
            count = min(len(values), _MOST_POINTS)
            keep = np.unique(np.linspace(0, len(values) - 1, count).astype(int))
            said = name
            if by is not None and (its := growing[table[by].map(value_name) == name]).any():
                said += f": {its.sum()} of {len(its)} runs overloaded"
            axes.plot(values[keep], (keep + 1) / len(values), label=said, **styles.get(name, {}))
            seen.append(pd.Series(values))
        if seen:
            scale(axes, "x", pd.concat(seen))
        axes.set(ylim=(0, 1.02), xlabel=label(column), ylabel="share of requests")
    legend(figure, drawn[0], by)
    heading(figure, overload_note(table, columns))
    return figure
