"""The commands that set the simulator beside an engine: score, replay, lockstep, validate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    ConfigArgument,
    FiguresOption,
    JsonOption,
    ProfilesOption,
    QuietOption,
    ResultOption,
    SetOption,
    consoles,
    finite,
    print_json,
    print_notes,
    print_table,
    print_written,
)
from sarathi_sim.experiments.cli.sweep import WorkersOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import Experiment
    from sarathi_sim.experiments.validate.session import Cell
    from sarathi_sim.experiments.validate.summary import Comparisons

_SMALLEST_S = 0.005
"""Parts of the latency below this are not printed."""


def score_recorded(
    files: Sequence[Path],
    config: str,
    assignments: Sequence[str],
    out: Path | None,
    *,
    json: bool,
    quiet: bool,
) -> None:
    """Score runs under a configuration; print, and write ``summary.json``, ``requests.csv`` and a
    figure a run to ``out``."""
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.figures.style import save, styled
    from sarathi_sim.experiments.results import SCORE_FORMAT, result_folder, write_summary
    from sarathi_sim.experiments.score.figure import distributions
    from sarathi_sim.experiments.score.runs import cases_of, content_of, requests_table, score_runs

    cases = cases_of(load_experiment(config, assignments), files)
    with ProgressBar(consoles()[1], enabled=not (quiet or json)) as progress:
        scored = score_runs(cases, progress)
    content = content_of(scored)
    if out is not None:
        with result_folder(out, SCORE_FORMAT) as folder, styled():
            write_summary(folder, SCORE_FORMAT, content)
            table = requests_table(scored)
            table.to_csv(folder / "requests.csv", index=False, float_format="%.6g")
            (folder / "figures").mkdir()
            for each in scored:
                save(distributions(each), folder / "figures", each.case.file_name)
    if json:
        print_json(content)
    else:
        print_notes(note for each in scored for note in each.case.deployment.remarks)
        _print_recorded(content["runs"])
    print_written(out, figures=out is not None, err=True)


def _print_recorded(runs: Mapping[str, Any]) -> None:
    from sarathi_sim.experiments.run.compare import part_label
    from sarathi_sim.experiments.score.figure import LABELS
    from sarathi_sim.experiments.score.server_run import NUMBERS
    from sarathi_sim.simulator.views.metric_registry import known

    lacking, groups = [], []
    for name, run in runs.items():
        variants = {key: label for key, label in LABELS.items() if "off_pct" in run.get(key, {})}
        rows = [
            [
                known(path).axis,
                cell(run["measured"], path),
                *(cell(run[key]["off_pct"], path, "{:+.1f}") for key in variants),
            ]
            for path in NUMBERS
        ]
        headings = ["measured", *(f"{label} (off, %)" for label in variants.values())]
        title = f"{name} ({run['scenario']}, {run['requests']} requests)"
        print_table((title,), headings, rows)
        remains = run["remains"]
        parts = ", ".join(
            f"{part_label('mean_latency', part)} {value:+.3f}"
            for part, value in sorted(remains["parts"].items(), key=lambda one: -abs(one[1]))
            if abs(value) >= _SMALLEST_S
        )
        keys = ("latency_s", "host", "frontend", "first_token", "later_tokens")
        lacking.append([name, parts, *(f"{remains[key]:+.3f}" for key in keys)])
        for group in run["by_batch"]:
            times = [f"{1e3 * group[f'{k}_s']:.1f}" for k in ("measured", "zero", "fitted")]
            groups.append([name, str(group["requests"]), f"{group['running']:.0f}", *times])
    what = ["in all", "host, fitted", "frontend, fitted", "first token", "later tokens"]
    title = "What the mean latency lacks without host time (s)"
    print_table(("", "of which the host's"), what, lacking, title=title)
    columns = ("requests", "running", "TPOT measured (ms)", "no host time", "fitted")
    print_table(("by requests running beside",), columns, groups)


def cell(numbers: Mapping[str, Any], path: str, form: str = "{:.4g}") -> str:
    """The number at ``KEY`` or ``KEY.STATISTIC``; a dash where there is none."""
    key, _, statistic = path.partition(".")
    value = numbers.get(key)
    value = value[statistic] if statistic and value is not None else value
    return "-" if value is None else form.format(value)


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
    from sarathi_sim.experiments.score.errors import predictions_table, read_peer
    from sarathi_sim.experiments.score.figure import (
        error_by_concurrency,
        measured_against_predicted,
    )
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
    from sarathi_sim.experiments.score.server_run import (
        COUNTS,
        NUMBERS,
        TICK_LABELS,
        read_server_run,
        read_ticks,
        replay_server,
    )
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


ConfigOption = Annotated[
    str,
    typer.Argument(
        metavar="[CONFIG]",
        help="A YAML file, or the name of a shipped one.  [default: validate_cpu, or "
        "validate_vllm with --engine vllm]",
    ),
]
EngineOption = Annotated[
    Literal["torch", "vllm"],
    typer.Option(help="Our engine in torch, or real vLLM on the CPU in a Python of its own."),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=1,
        callback=finite,
        help="End the run after so many seconds without a sign of life.  [default: 30, with "
        "--engine vllm 300]",
    ),
]


def validate(
    config: ConfigOption = "",
    engine: EngineOption = "torch",
    assignments: SetOption = None,
    out: ResultOption = None,
    realtime: Annotated[
        bool,
        typer.Option(
            "--realtime",
            help="Run the engine with real-time priority (root, Linux). It takes the cores "
            "from all other programs.",
        ),
    ] = False,
    timeout: TimeoutOption = None,
    profiles: ProfilesOption = PROFILES,
    quiet: QuietOption = False,
    figures: FiguresOption = True,
) -> None:
    """Run a real engine beside the simulator.

    It needs torch, or vLLM. The report says whether both form the same batches, how well each
    iteration's time is predicted, and how far whole runs differ: from times measured in the engine,
    and from this device's bundle in PROFILES, if it has one. On a busy machine it claims nothing
    about times. The exit code is 1 if batches differ.

    \b
    Examples:
      sarathi-sim validate validate_cpu
      sarathi-sim validate validate_cpu --set validation.repeats=2 --out runs/quick
      sarathi-sim validate --engine vllm
      sarathi-sim validate validate_gpu --set model=llama-3-8b
      sudo sarathi-sim validate validate_cpu --realtime
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.results import VALIDATION_FORMAT, check_replaceable, result_folder
    from sarathi_sim.experiments.validate.session import make_cells
    from sarathi_sim.experiments.validate.summary import table, verdict

    stdout, stderr = consoles()
    shipped = {"torch": "validate_cpu", "vllm": "validate_vllm"}
    experiment = load_experiment(config or shipped[engine], assignments or [])
    _check_ratios(experiment)
    folder = out or Path("runs") / experiment.name
    cells = make_cells(experiment)
    check_replaceable(folder, VALIDATION_FORMAT)
    _check_engine(engine, cells, realtime)

    def say(line: str) -> None:
        if not quiet:
            stderr.print(line, markup=False, highlight=False, soft_wrap=True)

    if realtime:
        say("warning: --realtime stops the machine's other programs during the run")
    with (
        result_folder(folder, VALIDATION_FORMAT) as scratch,
        ProgressBar(stderr, enabled=not quiet) as progress,
    ):
        if engine == "vllm":
            result = _measure_vllm(experiment, cells, timeout or 300, progress, scratch)
        else:
            result, outcomes = _measure(
                experiment, cells, realtime, timeout or 30, profiles, progress, say
            )
            _write(result, outcomes, scratch)
            if figures:
                _draw(outcomes, scratch / "figures")
    if not quiet:
        stdout.print(table(result))
        for line in verdict(result):
            typer.echo(line)
        print_written(folder, figures=figures and engine == "torch")
    if any(cell["parity"] < 1 for cell in result["cells"].values()):
        raise typer.Exit(1)


