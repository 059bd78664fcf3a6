"""The commands that measure op times, take in measured ones, and say how far off they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    DegreeOption,
    ForceOption,
    ModelOption,
    ProfilesOption,
    consoles,
    finite,
    print_table,
    print_written,
)

if TYPE_CHECKING:
    from sarathi_sim.profiler.bundle.check import Checked
    from sarathi_sim.profiler.bundle.schema import Bundle
    from sarathi_sim.profiler.planning.settings import Settings

Device = Literal["cpu", "cuda"]
Dtype = Literal["fp16", "bf16", "fp32"]
WeightsBy = Literal["dtype", "fp8"]
FlushBy = Literal["write", "read", "rotate"]
Distribution = Literal["balanced", "power_law_1.01", "power_law_1.2"]
AttentionBy = Literal["auto", "xformers", "sdpa", "cudnn", "fa3"]
_DTYPES: dict[Dtype, Literal["float16", "bfloat16", "float32"]] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}


DegreesOption = Annotated[
    list[int] | None,
    typer.Option(help="Tensor-parallel degrees, as in --tp 1 2 4.  [default: 1]"),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Number format of weights and activations.  [default: fp16, on a CPU fp32]"),
]
NameOption = Annotated[
    str | None, typer.Option(help="Folder and name of the device.  [default: the GPU's, or cpu]")
]
TokensOption = Annotated[
    int | None, typer.Option(min=2, help="Largest number of tokens in a batch.")
]
ContextOption = Annotated[
    int | None,
    typer.Option(min=16, help="Largest number of tokens of a sequence, cached ones included."),
]
BatchOption = Annotated[
    int | None, typer.Option(min=2, help="Largest number of sequences in a decode batch.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=finite,
        help="Seconds after which no more points are added.  [default: 45, on a GPU 240]",
    ),
]
TargetOption = Annotated[
    float,
    typer.Option(min=0.01, callback=finite, help="Stop at this held-out error, in percent."),
]
AttentionOption = Annotated[
    AttentionBy,
    typer.Option(
        help="auto: xformers if it works, else torch SDPA; cudnn and fa3 (FlashAttention 3) are "
        "kernels of SDPA."
    ),
]
WeightsOption = Annotated[
    WeightsBy,
    typer.Option(help="Number format of the layer's GEMMs: that of --dtype, or fp8 (a GPU's)."),
]
DistributionOption = Annotated[
    Distribution, typer.Option(help="How tokens spread over the experts of a mixture.")
]
FlushOption = Annotated[
    FlushBy,
    typer.Option(
        help="How a GPU's L2 is made cold before each sample: by writing or reading a large "
        "buffer, or by rotating over copies of the weights."
    ),
]
OpsOption = Annotated[
    list[str] | None,
    typer.Option(help="Measure only this op, and keep its points; may be repeated."),
]
MaxSecondsOption = Annotated[
    float | None,
    typer.Option(
        min=1, callback=finite, help="End after so many seconds; the same command goes on."
    ),
]
SustainedOption = Annotated[
    float,
    typer.Option(
        min=0, callback=finite, help="Seconds for which a layer is run without a pause, on a GPU."
    ),
]
InterNodeOption = Annotated[
    Path | None,
    typer.Option(
        help="Sends between nodes, as profiler/measuring/ranks.py wrote them under torchrun."
    ),
]
CollectivesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Take all-reduce and send/recv from this bundle, if the GPUs are too few.",
    ),
]


def profile(
    model: ModelOption,
    tp: DegreesOption = None,
    device: Annotated[Device, typer.Option(help="The GPU, or the CPU.")] = "cuda",
    dtype: DtypeOption = None,
    out: ProfilesOption = PROFILES,
    device_name: NameOption = None,
    max_tokens: TokensOption = None,
    max_context: ContextOption = None,
    max_batch: BatchOption = None,
    budget: BudgetOption = None,
    target_error: TargetOption = 3.0,
    attention: AttentionOption = "auto",
    weights: WeightsOption = "dtype",
    expert_distribution: DistributionOption = "power_law_1.2",
    flush: FlushOption = "read",
    ops: OpsOption = None,
    max_seconds: MaxSecondsOption = None,
    sustained: SustainedOption = 20.0,
    repeats: Annotated[int, typer.Option(min=1, help="Smallest number of samples per point.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of one rank.")] = 1,
    inter_node: InterNodeOption = None,
    collectives: CollectivesOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again what was measured already.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
    extra_tp: Annotated[list[int] | None, typer.Argument(metavar="--tp N", hidden=True)] = None,
) -> None:
    """Measure op times on this GPU or CPU (needs torch).

    It measures one layer's shard with random weights.

    After an interruption, the same command continues.

    \b
    Examples:
      sarathi-sim profile --model llama-13b --tp 1 2 4 8 --out profiles
      sarathi-sim profile --model tiny-llama-40m --tp 1 2 --device cpu --out profiles
      sarathi-sim profile --model llama-13b --attention sdpa --device-name h200-sdpa --out profiles
      sarathi-sim run my.yaml --set device=profiles/cpu.yaml --set profiles=profiles
    """
    from sarathi_sim.profiler.facts.model import load_model
    from sarathi_sim.profiler.planning.settings import Limits, Settings, default_limits

    spec = load_model(model)
    usual = default_limits(device, spec.max_position_embeddings)
    degrees = [*(tp or []), *(extra_tp or [])] or [1]
    settings = Settings(
        model=spec,
        tps=tuple(dict.fromkeys(degrees)),
        device=device,
        dtype=_DTYPES[dtype or ("fp32" if device == "cpu" else "fp16")],
        out=out,
        limits=Limits(
            max_tokens or usual.max_tokens,
            max_context or usual.max_context,
            max_batch or usual.max_batch,
        ),
        device_name=device_name,
        budget_s=budget if budget is not None else (45.0 if device == "cpu" else 240.0),
        target=target_error / 100,
        repeats=repeats,
        threads=threads,
        inter_node=inter_node,
        collectives=collectives,
        attention=attention,
        force=force,
        weights=weights,
        expert_distribution=expert_distribution,
        flush=flush,
        ops=tuple(ops or ()),
        max_s=max_seconds or math.inf,
        sustained_s=sustained,
    )
    _measure(settings, quiet)


def _measure(settings: Settings, quiet: bool) -> None:
    """Measure what the settings ask for, and print progress and what was written."""
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.profiler.measuring.measure import profile as measure

    _, stderr = consoles()

    def say(line: str) -> None:
        if not quiet:
            stderr.print(line, markup=False, highlight=False, soft_wrap=True)

    with ProgressBar(stderr, enabled=not quiet) as progress:
        written = measure(settings, say, progress)
    if not quiet:
        for path in written:
            typer.echo(f"written: {path}")


def first_light(
    out: Annotated[Path, typer.Option(help="Folder of everything it finds.")] = Path("first-light"),
    archive: Annotated[
        Path | None,
        typer.Option(help="File that holds all of it, too.  [default: --out with .zip behind it]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="ARCHIVE", help="Go on from this archive, on any machine."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Begin no step that could end later."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="The same steps on a tiny model; without a GPU, too."),
    ] = False,
) -> None:
    """Measure everything that a first hour on a GPU node allows.

    Needs torch. Every step is a process with a time limit. It probes the machine, profiles models,
    compares them with the shipped kernels of this GPU, and runs the engine beside the simulator.

    After an interruption, the same command continues. On another machine with the same GPU
    --resume continues from the archive, which is written after every step.
    The exit code is 1 where steps failed or are left.

    \b
    Examples:
      sarathi-sim first-light
      sarathi-sim first-light --minutes 10
      sarathi-sim first-light --resume first-light.zip --out more
      sarathi-sim first-light --dry-run --out rehearsal
    """
    from importlib.util import find_spec

    from sarathi_sim.experiments.lab.engines.first_light import Hour
    from sarathi_sim.profiler.planning.journal import ProfileError

    if find_spec("torch") is None:
        raise ProfileError(
            "first-light needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        )
    hour = Hour(out, archive or out.with_name(f"{out.name}.zip"), typer.echo, dry_run)
    if not hour.run(math.inf if minutes is None else minutes, resume):
        raise typer.Exit(1)


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


def fit(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the table (CSV, JSON) and a figure per op to this folder."),
    ] = None,
) -> None:
    """Check a bundle, and print the errors of its regressions.

    The exit code is 2 if the bundle cannot be used or is faster than its device can be; nothing is
    fitted then. Outliers, and times that fall as work grows, are only warnings: real kernels show
    both.

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
    from sarathi_sim.profiler.bundle.check import check_folder

    checked = check_folder(path)
    if out is not None:
        check_replaceable(out, FITS_FORMAT)
    _print_findings(checked, path)
    if checked.failed:
        raise typer.Exit(2)
    bundle = checked.bundle
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


