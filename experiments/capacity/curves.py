"""The figures: headroom (every clause of the SLO over the load), and Pareto fronts of deployments
under loads (throughput per GPU against speed per user)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import number_text
from ..figures.style import (
    BLACK,
    BLUE,
    GREY,
    VERMILION,
    WHITE,
    ink_on,
    line_styles,
    save,
)
from ..run.trade_off import pareto_front
from .slo import CapacitySection
from .written import UNITS, panels, sides, title

MOST_LINES = 14
_MARK: dict[str, Any] = {"color": BLACK, "linestyle": "none", "markersize": 9}


def headroom_figure(found: Sequence[Mapping[str, Any]], section: CapacitySection) -> Figure:
    """A panel a clause: its part of the limit over the load, on both sides of the limit. Above the
    black line the SLO breaks; a ring is the capacity, a cross an overloaded probe."""
    clauses = [one.text for one in section.objectives]
    shown = [one for one in found if one.get("curve")][:MOST_LINES]
    figure = Figure(figsize=(6.2 * len(clauses), 4.8), layout="constrained")
    panels = figure.subplots(1, len(clauses), squeeze=False)[0]
    key, marks = dict[str, Any](), dict[str, Any]()
    for panel, clause in zip(panels, clauses, strict=True):
        for one, style in zip(shown, line_styles(), strict=False):
            loads = [probe["load"] for probe in one["curve"]]
            parts = [max(probe["stress"][clause], 1e-2) for probe in one["curve"]]
            (key[one["name"]],) = panel.plot(loads, parts, marker=".", **style)
            for probe, part in zip(one["curve"], parts, strict=True):
                if probe["overloaded"]:
                    panel.plot(probe["load"], part, "x", color=style["color"], markersize=9)
                    marks["overloaded"] = Line2D([], [], marker="x", **_MARK)
                if one["at_capacity"] and probe["run"] == one["at_capacity"]["run"]:
                    ring = {"markersize": 9, "markerfacecolor": "none"}
                    panel.plot(probe["load"], part, "o", color=style["color"], **ring)
                    circle = Line2D([], [], marker="o", markerfacecolor="none", **_MARK)
                    marks["at its capacity"] = circle
        marks["the limit"] = panel.axhline(1.0, color=BLACK, linewidth=1.2)
        panel.set(yscale="log", xlabel=f"load ({UNITS[section.load]})")
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, 0.45), max(high, 2.2))
        panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.yaxis.set_minor_formatter(PercentFormatter(1.0, decimals=0))
        panel.set_ylabel("part of the limit")
        panel.set_title(clause)
    if shown:
        key |= marks
        figure.legend(key.values(), key.keys(), loc="outside lower center", ncols=3)
    return figure


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """The figures' files, ``figures/NAME.png`` and ``.svg``, by name."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = [path for name, each in figures.items() for path in save(each, folder, name)]
        return {f"figures/{path.name}": path.read_bytes() for path in written}


# Pareto fronts ---------------------------------------------------------------------------------

SCREENED = "screened only"
STRESS, COST = "stress", "per_million_output_tokens"
PAIRS = {
    "throughput_interactivity": ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu"),
    "ttft_tbt": ("ttft_p99_s", "tbt_p99_s"),
    "cost_slo": (STRESS, COST),
}
"""Figures by name: the metrics of the x and y axes."""
NAMES = {
    "tokens_per_s_per_user": "tokens/s a user (1 / median TPOT)",
    "output_tokens_per_s_per_gpu": "output tokens/s a GPU",
    "ttft_p99_s": "time to first token, p99 (s)",
    "tbt_p99_s": "time between tokens, p99 (s)",
    STRESS: "all limits of the SLO, times what is asked (1: the SLO)",
    COST: "cost of a million output tokens",
}
_MORE = ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
"""Metrics of which more is better; of all others less is better."""
_GAINS = (*_MORE, COST)
"""The metrics of value under a load; the others are latencies."""
_OF_PROBE = (*_MORE, "ttft_p99_s", "tbt_p99_s", "load", "holds", "run")


def points(
    found: Sequence[Mapping[str, Any]], screened: Sequence[Mapping[str, Any]] = ()
) -> pd.DataFrame:
    """Every deployment under every load of its curve; ``full``: the load is its capacity.

    Points are numbered, and grouped by deployment; deployments that were only ``screened`` are one
    group. ``stress`` is the factor on all limits under which the load just keeps them: less than 1
    if the SLO holds. For an overloaded point there is none (NaN).
    """
    rows = list[dict[str, Any]]()
    grouped = [(one, one["name"]) for one in found] + [(one, SCREENED) for one in screened]
    for one, group in grouped:
        for probe in one.get("curve", ()):
            row = {key: probe[key] for key in _OF_PROBE}
            stress = np.nan if probe["overloaded"] else max(*probe["stress"].values(), 1e-2)
            row |= {"deployment": one["name"], STRESS: stress}
            at = one.get("at_capacity") or {}
            row |= {"group": group, "full": group == SCREENED or probe["run"] == at.get("run")}
            row["number"] = len(rows) + 1
            row |= {COST: probe[COST]} if COST in probe else {}
            rows.append(row)
    return pd.DataFrame(rows)


