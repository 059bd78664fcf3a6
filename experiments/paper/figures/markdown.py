"""The paper's tables and the table of claims, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sarathi_sim.experiments.lab.pages import markdown
from sarathi_sim.experiments.paper.claims import ClaimResult, gains, load_claims, summary
from sarathi_sim.experiments.paper.gpt3 import PAPER, Ratios, ScenarioReading
from sarathi_sim.experiments.paper.quantities import end_to_end
from sarathi_sim.experiments.paper.scrutiny import marks
from sarathi_sim.experiments.paper.variants import Lab

_BOUNDS = {"upper bound": "≤ ", "lower bound": "≥ "}


def claims_table(results: Sequence[ClaimResult]) -> str:
    """All claims, the variants side by side; misses in bold, what was fitted with a star."""
    by_id: dict[str, list[ClaimResult]] = {}
    for result in results:
        by_id.setdefault(result.claim.id, []).append(result)
    counts = summary(results)
    header = ["claim", "", "§", "unit", "paper"]
    for variant, (good, total) in counts.items():
        header += [f"{variant}: {good} of {total}", "ratio"]
    rows = []
    for found in by_id.values():
        claim = found[0].claim
        stated = f"{_BOUNDS.get(claim.kind, '')}{claim.paper:g}"
        row = [f"`{claim.id}`", marks(found), claim.section, claim.unit, stated]
        for result in found:
            ours = f"{result.ours:.4g}{'*' if result.fitted else ''}"
            ratio = f"{result.ratio:.2f}"
            row += [ours, ratio] if result.ok else [f"**{ours}**", f"**{ratio}**"]
        rows.append(row)
    return markdown("Claims", header, rows)


def gains_table(results: Sequence[ClaimResult]) -> str:
    """The gains in throughput less 1, in percent; misses in bold."""
    some, counts = gains(results)
    header = ["gain", "paper"]
    for variant, (good, total) in counts.items():
        header += [f"{variant}: {good} of {total}", "ratio"]
    rows: dict[str, list[str]] = {}
    for result in some:
        claim = result.claim
        row = rows.setdefault(claim.id, [f"`{claim.id}`", f"{100 * (claim.paper - 1):.0f} %"])
        ratio = (result.ours - 1) / (claim.paper - 1)
        cells = [f"{100 * (result.ours - 1):.1f} %", f"{ratio:.2f}"]
        row += cells if claim.gain_holds(result.ours) else [f"**{cell}**" for cell in cells]
    return markdown("Gains", header, rows.values())


def tile_control(labs: Sequence[Lab]) -> str:
    """Gain by chunk, with the tile's step and without: the control of 256 over 320."""
    chunks = (192, 256, 320, 384)
    rows = [
        [
            f"{lab.variant}, {step}",
            *(f"{end_to_end(machines.a6000, chunk):.3f}" for chunk in chunks),
        ]
        for lab in labs
        for step, machines in (("as it is", lab), ("without the tile's step", lab.untiled))
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
    rows = []
    for id, claim in load_claims().items():
        row = re.fullmatch(r"peak_(13b|33b)_(\dk)_gain", id)
        if row:
            model = {"13b": "LLaMA-13B, A6000", "33b": "LLaMA-33B, A100"}[row[1]]
            cells = [
                _cell(f"peak_{row[1]}_{row[2]}_{part}", labs, 2) for part in ("decode", "gain")
            ]
            batch, pd_ratio = (claim.arguments[key] for key in ("batch", "pd"))
            rows.append([model, row[2].upper(), f"{batch}", f"{pd_ratio}:1", *cells])
    header = ["model", "length", "batch", "P:D", "decode speedup", "throughput gain"]
    return markdown("Table 4", header, rows)


def _cell(id: str, labs: Sequence[Lab], digits: int) -> str:
    claim = load_claims()[id]
    return " / ".join([f"{claim.paper:g}", *(f"{claim.value(lab):.{digits}f}" for lab in labs)])


def readings_table(spreads: Mapping[ScenarioReading, tuple[Ratios, Ratios, Ratios]]) -> str:
    """Section 5.3's ratios by reading: median [least, most] over the seeds."""
    rows = [["**the paper**", *(f"**{value:g}**" for value in astuple(PAPER))]]
    for reading, found in spreads.items():
        cells = [
            f"{middle:#.3g} [{low:#.3g}, {high:#.3g}]"
            for middle, low, high in zip(*map(astuple, found), strict=True)
        ]
        rows.append([f"`{reading.name}`", *cells])
    header = [
        "reading",
        "Orca / Sarathi",
        "Orca / TP only",
        "TP only / Sarathi",
        "bubble",
        "waiting",
    ]
    return markdown("Section 5.3 by reading", header, rows)
