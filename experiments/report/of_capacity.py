"""The section of capacities: the highest load of each deployment under an SLO, and its headroom."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.capacity.folder import PROBES
from experiments.capacity.written import UNITS
from experiments.config.errors import ConfigError
from experiments.figures.style import line_styles
from experiments.report.charts import StyledLine, lines, points
from experiments.report.content import Chart, Section, SortableTable
from experiments.report.provenance import first_deployments, op_times_grid
from experiments.results import read_summary
from experiments.run.report import number_or_dash
from experiments.sweeps.figures.plot import read_table
from profiler.storage.progress import Progress, silent
from profiler.storage.strict import UserError
from simulator.views.metric_registry import number_text

_MOST_LINES = 14
Deployments = Sequence[Mapping[str, Any]]


def capacity_section(folder: Path, progress: Progress = silent) -> Section:
    """What ``capacity`` wrote. Raises ConfigError where it is damaged."""
    try:
        return _section(folder, read_summary(folder))
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise ConfigError(f"{folder}: the capacities are damaged: {error!r}") from None


def _section(folder: Path, found: Mapping[str, Any]) -> Section:
    deployments, unit = list(found["deployments"]), UNITS[found["load"]]
    drawn = [one for one in deployments if one.get("curve")][:_MOST_LINES]
    op_times, problems = _op_times(folder / PROBES)
    said = [re.sub("^(warning|note): ", "", line) for line in found["warnings"]]
    what = "rate of requests" if found["load"] == "rate" else "number of clients"
    return Section(
        kind="capacity",
        name=str(found["name"]),
        question=f"Up to which {what} does each deployment hold the SLO {found['slo']}?",
        answer=_answer(deployments, unit),
        table=_table(deployments, unit),
        charts=[*_headroom(drawn, unit), *_users(drawn)],
        details=[op_times] if op_times else [],
        about=str(found["description"] or ""),
        configuration={"config.yaml": (folder / "config.yaml").read_text("utf-8")},
        warnings=[*said, *problems],
    )


def _op_times(probes: Path) -> tuple[SortableTable | None, list[str]]:
    """Of the first probes, which are the runs of a sweep."""
    try:
        deployments, problems = first_deployments(probes, read_table(probes))
    except UserError as error:
        return None, [f"no errors of op times: {error}"]
    return op_times_grid(deployments), problems


def _answer(deployments: Deployments, unit: str) -> str:
    able = [one for one in deployments if one["capacity"]]
    if not able:
        return "No deployment holds the SLO, even under a small load."
    best = max(able, key=lambda one: one["capacity"])
    said = (
        f"{best['name']} carries the most, {number_text(best['capacity'])} {unit} on "
        f"{best['gpus']} GPU{'s' if best['gpus'] > 1 else ''}"
    )
    binds = best.get("binds") or {}
    if binds:
        said += f"; {binds['slo']} breaks first, because of {binds['because']}"
    per_gpu = max(able, key=lambda one: one["capacity"] / one["gpus"])
    if per_gpu is not best:
        rate = number_text(per_gpu["capacity"] / per_gpu["gpus"])
        said += f"; {per_gpu['name']} carries the most a GPU, {rate} {unit}"
    return f"{said}."


def _table(deployments: Deployments, unit: str) -> SortableTable:
    rows = []
    for one in deployments:
        binds, capacity = one.get("binds") or {}, one["capacity"]
        cells = [one["name"], binds.get("slo", one.get("error", "")), binds.get("because", "")]
        numbers = (
            *(capacity, one.get("mean"), one.get("interval"), one.get("band")),
            *(one["gpus"], None if capacity is None else capacity / one["gpus"]),
        )
        rows.append([*map(str, cells), *map(number_or_dash, numbers)])
    headings = (
        *("deployment", "breaks first", "because of", f"capacity ({unit})", "mean"),
        *("95 % interval", "with op errors, 90 %", "GPUs", f"{unit} a GPU"),
    )
    note = "Predicted. docs/capacity.md says what each number is."
    return SortableTable("Capacity", headings, rows, note, text=3)


def _headroom(drawn: Deployments, unit: str) -> list[Chart]:
    """For each clause of the SLO: the part of its limit that each load takes."""
    probes = [probe for one in drawn for probe in one["curve"]]
    clauses = dict.fromkeys(key for probe in probes for key in probe["stress"])
    charts = []
    for clause in clauses:
        curves = {}
        for one, style in zip(drawn, line_styles(), strict=False):
            loads = np.array([probe["load"] for probe in one["curve"]], np.float64)
            parts = [100 * (probe["stress"].get(clause) or 0.0) for probe in one["curve"]]
            curves[one["name"]] = StyledLine(loads, np.array(parts), style)
        chart = lines(curves, f"load ({unit})", "part of the limit (%)", marks=True, limit=100.0)
        caption = "Above the line the SLO breaks."
        charts.append(Chart(f"Headroom: {clause}", chart, caption))
    return charts


def _users(drawn: Deployments) -> list[Chart]:
    """Throughput a GPU against the tokens a second that a user gets."""
    groups = {}
    for one, style in zip(drawn, line_styles(), strict=False):
        probes = [probe for probe in one["curve"] if probe["tokens_per_s_per_user"] is not None]
        x, y = (
            np.array([probe[key] for probe in probes], np.float64)
            for key in ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
        )
        words = [
            f"load {number_text(probe['load'])}, {'holds' if probe['holds'] else 'breaks'} the SLO"
            for probe in probes
        ]
        groups[one["name"]] = (style["color"], x, y, words)
    if not groups:
        return []
    nothing = np.zeros(0)
    labels = ("output tokens/s of a user, median", "output tokens/s a GPU")
    title = "Throughput a GPU against the speed that a user sees"
    return [Chart(title, points(groups, (nothing, nothing), *labels))]
