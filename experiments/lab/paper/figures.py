"""The paper's figures and tables from our runs: :func:`write_gallery` writes them into one folder.

A figure is a :class:`Plot`, which is data; :func:`draw` draws it. ``python -m
sarathi_sim.experiments.lab.paper.figures RESULT DOCS`` puts the tables of `sarathi-sim lab
reproduce --out RESULT` between ``<!-- table: TITLE -->`` and ``<!-- end -->`` of ``DOCS/paper.md``,
and copies its figures to ``DOCS/images/paper``.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from sarathi_sim.policies.log import PREFILL
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.storage.child import Progress, mapped
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from ...figures import style
from ...figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from ...run.machine import Machine
from ..pages import markdown, update
from . import gpt3, quantities
from .claims import ClaimResult, claim_rows, gains, headings, load_claims
from .gpt3 import ORCA, PAPER, SARATHI, TP_ONLY, Ratios
from .quantities import BATCHES, CHUNKS, MAX_BATCH, balanced
from .variants import Lab

Labs = Sequence[Lab]
"""The predicted one, then the one calibrated to the paper."""
Kind = Literal["line", "points", "bars", "boxes", "level", "edge"]
Dash = Literal["-", "--", "-.", ":"]
DASHES: tuple[Dash, Dash] = ("-", "--")

WIDTH, DPI = 9.4, 110
SMALL = 12
"""Points of the small print: at half the size of the file, a letter is 9 pixels high."""
LOOK: Any = {"hatch.color": "white", "font.size": 14, "axes.titlesize": 14}


@dataclass(frozen=True)
class DataSeries:
    """Data in one colour. Without a name it is not in the legend.

    ``line``, ``points``: ``y`` by ``x``. ``bars``: at ``x``, ``y`` high from ``base`` on.
    ``boxes``: in the rows ``base``, ``y`` long from ``x`` on. ``level``, ``edge``: a line across
    the panel at a ``y``, at an ``x``. Bars and boxes are hatched where ``dash`` is ``--``.
    ``texts`` stand left of points and in boxes.
    """

    kind: Kind
    x: ArrayLike = 0
    y: ArrayLike = 0
    name: str = ""
    colour: str = BLACK
    dash: Dash = "-"
    base: ArrayLike = 0
    width: float = 0.8
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Subplot:
    """Series on ``axes``: names, limits and ticks, as arguments of ``Axes.set``. The legend is
    at this place in the panel, or with those of other panels above the chart."""

    series: Sequence[DataSeries]
    axes: Mapping[str, Any]
    legend: Any = ""


@dataclass(frozen=True)
class Plot:
    """Panels a, b, c, ... where ``layout`` names them (rows apart by ``;``). ``share`` has x, y, or
    both, where these axes are the same in all panels; ``note`` is below."""

    height: float
    layout: str
    panels: Sequence[Subplot]
    share: str = ""
    note: str = ""


def draw(chart: Plot) -> Figure:
    """The chart's figure."""
    figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
    share: Any = {"sharex": "x" in chart.share, "sharey": "y" in chart.share}
    grid = figure.subplot_mosaic(chart.layout, **share)
    names: dict[str, Artist] = {}
    for name, panel in zip(sorted(grid), chart.panels, strict=True):
        axes = grid[name]
        for series in panel.series:
            _draw(axes, series)
        axes.set(**panel.axes)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
        kinds = {series.kind for series in panel.series}
        axes.xaxis.grid("bars" not in kinds)
        axes.yaxis.grid("boxes" not in kinds)
        if panel.legend:
            axes.legend(loc=panel.legend, fontsize=SMALL)
        else:
            handles, labels = axes.get_legend_handles_labels()
            names |= zip(labels, handles, strict=True)
        place = axes.get_subplotspec()
        if place and "x" in chart.share and not place.is_last_row():
            axes.set_xlabel("")
        if place and "y" in chart.share and not place.is_first_col():
            axes.set_ylabel("")
    if names:
        look: Any = {"loc": "outside upper left", "ncols": 3, "fontsize": SMALL}
        figure.legend(names.values(), names, **look)
    figure.supxlabel(chart.note, fontsize=SMALL)
    return figure


