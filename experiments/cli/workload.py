"""The command that says what is in a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sarathi_sim.experiments.cli.common import (
    JsonOption,
    SetOption,
    WorkloadOption,
    consoles,
    print_json,
    print_written,
)


def workload(
    what: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A trace (CSV, JSON), or a configuration."),
    ] = None,
    workload: WorkloadOption = None,
    assignments: SetOption = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEANING=NAME",
            help="A column of a trace with a name of its own: arrival, prompt, output, user, "
            "session or turn. May be repeated.",
        ),
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the numbers and a figure to this folder.")
    ] = None,
) -> None:
    """Say what is in a workload.

    Prints lengths, rates, burstiness and how much of the prompts is shared. FILE is a trace as
    `workload.lengths.path` takes it, or a configuration, of which the requests are drawn. In its
    place --workload takes what it takes elsewhere.

    \b
    Examples:
      sarathi-sim workload trace.csv
      sarathi-sim workload log.jsonl --column prompt=tokens_in --column output=tokens_out
      sarathi-sim workload failures.csv --set workload.lengths.skip_empty=true
      sarathi-sim workload shared_prefixes --out runs/workload
      sarathi-sim workload --workload 1024:256~0.5 --json
    """
    from sarathi_sim.experiments.config.errors import ConfigError
    from sarathi_sim.experiments.run.traffic import describe

    if (what is None) == (workload is None):
        raise ConfigError("FILE and --workload: give one of them")
    columns = dict(text.partition("=")[::2] for text in column or [])
    described = describe(str(what or workload), assignments or [], columns, out)
    if json:
        print_json(described)
    for name, numbers in described.items():
        _print(name, numbers, err=json)
    print_written(out, err=json)


def _print(name: str, numbers: dict[str, Any], *, err: bool) -> None:
    from sarathi_sim.experiments.content import rich_table
    from sarathi_sim.simulator.load.describe import without_times

    kinds = ("mean", "p50", "p90", "p99", "max", "sum")
    rows = [
        (what, *(f"{numbers[f'{what}_tokens'][kind]:,.0f}" for kind in kinds))
        for what in ("prompt", "output", "total")
    ]
    said = [f"{numbers['requests']:,} requests", f"P:D {numbers['pd_ratio']:.3g}"]
    if numbers["left_out"]:
        said.append(f"{numbers['left_out']:,} without prompt or output tokens left out")
    if numbers["users"] > 1:
        said.append(f"{numbers['users']:,} users")
    if numbers["rate"] is None:
        said.append(without_times(numbers["clients"]))
    else:
        said.append(f"{numbers['rate']:.3g} a second over {numbers['duration_s']:,.0f} s")
        said.append(f"{numbers['peak_rate']:.3g} in the busiest minute")
        said.append(f"variation of gaps {numbers['gap_cv']:.2f} (Poisson: 1)")
    said.append(f"{numbers['shared']:.1%} of prompt tokens shared")
    table = rich_table(("tokens",), kinds, rows)
    console = consoles()[int(err)]
    console.print(f"{name}: {', '.join(said)}", markup=False, highlight=False)
    console.print(table)
