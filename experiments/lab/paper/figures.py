"""The paper's figures and tables from our runs: :func:`write_gallery` writes them into one folder.

A figure is charts as data. ``python -m sarathi_sim.experiments.lab.paper.figures RESULT DOCS`` puts
the tables of `sarathi-sim lab reproduce --out RESULT` between ``<!-- table: TITLE -->`` and
``<!-- end -->`` of ``DOCS/paper.md``, and copies its figures to ``DOCS/images/paper``.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.policies.log import PREFILL
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.storage.child import Progress, mapped
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.simulator.loop.simulation import Replicas, simulate
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from ...report.draw import files
from ...report.palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    KIND_COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
)
from ...report.section import Axis, Chart, Dash, Series
from ...run.machine import Machine
from ..pages import markdown, update
from . import gpt3, quantities
from .claims import ClaimResult, claim_rows, gains, headings, load_claims
from .gpt3 import ORCA, PAPER, SARATHI, TP_ONLY, Ratios
from .quantities import BATCHES, CHUNKS, MAX_BATCH, balanced
from .variants import Lab

Labs = Sequence[Lab]
"""The predicted one, then the one calibrated to the paper."""
DASHES: tuple[Dash, Dash] = ("-", "--")
"""Of the variants."""
NOTE = (
    "Solid or plain: predicted; dashed or hatched: paper-calibrated; black: what the paper states."
)

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
    "ffn_ln2": YELLOW,
    "others": GREY,
}


def paper(id: str) -> float:
    """What the paper states."""
    return load_claims()[id].paper


def stated(x: ArrayLike, y: ArrayLike, colour: str = BLACK, texts: Sequence[str] = ()) -> Series:
    """Points of the paper."""
    x, y = np.broadcast_arrays(np.atleast_1d(x), np.atleast_1d(y))
    return Series("points", "", x.astype(float), y.astype(float), colour, marks=True, texts=texts)


def level(
    ends: Sequence[float], y: float, name: str = "", colour: str = BLACK, dash: Dash = ":"
) -> Series:
    """A value for all x between two ends."""
    return Series("line", name, np.array(ends, float), np.full(2, float(y)), colour, dash)


def _curves(
    labs: Labs, quantity: Callable[..., float], by: str, at: Sequence[Any], each: Each
) -> list[Series]:
    """A quantity at values of its argument ``by``, in the variants, for each name."""
    return [
        Series("line", "" if variant else name, np.array(at, float), y, colour, dash)
        for variant, (lab, dash) in enumerate(zip(labs, DASHES, strict=False))
        for name, (colour, arguments) in each.items()
        if len(y := _values(lab, quantity, by, at, arguments))
    ]


def _values(
    lab: Lab, quantity: Callable[..., float], by: str, at: Sequence[Any], words: Mapping[str, Any]
) -> Any:
    return np.array([quantity(lab.a6000, **{by: value}, **words) for value in at])


def _bars(
    labs: Labs,
    quantity: Callable[..., float],
    by: str,
    at: Sequence[Any],
    each: Each,
    thick: float,
    stack: bool = False,
    offset: float = 0.0,
) -> list[Series]:
    """The same as bars, a row for each value of ``by``: of a name beside or, to ``stack``, after
    those of the others."""
    series = []
    for variant, (lab, dash) in enumerate(zip(labs, DASHES, strict=False)):
        start = np.zeros(len(at))
        for number, (name, (colour, arguments)) in enumerate(each.items()):
            end = start + _values(lab, quantity, by, at, arguments)
            row = np.arange(len(at)) + offset + thick * (variant - (len(labs) - 1) / 2)
            if not stack:
                row = row + 1.1 * thick * len(labs) * (number - (len(each) - 1) / 2)
            label = "" if variant else name
            about: dict[str, Any] = {"start": start, "thick": thick}
            series.append(Series("bars", label, end, row, colour, dash, **about))
            start = end if stack else start
    return series


def _chart(title: str, x: Axis, y: Axis, series: Sequence[Series], caption: str = NOTE) -> Chart:
    return Chart(title, x, y, series, caption)


# Sections 3 and 4: iterations ---------------------------------------------------------------------


def per_token_cost(labs: Labs) -> list[Chart]:
    """Per-token time by op and batch size, prefill and decode, sequences of 1024."""
    at, charts = (1, 2, 4, 8, 12, 18), []
    decodes = [0.229 * paper(f"decode_cost_b{batch}") for batch in (1, 2, 18)]
    phases = {"prefill": stated(0.229, 0), "decode": stated(decodes, (0, 1, 5))}
    rows = Axis("", rows=[f"batch {batch}" for batch in at])
    for phase, points in phases.items():
        each = {op: (colour, {"op": op, "phase": phase}) for op, colour in OP_COLOURS.items()}
        bars = _bars(labs, quantities.op_token_ms, "batch", at, each, 0.4, stack=True)
        note = (
            f"{NOTE} The paper: 0.229 ms a token of a prompt; 200, 100, 16.7 times that a decode."
        )
        charts.append(_chart(phase, Axis("ms a token"), rows, [*bars, points], note))
    return charts


def single_layer(labs: Labs) -> list[Chart]:
    """Throughput of one layer."""
    batches = (1, 2, 4, 8, 16)
    colours = {128: ORANGE, 256: PURPLE, 512: SKY, 1024: BLUE}
    each: Each = {f"L = {n}": (colour, {"length": n}) for n, colour in colours.items()}
    prefill = _curves(labs, quantities.prefill_rate, "batch", batches, each)
    prefill.append(level((1, 16), paper("prefill_peak")))
    decode = _curves(labs, quantities.decode_rate, "batch", [2**n for n in range(10)], LENGTHS)
    along = partial(Axis, "batch size B, log scale", log=True)
    speed = Axis("tokens/ms", ends=(0.0, None))
    before = f"{NOTE} The paper: about 180 tokens/ms."
    after = f"{NOTE} The paper: 256 sequences."
    return [
        _chart("prefill, one layer", along(ticks=batches), speed, prefill, before),
        Chart("decode, one layer", along(), speed, decode, after, edge=256.0),
    ]


def intensity(labs: Labs) -> list[Chart]:
    """The arithmetic intensity of the ops of one layer."""
    ops, ridge, charts = list(OP_COLOURS)[:-1], quantities.ridge(labs[0].a6000), []
    for title, new, middle, most in (
        ("intensity, prefill of 1024", 1024, 4, 18),
        ("intensity, decode at 1024", 1, 18, 256),
    ):
        each = {
            f"B = {batch}": (colour, {"batch": batch, "new": new})
            for batch, colour in ((1, SKY), (middle, BLUE), (most, VERMILION))
        }
        series = [
            Series("line", name, np.arange(len(ops), dtype=float), y, colour, marks=True)
            for name, (colour, words) in each.items()
            if len(y := _values(labs[0], quantities.intensity, "op", ops, words))
        ]
        up = Axis("FLOPs a byte, log scale", log=True, ends=(0.4, 1e5))
        note = f"The line: the ridge, {ridge:.0f}."
        charts.append(Chart(title, Axis("", rows=ops), up, series, note, level=ridge))
    return charts


def bubble_schedule(labs: Labs) -> list[Chart]:
    """Four requests on two stages: Orca, where micro-batches differ, and Sarathi."""
    policies = {"Orca": Orca(max_prefills=1), "Sarathi, chunk 256": Sarathi(256)}
    runs = {name: four_requests(labs[0], policy) for name, policy in policies.items()}
    longest = 1e3 * max(float(run.records.end_s) for run in runs.values())
    return [_schedule(run, name, longest) for name, run in runs.items()]


def four_requests(lab: Lab, policy: Policy) -> Analysis:
    """A, B, C and D, there at once, in two micro-batches of two on two stages."""
    m, half = lab.a6000, lab.a6000.layers // 2
    requests = [Request(i, 0.0, prompt, 7, 7) for i, prompt in enumerate((1400, 500, 900, 300))]
    sizes: Any = {"max_batch": 2, "max_in_flight": 2, "kv_capacity": 1 << 20, "max_length": 2048}
    scheduler = MicroBatches(policy, **sizes)
    sizes = {"max_tokens": 2048, "max_length": 2048, "max_batch": 4, "num_stages": 2}
    times = BundlePredictor(m.ops, scope="intra_node", **sizes)
    return Analysis(simulate(requests, Replicas([scheduler], times, (half, m.layers - half))))


def _schedule(analysis: Analysis, title: str, longest: float) -> Chart:
    """Capitals prefill, small letters decode; names that would not fit are left out."""
    (log,), (split,), rows = analysis.records.replicas, analysis.gaps, analysis.iterations
    members: dict[tuple[int, int], str] = {}
    for request, role, group, first, last in log.spans.tolist():
        name = ("ABCD" if role == PREFILL else "abcd")[request]
        for key in ((group, iteration) for iteration in range(first, last + 1)):
            members[key] = members.get(key, "") + name
    names = np.array([members[key] for key in zip(rows["group"], rows["iteration"], strict=True)])
    start, finish = 1e3 * split.times.start, 1e3 * split.times.finish
    shown = np.where(finish - start > 12 * np.char.str_len(names)[:, None], names[:, None], "")
    stage, series = np.broadcast_to((0.0, 1.0), start.shape), []
    for kind, colour in KIND_COLOURS.items():
        i = np.asarray(rows["kind"]) == kind
        begun, texts = start[i].ravel(), shown[i].ravel().tolist()
        places = (finish[i].ravel(), stage[i].ravel())
        series.append(Series("gantt", kind, *places, colour, start=begun, texts=texts))
    idle = start - 1e3 * split.bubble
    places = (start.ravel(), stage.ravel())
    series.append(Series("gantt", "bubble", *places, VERMILION, start=idle.ravel(), faint=True))
    along = Axis("time (ms); LLaMA-13B on two A6000s", ends=(0.0, 1.02 * longest))
    return Chart(title, along, Axis("", rows=("stage 0", "stage 1")), series)


def tile_quantisation(labs: Labs) -> list[Chart]:
    """Time of one prompt by its tokens, from 1 to 600."""
    at = sorted({*range(1, 601, 3), *(128 * n + more for n in range(1, 5) for more in (0, 1))})
    times = {count: paper(f"tile_{count}") for count in (128, 256, 257)}
    texts = [f"{count}: {time:g}" for count, time in times.items()]
    series = _curves(labs, quantities.iteration_ms, "prompt", at, {"": (BLUE, {})})
    series.append(stated([*times], [*times.values()], texts=texts))
    along = Axis("prompt tokens", ends=(0.0, 600.0), ticks=range(0, 601, 128))
    up = Axis("iteration (ms)", ends=(0.0, None))
    return [_chart("Time of one prompt", along, up, series)]


# Section 5 ----------------------------------------------------------------------------------------


def decode_speedup(labs: Labs) -> list[Chart]:
    """Decode speedup by batch size and length, chunk 256."""
    series = [level((2, 18), paper(f"decode_speedup_{most}")) for most in ("min", "max")]
    for name, length in zip(LENGTHS, MAX_BATCH, strict=True):
        at, each = range(2, MAX_BATCH[length] + 1), {name: LENGTHS[name]}
        series += _curves(labs, quantities.decode_speedup, "batch", at, each)
        peak = paper(f"peak_13b_{length // 1024}k_decode")
        series.append(stated(6, peak, LENGTHS[name][0]))
    along = Axis("batch size (B - 1 decodes piggyback on a chunk of 256 - (B - 1))")
    up = Axis("decode speedup", ends=(0.0, 11.0))
    note = f"{NOTE} Dotted: the paper's 2.8 to 10."
    return [_chart("Decode speedup", along, up, series, note)]


RULES = {"reserve": "reserve: C - (B - 1)", "fill": "fill: C - decodes"}
"""The paper's way to fill two tiles (section 4.4), and this project's default."""


def _gains(labs: Labs, length: int, chunk: int, each: Each) -> list[Series]:
    """Gains by P:D: 1 to 200 in even steps of its logarithm, and where the chunk is balanced."""
    edge, steps = balanced(chunk, MAX_BATCH[length]), np.round(np.geomspace(1, 200, 28), 1)
    at = sorted({*steps.tolist(), edge, 1.03 * edge})
    setting = {"length": length, "batch": MAX_BATCH[length]}
    each = {name: (colour, {**setting, **words}) for name, (colour, words) in each.items()}
    return _curves(labs, quantities.gain, "pd", at, each)


def _gain_chart(title: str, series: Sequence[Series], about: str = "P:D", **up: Any) -> Chart:
    along = Axis(f"{about}, log scale", log=True)
    one = level((1, 200), 1, colour=GREY, dash="-")
    return _chart(title, along, Axis("throughput / baseline", **up), [one, *series])


def _chunks(rule: str, colours: Mapping[int, str], name: str = "chunk") -> Each:
    return {f"{name} {c}": (of, {"policy": c, "rule": rule}) for c, of in colours.items()}


def throughput_over_pd(labs: Labs) -> list[Chart]:
    """Throughput against the baseline by P:D: three chunks, three lengths, both chunk rules."""
    colours, charts = {128: SKY, 256: BLUE, 512: VERMILION}, []
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
        title = f"{length // 1024}K, B = {batch}, {text}"
        charts.append(_gain_chart(title, series, ends=(0.7, 1.35)))
    return charts


def op_breakdown(labs: Labs) -> list[Chart]:
    """Time by op, baseline and Sarathi, over lengths, batches and two chunk sizes."""
    colours = {**OP_COLOURS, "ffn": GREEN}
    ops = ("preproj", "attention", "postproj", "ffn", "others")
    charts = []
    for chunk, (length, batches) in product((256, 512), BATCHES.items()):
        series = []
        for offset, policy in ((-0.2, "baseline"), (0.2, chunk)):
            setting = {"policy": policy, "chunk": chunk, "length": length}
            each = {op: (colours[op], {**setting, "op": op}) for op in ops}
            about: dict[str, Any] = {"thick": 0.36, "stack": True, "offset": offset}
            series += _bars(labs[:1], _token_ms, "batch", batches, each, **about)
            total = _values(labs[1], _token_ms, "batch", batches, {**setting, "op": "all"})
            rows = np.arange(len(batches)) + offset
            series.append(Series("points", "total, paper-calibrated", total, rows))
        rows_of = Axis("", rows=[f"batch {batch}" for batch in batches])
        note = "Upper: baseline, lower: Sarathi; predicted, at the balanced P:D."
        title = f"{length // 1024}K, chunk {chunk}"
        charts.append(Chart(title, Axis("ms a token"), rows_of, series, note))
    return charts


def _token_ms(m: Machine, **setting: Any) -> float:
    return 1e3 * quantities.served_token_s(m, **setting)


def orca_comparison(labs: Labs) -> list[Chart]:
    """Orca's worst and best case beside Sarathi: by length, and by P:D under both chunk rules."""
    orca: Each = {
        "Orca, worst case": (GREY, {"policy": "orca_worst"}),
        "Orca, best case": (ORANGE, {"policy": "orca_best"}),
    }
    each: Each = {**orca, "Sarathi, chunk 256": (BLUE, {"policy": 256})}
    places, best = np.arange(3), paper("orca_best_1k")
    lengths = np.array([*MAX_BATCH], float) / 1024
    shown = _curves(labs, quantities.balanced_gain, "length", list(MAX_BATCH), each)
    bars = [replace(one, x=lengths, marks=True) for one in shown]
    bars += [stated(1, best, ORANGE), stated(places + 1, [paper("orca_worst")] * 3, GREY)]
    bars.append(stated(places + 1, [paper(f"sarathi_{k}k") for k in (1, 2, 3)], BLUE))
    along = Axis("sequence length (K tokens)", ticks=(1, 2, 3), ends=(0.8, 3.2))
    charts = [_chart("at the balanced P:D", along, Axis("throughput / baseline"), bars)]
    peaks = stated((14, 28), [paper(f"pd_peak_{chunk}_gain") for chunk in (256, 512)])
    for rule, title in RULES.items():
        each = _chunks(rule, {256: BLUE, 512: VERMILION}, "Sarathi, chunk")
        series = [peaks, level((1, 200), best, colour=ORANGE)]
        series += _gains(labs, 1024, 256, {**each, **orca})
        charts.append(_gain_chart(title, series, "P:D (1K, B = 18)", ends=(0.75, 1.3)))
    return charts


