"""An answer in the terminal: sentences, tables, JSON, and the progress bar."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from ..content import Result, Section, SortableTable, topic_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

_MOST_ROWS = 30


def consoles() -> tuple[Console, Console]:
    """stdout and stderr. Tables are as wide as the terminal, or as COLUMNS says; else as they need
    to be."""
    from rich.console import Console

    def wide(console: Console) -> Console:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 10_000
        return console

    return wide(Console()), wide(Console(stderr=True))


def print_result(result: Result, *, json: bool = False, quiet: bool = False) -> None:
    """A command's answer: with ``json`` one object on stdout, and the rest on stderr; unless it is
    ``quiet``, the section and where it is written."""
    if json:
        from ..results import json_bytes

        typer.echo(json_bytes(result), nl=False)
    for line in result.failures:
        typer.echo(line, err=True)
    if quiet:
        return
    if result.section is not None:
        print_section(result.section, err=json, rest=result.rest)
    for path in result.written:
        typer.echo(f"written: {path}", err=json)


def print_section(section: Section, *, err: bool = False, rest: str = "") -> None:
    """An answer, on stdout or stderr: its sentence, what was assumed, its tables, its warnings.

    The first table is whole, unless it is said where the ``rest`` of all tables is.
    """
    command = f"\nThis runs it:\n{section.command}\n" if section.command else ""
    if section.answer:
        typer.echo(section.answer, err=err)
    if section.answer and section.table.headings:
        typer.echo(command, err=err)
    if section.about:
        consoles()[err].print(section.about, markup=False, highlight=False)
    print_assumed(section.assumptions, err=err)
    print_grid(section.table, err=err, rest=rest)
    for grid in section.details:
        print_grid(grid, err=err, rest=rest or "--json")
    for name, text in section.configuration.items():
        typer.echo(f"{name}: {text.strip()}", err=err)
    for line in section.warnings:
        typer.echo(f"warning: {line}", err=err)


def print_grid(grid: SortableTable, *, err: bool = False, rest: str = "") -> None:
    """A table and its note; its first rows, where it is said where the ``rest`` is."""
    if not grid.headings:
        return
    rows = grid.rows[:_MOST_ROWS] if rest else grid.rows
    headings = (grid.headings[: grid.text], grid.headings[grid.text :])
    table = rich_table(*headings, rows, title=grid.title or None)
    consoles()[err].print(table, markup=False, highlight=False)
    more = len(grid.rows) - len(rows)
    note = f"And {more} more: see {rest}. {grid.note}" if more else grid.note
    typer.echo(f"{note}\n" if note else "", err=err)


def rich_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> Table:
    """Columns of text to the left, then columns of numbers to the right, by their headings.

    A cell that is too wide continues in the next line. ``about`` are options of rich's tables: a
    title, a caption.
    """
    from rich.table import Table

    table = Table(**{"title_justify": "left", "caption_justify": "left", **about})
    for heading in text:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        # Without a heading it is no number: yes or no.
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_assumed(lines: Sequence[str], *, err: bool = False) -> None:
    """The block "Assumed": a line a topic, aligned."""
    if not lines:
        return
    parts = [topic_of(line) for line in lines]
    wide, longest = consoles()[err].width, max(len(topic) for topic, _ in parts)
    told = ["Assumed"]
    for topic, text in parts:
        begin, further = f"  {topic:{longest}}  ", " " * (longest + 4)
        told += wrap(
            *(text, wide),
            initial_indent=begin,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )
    typer.echo("\n".join([*told, ""]), err=err)


class ProgressBar:
    """Shows the current step and its expected time, after the first second.

    Use as a context manager, and call it with the step, its progress and its length.
    """

    def __init__(self, console: Console, enabled: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        # A log file needs no escape sequences.
        self._enabled = enabled and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
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

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if not self._shown and time.monotonic() - self._began > 1:
            self._shown = True
            self._progress.start()
