"""The commands that print errors of regressions: fit for a bundle, accuracy for public data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    DatasetsOption,
    JsonOption,
    consoles,
    print_json,
    print_table,
    print_written,
)

if TYPE_CHECKING:
    from sarathi_sim.experiments.figures.accuracy import Aim, Score, ScoreClass
    from sarathi_sim.profiler.bundle.schema import Bundle


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
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1 --out runs/fits
    """
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.figures.fits import describe, write_fits
    from sarathi_sim.experiments.results import FITS_FORMAT, check_replaceable
    from sarathi_sim.profiler.bundle.schema import load_bundle

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
    from sarathi_sim.simulator.op_times.interaction import interaction_errors, skew_errors
    from sarathi_sim.simulator.op_times.regression import bundle_times

    ops = bundle_times(bundle)
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
    from sarathi_sim.experiments.figures import accuracy as studies
    from sarathi_sim.experiments.figures import kernel_errors
    from sarathi_sim.experiments.results import ACCURACY_FORMAT, maybe_result
    from sarathi_sim.profiler.kernels.stack_fit import check_fitted, fitted_devices
    from sarathi_sim.profiler.storage.files import public_datasets

    folder = public_datasets(datasets)
    stack = "vllm"  # of which every device has kernels
    again = [name for device in kernels or [] for name in check_fitted(device, stack)]
    wanted: list[studies.Study] = [*studies.STUDIES.values()]
    for device in fitted_devices(stack):
        kind = kernel_errors.kernels if device in again else kernel_errors.shipped
        wanted.append(partial(kind, device=device))
    scores = []
    bar = ProgressBar(consoles()[1], enabled=True)
    with bar as progress, maybe_result(out, ACCURACY_FORMAT) as write:
        for done, study in enumerate(wanted):
            progress("studies", done, len(wanted))
            scores += list(study(folder))
        classes = studies.by_class(scores)
        content = {
            "scores": [{**asdict(s), "met": s.met, "missed": s.missed} for s in scores],
            "classes": [asdict(one) for one in classes],
        }
        write(content)
    if json:
        print_json(content)
    else:
        print_scores(scores)
        _print_classes(classes)
    print_written(out, err=json)


def print_scores(scores: Sequence[Score]) -> None:
    """A row a score, with its aim beside it, and why it misses one."""
    rows = []
    for score in scores:
        said = "" if score.aim is None else "met"
        if score.missed:
            said = f"missed {', '.join(score.missed)}: {'; '.join(score.causes)}"
        covered = "" if score.covered is None else f"{score.covered:.0f} %"
        numbers = (f"{score.rows:,}", f"{score.median:.2f}", f"{score.p95:.2f}")
        text = (score.what, score.source, score.fitted)
        rows.append((*text, *numbers, _aim(score.aim), covered, said))
    headings = ("rows", "median %", "p95 %", "aim", "in band", "")
    print_table(("what", "measured on", "fitted to"), headings, rows)


def _print_classes(classes: Sequence[ScoreClass]) -> None:
    rows = []
    for one in classes:
        covered = "" if one.covered is None else f"{one.covered:.0f} %"
        if one.covered_range and one.scores > 1:
            covered += " ({:.0f} to {:.0f})".format(*one.covered_range)
        met = "" if one.met is None else f"{one.met} of {one.scores}"
        numbers = (f"{one.median:.1f}", f"{one.p95:.1f}", _aim(one.aim), met, covered)
        rows.append((one.group, str(one.scores), *numbers, "; ".join(one.causes)))
    headings = ("scores", "median %", "p95 %", "aim", "met by", "in band", "")
    about = "by class: medians of the scores, and why some miss"
    print_table(("what",), headings, rows, title=about)


def _aim(aim: Aim | None) -> str:
    return "" if aim is None else f"{aim[0]:g} / {aim[1]:g}"
