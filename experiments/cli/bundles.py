"""The commands that make and look at profile bundles: import, profile-check, profile-diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    DegreeOption,
    ForceOption,
    ModelOption,
    ProfilesOption,
    print_table,
)

BundleFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle, or a folder of bundles.")
]


def import_profile(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="vidur, aiconfigurator or llmservingsim.")
    ],
    path: Annotated[Path, typer.Argument(help="Folder of the source's files.")],
    model: ModelOption,
    tp: DegreeOption = 1,
    out: ProfilesOption = PROFILES,
    device: Annotated[
        str | None,
        typer.Option(help="The device it was measured on.  [default: the folder's]"),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Make a profile bundle from published measurements.

    The measurements do not ship with the package: data/README.md says where to get them.

    vidur reads mlp_{a100,a40}_MODEL.csv, attention_a100_CodeLlama-34b_tp2.csv, all_reduce_* and
    p2p_*. aiconfigurator reads gemm_bf16.csv, attention_{prefill,decode}_bf16.csv and
    nccl_collectives.csv of an A100 (its parquet tables are what `stack` is fitted to: calibrate).
    llmservingsim reads layers_Llama-3.1-8B_tp1.csv and attention_Llama-3.1-8B_tp1.csv (A6000), or
    a model's folder of profiler/perf: meta.yaml, dense.csv, per_sequence.csv, attention.csv.

    GEMM shapes that the source lacks are interpolated. Other head counts are scaled. For what was
    not measured a run asks the device's calibrated model. meta.yaml marks each of these.

    \b
    Examples:
      sarathi-sim import vidur datasets/vidur --model llama-2-70b --tp 4 --out profiles
      sarathi-sim import vidur datasets/vidur --model qwen-72b --tp 8 --device a40
      sarathi-sim import aiconfigurator datasets/aiconfigurator_a100_sxm --model gpt3-175b --tp 8
      sarathi-sim import llmservingsim datasets/llmservingsim_a6000 --model llama-3-8b
      sarathi-sim import llmservingsim datasets/llmservingsim_rtx4090 --model llama-3-8b
    """
    from sarathi_sim.profiler.bundle.schema import bundle_path, write_bundle
    from sarathi_sim.profiler.importers.sources import import_bundle

    bundle = import_bundle(source, path, model, tp, device)
    folder = bundle_path(out, bundle.meta.device, bundle.meta.model, tp)
    write_bundle(bundle, folder, force=force)
    about = bundle.meta.environment
    whole = ("repository", "licence", "hardware")
    marks = {op: str(about[op]).partition(": ") for op in about}
    rows = [(op, how, origin) for op, (how, _, origin) in marks.items() if op not in whole]
    print_table(("op", "how", "from"), (), rows)
    typer.echo(f"{about['repository']} ({about['licence']}), {about['hardware']}")
    typer.echo(f"written: {folder}")


def profile_check(folder: BundleFolder) -> None:
    """Check bundles: files, units, and impossible times.

    The exit code is 2 if a bundle cannot be used or is faster than its device can be. Outliers,
    and times that fall as work grows, are only warnings: real kernels show both.

    \b
    Examples:
      sarathi-sim profile-check profiles
      sarathi-sim profile-check profiles/a100-80g-sxm/llama-2-70b/tp4
    """
    from sarathi_sim.profiler.bundle.check import bundle_folders, check_folder

    failed = 0
    for path in bundle_folders(folder):
        checked = check_folder(path)
        rows = []
        for op, there in checked.coverage.items():
            levels = (finding.level for finding in checked.findings if finding.where == op)
            rows.append((op, there, ", ".join(dict.fromkeys(levels)) or "good"))
        if rows:
            print_table(("op", "what is there", "findings"), (), rows, title=str(path))
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
      sarathi-sim profile-diff profiles/h200/llama-2-7b/tp1 later/h200/llama-2-7b/tp1
    """
    from sarathi_sim.profiler.bundle.diff import backend_differences, diff_bundles
    from sarathi_sim.profiler.bundle.schema import load_bundle

    bundles = load_bundle(first), load_bundle(second)
    found, left_out = diff_bundles(*bundles)
    rows = []
    for diff in found:
        points = f"{diff.points}{' (interpolated)' if diff.interpolated else ''}"
        ratios = (f"{value:.2f}" for value in (diff.median, diff.p5, diff.p95, diff.worst))
        rows.append((diff.op, points, *ratios, diff.worst_at))
    print_table(("op", "points", "B/A median", "p5", "p95", "furthest", "where"), (), rows)
    for line in left_out:
        typer.echo(f"not compared: {line}")
    for line in backend_differences(*bundles):
        typer.echo(f"other backend: {line}")
