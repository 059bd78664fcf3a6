"""The commands for a server of one's own: profile its GPU, fit, score, tune. As ``library.py``."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from annotated_types import Ge

from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.strict import strict_dataclass
from .config.base import Config
from .options import (
    AlsoOption,
    FolderText,
    FolderTexts,
    ModelOption,
    OutText,
    SetOption,
    SetText,
    further,
    in_a_paragraph,
    written,
)
from .report.section import Result, Section, sentence

PROFILES = Path("profiles")
"""Where bundles are written."""
_DTYPES: dict[str, Literal["float16", "bfloat16", "float32"]] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}
ServerOption = Annotated[Config, str, "The deployment that was measured: YAML, or a shipped one."]
RunsArgument = Annotated[
    FolderTexts, typer.Argument(metavar="BENCH...", help="Results of a load tool.")
]


@strict_dataclass
class Measuring:
    """The options of ``profile`` that ``--set`` gives."""

    device_name: Annotated[str | None, "folder of the device, as h200-sdpa: the GPU's, or cpu"] = (
        None
    )
    max_tokens: Annotated[int | None, Ge(2), "tokens of a batch"] = None
    max_context: Annotated[int | None, Ge(16), "tokens of a sequence, cached ones included"] = None
    max_batch: Annotated[int | None, Ge(2), "sequences of a decode batch"] = None
    target_error: Annotated[float, Ge(0.01), "held-out error to stop at, percent: 3"] = 3.0
    expert_distribution: Annotated[
        Literal["balanced", "power_law_1.01", "power_law_1.2"],
        "balanced, power_law_1.01 or power_law_1.2",
    ] = "power_law_1.2"
    flush: Annotated[
        Literal["write", "read", "rotate"],
        "how the L2 cache is emptied: write or read a large buffer, or rotate over weight copies",
    ] = "read"
    ops: Annotated[list[str], "measure only these; a later run adds the rest"] = ()  # type: ignore[assignment]
    max_seconds: Annotated[float, Ge(1), "stop then; the same command continues"] = math.inf
    sustained: Annotated[float, Ge(0), "seconds that a layer runs without a pause: 20"] = 20.0
    repeats: Annotated[int, Ge(1), "samples of a point, at least: 5"] = 5
    threads: Annotated[int, Ge(1), "CPU threads of a rank: 1"] = 1
    inter_node: Annotated[str | None, "file of sends between nodes, by ranks.py"] = None
    collectives: Annotated[str | None, "bundle with all-reduce and send/recv"] = None


def profile(
    model: ModelOption,
    *,
    tp: Annotated[
        Sequence[int], list[int], "Tensor-parallel degrees, as in --tp 1 2 4.  [default: 1]"
    ] = (),
    device: Annotated[Literal["cpu", "cuda"], "The GPU, or the CPU."] = "cuda",
    dtype: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        "Number format of weights and activations.  [default: fp16, on a CPU fp32]",
    ] = None,
    attention: Annotated[
        Literal["auto", "xformers", "sdpa", "cudnn", "fa3"],
        "auto: xformers if it works, else torch SDPA; cudnn and fa3 (FlashAttention 3): kernels of "
        "SDPA.",
    ] = "auto",
    weights: Annotated[
        Literal["dtype", "fp8"],
        "Format of the layer's GEMMs: that of --dtype, or fp8 (on a GPU).",
    ] = "dtype",
    budget: Annotated[
        float | None, Ge(0), "Seconds after which no size is added.  [default: 45, on a GPU 240]"
    ] = None,
    changes: Annotated[SetText, "--set", "NAME=VALUE", in_a_paragraph(Measuring)] = (),
    out: Annotated[
        FolderText, "Root folder of profiles: the key `profiles` of a configuration."
    ] = PROFILES,
    force: Annotated[bool, "Measure again what was measured already."] = False,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Measure op times on this GPU or CPU (needs torch).

    It measures one GPU's shard of a layer at each TP degree, with random weights. After an
    interruption, the same command continues.

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
    paths = measure(settings, say, progress)
    bundles = [path for path in paths if path.is_dir()]
    answer = sentence({"measured": ", ".join(f"{model}, {path.name}" for path in bundles)})
    check = f"sarathi-sim fit {bundles[0]}" if bundles else ""
    question = "How long does each op take here?"
    section = Section("profile", str(model), question, answer, command=check)
    return Result({}, section, written=paths)


def fit(
    bundle: Annotated[FolderText, typer.Argument(metavar="DIR", help="A profile bundle.")],
    *,
    out: Annotated[
        OutText, "Also write the table (CSV, JSON) and a figure per op to this folder."
    ] = None,
    progress: Progress = silent,
) -> Result:
    """Check a profile bundle, and print the errors of its regressions.

    If the bundle cannot be used, or is faster than its device can be, nothing is fitted and the
    exit code is 2. Outliers, and times that fall as work grows, are only warnings: real kernels
    show both.

    Errors are in percent of the bundle's times, on points held out of the fit: between the others,
    at tile edges, beyond the range (fitted up to a quarter of it), and at a GEMM's shape, predicted
    from the other GEMMs (unseen). Next to them are the errors of a random forest and a polynomial.
    The last column is the share of the points between the others that the 90 % band covers. If the
    bundle holds whole layers or skewed decodes, a further table has the errors of the sum of ops
    and of the mean context, without and with the fitted corrections.

    \b
    Examples:
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1
      sarathi-sim fit profiles/cpu/tiny-llama-40m/tp1 --out runs/fits
    """
    from sarathi_sim.profiler.bundle.check import check_folder
    from .report.score_answers import beyond_single_ops, describe, fit_section, write_fits
    from .results import FITS_FORMAT, check_replaceable

    path = Path(bundle)
    checked = check_folder(path)
    if out is not None:
        check_replaceable(Path(out), FITS_FORMAT)
    if checked.failed:
        return Result({}, fit_section(path, checked, None), code=2)
    errors = describe(checked.bundle, progress)
    if out is not None:
        write_fits(checked.bundle, errors, Path(out), progress)
    section = fit_section(path, checked, errors, beyond_single_ops(checked.bundle))
    return Result({}, section, table=errors, written=written(out))


def score(
    files: RunsArgument,
    config: ServerOption,
    changes: SetOption = (),
    *,
    out: AlsoOption = None,
    progress: Progress = silent,
) -> Result:
    """Say whether your own server does what was predicted.

    Each BENCH has runs with the times of every request, as vLLM, SGLang, AIPerf, guidellm and
    LLMServingSim save them (docs/server/tune.md): `load.sh` of `recommend` makes one. The same
    requests are simulated, with their measured arrival times. The table has the predicted and the
    measured values, and says whether they are inside the 90 % band. --verbose adds the simulation
    with constants fitted to the runs, and the parts of the latency that are missing.

    \b
    Examples:
      sarathi-sim score measured.json --config runs/recommend/winner.yaml
      sarathi-sim score tp8_pp1_qps_*.json --config score_llama70b_a100_tp8 --out runs/tp8
      sarathi-sim score requests.jsonl --config score_llama8b_rtx4090
      sarathi-sim score bench.json --config my.yaml --set kv_cache.num_blocks=2588 --json
    """
    from .config.loading import load_experiment
    from .measured.replay import cases_of
    from .measured.score import score_runs
    from .report.draw import draw_all
    from .report.score_answers import run_distributions, score_section
    from .report.section import heading_of
    from .results import SCORE_FORMAT, check_replaceable, result_folder, write_summary

    experiment = load_experiment(config, changes)
    if out is not None:
        check_replaceable(Path(out), SCORE_FORMAT)
    found = score_runs(cases_of(experiment, [Path(file) for file in files]), progress)
    content = found.content()
    section = score_section(content)
    if out is not None:
        with result_folder(Path(out), SCORE_FORMAT) as folder:
            write_summary(folder, SCORE_FORMAT, content | section.words())
            found.write(folder)
            for each in found.runs:
                charts = {each.case.name.replace(", ", "_"): run_distributions(each)}
                heading = f"{heading_of(content)}; {each.case.name}"
                draw_all(charts, folder / "figures", progress, heading)
    return Result(content | section.words(), section, written=written(out))


def tune(
    files: RunsArgument,
    config: ServerOption,
    changes: SetOption = (),
    *,
    out: Annotated[OutText, "The calibration: a YAML file."] = None,
    progress: Progress = silent,
) -> Result:
    """Calibrate the simulation with runs of your own server.

    Each BENCH holds one run or several, of vLLM's bench serve, SGLang's bench_serving, AIPerf,
    GenAI-Perf, guidellm or LLMServingSim (docs/server/tune.md). The engine's constants, and
    factors on the times of kernels and messages, are fitted to them. What the runs do not determine
    stays near the shipped values. For other runs of the server set: calibration: tuned.yaml

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
    from .report.score_answers import tune_section

    if out is not None:
        check_replaceable(Path(out))
    paths = [Path(file) for file in files]
    fitted = calibrated(load_experiment(config, changes), paths, progress)
    content = fitted.content()
    if out is not None:
        write_whole(Path(out), fitted.calibration.text())
        content["command"] = f"sarathi-sim run {config} --set calibration={out}"
    section = tune_section(content)
    return Result(content | section.words(), section, written=written(out))
