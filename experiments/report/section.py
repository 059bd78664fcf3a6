"""An answer as data: a section with its tables and charts. :mod:`.render` shows it in the terminal,
as JSON and Markdown, :mod:`.page` as HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from sarathi_sim.profiler.storage.strict import UserError, one_line

if TYPE_CHECKING:
    import pandas as pd

_MOST_ALIKE = 3


@dataclass(frozen=True)
class Table:
    """A table that a click on a heading sorts. The first ``text`` columns are left-aligned.
    ``anchors`` are the names of the rows: a click on a point of a chart leads to one."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: int = 1
    anchors: Sequence[str] = ()


Kind = Literal["line", "step", "points", "bars", "gantt"]
Dash = str | tuple[int, tuple[int, ...]]
Numbers = Any
"""An array of numbers, or a list of them as JSON has it."""
_TOLD = 5
MOST_NAMED = 7
"""Entries of a legend."""
_AREA = (290.0, 190.0)
"""Width and height of the place for points, in pixels, at least."""
_LETTER = 6.5


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, the ``ends`` seen at first, and the only ``ticks``.
    ``rows`` are names at 0, 1, 2, ... from top to bottom, instead of numbers; of ``shares`` the
    numbers are in percent."""

    label: str
    log: bool = False
    ends: tuple[float | None, float | None] = (None, None)
    rows: Sequence[str] = ()
    shares: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Series:
    """Values of one name, in one colour.

    ``line``: y over x; ``step``: y stays until the next x, as of a CDF; ``points``; ``bars`` and
    ``gantt``: in the rows y, from ``start`` (of bars 0, if left out) to x, ``thick`` parts of a row
    high, bars without a start beside those of other series. ``marks`` are points on a line, and
    diamonds of points; ``ends`` along y are the edges of a band around a line and, with ``ends_x``,
    of whiskers of points. ``more`` are columns that are told beside the pointer, ``texts`` stand
    beside points and in boxes, ``links`` are the runs of points.
    """

    kind: Kind
    name: str
    x: Numbers
    y: Numbers
    colour: str = "#000000"
    dash: Dash = "-"
    start: Numbers | None = None
    marks: bool = False
    ends: tuple[Numbers, Numbers] | None = None
    ends_x: tuple[Numbers, Numbers] | None = None
    faint: bool = False
    thick: float = 0.86
    more: Mapping[str, Any] = field(default_factory=dict)
    texts: Sequence[str] = ()
    links: Sequence[str] = ()

    def in_words(self, y: Axis) -> str:
        """Its name, and some of its values, in the unit of their axis."""
        from sarathi_sim.simulator.views.metric_registry import number_text

        if self.kind == "gantt":
            return f"{self.name}: {len(self.x):,} boxes"
        last, few = len(self.x) - 1, min(len(self.x), _TOLD)
        some = [round(last * at / max(few - 1, 1)) for at in range(few)]
        if self.kind == "bars":
            start = [0.0] * len(self.x) if self.start is None else self.start
            values = [
                f"{y.rows[int(self.y[at])]} {number_text(self.x[at] - start[at])}" for at in some
            ]
        else:
            unit = 100 if y.shares else 1
            values = [
                f"{number_text(unit * self.y[at])} at {number_text(self.x[at])}" for at in some
            ]
        return f"{self.name}: {', '.join(values)}"


@dataclass(frozen=True)
class Chart:
    """Series on two axes, as data: :mod:`sarathi_sim.experiments.report.draw` draws it into a
    file, :mod:`sarathi_sim.experiments.report.page` on a page.

    A line across marks the ``level``, a y, and the ``edge``, an x. ``colour`` is the title's.
    ``link`` is the path from a figure's file to a point's run, with ``{}`` for its name.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    caption: str = ""
    level: float | None = None
    edge: float | None = None
    colour: str = "#000000"
    link: str = ""

    @property
    def beside(self) -> list[str]:
        """The names of the bars that stand beside each other in a row."""
        bars = (one.name for one in self.series if one.kind == "bars" and one.start is None)
        return list(dict.fromkeys(bars))

    def boxes(self, one: Series) -> tuple[Numbers, Numbers, float]:
        """Where the boxes of a series begin, their middles in rows, and their height."""
        import numpy as np

        rows = np.asarray(one.y, float)
        if one.start is not None or one.kind != "bars":
            start = np.zeros(len(rows)) if one.start is None else np.asarray(one.start, float)
            return start, rows, one.thick
        names, thick = self.beside, one.thick / len(self.beside)
        middles = rows + thick * (names.index(one.name) - (len(names) - 1) / 2)
        return np.zeros(len(rows)), middles, thick

    def text_places(self) -> dict[int, list[tuple[float, float] | None]]:
        """By number of a series of points with texts: where each text stands, from its point (to
        the right and up, in pixels); None where it would hide another text, a point or a line."""
        import numpy as np

        every = enumerate(self.series)
        spots = {at: one for at, one in every if one.kind == "points" and any(one.texts)}
        taken = list[Box]()
        for one in self.series if spots else ():
            x, y, half = self._pixels("x", one.x), self._pixels("y", one.y), 5.0
            if one.kind == "line":
                along, half = np.linspace(0, len(x) - 1, 200), 2.0
                x, y = (np.interp(along, range(len(x)), each) for each in (x, y))
            taken += [(*place, half, half) for place in zip(x, y, strict=True)]
        found = dict[int, list[tuple[float, float] | None]]()
        for at, one in spots.items():
            found[at] = []
            places = (self._pixels("x", one.x), self._pixels("y", one.y), one.texts)
            for x, y, text in zip(*places, strict=True):
                half = _LETTER * len(text) / 2
                boxes = ((x + right, y + up, half, 7.0) for right, up in _around(half))
                free = (box for box in boxes if _is_free(box, taken))
                box = next(free, None) if text else None
                taken += [box] if box else []
                found[at].append((box[0] - x, box[1] - y) if box else None)
        return found

    def _pixels(self, which: Literal["x", "y"], values: Numbers) -> Numbers:
        """Where values are on an axis, whose ends are seen."""
        import numpy as np

        axis, length = (self.x, _AREA[0]) if which == "x" else (self.y, _AREA[1])
        scale = np.log10 if axis.log else np.asarray
        bands = (one.ends_x if which == "x" else one.ends for one in self.series)
        columns = [getattr(one, which) for one in self.series]
        every = np.concatenate([*columns, *(end for pair in bands for end in pair or ())])
        seen = (every.min(), every.max())
        ends = [own if end is None else end for end, own in zip(axis.ends, seen, strict=True)]
        before, after = (0.05 * (end is None) for end in axis.ends)
        return length * np.interp(scale(values), scale(ends), (before, 1 - after))

    @property
    def alt(self) -> list[str]:
        """The text alternative: the axes, and some values of each series."""
        axes = " over ".join(filter(None, (self.y.label, self.x.label)))
        named = (one for one in self.series if one.name)
        return [f"{self.title}: {axes}", *(one.in_words(self.y) for one in named)]


