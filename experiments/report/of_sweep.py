"""The section of a sweep: its points, the best of them, and each metric over each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.scenario import parameter
from sarathi_sim.experiments.content import Chart, Section, SortableTable, anchor, enumerated
from sarathi_sim.experiments.report.charts import Spots, StyledLine, lines, points
from sarathi_sim.experiments.report.of_capacity import first_deployments, op_times_grid
from sarathi_sim.experiments.results import read_text
from sarathi_sim.experiments.sweeps.drawing import (
    better,
    groups,
    label,
    layouts,
    overload_note,
    overloaded,
    pareto_front,
    seed_means,
    shown,
)
from sarathi_sim.experiments.sweeps.plot import (
    METRICS,
    numeric_axes,
    read_axes,
    read_table,
    with_policies,
)
from sarathi_sim.experiments.sweeps.printing import result_rows
from sarathi_sim.experiments.sweeps.store import RESULTS
from sarathi_sim.simulator.views.metric_registry import STEADY, Better, known, number_text

_MOST_AXES, _MOST_POINTS = 6, 1000
_FRONTS = (("tbt_s.p99", "output_tokens_per_s"), ("ttft_s.p99", "output_tokens_per_s"))


def sweep_section(folder: Path, summary: Mapping[str, Any]) -> Section:
    """The finished runs of a sweep. Raises ConfigError where it is damaged, or none is finished."""
    table = read_table(folder)
    axes, contrast = read_axes(folder, table)
    table = with_policies(folder, table)
    metrics = list(dict.fromkeys(metric for front in _FRONTS for metric in front))
    if not set(metrics) <= set(table):
        raise ConfigError(f"{folder}: the sweep is damaged: {RESULTS} lacks a metric")
    drawn = table.copy()
    latencies = [metric for metric in metrics if metric.startswith(STEADY)]
    drawn.loc[overloaded(table), latencies] = np.nan
    swept = [axis for axis in axes if axis != "seed"]
    keys = [axis for axis in swept if table[axis].map(str).nunique() > 1] or swept[:1]
    headings, rows = result_rows(table, axes)
    deployments, warnings = first_deployments(folder, table)
    warnings.append(overload_note(table, metrics))
    left = len(summary.get("missing", {}))
    warnings.append(f"{left} of {summary.get('runs')} runs have no result yet." if left else "")
    if len(rows) > _MOST_POINTS:
        warnings.append(f"The table has the first {_MOST_POINTS:,} of {len(rows):,} points.")
    op_times = op_times_grid(deployments)
    return Section(
        kind="sweep",
        name=str(summary.get("name")),
        question=_question(keys),
        answer=_answer(drawn, axes, keys),
        table=SortableTable(
            "Every point",
            headings,
            rows[:_MOST_POINTS],
            _seeds_note(table),
            len(swept),
            _anchors(table, swept)[:_MOST_POINTS],
        ),
        charts=[*_fronts(drawn, axes, contrast), *_axes_charts(drawn, axes, contrast)],
        details=[op_times] if op_times else [],
        about=str(summary.get("description") or ""),
        configuration=_first_configuration(folder, table),
        warnings=[warning for warning in warnings if warning],
    )


def _question(keys: Sequence[str]) -> str:
    names = [parameter(key).name for key in keys]
    what = enumerated(names) if len(names) < 2 else f"combination of {enumerated(names)}"
    return f"Which {what} is best, and what does it cost?"


def _seeds_note(table: pd.DataFrame) -> str:
    seeds = table["seed"].nunique() if "seed" in table else 1
    return f"Predicted. Means over {seeds} seeds." if seeds > 1 else "Predicted."


def _anchors(table: pd.DataFrame, swept: list[str]) -> list[str]:
    """Of the rows of :func:`result_rows`: each by its first run, as in :func:`seed_means`."""
    points = table.groupby(swept or ["name"], dropna=False, sort=False)
    return [anchor(rows["run"].iloc[0]) for _, rows in points]


def _answer(table: pd.DataFrame, axes: Sequence[str], keys: Sequence[str]) -> str:
    """The points with the most tokens, and with the shortest gaps between them."""
    said = []
    for metric in METRICS:
        found = seed_means(table, [metric], axes)
        if found.empty:
            continue
        low, high = found[metric].min(), found[metric].max()
        if len(found) > 1 and 0 < high <= 1.01 * low:
            number = f"{number_text(high)} {known(metric).metric.unit}"
            said.append(f"every point has the same {known(metric).label} within 1 %, {number}")
            continue
        most = better(metric) is Better.MORE
        best = found.iloc[int(found[metric].argmax() if most else found[metric].argmin())]
        (words,) = layouts(pd.DataFrame([best]), keys)
        what = f"{'highest' if most else 'lowest'} {known(metric).label}"
        number = f"{number_text(best[metric])} {known(metric).metric.unit}"
        said.append(f"{number} is the {what} ({words or 'the only point'})")
    text = "; ".join(said) or "no point has a result that can be compared"
    return f"{text[0].upper()}{text[1:]}."


def _fronts(table: pd.DataFrame, axes: Sequence[str], contrast: str | None) -> list[Chart]:
    charts = []
    for x, y in _FRONTS:
        found = seed_means(table, (x, y), axes)
        if len(found) < 2:
            continue
        swept = [axis for axis in axes if axis not in (contrast, "seed")]
        found["words"] = layouts(found, [a for a in swept if found[a].map(str).nunique() > 1])
        parts = {
            name: Spots(
                style["color"],
                rows[x].to_numpy(),
                rows[y].to_numpy(),
                rows["words"].tolist(),
                rows["words"].tolist(),
                [anchor(run) for run in rows["run"]],
            )
            for name, rows, style in groups(found, contrast, most=None)
        }
        cost, gain = found[x].to_numpy(np.float64), found[y].to_numpy(np.float64)
        front = pareto_front(cost, gain)
        chart = points(parts, (cost[front], gain[front]), label(x), label(y))
        title = f"{label(y)} against {label(x)}"
        caption = (
            "The dashed line joins the points that no other one beats in both. A click on a point "
            "leads to its row."
        )
        charts.append(Chart(title, chart, caption))
    return charts


def _axes_charts(table: pd.DataFrame, axes: Sequence[str], contrast: str | None) -> list[Chart]:
    charts = []
    for axis in [a for a in numeric_axes(table, axes) if a != "seed"][:_MOST_AXES]:
        for metric in METRICS:
            curves = {}
            for name, rows, style in groups(table.dropna(subset=[axis]), contrast):
                middle = shown(rows, metric).groupby(rows[axis]).median().dropna()
                if len(middle):
                    x, y = np.asarray(middle.index, float), np.asarray(middle, float)
                    curves[name or "all"] = StyledLine(x, y, style)
            if curves:
                chart = lines(curves, label(axis), label(metric), marks=True)
                title = f"{label(metric)} over {parameter(axis).name}"
                charts.append(Chart(title, chart, "Median over the other axes and the seeds."))
    return charts


def _first_configuration(folder: Path, table: pd.DataFrame) -> dict[str, str]:
    path = folder / "runs" / str(table["run"].iloc[0]) / "config.yaml"
    try:
        return {f"of the first run, {path.parent.name}": read_text(path)}
    except ConfigError as error:
        raise ConfigError(f"the sweep is damaged: {error}") from None
