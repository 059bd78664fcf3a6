"""The section of two compared results: the parts of their difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.storage.strict import UserError
from ..run.compare import TITLES, comparison_answer, drawn_parts, left_out, part_label
from .palette import policy_styles
from .section import Axis, Chart, Section, Series


def comparison_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``compare --out`` folder. Raises UserError for other figures."""
    shown = [] if "summaries" in found else [*TITLES]
    if not found.keys() >= {"a", "b", "policies", "notes", *shown}:
        raise UserError(f"{folder}: holds figures only: name the folders of the results in them")
    return replace(comparison_answer(found), charts=parts_charts(found))


def parts_charts(found: Mapping[str, Any]) -> list[Chart]:
    """A pair of bars for each part of the wall clock and of the mean latency, in seconds; none
    where the results are not divided into parts."""
    if "summaries" in found:
        return []
    charts = []
    for key, title in TITLES.items():
        names = drawn_parts(found[key])
        places = np.arange(len(names), dtype=float)
        series = [
            Series(
                *("bars", f"{side.upper()}: {found[side]}"),
                np.array([found[key]["parts"][name][f"{side}_s"] for name in names]),
                *(places, style.colour),
            )
            for side, style in zip("ab", policy_styles(found["policies"]), strict=True)
        ]
        rows = Axis("", rows=[part_label(key, name) for name in names])
        charts.append(Chart(title, Axis("time (s)"), rows, series, left_out(found[key])))
    return charts