Box = tuple[float, float, float, float]
"""Its middle, and half of its width and height."""


def _around(half: float) -> Iterator[tuple[float, float]]:
    """Where a text may stand, from its point, the nearest first."""
    for far in (0.0, 10.0, 22.0):
        for x, y in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            yield x * (half + 8 + far), y * (12 + far)


def _is_free(box: Box, taken: Sequence[Box]) -> bool:
    """Whether it lies in the place for points, and hides no other."""
    x, y, half, high = box
    inside = half < x < _AREA[0] - half and high < y < _AREA[1] - high
    return inside and all(
        abs(x - other[0]) >= half + other[2] or abs(y - other[1]) >= high + other[3]
        for other in taken
    )


def legend(charts: Sequence[Chart]) -> tuple[list[str], list[str]]:
    """Of charts that stand together: the names in their legend, at most :data:`MOST_NAMED`, and the
    sentences below them, each once."""
    names = list(dict.fromkeys(one.name for chart in charts for one in chart.series if one.name))
    captions = (re.split(r"(?<=\.) (?=[A-Z\d])", chart.caption) for chart in charts)
    notes = list(dict.fromkeys(note for some in captions for note in some if note))
    if hidden := names[MOST_NAMED:]:
        notes.append(f"Not in the legend: {', '.join(hidden)}.")
    return names[:MOST_NAMED], notes


@dataclass(frozen=True)
class Section:
    """One result, or several runs beside each other.

    ``answer`` is a :func:`sentence`, ``command`` the command line for the server or simulation that
    it names. The first of ``tables`` has the numbers behind it. ``assumed`` are lines ``topic:
    text``, ``warnings`` are caveats. ``about`` is the description of the configuration,
    ``configuration`` maps names of files to their text. ``heading`` stands above its pictures: see
    :func:`heading`.
    """

    kind: str
    name: str
    question: str
    answer: str
    tables: Sequence[Table] = ()
    assumed: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    about: str = ""
    command: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    heading: str = ""

    def words(self) -> dict[str, Any]:
        """JSON-able: the texts of the section, which a result's summary has beside its numbers."""
        lists = {"assumptions": list(self.assumed), "warnings": list(self.warnings)}
        return {"question": self.question, "answer": self.answer, **lists}


def heading(name: str, models: Iterable[str], gpus: Iterable[str], load: str = "") -> str:
    """What stands above all pictures of a result: its name, models, GPUs and load."""
    what, on = (enumerated(list(dict.fromkeys(filter(None, each)))) for each in (models, gpus))
    where = " on ".join(filter(None, (what, on)))
    return ": ".join(filter(None, (name, "; ".join(filter(None, (where, load))))))


