"""The paper's figures and tables from our runs: :func:`write_gallery` writes them into one folder.

Figures of quantities are data (``data/paper/figures.yaml``). ``python -m
sarathi_sim.experiments.lab.paper.figures RESULT DOCS`` puts the tables of `sarathi-sim lab
reproduce --out RESULT` between ``<!-- table: TITLE -->`` and ``<!-- end -->`` of
``DOCS/lab/paper*.md``, and copies its figures to ``DOCS/images/paper``.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.policies.log import PREFILL
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.storage.child import Progress, mapped
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.simulator.loop.simulation import Replicas, simulate
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis
from ...report import palette
from ...report.charts import MOST_ROWS, bars, cdf, completions, timelines
from ...report.draw import files
from ...report.palette import BLACK, BLUE, ORANGE
from ...report.section import Axis, Chart, Dash, Series
from ...report.timeline import Window
from ...results import Tables
from ..fit.devices import filled
from ..pages import markdown, update
from . import gpt3, quantities
from .claims import Results, claim_rows, gains, headings, load_claims
from .gpt3 import ORCA, PAPER, SARATHI, TP_ONLY, Ratios
from .quantities import BATCHES, MAX_BATCH, balanced
from .variants import Lab

Labs = Sequence[Lab]
"""The predicted one, then the one calibrated to the paper."""
Described = Mapping[str, Any]
"""A part of ``data/paper/figures.yaml``."""
DASHES: tuple[Dash, Dash] = ("-", "--")
"""Of the variants."""
NOTE = (
    "Solid or plain: predicted; dashed or hatched: paper-calibrated; "
    "diamonds: what the paper states."
)


def paper(value: Any) -> float:
    """A number, or what the paper states in the claim of this id."""
    return float(load_claims()[value].paper if isinstance(value, str) else value)


def stated(x: Sequence[Any], y: Sequence[Any], colour: str = BLACK, texts: str = "") -> Series:
    """Points of the paper, each with its place in the form ``texts``."""
    x, y = [*map(paper, x)], [*map(paper, y)]
    said = [texts.format(*place) for place in zip(x, y, strict=True)] if texts else []
    return Series(
        "points",
        "",
        np.array(x),
        np.array(y),
        colour,
        marks=True,
        texts=said,
    )


def quantity_charts(name: str, labs: Labs) -> list[Chart]:
    """The charts of a figure of ``data/paper/figures.yaml``."""
    return [
        _chart(_filled(panel, dict(zip(panel.get("for", ()), values, strict=True))), labs)
        for panel in _described()["figures"][name]
        for values in product(*panel.get("for", {}).values())
    ]


@cache
def _described() -> Described:
    return read_mapping(data_dir() / "paper" / "figures.yaml")


def _filled(panel: Described, values: Described) -> Any:
    """With ``values`` of names in braces, and what follows from them. Series ``only`` of another
    length are left out."""
    known = dict(values)
    if (length := known.get("length")) is not None:
        known |= {
            "K": length // 1024,
            "B": MAX_BATCH[length],
            "batches": [*BATCHES[length]],
        }
        known["rows"] = [f"batch {batch}" for batch in known["batches"]]
    if "rule" in known:
        known["text"] = _described()["rules"][known["rule"]]

    series = [one for one in panel["series"] if one.get("only", length) == length]
    return filled({**panel, "series": series}, known) if known else panel


def _chart(panel: Described, labs: Labs) -> Chart:
    level = quantities.ridge(labs[0].a6000) if "level" in panel else None
    note = panel.get("caption", f"{NOTE} {panel.get('note', '')}".strip()).format(level=level)
    series = [one for each in panel["series"] for one in _series(each, labs)]
    x, y = (Axis(**panel[end]) for end in ("x", "y"))
    return Chart(panel["title"], x, y, series, note, level, panel.get("edge"))


def _series(one: Described, labs: Labs) -> list[Series]:
    """``level`` is a value between two ``ends``, ``totals`` are points of a quantity in the second
    variant; what has x and y alone are the paper's points; the others are :func:`_curves`."""
    colour = getattr(palette, one.get("colour", "BLACK"))
    if "level" in one:
        y = np.full(2, paper(one["level"]))
        return [
            Series(
                "line",
                "",
                np.array(one["ends"], float),
                y,
                colour,
                one.get("dash", ":"),
            )
        ]
    if "totals" in one:
        quantity, words = getattr(quantities, one["totals"]), one["with"]
        total = _values(labs[1], quantity, one["by"], one["at"], words)
        rows = np.arange(len(total)) + one["offset"]
        return [Series("points", "total, paper-calibrated", total, rows)]
    if "y" in one:
        x = [one.get("times", 1) * paper(value) for value in one["x"]]
        return [stated(x, one["y"], colour, one.get("texts", ""))]
    return _curves(one, labs[:1] if one.get("predicted") else labs)


