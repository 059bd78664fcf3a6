"""The file of a report: one HTML page with its scripts, data and style in it. Its charts are
interactive (Bokeh; docs/research/timelines.md says why)."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
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
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.files import LARGEST_DATA, make_folders, read_bounded, write_whole
from sarathi_sim.profiler.storage.manifest import read_manifest
from sarathi_sim.profiler.storage.strict import UserError
from ..results import about_out, resolved
from .palette import DARK_PAGE, dark_colour
from .section import Axis, Chart, Section, Series, anchor, enumerated, legend, topic_of
from .sections import sections_of

_SEAL = re.compile(rb"<!-- sarathi-sim report 1 ([0-9a-f]{64}) -->\n\Z")
_PAGES = Environment(
    loader=PackageLoader("sarathi_sim.experiments.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_PAGES.filters["topic"] = topic_of

_PAGE_SCRIPT = "\n" + _PAGES.get_template("page.js").render()

# Charts ------------------------------------------------------------------------------------------

_TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
_ALONG = "xpan,xbox_zoom,xwheel_zoom,xzoom_in,xzoom_out,reset,save"
_DASHES = {"-": "solid", "--": "dashed", "-.": "dotdash", ":": "dotted"}
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus", "star")
_LONGEST = 38  # letters of a name or an axis: what a telephone has room for
_SEEN = "#6b7280"
"""The colour of limits and texts."""


def interactive(chart: Chart) -> Any:
    """The chart as a Bokeh figure, as wide as the page: one may zoom, a click on a name hides its
    series, a click on a point leads to the row of its run."""
    rows, names = chart.y.rows, {name: fill(name, _LONGEST) for name in legend([chart])[0]}
    height = 130 + 22 * max(len(rows), 2) * max(1, len(chart.beside)) if rows else 320
    gantt = any(one.kind == "gantt" for one in chart.series)
    drawn = figure(
        height=height + sum(22 + 16 * label.count("\n") for label in names.values()),
        sizing_mode="stretch_width",
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        tools=_ALONG if gantt else _TOOLS,
        active_drag="xpan" if gantt else "box_zoom",
        x_axis_type="log" if chart.x.log else "linear",
        y_axis_type="log" if chart.y.log else "linear",
    )
    drawn.toolbar.logo = None
    drawn.axis.axis_label_text_font_style = "normal"
    for axis, scale, name in ((chart.x, drawn.xaxis, "x"), (chart.y, drawn.yaxis, "y")):
        _set_axis(drawn, axis, scale, name)
    entries: dict[str, list[Any]] = {}
    texts, order = chart.text_places(), list(dict.fromkeys(one.name for one in chart.series))
    for number, one in enumerate(chart.series):
        marker = _MARKERS[order.index(one.name) % len(_MARKERS)]
        glyphs = _glyphs(drawn, one, chart, texts.get(number, ()), marker)
        entries.setdefault(one.name, []).extend(glyphs)
        drawn.add_tools(HoverTool(renderers=glyphs[:1], tooltips=_tips(chart, one)))
    _link(drawn, chart, entries)
    for place, across in ((chart.level, "width"), (chart.edge, "height")):
        if place is not None:
            span = Span(location=place, dimension=across, line_color=_SEEN, line_width=1.5)
            drawn.add_layout(span)
    if names:
        items = [LegendItem(label=names[name], renderers=entries[name]) for name in names]
        box = Legend(
            items=items,
            click_policy="hide",
            location="top_left",
            border_line_alpha=0,
            background_fill_alpha=0,
            margin=0,
            spacing=0,
        )
        drawn.add_layout(box, "below")
    return drawn


def _with(chart: Chart) -> Any:
    """Charts of one kind, "KIND: NAME", over the same axis stand together."""
    kind, several, _ = chart.title.partition(": ")
    return (kind, chart.x) if several else id(chart)


def _column(charts: Sequence[Chart]) -> Any:
    """Charts below each other, which move together along x."""
    drawn = [interactive(chart) for chart in charts]
    if len(drawn) == 1:
        return drawn[0]
    for chart, one in zip(charts, drawn, strict=True):
        one.x_range = drawn[0].x_range
        one.title.text = fill(chart.title.partition(": ")[2], 34)
    return column(drawn, sizing_mode="stretch_width")


def _set_axis(drawn: Any, axis: Axis, scale: Any, name: str) -> None:
    scale.axis_label = fill(axis.label, _LONGEST)
    low, high = axis.ends
    if axis.rows:
        ends = (len(axis.rows) - 0.4, -0.6)
        setattr(
            drawn,
            f"{name}_range",
            Range1d(*(ends if name == "y" else ends[::-1])),
        )
        scale.ticker = FixedTicker(ticks=list(range(len(axis.rows))))
        scale.major_label_overrides = {at: fill(row, 26) for at, row in enumerate(axis.rows)}
        drawn.ygrid.visible = False
        return
    if low is not None and high is not None:
        setattr(drawn, f"{name}_range", Range1d(low, high))
    for end, value in (("start", low), ("end", high)):
        if value is not None:
            setattr(getattr(drawn, f"{name}_range"), end, value)
    ticks = list(axis.ticks)
    if axis.log and not ticks and low is not None and high is not None:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        ticks = [tick for tick in every if low <= tick <= high]
    if ticks:
        scale.ticker = FixedTicker(ticks=ticks)
    elif name == "x" and not axis.log:
        scale.ticker.desired_num_ticks = 5  # a telephone has room for no more
    scale.formatter = NumeralTickFormatter(format="0 %" if axis.shares else "0,0.[0000]")


def _glyphs(drawn: Any, one: Series, chart: Chart, places: Sequence[Any], marker: str) -> list[Any]:
    """What is drawn of a series; the pointer asks the first."""
    data: dict[str, Any] = {
        "x": np.asarray(one.x),
        "y": np.asarray(one.y),
        **one.more,
    }
    look: dict[str, Any] = {"name": one.name, "color": one.colour}
    if one.kind in ("bars", "gantt"):
        data["start"], data["y"], thick = chart.boxes(one)
        look |= {"line_width": 0, "fill_alpha": 0.25 if one.faint else 1.0}
        return [drawn.hbar("y", thick, "x", "start", source=ColumnDataSource(data), **look)]
    if one.kind == "points":
        data |= {"link": [anchor(run) for run in one.links]} if one.links else {}
        look |= {"size": 10, "marker": marker}
        found = [drawn.scatter("x", "y", source=ColumnDataSource(data), **look)]
        if seen := [at for at, place in enumerate(places) if place is not None]:
            right, up = np.array([places[at] for at in seen]).T
            some = {
                "x": data["x"][seen],
                "y": data["y"][seen],
                "right": right,
                "down": -up,
                "text": [one.texts[at] for at in seen],
            }
            text = drawn.text(
                "x",
                "y",
                "text",
                source=ColumnDataSource(some),
                text_font_size="11px",
                text_color=_SEEN,
                text_align="center",
                text_baseline="middle",
                x_offset="right",
                y_offset="down",
            )
            found.append(text)
        return [*found, *_whiskers(drawn, one)]
    dash = _DASHES[one.dash] if isinstance(one.dash, str) else [4 * part for part in one.dash[1]]
    source, own = ColumnDataSource(data), {"mode": "after"} if one.kind == "step" else {}
    look |= {"line_dash": dash, "line_width": 2.4}
    found = [
        getattr(drawn, one.kind)(
            "x",
            "y",
            source=source,
            **look,
            **own,
        )
    ]
    if one.marks:
        found.append(
            drawn.scatter(
                "x",
                "y",
                source=source,
                size=7,
                color=one.colour,
            )
        )
    if one.ends is not None:
        found.append(
            drawn.varea(
                data["x"],
                *one.ends,
                color=one.colour,
                alpha=0.15,
            )
        )
    return found


def _whiskers(drawn: Any, one: Series) -> list[Any]:
    ends = [] if one.ends is None else [(one.x, one.ends[0], one.x, one.ends[1])]
    ends += [] if one.ends_x is None else [(one.ends_x[0], one.y, one.ends_x[1], one.y)]
    return [drawn.segment(*end, color=one.colour, line_alpha=0.6) for end in ends]


def _tips(chart: Chart, one: Series) -> list[tuple[str, str]]:
    number = "{0,0.[000000]}" if one.kind == "gantt" else "{0,0.[000]}"
    more = [(name, f"@{{{name}}}") for name in one.more]
    if one.kind in ("bars", "gantt"):
        unit = " (s)" if one.kind == "gantt" else ""
        ends = [(f"from{unit}", f"@start{number}"), (f"to{unit}", f"@x{number}")]
        return [
            ("", "$name"),
            *(ends if one.start is not None else ends[1:]),
            *more,
        ]
    share = "{0.0 %}" if chart.y.shares else number
    return [
        ("", "$name"),
        *more,
        (chart.x.label, f"@x{number}"),
        (chart.y.label, f"@y{share}"),
    ]


def _link(drawn: Any, chart: Chart, entries: Mapping[str, Sequence[Any]]) -> None:
    spots = [entries[one.name][0] for one in chart.series if one.links and one.name]
    if spots:
        row = OpenURL(url="#@link", same_tab=True)
        drawn.add_tools(TapTool(renderers=spots, callback=row))


# The page ----------------------------------------------------------------------------------------


def page(title: str, sections: Sequence[Section]) -> str:
    """The text of the file. Its own policy lets it ask for nothing from outside, and run its own
    scripts only, known by their hashes: none in an attribute."""
    charts, items = [], {}
    for number, section in enumerate(sections):
        places = []
        for index, (_, together) in enumerate(groupby(section.charts, _with)):
            place, parts = f"chart-{number}-{index}", list(together)
            items[place] = json_item(_column(parts), place)
            named = parts[0].title if len(parts) == 1 else parts[0].title.partition(": ")[0]
            words = [line for chart in parts for line in chart.alt]
            notes = dict.fromkeys(note for chart in parts for note in legend([chart])[1])
            places.append((place, named, " ".join(notes), words))
        charts.append(places)
    drawn = json.dumps(items, separators=(",", ":"))
    dark = {colour: dark_colour(colour) for colour in re.findall(r'"(#[0-9a-fA-F]{6})"', drawn)}
    # In Bokeh's own strings, this means the same.
    bokeh = "\n".join(Resources("inline", components=["bokeh"]).js_raw)
    scripts = [bokeh.replace("</script", "<\\/script").replace("<!--", "<\\!--"), _PAGE_SCRIPT]
    text: str = _PAGES.get_template("page.html").render(
        title=title,
        sections=list(zip(sections, charts, strict=True)),
        # No text in JSON can end the script element that it stands in.
        items=drawn.replace("<", "\\u003c") if items else "",
        dark=json.dumps(dict(sorted(dark.items()))),
        dark_page=DARK_PAGE,
        scripts=scripts if items else scripts[-1:],
        hashes=[b64encode(sha256(text.encode()).digest()).decode() for text in scripts],
    )
    return text


def check_report(out: Path) -> Path:
    """The resolved path of ``out``: missing, or a report of ours that nobody changed. Raises
    UserError otherwise, and where it would be a foreign file in a result's folder."""
    target = resolved(out)
    if target.is_dir():
        raise UserError(f"--out {out}: is a folder: name a file, such as {out / 'report.html'}")
    for folder in target.parents:
        if read_manifest(folder) is not None:
            raise UserError(
                f"--out {out}: lies in {folder}, which holds a result and only its files: name a "
                "file beside it"
            )
    if not target.exists():
        return target
    content = read_bounded(target, LARGEST_DATA)
    seal = _SEAL.search(content)
    if seal is None:
        raise UserError(
            f"--out {out}: exists and is not a report of ours, so it is not replaced: name "
            "another file"
        )
    if sha256(content[: seal.start()]).hexdigest().encode() != seal[1]:
        raise UserError(
            f"--out {out}: was changed since it was written, so it is not replaced: move it away"
        )
    return target


def write_page(
    folders: Sequence[Path], out: Path, title: str | None = None, progress: Progress = silent
) -> int:
    """Write the report of results to ``out``; returns its size in bytes. Raises UserError where a
    folder is not a result, or (before anything is simulated) ``out`` is not ours to replace."""
    check_report(out)
    sections = sections_of(folders, progress)
    heading = title or enumerated([f"{section.kind} {section.name}" for section in sections])
    return write_report(out, page(heading, sections))


def write_report(out: Path, text: str) -> int:
    """Write the page, whole or not at all, with the seal that tells it from other files; returns
    its size in bytes. Raises UserError where ``out`` is not ours to replace."""
    target = check_report(out)
    with about_out(out):
        make_folders(target.parent)
    body = text.encode()
    content = body + f"<!-- sarathi-sim report 1 {sha256(body).hexdigest()} -->\n".encode()
    with about_out(out):
        write_whole(target, content)
    return len(content)
