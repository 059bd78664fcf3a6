"""How figures look, and how they are written: colour-blind safe, and the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with every common kind of colour blindness.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, BLACK = "#E69F00", "#56B4E9", "#F0E442", "#000000"
GREY = "#7f7f7f"

# A prompt is blue, a decode yellow; a batch of both is what blue and yellow mix to.
KIND_COLOURS = {"prefill": BLUE, "mixed": GREEN, "decode": YELLOW}

# Line styles differ too, for grey-scale prints.
_LINES = (
    (BLUE, "-"),
    (VERMILION, "--"),
    (GREEN, "-."),
    (PURPLE, (0, (1, 1))),
    (ORANGE, (0, (5, 1, 1, 1, 1, 1))),
    (SKY, (0, (8, 2))),
    (BLACK, ":"),
)

_SETTINGS: dict[str, Any] = {
    "font.size": 13,  # legible when the figure is shown at half its size
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2.4,
    "hatch.linewidth": 0.9,
    "hatch.color": VERMILION,
    "svg.hashsalt": "sarathi-sim",  # element ids that do not change from run to run
    "path.simplify_threshold": 0.3,
}


@contextmanager
def styled() -> Iterator[None]:
    """The settings all figures are drawn and written with."""
    with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type]
        yield


def line_styles() -> Iterator[dict[str, Any]]:
    """Colour and dash of one line after the other; the first 49 all differ."""
    for number in count():
        turn, place = divmod(number, len(_LINES))
        dash = _LINES[(place + turn) % len(_LINES)][1]
        yield {"color": _LINES[place][0], "linestyle": dash}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``; returns their paths."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    # Lay out once for both files: it costs as much as drawing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    figure.savefig(paths[0], dpi=150, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths
