"""The sections of capacities, recommendations and sensitivities; where their op times come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90, OpError, op_errors
from sarathi_sim.simulator.views.metric_registry import number_text
from ..capacity import curves
from ..capacity.curves import MOST_BARS
from ..capacity.probing import PROBES
from ..capacity.written import (
    UNITS,
    capacity_answer,
    panels,
    recommend_answer,
    sensitivity_answer,
    sides,
    title,
)
from ..config.deployment import Deployment, deploy
from ..config.loading import load_experiment
from ..content import Chart, Section, SortableTable, anchor, number_or_dash
from ..figures.style import BLUE, VERMILION, line_styles
from ..results import read_text
from ..sweeps.sweep_answer import read_table
from .charts import Spots, StyledLine, lines, paired_bars, points

_MOST_BUNDLES = 8
_BUNDLE_KEYS = ("model", "device", "stack", "dtype", "cluster.tp", "cluster", "scenario")


def op_times_grid(deployments: Sequence[Deployment]) -> SortableTable | None:
    """A row for each op of each profile bundle: its origin, and its error. None without any."""
    bundles = {deployment.bundle_name: deployment.ops for deployment in deployments}
    rows = []
    for name, ops in bundles.items():
        meta = ops.meta
        for op, error in op_errors(ops).items():
            origin = str(meta.environment.get(op, meta.source))
            rows.append([name, op, origin, f"{_percent(error):.1f}"])
    if not rows:
        return None
    note = (
        "The error is half of the 90 % band, the median between the op's measured sizes: of the "
        "regression, and of the device model where the times are modelled."
    )
    headings = ["profile bundle", "op", "origin", "error (± %)"]
    return SortableTable("Op times: origin and error", headings, rows, note, text=3)


def _percent(error: OpError) -> float:
    points = error.table.points
    local = float(np.median(error.sigmas((points[1:] + points[:-1]) / 2)))
    return float(100 * np.expm1(NORMAL_90 * np.hypot(error.common, local)))


def first_deployments(folder: Path, table: pd.DataFrame) -> tuple[list[Deployment], list[str]]:
    """The deployments of a sweep's first run of each model, device and layout, for their op times;
    and the reasons why others fail."""
    by = [key for key in _BUNDLE_KEYS if key in table] or ["name"]
    found, problems = [], []
    for _, rows in list(table.groupby(by, dropna=False, sort=False))[:_MOST_BUNDLES]:
        run, name = str(rows["run"].iloc[0]), str(rows["name"].iloc[0])
        try:
            experiment = load_experiment(folder / "runs" / run / "config.yaml")
            found.append(deploy(experiment.scenarios[name], experiment.sources[name]))
        except (UserError, KeyError) as error:
            problems.append(f"no errors of op times of run {run}: {error}")
    return found, problems


MOST_LINES = 14
_RELAXED = "Steps: what each deployment costs when all limits are so many times what is asked. "
Deployments = Sequence[Mapping[str, Any]]


def op_times_of_probes(folder: Path) -> tuple[list[SortableTable], list[str]]:
    """Origin and error of the op times of the first probes, which are the runs of a sweep; or why
    there are none."""
    probes = folder / PROBES
    try:
        deployments, problems = first_deployments(probes, read_table(probes))
    except UserError as error:
        return [], [f"no errors of op times: {error}"]
    found = op_times_grid(deployments)
    return [found] if found else [], problems


def headroom_charts(drawn: Deployments, unit: str) -> list[Chart]:
    """For each clause of the SLO: its value over its limit, by load."""
    probes = [probe for one in drawn for probe in one["curve"]]
    clauses = dict.fromkeys(key for probe in probes for key in probe["stress"])
    charts = []
    for clause in clauses:
        along = {}
        for one, style in zip(drawn, line_styles(), strict=False):
            loads = np.array([probe["load"] for probe in one["curve"]], np.float64)
            parts = [100 * (probe["stress"].get(clause) or 0.0) for probe in one["curve"]]
            along[one["name"]] = StyledLine(loads, np.array(parts), style)
        chart = lines(along, f"load ({unit})", "part of the limit (%)", marks=True, limit=100.0)
        caption = "Above the line the SLO breaks."
        charts.append(Chart(f"Headroom: {clause}", chart, caption))
    return charts


def frontier_charts(
    drawn: Deployments, unit: str, currency: str, screened: Deployments = ()
) -> list[Chart]:
    """Every deployment under every load, with the Pareto front."""
    table, charts = curves.points(drawn, screened), []
    for x, y in curves.PAIRS.values():
        if not {x, y} <= set(table):
            continue
        some = table.dropna(subset=[x, y]).reset_index(drop=True)
        some[[x, y]] = some[[x, y]].astype(float)
        best = curves.front(some, x, y)
        labels = some["number"].map(str).where(curves.numbered(some, best), "")
        parts, relaxed = {}, x == curves.STRESS
        groups = some.groupby("group", sort=False)
        for (name, rows), style in zip(groups, line_styles(), strict=False):
            said = [
                f"{row['deployment']}: {number_text(row['load'])} {unit}, "
                f"{'holds' if row['holds'] else 'breaks'} the SLO"
                for _, row in rows.iterrows()
            ]
            spots = (rows[x].to_numpy(), rows[y].to_numpy(), said, labels[rows.index].tolist())
            anchors = [anchor(run) for run in rows["run"]]
            steps = curves.cheapest(rows) if relaxed and name != curves.SCREENED else None
            parts[str(name)] = Spots(style["color"], *spots, anchors, steps)
        line = (best[x].to_numpy(), best[y].to_numpy())
        options = {"x_axis_type": "log"} if relaxed else {}
        chart = points(parts, line, curves.named(x, currency), curves.named(y, currency), **options)
        caption = _RELAXED if relaxed else ""
        caption += (
            "A point is a deployment under a load; its number is that of its row in 'Every "
            "point', to which a click leads. The dashed line joins those that no other one beats "
            "in both (of two latencies: where each deployment carries all it can). They and the "
            "capacities have their number beside them."
        )
        title = f"{curves.NAMES[y]} against {curves.NAMES[x]}"
        charts.append(Chart(title, chart, caption))
    return charts


def points_table(
    drawn: Deployments, unit: str, currency: str, screened: Deployments = ()
) -> SortableTable:
    """A row for each point of the fronts: its numbers and the place of its run."""
    table = curves.points(drawn, screened)
    keys = [key for key in curves.NAMES if key in table]
    rows = []
    for _, row in table.iterrows():
        numbers = (None if pd.isna(row[key]) else float(row[key]) for key in ("load", *keys))
        slo = "holds" if row["holds"] else "breaks"
        words = (str(row["number"]), row["deployment"], slo, row["run"])
        rows.append([*words, *map(number_or_dash, numbers)])
    shown = [curves.named(key, currency) for key in keys]
    headings = ["point", "deployment", "SLO", "run", f"load ({unit})", *shown]
    note = "probes/runs/RUN of the result has the configuration and the requests of each run."
    anchors = [anchor(run) for run in table["run"]] if len(table) else []
    return SortableTable("Every point", headings, rows, note, text=4, anchors=anchors)


def capacity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``capacity`` result."""
    section, unit = capacity_answer(found), UNITS[found["load"]]
    currency = found["prices"]["currency"]
    drawn = [one for one in found["deployments"] if one.get("curve")][:MOST_LINES]
    op_times, problems = op_times_of_probes(folder)
    return replace(
        section,
        charts=[*headroom_charts(drawn, unit), *frontier_charts(drawn, unit, currency)],
        details=[*section.details, points_table(drawn, unit, currency), *op_times],
        configuration={"config.yaml": read_text(folder / "config.yaml")},
        warnings=[*section.warnings, *problems],
    )


