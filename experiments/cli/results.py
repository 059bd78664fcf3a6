"""The commands about existing results: plot, compare, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    JsonOption,
    QuietOption,
    consoles,
    print_json,
    print_notes,
    print_section,
    print_written,
)


def plot(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Results of runs, or one sweep.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the figures.  [default: runs/plot, or figures in the sweep]"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="For a sweep: a metric to draw; may be repeated."
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="AXIS", help="For a sweep: an axis to draw over; may be repeated."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Draw runs into the same figures, or draw a sweep.

    \b
    Examples:
      sarathi-sim plot runs/gpt3_pp
      sarathi-sim plot runs/pp4 runs/pp8 --out runs/pp4_and_pp8
      sarathi-sim plot runs/pd_sweep
      sarathi-sim plot runs/pd_sweep --over policy.chunk_size --metric mfu --metric bubble_s.p50
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.run.compare import plot_results
    from sarathi_sim.experiments.sweeps.plot import is_sweep, plot_sweep
    from sarathi_sim.experiments.sweeps.store import RESULTS
    from sarathi_sim.profiler.storage.strict import UserError

    if len(folders) == 1 and is_sweep(folders[0]):
        target = out or folders[0] / "figures"
        with ProgressBar(consoles()[1], enabled=not quiet) as progress:
            drawn = plot_sweep(folders[0], target, metrics or [], over or [], progress)
        if not quiet:
            print_section(drawn.section, rest=RESULTS)
            if drawn.note:
                print_notes([f"{drawn.note}; their numbers are in {folders[0] / RESULTS}"])
            typer.echo(f"figures: {target}")
        return
    if metrics or over:
        raise UserError("--metric and --over go with the folder of one sweep")
    target = out or Path("runs/plot")
    plot_results(folders, target)
    if not quiet:
        print_written(target, figures=True)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result, or a scenario's folder in it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another result.")],
    out: Annotated[Path | None, typer.Option(help="Also draw the parts to this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Say which part of the time makes two results differ.

    Both are simulated again from their config.yaml. The parts add up to the difference exactly. If
    one has prefill and decode pools, their numbers are compared, not parts.

    \b
    Examples:
      sarathi-sim compare runs/gpt3_pp/orca_pp runs/gpt3_pp/sarathi_pp
      sarathi-sim compare runs/before runs/after --out runs/difference
      sarathi-sim compare runs/before runs/after --json
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.results import FIGURES_FORMAT, check_replaceable
    from sarathi_sim.experiments.run.compare import compare as compared
    from sarathi_sim.experiments.run.compare import comparison_answer

    if out is not None:
        check_replaceable(out, FIGURES_FORMAT)
    with ProgressBar(consoles()[1], enabled=True) as progress:
        result = compared(a, b, progress)
    if out is not None:
        from sarathi_sim.experiments.run.compare import write_comparison

        write_comparison(result, out)
    section = comparison_answer(result)
    if json:
        print_json(result | section.words())
        return
    typer.echo(f"A: {a}\nB: {b}\n")
    print_section(section)
    print_written(out, figures=True)


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...", help="Results of run, sweep, compare, score and Decide."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="[default: RESULT.html, beside the first RESULT]"),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Write results as one HTML page, to be sent on.

    The page has the question, the answer, sortable tables, interactive charts, the configuration
    and the errors of the op times. It opens without a network. Runs are simulated again for their
    timelines.

    \b
    Examples:
      sarathi-sim report runs/gpt3_pp
      sarathi-sim report runs/pd_sweep runs/difference --out for_the_team.html
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.report.html_page import write_page

    first = results[0].resolve()
    target = out or first.with_name(f"{first.name}.html")
    with ProgressBar(consoles()[1], enabled=not quiet) as progress:
        size = write_page(results, target, title, progress)
    if not quiet:
        typer.echo(f"written: {target} ({size / 1e6:.1f} MB)")
