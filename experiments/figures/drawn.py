"""Draw the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from sarathi_sim.experiments.figures.distributions import run_figures
from sarathi_sim.experiments.figures.gantt import stage_timeline
from sarathi_sim.experiments.figures.occupancy import occupancy
from sarathi_sim.experiments.figures.slices import Drawing
from sarathi_sim.experiments.figures.style import save, styled

Drawn = Callable[[int, int], object]
"""Called with how many figures are drawn, and how many there are to draw."""


def draw(drawing: Drawing, folder: Path, drawn: Drawn) -> None:
    """Draw all figures of a run into ``folder``. Raises OSError."""
    tables = drawing.tables
    policies = {name: table.policy for name, table in tables.items()}
    figures = {
        **run_figures(tables),
        "timeline": lambda: stage_timeline(drawing.slices, drawing.window, policies),
    }
    if drawing.memory:
        figures["occupancy"] = lambda: occupancy(drawing.memory, policies, drawing.budgets)
    draw_figures(figures, folder, drawn)


def draw_figures(
    figures: Mapping[str, Callable[[], Figure]], folder: Path, drawn: Drawn | None = None
) -> list[Path]:
    """Draw figures by file name; returns what was written. Raises OSError."""
    folder.mkdir(exist_ok=True)
    written = []
    for done, (name, figure) in enumerate(figures.items()):
        if drawn is not None:
            drawn(done, len(figures))
        with styled():
            written += save(figure(), folder, name)
    return written
