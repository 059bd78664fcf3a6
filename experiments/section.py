"""What a report holds, whatever the result: a question, its answer, tables, charts, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
    ``about`` is the description of its configuration, ``configuration`` maps names of files to
    their text. ``warnings`` say what to keep in mind.
    """

    kind: str
    name: str
    question: str
    answer: str
    table: SortableTable
    charts: Sequence[Chart] = ()
    details: Sequence[SortableTable] = ()
    about: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def anchor(run: str) -> str:
    """The name of the row of a run."""
    return f"run-{run}"


def enumerated(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
