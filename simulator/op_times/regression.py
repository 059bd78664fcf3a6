"""From a bundle's points to op times of any size: vectorised, once, before a simulation.

Inside the measured range linear ops and transfers are piecewise linear (in time, not its
logarithm: that is off by 9 to 14 % between points). Beyond it a GEMM follows a roofline fitted to
all GEMMs of the bundle; the other ops are proportional to the size. Attention is a physical formula
with a learned residual (:class:`PhysicalSurface`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from numpy.typing import ArrayLike

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL, GemmShape
from sarathi_sim.profiler.facts.roofline import Size, attended, decode_terms, gemm_time_us
from sarathi_sim.profiler.physics.fit import fit_constants
from sarathi_sim.profiler.physics.residual import Trees, fit_trees
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from ..loop.records import Floats
from .cache import kept
from .interaction import fit_skew, fit_whole_layer
from .modelled import modelled_times
from .op_times import (
    MEAN,
    SUM,
    OpTimes,
    PairTimes,
    Skew,
    TimeBySize,
    WholeLayer,
)

FITS = 3
"""Version of the regressions: raise it with every change of their results."""

Curve = Callable[[Floats], Floats]


class PiecewiseLinear:
    """Time in seconds through points ``(size, time)``; sizes ascending. Below the first point it is
    constant. Beyond the last point it is ``beyond(size)``, but never less than at the last point;
    without ``beyond`` it is proportional to the size."""

    def __init__(
        self, size: npt.ArrayLike, time_s: npt.ArrayLike, beyond: Curve | None = None
    ) -> None:
        self.size = np.asarray(size, np.float64)
        self.time_s = np.asarray(time_s, np.float64)
        self._beyond = beyond

    def __call__(self, size: npt.ArrayLike) -> Floats:
        """Times in seconds, of the shape of ``size``."""
        wanted = np.asarray(size, np.float64)
        last, last_s = self.size[-1], self.time_s[-1]
        inside = np.interp(wanted, self.size, self.time_s)
        outside = wanted > last
        if self._beyond is None or not outside.any():
            return np.asarray(inside * np.maximum(wanted / last, 1.0))
        further = np.maximum(self._beyond(np.maximum(wanted, last)), last_s)
        return np.asarray(np.where(outside, further, inside))


class PooledRoofline:
    """A soft-max roofline with one set of constants for all GEMMs of a bundle.

    ``t = overhead + (compute^p + memory^p)^(1/p)``, where compute counts the rows, partly rounded
    up to a tile, and memory the numbers in weights and activations. It is fitted to all shapes
    together (robustly, to relative errors), because the points of one shape may not separate
    compute from memory.
    """

    TILE = 128.0
    _SPAN = ((0.1, 100.0), (1e3, 1e11), (1e2, 1e9), (1.05, 20.0), (1e-3, 1.0))
    """Bounds of overhead (us), rates (FLOP and numbers a us), p, and the share of a tile paid."""

    def __init__(self, points: Mapping[GemmShape, tuple[Floats, Floats]]) -> None:
        """``points`` are (tokens, seconds) of each shape."""
        tokens = np.concatenate([m for m, _ in points.values()])
        time = 1e6 * np.concatenate([t for _, t in points.values()])
        sizes = [len(m) for m, _ in points.values()]
        n = np.repeat([float(shape.n) for shape in points], sizes)
        k = np.repeat([float(shape.k) for shape in points], sizes)
        low, high = np.log(self._SPAN).T
        flops, traffic = 2 * tokens * n * k, n * k
        start = np.log(
            [
                5.0,
                (flops / time).max(),
                (traffic / time).max(),
                2.0,
                0.5,
            ]
        )

        start = np.clip(start, low + 1e-6, high - 1e-6)
        physics = partial(self._time_us, m=tokens, n=n, k=k)
        self.constants: Floats = fit_constants(physics, time, start, low, high)[0]

    def _time_us(self, constants: Floats, m: Floats, n: Size, k: Size) -> Floats:
        overhead, flop_rate, number_rate, p, paid = constants
        kernel = {"overhead_us": overhead, "p": p, "tile_m": self.TILE, "tile_share": paid}
        return gemm_time_us(m, n, k, kernel, flop_rate, number_rate)

    def time_s(self, shape: GemmShape, tokens: Floats) -> Floats:
        """Seconds of one shape."""
        return 1e-6 * self._time_us(self.constants, tokens, shape.n, shape.k)

    def beyond(self, shape: GemmShape, tokens: Floats, time_s: Floats) -> Curve:
        """The op's times beyond its last point.

        This is the roofline, corrected by half (in logarithms) of its error in the last third of an
        octave: kernels differ in efficiency, but not all of a difference persists. On public GEMMs
        up to 1024 tokens, predicted to 4096, half is better than no correction and than the full
        one.
        """
        late = tokens >= 0.75 * tokens[-1]
        missed = np.log(time_s[late] / self.time_s(shape, tokens[late]))
        factor = float(np.exp(np.median(missed) / 2))
        return lambda wanted: factor * self.time_s(shape, wanted)


Columns = Callable[[Floats, Floats], Floats]
TREES, LEAVES = 200, 15


@dataclass(frozen=True)
class Kind:
    """Prior knowledge of an op over two sizes ``a`` and ``b``. ``terms(a, b)`` are its physical
    terms and ``features(a, b)`` what the residual may depend on, shape (..., columns)."""

    terms: Columns
    features: Columns


def coordinates(a: Floats, b: Floats) -> Floats:
    """Logarithmic coordinates for distances between points, shape (..., 2)."""
    # + 32 keeps a context of 0 at a finite distance from 1. A first size of 0, which takes no time,
    # is outside of every region.
    return np.stack([np.log2(np.maximum(a, 1)), np.log2(b + 32)], axis=-1)


class PhysicalSurface:
    """Time in seconds over two sizes, as a product of three factors.

    Non-negative physical terms, fitted to relative errors (not those of the device models:
    ``profiler/facts/roofline.py`` says why); boosted trees on the logarithm of their residual
    (tile edges, split keys, other kernels); and the remaining residual at the points, interpolated
    between them in logarithms of the sizes. So it passes through the points, and beyond them the
    physics extrapolates with the residual at the edge.
    """

    def __init__(self, a: Floats, b: Floats, time_s: Floats, kind: Kind) -> None:
        from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
        from scipy.optimize import nnls

        self._kind = kind
        # Dividing both sides by the time makes the residual a relative error.
        scaled = kind.terms(a, b) / time_s[:, None]
        unit = scaled.max(axis=0)
        self.coefficients = nnls(scaled / unit, np.ones(len(time_s)))[0] / unit
        left = np.log(time_s / (kind.terms(a, b) @ self.coefficients))
        features = kind.features(a, b)
        self._trees = _fitted(
            features.shape,
            features.tobytes(),
            left.tobytes(),
            TREES,
            LEAVES,
        )
        left -= self._trees.predict(features)
        points = coordinates(a, b)
        self._nearest = NearestNDInterpolator(points, left, rescale=True)
        # Points on one line cannot be triangulated; then the nearest point counts.
        flat = np.linalg.matrix_rank(points - points[0]) < 2
        self._between = None if flat else LinearNDInterpolator(points, left, rescale=True)

    def __call__(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
        """Times in seconds, of the broadcast shape of ``a`` and ``b``."""
        x, y = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
        shape, x, y = x.shape, x.ravel(), y.ravel()
        where = coordinates(x, y)
        left = self._nearest(where)
        if self._between is not None:
            inside = self._between(where)
            left = np.where(np.isnan(inside), left, inside)
        left += self._trees.predict(self._kind.features(x, y))
        return np.reshape((self._kind.terms(x, y) @ self.coefficients) * np.exp(left), shape)


@lru_cache(maxsize=64)
def _fitted(shape: tuple[int, int], features: bytes, left: bytes, trees: int, leaves: int) -> Trees:
    """Boosted trees fitted to a residual in 0.2 s; cached, as runs and hold-outs share points."""
    x, y = (np.frombuffer(array).copy() for array in (features, left))
    return fit_trees(x.reshape(shape), y, trees, leaves)


def _prefill_terms(chunk: Floats, context: Floats) -> Floats:
    """Launch; rows; KV read and written; query-key pairs under the causal mask."""
    keys, pairs = attended(chunk, context)
    return np.stack([np.ones_like(chunk), chunk, keys, pairs], axis=-1)


def _prefill_features(chunk: Floats, context: Floats) -> Floats:
    """Sizes and work in octaves, and how the chunk fills tiles of query rows."""
    keys, pairs = attended(chunk, context, edge=0.0)
    columns = [
        np.log2(chunk),
        np.log2(keys),
        context / keys,
        np.log2(context + 32),
    ]
    columns.append(np.log2(pairs))
    for tile in (16, 32, 64, 128):
        tiles = np.ceil(chunk / tile)
        columns += [tiles * tile / chunk, np.minimum(tiles, 64)]
    return np.stack(columns, axis=-1)


def _decode_features(batch: Floats, context: Floats) -> Floats:
    """Sizes and KV in octaves, the batch itself (waves), and blocks of keys."""
    keys = np.maximum(context, 1)
    columns = [
        np.log2(batch),
        np.log2(keys),
        np.log2(batch * keys),
        batch,
        batch % 8,
    ]
    columns += [np.ceil(keys / 64) * 64 / keys, np.ceil(keys / 256)]
    return np.stack(columns, axis=-1)


def prefill_surface(chunk: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of one chunk, by its tokens and the tokens cached before it."""
    return PhysicalSurface(chunk, context, time_s, Kind(_prefill_terms, _prefill_features))


