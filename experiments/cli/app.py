"""The command line: thin commands over the package, imported when they run.

``sarathi-sim --help`` must be quick, hence nothing heavy is imported at the top.
"""

from __future__ import annotations

import atexit
import gc
import os
import stat
import sys
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from sarathi_sim.experiments.cli.capacity import capacity, recommend, sensitivity
from sarathi_sim.experiments.cli.common import (
    Commands,
    ConfigArgument,
    FiguresOption,
    JsonOption,
    QuietOption,
    ResultOption,
    SetOption,
    consoles,
    end_on_signals,
    print_assumed,
    print_json,
    print_notes,
    print_section,
    print_written,
)
from sarathi_sim.experiments.cli.data import calibrate, devices, models, policies, support, workload
from sarathi_sim.experiments.cli.measured import (
    accuracy,
    lockstep,
    replay,
    score,
    tune,
    validate,
)
from sarathi_sim.experiments.cli.paper import advise, reproduce
from sarathi_sim.experiments.cli.profile import (
    first_light,
    fit,
    import_profile,
    profile,
)
from sarathi_sim.experiments.cli.results import compare, plot, report
from sarathi_sim.experiments.cli.sweep import plan, sweep
from sarathi_sim.profiler.storage.threads import default_to_one_thread

app = typer.Typer(
    cls=Commands,
    name="sarathi-sim",
    help="Simulate LLM inference serving: which scheduler, chunk size, batch and TP x PP layout, "
    "and where does the time go?",
    epilog="Exit codes: 0 a result; 1 a comparison (lockstep, validate) or a run (sweep) failed; "
    "2 an option, a file, a policy or this machine; 70 an error of sarathi-sim: please report it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from sarathi_sim.profiler.facts.engines import engines

        try:
            typer.echo(version("sarathi-sim"))
        except PackageNotFoundError:
            typer.echo("not installed: run from its source")
        known = (f"{name} {one.newest}" for name, one in engines().items() if one.lockstep)
        typer.echo(f"engines without a policy.version: {', '.join(known)}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar="SARATHI_SIM_DEBUG",
            help="Show the traceback of an error.",
        ),
    ] = False,
) -> None:
    """The options before a command."""


def run(
    config: ConfigArgument,
    assignments: SetOption = None,
    out: ResultOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also write a trace of --window for Perfetto.")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="START:LENGTH",
            help="Seconds in the stage timeline and the trace, such as 120:1.5.  "
            "[default: from the middle of the run]",
        ),
    ] = None,
    figures: FiguresOption = True,
) -> None:
    """Simulate every scenario of CONFIG.

    Writes tables and figures to a folder.

    \b
    Examples:
      sarathi-sim run gpt3_pp
      sarathi-sim run my.yaml --set seed=3 --set cluster.pp=4 --out runs/pp4
      sarathi-sim run gpt3_pp --no-figures --json | jq .ratios
      sarathi-sim run gpt3_pp --timeline --window 120:1.5   # open in ui.perfetto.dev
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.figures.slices import parse_window
    from sarathi_sim.experiments.run.experiment import run_experiment
    from sarathi_sim.experiments.run.run_answer import run_answer

    experiment = load_experiment(config, assignments or [])
    folder = out or Path("runs") / experiment.name
    with ProgressBar(consoles()[1], enabled=not quiet) as progress:
        outcome = run_experiment(
            experiment,
            folder,
            figures=figures,
            trace=timeline,
            window=None if window is None else parse_window(window),
            progress=progress,
        )
    content = outcome.summary()
    if json:
        print_json(content)
    if quiet:
        return
    print_section(run_answer(content), err=json)
    print_written(folder, figures=figures, err=json)


def check(config: ConfigArgument, assignments: SetOption = None) -> None:
    """Check CONFIG, and say what would run.

    Models, devices, profiles and memory are checked too. Nothing is simulated.

    \b
    Examples:
      sarathi-sim check my.yaml
      sarathi-sim check gpt3_pp --set cluster.usable_memory=0.95
    """
    from sarathi_sim.experiments.config.loading import load_experiment
    from sarathi_sim.experiments.content import assumed, assumed_of, deployments_table
    from sarathi_sim.experiments.run.experiment import deploy_all

    experiment = load_experiment(config, assignments or [])
    if all(scenario.device in ("cpu", "cuda") for scenario in experiment.scenarios.values()):
        from sarathi_sim.experiments.measured.session import cells_table, make_cells

        cells = make_cells(experiment)
        typer.echo(f"{experiment.file}: good, for sarathi-sim validate")
        consoles()[0].print(cells_table(cells))
        return
    deployments = deploy_all(experiment)
    notes = {name: assumed(deployment) for name, deployment in deployments.items()}
    print_assumed(assumed_of({"notes": notes}), err=True)
    for each in deployments.values():
        print_notes([*filter(None, [each.rejections]), *each.doubts])
    typer.echo(f"{experiment.file}: good")
    consoles()[0].print(deployments_table(deployments))


GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Simulate": {
        "check": check,
        "run": run,
        "plot": plot,
        "compare": compare,
        "report": report,
        "validate": validate,
        "lockstep": lockstep,
        "replay": replay,
        "score": score,
        "tune": tune,
    },
    "Sweep": {"plan": plan, "sweep": sweep},
    "Decide": {"capacity": capacity, "recommend": recommend, "sensitivity": sensitivity},
    "Profile": {
        "import": import_profile,
        "first-light": first_light,
        "profile": profile,
        "fit": fit,
        "accuracy": accuracy,
        "calibrate": calibrate,
    },
    "Data": {
        "models": models,
        "devices": devices,
        "support": support,
        "policies": policies,
        "workload": workload,
    },
    "Paper": {"reproduce": reproduce, "advise": advise},
}
"""Every command, by what it is about, in the order of ``--help``."""

for _title, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_title)(_command)


class _Pipe(FileIO):
    """A pipe whose reader may leave, as ``head`` does: the command still goes on to its end."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except BrokenPipeError:
            return memoryview(content).nbytes


def _robust(stream: TextIO) -> TextIO:
    """A stream that shows what its encoding has not, and that may lose its reader."""
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors="backslashreplace")
    try:
        number = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return stream
    except OSError:  # no file of the system
        return stream
    pipe = BufferedWriter(_Pipe(number, "w", closefd=False))
    return TextIOWrapper(
        pipe, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering
    )


def main() -> None:
    """The ``sarathi-sim`` command."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Names of files are UTF-8 here, and go into files: Python must read them as such.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})
    default_to_one_thread()
    sys.stdout, sys.stderr = _robust(sys.stdout), _robust(sys.stderr)
    end_on_signals()
    atexit.register(gc.freeze)  # a process that ends need not look for circles
    app()
