"""Figures of a sweep, from its table and, for the distributions, from its runs' requests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.style import line_styles
from simulator.metric_registry import STEADY
from simulator.records import Floats

LOWER, UPPER = 0.1, 0.9
_PANEL = (5.6, 4.4)
_MOST_LINES, _MOST_POINTS = 9, 600
_UNITS = {"_per_s": "1/s", "_s": "s"}  # the longer ending first


def label(column: str) -> str:
    """``tbt_s.p99`` as an axis says it."""
    name, _, quantile = column.partition(".")
    ending = next((end for end in _UNITS if name.endswith(end)), "")
    words = name.removesuffix(ending).replace("_", " ")
    words = words.replace("tbt", "time between tokens").replace("ttft", "time to first token")
    return " ".join(filter(None, [words, quantile])) + (f" ({_UNITS[ending]})" if ending else "")


def overloaded(table: pd.DataFrame) -> pd.Series[bool]:
    """Which runs' latencies (:data:`STEADY`) say how long the run was: no figure shows them."""
    return table["steady.state"] == "overloaded"


def overload_note(table: pd.DataFrame, columns: Sequence[str]) -> str:
    """How many of the runs are left out, and of which columns; empty where none is."""
    count = int(overloaded(table).sum())
    concerned = [c.partition(".")[0] for c in columns if c.startswith(STEADY)]
    latencies = [label(name).removesuffix(" (s)") for name in dict.fromkeys(concerned)]
    if not count or not latencies:
        return ""
    return f"{count} of {len(table)} runs are overloaded and left out of: {', '.join(latencies)}"


def lines(table: pd.DataFrame, x: str, by: str | None, metrics: Sequence[str]) -> Figure:
    """Each metric over one axis, a line per value of another.

    The line is the median over everything else that was swept (other axes, seeds), the band its
    10th to 90th percentile.
    """
    said = "median of all else that was swept; band: 10th to 90th percentile"
    figure = Figure(figsize=(_PANEL[0] * len(metrics), _PANEL[1] + 1.0), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False).ravel()
    known = table.dropna(subset=[x])
    for axes, metric in zip(panels, metrics, strict=True):
        groups = list(_groups(known, by))
        alpha = 0.15 if len(groups) < 5 else 0.06
        for (name, rows), style in zip(groups, line_styles(), strict=False):
            found = rows.groupby(x)[metric]
            middle = found.median().dropna()
            low, high = found.quantile(LOWER), found.quantile(UPPER)
            axes.plot(middle.index, middle, marker="o", markersize=4, label=name, **style)
            axes.fill_between(low.index, low, high, color=style["color"], alpha=alpha, linewidth=0)
        _scale(axes, "x", known[x])
        _scale(axes, "y", known[metric])
        axes.set_xlabel(x)
        axes.set_ylabel(label(metric))
    _legend(figure, panels[0], by)
    _heading(figure, said, overload_note(known, metrics))
    return figure


