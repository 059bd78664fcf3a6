"""From a bundle's points to op times of any size: vectorised, once, before a simulation.

Inside the measured range linear ops and transfers are piecewise linear (in time, not its
logarithm: that is off by 9 to 14 % between points). Beyond it a GEMM follows a roofline fitted to
all GEMMs of the bundle; the other ops are proportional to the size. Attention is a physical formula
with a learned residual (``surface.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL, GemmShape
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.cache import kept
from sarathi_sim.simulator.op_times.interaction import fit_skew, fit_whole_layer
from sarathi_sim.simulator.op_times.linear import PiecewiseLinear, PooledRoofline
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import (
    SUM,
    OpTimes,
    PairTimes,
    TimeBySize,
    WholeLayer,
)
from sarathi_sim.simulator.op_times.surface import (
    LEAVES,
    TREES,
    PhysicalSurface,
    decode_surface,
    prefill_surface,
)

FITS = 2
"""Of the regressions: to be raised with every change of what they give."""


def bundle_times(bundle: Bundle) -> OpTimes:
    """The op times fitted to a bundle's points; for ops that an import has none of, the calibrated
    device is asked."""
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
    skew, layer = 0.0, SUM
    if len(bundle.attn_decode_skew):

        def share() -> Floats:
            return np.array([fit_skew(found.decode, bundle.attn_decode_skew)])

        skew = float(kept_of(bundle, "skew", share)[0])
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
    """What ``make`` computes from a bundle, kept on disk (``cache.py``)."""
    return kept(_identity(bundle), what, make)


def _identity(bundle: Bundle) -> str:
    """The hash of a bundle's content and of how it is fitted; none of what was made in memory."""
    meta = bundle.meta
    about = (FITS, TREES, LEAVES, version("scikit-learn"), meta.tp, meta.dtype, meta.tile)
    known = hashlib.sha256(repr((meta.content_sha256, about, meta.model_spec)).encode())
    return known.hexdigest() if meta.content_sha256 else ""


Gemms = dict[str, tuple[GemmShape, Floats, Floats]]
"""(shape, tokens, seconds) of each GEMM."""


def gemm_points(bundle: Bundle) -> Gemms:
    """Of a bundle."""
    shapes, found = bundle.meta.model_spec.gemms(bundle.meta.tp), dict[str, Any]()
    for op, rows in bundle.linear.groupby("op"):
        if op in shapes:
            time_s = rows["time_us"].to_numpy(np.float64) * 1e-6
            found[str(op)] = shapes[str(op)], rows["num_tokens"].to_numpy(np.float64), time_s
    return found


@dataclass(frozen=True, eq=False)
class Roofline:
    """What all GEMMs of a bundle have in common; fitted when first asked beyond the range."""

    gemms: Gemms

    @cached_property
    def pooled(self) -> PooledRoofline:
        """One set of constants for all shapes."""
        return pooled_roofline(self.gemms)

    def __call__(self, op: str, tokens: Floats) -> Floats:
        """Seconds of a GEMM beyond its last point."""
        return self.pooled.beyond(*self.gemms[op])(tokens)


def pooled_roofline(gemms: Gemms) -> PooledRoofline:
    """Fitted to (shape, tokens, seconds) of several ops; those of one shape count together."""
    points: dict[GemmShape, list[tuple[Floats, Floats]]] = {}
    for shape, tokens, time_s in gemms.values():
        points.setdefault(shape, []).append((tokens, time_s))
    joined = {
        shape: (np.concatenate([m for m, _ in parts]), np.concatenate([t for _, t in parts]))
        for shape, parts in points.items()
    }
    return PooledRoofline(joined)