def _check_ratios(experiment: Experiment) -> None:
    """Raises ConfigError where ``compare`` asks for a metric that an engine's runs do not have."""
    from sarathi_sim.experiments.config.errors import ConfigError
    from sarathi_sim.experiments.validate.summary import COMPARABLE

    for name, ratio in experiment.compare.items():
        if ratio.metric not in COMPARABLE:
            raise ConfigError(
                f"{experiment.file}: compare.{name}.metric: value {ratio.metric!r}: "
                f"a validation compares {' or '.join(COMPARABLE)}"
            )


def _measure(
    experiment: Experiment,
    cells: list[Cell],
    realtime: bool,
    timeout_s: float,
    profiles: Path,
    progress: ProgressBar,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Comparisons]:
    """Run the engine, and compare; returns the content of ``validation.json`` and the comparisons.

    Raises ProfileError where the engine cannot run this.
    """
    from sarathi_sim.experiments.results import to_json
    from sarathi_sim.experiments.validate.session import run_sessions
    from sarathi_sim.experiments.validate.summary import evaluate_all, report

    sessions = run_sessions(
        cells,
        experiment.validation,
        realtime=realtime,
        timeout_s=timeout_s,
        progress=progress,
        say=say,
        profiles=profiles,
    )
    outcomes = evaluate_all(sessions, progress)
    result: dict[str, Any] = to_json(report(experiment, sessions, outcomes))
    result["realtime"] = realtime
    return result, outcomes