def _draw(axes: Axes, s: DataSeries) -> None:
    x, y, base = np.broadcast_arrays(*map(np.ravel, (s.x, s.y, s.base)))
    look: dict[str, Any] = {"color": s.colour, "label": s.name}
    line = {**look, "linestyle": s.dash}
    block = {**look, "hatch": "///" if s.dash == "--" else None, "edgecolor": "white"}
    if s.kind == "line":
        axes.plot(x, y, **line)
    elif s.kind == "points":
        axes.plot(x, y, "D", markeredgecolor=BLACK, markersize=7, zorder=5, **look)
    elif s.kind == "bars":
        axes.bar(x, y, s.width, base, **block)
    elif s.kind == "boxes":
        axes.barh(base, y, s.width, x, **block)
    elif s.kind == "level":
        axes.axhline(y[0], linewidth=1.2, **line)
    else:
        axes.axvline(x[0], linewidth=1.2, **line)
    for at, text in enumerate(s.texts):
        if s.kind == "boxes":
            middle, ink = (x[at] + y[at] / 2, base[at]), style.ink_on(s.colour)
            axes.text(*middle, text, ha="center", va="center", color=ink, fontsize=SMALL)
        else:
            beside: Any = {"textcoords": "offset points", "ha": "right"}
            axes.annotate(text, (x[at], y[at]), (-8, 6), **beside)


# Of what charts are made --------------------------------------------------------------------------

