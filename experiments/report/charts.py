"""The charts of a report, drawn by Bokeh (docs/report.md says why)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
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

from sarathi_sim.experiments.figures.style import BLACK
from sarathi_sim.simulator.loop.records import Floats

SEEN = "#6b7280"
"""A grey that can be told from a light page and from a dark one; it stands for black."""
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


def visible(colour: str) -> str:
    """The colour, or a grey for black, which a dark page hides."""
    return SEEN if colour == BLACK else colour


def legend_below(chart: Any, items: Mapping[str, Sequence[Any]], columns: int = 1) -> None:
    """A legend below the axes; a click on a line of it hides what it stands for."""
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
    """Curves, logarithmic in x where their values differ by much.

    ``share``: y is a share of all. ``marks``: a point stands at each value. A line stands at the
    ``limit``, and y goes up to twice as far at most.
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
        chart.y_range = Range1d(0, 1.05 * min(max(highest, limit), 2 * limit))
    if share:
        chart.yaxis.formatter = NumeralTickFormatter(format="0 %")
    drawn, hovered = {}, []
    for name, curve in curves.items():
        colour, dash = visible(curve.style["color"]), curve.style["linestyle"]
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
            color=visible(colour),
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
            color=visible(colour),
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
    """Points of one colour, each with words that appear over it, a label that stands beside it, and
    the row of a table that a click leads to; and the ends of the ``steps`` between them, if any."""

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
        colour = visible(group.colour)
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
