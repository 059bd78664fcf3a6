"""The section of capacities: their answer, with headroom and Pareto fronts as charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.capacity.written import UNITS, capacity_answer
from sarathi_sim.experiments.content import Section
from sarathi_sim.experiments.report.frontiers import (
    MOST_LINES,
    frontier_charts,
    headroom_charts,
    op_times_of_probes,
    points_table,
)
from sarathi_sim.experiments.results import read_text


def capacity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``capacity`` wrote."""
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
