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
    ``assumptions`` say what was assumed, ``topic: text`` each, ``warnings`` what to keep in mind.
    ``about`` is the description of its configuration, ``configuration`` maps names of files to
    their text.
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


def assumed_of(found: Mapping[str, Any]) -> list[str]:
    """What was assumed of the deployments of a result (its ``notes``): each line once, with whose
    it is where it is not of all."""
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
    """What is in doubt about the op times of a result's deployments (its ``doubts``), once."""
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
