"""Figures of sections 4.2 and 5.4: the meaning and the cost of chunking a prompt."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sarathi_sim.experiments.figures.style import BLUE, GREY, SKY
from sarathi_sim.experiments.paper.figures.costs import (
    CALIBRATED,
    LENGTHS,
    PREDICTED,
    SMALL,
    STATED,
    WIDTH,
    Labs,
    paper,
    variant_legend,
)
from sarathi_sim.experiments.paper.quantities import (
    CHUNKS,
    attention_overhead,
    end_to_end,
    prefill_overhead,
)


def chunking_ablation(labs: Labs) -> Figure:
    """The cost of chunks in attention and in the whole prefill, and the end-to-end gain."""
    figure = Figure(figsize=(WIDTH, 8.4), layout="constrained")
    (attention, prefill), (total, key) = figure.subplots(2, 2)
    for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
        for length, (colour, name) in LENGTHS.items():
            label = f"L = {name}" if line == PREDICTED else None
            for axes, overhead in ((attention, attention_overhead), (prefill, prefill_overhead)):
                values = [overhead(lab.a6000, chunk, length) for chunk in CHUNKS]
                axes.plot(CHUNKS, values, line, color=colour, label=label)
        total.plot(CHUNKS, [end_to_end(lab.a6000, c) for c in CHUNKS], line, color=BLUE, marker="o")
    attention.plot([64], [paper("ablation_attn_64")], **STATED)
    prefill.plot([64, 128], [5, 2], **STATED)
    prefill.plot([256, 512], [1 / 0.8, 1 / 0.9], **{**STATED, "marker": "v"})
    prefill.annotate("at most", (256, 1.25), (270, 1.9), arrowprops={"arrowstyle": "-"})
    total.plot([64, 128, 256], [1.0, 1.16, 1.27], **STATED)
    attention.set_title("attention: chunked / full")
    prefill.set_title("prefill: chunked / full")
    total.set_title("end to end gain (1K, B = 18)")
    total.axhline(1, color=GREY, linewidth=1)
    for axes in (attention, prefill, total):
        axes.set_xlabel("chunk size")
        axes.set_xticks(CHUNKS, [str(c) if c % 128 == 0 or c in (64, 320) else "" for c in CHUNKS])
    key.axis("off")
    attention.legend()
    variant_legend(key, loc="upper left")
    return figure


def attention_mask(_: Labs) -> Figure:
    """Which keys each query of a chunk sees: chunks of four tokens, three iterations."""
    chunk, chunks = 4, 3
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    panels = figure.subplots(1, chunks, width_ratios=range(1, chunks + 1))
    for number, axes in enumerate(panels):
        keys = chunk * (number + 1)
        query = chunk * number + np.arange(chunk)
        seen = np.arange(keys) <= query[:, None]
        # 2: keys of the chunk itself; 1: keys that earlier chunks left in the cache.
        shade = np.where(np.arange(keys) < chunk * number, 1.0, 2.0) * seen
        for (row, column), value in np.ndenumerate(shade):
            colour = ("white", SKY, BLUE)[int(value)]
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor=GREY))
        axes.set(xlim=(-0.03, keys + 0.03), ylim=(chunk + 0.03, -0.03), aspect="equal")
        axes.set_xticks(np.arange(keys) + 0.5, [f"k{i}" for i in range(keys)], fontsize=SMALL)
        axes.set_yticks(np.arange(chunk) + 0.5, [f"q{i}" for i in query], fontsize=SMALL)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(f"iteration {number + 1}")
    handles = [
        Patch(facecolor=BLUE, label="key of this chunk"),
        Patch(facecolor=SKY, label="cached key, read again"),
        Patch(facecolor="white", edgecolor=GREY, label="masked"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL)
    return figure