Each = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By name: a colour, and arguments of a quantity."""
LENGTHS: Each = {
    "L = 1K": (BLUE, {"length": 1024}),
    "L = 2K": (VERMILION, {"length": 2048}),
    "L = 3K": (GREEN, {"length": 3072}),
}
OP_COLOURS = {
    "preproj": BLUE,
    "attention": VERMILION,
    "postproj": SKY,
    "ffn_ln1": GREEN,
    "ffn_ln2": style.YELLOW,
    "others": GREY,
}


def paper(id: str) -> float:
    """What the paper states."""
    return load_claims()[id].paper


def stated(x: ArrayLike, y: ArrayLike, colour: str = BLACK, **more: Any) -> DataSeries:
    """Points of the paper."""
    return DataSeries("points", x, y, colour=colour, **more)


def level(y: float, name: str = "", colour: str = BLACK, dash: Dash = ":") -> DataSeries:
    """A value for all ``x``."""
    return DataSeries("level", 0, y, name, colour, dash)


ONE = level(1, colour=GREY, dash="-")


def keys(kind: Kind) -> list[DataSeries]:
    """What the legend says of the variants, and of what is :func:`stated`."""
    return [
        DataSeries(kind, np.nan, np.nan, "predicted", GREY),
        DataSeries(kind, np.nan, np.nan, "paper-calibrated", GREY, "--"),
        DataSeries("points", np.nan, np.nan, "the paper states"),
    ]


def categories(names: Sequence[object]) -> dict[str, Any]:
    """Axes of bars."""
    return {"xticks": range(len(names)), "xticklabels": names}


def ours(
    labs: Labs,
    quantity: Callable[..., float],
    by: str,
    at: Sequence[Any],
    each: Each,
    kind: Kind = "line",
    width: float = 0.8,
    stack: bool = False,
    offset: float = 0.0,
) -> list[DataSeries]:
    """A quantity at values of its argument ``by``, in the variants, for each name."""
    series = []
    for variant, (lab, dash) in enumerate(zip(labs, DASHES, strict=False)):
        base = np.zeros(len(at))
        for number, (name, (colour, arguments)) in enumerate(each.items()):
            y = np.array([quantity(lab.a6000, **{by: value}, **arguments) for value in at])
            place = offset + width * (variant - (len(labs) - 1) / 2)
            if not stack:
                place += 1.1 * width * len(labs) * (number - (len(each) - 1) / 2)
            x = np.arange(len(at)) + place if kind == "bars" else at
            label = "" if variant else name
            series.append(DataSeries(kind, x, y, label, colour, dash, base, width))
            base = base + y if stack else base
    return series


# Sections 3 and 4: iterations ---------------------------------------------------------------------


def per_token_cost(labs: Labs) -> Plot:
    """Per-token time by op and batch size, prefill and decode, sequences of 1024."""
    at, panels = (1, 2, 4, 8, 12, 18), []
    decodes = [0.229 * paper(f"decode_cost_b{batch}") for batch in (1, 2, 18)]
    phases = {"prefill": stated(0, 0.229), "decode": stated((0, 1, 5), decodes)}
    for phase, points in phases.items():
        each = {op: (colour, {"op": op, "phase": phase}) for op, colour in OP_COLOURS.items()}
        bars = ours(labs, quantities.op_token_ms, "batch", at, each, "bars", 0.4, stack=True)
        axes = {"title": phase, "xlabel": "batch size", "ylabel": "ms a token", **categories(at)}
        panels.append(Subplot([*bars, points, *keys("bars")], axes))
    note = "the paper: 0.229 ms a token of a prompt, and 200, 100 and 16.7 times that a decode"
    return Plot(6.4, "ab", panels, note=note)


def single_layer(labs: Labs) -> Plot:
    """Throughput of one layer, and the arithmetic intensity of its ops."""
    batches, sizes, ops = (1, 2, 4, 8, 16), (1, 4, 16, 64, 256), list(OP_COLOURS)[:-1]
    colours = {128: ORANGE, 256: style.PURPLE, 512: SKY, 1024: BLUE}
    each: Each = {f"L = {n}": (colour, {"length": n}) for n, colour in colours.items()}
    prefill = ours(labs, quantities.prefill_rate, "batch", batches, each)
    prefill.append(level(paper("prefill_peak"), "the paper: about 180"))
    decode = ours(labs, quantities.decode_rate, "batch", [2**n for n in range(10)], LENGTHS)
    decode += [DataSeries("edge", x=256, name="the paper: 256", dash=":"), *keys("line")[:2]]
    axes: dict[str, Any] = {"xscale": "log", "xlabel": "batch size B", "ylabel": "tokens/ms"}
    before = {**axes, "title": "prefill, one layer", "xticks": batches, "ylim": (0, 200)}
    after = {**axes, "title": "decode, one layer", "xticks": sizes}
    panels = [Subplot(prefill, before, "lower left"), Subplot(decode, after, "upper left")]
    ridge = quantities.ridge(labs[0].a6000)
    ticks = categories(["pre", "attention", "post", "ffn 1", "ffn 2"])
    axes = {"yscale": "log", "ylim": (0.4, 1e5), "ylabel": "FLOPs a byte", **ticks}
    for title, new, middle, most in (
        ("intensity, prefill of 1024", 1024, 4, 18),
        ("intensity, decode at 1024", 1, 18, 256),
    ):
        each = {
            f"B = {batch}": (colour, {"batch": batch, "new": new})
            for batch, colour in ((1, SKY), (middle, BLUE), (most, VERMILION))
        }
        bars = ours(labs[:1], quantities.intensity, "op", ops, each, "bars", 0.25)
        bars.append(level(ridge, f"ridge, {ridge:.0f}"))
        panels.append(Subplot(bars, {**axes, "title": title}, "upper right"))
    return Plot(9.4, "ab;cd", panels)


def bubble_schedule(labs: Labs) -> Plot:
    """Four requests on two stages: Orca, where micro-batches differ, and Sarathi."""
    policies = {"Orca": Orca(max_prefills=1), "Sarathi, chunk 256": Sarathi(256)}
    panels = [_schedule(four_requests(labs[0], one), name) for name, one in policies.items()]
    return Plot(5.6, "a;b", panels, share="x", note="time (ms); LLaMA-13B on two A6000s")


def four_requests(lab: Lab, policy: Policy) -> Analysis:
    """A, B, C and D, there at once, in two micro-batches of two on two stages."""
    m, half = lab.a6000, lab.a6000.layers // 2
    requests = [Request(i, 0.0, prompt, 7, 7) for i, prompt in enumerate((1400, 500, 900, 300))]
    sizes: Any = {"max_batch": 2, "max_in_flight": 2, "kv_capacity": 1 << 20, "max_length": 2048}
    scheduler = MicroBatches(policy, **sizes)
    sizes = {"max_tokens": 2048, "max_length": 2048, "max_batch": 4, "num_stages": 2}
    times = BundlePredictor(m.ops, scope="intra_node", **sizes)
    return Analysis(simulate(requests, [scheduler], times, (half, m.layers - half)))


def _schedule(analysis: Analysis, title: str) -> Subplot:
    """Capitals prefill, small letters decode; names that would not fit are left out."""
    (log,), (split,), rows = analysis.records.replicas, analysis.gaps, analysis.iterations
    members: dict[tuple[int, int], str] = {}
    for request, role, group, first, last in log.spans.tolist():
        name = ("ABCD" if role == PREFILL else "abcd")[request]
        for key in ((group, iteration) for iteration in range(first, last + 1)):
            members[key] = members.get(key, "") + name
    names = np.array([members[key] for key in zip(rows["group"], rows["iteration"], strict=True)])
    start, took = 1e3 * split.times.start, 1e3 * (split.times.finish - split.times.start)
    shown = np.where(took > 12 * np.char.str_len(names)[:, None], names[:, None], "")
    stage, idle, series = np.broadcast_to((0, 1), start.shape), 1e3 * split.bubble, []
    for kind, colour in style.KIND_COLOURS.items():
        i = np.asarray(rows["kind"]) == kind
        texts = shown[i].ravel().tolist()
        series.append(
            DataSeries("boxes", start[i], took[i], kind, colour, base=stage[i], texts=texts)
        )
    series.append(DataSeries("boxes", start - idle, idle, "bubble", "#f0b090", "--", stage))
    ticks = {"yticks": (0, 1), "yticklabels": ("stage 0", "stage 1")}
    return Subplot(series, {"title": title, "xlim": (0, None), "ylim": (1.5, -0.5), **ticks})


def tile_quantisation(labs: Labs) -> Plot:
    """Time of one prompt by its tokens, from 1 to 600."""
    at = sorted({*range(1, 601, 3), *(128 * n + more for n in range(1, 5) for more in (0, 1))})
    times = {count: paper(f"tile_{count}") for count in (128, 256, 257)}
    texts = [f"{count}: {time:g}" for count, time in times.items()]
    series = ours(labs, quantities.iteration_ms, "prompt", at, {"": (BLUE, {})})
    series += [stated([*times], [*times.values()], texts=texts), *keys("line")]
    axes = {"xlim": (0, 600), "ylim": (0, None), "xticks": range(0, 601, 128)}
    names = {"xlabel": "prompt tokens", "ylabel": "iteration (ms)"}
    return Plot(5.2, "a", [Subplot(series, {**axes, **names}, "lower right")])


# Section 5 ----------------------------------------------------------------------------------------


def decode_speedup(labs: Labs) -> Plot:
    """Decode speedup by batch size and length, chunk 256."""
    series = [level(paper(f"decode_speedup_{most}")) for most in ("min", "max")]
    for name, length in zip(LENGTHS, MAX_BATCH, strict=True):
        at, each = range(2, MAX_BATCH[length] + 1), {name: LENGTHS[name]}
        series += ours(labs, quantities.decode_speedup, "batch", at, each)
        peak = paper(f"peak_13b_{length // 1024}k_decode")
        series.append(stated(6, peak, LENGTHS[name][0]))
    series += [*keys("line"), level(10, "the paper: 2.8 to 10")]
    xlabel = "batch size (B - 1 decodes piggyback on a chunk of 256 - (B - 1))"
    axes = {"ylim": (0, 11), "xlabel": xlabel, "ylabel": "decode speedup"}
    return Plot(5.8, "a", [Subplot(series, axes)])


RULES = {"reserve": "reserve: C - (B - 1)", "fill": "fill: C - decodes"}
"""The paper's way to fill two tiles (section 4.4), and this project's default."""


def _gains(labs: Labs, length: int, chunk: int, each: Each) -> list[DataSeries]:
    """Gains by P:D: 1 to 200 in even steps of its logarithm, and where the chunk is balanced."""
    edge, steps = balanced(chunk, MAX_BATCH[length]), np.round(np.geomspace(1, 200, 28), 1)
    at = sorted({*steps.tolist(), edge, 1.03 * edge})
    setting = {"length": length, "batch": MAX_BATCH[length]}
    each = {name: (colour, {**setting, **words}) for name, (colour, words) in each.items()}
    return ours(labs, quantities.gain, "pd", at, each)


def _gain_panel(series: Sequence[DataSeries], axes: Mapping[str, Any]) -> Subplot:
    names = {"xscale": "log", "xlabel": "P:D", "ylabel": "throughput / baseline"}
    return Subplot([ONE, *series, *keys("line")], {**names, **axes})


def _chunks(rule: str, colours: Mapping[int, str], name: str = "chunk") -> Each:
    return {f"{name} {c}": (of, {"policy": c, "rule": rule}) for c, of in colours.items()}


def throughput_over_pd(labs: Labs) -> Plot:
    """Throughput against the baseline by P:D: three chunks, three lengths, both chunk rules."""
    colours, panels = {128: SKY, 256: BLUE, 512: VERMILION}, []
    points = {
        1024: [
            stated(paper(f"pd_peak_{c}_at"), paper(f"pd_peak_{c}_gain"), colours[c])
            for c in (256, 512)
        ],
        2048: [stated(balanced(256, 10), paper("sarathi_2k"))],
        3072: [stated(balanced(256, 6), paper("sarathi_3k"))],
    }
    for (rule, text), (length, batch) in product(RULES.items(), MAX_BATCH.items()):
        series = [*points[length]]
        for chunk, colour in colours.items():
            series += _gains(labs, length, chunk, _chunks(rule, {chunk: colour}))
        panels.append(_gain_panel(series, {"title": f"{length // 1024}K, B = {batch}\n{text}"}))
    return Plot(8.8, "abc;def", panels, share="xy")


def op_breakdown(labs: Labs) -> Plot:
    """Time by op, baseline and Sarathi, over lengths, batches and two chunk sizes."""
    colours = {**OP_COLOURS, "ffn": GREEN}
    ops = ("preproj", "attention", "postproj", "ffn", "others")
    panels = []
    for chunk, (length, batches) in product((256, 512), BATCHES.items()):
        series = []
        for offset, policy in ((-0.2, "baseline"), (0.2, chunk)):
            setting = {"policy": policy, "chunk": chunk, "length": length}
            each = {op: (colours[op], {**setting, "op": op}) for op in ops}
            total = {"total, paper-calibrated": (BLACK, {**setting, "op": "all"})}
            shape: Any = {"kind": "bars", "width": 0.36, "stack": True, "offset": offset}
            series += ours(labs[:1], _token_ms, "batch", batches, each, **shape)
            (sums,) = ours(labs[1:], _token_ms, "batch", batches, total)
            ends = np.arange(len(batches))[:, None] + offset + [-0.19, 0.19, np.nan]
            series.append(replace(sums, x=ends, y=np.repeat(sums.y, 3), base=0))
        title = f"{length // 1024}K, chunk {chunk}"
        axes = {"title": title, "ylabel": "ms a token", **categories(batches)}
        panels.append(Subplot(series, axes))
    note = "batch size B; left: baseline, right: Sarathi; predicted, at the balanced P:D"
    return Plot(8.4, "abc;def", panels, share="y", note=note)


def _token_ms(m: Machine, **setting: Any) -> float:
    return 1e3 * quantities.served_token_s(m, **setting)


def orca_comparison(labs: Labs) -> Plot:
    """Orca's worst and best case beside Sarathi: by length, and by P:D under both chunk rules."""
    orca: Each = {
        "Orca, worst case": (GREY, {"policy": "orca_worst"}),
        "Orca, best case": (ORANGE, {"policy": "orca_best"}),
    }
    each: Each = {**orca, "Sarathi, chunk 256": (BLUE, {"policy": 256})}
    places, best = np.arange(3), paper("orca_best_1k")
    bars = ours(labs, quantities.balanced_gain, "length", list(MAX_BATCH), each, "bars", 0.13)
    bars += [stated(0, best), stated(places - 0.286, [paper("orca_worst")] * 3)]
    bars.append(stated(places + 0.286, [paper(f"sarathi_{k}k") for k in (1, 2, 3)]))
    ticks = categories([f"{n // 1024}K, B = {batch}" for n, batch in MAX_BATCH.items()])
    axes = {"ylim": (0.9, 1.45), "ylabel": "throughput / baseline", **ticks}
    panels = [Subplot([*bars, *keys("bars")[1:]], axes, "upper center")]
    peaks = stated((14, 28), [paper(f"pd_peak_{chunk}_gain") for chunk in (256, 512)])
    for rule, title in RULES.items():
        each = _chunks(rule, {256: BLUE, 512: VERMILION}, "Sarathi, chunk")
        series = [peaks, level(best, "Orca's peak in the paper", ORANGE)]
        series += _gains(labs, 1024, 256, {**each, **orca})
        axes = {"title": title, "ylim": (0.75, 1.3), "xlabel": "P:D (1K, B = 18)"}
        panels.append(_gain_panel(series, axes))
    return Plot(10.6, "aa;bc", panels)


