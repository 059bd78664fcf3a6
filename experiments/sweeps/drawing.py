"""Figures of a sweep, a panel for each load: lines over an axis, heat maps over two axes, CDFs of
requests, and the Pareto front of two metrics."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import STEADY, Better, known, quantity
from ..config.scenario import parameter, value_name
from ..figures.style import BLACK, line_styles, policy_styles
from ..run.trade_off import ALIKE, Load
from .store import POLICY
from .sweep_answer import (
    Sweep,
    called,
    grouped,
    overload_note,
    short_names,
    varying,
)

T = TypeVar("T")
_MOST_LINES, _MOST_TICKS = 9, 6
_MOST_LOADS, _MOST_PANELS = 3, 12


def label(column: str) -> str:
    """The label of an axis for ``tbt_s.p99`` or ``policy.chunk_size``: in words, with its unit."""
    found = quantity(column)
    return parameter(column).axis if found is None else found.axis


def shown(table: pd.DataFrame, metric: str) -> pd.Series[float]:
    """A metric's column in the unit of its label; without the latencies of overloaded runs, which
    grow with the length of the run."""
    found = quantity(metric)
    values = table[metric] if found is None else found.metric.scale * table[metric]
    return (
        values.mask(table["steady.state"] == "overloaded") if metric.startswith(STEADY) else values
    )


def better(metric: str) -> Better:
    """The better direction, from :mod:`sarathi_sim.simulator.views.metric_registry`."""
    found = quantity(metric)
    return Better.NEITHER if found is None else found.metric.better


def few(parts: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the parts, spread evenly from the first to the last."""
    count = min(most, len(parts))
    return [parts[round(at)] for at in np.linspace(0, len(parts) - 1, count)] if parts else []


def within(column: str, axis: str) -> bool:
    """Whether a column is an axis, or a key within one."""
    return column == axis or column.startswith(f"{axis}.")


def varies(values: pd.Series[float]) -> bool:
    """Whether two values differ by more than a tie."""
    return bool(values.abs().max() > ALIKE * values.abs().min())


class RunGroup(NamedTuple):
    """The runs behind a line, its name, and its style."""

    name: str
    rows: pd.DataFrame
    style: dict[str, Any]


