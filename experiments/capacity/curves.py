"""The figures: headroom (load against every clause of the SLO), and Pareto fronts of deployments
under loads (what a GPU gives against what a user gets)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from sarathi_sim.experiments.capacity.slo import CapacitySection
from sarathi_sim.experiments.capacity.written import UNITS, panels, sides, title
from sarathi_sim.experiments.figures.style import BLACK, BLUE, VERMILION, line_styles, save
from sarathi_sim.experiments.run.trade_off import pareto_front
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import number_text

MOST_LINES = 14


def headroom_figure(found: Sequence[Mapping[str, Any]], section: CapacitySection) -> Figure:
    """A panel a clause: its part of the limit over the load. Above the black line the SLO breaks; a
    ring is the capacity, a cross an overloaded probe."""
    clauses = [one.text for one in section.objectives]
    shown = [one for one in found if one.get("curve")][:MOST_LINES]
    figure = Figure(figsize=(6.2 * len(clauses), 4.8), layout="constrained")
    panels = figure.subplots(1, len(clauses), squeeze=False)[0]
    for panel, clause in zip(panels, clauses, strict=True):
        for one, style in zip(shown, line_styles(), strict=False):
            loads = [probe["load"] for probe in one["curve"]]
            parts = [max(probe["stress"][clause], 1e-2) for probe in one["curve"]]
            panel.plot(loads, parts, marker=".", label=one["name"], **style)
            for probe, part in zip(one["curve"], parts, strict=True):
                if probe["overloaded"]:
                    panel.plot(probe["load"], part, "x", color=style["color"], markersize=9)
                if one["at_capacity"] and probe["run"] == one["at_capacity"]["run"]:
                    ring = {"markersize": 9, "markerfacecolor": "none"}
                    panel.plot(probe["load"], part, "o", color=style["color"], **ring)
        panel.axhline(1.0, color=BLACK, linewidth=1.2)
        panel.set(yscale="log", xlabel=f"load ({UNITS[section.load]})")
        panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.yaxis.set_minor_formatter(PercentFormatter(1.0, decimals=0))
        panel.set_ylabel("part of the limit")
        panel.set_title(clause)
    if shown:
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
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
"""Figures by name: what is along, and what is up."""
NAMES = {
    "tokens_per_s_per_user": "tokens/s a user (1 / median TPOT)",
    "output_tokens_per_s_per_gpu": "output tokens/s a GPU",
    "ttft_p99_s": "time to first token, p99 (s)",
    "tbt_p99_s": "time between tokens, p99 (s)",
    STRESS: "all limits of the SLO, times what is asked (1: the SLO)",
    COST: "cost of a million output tokens",
}
_MORE = ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
"""What is better the more there is; of all else less is better."""
_GAINS = (*_MORE, COST)
"""What a deployment is worth under a load; the others are latencies."""
_OF_PROBE = (*_MORE, "ttft_p99_s", "tbt_p99_s", "load", "holds", "run")


def points(
    found: Sequence[Mapping[str, Any]], screened: Sequence[Mapping[str, Any]] = ()
) -> pd.DataFrame:
    """Every deployment under every load of its curve; ``full``: the load is its capacity.

    They are grouped by deployment and labelled with their load; those that were only ``screened``
    are one group, labelled with their name. ``stress`` is by how much all limits may be multiplied
    so that the load just keeps them: less than 1 where the SLO holds. No limit helps an overloaded
    one (NaN).
    """
    rows = []
    grouped = [(one, one["name"]) for one in found] + [(one, SCREENED) for one in screened]
    for one, group in grouped:
        for probe in one.get("curve", ()):
            row = {key: probe[key] for key in _OF_PROBE}
            stress = np.nan if probe["overloaded"] else max(*probe["stress"].values(), 1e-2)
            row |= {"deployment": one["name"], STRESS: stress}
            at = one.get("at_capacity") or {}
            row |= {"group": group, "full": group == SCREENED or probe["run"] == at.get("run")}
            row["label"] = one["name"] if group == SCREENED else number_text(probe["load"])
            row |= {COST: probe[COST]} if COST in probe else {}
            rows.append(row)
    return pd.DataFrame(rows)


def front(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Rows that no other one beats in both, in order of x. Two latencies are compared where each
    deployment carries all it can: under a smaller load both are always lower."""
    table = table if {x, y} & set(_GAINS) else table[table["full"]]
    along = table[x].to_numpy(np.float64) * (-1 if x in _MORE else 1)
    up = table[y].to_numpy(np.float64) * (1 if y in _MORE else -1)
    return table.iloc[pareto_front(along, up)].sort_values(x)


def cheapest(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    """The cost of a deployment as its SLO is relaxed: the limits, and the least cost of the loads
    that keep them."""
    rows = rows.sort_values(STRESS)
    return rows[STRESS].to_numpy(np.float64), rows[COST].cummin().to_numpy(np.float64)


def frontier_figures(
    found: Sequence[Mapping[str, Any]],
    screened: Sequence[Mapping[str, Any]] = (),
    currency: str = "",
) -> dict[str, Figure]:
    """A figure a pair: every point labelled, and in the SVG a link to its run. Costs are in the
    currency."""
    table = points(found, screened)
    return {
        f"pareto_{name}": _figure(
            table.dropna(subset=[x, y]).reset_index(drop=True), x, y, currency
        )
        for name, (x, y) in PAIRS.items()
        if {x, y} <= set(table)
    }


def named(key: str, currency: str) -> str:
    """What an axis shows; a cost with its currency."""
    return f"{NAMES[key]} ({currency})" if key == COST and currency else NAMES[key]


def _figure(table: pd.DataFrame, x: str, y: str, currency: str) -> Figure:
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panel = figure.subplots()
    groups = table.groupby("group", sort=False)
    for (name, rows), style in zip(groups, line_styles(), strict=False):
        drawn = panel.scatter(rows[x], rows[y], s=36, color=style["color"], label=str(name))
        drawn.set_urls([f"../probes/runs/{run}/summary.json" for run in rows["run"]])
        if x == STRESS and name != SCREENED:
            panel.step(*cheapest(rows), where="post", color=style["color"], linewidth=1)
        for _, row in rows.iterrows():
            about: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
            panel.annotate(row["label"], (row[x], row[y]), (4, 4), **about)
    best = front(table, x, y)
    together: dict[str, Any] = {"drawstyle": "steps-post"} if x == STRESS else {}
    panel.plot(best[x], best[y], color=BLACK, linewidth=1.2, label="front", **together)
    if x == STRESS:
        panel.axvline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set(xlabel=named(x, currency), ylabel=named(y, currency))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


MOST_PANELS, MOST_BARS = 12, 14


def tornado_figure(content: Mapping[str, Any]) -> Figure:
    """A panel for each deployment and measure: how far each factor moves it, the farthest on
    top."""
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
        for side, colour, name in looks:
            panel.barh(places, [row[side] for row in some], 0.7, color=colour, label=name)
        panel.axvline(0.0, color=BLACK, linewidth=1.0)
        panel.set_yticks(places, [row["factor"] for row in some])
        panel.set(xlabel="change (%)", title=title(content, *key))
        panel.grid(visible=False, axis="y")
    if shown:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
