"""The commands for a server of one's own: profile its GPU, fit, score, tune. As ``library.py``."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from annotated_types import Ge

from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.strict import strict_dataclass
from .config.base import Assignments, Config
from .options import (
    AlsoOption,
    Folder,
    ModelOption,
    SetOption,
    further,
    in_a_paragraph,
    written,
)
from .report.section import Result, Section, Table

if TYPE_CHECKING:
    from sarathi_sim.profiler.bundle.schema import Bundle

PROFILES = Path("profiles")
"""Where bundles are written."""
_DTYPES: dict[str, Literal["float16", "bfloat16", "float32"]] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}
ServerOption = Annotated[
    Config, typer.Option(help="The deployment that served them: YAML, or a shipped one."), str
]
RunsArgument = Annotated[
    Sequence[Folder],
    typer.Argument(metavar="BENCH...", help="Runs, as a load tool saves them."),
    list[Path],
]


@strict_dataclass
class Measuring:
    """The options of ``profile`` that ``--set`` gives."""

    device_name: Annotated[str | None, "folder of the device, as h200-sdpa: the GPU's, or cpu"] = (
        None
    )
    max_tokens: Annotated[int | None, Ge(2), "of a batch"] = None
    max_context: Annotated[int | None, Ge(16), "tokens of a sequence, cached ones included"] = None
    max_batch: Annotated[int | None, Ge(2), "sequences of a decode batch"] = None
    target_error: Annotated[float, Ge(0.01), "held-out error to stop at, percent: 3"] = 3.0
    expert_distribution: Annotated[
        Literal["balanced", "power_law_1.01", "power_law_1.2"],
        "balanced, power_law_1.01 or power_law_1.2",
    ] = "power_law_1.2"
    flush: Annotated[
        Literal["write", "read", "rotate"],
        "how the L2 is made cold: write or read a large buffer, or rotate over copies of weights",
    ] = "read"
    ops: Annotated[list[str], "only these, and keep their points"] = ()  # type: ignore[assignment]
    max_seconds: Annotated[float, Ge(1), "end then; the same command goes on"] = math.inf
    sustained: Annotated[float, Ge(0), "seconds that a layer runs without a pause: 20"] = 20.0
    repeats: Annotated[int, Ge(1), "least samples of a point: 5"] = 5
    threads: Annotated[int, Ge(1), "CPU threads of a rank: 1"] = 1
    inter_node: Annotated[str | None, "sends between nodes, as ranks.py wrote them"] = None
    collectives: Annotated[str | None, "bundle with all-reduce and send/recv"] = None


def profile(
    model: ModelOption,
    *,
    tp: Annotated[
        Sequence[int],
        typer.Option(help="Tensor-parallel degrees, as in --tp 1 2 4.  [default: 1]"),
        list[int],
    ] = (),
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="The GPU, or the CPU.")] = "cuda",
    dtype: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        typer.Option(help="Of weights and activations.  [default: fp16, on a CPU fp32]"),
    ] = None,
    attention: Annotated[
        Literal["auto", "xformers", "sdpa", "cudnn", "fa3"],
        typer.Option(
            help="auto: xformers if it works, else torch SDPA; cudnn and fa3 (FlashAttention 3): "
            "kernels of SDPA."
        ),
    ] = "auto",
    weights: Annotated[
        Literal["dtype", "fp8"],
        typer.Option(help="Format of the layer's GEMMs: that of --dtype, or fp8 (a GPU's)."),
    ] = "dtype",
    budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds after which no point is added.  [default: 45, on a GPU 240]"
        ),
    ] = None,
    changes: Annotated[
        Assignments,
        typer.Option("--set", metavar="NAME=VALUE", help=in_a_paragraph(Measuring)),
        list[str],
    ] = (),
    out: Annotated[
        Folder,
        typer.Option(help="Root folder of profiles: the key `profiles` of a configuration."),
        Path,
    ] = PROFILES,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again what was measured already.")
    ] = False,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Measure op times on this GPU or CPU (needs torch).

    It measures one layer's shard with random weights. After an interruption, the same command
    continues.

    \b
    Examples:
      sarathi-sim profile --model llama-13b --tp 1 2 4 8 --out profiles
      sarathi-sim profile --model tiny-llama-40m --tp 1 2 --device cpu --out profiles
      sarathi-sim profile --model llama-13b --attention sdpa --set device_name=h200-sdpa
      sarathi-sim run my.yaml --set device=profiles/cpu.yaml --set profiles=profiles
    """
    from sarathi_sim.profiler.facts.model import load_model
    from sarathi_sim.profiler.measuring.measure import profile as measure
    from sarathi_sim.profiler.planning.grid import Limits, Settings, default_limits

    chosen, spec = further(Measuring, changes), load_model(model)
    usual = default_limits(device, spec.max_position_embeddings)
    settings = Settings(
        model=spec,
        tps=tuple(dict.fromkeys(tp or [1])),
        device=device,
        dtype=_DTYPES[dtype or ("fp32" if device == "cpu" else "fp16")],
        out=Path(out),
        limits=Limits(
            chosen.max_tokens or usual.max_tokens,
            chosen.max_context or usual.max_context,
            chosen.max_batch or usual.max_batch,
        ),
        device_name=chosen.device_name,
        budget_s=budget if budget is not None else (45.0 if device == "cpu" else 240.0),
        target=chosen.target_error / 100,
        repeats=chosen.repeats,
        threads=chosen.threads,
        inter_node=Path(chosen.inter_node) if chosen.inter_node else None,
        collectives=Path(chosen.collectives) if chosen.collectives else None,
        attention=attention,
        force=force,
        weights=weights,
        expert_distribution=chosen.expert_distribution,
        flush=chosen.flush,
        ops=tuple(chosen.ops),
        max_s=chosen.max_seconds,
        sustained_s=chosen.sustained,
    )
    return Result({}, written=measure(settings, say, progress))


