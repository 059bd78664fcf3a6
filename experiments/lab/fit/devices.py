"""Device models, fitted to public measurements: rows, form and hold-outs of every op of a device.

The paper's own timings are not among the sources, so that a comparison with it is a prediction.
Final constants and residuals come from all rows. Every reported error comes from models that saw no
row of the scored group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.facts.device import (
    DeviceSpec,
    ErrorStats,
    FittedOp,
    list_devices,
    load_device,
)
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.physics.fit import OpModel, fit_constants
from sarathi_sim.profiler.physics.forms import (
    ATTN_CONTEXT,
    ATTN_PREFILL,
    GEMM,
    LINK,
    STREAM,
    Form,
    decode_form,
)
from sarathi_sim.profiler.physics.hold_out import Folds, leave_one_group_out, median_p95_worst
from sarathi_sim.profiler.physics.residual import Arrays, fit_curve, fit_trees
from sarathi_sim.profiler.public import frames as data
from sarathi_sim.profiler.public import vidur_frames as vidur
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.strict import SpecError

#: The device file is written by hand above this line, and by :meth:`CalibrationResult.write` below.
MARKER = "# --- below: written by `sarathi-sim calibrate --write` ---\n"
#: Physics needs few rows for its few constants; more only cost time.
_PHYSICS_ROWS = 4000
_CURVE_KNOTS = 24


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """The fitted ops of one device, with their held-out errors, and the residuals' arrays."""

    device: str
    fitted: dict[str, FittedOp]
    residuals: Arrays

    def write(self, folder: Path | None = None) -> list[Path]:
        """Write ``<device>.yaml`` (below its marker) and ``<device>.npz``; returns both paths.

        ``folder`` defaults to the shipped devices. The same result gives the same bytes.
        """
        target = folder or data_dir() / "devices"
        shipped = data_dir() / "devices" / f"{self.device}.yaml"
        head = shipped.read_text(encoding="utf-8").partition(MARKER)[0]
        fitted = {op: asdict(fit) for op, fit in self.fitted.items()}
        spec, arrays = target / f"{self.device}.yaml", target / f"{self.device}.npz"
        content = BytesIO()
        np.savez_compressed(content, allow_pickle=False, **self.residuals)
        write_whole(arrays, content.getvalue())
        write_whole(spec, head + MARKER + dump_yaml({"fitted": fitted}, width=96))
        return [spec, arrays]


def calibrate(
    device: str,
    datasets: Path,
    progress: Callable[[str], None] = lambda step: None,
    date: str | None = None,
) -> CalibrationResult:
    """Fit every op of ``device`` to the files under ``datasets``; deterministic but for ``date``.

    ``progress`` is called with the name of each op before its fit; ``date`` (ISO, default today)
    is recorded. Raises SpecError for a device without public measurements, FileNotFoundError for a
    missing file.
    """
    if device not in STUDIES:
        raise SpecError(
            f"device {device!r} has no public measurements to fit; allowed: {', '.join(STUDIES)}"
        )
    today = date or datetime.now(UTC).date().isoformat()
    fitted: dict[str, FittedOp] = {}
    residuals: Arrays = {}
    for study in STUDIES[device](datasets):
        progress(f"{device}: {study.op} ({len(study.rows)} rows)")
        model = fit_op(study.form, study.rows)
        fitted[study.op] = _record(study, model, today)
        if model.residual is not None:
            stored = model.residual.arrays()
            residuals.update({f"{study.op}.{name}": array for name, array in stored.items()})
    return CalibrationResult(device, fitted, residuals)


def _record(study: Study, model: OpModel, date: str) -> FittedOp:
    scores, again = (
        held_out(study.form, study.rows, each.splits(study.rows)) if each else None
        for each in (study.hold_out, study.again)
    )
    assert scores is not None
    parts = {name: scores[mask] for name, mask in _bins(scores, study.bin_by) if mask.any()}
    if study.again is not None and again is not None:
        parts[study.again.name] = again
    checks = {
        name: rows.assign(predicted_us=model.predict(columns_of(rows)))
        for name, rows in study.checks.items()
    }
    return FittedOp(
        source=study.source,
        origin=study.origin.repository,
        licence=study.origin.licence,
        rows=len(study.rows),
        hold_out=study.hold_out.name,
        held_out=errors(scores),
        roofline_only=errors(scores, "roofline_us"),
        date=date,
        constants=model.constants,
        residual=model.residual is not None,
        structure={name: errors(part) for name, part in parts.items()},
        checks={name: errors(check) for name, check in checks.items()},
        notes=study.notes,
        stack_pct=study.stack_pct,
    )


def _bins(scores: pd.DataFrame, by: str) -> Iterator[tuple[str, pd.Series[bool]]]:
    """The ranges of a column; of GEMMs also both sides of a tile's edge."""
    size = scores[by]
    for low, high in pairwise(BINS[by]):
        yield f"{low} < {by} <= {high}", size.between(low, high, inclusive="right")
    if by == "m":
        yield "m = 128 j (end of a tile)", (size >= 128) & (size % 128 == 0)
        yield "m = 128 j + 1 (new tile)", (size >= 128) & (size % 128 == 1)


def fitted_devices(device: str | None) -> dict[str, dict[str, FittedOp]]:
    """The stored fits of one device, or of all fitted devices; needs no datasets."""
    if device is not None:
        load_device(device).op("gemm")  # raises, saying which devices are fitted
    specs = map(load_device, [device] if device else list_devices())
    return {spec.name: spec.fitted for spec in specs if spec.fitted is not None}


def report(device: str, fitted: Mapping[str, FittedOp]) -> pd.DataFrame:
    """One row an op: rows, held-out median, p95, worst, and the same for the roofline alone."""
    return pd.DataFrame(
        {
            **{"device": device, "op": op, "rows": fit.rows},
            **asdict(fit.held_out),
            **{f"roofline_{name}": error for name, error in asdict(fit.roofline_only).items()},
            **{"hold_out": fit.hold_out, "source": fit.source},
        }
        for op, fit in fitted.items()
    )


def structure(device: str, fitted: Mapping[str, FittedOp]) -> pd.DataFrame:
    """Held-out errors by ranges of the inputs, tile edges, and rows of other sources."""
    return pd.DataFrame(
        {"device": device, "op": op, "kind": kind, "where": where, **asdict(stats)}
        for op, fit in fitted.items()
        for kind, table in (("held out", fit.structure), ("other source", fit.checks))
        for where, stats in table.items()
    )


def columns_of(frame: pd.DataFrame) -> dict[str, Array]:
    """The numeric columns of a tidy frame as float arrays."""
    numeric = frame.select_dtypes("number")
    return {str(name): numeric[name].to_numpy(dtype=np.float64) for name in numeric.columns}


def fit_op(form: Form, frame: pd.DataFrame) -> OpModel:
    """Fit ``form`` to rows with the form's inputs and ``time_us``; deterministic."""
    rows = frame
    if len(frame) > _PHYSICS_ROWS:
        picked = np.random.default_rng(0).choice(len(frame), _PHYSICS_ROWS, replace=False)
        rows = frame.iloc[np.sort(picked)]
    model = OpModel(form, _fit_physics(form, columns_of(rows)), residual=None)
    if form.residual == "none":
        return model
    columns = columns_of(frame)
    target = np.log(columns["time_us"] / model.roofline(columns))
    features = form.features(columns)
    if form.residual == "curve":
        return replace(model, residual=fit_curve(features[:, 0], target, _CURVE_KNOTS))
    return replace(model, residual=fit_trees(features, target, form.iterations, form.leaves))


def _fit_physics(form: Form, columns: dict[str, Array]) -> dict[str, float]:
    names = list(form.fitted)
    start, low, high = np.log([form.fitted[n] for n in names]).T

    def constants(values: Array, choice: dict[str, float]) -> dict[str, float]:
        return {**choice, **dict(zip(names, values.tolist(), strict=True))}

    found = []
    for choice in form.choices:
        physics = partial(lambda chosen, x: form.physics(columns, constants(x, chosen)), choice)
        values, cost = fit_constants(physics, columns["time_us"], start, low, high, 60)
        found.append((cost, constants(values, choice)))
    best = min(found, key=lambda each: each[0])[1]
    # Six digits are more than the data holds, and keep the files stable.
    return {name: float(f"{value:.6g}") for name, value in best.items()}


