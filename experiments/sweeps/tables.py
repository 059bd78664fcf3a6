"""What `plan` and `sweep` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from experiments.sweeps.execute import Report
from experiments.sweeps.plan import SweepPlan, coordinates

_MOST_SHOWN = 12
_SHOWN = ("makespan_s", "ttft_s.p50", "tbt_s.p99", "latency_s.p50")


def axes_table(plan: SweepPlan) -> Table:
    """Every axis with its values."""
    table = Table()
    for heading in ("axis", "values", ""):
        table.add_column(heading, overflow="fold")
    cells = [coordinates(run, plan.axes) for run in plan.runs]
    for axis in plan.axes:
        values = list(dict.fromkeys(str(cell.get(axis)) for cell in cells))
        shown = (
            [*values[: _MOST_SHOWN - 1], "…", values[-1]] if len(values) > _MOST_SHOWN else values
        )
        note = "compared pair by pair" if axis == plan.contrast else ""
        table.add_row(axis, f"{len(values)}: {', '.join(shown)}", note)
    return table


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def paired_table(summary: Mapping[str, Any]) -> Table | None:
    """The first paired differences: ratios with their 95 % intervals. None if there are none."""
    entries = summary["paired"]
    if not entries:
        return None
    more = len(entries) - _MOST_SHOWN
    table = Table(
        title=f"{summary['contrast']}: ratio to {entries[0]['against']}",
        title_justify="left",
        caption=f"and {more} more in summary.json" if more > 0 else None,
    )
    others = list(entries[0]["point"])
    for heading in (*others, summary["contrast"]):
        table.add_column(heading, overflow="fold")
    for heading in _SHOWN:
        table.add_column(heading, justify="right", overflow="fold")
    for entry in entries[:_MOST_SHOWN]:
        point = [str(entry["point"][axis]) for axis in others]
        table.add_row(*point, str(entry["value"]), *(_ratio(entry, metric) for metric in _SHOWN))
    return table


def _ratio(entry: Mapping[str, Any], metric: str) -> str:
    ratio = entry["ratios"].get(metric)
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"{ratio['ratio']:.3f}"
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def outcome(report: Report, workers: int) -> str:
    """One line: what was done, how long it took, how busy the workers were."""
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
        parts.append(f"{report.lost_workers} bundles of a worker that died were sent again")
    return ", ".join(parts)
