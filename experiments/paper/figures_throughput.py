"""Figures of sections 5.1.3 to 5.2: end-to-end throughput on one GPU."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.machine import Served
from experiments.paper.decode_speedup import MAX_BATCH
from experiments.paper.figures_costs import (
    CALIBRATED,
    LENGTHS,
    OP_COLOURS,
    PREDICTED,
    STATED,
    Labs,
    paper,
    variant_legend,
)
from experiments.paper.throughput import (
    BASELINE,
    BATCHES,
    ORCA_BEST,
    ORCA_WORST,
    Scheduling,
    at_full_batch,
    balanced,
    gains,
    sarathi,
    served,
)
from experiments.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION

_CHUNKS = {128: SKY, 256: BLUE, 512: VERMILION}


def _shown(chunk: int, length: int) -> tuple[float, ...]:
    """P:D of a curve's points: 1 to 200 in even steps of its logarithm, and the balanced one."""
    steps = np.round(np.geomspace(1, 200, 28), 1)
    edge = balanced(chunk, MAX_BATCH[length])
    return tuple(sorted({*steps.tolist(), edge, 1.03 * edge}))


def throughput_over_pd(labs: Labs) -> Figure:
    """Throughput against the baseline by P:D, for three chunks and three lengths."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    for axes, length in zip(figure.subplots(1, 3, sharey=True), LENGTHS, strict=True):
        for chunk, colour in _CHUNKS.items():
            for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
                curve = gains(lab.a6000, sarathi(chunk), length, _shown(chunk, length))
                label = f"chunk {chunk}" if line == PREDICTED else None
                axes.plot(
                    list(curve),
                    list(curve.values()),
                    line,
                    color=colour,
                    label=label,
                    linewidth=1.7,
                )
        batch = MAX_BATCH[length]
        axes.set_title(f"{length // 1024}K, B = {batch}")
        axes.set_xlabel("P:D")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axhline(1, color=GREY, linewidth=1)
    first, second, third = figure.axes
    for chunk in (256, 512):
        at, top = paper(f"pd_peak_{chunk}_at"), paper(f"pd_peak_{chunk}_gain")
        first.plot([at], [top], **{**STATED, "color": _CHUNKS[chunk], "markeredgecolor": BLACK})
    second.plot([balanced(256, 10)], [paper("sarathi_2k")], **STATED)
    third.plot([balanced(256, 6)], [paper("sarathi_3k")], **STATED)
    first.set_ylabel("throughput / baseline")
    first.legend(loc="lower left", fontsize=11)
    variant_legend(second, loc="lower center")
    return figure


def orca_comparison(labs: Labs) -> Figure:
    """Orca's worst and best case beside Sarathi, by length and by P:D."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    shown: tuple[tuple[str, Scheduling, str], ...] = (
        ("Orca, worst case", ORCA_WORST, GREY),
        ("Orca, best case", ORCA_BEST, ORANGE),
        ("Sarathi, chunk 256", sarathi(256), BLUE),
    )
    for place, (name, policy, colour) in enumerate(shown):
        for number, (lab, hatch) in enumerate(zip(labs, ("", "///"), strict=True)):
            x = np.arange(3) + 0.27 * (place - 1) + 0.12 * (number - 0.5)
            values = [at_full_batch(lab, policy, length) for length in LENGTHS]
            label = name if number == 0 else None
            bars.bar(x, values, 0.12, color=colour, hatch=hatch, edgecolor="white", label=label)
    bars.plot([0], [paper("orca_best_1k")], **STATED)
    bars.plot(np.arange(3) - 0.27, [paper("orca_worst")] * 3, **STATED)
    stated = [paper(f"sarathi_{k}k") for k in (1, 2, 3)]
    bars.plot(np.arange(3) + 0.27, stated, **STATED)
    bars.set_xticks(range(3), ["1K, B = 18", "2K, B = 10", "3K, B = 6"])
    bars.set_ylim(0.9, 1.45)
    bars.set_ylabel("throughput / baseline")
    handles: list[Patch | Line2D] = [Patch(color=c, label=n) for n, _, c in shown]
    handles += [
        Patch(facecolor=GREY, edgecolor="white", hatch="///", label="hatched: paper-calibrated"),
        Line2D([], [], label="the paper states", **STATED),
    ]
    bars.legend(handles=handles, fontsize=10, ncols=2, loc="upper center")
    bars.grid(False, axis="x")
    curves: dict[str, tuple[Scheduling, str]] = {
        "Sarathi, chunk 256": (sarathi(256), BLUE),
        "Sarathi, chunk 512": (sarathi(512), VERMILION),
        "Orca, best case": (ORCA_BEST, ORANGE),
        "Orca, worst case": (ORCA_WORST, GREY),
    }
    for name, (scheduling, colour) in curves.items():
        for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
            curve = gains(lab.a6000, scheduling, 1024, _shown(256, 1024))
            lines.plot(
                list(curve),
                list(curve.values()),
                line,
                color=colour,
                label=name if line == PREDICTED else None,
                linewidth=1.7,
            )
    lines.plot([14, 28], [1.27, 1.23], **STATED)
    lines.axhline(paper("orca_best_1k"), color=ORANGE, linewidth=1.2, linestyle=":")
    lines.text(200, 1.113, "the paper: Orca's peak", ha="right", fontsize=10)
    lines.set_xscale("log")
    lines.xaxis.set_major_formatter("{x:g}")
    lines.set_xlabel("P:D (1K, B = 18)")
    lines.legend(fontsize=10)
    return figure


