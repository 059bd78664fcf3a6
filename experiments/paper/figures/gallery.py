"""Every figure and table of the paper, written into one folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sarathi_sim.experiments.figures.style import styled
from sarathi_sim.experiments.paper.claims import ClaimResult
from sarathi_sim.experiments.paper.figures import bubbles, chunks, costs, throughput
from sarathi_sim.experiments.paper.figures.markdown import (
    claims_table,
    gains_table,
    readings_table,
    table_2,
    table_4,
    tile_control,
)
from sarathi_sim.experiments.paper.gpt3 import (
    CHANGES,
    GPT3,
    ORCA,
    SARATHI,
    SCENARIO_READINGS,
    SEEDS,
    TP_ONLY,
    Assumptions,
    measure,
    request_bubbles,
    run,
    spread,
)
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.spans import Spans

DPI = 110
LOOK: Any = {"hatch.color": "white", "font.size": 14, "axes.titlesize": 14}
"""At half the size of the file, a letter of 12 points is 9 pixels high."""
NEAREST = "grid-padded"
"""The reading whose curves are drawn beside the plain one's."""

FIGURES: dict[str, Callable[[costs.Labs], Figure]] = {
    "per_token_cost": costs.per_token_cost,
    "single_layer": costs.single_layer,
    "bubble_schedule": bubbles.bubble_schedule,
    "attention_mask": chunks.attention_mask,
    "tile_quantisation": costs.tile_quantisation,
    "decode_speedup": costs.decode_speedups,
    "throughput_over_pd": throughput.throughput_over_pd,
    "op_breakdown": throughput.op_breakdown,
    "orca_comparison": throughput.orca_comparison,
    "chunking_ablation": chunks.chunking_ablation,
}
"""Those that need no pipeline, in the order of the paper."""


def write_gallery(
    out: Path, labs: Sequence[Lab], results: Sequence[ClaimResult] | None, progress: Progress
) -> None:
    """Draw the figures as PNG; with all claims' ``results``, also tables and the readings.

    ``labs`` are one of each variant; what was computed with them for the claims is not repeated.
    The folder must exist; only files of these names are replaced.
    """
    for number, (name, draw) in enumerate(FIGURES.items()):
        progress("figures", number, len(FIGURES) + 1)
        _save(lambda draw=draw: draw(labs), out / f"{name}.png")  # type: ignore[misc]
    progress("figures", len(FIGURES), len(FIGURES) + 1)
    _save(lambda: bubbles.pipeline_curves(_curves(labs[0])), out / "pipeline.png")
    progress("figures", len(FIGURES) + 1, len(FIGURES) + 1)
    text = [table_2(labs), table_4(labs)]
    if results is not None:
        text = [claims_table(results), gains_table(results), tile_control(labs), *text]
        text.append(_study(out, progress))
    write_whole(out / "tables.md", "\n".join(text))


def _study(out: Path, progress: Progress) -> str:
    """The readings over all seeds as a table, and the tornado."""
    changes = [(c.down or Assumptions(), 0) for c in CHANGES] + [(c.up, 0) for c in CHANGES]
    jobs = [(r.assumed, seed) for seed in SEEDS for r in SCENARIO_READINGS]
    jobs = list(dict.fromkeys([*jobs, *changes]))  # some changes are readings too
    found = dict(
        zip(jobs, measure(jobs, lambda done: progress("readings", done, len(jobs))), strict=True)
    )
    spreads = {r: spread(found[r.assumed, seed] for seed in SEEDS) for r in SCENARIO_READINGS}
    effects = [
        (change, found[change.down, 0] if change.down else None, found[change.up, 0])
        for change in CHANGES
    ]
    _save(lambda: bubbles.tornado(found[Assumptions(), 0], effects), out / "tornado.png")
    return readings_table(spreads)


def _curves(lab: Lab) -> dict[str, tuple[dict[str, Floats], dict[str, Floats]]]:
    shown, machine = {}, lab.machine(*GPT3)
    for reading in SCENARIO_READINGS:
        if reading.name in ("plain", NEAREST):
            records = {
                name: run(machine, name, reading.assumed) for name in (ORCA, SARATHI, TP_ONLY)
            }
            bubbles = {name: request_bubbles(records[name]) for name in (ORCA, SARATHI)}
            finishes = {
                name: np.concatenate([Spans(log).finish_s() for log in found.replicas])
                for name, found in records.items()
            }
            shown[reading.name] = (bubbles, finishes)
    return shown


def _save(draw: Callable[[], Figure], file: Path) -> None:
    image = BytesIO()
    with styled(), matplotlib.rc_context(LOOK):
        draw().savefig(image, dpi=DPI, format="png", metadata={"Software": None})
    write_whole(file, image.getvalue())
