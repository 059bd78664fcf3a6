"""Figures of sections 5.1.3 to 5.2: end-to-end throughput on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sarathi_sim.experiments.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from sarathi_sim.experiments.paper.figures.costs import (
    CALIBRATED,
    LENGTHS,
    OP_COLOURS,
    PREDICTED,
    SMALL,
    STATED,
    WIDTH,
    Labs,
    paper,
    variant_handles,
)
from sarathi_sim.experiments.paper.quantities import (
    BASELINE,
    BATCHES,
    MAX_BATCH,
    ORCA_BEST,
    ORCA_WORST,
    Scheduling,
    balanced,
    balanced_gain,
    gains,
    sarathi,
    served,
)
from sarathi_sim.experiments.run.machine import Throughput
from sarathi_sim.policies.sarathi import ChunkRule

_RULES: dict[ChunkRule, str] = {
    "reserve": "reserve: C - (B - 1)",
    "fill": "fill: C - decodes",
}
"""The paper's way to fill two tiles (section 4.4), and this project's default."""
_CHUNKS = {128: SKY, 256: BLUE, 512: VERMILION}


def _shown(chunk: int, length: int) -> tuple[float, ...]:
    """P:D of a curve's points: 1 to 200 in even steps of its logarithm, and the balanced one."""
    steps = np.round(np.geomspace(1, 200, 28), 1)
    edge = balanced(chunk, MAX_BATCH[length])
    return tuple(sorted({*steps.tolist(), edge, 1.03 * edge}))


def throughput_over_pd(labs: Labs) -> Figure:
    """Throughput against the baseline by P:D: three chunks, three lengths, both chunk rules."""
    figure = Figure(figsize=(WIDTH, 8.4), layout="constrained")
    panels = figure.subplots(len(_RULES), len(LENGTHS), sharex=True, sharey=True)
    for row, (rule, name) in zip(panels, _RULES.items(), strict=True):
        for axes, length in zip(row, LENGTHS, strict=True):
            for chunk, colour in _CHUNKS.items():
                policy = sarathi(chunk, rule)
                _curves(axes, labs, policy, length, chunk, f"chunk {chunk}", colour)
            _pd_axis(axes)
            axes.set_title(f"{length // 1024}K, B = {MAX_BATCH[length]}\n{name}", fontsize=SMALL)
        _state_peaks(row)
        row[0].set_ylabel("throughput / baseline")
    for axes in panels[-1]:
        axes.set_xlabel("P:D")
    handles, names = panels[0][0].get_legend_handles_labels()
    handles, names = handles + variant_handles(), names + [h.get_label() for h in variant_handles()]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=SMALL)
    return figure


def _curves(
    axes: Axes,
    labs: Labs,
    policy: Scheduling,
    length: int,
    chunk: int,
    name: str,
    colour: str,
) -> None:
    """Gain over P:D in both variants; points are those of a chunk's balance."""
    for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
        curve = gains(lab.a6000, policy, length, _shown(chunk, length))
        label = name if line == PREDICTED else None
        axes.plot(list(curve), list(curve.values()), line, color=colour, label=label, linewidth=1.7)


def _pd_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(1, color=GREY, linewidth=1)


def _state_peaks(row: Sequence[Axes]) -> None:
    """What the paper states, at 1K, 2K and 3K."""
    first, second, third = row
    for chunk in (256, 512):
        at, top = paper(f"pd_peak_{chunk}_at"), paper(f"pd_peak_{chunk}_gain")
        first.plot([at], [top], **{**STATED, "color": _CHUNKS[chunk], "markeredgecolor": BLACK})
    second.plot([balanced(256, 10)], [paper("sarathi_2k")], **STATED)
    third.plot([balanced(256, 6)], [paper("sarathi_3k")], **STATED)


def orca_comparison(labs: Labs) -> Figure:
    """Orca's worst and best case beside Sarathi: by length, and by P:D under both chunk rules."""
    figure = Figure(figsize=(WIDTH, 10), layout="constrained")
    panels = figure.subplot_mosaic([["bars", "bars"], list(_RULES)])
    _bars(panels["bars"], labs)
    for rule, title in _RULES.items():
        axes = panels[rule]
        curves: dict[str, tuple[Scheduling, str]] = {
            "Sarathi, chunk 256": (sarathi(256, rule), BLUE),
            "Sarathi, chunk 512": (sarathi(512, rule), VERMILION),
            "Orca, best case": (ORCA_BEST, ORANGE),
            "Orca, worst case": (ORCA_WORST, GREY),
        }
        for name, (policy, colour) in curves.items():
            _curves(axes, labs, policy, 1024, 256, name, colour)
        axes.plot([14, 28], [paper("pd_peak_256_gain"), paper("pd_peak_512_gain")], **STATED)
        axes.axhline(paper("orca_best_1k"), color=ORANGE, linewidth=1.2, linestyle=":")
        _pd_axis(axes)
        axes.set(ylim=(0.75, 1.3), title=title, xlabel="P:D (1K, B = 18)")
    panels["fill"].legend(fontsize=SMALL, loc="lower left")
    panels["reserve"].set_ylabel("throughput / baseline")
    panels["reserve"].text(1, 1.27, "dotted: Orca's peak\nin the paper", fontsize=SMALL, va="top")
    return figure


