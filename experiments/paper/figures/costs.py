"""Figures of sections 3.1, 4.2, 4.4, 5.1.1 and 5.4: the cost of iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sarathi_sim.experiments.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
)
from sarathi_sim.experiments.paper.claims import load_claims
from sarathi_sim.experiments.paper.quantities import (
    MAX_BATCH,
    attention_intensity,
    decode_speedup,
    gemm_intensity,
    ridge,
)
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.experiments.run.machine import Machine

Labs = Sequence[Lab]
"""The predicted one, then the one calibrated to the paper."""

WIDTH = 9.4
"""Inches of every figure."""

SMALL = 12
"""Points of the small print. All sizes are legible at half a figure's width (``gallery.py``)."""

LENGTHS = {1024: (BLUE, "1K"), 2048: (VERMILION, "2K"), 3072: (GREEN, "3K")}
OP_COLOURS = {
    "preproj": BLUE,
    "attention": VERMILION,
    "postproj": SKY,
    "ffn_ln1": GREEN,
    "ffn_ln2": YELLOW,
    "others": GREY,
}
PREDICTED: Literal["-"] = "-"
CALIBRATED: Literal["--"] = "--"
STATED: dict[str, Any] = {
    "color": BLACK,
    "marker": "D",
    "linestyle": "none",
    "markersize": 7,
    "zorder": 5,
}


def paper(id: str) -> float:
    """What the paper states."""
    return load_claims()[id].paper


def variant_handles(*, stated: bool = True) -> list[Line2D]:
    """The line styles of the variants, and the diamonds."""
    handles = [
        Line2D([], [], color=GREY, linestyle=PREDICTED, label="predicted"),
        Line2D([], [], color=GREY, linestyle=CALIBRATED, label="paper-calibrated"),
    ]
    if stated:
        handles.append(Line2D([], [], label="the paper states", **STATED))
    return handles


def variant_legend(axes: Axes, *, stated: bool = True, **where: Any) -> None:
    """A legend of the variants, beside the existing one."""
    keep = axes.get_legend()
    handles = variant_handles(stated=stated)
    axes.legend(handles=handles, **{"loc": "best", "fontsize": SMALL, **where})
    if keep is not None:
        axes.add_artist(keep)


def per_token_cost(labs: Labs) -> Figure:
    """Per-token time by op and batch size, prefill and decode, sequences of 1024."""
    figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = (1, 2, 4, 8, 12, 18)
    for offset, hatch, lab in zip((-0.21, 0.21), ("", "///"), labs, strict=True):
        m = lab.a6000
        for index, batch in enumerate(batches):
            rows = 1024 * batch
            _stack(left, index + offset, _op_ms(m, rows, batch * m.attention(1024)), rows, hatch)
            decode = m.decode_attention(batch, 1024)
            _stack(right, index + offset, _op_ms(m, batch, decode), batch, hatch)
    left.plot([0], [0.229], **STATED)
    for batch in (1, 2, 18):
        stated = paper(f"decode_cost_b{batch}") * 0.229
        right.plot([batches.index(batch)], [stated], **STATED)
    left.set_title("prefill")
    right.set_title("decode")
    for axes in (left, right):
        axes.set_xticks(range(len(batches)), [str(b) for b in batches])
        axes.set(xlabel="batch size", ylabel="ms a token")
        axes.grid(False, axis="x")
    handles: list[Patch | Line2D] = [Patch(color=c, label=op) for op, c in OP_COLOURS.items()]
    handles += [
        Patch(facecolor=GREY, label="plain: predicted"),
        Patch(facecolor=GREY, edgecolor="white", hatch="///", label="hatched: calibrated"),
        Line2D([], [], label="the paper: 0.229 ms, x 200, 100, 16.7", **STATED),
    ]
    figure.legend(handles=handles, loc="outside upper left", fontsize=SMALL, ncols=3)
    return figure


def _op_ms(m: Machine, rows: int, attention_s: float) -> dict[str, float]:
    times = {op: 1e3 * m.layers * time for op, time in m.block(rows).items()}
    return {**times, "attention": 1e3 * attention_s}


def _stack(axes: Axes, x: float, times: dict[str, float], tokens: int, hatch: str) -> None:
    bottom = 0.0
    for op, colour in OP_COLOURS.items():
        height = times[op] / tokens
        axes.bar(x, height, 0.38, bottom, color=colour, hatch=hatch, edgecolor="white")
        bottom += height


