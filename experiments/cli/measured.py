"""The commands that set what was measured beside what is simulated: score, replay, lockstep,
validate, accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    ConfigArgument,
    DatasetsOption,
    FiguresOption,
    JsonOption,
    ProfilesOption,
    QuietOption,
    ResultOption,
    SetOption,
    consoles,
    finite,
    print_json,
    print_section,
    print_table,
    print_written,
)
from sarathi_sim.experiments.cli.sweep import WorkersOption

if TYPE_CHECKING:
    from sarathi_sim.experiments.content import Section
    from sarathi_sim.experiments.lab.fit.accuracy import Score, Study


def _print(content: Mapping[str, Any], section: Section, *, json: bool) -> None:
    if json:
        print_json({**content, **section.words()})
    else:
        print_section(section)


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
    lengths: Annotated[
        Path | None,
        typer.Option(help="FILE is a table of MLPerf's runs; the folder of its lengths_MODEL.csv."),
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option(help="How servers with prefill and decode pools were started: CSV, by id."),
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

    With --lengths FILE has MLPerf's audited runs of LLMs (docs/mlperf.md): the capacity at their
    P99 limits is predicted, and latencies at their rate.

    Of servers with prefill and decode on separate workers --launch says how each was started
    (docs/pools.md); without it they are not answered.

    With --config each FILE has runs with the times of every request, as vLLM, SGLang, AIPerf,
    guidellm and LLMServingSim save them (docs/real_servers.md). Their distributions are compared,
    and what remains is divided.

    \b
    Examples:
      sarathi-sim score inferencex_dev.csv
      sarathi-sim score tp8_pp1_qps_*.json --config score_llama70b_a100_tp8 --out runs/tp8
      sarathi-sim score inferencex_dev.csv --fit --out runs/fit
      sarathi-sim score inferencex_dev.csv --peer aiconfigurator.csv --out runs/score --json
      sarathi-sim score mlperf_dev.csv --lengths mlperf --out runs/mlperf
      sarathi-sim score inferencex_dev.csv --launch disagg_recipes.csv --out runs/pools
    """
    from sarathi_sim.experiments.measured.benchmarks import SUFFIXES
    from sarathi_sim.profiler.storage.strict import UserError

    recorded = next((path for path in files if path.suffix in SUFFIXES), None)
    for wrong, problem in (
        (config is None and recorded, f"{recorded}: a recorded run needs --config, what served it"),
        (config is None and assignments, "--set goes with --config"),
        (config and peer, "--peer goes with tables of servers, not with --config"),
        (config and fit, "--fit goes with tables of servers, not with --config"),
        (launch and (config or lengths), "--launch goes with tables of servers alone"),
        (lengths and (config or peer), "--lengths goes with MLPerf's tables alone"),
    ):
        if wrong:
            raise UserError(problem)
    inputs = (files, config, assignments or [], peer or [], lengths, launch)
    _score(*inputs, out, workers, fit, json, quiet)


def _score(
    files: list[Path],
    config: str | None,
    assignments: list[str],
    peers: list[Path],
    lengths: Path | None,
    launch: Path | None,
    out: Path | None,
    workers: int | None,
    fit: bool,
    json: bool,
    quiet: bool,
) -> None:
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.measured.answers import score_answer
    from sarathi_sim.experiments.measured.mlperf_score import ScoredMlperf, score_mlperf
    from sarathi_sim.experiments.measured.recorded import ScoredRuns, cases_of, score_runs
    from sarathi_sim.experiments.measured.scoring import ScoredRows, score_servers
    from sarathi_sim.experiments.results import (
        SCORE_FORMAT,
        check_replaceable,
        result_folder,
        write_summary,
    )
    from sarathi_sim.experiments.sweeps.backends import local_backend

    if out is not None:
        check_replaceable(out, SCORE_FORMAT)
    found: ScoredRows | ScoredRuns | ScoredMlperf
    with ProgressBar(consoles()[1], enabled=not (quiet or json)) as progress:
        if config is not None:
            found = score_runs(cases_of(load_experiment(config, assignments), files), progress)
        else:
            say, backend = partial(typer.echo, err=True), local_backend(workers)
            if lengths is not None:
                found = score_mlperf(files, lengths, backend, progress, say, fit=fit)
            else:
                found = score_servers(files, peers, backend, progress, say, fit=fit, launch=launch)
    content = found.content()
    section = score_answer(content)
    if out is not None:
        from sarathi_sim.experiments.measured.pictures import draw_score

        with result_folder(out, SCORE_FORMAT) as folder:
            write_summary(folder, SCORE_FORMAT, content | section.words())
            found.write(folder)
            draw_score(found, folder / "figures")
    _print(content, section, json=json)
    print_written(out, figures=config is not None, err=True)


