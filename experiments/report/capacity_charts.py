"""Charts of capacities as data: headroom (every clause of the SLO over the load), Pareto fronts of
deployments under loads (throughput per GPU against speed per user), and sensitivities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.ops import op_label
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import number_text
from ..capacity.slo import UNITS
from ..run.ranking import pareto_front
from .charts import axis_of, bars
from .palette import BLACK, GREY, ORANGE, SKY, Style, line_styles, policy_styles
from .section import Axis, Chart, Series

MOST_LINES = 6
Deployments = Sequence[Mapping[str, Any]]


def capacity_charts(found: Mapping[str, Any]) -> dict[str, list[Chart]]:
    """The charts of a ``capacity`` or ``recommend``, from its summary, by the name of their
    figure: ``headroom``, and a front for each pair of metrics; of a sensitivity ``tornado``; of a
    partial answer, which has no curves, none."""
    if "measures" in found:
        return {"tornado": tornado_charts(found)}
    if found.get("open"):
        return {}
    every, screened = probed(found)
    count = MOST_LINES - bool(screened)
    most = sorted(every, key=lambda one: -(one["capacity"] or 0.0))[:count]
    drawn = [one for one in every if one in most]
    unit, currency = UNITS[found["load"]], found["prices"]["currency"]
    charts = {"headroom": headroom_charts(drawn, unit)}
    charts |= frontier_charts(drawn, unit, currency, screened)
    left = f" Of {len(every)} deployments, those with the highest capacity are drawn."
    return {
        name: [replace(one, caption=one.caption + left * (len(every) > count)) for one in some]
        for name, some in charts.items()
        if some
    }


def styles(drawn: Deployments) -> list[Style]:
    """Colour and dash of each deployment, after its policy; where one is not known, of lines."""
    policies = [str(one.get("policy", "")) for one in drawn]
    some = policy_styles(policies) if all(policies) else line_styles()
    return [style for _, style in zip(drawn, some, strict=False)]


def probed(found: Mapping[str, Any]) -> tuple[Deployments, Deployments]:
    """The deployments that were searched, and those that were only screened."""
    searched = [one for one in found["deployments"] if one.get("curve")]
    return searched, [one for one in found.get("screened", ()) if one.get("curve")]


def headroom_charts(drawn: Deployments, unit: str) -> list[Chart]:
    """For each clause of the SLO: its value over its limit, by load."""
    probes = [probe for one in drawn for probe in one["curve"]]
    clauses = dict.fromkeys(key for probe in probes for key in probe["stress"])
    return [_headroom(drawn, clause, unit) for clause in clauses]


_HEADROOM = (
    "Above the line the SLO breaks. A curve ends where its deployment is overloaded, or beyond "
    "twice the limit."
)


def _headroom(drawn: Deployments, clause: str, unit: str) -> Chart:
    series, full, most = list[Series](), list[tuple[float, float]](), 1.0
    for one, style in zip(drawn, styles(drawn), strict=True):
        probes = [probe for probe in one["curve"] if not probe["overloaded"]]
        loads = [float(probe["load"]) for probe in probes]
        parts = [float(probe["stress"].get(clause) or 0.01) for probe in probes]
        series.append(
            Series(
                "line",
                one["name"],
                np.array(loads),
                np.array(parts),
                *style,
                marks=True,
            )
        )
        most, run = max(most, *parts), (one.get("at_capacity") or {}).get("run")
        places = zip(probes, loads, parts, strict=True)
        full += [(load, part) for probe, load, part in places if probe["run"] == run]
    if full:
        x, y = np.array(full).T
        series.append(Series("points", "at its capacity", x, y, BLACK))
    up = Axis(
        "share of the limit (%)",
        shares=True,
        ends=(0.0, min(max(1.05 * most, 1.5), 2.1)),
    )
    title, along = f"Headroom: {clause}", Axis(f"load ({unit})")
    return Chart(title, along, up, series, _HEADROOM, level=1.0)


# Pareto fronts ---------------------------------------------------------------------------------

SCREENED = "short runs only"
STRESS, COST = "stress", "per_million_output_tokens"
PAIRS = {
    "throughput_interactivity": ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu"),
    "ttft_tbt": ("ttft_p99_s", "tbt_p99_s"),
    "cost_slo": (STRESS, COST),
}
"""Figures by name: the metrics of the x and y axes."""
NAMES = {
    "tokens_per_s_per_user": "tokens/s per user (1 / median TPOT)",
    "output_tokens_per_s_per_gpu": "output tokens/s per GPU",
    "ttft_p99_s": "time to first token, p99 (s)",
    "tbt_p99_s": "time between tokens, p99 (s)",
    STRESS: "factor on all limits of the SLO (1: as asked)",
    COST: "cost of a million output tokens",
}
_MORE = ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
"""Metrics of which more is better; of all others less is better."""
_GAINS = (*_MORE, COST)
"""The metrics of value under a load; the others are latencies."""
_OF_PROBE = (*_MORE, "ttft_p99_s", "tbt_p99_s", "load", "holds", "run")
_LINK = "../probes/runs/{}/summary.json"
"""The path from the figures' folder to a run."""


