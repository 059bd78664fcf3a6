"""Public measurements as profile bundles: a source's rows, and what follows for other sizes.

Attention is scaled to another head count, and extended to cached context, by the calibrated device
model. Of GEMMs the ratio of measured to expected time is interpolated over (n, k). The expected
time counts tiles and waves over the device's SMs, because times step with the number of waves. On
the A100 grid, a shape predicted from its neighbours in n is then off by 2.9 % in the median and
12 % at the 95th percentile (calibrated device model fitted without that shape), 4.7 and 24 % with
a roofline, and about 5 and 27 % where the times themselves are interpolated. In k: 2.6 and 11 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.bundle.tables import TABLES, BundleError, empty_table
from sarathi_sim.profiler.facts.device import DeviceSpec, device_sha256, load_device
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import (
    ALL_REDUCE,
    ATTENTION,
    LAYER_GEMMS,
    OPS,
    ROW_OPS,
    SENDS,
    GemmShape,
)
from sarathi_sim.profiler.facts.roofline import HALF, Array, gemm_us
from sarathi_sim.profiler.physics.shard_times import DeviceModel, DeviceTimes, rounded_us
from sarathi_sim.profiler.storage.files import WHERE
from sarathi_sim.profiler.storage.strict import SpecError, did_you_mean
from ..sources import aiconfigurator, llmservingsim, vidur
from ..sources.measurements import Measurements, OpRows
from .devices import ORIGINS, columns_of, on, today

#: (tokens, shape) -> microseconds.
Expectation = Callable[[Array, GemmShape], Array]
#: Heads of queries and of KV on a rank.
Heads = tuple[int, int]

#: Between neighbours further apart than this factor nothing is interpolated.
_WIDEST = 16.0
#: Beyond the outermost measured shape the ratio is kept, up to this factor.
_BEYOND = 2.0
#: 128 x 128 tiles in whole waves, at the efficiencies that GEMM libraries reach.
_PLAIN = {
    "tile_m": 128.0, "tile_n": 128.0, "overhead_us": 5.0, "compute": 0.8, "memory": 0.93, "p": 1.4,
    "wave_share": 0.3, "tile_share": 0.5,
}  # fmt: skip
#: The cached contexts that are added to prompts that were measured without: up to the last, by
#: chunks of at most as many tokens, the device model goes.
_CONTEXTS = (1, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)


SOURCES: dict[str, Any] = {
    "vidur": vidur, "aiconfigurator": aiconfigurator, "llmservingsim": llmservingsim
}  # fmt: skip
"""Modules with ``measurements`` (the reader), ``measured_on`` (a folder's device), ``FILES``."""


def import_bundle(
    source: str, folder: Path, model: str | Path, tp: int, device: str | None = None
) -> Bundle:
    """The bundle of one ``tp`` rank of ``model`` from a folder of public measurements, the source's
    own or the one that holds it.

    Raises BundleError (or SpecError, for an unknown model or device) with what is wrong and what is
    allowed, FileNotFoundError for a missing file. Both say which files the source reads.
    """
    if source not in SOURCES:
        raise BundleError(
            f"unknown source {source!r}{did_you_mean(source, SOURCES)}; "
            f"allowed: {', '.join(f'{name} ({each.FILES})' for name, each in SOURCES.items())}"
        )
    known = SOURCES[source]
    reads = f"{source} reads {known.FILES}"
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such folder; {reads}; {WHERE}")
    spec = load_model(model)
    try:
        spec.check_tp(tp)
        spec.check_plain(f"the importer of {source}")
    except ValueError as error:
        raise BundleError(str(error)) from None
    try:
        measured_on = load_device(device or known.measured_on(folder))
        found = known.measurements(folder, spec, tp, measured_on)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; {reads}") from None
    return assemble(source, found, measured_on, spec, tp)


def assemble(
    source: str, found: Measurements, device: DeviceSpec, model: ModelSpec, tp: int
) -> Bundle:
    """The bundle of one ``tp`` rank of ``model`` from what a source has.

    For ops that it lacks a run asks the calibrated model of ``device``; ``meta.environment`` says
    where each came from. Raises BundleError where the source has no GEMM of the model, or where
    something is missing and the device has no calibrated model.
    """
    parts = _parts(found, device, model, tp)
    if not parts.keys() & set(LAYER_GEMMS):
        needed = (f"{op} ({gemm.n}, {gemm.k})" for op, gemm in sorted(model.gemms(tp).items()))
        raise BundleError(
            f"{source}: this folder has no GEMM of {model.name} at tp {tp} on {device.name}, "
            f"and none near one; (n, k) needed: {_listed(needed)}; a run without "
            f"profiles asks the calibrated model of {device.name} for all of it"
        )
    marks = {op: f"{part.kind}: {part.origin}" for op, part in parts.items()}
    wanted = wanted_ops(tp)
    marks |= _modelled(source, device, model, tp, [op for op in wanted if op not in parts])
    by_kind: dict[str, list[str]] = {}
    for op in sorted(marks.keys() & set(wanted)):
        by_kind.setdefault(marks[op].partition(":")[0], []).append(op)
    origin = ORIGINS[source]
    profiled = f"{origin.repository.split(' @')[0]}, profiled {found.profiled}"
    meta = BundleMeta(
        device=device.name,
        model=model.name,
        model_spec=model,
        tp=tp,
        source="imported",
        created=today(),
        generator=f"sarathi-sim import {source}",
        dtype=found.dtype,
        notes="; ".join(f"{kind}: {_listed(ops)}" for kind, ops in sorted(by_kind.items())),
        environment={
            "repository": profiled if found.profiled else origin.repository,
            "licence": origin.licence,
            "hardware": found.hardware,
            **{op: marks[op] for op in (*wanted, "mixed") if op in marks},
        },
        device_file_sha256=device_sha256(device.name),
    )
    return Bundle(meta=meta, **_tables(parts))


def wanted_ops(tp: int) -> list[str]:
    """Every op of a whole bundle, in the order of its tables."""
    reduce = [ALL_REDUCE] if tp > 1 else []
    return [*ROW_OPS, *ATTENTION, *reduce, *sorted(SENDS)]


def _parts(found: Measurements, device: DeviceSpec, model: ModelSpec, tp: int) -> dict[str, OpRows]:
    parts: dict[str, OpRows | None] = dict(found.ops)
    if found.gemms is not None:
        pool = ShapePool(found.gemms, device)
        shapes = {op: shape for op, shape in model.gemms(tp).items() if op not in parts}
        parts |= {op: pool.part(shape) for op, shape in shapes.items()}
    for op, rows in found.attention.items():
        parts[op] = attention_part(op, rows, model, tp, device)
    return {op: part for op, part in parts.items() if part is not None}


def _modelled(
    source: str, device: DeviceSpec, model: ModelSpec, tp: int, missing: list[str]
) -> dict[str, str]:
    """The marks of ops that the device's calibrated model has; raises if it lacks one."""
    try:
        has = DeviceTimes(device.name, model, tp).provenance() if missing else {}
    except (SpecError, ValueError) as error:
        needed = [op for op in missing if op not in SENDS]
        if not needed:
            return {}  # send_recv may be absent; runs with pipeline stages will say so
        raise BundleError(
            f"{source}: has no {_listed(needed)} for {model.name} tp {tp} on {device.name}, "
            f"and the device model cannot fill them in: {error}; supply the source's files for "
            f"them, or take a calibrated device with --device"
        ) from None
    origin = f"the calibrated device file of {device.name} ({source} has none that fits)"
    return {op: f"modelled: {origin}" for op in missing if op in has}


def _tables(parts: Mapping[str, OpRows]) -> dict[str, pd.DataFrame]:
    frames = {
        "linear": [parts[op].frame.assign(op=op) for op in ROW_OPS if op in parts],
        "send_recv": [parts[op].frame.assign(scope=at) for op, at in SENDS.items() if op in parts],
        **{op: [parts[op].frame] for op in (*ATTENTION, ALL_REDUCE, "mixed") if op in parts},
    }
    tables = {name: empty_table(TABLES[name]) for name in (*ATTENTION, ALL_REDUCE)}
    for name, rows in frames.items():
        columns, key = list(TABLES[name].columns), list(TABLES[name].key)
        whole = pd.concat(rows)[columns] if rows else empty_table(TABLES[name])
        tables[name] = whole.sort_values(key, ignore_index=True)
        tables[name]["time_us"] = rounded_us(tables[name]["time_us"].to_numpy())
    return tables


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"


class ShapePool:
    """Measured GEMMs (m, n, k, time_us) of one source, for any shape near them."""

    def __init__(self, rows: OpRows, device: DeviceSpec) -> None:
        self._times: dict[tuple[int, int], pd.Series[float]] = {
            tuple(mine[["n", "k"]].iloc[0].tolist()): mine.groupby("m")["time_us"].median()
            for _, mine in rows.frame.groupby(["n", "k"])
        }
        self._expected, self._name = expectation(device)
        self._source = rows.origin

    def part(self, shape: GemmShape) -> OpRows | None:
        """Rows (num_tokens, time_us) of a shape: as measured, or the ratio measured / expected
        interpolated in log n between the neighbours that share a k, then in log k. None where
        nothing measured is near."""
        if (shape.n, shape.k) in self._times:
            return OpRows(_by_tokens(self._times[shape.n, shape.k]), self._source)
        by_depth = {
            depth: _neighbours(shape.n, sorted(n for n, k in self._times if k == depth))
            for depth in sorted({k for _, k in self._times})
        }
        depths = _neighbours(shape.k, [k for k, widths in by_depth.items() if widths])
        along_n = {k: {n: self._ratio(n, k) for n in by_depth[k]} for k in depths}
        ratio = _between(shape.k, {k: _between(shape.n, along_n[k]) for k in depths})
        if ratio.empty:
            return None
        times = ratio * self._expected(ratio.index.to_numpy(np.float64), shape)
        used = sorted((n, k) for k in depths for n in by_depth[k])
        sides = [(shape.k, depths), *((shape.n, by_depth[k]) for k in depths)]
        inside = all(sizes[0] <= wanted <= sizes[-1] for wanted, sizes in sides)
        origin = (
            f"({shape.n}, {shape.k}) over (n, k) by wave count"
            f"{'' if inside else ', extended beyond what was measured,'} "
            f"from {_listed(used)} of {self._source}, as the ratio to {self._name}"
        )
        return OpRows(_by_tokens(times), origin, "interpolated")

    def _ratio(self, n: int, k: int) -> pd.Series[float]:
        times = self._times[n, k]
        return times / self._expected(times.index.to_numpy(np.float64), GemmShape(n=n, k=k))


def expectation(device: DeviceSpec) -> tuple[Expectation, str]:
    """The expected time of a GEMM, and the name of this model: the calibrated device's (which
    counts tiles and waves), else a roofline with tiles and waves from the data sheet."""
    if device.fitted is not None:
        return DeviceModel(device.name).gemm, "the calibrated device model"

    def roofline(tokens: Array, shape: GemmShape) -> Array:
        sizes = on(
            pd.DataFrame(
                {
                    "m": tokens,
                    "n": float(shape.n),
                    "k": float(shape.k),
                }
            ),
            device,
        )
        return gemm_us(columns_of(sizes), _PLAIN)

    return roofline, "a roofline with tiles and waves"


def _neighbours(wanted: int, measured: list[int]) -> list[int]:
    """The sizes to interpolate between: one if it fits or bounds the range, none if too far."""
    if wanted in measured:
        return [wanted]
    below = [size for size in measured if size < wanted][-1:]
    above = [size for size in measured if size > wanted][:1]
    if below and above and above[0] / below[0] <= _WIDEST:
        return below + above
    near = [s for s in below + above if max(s / wanted, wanted / s) <= _BEYOND]
    return near[:1]


def _between(wanted: int, ratios: Mapping[int, pd.Series[float]]) -> pd.Series[float]:
    """Linear in the logarithm of the size; empty without any."""
    if len(ratios) < 2:
        return next(iter(ratios.values()), pd.Series(dtype=np.float64))
    (low, first), (high, second) = ratios.items()
    weight = math.log(wanted / low) / math.log(high / low)
    return ((1 - weight) * first + weight * second).dropna()


def _by_tokens(times: pd.Series[float]) -> pd.DataFrame:
    return pd.DataFrame({"num_tokens": times.index.to_numpy(), "time_us": times.to_numpy()})


def attention_part(
    op: str, found: OpRows, model: ModelSpec, tp: int, device: DeviceSpec
) -> OpRows | None:
    """``attn_prefill`` or ``attn_decode`` of one rank, from rows of some head counts.

    Where the rank's head count was not measured, the nearest one's times are multiplied by the
    ratio of the calibrated device model's predictions for the two. Decode is not scaled between MHA
    and GQA: these are different kernels, and the result would be faster than the memory; single
    rows that are too fast are left out. Prompts that were all measured without cached context get
    rows with it. None where there are no rows, no such kernel, or no device model to scale with.
    """
    rows = found.frame[found.frame["head_dim"] == model.head_dim]
    if rows.empty:
        return None
    wanted, decoding = model.heads_per_rank(tp), OPS[op].family == "decode"
    measured: list[Heads] = sorted({*zip(rows["heads"], rows["kv_heads"], strict=True)})
    nearest = min(measured, key=lambda heads: _distance(wanted, heads))
    other_kernel = decoding and _distance(wanted, nearest)[0]
    if nearest != wanted and (device.fitted is None or other_kernel):
        return None
    rows = rows[(rows["heads"] == nearest[0]) & (rows["kv_heads"] == nearest[1])]
    # Measurements have columns by the sizes' names.
    names = dict(zip((size.name for size in OPS[op].sizes), OPS[op].columns, strict=True))
    frame = rows.rename(columns=names)[[*OPS[op].columns, "time_us"]]
    text = f"{nearest[0]} query and {nearest[1]} KV heads"
    part = OpRows(frame, f"{found.origin}, {text}")
    if nearest != wanted:
        frame, dropped = _scaled(op, frame, nearest, wanted, model, device)
        to = f"to {wanted[0]} and {wanted[1]} by the calibrated device model's ratio"
        part = OpRows(frame, f"from {text} {to}, {found.origin}{dropped}", "scaled")
    fresh = not decoding and not rows["context"].any()
    return _with_context(part, wanted, model, device) if fresh and device.fitted else part


def _scaled(
    op: str, frame: pd.DataFrame, have: Heads, want: Heads, model: ModelSpec, device: DeviceSpec
) -> tuple[pd.DataFrame, str]:
    """Rows at another head count, and a remark on rows left out."""
    times, decoding = DeviceModel(device.name), OPS[op].family == "decode"
    predict = times.attn_decode if decoding else times.attn_prefill
    size, context, time = frame.to_numpy(np.float64).T
    mine, theirs = (predict(size, context, *heads, model.head_dim) for heads in (want, have))
    time = time * mine / theirs
    kv_bytes = 2 * HALF * model.head_dim * want[1] * size * context
    possible = 1e6 * kv_bytes / time <= (device.memory_bandwidth if decoding else np.inf)
    less = int((~possible).sum())
    dropped = f"; {less} rows that this made faster than the memory left out" if less else ""
    return frame.assign(time_us=time)[possible], dropped


def _with_context(part: OpRows, heads: Heads, model: ModelSpec, device: DeviceSpec) -> OpRows:
    """A prefill part with rows for cached contexts: what these add is the device model's."""
    short = part.frame["chunk_tokens"] <= _CONTEXTS[-1]
    near, far = part.frame[short], part.frame[~short]
    predict = DeviceModel(device.name).attn_prefill
    chunk = near["chunk_tokens"].to_numpy(np.float64)
    fresh, parts = (
        predict(
            chunk,
            np.zeros_like(chunk),
            *heads,
            model.head_dim,
        ),
        [near],
    )
    for context in _CONTEXTS:
        cached = predict(chunk, np.full_like(chunk, context), *heads, model.head_dim)
        time = near["time_us"] + np.maximum(cached - fresh, 0.0)
        parts.append(near.assign(context_tokens=context, time_us=time))
    origin = f"{part.origin}; rows with cached context: plus the calibrated device model's increase"
    return OpRows(pd.concat([*parts, far], ignore_index=True), origin, part.kind)


def _distance(wanted: Heads, have: Heads) -> tuple[bool, float]:
    """MHA and GQA are different kernels; then the closer in KV heads and query heads."""
    kernels = (wanted[0] == wanted[1]) != (have[0] == have[1])
    apart = abs(np.log(have[1] / wanted[1])) + abs(np.log(have[0] / wanted[0]))
    return kernels, float(apart)