def held_out(form: Form, frame: pd.DataFrame, folds: Folds) -> pd.DataFrame:
    """Predictions for every scored row by a model fitted to the rows of its fold alone.

    Returns the scored rows with ``predicted_us`` and ``roofline_us`` added.
    """
    parts = []
    for fitted, scored in folds:
        model, rows = fit_op(form, frame.iloc[fitted]), frame.iloc[scored]
        columns = columns_of(rows)
        parts.append(
            rows.assign(predicted_us=model.predict(columns), roofline_us=model.roofline(columns))
        )
    return pd.concat(parts)


def errors(frame: pd.DataFrame, column: str = "predicted_us") -> ErrorStats:
    """Absolute error of ``column`` against ``time_us``: median, 95th percentile, worst."""
    log_errors = np.log(frame[column].to_numpy() / frame["time_us"].to_numpy())
    return ErrorStats(*(round(value, 2) for value in median_p95_worst(log_errors)))


def fold_of(keys: pd.DataFrame, folds: int) -> npt.NDArray[np.int64]:
    """A fold number per row such that rows with equal keys share one; deterministic."""
    # GroupKFold would do as well, but its folds are others, and so would be the published errors.
    number = keys.groupby(list(keys.columns), sort=True).ngroup().to_numpy()
    shuffled = np.random.default_rng(0).permutation(int(number.max()) + 1)
    return (shuffled[number] % folds).astype(np.int64)


# Studies -----------------------------------------------------------------------------------------

BINS = {
    "m": (0, 16, 64, 128, 256, 512, 1024, 4096, 40000),
    "chunk": (0, 128, 256, 512, 1024, 4096, 16384),
    "context": (0, 256, 1024, 4096, 40000),
    "num_bytes": (0, 2**14, 2**18, 2**21, 2**24, 2**40),
}
"""The ranges by which held-out errors are split: a column, and its limits."""


@dataclass(frozen=True)
class Origin:
    """Repository with commit, and licence, of published measurements."""

    repository: str
    licence: str


AIC = Origin("ai-dynamo/aiconfigurator @095f58a", "Apache-2.0")
VIDUR = Origin("microsoft/vidur @7d47513", "MIT")
VIDUR_2023 = Origin("microsoft/vidur @aa06400 (history)", "MIT")
VIDUR_ATTENTION = Origin("microsoft/vidur @e2d00e9 (history)", "MIT")
VIDUR_A40_REDUCE = Origin("microsoft/vidur @6d98aa8 (history)", "MIT")
LLMSERVINGSIM = Origin("casys-kaist/LLMServingSim @5daddb2", "MIT")


@dataclass(frozen=True)
class HoldOut:
    """Rows with equal ``by`` columns are held out together, in ``folds`` folds.

    ``scored`` is a pandas query for the rows that count, all by default.
    """

    name: str
    by: tuple[str, ...]
    folds: int
    scored: str | None = None

    def splits(self, rows: pd.DataFrame) -> Folds:
        """Rows to fit and rows to score, a pair a fold; ``rows`` must have a plain index."""
        scored = np.full(len(rows), self.scored is None)
        if self.scored is not None:
            scored[rows.query(self.scored).index] = True
        return leave_one_group_out(fold_of(rows[list(self.by)], self.folds), scored)


@dataclass(frozen=True, eq=False)
class Study:
    """One op of one device.

    ``again`` is a second hold-out, reported beside the first; ``checks`` are named rows of other
    sources, never fitted; ``stack_pct`` is the half-width that another stack's kernels add.
    """

    op: str
    form: Form
    rows: pd.DataFrame
    hold_out: HoldOut
    source: str
    origin: Origin
    notes: str = ""
    checks: dict[str, pd.DataFrame] = field(default_factory=dict)
    again: HoldOut | None = None
    stack_pct: float = 0.0

    @property
    def bin_by(self) -> str:
        """The column, one of :data:`BINS`, whose ranges split the held-out errors."""
        return next(name for name in BINS if name in self.form.inputs)


def on(frame: pd.DataFrame, device: DeviceSpec) -> pd.DataFrame:
    """The rows with the hardware columns of the device they were measured on."""
    return frame.assign(
        peak_flops=device.peak_flops,
        bandwidth=device.memory_bandwidth,
        num_sms=float(device.num_sms),
    ).reset_index(drop=True)


