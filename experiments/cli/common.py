"""What all commands share: consoles, options, and how a command ends.

Exit codes: 0 a result; 1 what a command's page says (``lockstep``, ``validate``: a comparison
failed; ``sweep``: a run failed); 2 whatever the user's input, files, machine or policy did, with a
message; 70 an error of ours, with a request to report it; 128 + N for signal N.
"""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from sarathi_sim.experiments.content import Section, SortableTable

PROFILES = Path("profiles")
"""Where bundles are written by default."""

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a value; may be repeated."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and no table.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace even a measured bundle.")]
ModelOption = Annotated[str, typer.Option(help="A shipped model, its Hub name, or a config.json.")]
DegreeOption = Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")]
LENGTHS = (
    "Mean PROMPT:OUTPUT tokens, all alike (1024:256) or spread (1024:256~0.5); tokens in all "
    "with their P:D (1K@14, 1K@5..50, 1K@?); a trace; or a configuration."
)
WORKLOAD = typer.Option(metavar="LENGTHS", help=LENGTHS)
WorkloadOption = Annotated[str | None, WORKLOAD]
ResultOption = Annotated[
    Path | None, typer.Option(help="Folder of the result.  [default: runs/NAME]")
]
ProfilesOption = Annotated[
    Path, typer.Option(help="Root folder of profiles: the key `profiles` of a configuration.")
]
DatasetsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of public measurements.  [default: $SARATHI_SIM_DATASETS]"),
]
FiguresOption = Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print neither progress nor table.")]

# What a wrong option raises; typer handles it, but has no name for it.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]
# A message repeats what the user wrote, and a file may hold a value of megabytes.
_LONGEST_LINE, _LONGEST_USAGE, _MOST_LINES = 4000, 1000, 50
_MOST_ROWS = 30
_REPORT = (
    "this is an error of sarathi-sim, not yours: please report it, with the command and the output "
    "of sarathi-sim --debug COMMAND ..."
)
_OURS = 70  # EX_SOFTWARE of sysexits.h


class Commands(TyperGroup):
    """Commands in groups, which end in a message on stderr and an exit code, whatever goes wrong.

    ``--debug`` before the command shows the traceback, too.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands panel by panel, each with the first sentence of its help."""
        width = max(map(len, self.commands))
        limit = formatter.width - width - 4
        panels: dict[Any, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = panels.setdefault(getattr(command, "rich_help_panel", None), [])
            panel.append((name.ljust(width), command.get_short_help_str(limit)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _short_usage_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _short_usage_errors():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _ClickException):
            raise
        except BaseException as error:
            if signals_received or isinstance(error, KeyboardInterrupt):
                raise _interrupted() from None
            if ctx.params.get("debug"):
                typer.echo(traceback.format_exc(), err=True, nl=False)
            message, code = _message(error)
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(code) from None


@contextmanager
def _short_usage_errors() -> Iterator[None]:
    """What is said of a wrong option repeats its value, which may be of any length."""
    try:
        yield
    except _ClickException as error:
        said: Any = error
        said.message = _shortened(said.message, _LONGEST_USAGE)
        raise


signals_received: list[int] = []
"""The signals that asked this process to end. They are kept because compiled code may raise an
error of its own instead of ours: numpy's comparison ends in a TypeError when it is interrupted."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGINT raise KeyboardInterrupt, except where they are ignored.

    So scratch folders are removed on the way out, and no policy of the user's is blamed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: object) -> NoReturn:
    signals_received.append(number)
    raise KeyboardInterrupt


def _interrupted() -> typer.Exit:
    number = signals_received[0] if signals_received else signal.SIGINT
    if number == signal.SIGINT:
        typer.echo("interrupted", err=True)
    return typer.Exit(128 + number)


def _message(error: BaseException) -> tuple[str, int]:
    """One shortened line per mistake, or one line in all for an unforeseen error; the exit code."""
    text, code = _told(error), 2
    if text is None:
        from sarathi_sim.policies.catalogue import error_line

        text, code = f"{error_line(error, '')}; {_REPORT}", _OURS
    lines = [_shortened(line) for line in text.splitlines()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines), code


def _told(error: BaseException) -> str | None:
    """The message of an error that the user can mend; None for one of ours."""
    from sarathi_sim.profiler.storage.strict import UserError
    from sarathi_sim.simulator.loop.simulation import SimulationError

    if isinstance(error, MemoryError):
        said = " ".join(str(error).split())
        return f"out of memory{': ' if said else ''}{said}"
    if isinstance(error, OSError) and error.strerror:  # a full disk, a missing file
        named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{named}{error.strerror}"
    return str(error) if isinstance(error, UserError | OSError | SimulationError) else None


def _shortened(line: str, longest: int = _LONGEST_LINE) -> str:
    if len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} ... {line[-half:]}"


def consoles() -> tuple[Console, Console]:
    """stdout and stderr. Tables are as wide as the terminal, or as COLUMNS says; else as they need
    to be."""
    from rich.console import Console

    def wide(console: Console) -> Console:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 10_000
        return console

    return wide(Console()), wide(Console(stderr=True))


def print_notes(notes: Iterable[str]) -> None:
    """Print each note of the deployments once, on stderr; of many that differ in numbers, one."""
    from sarathi_sim.experiments.content import thinned

    for note in thinned(notes):
        typer.echo(f"note: {note}", err=True)


def print_section(section: Section, *, err: bool = False, rest: str = "") -> None:
    """An answer, on stdout or stderr: its sentence, what was assumed, its tables, its warnings.

    The first table is whole, unless it is said where the ``rest`` of all tables is.
    """
    command = f"\nThis runs it:\n{section.command}\n" if section.command else ""
    typer.echo(f"{section.answer}\n{command}", err=err)
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
    from sarathi_sim.experiments.content import rich_table

    rows = grid.rows[:_MOST_ROWS] if rest else grid.rows
    headings = (grid.headings[: grid.text], grid.headings[grid.text :])
    table = rich_table(*headings, rows, title=grid.title)
    consoles()[err].print(table, markup=False, highlight=False)
    more = len(grid.rows) - len(rows)
    note = f"And {more} more: see {rest}. {grid.note}" if more else grid.note
    typer.echo(f"{note}\n" if note else "", err=err)


def print_assumed(lines: Sequence[str], *, err: bool = False) -> None:
    """The block "Assumed": a line a topic, aligned."""
    from sarathi_sim.experiments.content import topic_of

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


def finite(value: float | None) -> float | None:
    """An option's ``callback``: a bound alone lets NaN and infinity through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def print_table(
    text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], **about: Any
) -> None:
    """A table on stdout, of what was read rather than computed: cells stand as they are."""
    from sarathi_sim.experiments.content import rich_table

    table = rich_table(text, numbers, rows, **about)
    consoles()[0].print(table, markup=False, highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout; NaN and infinities are null."""
    from sarathi_sim.experiments.results import json_bytes

    typer.echo(json_bytes(value), nl=False)


def print_written(folder: Path | None, *, figures: bool = False, err: bool = False) -> None:
    """Say where the result is, if there is one."""
    if folder is not None:
        typer.echo(f"written: {folder}", err=err)
    if folder is not None and figures:
        typer.echo(f"figures: {folder / 'figures'}", err=err)


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
