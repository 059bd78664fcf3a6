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
from ..capacity.probing import PROBES
from ..capacity.written import UNITS, capacity_answer, recommend_answer, sensitivity_answer
from ..config.deployment import Deployment, deploy
from ..config.loading import load_experiment
from ..results import read_text
from ..sweeps.sweep import read_table
from .capacity_charts import NAMES, axis_name, capacity_charts, points, probed, tornado_charts
from .section import Section, Table, anchor, number_or_dash

_MOST_BUNDLES = 8
_BUNDLE_KEYS = ("model", "device", "stack", "dtype", "cluster.tp", "cluster", "scenario")


def op_times_grid(deployments: Sequence[Deployment]) -> Table | None:
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
    return Table("Op times: origin and error", headings, rows, note, text=3)


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


def op_times_of_probes(folder: Path) -> tuple[list[Table], list[str]]:
    """Origin and error of the op times of the first probes, which are the runs of a sweep; or why
    there are none."""
    probes = folder / PROBES
    try:
        deployments, problems = first_deployments(probes, read_table(probes))
    except UserError as error:
        return [], [f"no errors of op times: {error}"]
    found = op_times_grid(deployments)
    return [found] if found else [], problems


def points_table(found: Mapping[str, Any]) -> Table:
    """A row for each point of the fronts: its numbers and the place of its run."""
    unit, currency = UNITS[found["load"]], found["prices"]["currency"]
    table = points(*probed(found))
    keys = [key for key in NAMES if key in table]
    rows = []
    for _, row in table.iterrows():
        numbers = (None if pd.isna(row[key]) else float(row[key]) for key in ("load", *keys))
        slo = "holds" if row["holds"] else "breaks"
        words = (row["deployment"], slo, row["run"])
        rows.append([*words, *map(number_or_dash, numbers)])
    headings = [
        "deployment",
        "SLO",
        "run",
        f"load ({unit})",
        *(axis_name(k, currency) for k in keys),
    ]
    note = "probes/runs/RUN of the result has the configuration and the requests of each run."
    anchors = [anchor(run) for run in table["run"]] if len(table) else []
    return Table("Every point", headings, rows, note, text=3, anchors=anchors)


def capacity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``capacity`` result."""
    return _with_charts(folder, found, capacity_answer(found), "config.yaml")


def recommend_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``recommend`` result."""
    names = () if found["winner"] is None else ("winner.yaml",)
    return _with_charts(folder, found, recommend_answer(found), *names)


def _with_charts(folder: Path, found: Mapping[str, Any], section: Section, *names: str) -> Section:
    """The section with its charts, a row for each of their points, and the files of ``names``."""
    op_times, problems = op_times_of_probes(folder)
    return replace(
        section,
        charts=[chart for charts in capacity_charts(found).values() for chart in charts],
        tables=[*section.tables, points_table(found), *op_times],
        configuration=section.configuration | {name: read_text(folder / name) for name in names},
        warnings=[*section.warnings, *problems],
    )


def sensitivity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``sensitivity`` result."""
    op_times, problems = op_times_of_probes(folder)
    section = sensitivity_answer(found)
    return replace(
        section,
        charts=tornado_charts(found),
        tables=[*section.tables, *op_times],
        configuration={"config.yaml": read_text(folder / "config.yaml")},
        warnings=[*section.warnings, *problems],
    )
