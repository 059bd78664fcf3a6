"""The section of a sensitivity: what moves the capacity, or the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.content import Chart, Section, SortableTable, enumerated
from experiments.figures.style import BLUE, VERMILION
from experiments.report.charts import paired_bars
from experiments.report.frontiers import op_times_of_probes
from experiments.sensitivity.tornado import HEADINGS, MOST_BARS, cells, panels, sides, title

_MOST_CHARTS = 24


def sensitivity_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``sensitivity`` wrote."""
    measures = list(found["measures"].values())
    under = f" under the SLO {found['slo']}" if found["slo"] else ""
    op_times, problems = op_times_of_probes(folder)
    return Section(
        kind="sensitivity",
        name=str(found["name"]),
        question=f"What moves {enumerated(measures)}{under} most?",
        answer=_answer(found),
        table=_table(found),
        charts=_charts(found),
        details=op_times,
        about=str(found["description"] or ""),
        configuration={"config.yaml": (folder / "config.yaml").read_text("utf-8")},
        warnings=[*found["warnings"], *problems],
    )


def _answer(found: Mapping[str, Any]) -> str:
    """The strongest factor of each deployment and measure, all ops together left out."""
    said = []
    for key, rows in panels(found).items():
        strongest = next((row for row in rows if row["kind"] != "ops"), None)
        if strongest is not None:
            effect = f"{strongest['elasticity']:+.2f} % for 1 % more of it"
            said.append(f"{title(found, *key)}: {strongest['factor']}, {effect}")
    return f"{'; '.join(said)}." if said else "Nothing that was changed."


def _table(found: Mapping[str, Any]) -> SortableTable:
    rows = [
        [name, found["measures"][measure], row["factor"], row["kind"], *cells(row)]
        for (name, measure), some in panels(found).items()
        for row in some
    ]
    headings = ("deployment", "of what", "factor", "is a", *sides(found), *HEADINGS)
    note = (
        "Predicted. The elasticity is percent for a percent. docs/sensitivity.md says what each "
        "number is."
    )
    return SortableTable("What each factor does", headings, rows, note, text=4)


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
