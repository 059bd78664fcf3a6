"""What an answer holds, whatever was asked: terminal, JSON and HTML draw the same one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.views.metric_registry import number_text

_MOST_ALIKE = 3


@dataclass(frozen=True)
class SortableTable:
    """A table that a click on a heading sorts. The first ``text`` columns are left-aligned.

    ``anchors`` are the names of the rows: a click on a point of a chart leads to one.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: int = 1
    anchors: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """An interactive chart: a model of Bokeh's, with what it shows in words."""

    title: str
    model: Any
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """One result, or several runs beside each other.

    ``answer`` is one sentence, ``table`` the numbers behind it, ``details`` are further tables.
    ``assumptions`` say what was assumed, ``warnings`` what to keep in mind. ``about`` is the
    description of its configuration, ``configuration`` maps names of files to their text.
    """

    kind: str
    name: str
    question: str
    answer: str
    table: SortableTable
    assumptions: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    details: Sequence[SortableTable] = ()
    about: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def words(self) -> dict[str, Any]:
        """JSON-able: what is said in words, as a result's summary has it beside its numbers."""
        lists = {"assumptions": list(self.assumptions), "warnings": list(self.warnings)}
        return {"question": self.question, "answer": self.answer, **lists}


def anchor(run: str) -> str:
    """The name of the row of a run."""
    return f"run-{run}"


def enumerated(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def number_or_dash(value: float | list[float] | None) -> str:
    """A cell of a table: a number, or the two ends of a band."""
    if value is None:
        return "-"
    return " to ".join(map(number_text, value if isinstance(value, list) else [value]))


def traffic_of(found: Mapping[str, Any]) -> list[str]:
    """The lengths of the requests behind the numbers of a result, each once with whose they are."""
    lines: Mapping[str, str] = found.get("traffic", {})
    alike = {line: [name for name in lines if lines[name] == line] for line in lines.values()}
    whose = {line: f" of {enumerated(names)}" for line, names in alike.items()}
    return [f"traffic{whose[line] if len(alike) > 1 else ''}: {line}" for line in alike]


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
