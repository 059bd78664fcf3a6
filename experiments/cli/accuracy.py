"""The commands that say how far regressions are off: fit for a bundle, accuracy for public data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.common import JsonOption, consoles, print_json, report_written

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.figures.accuracy import Score
    from profiler.bundle.schema import Bundle


def add_fit_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("fit")(fit)
    app.command("accuracy")(accuracy)


def fit(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the table (CSV, JSON) and a figure per op to this folder."),
    ] = None,
) -> None:
    """Say how far a bundle's regressions are off.

    Percent of the bundle's times: between the points, at the edges of tiles, beyond the range
    (fitted up to a quarter of it), and for a GEMM's shape from the other GEMMs (unseen), beside
    what a random forest and a polynomial would make of the same points. Never training error.
    The last column is the share of points inside that the 90 % band covers.

    Where the bundle holds whole layers or skewed decodes, a second table: what the sum of ops and
    the mean context miss, and what is left of that.

    \b
    Examples:
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1
      sarathi-sim fit data/profiles/a100-80g-sxm/gpt3-175b/tp8 --out runs/fits
    """
    from rich.table import Table

    from experiments.figures.fits import describe, write_fits
    from experiments.results import FITS_FORMAT, check_replaceable
    from experiments.run.report import ProgressBar
    from profiler.bundle.schema import load_bundle

    stdout, stderr = consoles()
    bundle = load_bundle(path)
    if out is not None:
        check_replaceable(out, FITS_FORMAT)
    with ProgressBar(stderr, enabled=True) as progress:
        errors = describe(bundle, progress)
        if out is not None:
            write_fits(bundle, errors, out, progress)
    table = Table(title=f"{path}: error on held-out points, percent", title_justify="left")
    headings = ("op", "where", "points", "median", "p95", "worst")
    for heading in (*headings, "forest: median", "p95", "polynomial: median", "p95", "in band"):
        left = heading in ("op", "where")
        table.add_column(
            heading, justify="left" if left else "right", overflow="fold", no_wrap=left
        )
    for op, where, points, *percent in errors.itertuples(index=False):
        cells = ("" if value != value else f"{value:.1f}" for value in percent)
        table.add_row(op, where, str(points), *cells)
    stdout.print(table)
    if len(bundle.mixed) or len(bundle.attn_decode_skew):
        stdout.print(_beyond_single_ops(bundle))
    if out is not None:
        typer.echo(f"written: {out}")


def _beyond_single_ops(bundle: Bundle) -> Table:
    """Held-out errors of whole layers and of skewed decodes, each beside doing nothing."""
    from rich.table import Table

    from simulator.op_times.interaction import interaction_errors, skew_errors
    from simulator.op_times.regression import OpTimes

    ops = OpTimes(bundle)
    table = Table(
        title="beyond single ops: error on held-out points, percent", title_justify="left"
    )
    for heading in ("what", "points", "predicted as", "median", "p95", "worst"):
        left = heading in ("what", "predicted as")
        table.add_column(heading, justify="left" if left else "right")
    layers, skewed = interaction_errors(bundle, ops), skew_errors(bundle, ops)
    groups = [(f"{kind} layer", rows) for kind, rows in layers.groupby("kind", sort=False)]
    ways = {
        "sum": "sum of its ops",
        "measured": "whole layer",
        "mean": "mean context",
        "skew": f"{ops.skew:.2f} of the way to the longest",
    }
    if len(skewed):
        groups.append(("skewed decodes", skewed))
    for what, rows in groups:
        for column in (column for column in rows.columns if column in ways):
            middle, high, worst = rows[column].quantile([0.5, 0.95, 1.0])
            numbers = (f"{value:.1f}" for value in (middle, high, worst))
            table.add_row(what, str(len(rows)), ways[column], *numbers)
    return table


def accuracy(
    datasets: Annotated[
        Path | None,
        typer.Option(help="Folder of public measurements.  [default: $SARATHI_SIM_DATASETS]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the scores to this folder.")] = None,
    json: JsonOption = False,
) -> None:
    """Score the regressions on public measurements (needs them).

    Only rows that were not fitted count. The aims stand beside the scores.

    data/README.md says which files are meant and where they come from.

    \b
    Examples:
      sarathi-sim accuracy --datasets measurements
      SARATHI_SIM_DATASETS=measurements sarathi-sim accuracy --json | jq .scores
    """
    from dataclasses import asdict

    from experiments.figures.accuracy import STUDIES
    from experiments.results import ACCURACY_FORMAT, maybe_result
    from experiments.run.report import ProgressBar
    from profiler.storage.paths import public_datasets

    stdout, stderr = consoles()
    folder = public_datasets(datasets)
    scores = []
    with ProgressBar(stderr, enabled=True) as progress, maybe_result(out, ACCURACY_FORMAT) as write:
        for done, study in enumerate(STUDIES.values()):
            progress("studies", done, len(STUDIES))
            scores += list(study(folder))
        content = {"scores": [{**asdict(score), "met": score.met} for score in scores]}
        write(content)
    if json:
        print_json(content)
    else:
        stdout.print(_scores_table(scores), markup=False, highlight=False)
    if out is not None:
        report_written(stderr if json else stdout, out, None)


def _scores_table(scores: Sequence[Score]) -> Table:
    from rich.table import Table

    table = Table(
        "what", "measured on", "fitted to", "rows", "median %", "p95 %", "aim", "", "in band"
    )
    for score in scores:
        aim = f"{score.aim[0]:g} / {score.aim[1]:g}" if score.aim else ""
        met = {True: "met", False: "missed", None: ""}[score.met]
        covered = "" if score.covered is None else f"{score.covered:.0f} %"
        numbers = (f"{score.rows:,}", f"{score.median:.2f}", f"{score.p95:.2f}")
        table.add_row(score.what, score.source, score.fitted, *numbers, aim, met, covered)
    return table
