"""An answer as data: a section with its tables and charts. :mod:`.render` shows it in the terminal,
as JSON, Markdown and HTML."""

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

    ``anchors`` are the names of the rows: a click on a point of a chart leads to one.
    """

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


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, and the ``ends`` that are seen at first.

    ``rows`` are names at 0, 1, 2, ... from top to bottom, instead of numbers; of ``shares`` the
    numbers are in percent. ``ticks`` are the only ones.
    """

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

    def in_words(self, rows: Sequence[str]) -> str:
        """Its name, and some of its values."""
        from sarathi_sim.simulator.views.metrics import number_text

        if self.kind == "gantt":
            return f"{self.name}: {len(self.x):,} boxes"
        last, few = len(self.x) - 1, min(len(self.x), _TOLD)
        some = [round(last * at / max(few - 1, 1)) for at in range(few)]
        if self.kind == "bars":
            start = [0.0] * len(self.x) if self.start is None else self.start
            values = [
                f"{rows[int(self.y[at])]} {number_text(self.x[at] - start[at])}" for at in some
            ]
        else:
            values = [f"{number_text(self.y[at])} at {number_text(self.x[at])}" for at in some]
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
    def alt(self) -> list[str]:
        """The text alternative: the axes, and some values of each series."""
        axes = " over ".join(filter(None, (self.y.label, self.x.label)))
        named = (one for one in self.series if one.name)
        return [f"{self.title}: {axes}", *(one.in_words(self.y.rows) for one in named)]


@dataclass(frozen=True)
class Section:
    """One result, or several runs beside each other.

    ``answer`` is a :func:`sentence`, ``command`` the command line for the server or simulation that
    it names. The first of ``tables`` has the numbers behind it. ``assumed`` are lines ``topic:
    text``, ``warnings`` are caveats. ``about`` is the description of the configuration,
    ``configuration`` maps names of files to their text.
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

    def words(self) -> dict[str, Any]:
        """JSON-able: the texts of the section, which a result's summary has beside its numbers."""
        lists = {"assumptions": list(self.assumed), "warnings": list(self.warnings)}
        return {"question": self.question, "answer": self.answer, **lists}


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


def enumerated(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def number_or_dash(value: float | list[float] | None) -> str:
    """A cell of a table: a number, or the two ends of a band."""
    from sarathi_sim.simulator.views.metrics import number_text

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
