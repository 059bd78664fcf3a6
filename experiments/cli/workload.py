"""The command that says what is in a workload."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli.common import (
    JsonOption,
    SetOption,
    WorkloadOption,
    consoles,
    print_json,
    print_written,
)

if TYPE_CHECKING:
    from experiments.config.requests import Traffic


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
    from experiments.config.errors import ConfigError
    from experiments.results import WORKLOAD_FORMAT, check_replaceable, result_folder, write_summary
    from simulator.load.describe import describe_workload

    if out is not None:
        check_replaceable(out, WORKLOAD_FORMAT)
    if (what is None) == (workload is None):
        raise ConfigError("FILE and --workload: give one of them")
    found = _requests(str(what or workload), assignments or [], column or [])
    described = {
        name: {**describe_workload(requests, clients), "left_out": requests.left_out}
        for name, (requests, clients) in found.items()
    }
    if out is not None:
        from experiments.figures.style import save, styled
        from experiments.figures.workload_figure import workload_figure

        with result_folder(out, WORKLOAD_FORMAT) as folder:
            write_summary(folder, WORKLOAD_FORMAT, {"workloads": described})
            (folder / "figures").mkdir()
            for name, (requests, clients) in found.items():
                with styled():
                    drawn = workload_figure(requests, name, clients)
                    save(drawn, folder / "figures", re.sub("[:@?~]", "-", name))
    if json:
        print_json(described)
    for name, numbers in described.items():
        _print(name, numbers, err=json)
    print_written(out, err=json)


def _requests(
    what: str, assignments: list[str], columns: list[str]
) -> dict[str, tuple[Traffic, int | None]]:
    """The requests of lengths in a word, of a trace, or of each scenario of a configuration that
    has its own; and the clients of a closed loop."""
    from experiments.config.errors import ConfigError
    from experiments.config.loading import load_experiment
    from experiments.config.requests import build_requests
    from experiments.run.traffic import LONGEST, in_a_word, is_trace, or_forms, requests_of

    if in_a_word(what):
        if assignments or columns:
            raise ConfigError(f"--set, --column: must be left out: {what} has neither")
        requests = requests_of(what, arrivals={"kind": "at_once"})
        return {what: (requests, None)}
    if is_trace(what):
        return {Path(what).stem: (_of_trace(what, columns, assignments), None)}
    if columns:
        raise ConfigError("--column: must be left out: a configuration has lengths.columns")
    experiment = or_forms(lambda text: load_experiment(text, assignments), what)
    found: dict[str, tuple[Traffic, int | None]] = {}
    seen: dict[str, str] = {}
    for name, scenario in experiment.scenarios.items():
        length = scenario.cluster.max_length or LONGEST
        key = f"{scenario.seed} {length} {scenario.workload.model_dump_json()}"
        if key not in seen:
            seen[key] = name
            requests = build_requests(scenario, length, experiment.sources[name])
            found[name] = requests, getattr(scenario.workload.arrivals, "clients", None)
    return found


def _of_trace(path: str, columns: list[str], assignments: list[str]) -> Traffic:
    from experiments.config.errors import ConfigError
    from experiments.config.loading import load_experiment
    from experiments.config.requests import Traffic, trace_of
    from simulator.load.trace_columns import NAMES
    from simulator.load.workload import at_once, make_requests

    named = dict(text.partition("=")[::2] for text in columns)
    for meaning, name in named.items():
        if meaning not in NAMES or not name:
            raise ConfigError(
                f"--column {meaning}={name}: must be {' or '.join(NAMES)}, = and a name"
            )
    for text in assignments:
        if not text.startswith(("workload.lengths.", "workload.requests=")):
            raise ConfigError(f"--set {text}: a trace has workload.lengths and workload.requests")
    lengths = {"kind": "trace", "path": path, "columns": named}
    # A scenario needs these keys, its requests do not.
    rest = {"model": "any", "device": "any", "policy": {"name": "orca"}}
    experiment = load_experiment({**rest, "workload": {"lengths": lengths}}, assignments)
    ((name, scenario),) = experiment.scenarios.items()
    try:
        trace = trace_of(scenario, experiment.sources[name])
    except ConfigError as error:  # which names the file
        said = str(error).removeprefix("configuration: workload.lengths.path: ")
        raise ConfigError(said) from None
    if trace is None:
        raise ConfigError("--set workload.lengths.kind: must be trace")
    arrival_s = at_once(len(trace)) if trace.arrival_s is None else trace.arrival_s
    requests = Traffic(
        make_requests(
            arrival_s,
            trace.prompt,
            trace.output,
            max_length=1,
            declare_exact=True,
            user=trace.user,
            prefix=trace.prefix,
        )
    )
    requests.left_out = trace.left_out
    return requests


def _print(name: str, numbers: dict[str, Any], *, err: bool) -> None:
    from experiments.run.rich_table import rich_table
    from simulator.load.describe import without_times

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