def stream_studies(datasets: Path, name: str, device: DeviceSpec) -> Iterator[Study]:
    """The elementwise ops and the embedding, from Vidur's files for ``a100`` or ``a40``."""
    models = HoldOut("models (widths), up to 5 folds", ("model",), 5)
    counts = HoldOut("token counts, 5 folds", ("num_bytes",), 5)
    coarse = "measured to 1 us, which is 10 to 50 % of the smallest times"
    for op, rows in sorted(vidur.mlp(datasets, name).items()):
        if op == "gemm":
            continue
        several = rows["model"].nunique() > 1
        yield Study(
            op=op,
            form=STREAM,
            rows=on(rows, device),
            hold_out=models if several else counts,
            source=f"{name.upper()} {op} kernels of Vidur's MLP profiles",
            origin=VIDUR,
            notes=coarse if several else f"{coarse}; one model (phi-2): no width is held out",
        )


def link_study(
    op: str, rows: pd.DataFrame, device: DeviceSpec, source: str, origin: Origin
) -> Study:
    """A collective or point-to-point message by size."""
    return Study(
        op=op,
        form=LINK,
        rows=on(rows, device),
        hold_out=HoldOut("message sizes, up to 21 folds", ("num_bytes",), 21),
        source=source,
        origin=origin,
    )


#: Half-widths, percent, that the kernels of another software stack add. GEMMs: with 12 the band
#: covers 92 % of the A100's rows of three stacks that were not fitted (70 % without; see
#: data/README.md); the GA102's are assumed to be alike.
_OTHER_GEMM = 12.0
#: All-reduces by ranks: the band covers 90 % of those of 2023 up to 512 tokens, launch taken off.
_OTHER_REDUCE = {2: 95.0, 4: 25.0, 8: 25.0}
#: Attention: the band covers 89 to 90 % of the A100's rows of stacks that were not fitted (SGLang,
#: TensorRT-LLM, vLLM and, in decodes, Vidur); the GA102's are assumed to be alike.
_OTHER_PREFILL, _OTHER_MHA, _OTHER_GQA = 34.0, 68.0, 45.0
#: A prefill kernel lent by the A6000: paged kernels of 2023 are 2.5 times slower (Vidur, A100).
_LENT_PREFILL = 100.0


def _a100(datasets: Path) -> Iterator[Study]:
    device = load_device("a100-80g-sxm")
    yield _a100_gemm(datasets, device)
    yield from _a100_prefill(datasets, device)
    yield from _a100_decode(datasets, device)
    yield from stream_studies(datasets, "a100", device)
    for gpus in (2, 4, 8):
        yield _a100_reduce(datasets, device, gpus)
    for scope, wire in (("intra_node", "NVLink"), ("inter_node", "200 Gb/s InfiniBand")):
        rows = vidur.p2p_2023(datasets, scope)
        source = f"A100 point to point, {wire}, 2023; includes the launch of the call"
        yield link_study(f"send_recv_{scope}", rows, device, source, VIDUR_2023)


def _a100_reduce(datasets: Path, device: DeviceSpec, gpus: int) -> Study:
    """NCCL without launches; beside it the calls of 2023, which an engine launched one by one."""
    rows, source = data.aic_all_reduce(datasets, gpus), f"NCCL 2.27.3, {gpus} A100-SXM, NVLink"
    calls, empty_us = vidur.all_reduce_2023(datasets, gpus)
    launch = empty_us - float(rows["time_us"].min())
    calls = calls.assign(time_us=calls["time_us"] - launch)
    what = f"2023, up to 512 tokens, {launch:.0f} us of launch taken off"
    return replace(
        link_study(f"all_reduce_{gpus}", rows, device, source, AIC),
        checks={what: on(calls, device)},
        notes=f"transfer alone: a launch (in 2023 {empty_us:.0f} us an empty call, {launch:.0f} "
        "more than NCCL's smallest message) is the host's time",
        stack_pct=_OTHER_REDUCE[gpus],
    )


