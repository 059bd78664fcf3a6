"""The commands that answer how much load, and on what: capacity."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

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
from experiments.cli.sweep import Where, WorkersOption, backend_at, check_backend

BackendOption = Annotated[Where, typer.Option(help="Local processes, or a Dask cluster.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Address of the Dask scheduler, such as tcp://127.0.0.1:8786.")
]
BandsOption = Annotated[
    bool, typer.Option("--bands/--no-bands", help="Also search under errors of the op times.")
]


def capacity(
    config: ConfigArgument,
    assignments: SetOption = None,
    out: ResultOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    workers: WorkersOption = None,
    backend: BackendOption = "local",
    address: AddressOption = None,
    bands: BandsOption = True,
) -> None:
    """Find the highest load under which the SLO holds, for every deployment of CONFIG.

    The section `capacity` of CONFIG states the SLO, and the space of deployments. Finished probes
    stay in the folder: the same command goes on where it was stopped.

    \b
    Examples:
      sarathi-sim capacity capacity_llama3_70b
      sarathi-sim capacity capacity_llama3_70b --set 'capacity.slo=p99 ttft 1s, p99 tbt 100ms'
      sarathi-sim capacity my.yaml --out runs/capacity --json | jq '.deployments[].capacity'
    """
    from experiments.capacity.asked import answered, read_question, result_files
    from experiments.capacity.folder import CAPACITY_FORMAT, probes_in, write_result
    from experiments.capacity.probing import Laboratory
    from experiments.capacity.written import capacity_table, reasons
    from experiments.run.report import ProgressBar

    check_backend(backend, address, workers)
    draft, section, options = read_question(config, assignments or [])
    folder = out or Path("runs") / draft.header.name
    where = backend_at(backend, address, workers)
    try:
        with (
            probes_in(folder, CAPACITY_FORMAT) as store,
            ProgressBar(consoles()[1], enabled=not quiet) as progress,
        ):
            say = partial(typer.echo, err=True)
            lab = Laboratory(section, store, where, progress, say)
            content = answered(lab, draft, options, bands)
        write_result(folder, CAPACITY_FORMAT, result_files(draft, section, content))
    finally:
        where.close()
    if json:
        print_json(content)
    if quiet:
        return
    print_notes(note for option in options for note in option.deployment.notes)
    console = consoles()[1] if json else consoles()[0]
    console.print(capacity_table(content["deployments"], section))
    for line in (*reasons(content["deployments"]), *content["warnings"]):
        typer.echo(line, err=json)
    print_written(folder, figures=True, err=json)