_GROUPS = {
    "preproj": (("preproj",), OP_COLOURS["preproj"]),
    "attention": (("attention", "mixing"), OP_COLOURS["attention"]),
    "postproj": (("postproj",), OP_COLOURS["postproj"]),
    "ffn": (("ffn_ln1", "ffn_ln2"), GREEN),
    "others": (("others",), GREY),
}


def op_breakdown(labs: Labs) -> Figure:
    """Time by op, baseline and Sarathi, over lengths, batches and two chunk sizes."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    m, fitted = (lab.a6000 for lab in labs)
    for row, chunk in enumerate((256, 512)):
        for axes, (length, batches) in zip(grid[row], BATCHES.items(), strict=True):
            for place, batch in enumerate(batches):
                pd_ratio = balanced(chunk, batch)
                for offset, policy in ((-0.2, BASELINE), (0.2, sarathi(chunk))):
                    _bar(axes, place + offset, served(m, policy, batch, length, pd_ratio))
                    other = served(fitted, policy, batch, length, pd_ratio)
                    height = 1e3 * other.share(other.ops)
                    axes.hlines(height, place + offset - 0.19, place + offset + 0.19, BLACK)
            axes.set_xticks(range(len(batches)), [f"B = {b}" for b in batches])
            axes.set_title(f"{length // 1024}K, chunk {chunk}")
            axes.grid(False, axis="x")
        grid[row][0].set_ylabel("ms a token")
    handles: list[Patch | Line2D] = [Patch(color=c, label=n) for n, (_, c) in _GROUPS.items()]
    handles.append(Line2D([], [], color=BLACK, label="total, paper-calibrated"))
    figure.legend(handles=handles, loc="outside upper left", ncols=6, fontsize=11)
    figure.supxlabel(
        "left bar: baseline, right bar: Sarathi; P:D = (C - (B - 1)) / (B - 1); predicted",
        fontsize=11,
    )
    return figure


def _bar(axes: Axes, x: float, done: Served) -> None:
    bottom = 0.0
    for ops, colour in _GROUPS.values():
        height = 1e3 * done.share(ops)
        axes.bar(x, height, 0.36, bottom, color=colour, edgecolor="white")
        bottom += height