def _a100_gemm(datasets: Path, device: DeviceSpec) -> Study:
    large = "n >= 512 and k >= 512"
    vllm = data.aic_gemm(datasets, "VLLM").query(f"m == 384 and {large}")
    theirs = vidur.mlp(datasets, "a100")["gemm"]
    return Study(
        op="gemm",
        form=GEMM,
        rows=on(data.aic_gemm(datasets).query(f"{large} and n * k >= 2**20"), device),
        hold_out=HoldOut("shapes (n, k), 5 folds", ("n", "k"), 5),
        again=HoldOut("no shape with this n was fitted", ("n",), 5),
        source="A100-SXM bf16 GEMM, SGLang 0.5.10; n, k >= 512 and n k >= 2^20",
        origin=AIC,
        notes="one framework for consistency: only SGLang's rows hold the pairs m, m + 1 that show "
        "the tile steps; vLLM's and TensorRT-LLM's are 2 to 6 % faster in the mean",
        checks={
            "m = 384, never in the fit, as vLLM measures it": on(vllm, device),
            "other stack: Vidur A100 fp16": on(theirs, device),
        },
        stack_pct=_OTHER_GEMM,
    )


def _a100_prefill(datasets: Path, device: DeviceSpec) -> Iterator[Study]:
    yield Study(
        op="attn_prefill",
        form=ATTN_PREFILL,
        rows=on(data.aic_prefill(datasets).query("batch == 1 and chunk > 1"), device),
        hold_out=HoldOut("head counts (heads, kv_heads), 8 folds", ("heads", "kv_heads"), 8),
        source="A100-SXM FlashAttention in vLLM 0.14.0, one sequence, no cached context",
        origin=AIC,
        stack_pct=_OTHER_PREFILL,
    )
    paged = vidur.prefill(datasets)
    fresh = paged[paged["context"] == 0].set_index("chunk")["time_us"]
    paged = paged.assign(base_us=paged["chunk"].map(fresh)).query("context > 0")
    yield Study(
        op="attn_context",
        form=ATTN_CONTEXT,
        rows=on(paged, device),
        hold_out=HoldOut(
            "chunk sizes, 5 folds, given the measured time without context", ("chunk",), 5
        ),
        source="A100 paged FlashAttention, CodeLlama-34b TP2 (32 query, 4 KV heads)",
        origin=VIDUR_ATTENTION,
        notes="what cached tokens add to attn_prefill; measured at one head count only and carried "
        "to others by the number of blocks",
        stack_pct=_OTHER_PREFILL,
    )


def _a100_decode(datasets: Path, device: DeviceSpec) -> Iterator[Study]:
    """MHA and GQA apart: they are different kernels. Each from a source that measured it well."""
    inside = "15 <= context <= 32768"
    mha = data.aic_decode(datasets, "TRTLLM").query(f"heads == kv_heads and {inside}")
    by_heads = HoldOut("head counts (heads, kv_heads), 5 folds", ("heads", "kv_heads"), 5)
    yield Study(
        op="attn_decode_mha",
        form=decode_form(splits=True, packed=True),
        rows=on(mha[bandwidth_share(mha, device) <= 0.9], device),
        hold_out=by_heads,
        source="A100-SXM decode attention, TensorRT-LLM 1.0.0, kv_heads = heads",
        origin=AIC,
        notes="the only source of MHA at 4 to 64 heads whose long contexts reach HBM speed; cells "
        "above 90 % of HBM bandwidth are left out: their KV came from L2, from which the "
        "weights evict it in service",
        stack_pct=_OTHER_MHA,
    )
    yield Study(
        op="attn_decode_gqa",
        form=decode_form(splits=False, packed=True),
        rows=on(data.aic_decode(datasets).query(f"heads > kv_heads and {inside}"), device),
        hold_out=by_heads,
        source="A100-SXM FlashAttention decode in vLLM 0.14.0, heads > kv_heads",
        origin=AIC,
        notes="TensorRT-LLM's GQA rows are not used: they exceed HBM bandwidth by up to 65 % even "
        "where the KV cache is far larger than L2",
        checks={"other stack: Vidur A100, 32/4 heads": on(vidur.decode(datasets), device)},
        stack_pct=_OTHER_GQA,
    )


def bandwidth_share(rows: pd.DataFrame, device: DeviceSpec) -> pd.Series[float]:
    """The share of HBM bandwidth at which each row's KV cache is read once in its time."""
    kv_bytes = 4 * rows["head_dim"] * rows["kv_heads"] * rows["batch"] * rows["context"]
    return 1e6 * kv_bytes / rows["time_us"] / device.memory_bandwidth


