"""The section of a sensitivity: what moves the capacity, or the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.capacity.curves import MOST_BARS
from sarathi_sim.experiments.capacity.written import panels, sensitivity_answer, sides, title
from sarathi_sim.experiments.content import Chart, Section
from sarathi_sim.experiments.figures.style import BLUE, VERMILION
from sarathi_sim.experiments.report.charts import paired_bars
from sarathi_sim.experiments.report.frontiers import op_times_of_probes
from sarathi_sim.experiments.results import read_text

_MOST_CHARTS = 24


def sensitivity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``sensitivity`` wrote."""
    op_times, problems = op_times_of_probes(folder)
    section = sensitivity_answer(found)
    return replace(
        section,
        charts=_charts(found),
        details=op_times,
        configuration={"config.yaml": read_text(folder / "config.yaml")},
        warnings=[*section.warnings, *problems],
    )


def _charts(found: Mapping[str, Any]) -> list[Chart]:
    charts = []
    for key, rows in list(panels(found).items())[:_MOST_CHARTS]:
        some = rows[:MOST_BARS]
        bars = {
            side: (colour, [row[f"{end}_pct"] for row in some])
            for side, end, colour in zip(
                sides(found), ("low", "high"), (BLUE, VERMILION), strict=True
            )
        }
        chart = paired_bars([row["factor"] for row in some], bars, "change (%)")
        charts.append(Chart(title(found, *key), chart, "Each factor is changed by itself."))
    return charts
