"""The output of `plan` and `sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from sarathi_sim.experiments.config.scenario import parameter, value_name
from sarathi_sim.experiments.content import rich_table
from sarathi_sim.experiments.sweeps.execute import Report
from sarathi_sim.experiments.sweeps.plan import SweepPlan, coordinates
from sarathi_sim.simulator.views.metric_registry import Quantity, known

_MOST_SHOWN = 12
_MOST_ROWS = 20
_RESULTS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")
_SHOWN = ("makespan_s", "ttft_s.p50", "tbt_s.p99", "latency_s.p50")


def axes_table(plan: SweepPlan) -> Table:
    """Every axis with its values."""
    rows = []
    cells = [coordinates(run, plan.axes) for run in plan.runs]
    for axis in plan.axes:
        values = list(dict.fromkeys(str(cell.get(axis)) for cell in cells))
        many = len(values) > _MOST_SHOWN
        shown = [*values[: _MOST_SHOWN - 1], "…", values[-1]] if many else values
        note = "compared pair by pair" if axis == plan.contrast else ""
        rows.append([axis, f"{len(values)}: {', '.join(shown)}", note])
    return rich_table(("axis", "values", ""), (), rows)


def duration(seconds: float) -> str:
    """Seconds as text with a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def results_table(table: pd.DataFrame, axes: Sequence[str]) -> Table | None:
    """The results: a row per point of the axes, as means over its seeds. None without runs.

    Latencies of overloaded runs are left out.
    """
    if table.empty:
        return None
    seeds = int(table.groupby(_point_keys(axes), dropna=False).size().max())
    headings, rows = result_rows(table, axes)
    said = [f"means over {seeds} seeds" if seeds > 1 else ""]
    if len(rows) > _MOST_ROWS:
        said.append(f"and {len(rows) - _MOST_ROWS} more in results.parquet")
    if (table["steady.state"] == "overloaded").any():
        said.append("latencies of overloaded runs are in results.parquet, over all their requests")
    text = len(headings) - len(_RESULTS)
    caption = "; ".join(filter(None, said)) or None
    return rich_table(headings[:text], headings[text:], rows[:_MOST_ROWS], caption=caption)


def _point_keys(axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if axis != "seed"] or ["name"]


def result_rows(table: pd.DataFrame, axes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row per point of the axes: its values, and means over its seeds."""
    keys = [axis for axis in axes if axis != "seed"]
    shown = [known(path) for path in _RESULTS]
    found = []
    for _, rows in table.groupby(_point_keys(axes), dropna=False, sort=False):
        values = (rows[axis].iloc[0] for axis in keys)
        cells = ["-" if pd.isna(value) else value_name(value) for value in values]
        found.append([*cells, *(_mean(rows, quantity) for quantity in shown)])
    headings = [parameter(axis).heading for axis in keys] + [each.axis for each in shown]
    return headings, found


def _mean(rows: pd.DataFrame, quantity: Quantity) -> str:
    if quantity.metric.grows and (rows["steady.state"] == "overloaded").any():
        return "overloaded"
    mean = rows[quantity.path].mean(skipna=False)
    return "-" if pd.isna(mean) else quantity.text(float(mean))


def paired_table(summary: Mapping[str, Any]) -> Table | None:
    """The first paired differences: ratios with their 95 % intervals. None if there are none."""
    entries = summary["paired"]
    if not entries:
        return None
    more = len(entries) - _MOST_SHOWN
    contrast, against = parameter(summary["contrast"]).name, value_name(entries[0]["against"])
    others = list(entries[0]["point"])
    rows = []
    for entry in entries[:_MOST_SHOWN]:
        names = [value_name(v) for v in (*map(entry["point"].get, others), entry["value"])]
        rows.append([*names, *(_ratio(entry, metric) for metric in _SHOWN)])
    return rich_table(
        [parameter(axis).heading for axis in (*others, summary["contrast"])],
        [known(path).label for path in _SHOWN],
        rows,
        title=f"{contrast}: ratio to {against}",
        caption=f"and {more} more in summary.json" if more > 0 else None,
    )


def _ratio(entry: Mapping[str, Any], metric: str) -> str:
    ratio = entry["ratios"].get(metric)
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"{ratio['ratio']:.3f}"
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def outcome(report: Report, workers: int) -> str:
    """One line: finished runs, time, and the workers' share of time in runs."""
    ran = report.finished - report.earlier
    parts = [f"{report.finished} of {report.total} runs finished"]
    if report.earlier:
        parts.append(f"{report.earlier} of them earlier")
    if ran:
        parts.append(
            f"{duration(report.wall_s)} on {workers} worker{'s' if workers > 1 else ''}, "
            f"{100 * report.busy:.0f} % of it in runs"
        )
    if report.lost_workers:
        parts.append(f"{report.lost_workers} bundles were sent again after their worker died")
    return ", ".join(parts)