def _measure_vllm(
    experiment: Experiment,
    cells: list[Cell],
    timeout_s: float,
    progress: ProgressBar,
    folder: Path,
) -> dict[str, Any]:
    """Run vLLM, compare and write; returns the content of ``validation.json``."""
    from sarathi_sim.experiments.results import ITERATIONS, VALIDATION, json_bytes, to_json
    from sarathi_sim.experiments.validate.vllm_report import evaluate_all, iterations, report
    from sarathi_sim.experiments.validate.vllm_session import run_session

    session = run_session(cells, experiment.validation, timeout_s, progress)
    outcomes = evaluate_all(session, progress)
    result: dict[str, Any] = to_json(report(experiment, session, outcomes))
    (folder / VALIDATION).write_bytes(json_bytes(result))
    iterations(outcomes).to_parquet(folder / ITERATIONS, index=False)
    return result


def _write(result: Mapping[str, Any], outcomes: Comparisons, folder: Path) -> None:
    from sarathi_sim.experiments.results import ITERATIONS, VALIDATION, json_bytes
    from sarathi_sim.experiments.validate.summary import iterations

    (folder / VALIDATION).write_bytes(json_bytes(result))
    iterations(outcomes).to_parquet(folder / ITERATIONS, index=False)


def _check_engine(engine: str, cells: list[Cell], realtime: bool) -> None:
    """Raises ConfigError, before the work, where the engine cannot run."""
    import importlib.util
    import os

    from sarathi_sim.experiments.config.errors import ConfigError

    if engine == "vllm":
        from sarathi_sim.experiments.validate.vllm_session import check_cells, find_python

        if realtime:
            raise ConfigError("--realtime: only for the engine in torch; vLLM's clock is CPU time")
        check_cells(cells)
        find_python()
        return
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the engine needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        )
    if realtime and (not hasattr(os, "sched_setscheduler") or os.geteuid() != 0):
        raise ConfigError("--realtime: needs Linux, and root")


def _draw(outcomes: Comparisons, folder: Path) -> None:
    """The middle repeat of every cell."""
    from sarathi_sim.experiments.figures.style import save, styled
    from sarathi_sim.experiments.validate.summary import iterations_figure, timelines_figure

    folder.mkdir()
    middle = {
        name: sorted(repeats, key=lambda o: o.measured.makespan_s)[len(repeats) // 2]
        for name, repeats in outcomes.items()
    }
    pipelines = {n: o for n, o in middle.items() if len(o.measured.bubble_by_stage_s) > 1}
    with styled():
        save(iterations_figure(middle, "calibrated"), folder, "iterations")
        if pipelines:
            save(timelines_figure(pipelines, "calibrated"), folder, "timelines")
