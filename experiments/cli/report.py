"""The command that makes one page of results: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.common import QuietOption, consoles


def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT...", help="Results of runs, sweeps, compare --out, score."),
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
    from experiments.report.html_page import write_page
    from experiments.run.report import ProgressBar

    first = results[0].resolve()
    target = out or first.with_name(f"{first.name}.html")
    with ProgressBar(consoles()[1], enabled=not quiet) as progress:
        size = write_page(results, target, title, progress)
    if not quiet:
        typer.echo(f"written: {target} ({size / 1e6:.1f} MB)")
