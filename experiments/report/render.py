"""A section in the terminal, as JSON and Markdown; and the progress bar."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from .section import Result, Section, Table, enumerated, topic_of

if TYPE_CHECKING:
    from rich import table as rich_tables
    from rich.console import Console, RenderableType
    from rich.progress import TaskID

_MOST_ROWS, _FEW = 30, 3


def terminal(section: Section, console: Console, *, verbose: bool = False, rest: str = "") -> str:
    """A section as text for a console: the answer, its command, the first table, what was assumed,
    warnings, a line each; with ``verbose`` all of them in full, and all tables. ``rest`` says where
    the rows are that are left out of long tables."""
    with console.capture() as text:
        for line in filter(None, (section.answer, section.command)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for grid in section.tables if verbose else section.tables[:1]:
            _print_table(grid, console, rest)
        for words in (section.about, *section.configuration.values()) if verbose else ():
            console.print(words.strip(), markup=False, highlight=False)
        most = None if verbose else _FEW
        assumed, warned = section.assumed[:most], section.warnings[:most]
        _print_lines("Assumed", [topic_of(one) for one in assumed], console, verbose)
        _print_lines("Keep in mind", [("", one) for one in warned], console, verbose)
        left = {"table": len(section.tables) - 1, "assumption": len(section.assumed) - _FEW}
        left["warning"] = len(section.warnings) - _FEW
        more = [f"{n} {what}{'s' * (n > 1)}" for what, n in left.items() if n > 0]
        if more and not verbose:
            console.print(f"Further {enumerated(more)}: --verbose", markup=False, highlight=False)
    return text.get()


def as_json(result: Result, indent: int | None = 2) -> str:
    """What ``--json`` prints: one object, with NaN and infinities as null; without ``indent`` what
    ``--progress json`` prints, in one line."""
    from ..results import json_bytes

    return json_bytes(result, indent).decode()


def markdown(section: Section) -> str:
    """A section as a Markdown page."""
    parts = [f"# {section.question}", section.about, section.answer]
    parts.append(f"    {section.command}" if section.command else "")
    for grid in section.tables:
        ruler = ["---" if at < grid.text else "---:" for at in range(len(grid.headings))]
        lines = (f"| {' | '.join(cells)} |" for cells in (grid.headings, ruler, *grid.rows))
        parts += [f"## {grid.title}" * bool(grid.title), "\n".join(lines), grid.note]
    parts += [f"- {line}" for line in (*section.assumed, *section.warnings)]
    return "\n\n".join(filter(None, parts)) + "\n"


def print_result(
    result: Result, *, json: bool = False, quiet: bool = False, verbose: bool = False
) -> None:
    """A command's answer: with ``json`` one object on stdout, and the rest on stderr; unless it is
    ``quiet``, the section and where it is written."""
    if json:
        typer.echo(as_json(result), nl=False)
    for line in result.failures:
        typer.echo(line, err=True)
    if quiet:
        return
    if result.section is not None:
        text = terminal(result.section, consoles()[json], verbose=verbose, rest=result.rest)
        typer.echo(text, nl=False, err=json)
    for path in result.written:
        typer.echo(f"written: {path}", err=json)


def consoles() -> tuple[Console, Console]:
    """stdout and stderr. Tables are as wide as the terminal, or as COLUMNS says; else as they need
    to be."""
    from rich.console import Console

    def wide(console: Console) -> Console:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 10_000
        return console

    return wide(Console()), wide(Console(stderr=True))


def _print_table(grid: Table, console: Console, rest: str) -> None:
    """A table and its note; its first rows, if it is long and it is said where the ``rest`` is."""
    rows = grid.rows[:_MOST_ROWS] if rest else grid.rows
    headings = (grid.headings[: grid.text], grid.headings[grid.text :])
    console.print()
    console.print(rich_table(*headings, rows, title=grid.title or None), highlight=False)
    more = len(grid.rows) - len(rows)
    note = f"And {more} more: see {rest}. {grid.note}" if more else grid.note
    if note:
        console.print(note, markup=False, highlight=False)


def rich_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> rich_tables.Table:
    """Columns of text to the left, then columns of numbers to the right, by their headings. A cell
    that is too wide continues in the next line. ``about`` are options of rich's tables."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    look = {"title_justify": "left", "caption_justify": "left", "show_edge": False}
    table = Table(
        **{
            "box": SIMPLE_HEAD,
            "padding": (0, 1, 0, 0),
            **look,
            **about,
        }
    )
    for heading in text:
        table.add_column(escape(heading), overflow="fold")
    for heading in numbers:
        # Without a heading it is no number: yes or no.
        table.add_column(escape(heading), justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _print_lines(
    title: str, lines: Sequence[tuple[str, str]], console: Console, whole: bool
) -> None:
    """A block of texts with their topics, aligned; if not ``whole``, a line of each."""
    if not lines:
        return
    longest = max(len(topic) for topic, _ in lines)
    found = [title]
    for topic, text in lines:
        begin = f"  {topic:{longest}}  " if longest else "  "
        found += wrap(
            *(text, console.width),
            initial_indent=begin,
            subsequent_indent=" " * len(begin),
            max_lines=None if whole else 1,
            placeholder=" …",
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print("\n".join(found), markup=False, highlight=False, soft_wrap=True)


class ProgressBar:
    """Shows the current step and its expected time, after the first second: a context manager that
    is called with the step, its progress and its length. A partial answer stands above it."""

    def __init__(self, console: Console, enabled: bool) -> None:
        from io import StringIO

        from rich import progress
        from rich.console import Console

        bar = self

        class Growing(progress.Progress):
            def get_renderables(self) -> Iterable[RenderableType]:
                yield from [bar._above] if bar._above else []
                yield from super().get_renderables()

        # A log file needs no escape sequences.
        self._enabled = enabled and console.is_terminal
        self._above, self._said = "", "" if enabled else None
        self._apart = Console(file=StringIO(), width=console.width)  # the bar's own shows the bar
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self._progress = Growing(
            *("{task.description}", *columns, "left:", progress.TimeRemainingColumn()),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self._shown = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def show(self, section: Section) -> None:
        """Show a partial answer in place of the last one; in a log file its sentence, if it names
        another deployment."""
        from rich.markup import escape

        if self._enabled:
            short = replace(section, command="", assumed=[], warnings=[], tables=section.tables[:1])
            self._above = escape(terminal(short, self._apart))
            return
        if self._said is not None and (best := section.answer.partition(",")[0]) != self._said:
            self._said = best
            self.say(section.answer)

    def say(self, line: str) -> None:
        """A line for the user, above the bar."""
        if self._shown:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            typer.echo(line, err=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if not self._shown and time.monotonic() - self._began > 1:
            self._shown = True
            self._progress.start()