def tune(
    files: Annotated[
        list[Path], typer.Argument(metavar="BENCH...", help="Runs, as a load tool saves them.")
    ],
    config: Annotated[str, typer.Option(help="The deployment that served them: a YAML file.")],
    out: Annotated[Path, typer.Option(help="The calibration: a YAML file.")],
    assignments: SetOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Calibrate the simulation with runs of your own server.

    Each BENCH holds one run or several, of vLLM's bench serve, SGLang's bench_serving, AIPerf,
    GenAI-Perf, guidellm or LLMServingSim (docs/real_servers.md). The engine's constants, and
    factors on the times of kernels and messages, are fitted to them, and shrunk towards what the
    engine has elsewhere.
    Other configurations of the server take them by: calibration: tuned.yaml

    \b
    Examples:
      sarathi-sim tune bench.json --config server.yaml --out tuned.yaml
      sarathi-sim tune rate4.json burst.json --config server.yaml --out tuned.yaml --json
      sarathi-sim capacity server.yaml --set calibration=tuned.yaml
    """
    from sarathi_sim.experiments.api import tune as tuned
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.measured.own_server import tune_answer

    with ProgressBar(consoles()[1], enabled=not (quiet or json)) as progress:
        content = tuned(files, config, assignments or [], out=out, progress=progress)
    if json or not quiet:
        _print(content, tune_answer(content), json=json)
    print_written(out, err=True)


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
    from sarathi_sim.experiments.measured.answers import lockstep_answer
    from sarathi_sim.experiments.run.decision_log import read_log
    from sarathi_sim.experiments.run.decision_log import replay as replayed

    read = [read_log(path) for path in logs]
    found = {}
    with ProgressBar(consoles()[1], enabled=not json) as progress:
        for number, (path, log) in enumerate(zip(logs, read, strict=True)):
            name = log.name if sum(each.name == log.name for each in read) == 1 else str(path)
            found[name] = replayed(log)
            progress("logs", number + 1, len(read))
    content = {"logs": {name: vars(one) for name, one in found.items()}}
    _print(content, lockstep_answer(found), json=json)
    if any(one.first_difference is not None for one in found.values()):
        raise typer.Exit(1)


def replay(
    config: ConfigArgument,
    requests: Annotated[
        Path,
        typer.Argument(metavar="REQUESTS", help="A server's run, as a load tool saves it."),
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
      sarathi-sim replay score_llama8b_rtx4090 requests.jsonl --ticks timeseries.csv
      sarathi-sim replay my.yaml requests.jsonl --set kv_cache.num_blocks=2588 --json
    """
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.measured.answers import replay_answer
    from sarathi_sim.experiments.measured.recorded import read_server_run, read_ticks, replay_server

    log = read_ticks(ticks) if ticks is not None else None
    experiment = load_experiment(config, assignments or [])
    found = replay_server(experiment, read_server_run(requests), log)
    _print(found, replay_answer(found, requests.name), json=json)


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
    from sarathi_sim.experiments.measured.answers import validation_answer
    from sarathi_sim.experiments.measured.pictures import draw_validation
    from sarathi_sim.experiments.measured.session import make_cells
    from sarathi_sim.experiments.measured.validation import check_engine, iterations, measure
    from sarathi_sim.experiments.results import (
        ITERATIONS,
        VALIDATION,
        VALIDATION_FORMAT,
        check_replaceable,
        json_bytes,
        result_folder,
    )

    stderr = consoles()[1]
    shipped = "validate_vllm" if engine == "vllm" else "validate_cpu"
    experiment = load_experiment(config or shipped, assignments or [])
    folder = out or Path("runs") / experiment.name
    cells = make_cells(experiment)
    check_replaceable(folder, VALIDATION_FORMAT)
    check_engine(engine, experiment, cells, realtime=realtime)

    def say(line: str) -> None:
        if not quiet:
            stderr.print(line, markup=False, highlight=False, soft_wrap=True)

    if realtime:
        say("warning: --realtime stops the machine's other programs during the run")
    with (
        result_folder(folder, VALIDATION_FORMAT) as scratch,
        ProgressBar(stderr, enabled=not quiet) as progress,
    ):
        result, outcomes = measure(
            *(engine, experiment, cells, timeout, profiles, progress, say), realtime=realtime
        )
        section = validation_answer(result)
        (scratch / VALIDATION).write_bytes(json_bytes(result | section.words()))
        iterations(outcomes).to_parquet(scratch / ITERATIONS, index=False)
        if drawn := figures and engine == "torch":
            draw_validation(outcomes, scratch / "figures")
    if not quiet:
        print_section(section)
        print_written(folder, figures=drawn)
    if any(cell["parity"] < 1 for cell in result["cells"].values()):
        raise typer.Exit(1)


def accuracy(
    datasets: DatasetsOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the scores to this folder.")] = None,
    json: JsonOption = False,
    kernels: Annotated[
        list[str] | None,
        typer.Option(help="Fit the kernels of this device again (one option a device)."),
    ] = None,
) -> None:
    """Score the regressions on public measurements (needs them).

    Only rows that were not fitted count: a row a score, with its aims and why it misses one; then
    a row a class of scores. The errors of the stacks' kernels are those of the shipped surfaces,
    recorded when these were fitted, but for the devices named with --kernels.

    data/README.md lists the files and their sources.

    \b
    Examples:
      sarathi-sim accuracy --datasets measurements
      SARATHI_SIM_DATASETS=measurements sarathi-sim accuracy --json | jq .classes
      sarathi-sim accuracy --datasets measurements --kernels h100-80g-sxm --kernels b200-sxm
    """
    from dataclasses import asdict

    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.lab.fit import accuracy as studies
    from sarathi_sim.experiments.lab.fit.kernels import check_fitted, fitted_devices
    from sarathi_sim.experiments.measured.answers import accuracy_answer
    from sarathi_sim.experiments.results import ACCURACY_FORMAT, maybe_result
    from sarathi_sim.profiler.storage.files import public_datasets

    folder = public_datasets(datasets)
    stack = "vllm"  # of which every device has kernels
    again = [name for device in kernels or [] for name in check_fitted(device, stack)]
    wanted: list[Study] = [*studies.STUDIES.values()]
    wanted += [
        partial(studies.kernels, device=device, again=device in again)
        for device in fitted_devices(stack)
    ]
    scores = []
    bar = ProgressBar(consoles()[1], enabled=True)
    with bar as progress, maybe_result(out, ACCURACY_FORMAT) as write:
        for done, study in enumerate(wanted):
            progress("studies", done, len(wanted))
            scores += list(study(folder))
        content = {
            "scores": [score.content() for score in scores],
            "classes": [asdict(one) for one in studies.by_class(scores)],
        }
        section = accuracy_answer(content)
        write(content | section.words())
    _print(content, section, json=json)
    print_written(out, err=json)


def print_scores(scores: Sequence[Score]) -> None:
    """A row a score, with its aim beside it, and why it misses one."""
    from sarathi_sim.experiments.measured.answers import scores_table

    grid = scores_table(score.content() for score in scores)
    print_table(grid.headings[: grid.text], grid.headings[grid.text :], grid.rows)