def single_layer(labs: Labs) -> Figure:
    """Throughput of one layer, and the arithmetic intensity of its ops."""
    figure = Figure(figsize=(WIDTH, 9.4), layout="constrained")
    (prefill, decode), (before, after) = figure.subplots(2, 2)
    batches = np.array([1, 2, 4, 8, 16])
    for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
        m = lab.a6000
        for length, colour in ((128, ORANGE), (256, PURPLE), (512, SKY), (1024, BLUE)):
            rate = [1e-3 * m.prefill_rate(length, int(b)) for b in batches]
            label = f"L = {length}" if line == PREDICTED else None
            prefill.plot(batches, rate, line, color=colour, label=label)
        sizes = 2 ** np.arange(0, 10)
        for length, (colour, name) in LENGTHS.items():
            rate = [1e-3 * m.decode_rate(int(b), length) for b in sizes]
            label = f"L = {name}" if line == PREDICTED else None
            decode.plot(sizes, rate, line, color=colour, label=label)
    prefill.axhline(paper("prefill_peak"), color=BLACK, linewidth=1.2, linestyle=":")
    prefill.text(1, 186, "the paper: about 180", fontsize=SMALL)
    decode.axvline(paper("decode_saturation_batch"), color=BLACK, linewidth=1.2, linestyle=":")
    decode.text(240, 1, "the paper: 256", fontsize=SMALL, ha="right")
    for axes, title in ((prefill, "prefill, one layer"), (decode, "decode, one layer")):
        axes.set_xscale("log", base=2)
        axes.set_title(title)
        axes.set_xlabel("batch size B")
        axes.set_ylabel("tokens/ms")
        axes.set_ylim(0, 200 if axes is prefill else None)
        axes.legend(fontsize=SMALL)
        axes.xaxis.set_major_formatter("{x:g}")
    variant_legend(prefill, stated=False, loc="center right")
    _intensity(before, labs[0].a6000, 1024)
    _intensity(after, labs[0].a6000, 1)
    before.set_title("intensity, prefill of 1024")
    after.set_title("intensity, decode at 1024")
    return figure


def _intensity(axes: Axes, m: Machine, new: int) -> None:
    """FLOPs a byte by op and batch, from the shapes: fp16, each tensor moved once."""
    gemms = m.ops.model.gemms(1)
    shapes = {op: shape for op, shape in gemms.items() if op in OP_COLOURS}
    batches = (1, 18, 256) if new == 1 else (1, 4, 18)
    for number, batch in enumerate(batches):
        values = {op: gemm_intensity(shape, batch * new) for op, shape in shapes.items()}
        values["attention"] = attention_intensity(m, new)
        names = [op for op in OP_COLOURS if op in values]
        x = np.arange(len(names)) + 0.27 * (number - 1)
        colour = (SKY, BLUE, VERMILION)[number]
        axes.bar(x, [values[n] for n in names], 0.25, color=colour, label=f"B = {batch}")
        axes.set_xticks(range(len(names)), names, fontsize=SMALL, rotation=30)
    axes.axhline(ridge(m), color=BLACK, linewidth=1.2, linestyle=":")
    axes.text(-0.4, 5e3, f"ridge, {ridge(m):.0f}", fontsize=SMALL)
    axes.set(yscale="log", ylim=(0.4, 2e4), ylabel="FLOPs a byte")
    axes.grid(False, axis="x")
    axes.legend(fontsize=SMALL, ncols=3, loc="upper right")


def tile_quantisation(labs: Labs) -> Figure:
    """Time of one prompt by its tokens, from 1 to 600."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    axes = figure.subplots()
    tokens = np.unique([*range(1, 601, 3), *(128 * i + d for i in range(1, 5) for d in (0, 1))])
    for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
        m = lab.a6000
        m.attentions([(int(n), 0) for n in tokens])
        axes.plot(tokens, [1e3 * m.prefill(int(n)).total_s for n in tokens], line, color=BLUE)
    for count, side in ((128, "right"), (256, "right"), (257, "left")):
        stated = paper(f"tile_{count}")
        axes.plot([count], [stated], **STATED)
        shift = (-8 if side == "right" else 8, 6)
        axes.annotate(
            f"{count}: {stated:g}", (count, stated), shift, textcoords="offset points", ha=side
        )
    axes.set_xticks(range(0, 601, 128))
    axes.set(xlim=(0, 600), ylim=(0, None), xlabel="prompt tokens", ylabel="iteration (ms)")
    variant_legend(axes, loc="lower right")
    return figure


def decode_speedups(labs: Labs) -> Figure:
    """Decode speedup by batch size and length, chunk 256."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    axes = figure.subplots()
    for length, (colour, name) in LENGTHS.items():
        batches = range(2, MAX_BATCH[length] + 1)
        for lab, line in zip(labs, (PREDICTED, CALIBRATED), strict=True):
            values = [decode_speedup(lab.a6000, batch, length) for batch in batches]
            label = f"L = {name}" if line == PREDICTED else None
            axes.plot(batches, values, line, color=colour, label=label)
        stated = paper(f"peak_13b_{name.lower()}_decode")
        axes.plot([6], [stated], **{**STATED, "color": colour, "markeredgecolor": BLACK})
    for id in ("decode_speedup_min", "decode_speedup_max"):
        axes.axhline(paper(id), color=BLACK, linewidth=1.2, linestyle=":")
        below = id == "decode_speedup_min"
        axes.text(
            2,
            paper(id) + (-0.12 if below else 0.12),
            f"the paper: {paper(id):g}",
            va="top" if below else "bottom",
            fontsize=SMALL,
        )
    axes.set_ylim(0, 11)
    axes.set_xlabel("batch size (B - 1 decodes piggyback on a chunk of 256 - (B - 1))")
    axes.set_ylabel("decode speedup")
    axes.legend(loc="upper center")
    variant_legend(axes, loc="center right")
    return figure