def heading_of(*summaries: Mapping[str, Any]) -> str:
    """The heading of one or several results, from their summaries."""
    models, gpus, loads = list[str](), list[str](), list[str]()
    for found in summaries:
        rows = found.get("deployments", {})
        for row in rows.values() if isinstance(rows, Mapping) else rows:
            model = (
                found.get("model") or row.get("model") or (row.get("scenario") or {}).get("model")
            )
            models += [model] if isinstance(model, str) else []
            gpus += [row["device"]] if "device" in row else []
        topics = map(topic_of, found.get("assumptions", ()))
        arrivals = [text.partition(" (of ")[0] for topic, text in topics if topic == "arrivals"]
        loads += [found["slo"]] if found.get("slo") else arrivals
    load = " or ".join(list(dict.fromkeys(loads))[:_MOST_ALIKE])
    names = list(dict.fromkeys(str(found["name"]) for found in summaries if "name" in found))
    return heading(enumerated(names), models, gpus, load)


def sentence(parts: Mapping[str, str]) -> str:
    """The sentence of every answer: ``best: value; next: value; limiting metric: value.`` Parts
    without a value are left out."""
    said = "; ".join(f"{name}: {value}" for name, value in parts.items() if value)
    return f"{said}." if said else ""


class Result(dict[str, Any]):
    """What a command answers: what ``--json`` prints, by key.

    ``section`` is the answer as it is drawn, ``table`` its main table, ``written`` the files or
    folders that hold it, ``rest`` where the rows are that a terminal has no place for. ``failures``
    are lines about what failed; with them the command's exit code is ``code``.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        section: Section | None = None,
        *,
        table: pd.DataFrame | None = None,
        written: Sequence[Path] = (),
        rest: str = "",
        failures: Sequence[str] = (),
        code: int = 0,
    ) -> None:
        super().__init__(content)
        self.section, self.table, self.written, self.rest = section, table, written, rest
        self.failures, self.code = failures, code


_SECTION = "section.json"


def write_section(folder: Path, section: Section) -> None:
    """Keep a section, with its charts, beside a result's numbers."""
    text = json.dumps(asdict(section), indent=1, default=list)
    (folder / _SECTION).write_text(text, encoding="utf-8")


def read_section(folder: Path) -> Section:
    """The section that :func:`write_section` kept. Raises UserError if there is none."""
    try:
        return TypeAdapter(Section).validate_json((folder / _SECTION).read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder}: has no readable {_SECTION}: {one_line(error)}") from error


@contextmanager
def damaged(where: str, command: str) -> Iterator[None]:
    """Turns any error of a section into a UserError: the result of ``command`` is damaged."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{where}: the result of {command} is damaged: {problem}") from error


def anchor(run: str) -> str:
    """The name of the row of a run."""
    return f"run-{run}"


def first_upper(text: str) -> str:
    """With a capital letter first; the others as they are."""
    return text[:1].upper() + text[1:]


def table(name: str, rows: Sequence[Mapping[str, Any]], text: int = 1, note: str = "") -> Table:
    """A table of rows by heading, whose numbers and bands become texts."""
    cells = [[c if isinstance(c, str) else number_or_dash(c) for c in r.values()] for r in rows]
    return Table(name, tuple(rows[0]) if rows else (), cells, note, text)


def enumerated(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def number_or_dash(value: float | list[float] | None) -> str:
    """A cell of a table: a number, or the two ends of a band."""
    from sarathi_sim.simulator.views.metric_registry import number_text

    if value is None:
        return "-"
    return " to ".join(map(number_text, value if isinstance(value, list) else [value]))


def assumed_of(found: Mapping[str, Any]) -> list[str]:
    """The assumptions about a result's deployments (its ``notes``): each line once, with the names
    of its deployments if not all have it."""
    notes: Mapping[str, Sequence[str]] = found.get("notes", {})
    whose: dict[str, list[str]] = {}
    for name, lines in notes.items():
        for line in lines:
            whose.setdefault(line, []).append(name)
    topics, told = list(dict.fromkeys(topic_of(line)[0] for line in whose)), []
    for line in thinned(sorted(whose, key=lambda line: topics.index(topic_of(line)[0]))):
        names = whose.get(line, list(notes))
        more = len(names) - _MOST_ALIKE
        shown = names if more <= 0 else [*names[:_MOST_ALIKE], f"{more} more"]
        told.append(line if len(names) == len(notes) else f"{line} (of {enumerated(shown)})")
    return told


def doubts_of(found: Mapping[str, Any]) -> list[str]:
    """The doubts about the op times of a result's deployments (its ``doubts``), each once."""
    said: Mapping[str, Sequence[str]] = found.get("doubts", {})
    return list(dict.fromkeys(line for lines in said.values() for line in lines))


def topic_of(assumption: str) -> tuple[str, str]:
    """The topic of a line of ``assumptions``, empty without one, and its text."""
    topic, colon, text = assumption.partition(": ")
    return (topic, text) if colon else ("", assumption)


def thinned(notes: Iterable[str]) -> list[str]:
    """Each note once; of more than three that differ in numbers alone, the first and a count."""
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        alike.setdefault(re.sub(r"[\d.,]+", "0", note), []).append(note)
    found = []
    for same in alike.values():
        few = len(same) <= _MOST_ALIKE
        found += (
            same if few else [same[0], f"and {len(same) - 1} more like this, with other numbers"]
        )
    return found
