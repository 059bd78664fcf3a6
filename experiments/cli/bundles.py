"""The commands that make and look at profile bundles: import, profile-check, profile-diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.common import ForceOption, consoles

if TYPE_CHECKING:
    from rich.table import Table

BundleFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle, or a root of bundles.")
]


def add_profile_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("import")(import_profile)
    app.command("profile-check")(profile_check)
    app.command("profile-diff")(profile_diff)


def import_profile(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="vidur, aiconfigurator or llmservingsim.")
    ],
    path: Annotated[Path, typer.Argument(help="Folder of the source's files.")],
    model: Annotated[str, typer.Option(help="A shipped model, or a Hugging Face config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Root folder of profiles; name it as `profiles` in a config.")
    ] = Path("profiles"),
    device: Annotated[
        str | None,
        typer.Option(help="The device it was measured on.  [default: the source's first]"),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Make a profile bundle from published measurements.

    The measurements do not ship with the package: data/README.md says where to get them.

    GEMM shapes that the source lacks are interpolated, other head counts scaled, and what it did
    not measure at all is predicted by the device's calibrated model; meta.yaml marks each.

    \b
    Examples:
      sarathi-sim import vidur datasets/vidur --model llama-2-70b --tp 4 --out profiles
      sarathi-sim import vidur datasets/vidur --model qwen-72b --tp 8 --device a40
      sarathi-sim import aiconfigurator datasets/aiconfigurator_a100_sxm --model gpt3-175b --tp 8
      sarathi-sim import llmservingsim datasets/llmservingsim_a6000 --model llama-3-8b
    """
    from rich.table import Table

    from profiler.bundle.schema import bundle_path, write_bundle
    from profiler.importers.sources import import_bundle

    bundle = import_bundle(source, path, model, tp, device)
    folder = bundle_path(out, bundle.meta.device, bundle.meta.model, tp)
    write_bundle(bundle, folder, force=force)
    table = Table("op", "how", "from")
    for op, mark in bundle.meta.environment.items():
        how, _, origin = str(mark).partition(": ")
        if op not in ("repository", "licence", "hardware"):
            table.add_row(op, how, origin)
    _print(table)
    about = bundle.meta.environment
    typer.echo(f"{about['repository']} ({about['licence']}), {about['hardware']}")
    typer.echo(f"written: {folder}")


def profile_check(folder: BundleFolder) -> None:
    """Check bundles: files, units, and impossible times.

    Exit code 2 where one cannot be used or is faster than its device can be. A time that falls as
    work grows, and outliers, are warnings: real kernels do both.

    \b
    Examples:
      sarathi-sim profile-check profiles
      sarathi-sim profile-check profiles/a100-80g-sxm/llama-2-70b/tp4
    """
    from rich.table import Table

    from profiler.bundle.check import bundle_folders, check_folder

    failed = 0
    for path in bundle_folders(folder):
        checked = check_folder(path)
        table = Table("op", "what is there", "findings", title=str(path), title_justify="left")
        for op, there in checked.coverage.items():
            mine = [finding for finding in checked.findings if finding.where == op]
            levels = [finding.level for finding in mine]
            table.add_row(op, there, ", ".join(dict.fromkeys(levels)) or "good")
        if checked.coverage:
            _print(table)
        else:
            typer.echo(str(path))
        for finding in checked.findings:
            typer.echo(f"{finding.level}: {finding.where}: {finding.message}")
        failed += checked.failed
    if failed:
        raise typer.Exit(2)


def profile_diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A bundle.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="A bundle of the same model and tp.")],
) -> None:
    """Compare two bundles op by op.

    Prints the ratio of B's times to A's.

    \b
    Examples:
      sarathi-sim profile-diff data/profiles/a100-80g-sxm/llama-2-70b/tp4 \\
        profiles/a100-80g-sxm/llama-2-70b/tp4
    """
    from rich.table import Table

    from profiler.bundle.diff import backend_differences, diff_bundles
    from profiler.bundle.schema import load_bundle

    bundles = load_bundle(first), load_bundle(second)
    found, left_out = diff_bundles(*bundles)
    table = Table("op", "points", "B/A median", "p5", "p95", "furthest", "where")
    for diff in found:
        points = f"{diff.points}{' (interpolated)' if diff.interpolated else ''}"
        ratios = (f"{value:.2f}" for value in (diff.median, diff.p5, diff.p95, diff.worst))
        table.add_row(diff.op, points, *ratios, diff.worst_at)
    _print(table)
    for line in left_out:
        typer.echo(f"not compared: {line}")
    for line in backend_differences(*bundles):
        typer.echo(f"other backend: {line}")


def _print(table: Table) -> None:
    consoles()[0].print(table, markup=False, highlight=False)