def _curves(one: Described, labs: Labs) -> list[Series]:
    """A quantity, ``curves`` or ``bars`` (each after those of the names before), at values of its
    argument ``by``, for ``each`` name and variant; or the ``gains`` of a chunk by P:D: from 1 to
    200 in even steps of its logarithm, and where the chunk is balanced."""
    at, by, shared = one.get("at", []), one.get("by", "pd"), one.get("with", {})
    if "gains" in one:
        shared = {"length": one["length"], "batch": MAX_BATCH[one["length"]]}
        edge = balanced(one["gains"], shared["batch"])
        at = [
            *np.round(np.geomspace(1, 200, 28), 1).tolist(),
            edge,
            1.03 * edge,
        ]
    if by != "op":
        at = sorted({*at, *range(*one.get("range", (0,)))})
    quantity = getattr(quantities, one.get("curves", one.get("bars", "gain")))
    each = one["each"] if isinstance(one["each"], dict) else _described()["groups"][one["each"]]
    series, thick = list[Series](), one.get("thick", 0.0)
    for variant, (lab, dash) in enumerate(zip(labs, DASHES, strict=False)):
        start = np.zeros(len(at))
        rows = np.arange(len(at)) + one.get("offset", 0.0) + thick * (variant - (len(labs) - 1) / 2)
        for name, (colour, arguments) in each.items():
            values = _values(lab, quantity, by, at, {**shared, **arguments})
            look: Any = {"colour": getattr(palette, colour), "dash": dash}
            label = "" if variant else name
            if "bars" in one:
                look |= {"start": start, "thick": thick}
                start = start + values
                series.append(Series("bars", label, start, rows, **look))
            else:
                x, marks = np.array(one.get("x", at), float), "marks" in one
                series.append(Series("line", label, x, values, marks=marks, **look))
    return series


def _values(
    lab: Lab, quantity: Callable[..., float], by: str, at: Sequence[Any], words: Described
) -> Any:
    return np.array([quantity(lab.a6000, **{by: value}, **words) for value in at])


def bubble_schedule(labs: Labs) -> list[Chart]:
    """Four requests on two stages: Orca, where micro-batches differ, and Sarathi."""
    policies = {"Orca": Orca(max_prefills=1), "Sarathi, chunk 256": Sarathi(256)}
    runs = {name: four_requests(labs[0], policy) for name, policy in policies.items()}
    window = Window(0.0, 1.02 * max(float(run.records.end_s) for run in runs.values()))
    charts = timelines(runs, window, window, MOST_ROWS, [""] * len(runs))
    return [_with_names(*each) for each in zip(charts, runs.values(), strict=True)]


def four_requests(lab: Lab, policy: Policy) -> Analysis:
    """A, B, C and D, there at once, in two micro-batches of two on two stages."""
    m, half = lab.a6000, lab.a6000.layers // 2
    requests = [Request(i, 0.0, prompt, 7, 7) for i, prompt in enumerate((1400, 500, 900, 300))]
    sizes: Any = {"max_batch": 2, "max_in_flight": 2, "kv_capacity": 1 << 20, "max_length": 2048}
    scheduler = MicroBatches(policy, **sizes)
    sizes = {"max_tokens": 2048, "max_length": 2048, "max_batch": 4, "num_stages": 2}
    times = BundlePredictor(m.ops, scope="intra_node", **sizes)
    return Analysis(simulate(requests, Replicas([scheduler], times, (half, m.layers - half))))


def _with_names(chart: Chart, analysis: Analysis) -> Chart:
    """Capitals prefill, small letters decode; names that would not fit are left out."""
    (log,), rows = analysis.records.replicas, analysis.iterations
    members: dict[tuple[int, int], str] = {}
    for request, role, group, first, last in log.spans.tolist():
        name = ("ABCD" if role == PREFILL else "abcd")[request]
        for key in ((group, iteration) for iteration in range(first, last + 1)):
            members[key] = members.get(key, "") + name
    names = np.array([members[key] for key in zip(rows["group"], rows["iteration"], strict=True)])
    series = []
    for one in chart.series:
        own = np.tile(names[np.asarray(rows["kind"] == one.name)], log.num_stages)
        wide = (np.asarray(one.x) - np.asarray(one.start))[: len(own)]
        texts = np.where(wide > 0.012 * np.char.str_len(own), own, "").tolist()
        series.append(replace(one, texts=texts))
    return replace(chart, series=series)


