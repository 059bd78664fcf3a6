"""The section of two results compared: what makes them differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.content import Chart, Section, SortableTable
from sarathi_sim.experiments.figures.style import policy_styles
from sarathi_sim.experiments.report.charts import paired_bars
from sarathi_sim.experiments.run.compare import (
    TITLES,
    by_difference,
    drawn_parts,
    part_label,
    percent,
)
from sarathi_sim.simulator.views.metric_registry import number_text


def comparison_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``compare --out`` wrote. Raises ConfigError for other figures."""
    if not found.keys() >= {"a", "b", "policies", "notes", *TITLES}:
        raise ConfigError(f"{folder}: holds figures only: name the folders of the results in them")
    a, b = (Path(found[side]).name for side in "ab")
    notes = list(found["notes"])
    if not found["same_requests"]:
        notes.append("A and B serve different requests.")
    colours = [style["color"] for style in policy_styles(found["policies"])]
    charts = []
    for key, title in TITLES.items():
        names = drawn_parts(found[key])
        rows = [part_label(key, name) for name in names]
        sides = {
            f"{side.upper()}: {found[side]}": (
                colour,
                [found[key]["parts"][name][f"{side}_s"] for name in names],
            )
            for side, colour in zip("ab", colours, strict=True)
        }
        charts.append(Chart(title, paired_bars(rows, sides, "time (s)")))
    tables = [_grid(key, title, found[key]) for key, title in TITLES.items()]
    return Section(
        kind="comparison",
        name=f"{a} and {b}",
        question=f"Which part of the time makes {b} (B) differ from {a} (A)?",
        answer=_answer(found["wall"]),
        table=tables[0],
        assumptions=found.get("assumptions", ()),
        charts=charts,
        details=tables[1:],
        warnings=notes,
    )


def _answer(wall: Mapping[str, Any]) -> str:
    total, parts = wall["total"], wall["parts"]
    difference = total["difference_s"]
    if not difference:
        return f"Nothing: both take {number_text(total['a_s'])} s."
    biggest = by_difference(parts)[0]
    by = f"{parts[biggest]['difference_s']:+,.4g} s"
    share = percent(abs(difference), total["a_s"]).lstrip("+")
    more = f"({share}) {'longer' if difference > 0 else 'shorter'}"
    return (
        f"B takes {number_text(total['b_s'])} s, which is {number_text(abs(difference))} s "
        f"{more} than A's {number_text(total['a_s'])} s; the largest part of the "
        f"difference is {part_label('wall', biggest)}, {by}."
    )


def _grid(key: str, title: str, breakdown: Mapping[str, Any]) -> SortableTable:
    total, parts = breakdown["total"], breakdown["parts"]
    labelled = [(part_label(key, name), parts[name]) for name in by_difference(parts)]
    rows = [
        [
            label,
            *(f"{row[side]:,.4f}" for side in ("a_s", "b_s")),
            f"{row['difference_s']:+,.4f}",
            percent(row["difference_s"], total["a_s"]),
        ]
        for label, row in [*labelled, ("in all", total)]
    ]
    headings = ["part", "A (s)", "B (s)", "B - A (s)", "of A's total"]
    return SortableTable(title, headings, rows, "The parts add up to the difference exactly.")
