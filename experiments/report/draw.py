"""Charts as files: PNG and SVG, the same bytes every time (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Scale
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sarathi_sim.profiler.storage.child import Progress, silent
from .palette import BLACK, VERMILION, WHITE, ink_on
from .section import Axis, Chart, Series, legend

Figures = Mapping[str, Sequence[Chart]]
"""The charts of each file, by its name: panels that share a legend."""
_LOOK: dict[str, Any] = {
    "font.size": 13,  # legible when the figure is shown at half its size
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 11.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2.4,
    "hatch.linewidth": 0.9,
    "hatch.color": VERMILION,
    "svg.hashsalt": "sarathi-sim",  # element ids that do not change from run to run
    "path.simplify_threshold": 0.3,
}
DPI = 150
_MOST_EDGES = 100  # of boxes in a row
_SMALL = 11
_WIDE, _ROW, _PANEL = 7.0, 0.27, 3.9  # inches
_MOST_COLUMNS = 3
_LETTERS = 8.5, 10.5
"""Letters of a title and of a smaller text in an inch."""
_LONGEST_ROW = 34  # letters of its name
_MARKERS = "os^DvP*"


def draw_all(
    figures: Figures, folder: Path, progress: Progress = silent, heading: str = ""
) -> list[Path]:
    """Draw each figure as ``NAME.png`` and ``NAME.svg`` into ``folder``, below the ``heading``."""
    folder.mkdir(exist_ok=True)
    written = []
    for done, (name, charts) in enumerate(figures.items()):
        progress("figures", done, len(figures))
        for ending, content in files(charts, heading).items():
            written.append(folder / f"{name}.{ending}")
            written[-1].write_bytes(content)
    return written


_styled = matplotlib.rc_context(_LOOK)  # type: ignore[arg-type]


@_styled
def files(charts: Sequence[Chart], heading: str = "") -> dict[str, bytes]:
    """The bytes of a figure, as ``png`` and ``svg``."""
    figure = drawn(charts, heading)
    # Laid out once for both files, and drawn once for each: `savefig` does so two times.
    figure.dpi = DPI
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
    figure.set_layout_engine("none")
    words = {"Description": "\n".join(line for chart in charts for line in chart.alt)}
    pixels, lines = BytesIO(), BytesIO()
    agg, svg = {"Software": None, **words}, {"Date": None, "Creator": None, **words}
    FigureCanvasAgg(figure).print_png(pixels, metadata=agg)  # type: ignore[no-untyped-call]
    FigureCanvasSVG(figure).print_svg(lines, metadata=svg)  # type: ignore[no-untyped-call]
    return {"png": pixels.getvalue(), "svg": lines.getvalue()}


def figure_files(figures: Figures, heading: str = "") -> dict[str, bytes]:
    """The bytes of all files, ``figures/NAME.png`` and ``.svg``, by path."""
    return {
        f"figures/{name}.{ending}": content
        for name, charts in figures.items()
        for ending, content in files(charts, heading).items()
    }


@_styled
def drawn(charts: Sequence[Chart], heading: str = "") -> Figure:
    """The figure: a panel a chart, with one legend; below it the captions."""
    tall = any(chart.y.rows for chart in charts)
    columns = 1 if tall else 2 if len(charts) == 4 else min(_MOST_COLUMNS, len(charts))
    lines = -(-len(charts) // columns)
    counts = [max(len(c.y.rows), 2) * max(1, 0.6 * len(c.beside)) for c in charts[::columns]]
    heights = [_ROW * count + 0.8 if tall else _PANEL for count in counts]
    width = 10.0 if tall else max(_WIDE, 5.2 * columns)
    names, notes = legend(charts)
    small = int(_LETTERS[1] * width)
    note, above = fill(" ".join(notes), small), fill(heading, small)
    apart = 0.3 * len(names) + 0.2 * (note.count("\n") + above.count("\n")) + 0.5
    size = (width, sum(heights) + apart + 0.3 * bool(heading))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, height_ratios=heights).ravel()
    for axes in grid[len(charts) :]:
        axes.set_axis_off()
    handles = dict[str, Any]()
    for number, (axes, chart) in enumerate(zip(grid, charts, strict=False)):
        handles |= draw_on(axes, chart) | handles
        fixed = columns == 1 and None not in chart.x.ends
        if fixed and any(below.x == chart.x for below in charts[number + 1 : number + 2]):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
        rows = 0.09 * max(map(len, chart.y.rows), default=6)
        room = width / columns - 0.6 - min(rows, 0.09 * _LONGEST_ROW)
        axes.set_title(fill(chart.title, int(_LETTERS[0] * room)), color=chart.colour)
    if heading:
        figure.suptitle(above, fontsize=_SMALL, x=0.01, ha="left")
    if names:
        short = tall and max(map(len, names)) < 0.4 * small
        figure.legend(
            [handles[name] for name in names],
            [fill(name, small - 8) for name in names],
            loc="outside lower left",
            title=note,
            title_fontsize=_SMALL - 1,
            alignment="left",
            ncols=2 if short else 1,
            fontsize=_SMALL,
            handlelength=3.2,
        )
    elif note:
        figure.supxlabel(note, fontsize=_SMALL - 1)
    return figure


def draw_on(axes: Axes, chart: Chart) -> dict[str, Any]:
    """Draw a chart on given axes, without its title; returns the entries of a legend."""
    handles = dict[str, Any]()
    names = list(dict.fromkeys(one.name for one in chart.series))
    for series in chart.series:
        handle = _draw(axes, series, chart, names.index(series.name))
        if series.name:
            handles.setdefault(series.name, handle)
    if not chart.series:
        axes.text(0.5, 0.5, "Nothing to show.", ha="center", transform=axes.transAxes)
    line: dict[str, Any] = {"color": BLACK, "linewidth": 1.2, "zorder": 1.5}
    if chart.level is not None:
        axes.axhline(chart.level, **line)
    if chart.edge is not None:
        axes.axvline(chart.edge, linestyle=":", **line)
    for which, axis in (("x", chart.x), ("y", chart.y)):
        _set_axis(axes, which, axis)
    _write(axes, chart)
    return handles


def _draw(axes: Axes, one: Series, chart: Chart, number: int) -> Any:
    """One series; returns what a legend shows of it."""
    x, y = np.asarray(one.x, float), np.asarray(one.y, float)
    look: dict[str, Any] = {"color": one.colour, "label": one.name or None}
    if one.kind in ("line", "step"):
        look |= {"marker": "o", "markersize": 5} if one.marks else {}
        look |= {"drawstyle": "steps-post"} if one.kind == "step" else {}
        if one.ends is not None:
            axes.fill_between(x, *one.ends, color=one.colour, alpha=0.15, linewidth=0)
        (line,) = axes.plot(x, y, linestyle=one.dash, **look)
        return line
    if one.kind == "points":
        whisker: dict[str, Any] = {"color": one.colour, "linewidth": 1.4, "alpha": 0.6}
        if one.ends is not None:
            axes.vlines(x, *one.ends, **whisker)
        if one.ends_x is not None:
            axes.hlines(y, *one.ends_x, **whisker)
        marker = "D" if one.marks else _MARKERS[number % len(_MARKERS)]
        size = 50 if len(x) < 40 else 18
        look |= {"edgecolors": WHITE, "linewidths": 0.6, "zorder": 3}
        spots = axes.scatter(x, y, s=size, marker=marker, **look)
        if chart.link:
            spots.set_urls([chart.link.format(name) for name in one.links])
        return spots
    start, middles, thick = chart.boxes(one)
    low, high = middles - thick / 2, middles + thick / 2
    corners = np.stack([np.stack([start, x, x, start], 1), np.stack([low, low, high, high], 1)], 2)
    # White edges keep neighbouring micro-batches apart, where they do not hide them.
    width = 0.5 if one.dash == "-" and len(x) < _MOST_EDGES * len(chart.y.rows) else 0.0
    edges: dict[str, Any] = {"facecolors": one.colour, "edgecolors": WHITE, "linewidths": width}
    if one.dash == "--":
        edges["hatch"] = "///"
    if one.faint:
        edges = {"facecolor": "#fdeee6", "edgecolor": one.colour, "hatch": "////", "linewidth": 0.0}
    with matplotlib.rc_context({} if one.faint else {"hatch.color": ink_on(one.colour)}):
        boxes = PolyCollection(corners, label=one.name, **edges)  # type: ignore[arg-type]
    axes.add_collection(boxes)
    axes.autoscale_view()
    return boxes


def _set_axis(axes: Axes, which: str, axis: Axis) -> None:
    scale: Scale = getattr(axes, f"{which}axis")
    scale.set_label_text(fill(axis.label, 48 if which == "x" else 32))
    if axis.rows:
        scale.set_major_locator(FixedLocator(list(range(len(axis.rows)))))
        scale.set_ticklabels([fill(row, _LONGEST_ROW) for row in axis.rows], fontsize=10)
        ends = (len(axis.rows) - 0.4, -0.6)
        axes.set(**{f"{which}lim": ends if which == "y" else ends[::-1]})
        scale.set_tick_params(length=0)
        scale.grid(visible=False)
        return
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
        seen = getattr(axes, f"get_{which}lim")()
        low, high = (end or own for end, own in zip(axis.ends, seen, strict=True))
        scale.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        scale.set_minor_formatter(NullFormatter())
    else:
        scale.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
    if axis.ticks:
        scale.set_major_locator(FixedLocator(list(axis.ticks)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: _number(value, axis.shares)))
    axes.set(**{f"{which}lim": axis.ends})


def _number(value: float, share: bool) -> str:
    if share:
        return f"{100 * value:,.6g} %"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value / 1e6:,.6g} M"


def _write(axes: Axes, chart: Chart) -> None:
    """Write the texts in boxes, and those of points that hide nothing."""
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _SMALL}
    for one in chart.series:
        if one.start is not None and one.texts:
            for start, end, row, text in zip(one.start, one.x, one.y, one.texts, strict=True):
                axes.text(
                    (start + end) / 2,
                    row,
                    text,
                    color=ink_on(one.colour),
                    **middle,
                )
    for at, places in chart.text_places().items():
        one = chart.series[at]
        for x, y, text, place in zip(one.x, one.y, one.texts, places, strict=True):
            if place is not None:
                axes.annotate(text, (x, y), place, textcoords="offset points", **middle)
