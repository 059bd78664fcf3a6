"""The charts of a report, drawn by Bokeh (docs/report.md says why)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    FixedTicker,
    HoverTool,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    OpenURL,
    Range1d,
    Span,
    TapTool,
)
from bokeh.plotting import figure
from bokeh.transform import dodge

from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.views.metric_registry import number_text
from sarathi_sim.simulator.views.metrics import Analysis
from ..figures.slices import (
    IDLE,
    KINDS,
    StageSlices,
    Window,
    bubble_name,
    default_window,
    iteration_kinds,
    stage_slices,
)
from ..figures.style import KIND_COLOURS, VERMILION

SEEN = "#6b7280"
"""The colour of limits, fronts and labels."""
_TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
_DASHES = {"-": "solid", "--": "dashed", "-.": "dotdash", ":": "dotted"}
_ROW = 22  # pixels of a bar
_MOST_LABELS = 100  # beside points; more hide each other
_WIDE = 20.0  # largest over smallest value, from which on an axis is logarithmic


@dataclass(frozen=True)
class StyledLine:
    """A curve: its points, and the style that figures give it (a colour and a dash)."""

    x: Floats
    y: Floats
    style: Mapping[str, Any]


def canvas(x: str, y: str, *, height: int = 340, **options: Any) -> Any:
    """An empty chart as wide as the page, with the labels of its axes."""
    tools = {"tools": _TOOLS, "active_drag": "box_zoom"}
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **(tools | options),
    )
    made.toolbar.logo = None
    made.xaxis.axis_label, made.yaxis.axis_label = x, y
    made.axis.axis_label_text_font_style = "normal"
    return made


def legend_below(chart: Any, items: Mapping[str, Sequence[Any]], columns: int = 1) -> None:
    """A legend below the axes; a click on an entry hides its curve."""
    made = Legend(
        items=[LegendItem(label=label, renderers=list(drawn)) for label, drawn in items.items()],
        click_policy="hide",
        location="top_left",
        ncols=columns,
        border_line_alpha=0,
        background_fill_alpha=0,
        margin=0,
        spacing=0,
    )
    chart.add_layout(made, "below")


def lines(
    curves: Mapping[str, StyledLine],
    x: str,
    y: str,
    *,
    share: bool = False,
    marks: bool = False,
    limit: float | None = None,
) -> Any:
    """Curves, logarithmic in x if their values differ by much.

    ``share``: y is a share of all. ``marks``: each value has a point. A line marks the ``limit``;
    above it the axis has room for half of the limit at least, and for as much at most.
    """
    values = np.concatenate([np.asarray(curve.x, np.float64) for curve in curves.values()])
    positive = values[values > 0]
    log = len(positive) > 0 and positive.max() > _WIDE * np.quantile(positive, 0.1)
    log = log and not (marks and len(positive) < len(values))
    options: dict[str, Any] = {"height": 300 + 22 * len(curves)}
    if log:
        low = float(positive.min() if marks else np.quantile(positive, 0.01))
        ends = (low / 1.3, 1.3 * float(positive.max()))
        options |= {"x_axis_type": "log", "x_range": Range1d(*ends)}
    if share:
        options["y_range"] = Range1d(0, 1.03)
    chart = canvas(x + (", log scale" if log else ""), y, **options)
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[0000]")
    if log:
        chart.xaxis.ticker = FixedTicker(ticks=_log_ticks(*ends))
    if limit is not None:
        chart.add_layout(Span(location=limit, dimension="width", line_color=SEEN, line_width=1.5))
        highest = max((float(y) for curve in curves.values() for y in curve.y), default=0.0)
        chart.y_range = Range1d(0, min(max(1.05 * highest, 1.5 * limit), 2.1 * limit))
    if share:
        chart.yaxis.formatter = NumeralTickFormatter(format="0 %")
    drawn, hovered = {}, []
    for name, curve in curves.items():
        colour, dash = curve.style["color"], curve.style["linestyle"]
        source = ColumnDataSource({"x": np.asarray(curve.x), "y": np.asarray(curve.y)})
        look = {"line_width": 2.4, "name": name, "source": source}
        dashes = _DASHES[dash] if isinstance(dash, str) else [round(4 * part) for part in dash[1]]
        line = chart.line("x", "y", color=colour, line_dash=dashes, **look)
        hovered.append(line)
        drawn[name] = [line]
        if marks:
            drawn[name].append(chart.scatter("x", "y", color=colour, size=7, source=source))
    tips = [("", "$name"), (x, "@x{0,0.[000]}"), (y, "@y{0.0 %}" if share else "@y{0,0.[000]}")]
    chart.add_tools(HoverTool(renderers=hovered, tooltips=tips, line_policy="nearest"))
    legend_below(chart, drawn)
    return chart


_TOLD, _MOST_TOLD = 5, 40


def described(model: Any) -> list[str]:
    """The text alternative of a chart: some values of each curve, and the values of bars and
    points, forty at most."""
    told = []
    for chart in getattr(model, "children", [model]):
        axes = [axis[0].axis_label for axis in (chart.yaxis, chart.xaxis)]
        told.append(": ".join(filter(None, [chart.title.text, " over ".join(filter(None, axes))])))
        told += [f"{drawn.name}: {_values(drawn)}" for drawn in chart.renderers if drawn.name]
    return told


def _values(drawn: Any) -> str:
    data = drawn.data_source.data
    if "row" in data:
        rows = [row if isinstance(row, str) else " ".join(row) for row in data["row"]]
        values = zip(rows, data.get("value", data["right"]), strict=True)
        return ", ".join(f"{row} {number_text(v)}" for row, v in list(values)[:_MOST_TOLD])
    if "left" in data:
        return f"{len(data['left']):,} boxes"
    if "y" not in data:  # a part of a stack
        return f"{number_text(np.mean(data[drawn.name]))} in the mean"
    x, y = data["x"], data["y"]
    most = _MOST_TOLD if "anchor" in data else _TOLD
    some = np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).round().astype(int))
    return ", ".join(f"{number_text(y[place])} at {number_text(x[place])}" for place in some)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 and so on; over many decades the powers of ten alone."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 6 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def stacked_bars(
    rows: Sequence[str] | Sequence[tuple[str, str]],
    parts: Mapping[str, tuple[str, Floats]],
    x: str,
) -> Any:
    """Bars from top to bottom, each the sum of its parts; ``parts``: label to colour and values."""
    order = FactorRange(factors=list(reversed(rows)), group_padding=0.6, range_padding=0.01)
    chart = canvas(x, "", height=150 + _ROW * len(rows) + 20 * len(parts), y_range=order)
    left = np.zeros(len(rows))
    drawn = {}
    for label, (colour, values) in parts.items():
        source = ColumnDataSource({"row": list(rows), "left": left, "right": left + values})
        source.data["value"] = values
        bar = chart.hbar(
            "row",
            0.86,
            "right",
            "left",
            source=source,
            color=colour,
            line_width=0,
            name=label,
        )
        drawn[label], left = [bar], left + values
    tips = [("", "$name"), ("", "@row"), (x, "@value{0,0.[000]}")]
    chart.add_tools(HoverTool(tooltips=tips))
    chart.x_range = Range1d(0, float(left.max()) or 1.0)
    if min(Counter(row[0] for row in rows).values()) < 4:  # too low for a name beside it
        chart.yaxis.group_label_orientation = "horizontal"
    chart.ygrid.visible = False
    legend_below(chart, drawn)
    return chart


def paired_bars(
    rows: Sequence[str], sides: Mapping[str, tuple[str, Sequence[float]]], x: str
) -> Any:
    """Bars beside each other for each row; ``sides``: label to colour and values."""
    names = [fill(row, 26) for row in rows]
    order = FactorRange(factors=names[::-1])
    height = 130 + _ROW * (len(names) + 1) * len(sides) + 20 * len(sides)
    chart = canvas(x, "", height=height, y_range=order)
    each = 0.8 / len(sides)
    drawn = {}
    for number, (side, (colour, values)) in enumerate(sides.items()):
        place = dodge("row", (len(sides) - 1) * each / 2 - number * each, range=order)
        bar = chart.hbar(
            *(place, 0.9 * each, "right"),
            source=ColumnDataSource({"row": names, "right": list(values)}),
            color=colour,
            line_width=0,
            name=side,
        )
        drawn[side] = [bar]
    chart.add_tools(HoverTool(tooltips=[("", "$name"), ("", "@row"), (x, "@right{0,0.[000]}")]))
    chart.ygrid.visible = False
    legend_below(chart, drawn)
    return chart


@dataclass(frozen=True)
class Spots:
    """Points of one colour, each with a hover text, a label beside it, and the row of a table to
    which a click leads; and the ends of the ``steps`` between them, if any."""

    colour: str
    x: Floats
    y: Floats
    words: Sequence[str]
    labels: Sequence[str]
    anchors: Sequence[str]
    steps: tuple[Floats, Floats] | None = None


def points(
    groups: Mapping[str, Spots], front: tuple[Floats, Floats], x: str, y: str, **options: Any
) -> Any:
    """Points by their group's name, and the line of the best ones."""
    chart = canvas(x, y, height=420, **options)
    chart.y_range.range_padding = 0.2  # room for labels
    chart.line(*front, color=SEEN, line_dash="dashed", line_width=1.5)
    drawn, spots = {}, []
    labelled = sum(len(group.x) for group in groups.values()) <= _MOST_LABELS
    along = np.log if options.get("x_axis_type") == "log" else np.asarray
    every = np.concatenate([np.zeros(0), *(along(group.x) for group in groups.values())])
    middle = (every.min() + every.max()) / 2 if len(every) else 0.0
    for name, group in groups.items():
        right = along(group.x) > middle  # a label there goes to the left: it stays in the frame
        source = ColumnDataSource(
            {
                "x": group.x, "y": group.y, "words": list(group.words),
                "label": list(group.labels), "anchor": list(group.anchors),
                "side": np.where(right, "right", "left").tolist(),
                "shift": np.where(right, -6, 6),
            }
        )  # fmt: skip
        colour = group.colour
        spot = chart.scatter("x", "y", source=source, size=10, color=colour, name=name)
        drawn[name] = [spot]
        if group.steps is not None:
            drawn[name].append(chart.step(*group.steps, mode="after", color=colour))
        if labelled:
            look = {"text_font_size": "11px", "text_color": SEEN, "y_offset": -4}
            look |= {"text_align": {"field": "side"}, "x_offset": {"field": "shift"}}
            drawn[name].append(chart.text("x", "y", text="label", source=source, **look))
        spots.append(spot)
    tips = [("", "$name"), ("", "@words"), (x, "@x{0,0.[000]}"), (y, "@y{0,0.[000]}")]
    chart.add_tools(HoverTool(renderers=spots, tooltips=tips))
    row = OpenURL(url="#@anchor", same_tab=True)
    chart.add_tools(TapTool(renderers=spots, callback=row))
    if any(drawn):
        legend_below(chart, drawn)
    return chart


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
    for kind in range(len(IDLE)):
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
        row: stage.label if several else str(stage.stage) for row, stage in enumerate(stages)
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