def recommend_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``recommend`` result."""
    section, unit = recommend_answer(found), UNITS[found["load"]]
    currency = found["prices"]["currency"]
    drawn = [one for one in found["deployments"] if one.get("curve")][:MOST_LINES]
    screened = [one for one in found["screened"] if one.get("curve")]
    op_times, problems = op_times_of_probes(folder)
    names = () if found["winner"] is None else ("winner.yaml",)
    winner = {name: read_text(folder / name) for name in names}
    return replace(
        section,
        charts=[*headroom_charts(drawn, unit), *frontier_charts(drawn, unit, currency, screened)],
        details=[*section.details, points_table(drawn, unit, currency, screened), *op_times],
        configuration=section.configuration | winner,
        warnings=[*section.warnings, *problems],
    )


_MOST_CHARTS = 24


def sensitivity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``sensitivity`` result."""
    op_times, problems = op_times_of_probes(folder)
    section = sensitivity_answer(found)
    return replace(
        section,
        charts=_charts(found),
        details=op_times,
        configuration={"config.yaml": read_text(folder / "config.yaml")},
        warnings=[*section.warnings, *problems],
    )


def _charts(found: Mapping[str, Any]) -> list[Chart]:
    charts = []
    for key, rows in list(panels(found).items())[:_MOST_CHARTS]:
        some = rows[:MOST_BARS]
        bars = {
            side: (colour, [row[f"{end}_pct"] for row in some])
            for side, end, colour in zip(
                sides(found), ("low", "high"), (BLUE, VERMILION), strict=True
            )
        }
        chart = paired_bars([row["factor"] for row in some], bars, "change (%)")
        charts.append(Chart(title(found, *key), chart, "Each factor is changed by itself."))
    return charts