def chunking_ablation(labs: Labs) -> Plot:
    """The cost of chunks in attention and in the whole prefill, and the end-to-end gain."""
    parts = (partial(quantities.chunk_overhead, part=part) for part in ("attention", "total"))
    attention, prefill = (ours(labs, part, "chunk", CHUNKS, LENGTHS) for part in parts)
    total = ours(labs, quantities.end_to_end, "chunk", CHUNKS, {"": (BLUE, {})})
    attention.append(stated(64, paper("ablation_attn_64")))
    prefill.append(stated((64, 128, 256, 512), (5, 2, 1 / 0.8, 1 / 0.9)))
    total += [ONE, stated((64, 128, 256), (1.0, 1.16, 1.27)), *keys("line")]
    labels = [chunk if chunk % 128 == 0 or chunk in (64, 320) else "" for chunk in CHUNKS]
    axes = {"xlabel": "chunk size", "xticks": CHUNKS, "xticklabels": labels}
    titles = {
        "attention: chunked / full": attention,
        "prefill: chunked / full\n(the paper, 256 and 512: at most)": prefill,
        "end to end gain (1K, B = 18)": total,
    }
    panels = [Subplot(series, {**axes, "title": title}) for title, series in titles.items()]
    return Plot(8.4, "ab;c.", panels)


