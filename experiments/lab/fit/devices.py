"""Device models, fitted to public measurements: rows, form and hold-outs of every op of a device.

The paper's own timings are not among the sources, so that a comparison with it is a prediction.
Final constants and residuals come from all rows. Every reported error comes from models that saw no
row of the scored group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from sarathi_sim.profiler.physics.fit import (
    Folds,
    OpModel,
    fit_constants,
    leave_one_group_out,
    median_p95_worst,
)
from sarathi_sim.profiler.physics.forms import (
    ATTN_CONTEXT,
    ATTN_PREFILL,
    GEMM,
    LINK,
    STREAM,
    Form,
    decode_form,
)
from sarathi_sim.profiler.physics.residual import fit_curve, fit_trees
from sarathi_sim.profiler.storage.child import Say, silent
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import SpecError
from ..sources import aiconfigurator as aic
from ..sources import llmservingsim as data
from ..sources import vidur

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
    residuals: dict[str, npt.NDArray[Any]]

    def write(self, folder: Path | None = None) -> list[Path]:
        """Write ``<device>.yaml`` (below its marker) and ``<device>.npz``, into the shipped devices
        by default; returns both paths. The same result gives the same bytes."""
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


def calibrate(device: str, datasets: Path, progress: Say = silent) -> CalibrationResult:
    """Fit every op of ``device`` to the files under ``datasets``; deterministic but for the
    date that is recorded, today.

    Raises SpecError for a device without public measurements, FileNotFoundError for a missing file.
    """
    if device not in STUDIES:
        raise SpecError(
            f"device {device!r} has no public measurements to fit; allowed: {', '.join(STUDIES)}"
        )
    fitted, residuals = dict[str, FittedOp](), dict[str, npt.NDArray[Any]]()
    for study in STUDIES[device](datasets):
        progress(f"{device}: {study.op} ({len(study.rows)} rows)")
        model = fit_op(study.form, study.rows)
        fitted[study.op] = _record(study, model)
        if model.residual is not None:
            stored = model.residual.arrays()
            residuals.update({f"{study.op}.{name}": array for name, array in stored.items()})
    return CalibrationResult(device, fitted, residuals)


def today() -> str:
    """The date of a fit."""
    return datetime.now(UTC).date().isoformat()


def _record(study: Study, model: OpModel) -> FittedOp:
    scores = study.hold_out.scores(study.form, study.rows)
    by = next(name for name in BINS if name in study.form.inputs)
    parts = {name: scores[mask] for name, mask in _bins(scores, by) if mask.any()}
    if study.again is not None:
        parts[study.again.name] = study.again.scores(study.form, study.rows)
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
        date=today(),
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


def report(fitted: Mapping[str, FittedOp]) -> pd.DataFrame:
    """One row an op: rows, held-out median, p95, worst, and the same for the roofline alone."""
    return pd.DataFrame(
        {"op": op, "rows": fit.rows, **_percent(fit.held_out),
         **_percent(fit.roofline_only, "roofline alone: "), "hold_out": fit.hold_out}
        for op, fit in fitted.items()
    )  # fmt: skip


def structure(fitted: Mapping[str, FittedOp]) -> pd.DataFrame:
    """Held-out errors by ranges of the inputs, tile edges, and rows of other sources."""
    return pd.DataFrame(
        {"op": op, "kind": kind, "where": where, **_percent(stats)}
        for op, fit in fitted.items()
        for kind, table in (("held out", fit.structure), ("other source", fit.checks))
        for where, stats in table.items()
    )


def _percent(stats: ErrorStats, of: str = "") -> dict[str, float]:
    return {f"{of}{name.removesuffix('_pct')}": error for name, error in vars(stats).items()}


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
    """The scored rows, with ``predicted_us`` and ``roofline_us`` by a model fitted to the rows of
    their fold alone."""
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


@dataclass(frozen=True)
class Origin:
    """Repository with commit, and licence, of published measurements."""

    repository: str
    licence: str


_DESCRIBED = read_mapping(Path(__file__).with_name("studies.yaml"))
ORIGINS = {name: Origin(*about) for name, about in _DESCRIBED["origins"].items()}
BINS: dict[str, list[int]] = _DESCRIBED["ranges"]


@dataclass(frozen=True)
class HoldOut:
    """Rows with equal ``by`` columns are held out together, in ``folds`` folds; ``scored`` is a
    pandas query for the rows that count, all by default."""

    name: str
    by: Sequence[str]
    folds: int
    scored: str = ""

    def splits(self, rows: pd.DataFrame) -> Folds:
        """Rows to fit and rows to score, a pair a fold; ``rows`` must have a plain index."""
        counts = rows.query(self.scored).index if self.scored else rows.index
        return leave_one_group_out(
            fold_of(rows[list(self.by)], self.folds), rows.index.isin(counts)
        )

    def scores(self, form: Form, rows: pd.DataFrame) -> pd.DataFrame:
        """The scored rows, as :func:`held_out` predicts them."""
        return held_out(form, rows, self.splits(rows))


@dataclass(frozen=True, eq=False)
class Study:
    """One op of one device. ``again`` is a second hold-out, reported beside the first; ``checks``
    are named rows of other sources, never fitted; ``stack_pct`` is the half-width that another
    stack's kernels add."""

    op: str
    form: Form
    rows: pd.DataFrame
    hold_out: HoldOut
    source: str
    origin: Origin
    notes: str = ""
    checks: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    again: HoldOut | None = None
    stack_pct: float = 0.0