def decode_surface(batch: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of a batch of decodes, by their number and mean context."""
    return PhysicalSurface(batch, context, time_s, Kind(decode_terms, _decode_features))


def bundle_times(bundle: Bundle) -> OpTimes:
    """The op times fitted to a bundle's points; the calibrated device times ops that an imported
    bundle lacks."""
    meta, rest = bundle.meta, None
    if bundle.modelled:
        rest = modelled_times(DeviceTimes(meta.device, meta.model_spec, meta.tp))
    gemms = gemm_points(bundle)
    beyond = Roofline(gemms)
    by_rows: dict[str, TimeBySize] = {
        str(op): PiecewiseLinear(
            rows["num_tokens"],
            rows["time_us"] * 1e-6,
            beyond=partial(beyond, str(op)) if op in gemms else None,
        )
        for op, rows in bundle.linear.groupby("op")
    }
    send: dict[str, TimeBySize] = {
        str(scope): _by_bytes(rows) for scope, rows in bundle.send_recv.groupby("scope")
    }
    lacking, contexts = bundle.lacking, bundle.attn_decode["context_tokens"]
    if rest is not None:
        by_rows = {op: by_rows.get(op, time) for op, time in rest.by_rows.items()}
        send = {**rest.send, **send}

    def attention(op: str) -> PairTimes:
        return PairTimes(AttentionFit(bundle, op), _identity(bundle), op)

    found = OpTimes(
        meta=meta,
        by_rows=by_rows,
        prefill=rest.prefill if rest and PREFILL in lacking else attention(PREFILL),
        decode=rest.decode if rest and DECODE in lacking else attention(DECODE),
        all_reduce=(
            None
            if meta.tp == 1
            else rest.all_reduce
            if rest and ALL_REDUCE in lacking
            else _by_bytes(bundle.all_reduce)
        ),
        send=send,
        longest_context=rest.longest_context if rest and contexts.empty else int(contexts.max()),
        bundle=bundle,
    )
    skew, layer = MEAN, SUM
    if len(bundle.attn_decode_skew):

        def share() -> Floats:
            return np.array(astuple(fit_skew(found.decode, bundle.attn_decode_skew)))

        skew = Skew(*kept_of(bundle, "skew", share).tolist())
    if len(bundle.mixed):

        def terms() -> Floats:
            return np.array(astuple(fit_whole_layer(found, bundle.mixed)))

        layer = WholeLayer(*kept_of(bundle, "layer", terms).tolist())
    return replace(found, skew=skew, whole_layer=layer)


def _by_bytes(rows: pd.DataFrame) -> PiecewiseLinear:
    return PiecewiseLinear(rows["num_bytes"], rows["time_us"] * 1e-6)


@dataclass(frozen=True, eq=False)
class AttentionFit:
    """Attention fitted to a bundle's points when it is first asked."""

    bundle: Bundle
    op: str

    def __call__(self, a: ArrayLike, b: ArrayLike) -> Floats:
        return self._fitted(a, b)

    @cached_property
    def _fitted(self) -> PhysicalSurface:
        fit = prefill_surface if self.op == PREFILL else decode_surface
        columns = self.bundle.tables()[self.op][[*OPS[self.op].columns, "time_us"]]
        first, second, time_us = columns.to_numpy(np.float64).T
        return fit(first, second, time_us * 1e-6)


def kept_of(bundle: Bundle, what: str, make: Callable[[], Floats]) -> Floats:
    """The array that ``make`` computes from a bundle, kept on disk (``cache.py``)."""
    return kept(_identity(bundle), what, make)


def _identity(bundle: Bundle) -> str:
    """The hash of a bundle's content and of its fit; empty for a bundle made in memory."""
    meta = bundle.meta
    about = (FITS, TREES, LEAVES, version("scikit-learn"), meta.tp, meta.dtype, meta.tile)
    known = hashlib.sha256(repr((meta.content_sha256, about, meta.model_spec)).encode())
    return known.hexdigest() if meta.content_sha256 else ""


Gemms = dict[str, tuple[GemmShape, Floats, Floats]]
"""(shape, tokens, seconds) of each GEMM."""


def gemm_shapes(bundle: Bundle) -> dict[str, GemmShape]:
    """The shapes of a bundle's GEMMs, as far as they share rates: where the layers' are in fp8, the
    LM head's numbers have twice the bytes, and half the FLOP rate, so it counts as twice as wide.
    """
    meta = bundle.meta
    shapes = meta.model_spec.gemms(meta.tp)
    if meta.environment.get("weights") != "fp8":
        return shapes
    return {
        op: shape if OPS[op].part == "layer" else replace(shape, n=2 * shape.n)
        for op, shape in shapes.items()
    }


def gemm_points(bundle: Bundle) -> Gemms:
    """The measured points of a bundle's GEMMs."""
    shapes, found = gemm_shapes(bundle), dict[str, Any]()
    for op, rows in bundle.linear.groupby("op"):
        if op in shapes:
            time_s = rows["time_us"].to_numpy(np.float64) * 1e-6
            found[str(op)] = shapes[str(op)], rows["num_tokens"].to_numpy(np.float64), time_s
    return found


@dataclass(frozen=True, eq=False)
class Roofline:
    """The roofline that a bundle's GEMMs share; fitted at the first size beyond the range."""

    gemms: Gemms

    @cached_property
    def pooled(self) -> PooledRoofline:
        """One set of constants for all shapes."""
        return pooled_roofline(self.gemms)

    def __call__(self, op: str, tokens: Floats) -> Floats:
        """Seconds of a GEMM beyond its last point."""
        return self.pooled.beyond(*self.gemms[op])(tokens)


def pooled_roofline(gemms: Gemms) -> PooledRoofline:
    """A roofline fitted to (shape, tokens, seconds) of several ops; equal shapes are pooled."""
    points: dict[GemmShape, list[tuple[Floats, Floats]]] = {}
    for shape, tokens, time_s in gemms.values():
        points.setdefault(shape, []).append((tokens, time_s))
    joined = {
        shape: (np.concatenate([m for m, _ in parts]), np.concatenate([t for _, t in parts]))
        for shape, parts in points.items()
    }
    return PooledRoofline(joined)