LOOKS: dict[str, tuple[str, str, Dash]] = {
    ORCA: ("Orca TP8 x PP8", VERMILION, "--"),
    SARATHI: ("Sarathi TP8 x PP8", BLUE, "-"),
    TP_ONLY: ("Orca TP8, 8 replicas", ORANGE, "-."),
}


def pipeline(labs: Labs) -> Plot:
    """Bubble CDF and completions of section 5.3, one column a reading: plain, and the nearest."""
    columns = [_pipeline(labs[0], reading) for reading in ("plain", "grid-padded")]
    return Plot(9.6, "ab;cd", [panel for row in zip(*columns, strict=True) for panel in row])


def _pipeline(lab: Lab, reading: str) -> tuple[Subplot, Subplot]:
    bubbles, completions, ends, medians = [], [], {}, {}
    for scenario, (name, colour, dash) in LOOKS.items():
        assumed = gpt3.load_readings().readings[reading]
        records = gpt3.run(lab.machine(*gpt3.GPT3), scenario, assumed)
        requests = Analysis(records).requests[["finish_s", "bubble_s"]].to_numpy()
        finish, bubble = np.sort(requests, axis=0).T
        count, end, median = np.arange(1, len(finish) + 1), finish[-1], float(np.median(bubble))
        ends[scenario], medians[scenario] = end, median
        done = (finish[::20], count[::20], f"{name}: {end:,.0f} s", colour, dash)
        completions.append(DataSeries("line", *done))
        share = (bubble[::20], count[::20] / len(count), f"{name}: median {median:.3g} s")
        bubbles += [] if scenario == TP_ONLY else [DataSeries("line", *share, colour, dash)]
    for scenario, factor in ((ORCA, PAPER.orca_over_sarathi), (TP_ONLY, PAPER.tp_over_sarathi)):
        completions.append(stated(factor * ends[SARATHI], 10_000, LOOKS[scenario][1]))
    completions.append(DataSeries("points", np.nan, np.nan, "the paper's 1.91, 1.48"))
    ratio = medians[ORCA] / medians[SARATHI]
    title = f"reading: {reading}\nmedians: {ratio:.3g}x (the paper: {PAPER.bubble}x)"
    shares: dict[str, Any] = {"title": title, "xscale": "log", "ylim": (0, 1.3)}
    shares["xlim"] = (max(0.01, medians[SARATHI] / 20), medians[ORCA] * 4)
    shares |= {"xlabel": "bubble time of a request (s)", "ylabel": "share of requests"}
    counts: dict[str, Any] = {"xlim": (0, None), "ylim": (0, 15_000)}
    counts |= {"xlabel": "time (s)", "ylabel": "requests completed"}
    return Subplot(bubbles, shares, "upper left"), Subplot(completions, counts, "upper left")