NAMES = {ORCA: "Orca TP8 x PP8", SARATHI: "Sarathi TP8 x PP8", TP_ONLY: "Orca TP8, 8 replicas"}


def pipeline(labs: Labs) -> list[Chart]:
    """Bubble CDF and completions of section 5.3, one column a reading: plain, and the nearest."""
    columns = [_pipeline(labs[0], reading) for reading in ("plain", "grid-padded")]
    return [chart for row in zip(*columns, strict=True) for chart in row]


def _pipeline(lab: Lab, reading: str) -> tuple[Chart, Chart]:
    assumed, tables = gpt3.load_readings().readings[reading], {}
    for scenario in NAMES:
        run = Analysis(gpt3.run(lab.machine(*gpt3.GPT3), scenario, assumed))
        tables[scenario] = Tables(run.requests, run.ledger, None, scenario.partition("_")[0], {})
    medians = {scenario: table.requests["bubble_s"].median() for scenario, table in tables.items()}
    ratio = medians[ORCA] / medians[SARATHI]
    title = f"reading: {reading}; medians {ratio:.3g}x (the paper: {PAPER.bubble}x)"
    bubbles = cdf("bubble_s", {NAMES[key]: tables[key] for key in (ORCA, SARATHI)})
    completed = completions({name: tables[scenario] for scenario, name in NAMES.items()})
    end, (orca, _, tp_only) = float(tables[SARATHI].requests["finish_s"].max()), completed.series
    points = [
        stated([factor * end], [10_000], one.colour)
        for one, factor in ((orca, PAPER.orca_over_sarathi), (tp_only, PAPER.tp_over_sarathi))
    ]
    note = f"{reading}. Points: the paper's 1.91 and 1.48 times Sarathi's time."
    both = replace(completed, title=reading, series=[*completed.series, *points], caption=note)
    return replace(bubbles, title=title), both


def tornado(effects: Mapping[str, tuple[Ratios, Ratios]], plain: Ratios) -> list[Chart]:
    """The effect of each change (down, up), alone, on the ratios; in percent, by effect."""
    order = sorted(effects, key=lambda name: -abs(effects[name][1][0] / plain[0] - 1))
    titles = ("Orca / Sarathi", "Orca / TP only", "TP only / Sarathi", "median bubble")
    charts = []
    for column, title in enumerate(titles):
        start, goal = plain[column], PAPER[column]
        changes = {
            name: [100 * (effects[row][side][column] / start - 1) for row in order]
            for side, name in enumerate(("first value", "second value, or on"))
        }
        title = f"{title}: {start:.3g} (the paper, dotted: {goal:g})"
        sized = (title, Axis("change (%)"), order, changes, (ORANGE, BLUE))
        charts.append(bars(*sized, edge=100 * (goal / start - 1)))
    return charts


def claims_table(results: Results) -> str:
    """All claims; misses in bold."""
    header, rows = claim_rows(results, _MISS)
    return markdown("Claims", header, [[f"`{id}`", *cells] for id, *cells in rows])


_MISS = "**{}**"


def gains_table(results: Results) -> str:
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
            rows.append(
                [
                    models[row[2]],
                    row[3].upper(),
                    f"{batch}",
                    f"{pd_ratio}:1",
                    *cells,
                ]
            )
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


FIGURES: Sequence[Callable[[Labs], Sequence[Chart]]] = (bubble_schedule, pipeline)
"""Those that show runs. A file has its function's name, or that in ``data/paper/figures.yaml``."""


def write_gallery(out: Path, labs: Labs, results: Results | None, progress: Progress) -> None:
    """Draw the figures as PNG into a folder; with all claims' ``results``, also tables and the
    readings. ``labs`` are one of each variant, with what they computed for the claims."""
    charts = {each.__name__: each for each in FIGURES}
    charts |= {name: partial(quantity_charts, name) for name in _described()["figures"]}
    for number, (name, chart) in enumerate(charts.items()):
        progress("figures", number, len(charts))
        _save(chart(labs), out, name)
    progress("figures", len(charts), len(charts))
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
    made, images = (result / "tables.md").read_text("utf-8"), docs / "images/paper"
    images.mkdir(exist_ok=True)
    for figure in result.glob("*.png"):
        shutil.copy(figure, images)
    for page in docs.glob("lab/paper*.md"):
        write_whole(page, update(page.read_text("utf-8"), made))
