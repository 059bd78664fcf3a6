"""The commands that print errors of regressions: fit for a bundle, accuracy for public data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.common import (
    DatasetsOption,
    JsonOption,
    consoles,
    print_json,
    print_table,
    print_written,
)

if TYPE_CHECKING:
    from experiments.figures.accuracy import Score
    from profiler.bundle.schema import Bundle


def fit(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the table (CSV, JSON) and a figure per op to this folder."),
    ] = None,
) -> None:
    """Print the errors of a bundle's regressions.

    Errors are in percent of the bundle's times, on held-out points only: between the points, at
    tile edges, beyond the range (fitted up to a quarter of it), and for a GEMM's shape from the
    other GEMMs (unseen). A random forest and a polynomial fitted to the same points are beside
    them. The last column is the share of the points inside that the 90 % band covers.

    If the bundle holds whole layers or skewed decodes, a second table has the errors of the sum
    of ops and of the mean context, and the errors that remain with the fitted corrections.

    \b
    Examples:
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1
      sarathi-sim fit data/profiles/a100-80g-sxm/gpt3-175b/tp8 --out runs/fits
    """
    from experiments.figures.fits import describe, write_fits
    from experiments.results import FITS_FORMAT, check_replaceable
    from experiments.run.report import ProgressBar
    from profiler.bundle.schema import load_bundle

    bundle = load_bundle(path)
    if out is not None:
        check_replaceable(out, FITS_FORMAT)
    with ProgressBar(consoles()[1], enabled=True) as progress:
        errors = describe(bundle, progress)
        if out is not None:
            write_fits(bundle, errors, out, progress)
    headings = ("points", "median", "p95", "worst", "forest: median", "p95", "polynomial: median")
    rows = [
        (op, where, str(points), *("" if value != value else f"{value:.1f}" for value in percent))
        for op, where, points, *percent in errors.itertuples(index=False)
    ]
    title = f"{path}: error on held-out points, percent"
    print_table(("op", "where"), (*headings, "p95", "in band"), rows, title=title)
    if len(bundle.mixed) or len(bundle.attn_decode_skew):
        _print_beyond_single_ops(bundle)
    print_written(out)


def _print_beyond_single_ops(bundle: Bundle) -> None:
    """Held-out errors of whole layers and of skewed decodes, each beside doing nothing."""
    from simulator.op_times.interaction import interaction_errors, skew_errors
    from simulator.op_times.regression import OpTimes

    ops = OpTimes(bundle)
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
    rows = []
    for what, errors in groups:
        for column in filter(ways.__contains__, errors.columns):
            percent = (f"{value:.1f}" for value in errors[column].quantile([0.5, 0.95, 1.0]))
            rows.append((what, ways[column], str(len(errors)), *percent))
    title = "beyond single ops: error on held-out points, percent"
    print_table(("what", "predicted as"), ("points", "median", "p95", "worst"), rows, title=title)


def accuracy(
    datasets: DatasetsOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the scores to this folder.")] = None,
    json: JsonOption = False,
    kernels: Annotated[
        list[str] | None,
        typer.Option(help="Score the stacks' kernels on this device, too (again for more)."),
    ] = None,
) -> None:
    """Score the regressions on public measurements (needs them).

    Only rows that were not fitted count. The table has the aims, too.

    data/README.md lists the files and their sources.

    \b
    Examples:
      sarathi-sim accuracy --datasets measurements
      SARATHI_SIM_DATASETS=measurements sarathi-sim accuracy --json | jq .scores
      sarathi-sim accuracy --datasets measurements --kernels h100-80g-sxm --kernels b200-sxm
    """
    from dataclasses import asdict

    from experiments.figures import accuracy as studies
    from experiments.results import ACCURACY_FORMAT, maybe_result
    from experiments.run.report import ProgressBar
    from profiler.facts.formats import STACKS
    from profiler.kernels.stack_fit import check_fitted
    from profiler.storage.paths import public_datasets

    folder = public_datasets(datasets)
    scores = []
    wanted = [*studies.STUDIES.values()]
    for device in kernels or []:
        check_fitted(device, STACKS[0])
        wanted.append(partial(studies.kernels, device=device))
    bar = ProgressBar(consoles()[1], enabled=True)
    with bar as progress, maybe_result(out, ACCURACY_FORMAT) as write:
        for done, study in enumerate(wanted):
            progress("studies", done, len(wanted))
            scores += list(study(folder))
        content = {"scores": [{**asdict(score), "met": score.met} for score in scores]}
        write(content)
    if json:
        print_json(content)
    else:
        print_scores(scores)
    print_written(out, err=json)


def print_scores(scores: Sequence[Score]) -> None:
    """A row a score, with its aim beside it."""
    rows = []
    for score in scores:
        aim = f"{score.aim[0]:g} / {score.aim[1]:g}" if score.aim else ""
        met = {True: "met", False: "missed", None: ""}[score.met]
        covered = "" if score.covered is None else f"{score.covered:.0f} %"
        numbers = (f"{score.rows:,}", f"{score.median:.2f}", f"{score.p95:.2f}")
        rows.append((score.what, score.source, score.fitted, *numbers, aim, met, covered))
    headings = ("rows", "median %", "p95 %", "aim", "", "in band")
    print_table(("what", "measured on", "fitted to"), headings, rows)