def _print_findings(checked: Checked, path: Path) -> None:
    """What a bundle holds, and what in it is not plausible."""
    rows = []
    for op, there in checked.coverage.items():
        levels = (finding.level for finding in checked.findings if finding.where == op)
        rows.append((op, there, ", ".join(dict.fromkeys(levels)) or "good"))
    print_table(("op", "what is there", "findings"), (), rows, title=str(path))
    for finding in checked.findings:
        typer.echo(f"{finding.level}: {finding.where}: {finding.message}")


def _print_beyond_single_ops(bundle: Bundle) -> None:
    """Held-out errors of whole layers and of skewed decodes, each beside doing nothing."""
    from sarathi_sim.simulator.op_times.interaction import interaction_errors, skew_errors
    from sarathi_sim.simulator.op_times.regression import bundle_times

    ops = bundle_times(bundle)
    layers, skewed, skew = interaction_errors(bundle, ops), skew_errors(bundle, ops), ops.skew
    groups = [(f"{kind} layer", rows) for kind, rows in layers.groupby("kind", sort=False)]
    limit = "" if skew.sequences == math.inf else f", to {skew.sequences:.0f} sequences"
    ways = {
        "sum": "sum of its ops",
        "measured": "whole layer",
        "mean": "mean context",
        "skew": f"{skew.share:.2f} of the way to the longest{limit}",
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