def _ga102(datasets: Path, target: str) -> Iterator[Study]:
    """A6000 or A40: the same silicon (GA102, 84 SMs), so their measurements complement each
    other."""
    a40 = load_device("a40")
    yield _ga102_gemm(datasets, load_device(target))
    yield from _ga102_attention(datasets, target)
    yield from stream_studies(datasets, "a40", a40)
    for gpus in (2, 4, 8):
        rows, source = vidur.all_reduce_a40(datasets, gpus), f"all-reduce on {gpus} A40"
        reduce = link_study(f"all_reduce_{gpus}", rows, a40, source, VIDUR_A40_REDUCE)
        yield replace(reduce, stack_pct=_OTHER_REDUCE[gpus])
    for scope in ("intra_node", "inter_node"):
        rows, source = vidur.send_recv_a40(datasets, scope), f"A40 point to point, {scope}"
        yield link_study(f"send_recv_{scope}", rows, a40, source, VIDUR)


def _ga102_gemm(datasets: Path, target: DeviceSpec) -> Study:
    a6000 = on(data.llmservingsim_gemm(datasets), load_device("a6000"))
    a40 = vidur.mlp(datasets, "a40")["gemm"].drop(columns="model")
    a40 = on(a40.query("n >= 512 and k >= 512"), load_device("a40"))
    mine = f"peak_flops == {target.peak_flops}"
    shared = HoldOut(
        "shape (4096, 4096), which only the A40 rows held",
        ("peak_flops", "n", "k"),
        5,
        f"{mine} and n == 4096 and k == 4096",
    )
    return Study(
        op="gemm",
        form=GEMM,
        rows=pd.concat([a6000, a40], ignore_index=True),
        hold_out=HoldOut(f"shapes (n, k), 8 folds; {target.name} rows", ("n", "k"), 8, mine),
        again=shared if target.name == "a6000" else None,
        source="A6000 fp16 GEMM at every m of 1..2048 (5 shapes, LLMServingSim) with A40 fp16 GEMM "
        "(69 shapes, Vidur)",
        origin=Origin(f"{LLMSERVINGSIM.repository}; {VIDUR.repository}", "MIT"),
        notes="pooled: on held-out A6000 shapes this gives 5.4 / 22 % (median / 95th percentile), "
        "the A6000's rows alone 6.3 / 24 %",
        stack_pct=_OTHER_GEMM,
    )


def _ga102_attention(datasets: Path, target: str) -> Iterator[Study]:
    device = load_device("a6000")
    lent = target != "a6000"
    elsewhere = "measured on the A6000, not on this device; " if lent else ""
    prefill, decode = (on(rows, device) for rows in data.llmservingsim_attention(datasets))
    source = "A6000 flash_attn_varlen_func, 32 query and 8 KV heads" + (" (lent)" if lent else "")
    yield Study(
        op="attn_prefill",
        form=ATTN_PREFILL,
        rows=prefill,
        hold_out=HoldOut("chunk sizes, 5 folds", ("chunk",), 5),
        source=source,
        origin=LLMSERVINGSIM,
        notes=f"{elsewhere}one head count; chunk <= 1024, chunk + context <= 2048",
        stack_pct=_LENT_PREFILL if lent else _OTHER_PREFILL,
    )
    # In the file's GQA without packing, L2 serves the query heads of a group: it does not show
    # what HBM gives to MHA. 0.81 is the share that attn_decode_mha found on the A100.
    yield Study(
        op="attn_decode",
        form=decode_form(splits=False, packed=False, hbm=0.81),
        rows=decode,
        hold_out=HoldOut("batch sizes, 5 folds", ("batch",), 5),
        source=source,
        origin=LLMSERVINGSIM,
        notes=f"{elsewhere}GQA without split-KV; the HBM share, which MHA needs, is the A100's",
        stack_pct=_OTHER_GQA,
    )


#: The devices that the public measurements calibrate.
STUDIES: dict[str, Callable[[Path], Iterator[Study]]] = {
    "a100-80g-sxm": _a100,
    "a6000": lambda datasets: _ga102(datasets, "a6000"),
    "a40": lambda datasets: _ga102(datasets, "a40"),
}
