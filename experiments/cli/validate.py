"""The command that runs a real engine beside the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    FiguresOption,
    ProfilesOption,
    QuietOption,
    ResultOption,
    SetOption,
    consoles,
    finite,
    print_written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import Experiment
    from sarathi_sim.experiments.validate.cells import Cell
    from sarathi_sim.experiments.validate.summary import Comparisons

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
    from sarathi_sim.experiments.validate.cells import make_cells
    from sarathi_sim.experiments.validate.table import table, verdict

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
    from sarathi_sim.experiments.validate.table import iterations

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
    from sarathi_sim.experiments.validate.figures import iterations_figure, timelines_figure

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
