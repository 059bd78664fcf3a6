"""The headroom curve: load against every clause of the SLO, a line a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from experiments.capacity.capacity_section import CapacitySection
from experiments.capacity.written import UNITS
from experiments.figures.style import BLACK, line_styles, save

MOST_LINES = 14


def headroom_figure(found: Sequence[Mapping[str, Any]], section: CapacitySection) -> Figure:
    """A panel a clause: its part of the limit over the load. Above the black line the SLO breaks; a
    ring is the capacity, a cross an overloaded probe."""
    clauses = [one.text for one in section.objectives]
    shown = [one for one in found if one.get("curve")][:MOST_LINES]
    figure = Figure(figsize=(6.2 * len(clauses), 4.8), layout="constrained")
    panels = figure.subplots(1, len(clauses), squeeze=False)[0]
    for panel, clause in zip(panels, clauses, strict=True):
        for one, style in zip(shown, line_styles(), strict=False):
            loads = [probe["load"] for probe in one["curve"]]
            parts = [max(probe["stress"][clause], 1e-2) for probe in one["curve"]]
            panel.plot(loads, parts, marker=".", label=one["name"], **style)
            for probe, part in zip(one["curve"], parts, strict=True):
                if probe["overloaded"]:
                    panel.plot(probe["load"], part, "x", color=style["color"], markersize=9)
                if one["at_capacity"] and probe["run"] == one["at_capacity"]["run"]:
                    ring = {"markersize": 9, "markerfacecolor": "none"}
                    panel.plot(probe["load"], part, "o", color=style["color"], **ring)
        panel.axhline(1.0, color=BLACK, linewidth=1.2)
        panel.set(yscale="log", xlabel=f"load ({UNITS[section.load]})")
        panel.set_ylabel("part of the limit")
        panel.set_title(clause)
    if shown:
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def figure_files(figures: Mapping[str, Figure]) -> dict[str, bytes]:
    """The figures' files, ``figures/NAME.png`` and ``.svg``, by name."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = [path for name, each in figures.items() for path in save(each, folder, name)]
        return {f"figures/{path.name}": path.read_bytes() for path in written}