def _bars(axes: Axes, labs: Labs) -> None:
    """At the balanced P:D of chunk 256, where both chunk rules are nearly alike."""
    shown: tuple[tuple[str, str | int, str], ...] = (
        ("Orca, worst case", "orca_worst", GREY),
        ("Orca, best case", "orca_best", ORANGE),
        ("Sarathi, chunk 256", 256, BLUE),
    )
    for index, (_, policy, colour) in enumerate(shown):
        for number, (lab, hatch) in enumerate(zip(labs, ("", "///"), strict=True)):
            x = np.arange(3) + 0.27 * (index - 1) + 0.12 * (number - 0.5)
            values = [balanced_gain(lab.a6000, policy, length) for length in LENGTHS]
            axes.bar(x, values, 0.12, color=colour, hatch=hatch, edgecolor="white")
    axes.plot([0], [paper("orca_best_1k")], **STATED)
    axes.plot(np.arange(3) - 0.27, [paper("orca_worst")] * 3, **STATED)
    stated = [paper(f"sarathi_{k}k") for k in (1, 2, 3)]
    axes.plot(np.arange(3) + 0.27, stated, **STATED)
    axes.set_xticks(range(3), ["1K, B = 18", "2K, B = 10", "3K, B = 6"])
    axes.set(ylim=(0.9, 1.45), ylabel="throughput / baseline")
    handles: list[Patch | Line2D] = [Patch(color=c, label=n) for n, _, c in shown]
    handles += [
        Patch(facecolor=GREY, edgecolor="white", hatch="///", label="hatched: paper-calibrated"),
        Line2D([], [], label="the paper states", **STATED),
    ]
    axes.legend(handles=handles, fontsize=SMALL, ncols=2, loc="upper center")
    axes.grid(False, axis="x")


_GROUPS = {
    "preproj": (("preproj",), OP_COLOURS["preproj"]),
    "attention": (("attention", "mixing"), OP_COLOURS["attention"]),
    "postproj": (("postproj",), OP_COLOURS["postproj"]),
    "ffn": (("ffn_ln1", "ffn_ln2"), GREEN),
    "others": (("others",), GREY),
}


def op_breakdown(labs: Labs) -> Figure:
    """Time by op, baseline and Sarathi, over lengths, batches and two chunk sizes."""
    figure = Figure(figsize=(WIDTH, 8.4), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    m, fitted = (lab.a6000 for lab in labs)
    for row, chunk in enumerate((256, 512)):
        for axes, (length, batches) in zip(grid[row], BATCHES.items(), strict=True):
            for index, batch in enumerate(batches):
                pd_ratio = balanced(chunk, batch)
                for offset, policy in ((-0.2, BASELINE), (0.2, sarathi(chunk))):
                    _bar(axes, index + offset, served(m, policy, batch, length, pd_ratio))
                    other = served(fitted, policy, batch, length, pd_ratio)
                    height = 1e3 * other.share(other.ops)
                    axes.hlines(height, index + offset - 0.19, index + offset + 0.19, BLACK)
            axes.set_xticks(range(len(batches)), [str(b) for b in batches])
            axes.set_title(f"{length // 1024}K, chunk {chunk}")
            axes.grid(False, axis="x")
        grid[row][0].set_ylabel("ms a token")
    handles: list[Patch | Line2D] = [Patch(color=c, label=n) for n, (_, c) in _GROUPS.items()]
    handles.append(Line2D([], [], color=BLACK, label="total, paper-calibrated"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=SMALL)
    figure.supxlabel(
        "batch size B; left: baseline, right: Sarathi; predicted, at the balanced P:D",
        fontsize=SMALL,
    )
    return figure


def _bar(axes: Axes, x: float, done: Throughput) -> None:
    bottom = 0.0
    for ops, colour in _GROUPS.values():
        height = 1e3 * done.share(ops)
        axes.bar(x, height, 0.36, bottom, color=colour, edgecolor="white")
        bottom += height