def fit(
    bundle: Annotated[Folder, typer.Argument(metavar="DIR", help="A bundle."), Path],
    *,
    out: Annotated[
        Folder | None,
        typer.Option(help="Also write the table (CSV, JSON) and a figure per op to this folder."),
        Path | None,
    ] = None,
    progress: Progress = silent,
) -> Result:
    """Check a bundle, and print the errors of its regressions.

    The exit code is 2 if the bundle cannot be used or is faster than its device can be; nothing is
    fitted then. Outliers, and times that fall as work grows, are only warnings: real kernels show
    both.

    Errors are in percent of the bundle's times, on held-out points only: between the points, at
    tile edges, beyond the range (fitted up to a quarter of it), and for a GEMM's shape from the
    other GEMMs (unseen). A random forest and a polynomial fitted to the same points are beside
    them. The last column is the share of the points inside that the 90 % band covers. If the bundle
    holds whole layers or skewed decodes, a further table has the errors of the sum of ops and of
    the mean context, and the errors that remain with the fitted corrections.

    \b
    Examples:
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1 --out runs/fits
    """
    from sarathi_sim.profiler.bundle.check import check_folder
    from .report.fits import describe, write_fits
    from .results import FITS_FORMAT, check_replaceable

    path, question = Path(bundle), "How far off is this bundle?"
    checked = check_folder(path)
    if out is not None:
        check_replaceable(Path(out), FITS_FORMAT)
    levels = {op: [f.level for f in checked.findings if f.where == op] for op in checked.coverage}
    coverage = [
        (op, there, ", ".join(dict.fromkeys(levels[op])) or "good")
        for op, there in checked.coverage.items()
    ]
    findings = Table(str(path), ("op", "what is there", "findings"), coverage, text=3)
    worst = sorted(checked.findings, key=lambda finding: finding.level != "error")
    said = [f"{f.level}: {f.where}: {f.message}" for f in worst]
    if checked.failed:
        section = Section("fit", str(path), question, "", [findings], warnings=said)
        return Result({}, section, code=2)
    loaded = checked.bundle
    errors = describe(loaded, progress)
    if out is not None:
        write_fits(loaded, errors, Path(out), progress)
    headings = ("points", "median", "p95", "worst", "forest: median", "p95", "polynomial: median")
    rows = [
        (op, where, str(points), *("" if value != value else f"{value:.1f}" for value in percent))
        for op, where, points, *percent in errors.itertuples(index=False)
    ]
    title = f"{path}: error on held-out points, percent"
    table = Table(title, ("op", "where", *headings, "p95", "in band"), rows, text=2)
    details = (
        _beyond_single_ops(loaded) if len(loaded.mixed) or len(loaded.attn_decode_skew) else []
    )
    question = "How far off is this bundle?"
    section = Section("fit", str(path), question, "", [table, *details])
    return Result({}, section, table=errors, written=written(out))


