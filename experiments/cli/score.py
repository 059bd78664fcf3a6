"""The command that scores predictions on measured servers: score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sarathi_sim.experiments.cli.common import (
    JsonOption,
    QuietOption,
    SetOption,
    consoles,
    print_json,
    print_table,
    print_written,
)
from sarathi_sim.experiments.cli.score_runs import score_recorded
from sarathi_sim.experiments.cli.sweep import WorkersOption


def score(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Measured servers: CSV, a row a load.  With --config: runs, a row a request.",
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option(help="The deployment that served the runs: YAML, or a shipped score_*."),
    ] = None,
    assignments: SetOption = None,
    peer: Annotated[
        list[Path] | None,
        typer.Option(help="Another predictor's file (id, ttft_ms, tpot_ms).  Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions.csv, summary.json and figures.")
    ] = None,
    workers: WorkersOption = None,
    fit: Annotated[
        bool, typer.Option(help="Fit the host's constants, and score them on rows left out.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Predict measured servers, and print how far off that is.

    Each row of FILE is a server (model, GPU, engine, precision, layout) under a load (prompt and
    output lengths, concurrency) with its mean TTFT and TPOT. Rows that are not modelled are
    counted with the reason. Finished simulations are kept for the next time.

    Few constants of the engine's host were fitted to measured servers (data/host_time.yaml). A row
    of such a server gets those that were fitted without it. --fit fits them anew to FILE: each row
    is predicted from other servers' rows alone; then without its stack, its GPU, its model.

    With --config each FILE is a run with the times of every request: vLLM's benchmark_serving JSON,
    or LLMServingSim's JSON lines. Their distributions are compared, and what remains is divided.

    \b
    Examples:
      sarathi-sim score inferencex_dev.csv
      sarathi-sim score tp8_pp1_qps_*.json --config score_llama70b_a100_tp8 --out runs/tp8
      sarathi-sim score inferencex_dev.csv --fit --out runs/fit
      sarathi-sim score inferencex_dev.csv --peer aiconfigurator.csv --out runs/score --json
    """
    from sarathi_sim.experiments.config.errors import ConfigError
    from sarathi_sim.experiments.results import SCORE_FORMAT, check_replaceable

    if out is not None:
        check_replaceable(out, SCORE_FORMAT)
    if config is None:
        if recorded := next((path for path in files if path.suffix in (".json", ".jsonl")), None):
            raise ConfigError(f"{recorded}: a recorded run needs --config, what served it")
        if assignments:
            raise ConfigError("--set goes with --config")
        _score_rows(files, peer or [], out, workers, fit=fit, json=json, quiet=quiet)
        return
    if peer or fit:
        given = "--peer" if peer else "--fit"
        raise ConfigError(f"{given} goes with tables of servers, not with --config")
    score_recorded(files, config, assignments or [], out, json=json, quiet=quiet)


def _score_rows(
    files: list[Path],
    peer: list[Path],
    out: Path | None,
    workers: int | None,
    *,
    fit: bool,
    json: bool,
    quiet: bool,
) -> None:
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.figures.style import save, styled
    from sarathi_sim.experiments.results import SCORE_FORMAT, result_folder, write_summary
    from sarathi_sim.experiments.score.figure import (
        error_by_concurrency,
        measured_against_predicted,
    )
    from sarathi_sim.experiments.score.league import predictions_table, read_peer
    from sarathi_sim.experiments.score.scoring import host_time_yaml, read_rows, score_rows
    from sarathi_sim.experiments.sweeps.backends import local_backend
    from sarathi_sim.profiler.storage.files import write_whole

    rows, refused = read_rows(files)
    peers = {str(path): read_peer(path) for path in peer}
    with ProgressBar(consoles()[1], enabled=not (quiet or json)) as progress:
        say = partial(typer.echo, err=True)
        found = score_rows(str(files[0]), rows, local_backend(workers), progress, say, fit=fit)
    predictions, refused = found.best, {**refused, **found.refused}
    found = replace(found, refused=refused)
    content = found.content(peers)
    if out is not None:
        with result_folder(out, SCORE_FORMAT) as folder:
            write_summary(folder, SCORE_FORMAT, content)
            table = predictions_table(rows, predictions, refused)
            table.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")
            for name, shipped in (
                ("host_time.yaml", found.shipped),
                ("host_time_mixtures.yaml", found.mixtures),
            ):
                if shipped is not None:
                    write_whole(folder / name, host_time_yaml(shipped).encode())
            plain = [row for row in rows if not row.flags and row.id in predictions]
            if plain:
                (folder / "figures").mkdir()
                with styled():
                    for name, draw in (
                        ("measured_predicted", measured_against_predicted),
                        ("error_by_concurrency", error_by_concurrency),
                    ):
                        save(draw(plain, predictions), folder / "figures", name)
    if json:
        print_json(content)
    else:
        _print(content)
    print_written(out, err=True)


def _print(content: Mapping[str, Any]) -> None:
    for path, peer in content.get("peers", {}).items():
        rows = [
            [name, str(one["n"]), *_cells(one["ours"]), *_cells(one["theirs"])]
            for name, one in peer["groups"].items()
            if one["n"]
        ]
        numbers = ["rows", "TTFT", "TPOT", "TTFT there", "TPOT there"]
        print_table(("mean / median error (%)",), numbers, rows, title=f"beside {path}")
    for title, groups in {"predicted": content["groups"], **content["variants"]}.items():
        _print_groups(title.replace("_", " "), groups)
    typer.echo(f"{content['answered']} of {content['rows']} rows answered")
    typer.echo(f"host time: {content['constants']}")
    typer.echo(f"host time of mixtures of experts: {content['constants_of_mixtures']}")
    drawn, again = content["bands"]["draws"], content["bands"]["redrawn"]
    typer.echo(
        f"90 % bands: {drawn} joint draws of op errors, host time and the stack's error; "
        f"{again['rows']} rows with a full KV cache were simulated again under {again['draws']}"
    )
    for kind, models in (("host_time", ""), ("host_time_of_mixtures", " (mixtures of experts)")):
        for stack, host in content.get(kind, {}).items():
            listed = ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in host.items())
            typer.echo(f"  {stack}{models}: {listed}")
    for reason, count in content["refused"].items():
        typer.echo(f"  {count:5d} refused: {reason}")


def _print_groups(title: str, groups: Mapping[str, Any]) -> None:
    """All of what every row was measured for; of latency and throughput error and coverage."""
    from sarathi_sim.experiments.score.measured import METRICS, SCORED

    scored = [m for m in SCORED if any(one[m] for one in groups.values())]
    rows = []
    for name, one in groups.items():
        if one["n"]:
            cells = [name, str(one["n"])]
            for metric in scored:
                of = one[metric] or dict.fromkeys(("mape", "median", "p90", "bias", "coverage"))
                cells.append(f"{of['mape']:.1f} / {of['median']:.1f}" if one[metric] else "")
                if metric in METRICS:
                    cells += [f"{of['p90']:.1f}", f"{of['bias']:+.1f}"]
                cells.append("" if of["coverage"] is None else f"{of['coverage']:.0f}")
            rows.append(cells)
    if not rows:
        return
    numbers = ["rows"]
    for metric in scored:
        numbers.append(metric.upper() if metric in METRICS else metric)
        numbers += ["p90", "bias", "in band"] if metric in METRICS else ["in band"]
    print_table(("mean / median error (%)",), numbers, rows, title=title)


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [f"{one[m]['mape']:.1f} / {one[m]['median']:.1f}" for m in ("ttft", "tpot")]