def front(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows of the Pareto front, in order of x. Two latencies are compared at each deployment's
    capacity: under a smaller load both are always lower."""
    table = table if {x, y} & set(_GAINS) else table[table["full"]]
    along = table[x].to_numpy(np.float64) * (-1 if x in _MORE else 1)
    up = table[y].to_numpy(np.float64) * (1 if y in _MORE else -1)
    return table.iloc[pareto_front(along, up)].sort_values(x)


def cheapest(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    """The cost of a deployment as its SLO is relaxed: the limits, and the least cost of the loads
    that keep them."""
    rows = rows.sort_values(STRESS)
    return rows[STRESS].to_numpy(np.float64), rows[COST].cummin().to_numpy(np.float64)


def numbered(table: pd.DataFrame, best: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether a point has its number beside it: on the front, and at a capacity."""
    return np.asarray(table["full"] | table.index.isin(best.index))


def frontier_figures(content: Mapping[str, Any]) -> dict[str, Figure]:
    """A figure for each pair of metrics, from the summary of ``capacity`` or ``recommend``: the
    numbers of points are listed beside it, and in the SVG each point is a link to its run."""
    table = points(content["deployments"], content.get("screened", ()))
    unit, currency = UNITS[content["load"]], content["prices"]["currency"]
    return {
        f"pareto_{name}": _figure(
            table.dropna(subset=[x, y]).reset_index(drop=True), x, y, unit, currency
        )
        for name, (x, y) in PAIRS.items()
        if {x, y} <= set(table)
    }


def named(key: str, currency: str) -> str:
    """The label of an axis; a cost with its currency."""
    return f"{NAMES[key]} ({currency})" if key == COST and currency else NAMES[key]


def _figure(table: pd.DataFrame, x: str, y: str, unit: str, currency: str) -> Figure:
    best = front(table, x, y)
    table["shown"] = numbered(table, best)
    figure = Figure(figsize=(11, max(6.0, 0.22 * table["shown"].sum() + 1.6)), layout="constrained")
    panel = figure.subplots()
    key: dict[str, Any] = {}
    groups = table.groupby("group", sort=False)
    for (name, rows), style in zip(groups, line_styles(), strict=False):
        colour = style["color"]
        look: dict[str, Any] = {"color": colour, "edgecolors": WHITE, "linewidths": 0.6}
        small = rows[~rows["shown"]]
        drawn = panel.scatter(small[x], small[y], s=30, zorder=3, **look)
        drawn.set_urls([_url(run) for run in small["run"]])
        if x == STRESS and name != SCREENED:
            panel.step(*cheapest(rows), where="post", color=colour, linewidth=1)
        for _, row in rows[rows["shown"]].iterrows():
            number, over = str(row["number"]), 4 + row["number"] / 1e4
            dot = panel.scatter(row[x], row[y], s=170, zorder=over, **look)
            dot.set_urls([_url(row["run"])])
            ink: dict[str, Any] = {"color": ink_on(colour)}
            digits = ink | {"ha": "center", "va": "center_baseline", "fontsize": 8}
            panel.annotate(number, (row[x], row[y]), zorder=over, **digits)
            ink |= {"linestyle": "none", "markersize": 4 * len(number), "markeredgewidth": 0}
            mark = Line2D([], [], marker=f"${number}$", **ink)
            spot = Line2D([], [], marker="o", color=colour, markersize=12, linestyle="none")
            where = ", its capacity" if row["full"] else ""
            where = ", screened only" if name == SCREENED else where
            key[f"{row['deployment']}, {number_text(row['load'])}{where}"] = (spot, mark)
    together: dict[str, Any] = {"drawstyle": "steps-post"} if x == STRESS else {}
    (key["the front"],) = panel.plot(best[x], best[y], color=BLACK, linewidth=1.2, **together)
    if x == STRESS:
        line: dict[str, Any] = {"color": BLACK, "linewidth": 0.8, "linestyle": ":"}
        key["the SLO"] = panel.axvline(1.0, **line)
        low, high = panel.get_xlim()
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=_FINE if high < 5 * low else _COARSE))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    if not table["shown"].all():
        key["another load"] = Line2D([], [], marker="o", color=GREY, markersize=5, linestyle="none")
    panel.set(xlabel=named(x, currency), ylabel=named(y, currency))
    look = {"fontsize": 9, "title_fontsize": 10, "labelspacing": 0.7, "alignment": "left"}
    look["title"] = f"deployment, load ({unit})"
    figure.legend(key.values(), key.keys(), loc="outside right upper", **look)
    return figure


def _url(run: str) -> str:
    """The path from the figures' folder to a run."""
    return f"../probes/runs/{run}/summary.json"


_FINE, _COARSE = tuple(range(1, 10)), (1, 2, 3, 5, 7)
"""Ticks within a decade of a logarithmic axis: for an axis of less than a decade, and of more."""
MOST_PANELS, MOST_BARS = 12, 14


def tornado_figure(content: Mapping[str, Any]) -> Figure:
    """A panel for each deployment and measure: the effect of each factor, the largest on top."""
    shown = list(panels(content).items())[:MOST_PANELS]
    columns = max(1, min(len(content["measures"]), len(shown)))
    lines = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(6.4 * columns, 5.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in grid[len(shown) :]:
        panel.set_visible(False)
    for panel, (key, rows) in zip(grid, shown, strict=False):
        some = rows[:MOST_BARS][::-1]
        places = np.arange(len(some))
        looks = zip(("low_pct", "high_pct"), (BLUE, VERMILION), sides(content), strict=True)
        for up, (side, colour, name) in zip((0.2, -0.2), looks, strict=True):
            panel.barh(places + up, [row[side] for row in some], 0.4, color=colour, label=name)
        panel.axvline(0.0, color=BLACK, linewidth=1.0)
        panel.set_yticks(places, [row["factor"] for row in some])
        panel.set(xlabel="change (%)", title=title(content, *key))
        panel.grid(visible=False, axis="y")
    if shown:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