def chunking_ablation(labs: Labs) -> list[Chart]:
    """The cost of chunks in attention and in the whole prefill, and the end-to-end gain."""
    parts = (partial(quantities.chunk_overhead, part=part) for part in ("attention", "total"))
    attention, prefill = (_curves(labs, part, "chunk", CHUNKS, LENGTHS) for part in parts)
    total = _curves(labs, quantities.end_to_end, "chunk", CHUNKS, {"": (BLUE, {})})
    attention.append(stated(64, paper("ablation_attn_64")))
    prefill.append(stated((64, 128, 256, 512), (5, 2, 1 / 0.8, 1 / 0.9)))
    total += [level((64, 512), 1, colour=GREY, dash="-")]
    total.append(stated((64, 128, 256), (1.0, 1.16, 1.27)))
    along = Axis("chunk size", ticks=[chunk for chunk in CHUNKS if chunk % 128 == 0 or chunk == 64])
    titles = {
        "attention: chunked / full": attention,
        "prefill: chunked / full (the paper, 256 and 512: at most)": prefill,
        "end to end gain (1K, B = 18)": total,
    }
    return [_chart(title, along, Axis("ratio"), series) for title, series in titles.items()]


LOOKS: dict[str, tuple[str, str, Dash]] = {
    ORCA: ("Orca TP8 x PP8", VERMILION, "--"),
    SARATHI: ("Sarathi TP8 x PP8", BLUE, "-"),
    TP_ONLY: ("Orca TP8, 8 replicas", ORANGE, "-."),
}


