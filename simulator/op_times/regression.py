"""From a bundle's points to op times of any size: vectorised, once, before a simulation.

Inside the measured range linear ops and transfers are piecewise linear (in time, not its
logarithm: that is off by 9 to 14 % between points). Beyond it a GEMM follows a roofline fitted to
all GEMMs of the bundle; the other ops are proportional to the size. Attention is a physical formula
with a learned residual (``surface.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.formats import NumberBytes
from sarathi_sim.profiler.facts.ops import (
    ALL_LAYER_OPS,
    ALL_REDUCE,
    ALL_TO_ALL,
    DECODE,
    OPS,
    PREFILL,
    SEND_RECV,
    GemmShape,
)
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.cache import cached
from sarathi_sim.simulator.op_times.interaction import fit_skew, fit_whole_layer
from sarathi_sim.simulator.op_times.iteration import TimeByPair, TimeBySize, WholeLayer
from sarathi_sim.simulator.op_times.linear import PiecewiseLinear, PooledRoofline
from sarathi_sim.simulator.op_times.surface import (
    LEAVES,
    TREES,
    decode_surface,
    prefill_surface,
)
from sarathi_sim.simulator.op_times.together import Together

FITS = 2
"""Of the regressions: to be raised with every change of what they give."""


@dataclass(frozen=True)
class Scaled:
    """The function ``time``, its values multiplied by ``factor``."""

    time: Callable[..., Floats]
    factor: float

    def __call__(self, *sizes: ArrayLike) -> Floats:
        return self.factor * self.time(*sizes)


class OpTimes:
    """Every op's time in seconds, for one layer on one tensor-parallel rank, as functions.

    ``by_rows[op](rows)``, ``prefill(chunk, context)``, ``decode(batch, mean_context)``,
    ``all_reduce(num_bytes)``, ``send[scope](num_bytes)``.
    ``number_bytes`` are the sizes of numbers in the timed dtypes, ``dtype_bytes`` that of
    activations. ``whole_layer`` and ``skew`` correct for whole layers and unequal contexts.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.tp = bundle.meta.tp
        self.model = bundle.meta.model_spec
        size = 4 if bundle.meta.dtype == "float32" else 2
        kernels = bundle.meta.kernels
        self.number_bytes = kernels.used.number_bytes if kernels else NumberBytes(size, size, size)
        self.dtype_bytes = self.number_bytes.activation
        points = {
            str(op): (rows["num_tokens"].to_numpy(np.float64), rows["time_us"].to_numpy() * 1e-6)
            for op, rows in bundle.linear.groupby("op")
        }
        shapes = self.model.gemms(self.tp)
        self._gemms = gemms = {op: (shapes[op], *points[op]) for op in shapes}
        self.by_rows: dict[str, TimeBySize] = {
            op: PiecewiseLinear(*xy) for op, xy in points.items()
        }
        for op in gemms:
            self.by_rows[op] = PiecewiseLinear(*points[op], beyond=partial(self._beyond, op))
        self.factors: dict[str, float] = {}
        self.unscaled: OpTimes | None = None
        self.all_reduce: TimeBySize | None = (
            PiecewiseLinear(bundle.all_reduce["num_bytes"], bundle.all_reduce["time_us"] * 1e-6)
            if self.tp > 1
            else None
        )
        added = bundle.attn_prefill_added
        batches = np.unique(added["batch_size"]).astype(np.float64)
        parts = (added[added["batch_size"] == batch] for batch in batches)
        each = (PiecewiseLinear(one["chunk_tokens"], one["time_us"] * 1e-6) for one in parts)
        self.together = Together(batches, (*each,))
        self.send: dict[str, TimeBySize] = {
            str(scope): PiecewiseLinear(rows["num_bytes"], rows["time_us"] * 1e-6)
            for scope, rows in bundle.send_recv.groupby("scope")
        }

    def scaled(self, factors: Mapping[str, float]) -> OpTimes:
        """These op times, where each op takes ``factors[op]`` times as long (1 where not named).

        What whole layers add to the sum of their ops stays.
        """
        _ = self.whole_layer, self.skew  # fitted to what was measured
        found = copy(self)
        found.factors = dict(factors)
        found.by_rows = {
            op: Scaled(time, factors.get(op, 1.0)) for op, time in self.by_rows.items()
        }
        if self.all_reduce is not None:
            found.all_reduce = Scaled(self.all_reduce, factors.get(ALL_REDUCE, 1.0))
        sent = factors.get(SEND_RECV, 1.0)
        found.send = {scope: Scaled(time, sent) for scope, time in self.send.items()}
        found.prefill = Scaled(self.prefill, factors.get(PREFILL, 1.0))
        calls = (Scaled(each, factors.get(PREFILL, 1.0)) for each in self.together.each)
        found.together = Together(self.together.batches, (*calls,))
        found.decode = Scaled(self.decode, factors.get(DECODE, 1.0))
        found.unscaled = self
        return found

    @property
    def linear(self) -> dict[str, TimeBySize]:
        """The ops of one layer by token rows."""
        return {op: self.by_rows[op] for op in ALL_LAYER_OPS if op in self.by_rows}

    @property
    def reduces(self) -> float:
        """All-reduces of a mean layer: sending tokens to their experts and back takes one's
        place."""
        calls = OPS[ALL_REDUCE].calls
        return calls - self.model.share(ALL_TO_ALL) if ALL_TO_ALL in self.by_rows else calls

    @cached_property
    def key(self) -> str:
        """Hash of all that the times depend on: the bundle's content, and how it is fitted."""
        meta = self.bundle.meta
        about = (FITS, TREES, LEAVES, version("scikit-learn"), meta.tp, meta.dtype, meta.tile)
        text = repr((meta.content_sha256, about, meta.model_spec))
        return hashlib.sha256(text.encode()).hexdigest()

    def prefill_table(self, chunk: Floats, context: Floats) -> Floats:
        """:attr:`prefill` of every chunk with every context, kept on disk (``cache.py``)."""
        return self._table("prefill", chunk, context)

    def decode_table(self, batch: Floats, context: Floats) -> Floats:
        """:attr:`decode` of every batch with every context, kept on disk."""
        return self._table("decode", batch, context)

    def _table(self, op: str, a: Floats, b: Floats) -> Floats:
        if self.unscaled is not None:  # what is kept on disk is that of the bundle
            return self.factors.get(f"attn_{op}", 1.0) * self.unscaled._table(op, a, b)
        sizes = np.concatenate([a, b]).astype(np.float64).tobytes()
        return self.kept(f"{op} {len(a)}", lambda: getattr(self, op)(a[:, None], b), sizes)

    def kept(self, what: str, make: Callable[[], Floats], sizes: bytes = b"") -> Floats:
        """What ``make`` computes from this bundle (and ``sizes``), kept on disk (``cache.py``)."""
        if not self.bundle.meta.content_sha256:  # made in memory: nothing identifies it
            return make()
        digest = hashlib.sha256(f"{self.key} {what} ".encode() + sizes)
        return cached(digest.hexdigest(), make)

    @cached_property
    def skew(self) -> float:
        """The context that counts for a batch of decodes: 0 the mean, 1 the longest."""
        rows = self.bundle.attn_decode_skew
        if rows.empty:
            return 0.0
        return float(self.kept("skew", lambda: np.array([fit_skew(self.decode, rows)]))[0])

    @cached_property
    def whole_layer(self) -> WholeLayer:
        """The time of a layer beyond the sum of its ops."""
        rows = self.bundle.mixed
        if rows.empty:
            return WholeLayer()
        names = ("scale", "extra_s", "both", "decode")

        def fitted() -> Floats:
            found = fit_whole_layer(self, rows)
            return np.array([getattr(found, name) for name in names])

        return WholeLayer(**dict(zip(names, self.kept("layer", fitted).tolist(), strict=True)))

    @cached_property
    def prefill(self) -> TimeByPair:
        """Attention of one chunk."""
        table = self.bundle.attn_prefill
        return prefill_surface(*_columns(table, "chunk_tokens", "context_tokens"), self._window)

    @cached_property
    def decode(self) -> TimeByPair:
        """Attention of a batch of decodes."""
        table = self.bundle.attn_decode
        return decode_surface(*_columns(table, "batch_size", "context_tokens"), self._window)

    @property
    def _window(self) -> int:
        return self.model.windows.tokens if self.model.windows else 0

    @cached_property
    def roofline(self) -> PooledRoofline:
        """What all GEMMs of the bundle have in common; fitted when first asked beyond the range."""
        return pooled_roofline(self._gemms)

    def _beyond(self, op: str, tokens: Floats) -> Floats:
        return self.roofline.beyond(*self._gemms[op])(tokens)


Gemms = dict[str, tuple[GemmShape, Floats, Floats]]


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


def _columns(table: pd.DataFrame, a: str, b: str) -> tuple[Floats, Floats, Floats]:
    first, second, time_us = (table[name].to_numpy(np.float64) for name in (a, b, "time_us"))
    return first, second, time_us * 1e-6
