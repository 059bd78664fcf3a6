"""The section of two compared results: the parts of their difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.strict import UserError
from ..content import Chart, Section
from ..figures.style import policy_styles
from ..run.compare import (
    TITLES,
    comparison_answer,
    drawn_parts,
    left_out,
    part_label,
)
from .charts import paired_bars


def comparison_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``compare --out`` folder. Raises UserError for other figures."""
    shown = [] if "summaries" in found else [*TITLES]
    if not found.keys() >= {"a", "b", "policies", "notes", *shown}:
        raise UserError(f"{folder}: holds figures only: name the folders of the results in them")
    colours = [style["color"] for style in policy_styles(found["policies"])]
    charts = []
    for key in shown:
        names = drawn_parts(found[key])
        rows = [part_label(key, name) for name in names]
        sides = {
            f"{side.upper()}: {found[side]}": (
                colour,
                [found[key]["parts"][name][f"{side}_s"] for name in names],
            )
            for side, colour in zip("ab", colours, strict=True)
        }
        charts.append(
            Chart(TITLES[key], paired_bars(rows, sides, "time (s)"), left_out(found[key]))
        )
    return replace(comparison_answer(found), charts=charts)
