"""The command line: thin commands over the package, imported when they run.

``sarathi-sim --help`` must be quick, hence nothing heavy is imported at the top.
"""

from __future__ import annotations

import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from experiments.cli.accuracy import add_fit_commands
from experiments.cli.bundles import add_profile_commands
from experiments.cli.common import (
    Commands,
    ConfigArgument,
    JsonOption,
    SetOption,
    consoles,
    print_json,
    print_notes,
    report_written,
)
from experiments.cli.data import add_data_commands
from experiments.cli.lockstep import add_lockstep_command
from experiments.cli.paper import add_paper_commands
from experiments.cli.profile import add_profile_command
from experiments.cli.results import add_result_commands
from experiments.cli.sweep import add_sweep_commands
from experiments.cli.validate import add_validate_command
from profiler.storage.threads import default_to_one_thread

if TYPE_CHECKING:
    from experiments.figures.slices import Window

app = typer.Typer(
    cls=Commands,
    name="sarathi-sim",
    help="Simulate LLM inference serving: which scheduler, chunk size, batch and TP x PP layout, "
    "and where does the time go?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("sarathi-sim"))
        except PackageNotFoundError:
            typer.echo("not installed: run from its source")
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
            help="Where a command ends in an error, show the traceback.",
        ),
    ] = False,
) -> None:
    """The options before a command."""


@app.command()
def run(
    config: ConfigArgument,
    assignments: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result.  [default: runs/NAME]")
    ] = None,
    json: JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print neither progress nor table.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also write a trace of the window for Perfetto.")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="START:LENGTH",
            help="Seconds that the stage timeline and the trace show, as in 120:1.5.  "
            "[default: a while in the middle of the run]",
        ),
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures.")] = True,
) -> None:
    """Simulate every scenario of CONFIG.

    Tables and figures go to a folder.

    \b
    Examples:
      sarathi-sim run gpt3_pp
      sarathi-sim run my.yaml --set seed=3 --set cluster.pp=4 --out runs/pp4
      sarathi-sim run gpt3_pp --no-figures --json | jq .ratios
      sarathi-sim run gpt3_pp --timeline --window 120:1.5   # open in ui.perfetto.dev
    """
    from experiments.config.loading import load_experiment
    from experiments.run.experiment import run_experiment
    from experiments.run.report import (
        ProgressBar,
        load_notes,
        print_warnings,
        ratios_table,
        results_table,
    )

    stdout, stderr = consoles()
    experiment = load_experiment(config, assignments or [])
    folder = out or Path("runs") / experiment.name
    with ProgressBar(stderr, enabled=not quiet) as progress:
        outcome = run_experiment(
            experiment,
            folder,
            figures=figures,
            trace=timeline,
            window=_window(window),
            progress=progress,
        )
    if json:
        print_json(outcome.summary())
    if quiet:
        return
    print_notes(run.deployment for run in outcome.runs.values())
    for note in load_notes(outcome.summary()["scenarios"], folder):
        typer.echo(f"note: {note}", err=True)
    console = stderr if json else stdout
    if experiment.description:
        console.print(experiment.description, markup=False, highlight=False)
    console.print(results_table(outcome))
    ratios = ratios_table(outcome)
    if ratios is not None:
        console.print(ratios)
    print_warnings(outcome)
    report_written(console, folder, "figures" if figures else None)


@app.command()
def check(config: ConfigArgument, assignments: SetOption = None) -> None:
    """Check CONFIG, and say what would run.

    Models, devices, profiles and memory are checked too. Nothing is simulated.

    \b
    Examples:
      sarathi-sim check my.yaml
      sarathi-sim check gpt3_pp --set cluster.usable_memory=0.95
    """
    from experiments.config.loading import load_experiment
    from experiments.run.experiment import deploy_all
    from experiments.run.report import deployments_table

    experiment = load_experiment(config, assignments or [])
    deployments = deploy_all(experiment)
    print_notes(deployments.values())
    stdout, _ = consoles()
    stdout.print(f"{experiment.file}: good", highlight=False, markup=False)
    stdout.print(deployments_table(deployments))


@app.command()
def bench(
    json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this folder.")] = None,
    config: Annotated[
        str,
        typer.Option(help="A configuration: its orca_pp and sarathi_pp are timed, or else all."),
    ] = "gpt3_pp",
    assignments: SetOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; medians count.")] = 3,
) -> None:
    """Time the event loop against a textbook simulation.

    Both run in the same process. The textbook uses SimPy.

    \b
    Examples:
      sarathi-sim bench
      sarathi-sim bench --json | jq .speedup_vs_oracle
    """
    from experiments.config.loading import load_experiment
    from experiments.results import BENCH_FORMAT, maybe_result
    from experiments.run.bench import benchmark
    from experiments.run.report import ProgressBar, bench_table

    stdout, stderr = consoles()
    experiment = load_experiment(config, assignments or [])
    with ProgressBar(stderr, enabled=True) as progress, maybe_result(out, BENCH_FORMAT) as write:
        numbers = benchmark(experiment, repeats, progress)
        write(numbers)
    if json:
        print_json(numbers)
    else:
        stdout.print(bench_table(numbers))
    if out is not None:
        report_written(stderr if json else stdout, out, None)


def _window(text: str | None) -> Window | None:
    if text is None:
        return None
    from experiments.figures.slices import parse_window

    return parse_window(text)


add_result_commands(app)
add_sweep_commands(app)
add_data_commands(app)
add_profile_command(app)
add_profile_commands(app)
add_fit_commands(app)
add_validate_command(app)
add_lockstep_command(app)
add_paper_commands(app)


def main() -> None:
    """The ``sarathi-sim`` command."""
    default_to_one_thread()
    # What a terminal or a file in another encoding cannot show must not end the command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, _frame: object) -> NoReturn:
    """An exception, so that scratch folders are removed on the way out."""
    raise SystemExit(128 + number)
