"""The tables of ``docs/paper.md``, as Markdown.

``python -m sarathi_sim.experiments.lab.paper.page RESULT DOCS`` puts those of `sarathi-sim
reproduce --out RESULT` between ``<!-- table: TITLE -->`` and ``<!-- end -->`` of ``DOCS/paper.md``,
and copies its figures to ``DOCS/images/paper``.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sarathi_sim.experiments.lab.pages import markdown, update
from sarathi_sim.experiments.lab.paper.claims import (
    ClaimResult,
    Tally,
    gains,
    load_claims,
    marks,
    summary,
)
from sarathi_sim.experiments.lab.paper.gpt3 import PAPER, Ratios
from sarathi_sim.experiments.lab.paper.quantities import end_to_end
from sarathi_sim.experiments.lab.paper.variants import Lab
from sarathi_sim.profiler.storage.files import write_whole

_BOUNDS = {"upper bound": "≤ ", "lower bound": "≥ "}


def claims_table(results: Sequence[ClaimResult]) -> str:
    """All claims, the variants side by side; misses in bold, what was fitted with a star."""
    by_id: dict[str, list[ClaimResult]] = {}
    for result in results:
        by_id.setdefault(result.claim.id, []).append(result)
    rows = []
    for variants in by_id.values():
        claim = variants[0].claim
        row = [f"`{claim.id}`", marks(variants), claim.section, claim.unit]
        row.append(f"{_BOUNDS.get(claim.kind, '')}{claim.paper:g}")
        for result in variants:
            star = "*" if result.fitted else ""
            row += _cells(result.ok, f"{result.ours:.4g}{star}", f"{result.ratio:.2f}")
        rows.append(row)
    header = ["claim", "", "§", "unit", "paper", *_headings(summary(results))]
    return markdown("Claims", header, rows)


def gains_table(results: Sequence[ClaimResult]) -> str:
    """The gains in throughput less 1, in percent; misses in bold."""
    some, counts = gains(results)
    rows: dict[str, list[str]] = {}
    for result in some:
        claim, gain = result.claim, result.claim.paper - 1
        row = rows.setdefault(claim.id, [f"`{claim.id}`", f"{100 * gain:.0f} %"])
        ours = result.ours - 1
        row += _cells(claim.gain_holds(result.ours), f"{100 * ours:.1f} %", f"{ours / gain:.2f}")
    return markdown("Gains", ["gain", "paper", *_headings(counts)], rows.values())


def _headings(counts: Tally) -> list[str]:
    texts = [f"{variant}: {good} of {total}" for variant, (good, total) in counts.items()]
    return [heading for text in texts for heading in (text, "ratio")]


def _cells(holds: bool, *cells: str) -> list[str]:
    return [cell if holds else f"**{cell}**" for cell in cells]


def tile_control(labs: Sequence[Lab]) -> str:
    """Gain by chunk, with the tile's step and without: the control of 256 over 320."""
    chunks = (192, 256, 320, 384)
    rows = [
        [f"{lab.variant}, {step}", *(f"{end_to_end(m, chunk):.3f}" for chunk in chunks)]
        for lab in labs
        for step, m in (
            ("as it is", lab.a6000),
            ("without the tile's step", lab.untiled.a6000),
        )
    ]
    return markdown("Control", ["gain", *(f"chunk {chunk}" for chunk in chunks)], rows)


def table_2(labs: Sequence[Lab]) -> str:
    """Table 2 of the paper: paper / predicted / paper-calibrated in each cell."""
    rows = [
        [batch, *(_cell(f"{batch}_{part}", labs, 1) for part in ("linear", "attn", "total"))]
        for batch in ("prefill1024", "decode4", "mixed")
    ]
    return markdown("Table 2", ["batch", "linear", "attention", "total"], rows)


def table_4(labs: Sequence[Lab]) -> str:
    """Table 4 of the paper: paper / predicted / paper-calibrated in each cell."""
    models = {"13b": "LLaMA-13B, A6000", "33b": "LLaMA-33B, A100"}
    rows = []
    for id, claim in load_claims().items():
        if row := re.fullmatch(r"(peak_(13b|33b)_(\dk)_)gain", id):
            cells = [_cell(f"{row[1]}{part}", labs, 2) for part in ("decode", "gain")]
            batch, pd_ratio = (claim.arguments[key] for key in ("batch", "pd"))
            rows.append([models[row[2]], row[3].upper(), f"{batch}", f"{pd_ratio}:1", *cells])
    header = ["model", "length", "batch", "P:D", "decode speedup", "throughput gain"]
    return markdown("Table 4", header, rows)


def _cell(id: str, labs: Sequence[Lab], digits: int) -> str:
    claim = load_claims()[id]
    return " / ".join([f"{claim.paper:g}", *(f"{claim.value(lab):.{digits}f}" for lab in labs)])


def readings_table(spreads: Mapping[str, tuple[Ratios, Ratios, Ratios]]) -> str:
    """Section 5.3's ratios by reading: median [least, most] over the seeds."""
    rows = [["**the paper**", *(f"**{value:g}**" for value in PAPER)]]
    for reading, spread in spreads.items():
        cells = [
            f"{middle:#.3g} [{low:#.3g}, {high:#.3g}]"
            for middle, low, high in zip(*spread, strict=True)
        ]
        rows.append([f"`{reading}`", *cells])
    ratios = ["Orca / Sarathi", "Orca / TP only", "TP only / Sarathi", "bubble", "waiting"]
    return markdown("Section 5.3 by reading", ["reading", *ratios], rows)


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page, images = docs / "paper.md", docs / "images" / "paper"
    text = update(page.read_text(encoding="utf-8"), (result / "tables.md").read_text("utf-8"))
    images.mkdir(parents=True, exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    write_whole(page, text)
