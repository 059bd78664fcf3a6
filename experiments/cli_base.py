"""What all commands share: consoles, and user errors as one message with exit code 2."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.deployment import Deployment

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a value; may be repeated."),
]


GROUPS = {
    "Simulate": ("check", "run", "plot", "compare", "validate", "bench"),
    "Sweep": ("plan", "sweep"),
    "Profile": (
        *("make-bundle", "import", "profile", "profile-check", "profile-diff"),
        *("fit", "accuracy", "calibrate"),
    ),
    "Data": ("models", "devices", "policies"),
    "Paper": ("reproduce", "advise"),
}
"""The commands by what they are about, in the order of ``--help``."""


class Commands(TyperGroup):
    """Commands in groups, whose user errors end in one message on stderr and exit code 2."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands group by group, each with the first sentence of its help."""
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                limit = formatter.width - width - 4
                rows = [
                    (name.ljust(width), self.commands[name].get_short_help_str(limit))
                    for name in names
                ]
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if not _is_user_error(error):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, BrokenPipeError):
        return False
    from experiments.errors import ConfigError

    # A full disk, a folder one may not write to, a file that is not there.
    if isinstance(error, ConfigError | OSError):
        return True
    from profiler.schema import BundleError
    from profiler.strict import SpecError
    from simulator.capacity import CapacityError
    from simulator.simulation import SimulationError

    return isinstance(error, SpecError | BundleError | CapacityError | SimulationError)


def consoles() -> tuple[Console, Console]:
    """stdout and stderr. Away from a terminal tables are as wide as they need to be."""
    from rich.console import Console

    def wide(console: Console) -> Console:
        if not console.is_terminal:
            console.width = 10_000
        return console

    return wide(Console()), wide(Console(stderr=True))


def print_notes(deployments: Iterable[Deployment]) -> None:
    """What the user should know, on stderr: each note once."""
    for note in dict.fromkeys(note for d in deployments for note in d.notes):
        typer.echo(f"note: {note}", err=True)


def finite(value: float | None) -> float | None:
    """An option's ``callback``: a bound alone lets NaN and infinity through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def check_writable(file: Path) -> None:
    """Raises OSError, before the work rather than after it, where ``file`` cannot be written."""
    existed = file.exists()
    with file.open("a"):
        pass
    if not existed:
        file.unlink()


def report_written(console: Console, folder: Path, figures: str | None) -> None:
    """Say where the result is."""
    console.print(f"written: {folder}", highlight=False, markup=False, soft_wrap=True)
    if figures is not None:
        console.print(f"figures: {folder / figures}", highlight=False, markup=False, soft_wrap=True)