def filled(part: Any, words: Mapping[str, Any]) -> Any:
    """A part of a YAML file with ``words`` for the names in its braces; text that is such a name
    alone becomes the word as it is."""
    if isinstance(part, dict):
        return {key: filled(each, words) for key, each in part.items()}
    if isinstance(part, list):
        return [filled(each, words) for each in part]
    if not isinstance(part, str):
        return part
    whole = part[1:-1] if part.startswith("{") else ""
    return words[whole] if whole in words else part.format_map(words)


def _study(
    of: str,
    op: str,
    form: Form,
    rows: pd.DataFrame,
    words: Mapping[str, object] = {},
    name: str = "",
    checks: Mapping[str, pd.DataFrame] = {},
) -> Study:
    """The study of an op as studies.yaml describes it at ``of`` and its ``name`` there (empty: the
    op's); ``words`` fill its braces."""
    about = filled(_DESCRIBED[of][name or op], words)
    pct = about.pop("stack_pct", 0.0)
    return Study(
        op, form, rows, HoldOut(**about.pop("hold_out")), origin=ORIGINS[about.pop("origin")],
        again=HoldOut(**about.pop("again")) if "again" in about else None, checks=checks,
        stack_pct=pct[str(words["gpus"])] if isinstance(pct, dict) else pct, **about,
    )  # fmt: skip


def on(frame: pd.DataFrame, device: DeviceSpec) -> pd.DataFrame:
    """The rows with the hardware columns of the device they were measured on."""
    return frame.assign(
        peak_flops=device.peak_flops,
        bandwidth=device.memory_bandwidth,
        num_sms=float(device.num_sms),
    ).reset_index(drop=True)


def _elementwise(datasets: Path, name: str, device: DeviceSpec) -> Iterator[Study]:
    """The elementwise ops and the embedding, from Vidur's files for ``a100`` or ``a40``."""
    for op, rows in sorted(vidur.mlp(datasets, name).items()):
        if op != "gemm":
            kind = "several" if rows["model"].nunique() > 1 else "one"
            words = {"device": name.upper(), "op_name": op}
            yield _study("elementwise", op, STREAM, on(rows, device), words, kind)


