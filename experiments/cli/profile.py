"""The command that measures op times on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    PROFILES,
    ModelOption,
    ProfilesOption,
    consoles,
    finite,
)

if TYPE_CHECKING:
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
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on where the GPU is not as it should be.")
    ] = False,
) -> None:
    """Measure everything that a first hour on a GPU node allows.

    Needs torch. Every step is a process with a time limit. It checks the machine, the attention
    kernels, the bandwidth and the matrix units; then it profiles models, and compares them with the
    shipped kernels of this GPU.

    After an interruption, the same command continues. On another machine with the same GPU
    --resume continues from the archive, which is written after every step and has at most 16 MB.
    The exit code is 1 where steps failed or are left.

    \b
    Examples:
      sarathi-sim first-light
      sarathi-sim first-light --minutes 10
      sarathi-sim first-light --resume first-light.zip --out more
      sarathi-sim first-light --dry-run --out rehearsal
    """
    from importlib.util import find_spec

    from sarathi_sim.profiler.first_light.hour import Options
    from sarathi_sim.profiler.first_light.hour import first_light as run
    from sarathi_sim.profiler.planning.journal import ProfileError

    if find_spec("torch") is None:
        raise ProfileError(
            "first-light needs torch, which is not installed: pip install 'sarathi-sim[profiler]'"
        )
    options = Options(
        out=out,
        archive=archive or out.with_name(f"{out.name}.zip"),
        resume=resume,
        minutes=float("inf") if minutes is None else minutes,
        rehearsal=dry_run,
        keep_going=keep_going,
    )
    if not run(options, typer.echo):
        raise typer.Exit(1)
