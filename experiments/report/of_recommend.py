"""The section of a recommendation: which deployment, why, and what the others lose by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.capacity.written import UNITS, prices_line
from experiments.report.frontiers import (
    MOST_LINES,
    frontier_charts,
    headroom_charts,
    op_times_of_probes,
    points_table,
)
from experiments.run.report import number_or_dash
from experiments.content import Section, SortableTable

_MOST_DROPPED = 200
_MARKS = ("warning: ", "note: ")
_FILES = ("winner.yaml", "launch.sh")


def recommend_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``recommend`` wrote."""
    rows, unit = list(found["deployments"]), UNITS[found["load"]]
    drawn = [one for one in rows if one.get("curve")][:MOST_LINES]
    screened = [one for one in found["screened"] if one.get("curve")]
    op_times, problems = op_times_of_probes(folder)
    others = [grid for grid in (_screened(found, unit), _dropped(found)) if grid.rows]
    said = [
        line[len(mark) :] for line in found["lines"] for mark in _MARKS if line.startswith(mark)
    ]
    said.append(prices_line(found["prices"]))
    return Section(
        kind="recommendation",
        name=str(found["model"]),
        question=_question(found),
        answer=f"{rows[0]['name']}: it {rows[0]['why']}.",
        table=_table(found, unit),
        charts=[*headroom_charts(drawn, unit), *frontier_charts(drawn, unit, screened)],
        details=[points_table(drawn, unit, screened), *others, *op_times],
        configuration={name: (folder / name).read_text("utf-8") for name in _FILES},
        warnings=[*said, *problems],
    )


def _question(found: Mapping[str, Any]) -> str:
    devices = " or ".join(found["devices"])
    if found["rate"] is None:
        what = f"carries most for its price on {found['gpus']} GPUs ({devices})"
    else:
        what = f"is the cheapest for {found['rate']:g} requests/s ({devices})"
    return f"Which deployment of {found['model']} {what} under the SLO {found['slo']}?"


def _table(found: Mapping[str, Any], unit: str) -> SortableTable:
    rows = []
    for one in found["deployments"]:
        numbers = (one["capacity"], one.get("interval"), one["gpus"], one.get("per_hour"))
        cost = one.get("per_million_output_tokens")
        rows.append([one["name"], one["why"], *map(number_or_dash, (*numbers, cost))])
    currency = found["prices"]["currency"]
    headings = (
        *("deployment", "why", f"capacity ({unit})", "95 % interval", "GPUs"),
        *(f"{currency} an hour", f"{currency} a million output tokens"),
    )
    note = "Predicted; prices as stated. docs/capacity.md says what each number is."
    return SortableTable("The best deployments", headings, rows, note, text=2)


def _screened(found: Mapping[str, Any], unit: str) -> SortableTable:
    rows = [
        [one["name"], *(number_or_dash(one[key]) for key in ("replicas", "about"))]
        for one in found["screened"]
    ]
    headings = ("deployment", "replicas", f"about ({unit})")
    note = "One replica in short runs, times their number: several percent off."
    return SortableTable("Screened only", headings, rows, note)


def _dropped(found: Mapping[str, Any]) -> SortableTable:
    dropped = list(found["dropped"].items())
    more = len(dropped) - _MOST_DROPPED
    note = f"And {more} more in summary.json." if more > 0 else ""
    rows = [[name, why] for name, why in dropped[:_MOST_DROPPED]]
    return SortableTable("Not simulated, or dropped", ("deployment", "why"), rows, note, text=2)
