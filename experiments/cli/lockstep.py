"""The commands that compare the simulator with an engine: its decisions, and a server's run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    ConfigArgument,
    JsonOption,
    SetOption,
    consoles,
    print_json,
    print_notes,
    print_table,
)
from sarathi_sim.experiments.cli.score_runs import cell


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
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.run.decision_log import read_log, replay

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


def replay(
    config: ConfigArgument,
    requests: Annotated[
        Path,
        typer.Argument(metavar="REQUESTS", help="A server's run: JSON lines, one per request."),
    ],
    assignments: SetOption = None,
    ticks: Annotated[
        Path | None, typer.Option(help="The server's log of every second: a CSV file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate the requests of a real server, and compare.

    Every scenario of CONFIG runs with the requests of REQUESTS, at the times when they reached the
    server, instead of its own workload. Times to first token, times per output token and latencies
    are printed beside the measured ones. docs/real_servers.md describes the files.

    \b
    Examples:
      sarathi-sim replay docs/real_servers/rtx4090.yaml requests.jsonl --ticks timeseries.csv
      sarathi-sim replay my.yaml requests.jsonl --set kv_cache.num_blocks=2588 --json
    """
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.score.server_files import TICK_LABELS, read_server_run, read_ticks
    from sarathi_sim.experiments.score.server_run import COUNTS, NUMBERS, replay_server
    from sarathi_sim.simulator.views.metric_registry import known

    log = read_ticks(ticks) if ticks is not None else None
    found = replay_server(
        load_experiment(config, assignments or []), read_server_run(requests), log
    )
    if json:
        print_json(found)
        return
    scenarios = list(found["scenarios"].values())
    print_notes(note for one in scenarios for note in one["notes"])
    rows = []
    labels = {path: known(path).axis for path in NUMBERS}
    if log is not None:
        labels |= TICK_LABELS
    for path, label in labels.items():
        cells = [label, cell(found["measured"], path)]
        for one in scenarios:
            cells += [cell(one, path), cell(one["off_pct"], path, "{:+.1f} %")]
        rows.append(cells)
    for key in COUNTS:
        if any(key in one for one in scenarios):
            cells = [key.replace("_", " "), "not recorded"]
            rows.append(cells + [text for one in scenarios for text in (cell(one, key), "")])
    headings = ["measured", *(text for name in found["scenarios"] for text in (name, "off"))]
    print_table(("",), headings, rows)