def points(
    found: Sequence[Mapping[str, Any]], screened: Sequence[Mapping[str, Any]] = ()
) -> pd.DataFrame:
    """Every deployment under every load of its curve; ``full``: the load is its capacity.

    Deployments that were only ``screened`` are one ``group``. ``stress`` is the factor on all
    limits under which the load just keeps them: 1 is the SLO; NaN where it is overloaded.
    """
    rows = list[dict[str, Any]]()
    grouped = [(one, one["name"]) for one in found] + [(one, SCREENED) for one in screened]
    for one, group in grouped:
        for probe in one.get("curve", ()):
            row = {key: probe[key] for key in _OF_PROBE}
            stress = np.nan if probe["overloaded"] else max(*probe["stress"].values(), 1e-2)
            row |= {"deployment": one["name"], "policy": one.get("policy", ""), STRESS: stress}
            at = one.get("at_capacity") or {}
            row |= {"group": group, "full": group == SCREENED or probe["run"] == at.get("run")}
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


def frontier_charts(
    drawn: Deployments, unit: str, currency: str, screened: Deployments = ()
) -> dict[str, list[Chart]]:
    """Every deployment under every load, with the Pareto front, for each pair of metrics."""
    table = points(drawn, screened)
    return {
        f"pareto_{name}": [
            _front(
                table.dropna(subset=[x, y]),
                x,
                y,
                unit,
                currency,
            )
        ]
        for name, (x, y) in PAIRS.items()
        if {x, y} <= set(table)
    }


def axis_name(key: str, currency: str) -> str:
    """The label of an axis; a cost with its currency."""
    return f"{NAMES[key]} ({currency})" if key == COST and currency else NAMES[key]


_FRONT = "A point is a deployment under a load."
_LOADS = "Labels are loads, on the Pareto front and at capacities, where there is room."
_JOINED = "The dashed line is the Pareto front: no other point is better in both metrics"
_RELAXED = "Steps: the cost of each deployment if all limits are multiplied by this factor."


def _front(table: pd.DataFrame, x: str, y: str, unit: str, currency: str) -> Chart:
    table = table.reset_index(drop=True)
    table[[x, y]] = table[[x, y]].astype(float)
    best, relaxed, series = front(table, x, y), x == STRESS, []
    full = table["full"] & (table["group"] != SCREENED)
    labelled = (full | table.index.isin(best.index)) & (not relaxed)
    parts = dict(list(table.groupby("group", sort=False)))
    grouped = [
        {"policy": rows["policy"].iloc[0]} for name, rows in parts.items() if name != SCREENED
    ]
    looks = [*styles(grouped), Style(GREY, "-")]
    for (name, rows), style in zip(parts.items(), looks, strict=False):
        said = [
            f"{row['deployment']}: {number_text(row['load'])} {unit}, "
            f"{'holds' if row['holds'] else 'breaks'} the SLO"
            for _, row in rows.iterrows()
        ]
        loads = zip(rows["load"], labelled[rows.index], strict=True)
        texts = [number_text(load) if seen else "" for load, seen in loads]
        series.append(
            Series(
                "points",
                str(name),
                rows[x].to_numpy(),
                rows[y].to_numpy(),
                style.colour,
                texts=texts,
                more={"deployment": said},
                links=rows["run"].tolist(),
            )
        )
        if relaxed and name != SCREENED:
            series.append(Series("step", str(name), *cheapest(rows), *style))
    along, up = axis_of([table[x]], axis_name(x, currency)), Axis(axis_name(y, currency))
    if relaxed:
        along, caption = Axis(f"{NAMES[x]}, log scale", log=True), f"{_FRONT} {_RELAXED}"
    else:
        two = " (where each deployment serves all it can)" * (not {x, y} & set(_GAINS))
        line = (best[x].to_numpy(), best[y].to_numpy(), BLACK, "--")
        series.append(Series("line", "the front", *line))
        caption = f"{_FRONT} {_LOADS} {_JOINED}{two}."
    edge = 1.0 if relaxed else None
    about_both = f"{NAMES[y]} against {NAMES[x]}"
    return Chart(about_both, along, up, series, caption, edge=edge, link=_LINK)


MOST_PANELS, MOST_BARS = 12, 14


def panels(content: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of a sensitivity by deployment and measure, the strongest factor first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault((row["deployment"], row["measure"]), []).append(row)
    return {
        key: sorted(rows, key=lambda row: -abs(row["elasticity"])) for key, rows in found.items()
    }


def title(content: Mapping[str, Any], deployment: str, measure: str) -> str:
    """The title of a panel, with the value without any change."""
    (base,) = (d["base"][measure] for d in content["deployments"] if d["name"] == deployment)
    about = f"{deployment}: " if len(content["deployments"]) > 1 else ""
    return f"{about}{content['measures'][measure]}, {number_text(float(base))}"


def sides(content: Mapping[str, Any]) -> tuple[str, str]:
    """``-10 %`` and ``+10 %``."""
    by = f"{100 * content['by']:g} %"
    return f"-{by}", f"+{by}"


def tornado_charts(content: Mapping[str, Any]) -> list[Chart]:
    """A chart for each deployment and measure, all of one scale: the effect of each factor, the
    largest on top."""
    shown = [(key, rows[:MOST_BARS]) for key, rows in panels(content).items()][:MOST_PANELS]
    changes = [row[end] for _, rows in shown for row in rows for end in ("low_pct", "high_pct")]
    most = 1.05 * float(np.nanmax(np.abs(np.array([*changes, 1.0], float))))
    charts = []
    for key, some in shown:
        values = {
            name: [row[end] for row in some]
            for name, end in zip(sides(content), ("low_pct", "high_pct"), strict=True)
        }
        along = Axis("change (%)", ends=(-most, most))
        factors = [op_label(row["factor"]) for row in some]
        charts.append(
            bars(
                title(content, *key),
                along,
                factors,
                values,
                (ORANGE, SKY),
                caption="One factor is changed at a time.",
                edge=0.0,
            )
        )
    return charts
