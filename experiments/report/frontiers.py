"""What capacities and recommendations have in common: load against each clause of the SLO, Pareto
fronts, and a row for every point of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.experiments.capacity import curves
from sarathi_sim.experiments.capacity.probing import PROBES
from sarathi_sim.experiments.content import Chart, SortableTable, anchor, number_or_dash
from sarathi_sim.experiments.figures.style import line_styles
from sarathi_sim.experiments.report.charts import Spots, StyledLine, lines, points
from sarathi_sim.experiments.report.provenance import first_deployments, op_times_grid
from sarathi_sim.experiments.sweeps.plot import read_table
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import number_text

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
    """For each clause of the SLO: the part of its limit that each load takes."""
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
    """Every deployment under every load, with the points that no other one beats in both."""
    table, charts = curves.points(drawn, screened), []
    for x, y in curves.PAIRS.values():
        if not {x, y} <= set(table):
            continue
        some = table.dropna(subset=[x, y]).reset_index(drop=True)
        some[[x, y]] = some[[x, y]].astype(float)
        best = curves.front(some, x, y)
        parts, relaxed = {}, x == curves.STRESS
        groups = some.groupby("group", sort=False)
        for (name, rows), style in zip(groups, line_styles(), strict=False):
            said = [
                f"{row['deployment']}: {number_text(row['load'])} {unit}, "
                f"{'holds' if row['holds'] else 'breaks'} the SLO"
                for _, row in rows.iterrows()
            ]
            spots = (rows[x].to_numpy(), rows[y].to_numpy(), said, rows["label"].tolist())
            anchors = [anchor(run) for run in rows["run"]]
            steps = curves.cheapest(rows) if relaxed and name != curves.SCREENED else None
            parts[str(name)] = Spots(style["color"], *spots, anchors, steps)
        line = (best[x].to_numpy(), best[y].to_numpy())
        options = {"x_axis_type": "log"} if relaxed else {}
        chart = points(parts, line, curves.named(x, currency), curves.named(y, currency), **options)
        caption = _RELAXED if relaxed else ""
        caption += (
            f"Each point is labelled with its load ({unit}), or with what was only screened, one "
            "replica of it. The dashed line joins those that no other one beats in both (of two "
            "latencies: where each deployment carries all it can). A click on a point leads to its "
            "row."
        )
        title = f"{curves.NAMES[y]} against {curves.NAMES[x]}"
        charts.append(Chart(title, chart, caption))
    return charts


def points_table(
    drawn: Deployments, unit: str, currency: str, screened: Deployments = ()
) -> SortableTable:
    """The row that each point of the fronts leads to: its numbers, and where its run is."""
    table = curves.points(drawn, screened)
    keys = [key for key in curves.NAMES if key in table]
    rows = []
    for _, row in table.iterrows():
        numbers = (None if pd.isna(row[key]) else float(row[key]) for key in ("load", *keys))
        slo = "holds" if row["holds"] else "breaks"
        rows.append([row["deployment"], slo, row["run"], *map(number_or_dash, numbers)])
    shown = [curves.named(key, currency) for key in keys]
    headings = ["deployment", "SLO", "run", f"load ({unit})", *shown]
    note = "probes/runs/RUN of the result has the configuration and the requests of each run."
    anchors = [anchor(run) for run in table["run"]] if len(table) else []
    return SortableTable("Every point", headings, rows, note, text=3, anchors=anchors)