def pipeline(labs: Labs) -> list[Chart]:
    """Bubble CDF and completions of section 5.3, one column a reading: plain, and the nearest."""
    columns = [_pipeline(labs[0], reading) for reading in ("plain", "grid-padded")]
    return [chart for row in zip(*columns, strict=True) for chart in row]


def _pipeline(lab: Lab, reading: str) -> tuple[Chart, Chart]:
    bubbles, completed, ends, medians = list[Series](), list[Series](), {}, {}
    for scenario, (name, colour, dash) in LOOKS.items():
        assumed = gpt3.load_readings().readings[reading]
        records = gpt3.run(lab.machine(*gpt3.GPT3), scenario, assumed)
        requests = Analysis(records).requests[["finish_s", "bubble_s"]].to_numpy()
        finish, bubble = np.sort(requests, axis=0).T
        count = np.arange(1.0, len(finish) + 1)
        ends[scenario], medians[scenario] = float(finish[-1]), float(np.median(bubble))
        completed.append(Series("step", name, finish[::20], count[::20], colour, dash))
        share = (bubble[::20], count[::20] / len(count))
        bubbles += [] if scenario == TP_ONLY else [Series("step", name, *share, colour, dash)]
    for scenario, factor in ((ORCA, PAPER.orca_over_sarathi), (TP_ONLY, PAPER.tp_over_sarathi)):
        completed.append(stated(factor * ends[SARATHI], 10_000, LOOKS[scenario][1]))
    ratio = medians[ORCA] / medians[SARATHI]
    title = f"reading: {reading}; medians {ratio:.3g}x (the paper: {PAPER.bubble}x)"
    sizes = (max(0.01, medians[SARATHI] / 20), medians[ORCA] * 4)
    along = Axis("bubble time of a request (s), log scale", log=True, ends=sizes)
    up = Axis("share of requests (%)", ends=(0.0, 1.02), shares=True)
    all_after = ", ".join(f"{LOOKS[key][0]} after {end:,.0f} s" for key, end in ends.items())
    note = f"{reading}: {all_after}. Points: the paper's 1.91 and 1.48 times Sarathi's time."
    time, done = Axis("time (s)", ends=(0.0, None)), Axis("requests completed", ends=(0.0, None))
    return Chart(title, along, up, bubbles), Chart(reading, time, done, completed, note)