def _a100(datasets: Path) -> Iterator[Study]:
    device = load_device("a100-80g-sxm")
    large = "n >= 512 and k >= 512"
    rows = on(aic.aic_gemm(datasets).query(f"{large} and n * k >= 2**20"), device)
    vllm = aic.aic_gemm(datasets, "VLLM").query(f"m == 384 and {large}")
    checks = {
        "m = 384, never in the fit, as vLLM measures it": on(vllm, device),
        "other stack: Vidur A100 fp16": on(vidur.mlp(datasets, "a100")["gemm"], device),
    }
    yield _study("a100", "gemm", GEMM, rows, checks=checks)
    prompts = aic.aic_prefill(datasets).query("batch == 1 and chunk > 1")
    yield _study("a100", "attn_prefill", ATTN_PREFILL, on(prompts, device))
    paged = vidur.prefill(datasets)
    fresh = paged[paged["context"] == 0].set_index("chunk")["time_us"]
    paged = paged.assign(base_us=paged["chunk"].map(fresh)).query("context > 0")
    yield _study("a100", "attn_context", ATTN_CONTEXT, on(paged, device))
    # Decodes of MHA and GQA are different kernels: each from a source that measured it well.
    inside = "15 <= context <= 32768"
    mha = aic.aic_decode(datasets, "TRTLLM").query(f"heads == kv_heads and {inside}")
    mha = on(aic.from_memory(mha, device), device)
    yield _study("a100", "attn_decode_mha", decode_form(splits=True, packed=True), mha)
    gqa = on(aic.aic_decode(datasets).query(f"heads > kv_heads and {inside}"), device)
    checks = {"other stack: Vidur A100, 32/4 heads": on(vidur.decode(datasets), device)}
    form = decode_form(splits=False, packed=True)
    yield _study("a100", "attn_decode_gqa", form, gqa, checks=checks)
    yield from _elementwise(datasets, "a100", device)
    for gpus in (2, 4, 8):
        # NCCL without launches; beside it the calls of 2023, which an engine launched one by one.
        rows = aic.aic_all_reduce(datasets, gpus)
        calls, empty_us = vidur.all_reduce_2023(datasets, gpus)
        launch = empty_us - float(rows["time_us"].min())
        calls = calls.assign(time_us=calls["time_us"] - launch)
        checks = {f"2023, up to 512 tokens, {launch:.0f} us of launch taken off": on(calls, device)}
        words = {"gpus": gpus, "empty_us": empty_us, "launch_us": launch}
        of = (f"all_reduce_{gpus}", LINK, on(rows, device), words)
        yield _study("a100", *of, "all_reduce", checks)
    for scope, wire in (("intra_node", "NVLink"), ("inter_node", "200 Gb/s InfiniBand")):
        rows = on(vidur.p2p_2023(datasets, scope), device)
        yield _study("a100", f"send_recv_{scope}", LINK, rows, {"wire": wire}, "send_recv")


def _ga102(datasets: Path, target: str) -> Iterator[Study]:
    """A6000 or A40: the same silicon (GA102, 84 SMs), so their measurements complement each
    other."""
    a6000, a40 = load_device("a6000"), load_device("a40")
    lent = target != "a6000"
    gemms = vidur.mlp(datasets, "a40")["gemm"].drop(columns="model")
    gemms = on(gemms.query("n >= 512 and k >= 512"), a40)
    rows = pd.concat([on(data.llmservingsim_gemm(datasets), a6000), gemms], ignore_index=True)
    words = {"target": target, "mine": f"peak_flops == {load_device(target).peak_flops}"}
    gemm = _study("ga102", "gemm", GEMM, rows, words)
    yield replace(gemm, again=None) if lent else gemm
    elsewhere = "measured on the A6000, not on this device; "
    words = {"lent": " (lent)" * lent, "elsewhere": elsewhere * lent}
    prompts, decodes = (on(rows, a6000) for rows in data.llmservingsim_attention(datasets))
    prefill = _study("ga102", "attn_prefill", ATTN_PREFILL, prompts, words)
    yield replace(prefill, stack_pct=100.0) if lent else prefill
    # In the file's GQA without packing, L2 serves the query heads of a group: it does not show
    # what HBM gives to MHA. 0.81 is the share that attn_decode_mha found on the A100.
    form = decode_form(splits=False, packed=False, hbm=0.81)
    yield _study("ga102", "attn_decode", form, decodes, words)
    yield from _elementwise(datasets, "a40", a40)
    for gpus in (2, 4, 8):
        rows = on(vidur.all_reduce(datasets, gpus), a40)
        yield _study("ga102", f"all_reduce_{gpus}", LINK, rows, {"gpus": gpus}, "all_reduce")
    for scope in ("intra_node", "inter_node"):
        rows = on(vidur.send_recv_a40(datasets, scope), a40)
        yield _study("ga102", f"send_recv_{scope}", LINK, rows, {"scope": scope}, "send_recv")


#: The devices that the public measurements calibrate.
STUDIES: dict[str, Callable[[Path], Iterator[Study]]] = {
    "a100-80g-sxm": _a100,
    "a6000": lambda datasets: _ga102(datasets, "a6000"),
    "a40": lambda datasets: _ga102(datasets, "a40"),
}
