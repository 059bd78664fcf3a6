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

from sarathi_sim.profiler.storage.files import write_whole
from ..pages import markdown, update
from .claims import (
    ClaimResult,
    claim_rows,
    gains,
    headings,
    load_claims,
)
from .gpt3 import PAPER, Ratios
from .quantities import end_to_end
from .variants import Lab


def claims_table(results: Sequence[ClaimResult]) -> str:
    """All claims; misses in bold."""
    header, rows = claim_rows(results, _MISS)
    return markdown("Claims", header, [[f"`{id}`", *cells] for id, *cells in rows])


_MISS = "**{}**"


def gains_table(results: Sequence[ClaimResult]) -> str:
    """The gains in throughput less 1, in percent; misses in bold."""
    some, counts = gains(results)
    rows: dict[str, list[str]] = {}
    for result in some:
        claim, gain, ours = result.claim, result.claim.paper - 1, result.ours - 1
        cells = (f"{100 * ours:.1f} %", f"{ours / gain:.2f}")
        row = rows.setdefault(claim.id, [f"`{claim.id}`", f"{100 * gain:.0f} %"])
        row += cells if claim.gain_holds(result.ours) else map(_MISS.format, cells)
    return markdown("Gains", ["gain", "paper", *headings(counts)], rows.values())


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