def groups(table: pd.DataFrame, by: str | None, most: int | None = _MOST_LINES) -> list[RunGroup]:
    """The rows of each value of ``by``, in the sweep's order; a single group without it.

    If every line has one policy, it has the policy's colour.
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
    """The policy of all rows; empty if there are several."""
    names = set(rows[POLICY]) if POLICY in rows else set()
    return str(names.pop()) if len(names) == 1 else ""


class Panel(NamedTuple):
    """A load, and its runs, a group for each line."""

    load: str
    groups: list[RunGroup]


def over(swept: Sweep, x: str) -> tuple[list[Panel], str]:
    """The runs with a value of ``x``: a panel for each load (which may differ in x itself), a group
    for each value of the compared axis. And the axes over which a line is the median, in words;
    empty if it has a single run at each place.
    """
    table, by = swept.policies.dropna(subset=[x]), lines_by(swept, x)
    given = [axis for axis in swept.given if not within(x, axis) and axis != by]
    rest = [a for a in varying(table, swept.axes) if not within(x, a) and a not in (by, *given)]
    return by_load(table, given, by), f"median over {short_names(rest)}" if rest else ""


def by_load(table: pd.DataFrame, given: Sequence[str], by: str | None) -> list[Panel]:
    """A panel for each load (for some of many), and a group for each value of ``by``."""
    lines, panels = groups(table, by), []
    for load, rows in few(list(grouped(table, given)), _MOST_LOADS):
        mine = (line._replace(rows=line.rows[line.rows.index.isin(rows.index)]) for line in lines)
        panels.append(Panel(load, [line for line in mine if len(line.rows)]))
    return panels


def lines_by(swept: Sweep, x: str) -> str | None:
    """The axis with a line per value: the compared axis, or another axis if x is part of it."""
    if swept.contrast is not None and not within(x, swept.contrast):
        return swept.contrast
    others = (a for a in swept.chosen if not within(x, a) and 1 < swept.table[a].nunique() < 10)
    return next(others, None)


def scale(axes: Axes, which: str, values: pd.Series[float]) -> None:
    """Make an axis logarithmic if its values span more than a factor of twenty; if they are nearly
    equal, make it as wide as a tenth of them."""
    positive = values[values > 0]
    if len(positive) == len(values.dropna()) and positive.max() > 20 * positive.min():
        getattr(axes, f"set_{which}scale")("log")
        axis = getattr(axes, f"{which}axis")
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    elif len(values.dropna()) and not varies(values):
        getattr(axes, f"set_{which}lim")(0.95 * values.min(), 1.05 * values.max() or 1.0)


def ticks_at(axes: Axes, values: pd.Series[float]) -> None:
    """Ticks at the values, if they are few; on a logarithmic axis if they would be too close."""
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
    """The size of a figure of ``count`` panels in inches; ``more`` is for their surroundings."""
    columns = min(3, count)
    return max(7.0, 1.0 + 4.6 * columns), more + height * -(-count // columns)


def legend(figure: Figure, drawn: Iterable[Axes], by: str | None) -> None:
    """The legend below the panels, with the keys that distinguish the lines."""
    handles: dict[str, Any] = {}
    for axes in drawn:
        found, labels = axes.get_legend_handles_labels()
        handles = dict(zip(labels, found, strict=True)) | handles
    if any(handles):
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=int(np.clip(figure.get_figwidth() // 3.2, 1, len(handles))),
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


def lines(swept: Sweep, x: str, metrics: Sequence[str]) -> Figure:
    """Each metric over one axis: a row of panels for each load, a line per value of another axis.

    The line is the median over the other choices and the seeds, the band the 10th to 90th
    percentile; with fewer than ten values somewhere, the smallest to the largest value.
    """
    parts, pooled = over(swept, x)
    table = pd.concat([line.rows for part in parts for line in part.groups])
    size = (_PANEL[0] * len(metrics), _PANEL[1] * len(parts) + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    drawn = figure.subplots(len(parts), len(metrics), squeeze=False)
    sizes = [line.rows.groupby(x).size() for part in parts for line in part.groups]
    many = min(size.min() for size in sizes) >= LEAST_FOR_PERCENTILES
    lower, upper = (LOWER, UPPER) if many else (0.0, 1.0)
    band = "10th to 90th percentile" if many else "smallest to largest"
    for row, part in zip(drawn, parts, strict=True):
        alpha = 0.15 if len(part.groups) < 5 else 0.06
        for axes, metric in zip(row, metrics, strict=True):
            for name, rows, style in part.groups:
                found = shown(rows, metric).groupby(rows[x])
                middle = found.median().dropna()
                if middle.empty:
                    continue
                low, high = found.quantile(lower), found.quantile(upper)
                axes.plot(middle.index, middle, marker="o", markersize=5, label=name, **style)
                colour = style["color"]
                axes.fill_between(low.index, low, high, color=colour, alpha=alpha, linewidth=0)
            if axes.has_data():
                scale(axes, "x", table[x])
                ticks_at(axes, table[x])
            scale(axes, "y", pd.concat([shown(line.rows, metric) for line in part.groups]))
            axes.set(xlabel=label(x), ylabel=label(metric), title=part.load)
    legend(figure, drawn.ravel(), lines_by(swept, x))
    several = max(size.max() for size in sizes) > 1
    heading(figure, f"{pooled}; band: {band}" if several else "", overload_note(table, metrics))
    return figure


def heat_maps(swept: Sweep, x: str, y: str, metric: str) -> Figure | None:
    """A metric over two axes, a panel per load and value of the compared axis (some of many); the
    median over the other axes. None if no run has the metric."""
    table = swept.policies.dropna(subset=[x, y])
    table = table.assign(**{metric: shown(table, metric)})
    compared = [swept.contrast] if swept.contrast else []
    apart = list(dict.fromkeys((*swept.given, *compared)))
    apart = [axis for axis in apart if not within(x, axis) and not within(y, axis)]
    parts = [part for part in grouped(table, apart) if part[1][metric].notna().any()]
    if not parts:
        return None
    parts = few(parts, _MOST_PANELS)
    figure = Figure(figsize=panel_size(len(parts), 3.8, 0.6), layout="constrained")
    drawn = panels(figure, len(parts))
    grids = [rows.groupby([y, x])[metric].median().unstack(x) for _, rows in parts]
    values = np.concatenate([grid.to_numpy().ravel() for grid in grids])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    image = None
    for axes, (name, _), grid in zip(drawn, parts, grids, strict=True):
        image = axes.imshow(
            grid, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high
        )
        axes.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
        axes.set_yticks(range(len(grid.index)), [f"{v:g}" for v in grid.index])
        axes.grid(False)
        axes.set_title(name, fontsize=12)
        axes.set_xlabel(label(x), fontsize=12)
        axes.set_ylabel(label(y), fontsize=12)
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            ink = "w" if value < (low + high) / 2 else "k"
            text = "" if np.isnan(value) else _short(value)
            axes.text(column, row, text, ha="center", va="center", fontsize=10, color=ink)
    if image is not None:
        figure.colorbar(image, ax=drawn, label=label(metric))
    heading(figure, overload_note(table, [metric]))
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cdfs(
    swept: Sweep, requests: Callable[[pd.DataFrame], pd.DataFrame], columns: Sequence[str]
) -> Figure:
    """CDFs over the requests of all runs of a line, a row of panels for each load; ``requests``
    reads the requests of some runs, with NaN for latencies that are left out.

    The name of a line gives the number of its overloaded runs: without them it looks better than
    it is.
    """
    by = swept.contrast
    parts = by_load(swept.policies, [axis for axis in swept.given if axis != by], by)
    size = (_PANEL[0] * len(columns), _PANEL[1] * len(parts) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    drawn = figure.subplots(len(parts), len(columns), squeeze=False)
    for row, part in zip(drawn, parts, strict=True):
        seen: dict[str, list[Floats]] = {column: [] for column in columns}
        for name, rows, style in part.groups:
            served, lost = requests(rows), int((rows["steady.state"] == "overloaded").sum())
            said = f"{name}: {lost} of {len(rows)} runs overloaded" if lost and by else name
            for axes, column in zip(row, columns, strict=True):
                values = np.sort(served[column].dropna().to_numpy(np.float64))
                count = min(len(values), _MOST_POINTS)
                keep = np.unique(np.linspace(0, len(values) - 1, count).astype(int))
                axes.plot(values[keep], (keep + 1) / len(values), label=said, **style)
                seen[column].append(values)
        for axes, (column, found) in zip(row, seen.items(), strict=True):
            scale(axes, "x", pd.Series(np.concatenate(found)))
            axes.set(ylim=(0, 1.02), xlabel=label(column), ylabel="share of requests")
            axes.set_title(part.load)
    legend(figure, drawn.ravel(), by)
    heading(figure, overload_note(swept.table, columns))
    return figure


_MARKERS = "os^Dv"
_OFFSETS = [(x, y) for far in (9, 20, 31) for y in (far, -far) for x in (9, -9, 20, -20)]
"""Offsets of a letter from its point, in points; the first free place is taken."""
_ALL_LABELLED = 12
"""With up to so many points in a panel all are labelled, not only the front."""


def points(swept: Sweep, load: Load, *metrics: str) -> pd.DataFrame:
    """A row per choice that has both metrics for each seed: each metric's mean over the seeds, in
    the unit of its label, and its smallest and largest value as ``NAME low`` and ``NAME high``;
    ``_option`` is the choice's name, ``_layout`` the name without the compared value."""
    rows = swept.policies.loc[list(load.places)]
    rest = [axis for axis in varying(swept.table, swept.chosen) if axis != swept.contrast]
    rows = rows.assign(_option=load.options, _layout=called(rows, rest))
    for metric in metrics:
        values = load.values[metric] * known(metric).metric.scale
        ends = {"": values.mean(axis=1), " low": values.min(axis=1), " high": values.max(axis=1)}
        rows = rows.assign(**{metric + end: found for end, found in ends.items()})
    return rows.dropna(subset=list(metrics))


