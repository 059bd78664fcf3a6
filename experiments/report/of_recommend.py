"""The section of a recommendation: its answer, with headroom and Pareto fronts as charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.capacity.written import UNITS, recommend_answer
from sarathi_sim.experiments.content import Section
from sarathi_sim.experiments.report.frontiers import (
    MOST_LINES,
    frontier_charts,
    headroom_charts,
    op_times_of_probes,
    points_table,
)
from sarathi_sim.experiments.results import read_text


def recommend_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``recommend`` wrote."""
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
