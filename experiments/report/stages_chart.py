"""The work of every stage: a timeline of boxes to zoom into, and the whole run at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

from sarathi_sim.experiments.figures.slices import (
    KINDS,
    StageSlices,
    Window,
    bubble_name,
    default_window,
    iteration_kinds,
    stage_slices,
)
from sarathi_sim.experiments.figures.style import KIND_COLOURS, VERMILION
from sarathi_sim.experiments.report.charts import canvas, legend_below
from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.views.ledger import BUBBLES
from sarathi_sim.simulator.views.metrics import Analysis

MOST_BOXES = 50_000
"""Boxes of all timelines of a report together: 3 MB of its file, with the bubbles."""
_MOST_ROWS = 32
_BINS = 240


def boxes_window(analyses: Mapping[str, Analysis], most: int = MOST_BOXES) -> Window:
    """The part of the runs that the timelines hold: as long as ``most`` boxes allow.

    It lies around the middle of the shortest run.
    """
    records = [analysis.records for analysis in analyses.values()]
    first = default_window(records)
    a_second = sum(
        log.num_iterations * min(log.num_stages, _MOST_ROWS) / max(each.end_s, 1e-9)
        for each in records
        for log in each.replicas[:_MOST_ROWS]
    )
    length = max(0.9 * most / max(a_second, 1e-9), first.length_s)
    end_s = max(each.end_s for each in records)
    if length >= end_s:
        return Window(0.0, max(end_s, 1e-9))
    return Window(max(0.0, first.start_s - length / 2), length)


def timelines(analyses: Mapping[str, Analysis], window: Window) -> Any:
    """A timeline of each run, one above the other; all show the same seconds."""
    first = default_window([analysis.records for analysis in analyses.values()])
    seen = Range1d(first.start_s, first.end_s, bounds=(window.start_s, window.end_s))
    charts = []
    for name, analysis in analyses.items():
        chart = _timeline(analysis, window, seen)
        chart.title.text = name
        charts.append(chart)
    return column(charts, sizing_mode="stretch_width")


def _timeline(analysis: Analysis, window: Window, seen: Range1d) -> Any:
    stages = stage_slices(analysis, window)[:_MOST_ROWS]
    chart = canvas(
        "time (s)",
        "",
        height=130 + 22 * max(len(stages), 2),
        x_range=seen,
        y_range=Range1d(len(stages) - 0.4, -0.6),
        tools="xpan,xbox_zoom,xwheel_zoom,xzoom_in,xzoom_out,reset,save",
        active_drag="xpan",
        output_backend="canvas",
    )
    drawn: dict[str, list[Any]] = {}
    for kind, label in enumerate(KINDS):
        data = _boxes(analysis, stages, kind)
        if len(data["y"]):
            box = chart.hbar(
                *("y", 0.86, "right", "left"),
                source=ColumnDataSource(data),
                fill_color=KIND_COLOURS[label],
                line_color=None,
                name=label,
            )
            drawn[label] = [box]
    for kind in range(len(BUBBLES)):
        data = _bubbles(stages, kind)
        if len(data["y"]):
            gap = chart.hbar(
                *("y", 0.86, "right", "left"),
                source=ColumnDataSource(data),
                fill_color=VERMILION,
                fill_alpha=0.25,
                line_color=None,
                name=f"bubble: {bubble_name(kind)}",
            )
            drawn.setdefault("bubble", []).append(gap)
    boxes = [box for label in KINDS for box in drawn.get(label, [])]
    times = [("", "$name"), ("from (s)", "@left{0,0.000000}"), ("to (s)", "@right{0,0.000000}")]
    work = [("prompt tokens", "@prefill{0,0}"), ("decodes", "@decodes{0,0}")]
    chart.add_tools(HoverTool(renderers=boxes, tooltips=[*times, *work]))
    chart.add_tools(HoverTool(renderers=drawn.get("bubble", []), tooltips=times))
    replicas = {stage.replica for stage in stages}
    several = len(replicas) > 1
    chart.yaxis.ticker = FixedTicker(ticks=list(range(len(stages))))
    chart.yaxis.major_label_overrides = {
        row: f"{stage.replica}:{stage.stage}" if several else str(stage.stage)
        for row, stage in enumerate(stages)
    }
    chart.yaxis.axis_label = "replica:stage" if several else "stage"
    chart.grid.visible = False
    legend_below(chart, drawn, columns=4)
    return chart


def _boxes(analysis: Analysis, stages: list[StageSlices], kind: int) -> dict[str, Any]:
    logs = analysis.records.replicas
    found: dict[str, list[Any]] = {n: [] for n in ("y", "left", "right", "prefill", "decodes")}
    for row, stage in enumerate(stages):
        chosen = stage.kind == kind
        columns, rows = logs[stage.replica].iterations, stage.row[chosen]
        found["y"].append(np.full(len(rows), row, np.int8))
        found["left"].append(stage.start[chosen])
        found["right"].append(stage.finish[chosen])
        found["prefill"].append(columns["prefill_tokens"][rows].astype(np.int32))
        found["decodes"].append(columns["decodes"][rows].astype(np.int32))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _bubbles(stages: list[StageSlices], kind: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {"y": [], "left": [], "right": []}
    for row, stage in enumerate(stages):
        chosen = (stage.bubble_kind == kind) & (stage.bubble_s > 0)
        found["y"].append(np.full(int(chosen.sum()), row, np.int8))
        found["left"].append(stage.bubble_start[chosen])
        found["right"].append(stage.start[chosen])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def overviews(analyses: Mapping[str, Analysis]) -> Any:
    """The share of the stages' time that each kind of batch takes, over the whole run."""
    charts = []
    for name, analysis in analyses.items():
        edges = np.linspace(0.0, max(analysis.records.end_s, 1e-9), _BINS + 1)
        shares = busy_shares(analysis, edges)
        chart = canvas("time (s)", "busy (%)", height=210, y_range=Range1d(0, 100))
        chart.title.text = name
        source = ColumnDataSource(
            {"x": (edges[:-1] + edges[1:]) / 2, **dict(zip(KINDS, 100 * shares, strict=True))}
        )
        drawn = chart.varea_stack(
            list(KINDS), x="x", color=[KIND_COLOURS[kind] for kind in KINDS], source=source
        )
        charts.append(chart)
        parts = {kind: [area] for kind, area in zip(KINDS, drawn, strict=True)}
    legend_below(charts[-1], parts, 3)
    charts[-1].height += 30
    return column(charts, sizing_mode="stretch_width")


def busy_shares(analysis: Analysis, edges: Floats) -> Floats:
    """The share of each interval that stages spend on each of :data:`KINDS`, mean over stages."""
    total, stages = np.zeros((len(KINDS), len(edges) - 1)), 0
    for log, split in zip(analysis.records.replicas, analysis.gaps, strict=True):
        stages += log.num_stages
        kinds: Ints = iteration_kinds(log)
        for stage in range(log.num_stages):
            start, finish = split.times.start[:, stage], split.times.finish[:, stage]
            when = np.stack([start, finish], axis=1).ravel()
            for kind in range(len(KINDS)):
                worked = np.where(kinds == kind, finish - start, 0.0)
                done = np.stack([np.cumsum(worked) - worked, np.cumsum(worked)], axis=1).ravel()
                if len(when):
                    total[kind] += np.diff(np.interp(edges, when, done))
    shares: Floats = total / (max(stages, 1) * np.diff(edges))
    return shares