def heat_maps(table: pd.DataFrame, x: str, y: str, by: str | None, metric: str) -> Figure:
    """A metric over two axes, a panel per value of a third; the median over everything else."""
    known = table.dropna(subset=[x, y])
    groups = [(name, rows) for name, rows in _groups(known, by) if rows[metric].notna().any()]
    columns = min(3, len(groups))
    height = -(-len(groups) // columns)
    figure = Figure(figsize=(1.0 + 4.4 * columns, 0.6 + 3.8 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).ravel()
    grids = [rows.groupby([y, x])[metric].median().unstack(x) for _, rows in groups]
    values = np.concatenate([grid.to_numpy().ravel() for grid in grids])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    image = None
    for axes, (name, _), grid in zip(panels, groups, grids, strict=False):
        image = axes.imshow(
            grid, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high
        )
        axes.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
        axes.set_yticks(range(len(grid.index)), [f"{v:g}" for v in grid.index])
        axes.grid(False)
        axes.set_title(name or label(metric), fontsize=11)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            dark = value < (low + high) / 2
            text = "" if np.isnan(value) else _short(value)
            axes.text(
                column, row, text, ha="center", va="center", fontsize=9, color="w" if dark else "k"
            )
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=panels.tolist(), label=label(metric))
    _heading(figure, overload_note(known, [metric]))
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def pareto_front(cost: Floats, gain: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Places of the points that no other one beats: as cheap and better, or as good and cheaper.

    In order of cost.
    """
    order = np.lexsort((-gain, cost))
    best = np.maximum.accumulate(gain[order])
    before = np.concatenate([[-np.inf], best[:-1]])
    return np.asarray(order[gain[order] > before], np.intp)


def pareto(
    table: pd.DataFrame, cost: str, gain: str, by: str | None, panel_by: str | None
) -> Figure:
    """All runs by a cost and a gain, coloured by ``by``, with the front over all of them.

    A panel per value of ``panel_by``: what serves another workload does not compete.
    """
    known = table.dropna(subset=[cost, gain])
    groups = list(_groups(known, panel_by))
    columns = min(3, len(groups))
    height = -(-len(groups) // columns)
    figure = Figure(figsize=(1.0 + 4.4 * columns, 1.4 + 3.6 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False, sharex=True).ravel()
    for axes, (name, rows) in zip(panels, groups, strict=False):
        # The groups of all panels in every one, also where they are empty: a colour stays theirs.
        for number, ((one, all_of_it), style) in enumerate(zip(_groups(known, by), line_styles())):  # noqa: B905
            found = all_of_it[all_of_it.index.isin(rows.index)]
            marker = "os^"[number // 7 % 3]  # there are seven colours
            axes.plot(
                found[cost], found[gain], marker, markersize=6, label=one, color=style["color"]
            )
        x, y = rows[cost].to_numpy(np.float64), rows[gain].to_numpy(np.float64)
        front = pareto_front(x, y)
        axes.plot(
            x[front], y[front], drawstyle="steps-post", color="k", linewidth=1.2, label="front"
        )
        _scale(axes, "x", known[cost])
        _scale(axes, "y", rows[gain])
        axes.tick_params(labelbottom=True)
        axes.set_title(f"{panel_by} {name}" if panel_by else "", fontsize=11)
        axes.set_xlabel(f"{label(cost)}: less is better", fontsize=10)
        axes.set_ylabel(f"{label(gain)}: more is better", fontsize=10)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    _legend(figure, panels[0], by)
    _heading(figure, overload_note(table, [cost, gain]))
    return figure


def cdfs(
    table: pd.DataFrame,
    requests: Mapping[str, pd.DataFrame],
    columns: Sequence[str],
    by: str | None,
) -> Figure:
    """CDFs over the requests of all runs with the same value of ``by``, which are in ``requests``.

    What is NaN there is left out. A line says how many of its runs are overloaded: a line that has
    lost its heaviest loads looks better than one that has not.
    """
    growing = overloaded(table)
    figure = Figure(figsize=(_PANEL[0] * len(columns), _PANEL[1] + 0.8), layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False).ravel()
    for axes, column in zip(panels, columns, strict=True):
        seen = []
        for (name, rows), style in zip(requests.items(), line_styles(), strict=False):
            values = np.sort(rows[column].dropna().to_numpy())
            count = min(len(values), _MOST_POINTS)
            keep = np.unique(np.linspace(0, len(values) - 1, count).astype(int))
            said = name
            if by is not None and (its := growing[table[by].map(str) == name]).any():
                said += f": {its.sum()} of {len(its)} runs overloaded"
            axes.plot(values[keep], (keep + 1) / len(values), label=said, **style)
            seen.append(pd.Series(values))
        if seen:
            _scale(axes, "x", pd.concat(seen))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(label(column))
        axes.set_ylabel("share of requests")
    _legend(figure, panels[0], by)
    _heading(figure, overload_note(table, columns))
    return figure


def _groups(table: pd.DataFrame, by: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each value, in the order in which the sweep has them; all without ``by``."""
    if by is None:
        yield "", table
        return
    for value in list(dict.fromkeys(table[by].dropna()))[:_MOST_LINES]:
        yield f"{value:g}" if isinstance(value, float) else str(value), table[table[by] == value]


def _scale(axes: Axes, which: str, values: pd.Series[float]) -> None:
    """Logarithmic where the values span more than a factor of twenty."""
    positive = values[values > 0]
    if len(positive) == len(values.dropna()) and positive.max() > 20 * positive.min():
        getattr(axes, f"set_{which}scale")("log")
        axis = getattr(axes, f"{which}axis")
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def _legend(figure: Figure, axes: Axes, by: str | None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(3, len(labels)),
            fontsize=10,
            title=by,
            title_fontsize=10,
            handlelength=3.2,
        )


def _heading(figure: Figure, *lines: str) -> None:
    """What is said of the whole figure, in lines no wider than it."""
    width = int(13 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, width) for line in lines if line)
    if text:
        figure.suptitle(text, fontsize=11)