def tornado(effects: Mapping[str, tuple[Ratios, Ratios]], plain: Ratios) -> Plot:
    """The effect of each change (down, up), alone, on the ratios; in percent, by effect."""
    order = sorted(effects, key=lambda name: abs(effects[name][1][0] / plain[0] - 1))
    titles = ("Orca / Sarathi", "Orca / TP only", "TP only / Sarathi", "median bubble")
    rows, panels = np.arange(len(order)), []
    for column, title in enumerate(titles):
        start, goal = plain[column], PAPER[column]
        series = [
            DataSeries("edge", 0),
            DataSeries("edge", 100 * (goal / start - 1), 0, "the paper", VERMILION, "--"),
        ]
        for side, name, colour in ((0, "first value", ORANGE), (1, "second value, or on", BLUE)):
            change = [100 * (effects[row][side][column] / start - 1) for row in order]
            series.append(DataSeries("boxes", 0, change, name, colour, base=rows, width=0.7))
        title = f"{title}: {start:.3g}\n(the paper: {goal:g})"
        axes = {"title": title, "xlabel": "change (%)", "yticks": rows, "yticklabels": order}
        panels.append(Subplot(series, axes))
    return Plot(12, "ab;cd", panels, share="y")


# Tables of docs/paper.md, as Markdown -------------------------------------------------------------


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
        [f"{lab.variant}, {step}", *(f"{quantities.end_to_end(m, chunk):.3f}" for chunk in chunks)]
        for lab in labs
        for step, m in (("as it is", lab.a6000), ("without the tile's step", lab.untiled.a6000))
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


