"""GEMM shapes and head counts that a source has not measured, from its measured ones.

Attention is scaled to another head count, and extended to cached context, by the calibrated device
model. Of GEMMs not the time is interpolated over (n, k), but the ratio of measured to expected
time. The expected time counts tiles and waves over the device's SMs, because times step with the
number of waves.
On the A100 grid, a shape predicted from its neighbours in n is then off by 2.9 % in the median and
12 % at the 95th percentile (calibrated device model fitted without that shape), 4.7 and 24 % with a
roofline, and about 5 and 27 % where the times themselves are interpolated. In k: 2.6 and 11 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS, GemmShape
from sarathi_sim.profiler.facts.roofline import HALF, Array, gemm_us
from sarathi_sim.profiler.importers.assemble import Part, listed
from sarathi_sim.profiler.physics.shard_times import DeviceModel
from sarathi_sim.profiler.storage.strict import SpecError

#: (tokens, shape) -> microseconds.
Expectation = Callable[[Array, GemmShape], Array]
#: Between neighbours further apart than this factor nothing is interpolated.
_WIDEST = 16.0
#: Beyond the outermost measured shape the ratio is kept, up to this factor.
_BEYOND = 2.0
#: 128 x 128 tiles in whole waves, at the efficiencies that GEMM libraries reach.
_PLAIN = {
    "tile_m": 128.0,
    "tile_n": 128.0,
    "overhead_us": 5.0,
    "compute": 0.8,
    "memory": 0.93,
    "p": 1.4,
    "wave_share": 0.3,
    "tile_share": 0.5,
}


def expectation(device: DeviceSpec) -> tuple[Expectation, str]:
    """The expected time of a GEMM on ``device``, and the name of this model.

    The calibrated device model where there is one (its form counts tiles and waves), else a
    roofline with tiles and waves from the data sheet.
    """
    try:
        model = DeviceModel(device.name)
    except SpecError:
        return _roofline(device), "a roofline with tiles and waves"
    return model.gemm, "the calibrated device model"


def _roofline(device: DeviceSpec) -> Expectation:
    def expected(tokens: Array, shape: GemmShape) -> Array:
        columns = {
            "m": tokens,
            "n": np.full_like(tokens, shape.n),
            "k": np.full_like(tokens, shape.k),
            "peak_flops": np.full_like(tokens, device.peak_flops),
            "bandwidth": np.full_like(tokens, device.memory_bandwidth),
            "num_sms": np.full_like(tokens, device.num_sms),
        }
        return gemm_us(columns, _PLAIN)

    return expected


class ShapePool:
    """Measured GEMMs (m, n, k, time_us) of one source, for any shape near them."""

    def __init__(self, rows: pd.DataFrame, device: DeviceSpec, source: str) -> None:
        self._times: dict[tuple[int, int], pd.Series[float]] = {}
        for n, k in rows[["n", "k"]].drop_duplicates().itertuples(index=False):
            mine = rows[(rows["n"] == n) & (rows["k"] == k)]
            self._times[int(n), int(k)] = mine.groupby("m")["time_us"].median()
        self._expected, self._name = expectation(device)
        self._source = source

    def part(self, shape: GemmShape) -> Part | None:
        """Rows (num_tokens, time_us) of a shape, or None where nothing measured is near.

        A measured shape is returned as it is. Otherwise the ratio measured / expected is
        interpolated in log n between the neighbours that share a k, then in log k.
        """
        if (shape.n, shape.k) in self._times:
            return Part(_rows(self._times[shape.n, shape.k]), "measured", self._source)
        by_depth = {k: self._widths(shape.n, k) for k in sorted({k for _, k in self._times})}
        depths = _neighbours(shape.k, [k for k, widths in by_depth.items() if widths])
        ratio = _between(shape.k, {k: self._along_n(shape.n, k, by_depth[k]) for k in depths})
        if ratio is None or ratio.empty:
            return None
        tokens = ratio.index.to_numpy(np.float64)
        times = pd.Series(ratio.to_numpy() * self._expected(tokens, shape), index=ratio.index)
        used = [(n, k) for k in depths for n in by_depth[k]]
        inside = _spans(shape.k, depths) and all(_spans(shape.n, by_depth[k]) for k in depths)
        origin = (
            f"({shape.n}, {shape.k}) over (n, k) by wave count"
            f"{'' if inside else ', extended beyond what was measured,'} "
            f"from {listed(sorted(used))} of {self._source}, as the ratio to {self._name}"
        )
        return Part(_rows(times), "interpolated", origin)

    def _widths(self, n: int, k: int) -> list[int]:
        return _neighbours(n, sorted(width for width, depth in self._times if depth == k))

    def _along_n(self, n: int, k: int, widths: list[int]) -> pd.Series[float]:
        ratio = _between(n, {width: self._measured_ratio(width, k) for width in widths})
        assert ratio is not None
        return ratio

    def _measured_ratio(self, n: int, k: int) -> pd.Series[float]:
        times = self._times[n, k]
        return times / self._expected(times.index.to_numpy(np.float64), GemmShape(n=n, k=k))


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


def _spans(wanted: int, sizes: list[int]) -> bool:
    return sizes[0] <= wanted <= sizes[-1]


def _between(wanted: int, ratios: dict[int, pd.Series[float]]) -> pd.Series[float] | None:
    if not ratios:
        return None
    if len(ratios) == 1:
        return next(iter(ratios.values()))
    (low, first), (high, second) = ratios.items()
    weight = math.log(wanted / low) / math.log(high / low)
    return ((1 - weight) * first + weight * second).dropna()


def _rows(times: pd.Series[float]) -> pd.DataFrame:
    return pd.DataFrame({"num_tokens": times.index.to_numpy(), "time_us": times.to_numpy()})


def head_counts(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """The (query heads, KV heads) that were measured, sorted."""
    pairs = rows[["heads", "kv_heads"]].drop_duplicates()
    return sorted((int(heads), int(kv)) for heads, kv in pairs.itertuples(index=False))


def attention_part(
    op: str, rows: pd.DataFrame, model: ModelSpec, tp: int, device: DeviceModel, source: str
) -> Part | None:
    """``attn_prefill`` or ``attn_decode`` of one rank, from rows of some head counts.

    ``rows``: chunk or batch, context, heads, kv_heads, head_dim, time_us. Where the rank's head
    count was not measured, the nearest one's times are multiplied by the ratio of the calibrated
    device model's predictions for the two. Decode is not scaled between MHA and GQA: these are
    different kernels, and the result would be faster than the memory; single rows that are too fast
    are left out.
    None where there are no rows, or no such kernel.
    """
    rows = rows[rows["head_dim"] == model.head_dim]
    if rows.empty:
        return None
    wanted = model.heads_per_rank(tp)
    nearest = min(head_counts(rows), key=lambda have: _distance(wanted, have))
    decoding = OPS[op].family == "decode"
    if decoding and _distance(wanted, nearest)[0]:
        return None
    rows = rows[(rows["heads"] == nearest[0]) & (rows["kv_heads"] == nearest[1])]
    # Measurements have columns by the sizes' names.
    first, second = (size.name for size in OPS[op].sizes)
    first_out, second_out = OPS[op].columns
    size, context = (rows[c].to_numpy(np.float64) for c in (first, second))
    time = rows["time_us"].to_numpy(np.float64)
    heads = f"{nearest[0]} query and {nearest[1]} KV heads"
    if nearest != wanted:
        mine, theirs = (_predict(op, device, size, context, model, h) for h in (wanted, nearest))
        time = time * mine / theirs
    frame = pd.DataFrame(
        {first_out: rows[first].to_numpy(), second_out: rows[second].to_numpy(), "time_us": time}
    )
    if nearest == wanted:
        return Part(frame, "measured", f"{source}, {heads}")
    if decoding:
        kv_bytes = 2 * HALF * model.head_dim * wanted[1] * size * context
        frame = frame[1e6 * kv_bytes / time <= device.spec.memory_bandwidth]
    less = len(time) - len(frame)
    dropped = f"; {less} rows that this made faster than the memory left out" if less else ""
    origin = (
        f"from {heads} to {wanted[0]} and {wanted[1]} by the calibrated device model's ratio, "
        f"{source}{dropped}"
    )
    return Part(frame, "scaled", origin)


def with_context(part: Part, model: ModelSpec, tp: int, device: DeviceModel, most: int) -> Part:
    """A prefill part without cached context, extended by rows for contexts up to ``most``.

    What cached tokens add is the calibrated device model's difference.
    """
    steps = (1, 128, 256, 512, 1024, 2048, 3072, 4096, 6144)
    contexts = [c for c in steps if c < most] + [most]
    chunk = part.rows["chunk_tokens"].to_numpy(np.float64)
    parts = [part.rows]
    heads = (*model.heads_per_rank(tp), model.head_dim)
    fresh = device.attn_prefill(chunk, np.zeros_like(chunk), *heads)
    for context in contexts:
        cached = device.attn_prefill(chunk, np.full_like(chunk, context), *heads)
        time = part.rows["time_us"] + np.maximum(cached - fresh, 0.0)
        parts.append(part.rows.assign(context_tokens=context, time_us=time))
    origin = f"{part.origin}; rows with cached context: plus the calibrated device model's increase"
    return Part(pd.concat(parts, ignore_index=True), part.kind, origin)


def _predict(
    op: str, device: DeviceModel, size: Array, context: Array, model: ModelSpec, h: tuple[int, int]
) -> Array:
    call = device.attn_decode if OPS[op].family == "decode" else device.attn_prefill
    return call(size, context, *h, model.head_dim)


def _distance(wanted: tuple[int, int], have: tuple[int, int]) -> tuple[bool, float]:
    """MHA and GQA are different kernels; then the closer in KV heads and query heads."""
    kernels = (wanted[0] == wanted[1]) != (have[0] == have[1])
    apart = abs(np.log(have[1] / wanted[1])) + abs(np.log(have[0] / wanted[0]))
    return kernels, float(apart)