def tornado(effects: Mapping[str, tuple[Ratios, Ratios]], plain: Ratios) -> list[Chart]:
    """The effect of each change (down, up), alone, on the ratios; in percent, by effect."""
    order = sorted(effects, key=lambda name: -abs(effects[name][1][0] / plain[0] - 1))
    titles = ("Orca / Sarathi", "Orca / TP only", "TP only / Sarathi", "median bubble")
    places, charts = np.arange(len(order), dtype=float), []
    for column, title in enumerate(titles):
        start, goal = plain[column], PAPER[column]
        series = [
            Series("bars", name, np.array([100 * (effects[row][side][column] / start - 1)
                                           for row in order]), places, colour)
            for side, name, colour in ((0, "first value", ORANGE), (1, "second value, or on", BLUE))
        ]  # fmt: skip
        title = f"{title}: {start:.3g} (the paper, dotted: {goal:g})"
        edge = 100 * (goal / start - 1)
        along = Axis("change (%)")
        charts.append(Chart(title, along, Axis("", rows=order), series, edge=edge))
    return charts


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


FIGURES: Sequence[Callable[[Labs], Sequence[Chart]]] = (
    *(per_token_cost, single_layer, intensity, bubble_schedule, tile_quantisation),
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
        _save(chart(labs), out, chart.__name__)
    progress("figures", len(FIGURES), len(FIGURES))
    text = [table_2(labs), table_4(labs)]
    if results is not None:
        ratios = _all_ratios(progress)
        known = gpt3.load_readings()
        effects = {
            name: (ratios[change.down, 0], ratios[change.up, 0])
            for name, change in known.changes.items()
        }
        _save(tornado(effects, ratios[gpt3.PLAIN, 0]), out, "tornado")
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


def _save(charts: Sequence[Chart], out: Path, name: str) -> None:
    on = "GPT-3 on 64 A100" if name in ("pipeline", "tornado") else "LLaMA-13B on the A6000"
    write_whole(out / f"{name}.png", files(charts, f"{name.replace('_', ' ')}: {on}")["png"])


if __name__ == "__main__":
    result, docs = map(Path, sys.argv[1:])
    page, images = docs / "paper.md", docs / "images" / "paper"
    text = update(page.read_text(encoding="utf-8"), (result / "tables.md").read_text("utf-8"))
    images.mkdir(parents=True, exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    write_whole(page, text)