def _beyond_single_ops(bundle: "Bundle") -> list[Table]:
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
    headings = ("what", "predicted as", "points", "median", "p95", "worst")
    return [Table(title, headings, rows, text=2)]


def score(
    files: RunsArgument,
    config: ServerOption,
    changes: SetOption = (),
    *,
    out: AlsoOption = None,
    progress: Progress = silent,
) -> Result:
    """Say how far off the simulation of your own server is.

    Each BENCH has runs with the times of every request, as vLLM, SGLang, AIPerf, guidellm and
    LLMServingSim save them (docs/real_servers.md). They are simulated with the same requests, at
    the times when they reached the server; distributions are compared, and what remains is divided.

    \b
    Examples:
      sarathi-sim score tp8_pp1_qps_*.json --config score_llama70b_a100_tp8 --out runs/tp8
      sarathi-sim score requests.jsonl --config score_llama8b_rtx4090
      sarathi-sim score bench.json --config my.yaml --set kv_cache.num_blocks=2588 --json
    """
    from .config.loading import load_experiment
    from .measured.replay import cases_of
    from .measured.score import score_runs
    from .report.draw import draw_all
    from .report.score_answers import run_distributions, score_answer
    from .results import SCORE_FORMAT, check_replaceable, result_folder, write_summary

    experiment = load_experiment(config, changes)
    if out is not None:
        check_replaceable(Path(out), SCORE_FORMAT)
    found = score_runs(cases_of(experiment, [Path(file) for file in files]), progress)
    content = found.content()
    section = score_answer(content)
    if out is not None:
        with result_folder(Path(out), SCORE_FORMAT) as folder:
            write_summary(folder, SCORE_FORMAT, content | section.words())
            found.write(folder)
            charts = {
                each.case.name.replace(", ", "_"): run_distributions(each) for each in found.runs
            }
            draw_all(charts, folder / "figures", progress)
    return Result(content | section.words(), section, written=written(out))


def tune(
    files: RunsArgument,
    config: ServerOption,
    changes: SetOption = (),
    *,
    out: Annotated[
        Folder | None, typer.Option(help="The calibration: a YAML file."), Path | None
    ] = None,
    progress: Progress = silent,
) -> Result:
    """Calibrate the simulation with runs of your own server.

    Each BENCH holds one run or several, of vLLM's bench serve, SGLang's bench_serving, AIPerf,
    GenAI-Perf, guidellm or LLMServingSim (docs/real_servers.md). The engine's constants, and
    factors on the times of kernels and messages, are fitted to them, and shrunk towards what the
    engine has elsewhere. Other configurations of the server take them by: calibration: tuned.yaml

    \b
    Examples:
      sarathi-sim tune bench.json --config server.yaml --out tuned.yaml
      sarathi-sim tune rate4.json burst.json --config server.yaml --out tuned.yaml --json
      sarathi-sim capacity server.yaml --set calibration=tuned.yaml
    """
    from sarathi_sim.profiler.storage.files import write_whole
    from .config.inputs import check_replaceable
    from .config.loading import load_experiment
    from .measured.tune import tune as calibrated
    from .report.score_answers import tune_answer

    if out is not None:
        check_replaceable(Path(out))
    paths = [Path(file) for file in files]
    fitted = calibrated(load_experiment(config, changes), paths, progress)
    content = fitted.content()
    if out is not None:
        write_whole(Path(out), fitted.calibration.text())
        content["command"] = f"sarathi-sim run {config} --set calibration={out}"
    section = tune_answer(content)
    return Result(content | section.words(), section, written=written(out))
