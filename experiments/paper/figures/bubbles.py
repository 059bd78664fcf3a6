"""Figures of sections 3.2 and 5.3: pipelines, their bubbles, and what these depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sarathi_sim.experiments.figures.style import BLACK, BLUE, GREY, KIND_COLOURS, ORANGE, VERMILION
from sarathi_sim.experiments.paper.figures.costs import SMALL, WIDTH, Labs
from sarathi_sim.experiments.paper.gpt3 import ORCA, PAPER, SARATHI, TP_ONLY, Change, Ratios
from sarathi_sim.experiments.paper.variants import Lab
from sarathi_sim.policies.log import PREFILL
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.predictor import BundlePredictor
from sarathi_sim.simulator.views.metrics import Analysis

_REQUESTS = {"A": (1400, 7), "B": (500, 7), "C": (900, 7), "D": (300, 7)}
"""The four requests of the schedule: prompt and output tokens."""


def bubble_schedule(labs: Labs) -> Figure:
    """Four requests on two stages: Orca, where micro-batches differ, and Sarathi."""
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    policies: tuple[tuple[str, Policy], ...] = (
        ("Orca", Orca(max_prefills=1)),
        ("Sarathi, chunk 256", Sarathi(256)),
    )
    ends = []
    for axes, (name, policy) in zip(panels, policies, strict=True):
        analysis = four_requests(labs[0], policy)
        _schedule(axes, analysis)
        axes.set_title(name)
        ends.append(1e3 * analysis.records.end_s)
    panels[-1].set(xlim=(0, max(ends)), xlabel="time (ms); LLaMA-13B on two A6000s")
    handles = [Patch(facecolor=KIND_COLOURS[kind], label=kind) for kind in KIND_COLOURS]
    handles.append(_idle_patch((0, 0), 1, "bubble"))
    figure.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=SMALL)
    return figure


def four_requests(lab: Lab, policy: Policy) -> Analysis:
    """A, B, C and D, there at once, in two micro-batches of two on two stages."""
    machine = lab.a6000
    requests = [Request(i, 0.0, p, d, d) for i, (p, d) in enumerate(_REQUESTS.values())]
    scheduler = MicroBatches(
        policy, max_batch=2, max_in_flight=2, kv_capacity=1 << 20, max_length=2048
    )
    times = BundlePredictor(
        machine.ops,
        max_tokens=2048,
        max_length=2048,
        max_batch=4,
        scope="intra_node",
        num_stages=2,
    )
    half = machine.layers // 2
    return Analysis(simulate(requests, [scheduler], times, (half, machine.layers - half)))


def _schedule(axes: Axes, analysis: Analysis) -> None:
    log, split = analysis.records.replicas[0], analysis.gaps[0]
    members = _members(analysis)
    columns, kinds = analysis.iterations, list(analysis.iterations["kind"])
    for stage in range(2):
        start, finish = (1e3 * t[:, stage] for t in (split.times.start, split.times.finish))
        for row in range(log.num_iterations):
            colour = KIND_COLOURS[kinds[row]]
            width = finish[row] - start[row]
            axes.add_patch(
                Rectangle(
                    (start[row], stage - 0.4), width, 0.8, facecolor=colour, edgecolor="white"
                )
            )
            text = members[int(columns["group"][row]), int(columns["iteration"][row])]
            if width > 12 * len(text):
                ink = "white" if kinds[row] == "prefill" else BLACK
                middle = start[row] + width / 2
                axes.text(middle, stage, text, ha="center", va="center", fontsize=SMALL, color=ink)
            idle = 1e3 * split.bubble[row, stage]
            if idle > 0.5:
                axes.add_patch(_idle_patch((start[row] - idle, stage - 0.4), idle, None))
    axes.set_ylim(1.5, -0.5)
    axes.set_yticks([0, 1], ["stage 0", "stage 1"])
    axes.grid(False)


def _idle_patch(corner: tuple[float, float], width: float, label: str | None) -> Rectangle:
    look = {"facecolor": "#f6cdb8", "edgecolor": VERMILION, "hatch": "////", "linewidth": 0.0}
    return Rectangle(corner, width, 0.8, label=label, **look)  # type: ignore[arg-type]


def _members(analysis: Analysis) -> dict[tuple[int, int], str]:
    """The members of iteration k of a micro-batch: capitals prefill, small letters decode."""
    found: dict[tuple[int, int], str] = {}
    names = list(_REQUESTS)
    for request, role, group, first, last in analysis.records.replicas[0].spans.tolist():
        name = names[request] if role == PREFILL else names[request].lower()
        for iteration in range(first, last + 1):
            key = (group, iteration)
            found[key] = found.get(key, "") + name
    return found


# Within the axes it would cover a curve.
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "fontsize": SMALL}


def pipeline_curves(
    shown: Mapping[str, tuple[Mapping[str, Floats], Mapping[str, Floats]]],
) -> Figure:
    """Bubble CDF and completions, one column a reading.

    By reading: requests' bubble seconds, and their finish times, each by scenario.
    """
    figure = Figure(figsize=(WIDTH, 9.6), layout="constrained")
    grid = figure.subplots(2, len(shown), squeeze=False)
    names = {
        ORCA: ("Orca TP8 x PP8", VERMILION, "--"),
        SARATHI: ("Sarathi TP8 x PP8", BLUE, "-"),
        TP_ONLY: ("Orca TP8, 8 replicas", ORANGE, "-."),
    }
    for column, (reading, (bubbles, finishes)) in enumerate(shown.items()):
        above, below = grid[0][column], grid[1][column]
        above.set_title(f"reading: {reading}", pad=54)
        for scenario, values in bubbles.items():
            name, colour, line = names[scenario]
            ordered = np.sort(values)
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            label = f"{name}: median {np.median(ordered):.3g} s"
            above.plot(ordered[::20], share[::20], line, color=colour, label=label)
        medians = [float(np.median(values)) for values in bubbles.values()]
        above.set_xscale("log")
        above.set_xlim(max(0.01, min(medians) / 20), max(medians) * 4)
        above.set_xlabel("bubble time of a request (s, log scale)")
        above.set_ylabel("share of requests")
        ratio = max(medians) / min(medians)
        text = f"medians: {ratio:.3g}x\nthe paper: {PAPER.bubble}x"
        above.text(0.03, 0.8, text, transform=above.transAxes, fontsize=SMALL)
        above.legend(**_ABOVE)
        for scenario, values in finishes.items():
            name, colour, line = names[scenario]
            ordered = np.sort(values)
            count = np.arange(1, len(ordered) + 1)
            label = f"{name}: {ordered[-1]:,.0f} s"
            below.plot(ordered[::20], count[::20], line, color=colour, label=label)
        end = {scenario: float(values.max()) for scenario, values in finishes.items()}
        for factor, scenario in ((PAPER.orca_over_sarathi, ORCA), (PAPER.tp_over_sarathi, TP_ONLY)):
            colour = names[scenario][1]
            below.plot([factor * end[SARATHI]], [10_000], "D", color=colour, markeredgecolor=BLACK)
        below.plot([], [], "D", color=GREY, markeredgecolor=BLACK, label="the paper's 1.91, 1.48")
        below.set(xlim=(0, None), ylim=(0, None), xlabel="time (s)", ylabel="requests completed")
        below.yaxis.set_major_formatter("{x:,.0f}")
        below.legend(**_ABOVE)
    return figure


def tornado(base: Ratios, changes: Sequence[tuple[Change, Ratios | None, Ratios]]) -> Figure:
    """The effect of each assumption, changed alone, on the four ratios; in percent, by effect."""
    titles = {
        "orca_over_sarathi": "Orca / Sarathi",
        "orca_over_tp": "Orca / TP only",
        "tp_over_sarathi": "TP only / Sarathi",
        "bubble": "median bubble",
    }
    size = {
        change.name: abs(up.orca_over_sarathi / base.orca_over_sarathi - 1)
        for change, _, up in changes
    }
    ordered = sorted(changes, key=lambda item: size[item[0].name])
    figure = Figure(figsize=(WIDTH, 12), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for axes, (key, title) in zip(panels.flat, titles.items(), strict=True):
        start, stated = getattr(base, key), getattr(PAPER, key)
        for row, (_, down, up) in enumerate(ordered):
            for result, colour in ((down, ORANGE), (up, BLUE)):
                if result is not None:
                    axes.barh(row, 100 * (getattr(result, key) / start - 1), 0.7, color=colour)
        axes.axvline(0, color=BLACK, linewidth=1)
        axes.axvline(100 * (stated / start - 1), color=VERMILION, linestyle="--", linewidth=1.6)
        axes.set_yticks(range(len(ordered)), [change.name for change, _, _ in ordered])
        axes.set_title(f"{title}: {start:.3g}\n(the paper: {stated:g})", fontsize=SMALL)
        axes.margins(x=0.1)
        axes.set_xlabel("change (%)")
        axes.grid(False, axis="y")
    handles = [
        Patch(color=ORANGE, label="first value"),
        Patch(color=BLUE, label="second value, or switched on"),
        Patch(color=VERMILION, label="dashed: the paper"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL)
    return figure
