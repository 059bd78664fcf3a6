"""The section of capacities: the highest load of each deployment under an SLO, and its headroom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.capacity.written import UNITS, prices_line, sentence
from experiments.report.frontiers import (
    MOST_LINES,
    Deployments,
    frontier_charts,
    headroom_charts,
    op_times_of_probes,
    points_table,
)
from experiments.run.report import number_or_dash
from experiments.content import Section, SortableTable


def capacity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``capacity`` wrote."""
    deployments, unit = list(found["deployments"]), UNITS[found["load"]]
    drawn = [one for one in deployments if one.get("curve")][:MOST_LINES]
    op_times, problems = op_times_of_probes(folder)
    said = [re.sub("^(warning|note): ", "", line) for line in found["warnings"]]
    prices = found.get("prices")  # results of before have none
    said += [prices_line(prices)] if prices else []
    currency = prices["currency"] if prices else ""
    what = "rate of requests" if found["load"] == "rate" else "number of clients"
    return Section(
        kind="capacity",
        name=str(found["name"]),
        question=f"Up to which {what} does each deployment hold the SLO {found['slo']}?",
        answer=sentence(deployments, unit, currency),
        table=_table(deployments, unit, currency),
        charts=[*headroom_charts(drawn, unit), *frontier_charts(drawn, unit)],
        details=[points_table(drawn, unit), *op_times],
        about=str(found["description"] or ""),
        configuration={"config.yaml": (folder / "config.yaml").read_text("utf-8")},
        warnings=[*said, *problems],
    )


def _table(deployments: Deployments, unit: str, currency: str) -> SortableTable:
    rows = []
    for one in deployments:
        binds, capacity = one.get("binds") or {}, one["capacity"]
        cells = [one["name"], binds.get("slo", one.get("error", "")), binds.get("because", "")]
        numbers = (
            *(capacity, one.get("mean"), one.get("interval"), one.get("band")),
            *(one["gpus"], None if capacity is None else capacity / one["gpus"]),
            one.get("per_million_output_tokens"),
        )
        rows.append([*map(str, cells), *map(number_or_dash, numbers)])
    headings = (
        *("deployment", "breaks first", "because of", f"capacity ({unit})", "mean"),
        *("95 % interval", "with op errors, 90 %", "GPUs", f"{unit} a GPU"),
        f"{currency} a million output tokens".lstrip(),
    )
    note = "Predicted. docs/capacity.md says what each number is."
    return SortableTable("Capacity", headings, rows, note, text=3)