def pareto(swept: Sweep, x: str, y: str) -> Figure | None:
    """Two metrics of every choice and their front, a panel per load where they differ (some of
    many); None if they differ under none.

    A point is the mean over its seeds, its whiskers their smallest and largest value. A letter
    stands for the rest of the choice, such as its layout. Both metrics must have a direction.
    """
    found = [load for load in swept.loads((x, y)) if min(map(load.spread, (x, y))) > ALIKE]
    loads = few([load for load in found if load.front(x, y)], _MOST_PANELS)
    if not loads:
        return None
    parts, by = [points(swept, load, x, y) for load in loads], swept.contrast
    every = pd.concat(parts)
    figure = Figure(figsize=panel_size(len(parts), 4.4, 2.2), layout="constrained")
    drawn = panels(figure, len(parts), sharex=True)
    # Every panel has all groups, also empty ones, so each group keeps its colour.
    lines = groups(every, by, most=None)
    labelled = []
    for panel, load, rows in zip(drawn, loads, parts, strict=True):
        for number, (line, all_of_it, style) in enumerate(lines):
            mine = all_of_it[all_of_it.index.isin(rows.index)]
            _points(panel, mine, x, y, line, style["color"], _MARKERS[number % len(_MARKERS)])
        front = rows.set_index("_option", drop=False).loc[load.front(x, y)]
        look: dict[str, Any] = {"drawstyle": "steps-post", "color": "k", "linewidth": 1.2}
        ring: dict[str, Any] = {"marker": "o", "markersize": 13, "fillstyle": "none"}
        panel.plot(front[x], front[y], label="front", **look, **ring)
        labelled.append(rows if len(rows) <= _ALL_LABELLED else front)
        scale(panel, "x", every[x])
        scale(panel, "y", rows[y])
        panel.margins(x=0.1, y=0.1)
        panel.tick_params(labelbottom=True)
        panel.set_title(load.name, fontsize=12)
        panel.set_xlabel(f"{label(x)},\n{better(x)} is better", fontsize=12)
        panel.set_ylabel(f"{label(y)},\n{better(y)} is better", fontsize=12)
    letters = _letters(pd.concat(labelled)["_layout"])
    for panel, rows in zip(drawn, labelled, strict=True):
        _write_letters(panel, rows, x, y, letters)
    legend(figure, drawn[:1], by)
    seeds = swept.table["seed"].nunique() if "seed" in swept.axes else 1
    said = "front: not beaten by more than 1 %"
    if seeds > 1:
        said = f"mean over {seeds} seeds; whiskers: smallest and largest; {said} and the noise"
    # No-break spaces: a line ends between layouts.
    entries = (
        f"{letter}: {layout}".replace(" ", "\N{NO-BREAK SPACE}")
        for layout, letter in letters.items()
    )
    heading(figure, said, "; ".join(entries), overload_note(swept.table, [x, y]))
    return figure


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
