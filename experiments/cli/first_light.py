"""The command for a first hour on a GPU node."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.common import finite


def first_light(
    out: Annotated[Path, typer.Option(help="Folder of everything it finds.")] = Path("first-light"),
    archive: Annotated[
        Path | None,
        typer.Option(help="File that holds all of it, too.  [default: --out with .zip behind it]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="ARCHIVE", help="Go on from this archive, on any machine."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Begin no step that could end later."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="The same steps on a tiny model; without a GPU, too."),
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on where the GPU is not as it should be.")
    ] = False,
) -> None:
    """Measure everything that a first hour on a GPU node allows.

    Needs torch. Every step is a process with a time limit. It checks the machine, the attention
    kernels, the bandwidth and the matrix units; then it profiles models, and compares them with the
    shipped kernels of this GPU.

    After an interruption, the same command continues. On another machine with the same GPU
    --resume continues from the archive, which is written after every step and has at most 16 MB.
    The exit code is 1 where steps failed or are left.

    \b
    Examples:
      sarathi-sim first-light
      sarathi-sim first-light --minutes 10
      sarathi-sim first-light --resume first-light.zip --out more
      sarathi-sim first-light --dry-run --out rehearsal
    """
    from profiler.first_light.hour import Options
    from profiler.first_light.hour import first_light as run

    options = Options(
        out=out,
        archive=archive or out.with_name(f"{out.name}.zip"),
        resume=resume,
        minutes=math.inf if minutes is None else minutes,
        rehearsal=dry_run,
        keep_going=keep_going,
    )
    if not run(options, typer.echo):
        raise typer.Exit(1)
