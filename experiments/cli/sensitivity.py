"""The command ``sensitivity``: what moves the capacity, or a run's metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.capacity import AddressOption, BackendOption
from experiments.cli.common import (
    ConfigArgument,
    JsonOption,
    QuietOption,
    ResultOption,
    SetOption,
    consoles,
    print_json,
    print_notes,
    print_written,
)
from experiments.cli.sweep import WorkersOption, backend_at, check_backend


def sensitivity(
    config: ConfigArgument,
    assignments: SetOption = None,
    by: Annotated[float, typer.Option(help="How far each factor is changed: 0.1 is 10 %.")] = 0.1,
    only: Annotated[str | None, typer.Option(help="Some factors, separated by commas.")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Of a run, such as ttft_s.p99.  [default: the capacity]")
    ] = None,
    replications: Annotated[
        int, typer.Option(min=1, max=100, help="Runs with seeds of their own.")
    ] = 3,
    out: ResultOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    workers: WorkersOption = None,
    backend: BackendOption = "local",
    address: AddressOption = None,
) -> None:
    """Find what moves the capacity most.

    Each op's time, the links' speed, the host's time, prompt lengths, output lengths and burstiness
    are changed one at a time. Without a section `capacity`, metrics of a run take its place.

    \b
    Examples:
      sarathi-sim sensitivity capacity_llama3_70b --out runs/sensitivity
      sarathi-sim sensitivity gpt3_pp --metrics makespan_s,tbt_s.p99 --replications 1
      sarathi-sim sensitivity my.yaml --by 0.2 --only 'attn_decode,link speed' --json
    """
    from experiments.capacity.folder import SENSITIVITY_FORMAT, probes_in, write_result
    from experiments.capacity.probing import Laboratory
    from experiments.capacity.sensitivity import read_sensitivity
    from experiments.capacity.sensitivity import sensitivity as found_by
    from experiments.capacity.tornado import answer_lines, sensitivity_files, sensitivity_tables
    from experiments.run.report import ProgressBar

    check_backend(backend, address, workers)
    asked = read_sensitivity(
        config,
        assignments or [],
        by=by,
        replications=replications,
        only=_words(only),
        metrics=_words(metrics),
    )
    folder = out or Path("runs") / f"{asked.draft.header.name}_sensitivity"
    where = backend_at(backend, address, workers)
    try:
        with (
            probes_in(folder, SENSITIVITY_FORMAT) as store,
            ProgressBar(consoles()[1], enabled=not quiet) as progress,
        ):
            say = partial(typer.echo, err=True)
            content = found_by(Laboratory(asked.section, store, where, progress, say), asked)
        write_result(folder, SENSITIVITY_FORMAT, sensitivity_files(asked, content))
    finally:
        where.close()
    if json:
        print_json(content)
    if quiet:
        return
    print_notes(note for option in asked.options for note in option.deployment.notes)
    for table in sensitivity_tables(content):
        (consoles()[1] if json else consoles()[0]).print(table)
    for line in (*answer_lines(content), *(f"note: {note}" for note in content["warnings"])):
        typer.echo(line, err=json)
    print_written(folder, figures=True, err=json)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]