FIGURES: Sequence[Callable[[Labs], Plot]] = (
    *(per_token_cost, single_layer, bubble_schedule, tile_quantisation),
    *(decode_speedup, throughput_over_pd, op_breakdown, orca_comparison, chunking_ablation),
    pipeline,
)
"""In the order of the paper; a file has its function's name."""


def write_gallery(
    out: Path, labs: Labs, results: Sequence[ClaimResult] | None, progress: Progress
) -> None:
    """Draw the figures as PNG into a folder; with all claims' ``results``, also tables and the
    readings. ``labs`` are one of each variant, with what they computed for the claims."""
    for number, chart in enumerate(FIGURES):
        progress("figures", number, len(FIGURES))
        save(chart(labs), out / f"{chart.__name__}.png")
    progress("figures", len(FIGURES), len(FIGURES))
    text = [table_2(labs), table_4(labs)]
    if results is not None:
        ratios = _all_ratios(progress)
        known = gpt3.load_readings()
        effects = {
            name: (ratios[change.down, 0], ratios[change.up, 0])
            for name, change in known.changes.items()
        }
        save(tornado(effects, ratios[gpt3.PLAIN, 0]), out / "tornado.png")
        spreads = {
            name: gpt3.spread(ratios[reading, seed] for seed in gpt3.SEEDS)
            for name, reading in known.readings.items()
        }
        above = [claims_table(results), gains_table(results), tile_control(labs)]
        text = [*above, *text, readings_table(spreads)]
    write_whole(out / "tables.md", "\n".join(text))


def _all_ratios(progress: Progress) -> dict[tuple[gpt3.Assumptions, int], Ratios]:
    """Predicted ratios of every reading and seed, and of every change."""
    known = gpt3.load_readings()
    jobs = [(reading, seed) for seed in gpt3.SEEDS for reading in known.readings.values()]
    jobs += [(one, 0) for change in known.changes.values() for one in (change.down, change.up)]
    jobs = list(dict.fromkeys(jobs))  # some changes are readings too
    results = mapped(
        gpt3.predicted_ratios, jobs, 2, lambda done: progress("readings", done, len(jobs))
    )
    return dict(zip(jobs, results, strict=True))


def save(chart: Plot, file: Path) -> None:
    """Draw the chart into a PNG."""
    image = BytesIO()
    with style.styled(), matplotlib.rc_context(LOOK):
        draw(chart).savefig(image, dpi=DPI, format="png", metadata={"Software": None})
    write_whole(file, image.getvalue())


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page, images = docs / "paper.md", docs / "images" / "paper"
    text = update(page.read_text(encoding="utf-8"), (result / "tables.md").read_text("utf-8"))
    images.mkdir(parents=True, exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    write_whole(page, text)
