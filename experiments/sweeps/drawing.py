"""Figures of a sweep, from its table and, for the distributions, from its runs' requests; the
Pareto front has the points that no other one beats in both of two metrics."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sarathi_sim.experiments.config.scenario import parameter, value_name
from sarathi_sim.experiments.figures.style import BLACK, line_styles, policy_styles
from sarathi_sim.experiments.sweeps.store import POLICY
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import METRICS, STEADY, Better, quantity

_MOST_LINES, _MOST_TICKS = 9, 6


def label(column: str) -> str:
    """The label of an axis for ``tbt_s.p99`` or ``policy.chunk_size``: in words, with its unit."""
    found = quantity(column)
    return parameter(column).axis if found is None else found.axis


def shown(table: pd.DataFrame, metric: str) -> pd.Series[float]:
    """A metric's column in the unit of its label."""
    found = quantity(metric)
    return table[metric] if found is None else found.metric.scale * table[metric]


def overloaded(table: pd.DataFrame) -> pd.Series[bool]:
    """Which runs' latencies (:data:`STEADY`) say how long the run was: no figure shows them."""
    return table["steady.state"] == "overloaded"


def overload_note(table: pd.DataFrame, columns: Sequence[str]) -> str:
    """The number of runs left out, and of which columns; empty if there are none."""
    count = int(overloaded(table).sum())
    keys = [column.partition(".")[0] for column in columns]
    latencies = [METRICS[key].name for key in dict.fromkeys(keys) if key in STEADY]
    if not count or not latencies:
        return ""
    return f"{count} of {len(table)} runs are overloaded and left out of: {', '.join(latencies)}"


class RunGroup(NamedTuple):
    """The runs behind a line, its name, and its style."""

    name: str
    rows: pd.DataFrame
    style: dict[str, Any]


def groups(table: pd.DataFrame, by: str | None, most: int | None = _MOST_LINES) -> list[RunGroup]:
    """The rows of each value of ``by``, in the sweep's order; all of them without it.

    Where every line is of one policy it has that policy's colour.
    """
    parts = [("", table)]
    if by is not None:
        values = list(dict.fromkeys(table[by].dropna()))[:most]
        parts = [(value_name(value), table[table[by] == value]) for value in values]
    policies = [_policy(rows) for _, rows in parts]
    styles: Iterable[dict[str, Any]] = line_styles()
    if all(policies):
        styles = policy_styles(policies)
    elif by is None:
        styles = [{"color": BLACK, "linestyle": "-"}]
    return [RunGroup(name, rows, style) for (name, rows), style in zip(parts, styles, strict=False)]


def _policy(rows: pd.DataFrame) -> str:
    """The policy of all of them; empty if there are several."""
    names = set(rows[POLICY]) if POLICY in rows else set()
    return str(names.pop()) if len(names) == 1 else ""


def scale(axes: Axes, which: str, values: pd.Series[float]) -> None:
    """Logarithmic where the values span more than a factor of twenty."""
    positive = values[values > 0]
    if len(positive) == len(values.dropna()) and positive.max() > 20 * positive.min():
        getattr(axes, f"set_{which}scale")("log")
        axis = getattr(axes, f"{which}axis")
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def ticks_at(axes: Axes, values: pd.Series[float]) -> None:
    """Ticks where there are values, if those are few; logarithmic where they would be too close."""
    few = sorted(values.dropna().unique())
    if len(few) <= _MOST_TICKS:
        if few[0] > 0 and len(few) > 2 and np.diff(few).min() < 0.1 * (few[-1] - few[0]):
            axes.set_xscale("log")
        axes.set_xticks(few, [f"{value:g}" for value in few])
        axes.minorticks_off()


def panels(figure: Figure, count: int, **options: Any) -> list[Axes]:
    """``count`` panels, three in a row at most."""
    columns = min(3, count)
    found = figure.subplots(-(-count // columns), columns, squeeze=False, **options).ravel()
    for axes in found[count:]:
        axes.set_axis_off()
    return list(found[:count])


def panel_size(count: int, height: float, more: float) -> tuple[float, float]:
    """The size of the figure with so many panels, in inches; ``more`` is for their surroundings."""
    columns = min(3, count)
    return max(7.0, 1.0 + 4.6 * columns), more + height * -(-count // columns)


def legend(figure: Figure, axes: Axes, by: str | None) -> None:
    """The legend below the panels, with the keys that distinguish the lines."""
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=int(np.clip(figure.get_figwidth() // 3.2, 1, len(labels))),
            fontsize=12,
            title=None if by is None else label(by),
            title_fontsize=12,
            handlelength=3.2,
        )


def heading(figure: Figure, *lines: str) -> None:
    """The heading of the whole figure, in lines no wider than it."""
    width = int(11 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, width) for line in lines if line)
    if text:
        figure.suptitle(text, fontsize=12)


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
