"""The command that compares our scheduler with an engine's recorded decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.common import JsonOption, consoles, print_json


def lockstep(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Recorded decisions.")],
    json: JsonOption = False,
) -> None:
    """Compare our scheduler with an engine's recorded decisions.

    The arrivals and returns of each log are fed to our scheduler. Every decision is compared: the
    batch and its order, computed tokens, preempted requests, free blocks, running and waiting
    requests. If one differs, the exit code is 1 and both sides of the first difference are printed.

    \b
    Examples:
      sarathi-sim lockstep tests/data/vllm/*.jsonl.gz
      sarathi-sim lockstep base.jsonl.gz --json
    """
    from experiments.run.decision_log import read_log, replay
    from experiments.run.report import ProgressBar

    _, err = consoles()
    read = [read_log(path) for path in logs]
    found = {}
    with ProgressBar(err, enabled=not json) as progress:
        for number, (path, log) in enumerate(zip(logs, read, strict=True)):
            name = log.name if sum(each.name == log.name for each in read) == 1 else str(path)
            found[name] = replay(log)
            progress("logs", number + 1, len(read))
    if json:
        print_json({"logs": {name: vars(one) for name, one in found.items()}})
    else:
        width = max(map(len, found))
        for name, one in found.items():
            typer.echo(f"{name:{width}s} {one.identical:7,} of {one.decisions:7,} identical")
            if one.first_difference is not None:
                typer.echo(f"  first difference: {one.first_difference}")
        total = sum(one.decisions for one in found.values())
        same = sum(one.identical for one in found.values())
        typer.echo(f"{len(found)} logs, {same:,} of {total:,} decisions identical")
    if any(one.first_difference is not None for one in found.values()):
        raise typer.Exit(1)
