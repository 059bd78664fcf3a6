"""From a bundle's measured points to op times anywhere: vectorised, once, before a simulation.

Linear ops and transfers are piecewise linear through the points (in time, not its logarithm: that
is off by 9 to 14 % between points) and continue beyond the last one in proportion to the size.
Attention is a sum of its physical terms, fitted to relative errors, times a correction that
interpolates the ratio measured / fitted between the points, and is constant beyond them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd

from profiler.schema import Bundle
from simulator.interaction import fit_skew, fit_whole_layer
from simulator.records import Floats

LAYER_OPS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2", "others")


class PiecewiseLinear:
    """Time in seconds through points ``(size, time)``; sizes ascending.

    Below the first point it is constant, beyond the last proportional to the size.
    """

    def __init__(self, size: npt.ArrayLike, time_s: npt.ArrayLike) -> None:
        self.size = np.asarray(size, np.float64)
        self.time_s = np.asarray(time_s, np.float64)

    def __call__(self, size: npt.ArrayLike) -> Floats:
        """Times in seconds, of the shape of ``size``."""
        wanted = np.asarray(size, np.float64)
        beyond = np.maximum(wanted / self.size[-1], 1.0)
        return np.asarray(np.interp(wanted, self.size, self.time_s) * beyond)


class PhysicalSurface:
    """Time in seconds over two sizes: non-negative physical terms, and a smooth correction.

    ``terms(a, b)`` gives the terms, shape (..., number of terms); ``place(a, b)`` the coordinates
    in which the correction is interpolated, shape (..., 2).
    """

    def __init__(
        self,
        a: Floats,
        b: Floats,
        time_s: Floats,
        terms: Callable[[Floats, Floats], Floats],
        place: Callable[[Floats, Floats], Floats],
    ) -> None:
        from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
        from scipy.optimize import nnls

        self._terms = terms
        self._place = place
        # Dividing both sides by the time makes the residual a relative error.
        scaled = terms(a, b) / time_s[:, None]
        unit = scaled.max(axis=0)
        self.coefficients = nnls(scaled / unit, np.ones(len(time_s)))[0] / unit
        points = place(a, b)
        ratio = time_s / (terms(a, b) @ self.coefficients)
        self._nearest = NearestNDInterpolator(points, ratio, rescale=True)
        # Points on one line cannot be triangulated; then the nearest one has to do.
        flat = np.linalg.matrix_rank(points - points[0]) < 2
        self._between = None if flat else LinearNDInterpolator(points, ratio, rescale=True)

    def __call__(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
        """Times in seconds, of the broadcast shape of ``a`` and ``b``."""
        x, y = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
        place = self._place(x, y)
        correction = np.reshape(self._nearest(place), x.shape)
        if self._between is not None:
            inside = np.reshape(self._between(place), x.shape)
            correction = np.where(np.isnan(inside), correction, inside)
        return np.asarray((self._terms(x, y) @ self.coefficients) * correction)


def _prefill_terms(chunk: Floats, context: Floats) -> Floats:
    """Launch; rows; KV read and written; query-key pairs under the causal mask."""
    pairs = chunk * (context + (chunk + 1) / 2)
    return np.stack([np.ones_like(chunk), chunk, chunk + context, pairs], axis=-1)


def _decode_terms(batch: Floats, context: Floats) -> Floats:
    """Launch; sequences; one sequence's KV (a serial loop over it); the whole batch's KV."""
    return np.stack([np.ones_like(batch), batch, context, batch * context], axis=-1)


def _log_place(a: Floats, b: Floats) -> Floats:
    # + 32: a context of 0 is a point of its own, and not infinitely far from 1.
    return np.stack([np.log2(a), np.log2(b + 32)], axis=-1)


class OpTimes:
    """Every op's time in seconds, for one layer on one tensor-parallel rank, as functions.

    ``linear[op](tokens)``, ``embedding(tokens)``, ``lm_head(rows)``, ``prefill(chunk, context)``,
    ``decode(batch, mean_context)``, ``all_reduce(num_bytes)``, ``send[scope](num_bytes)``.
    ``dtype_bytes`` is what a number takes in the dtype that was timed. ``whole_layer`` and ``skew``
    are what the ops one by one, with equal contexts, miss.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.tp = bundle.meta.tp
        self.model = bundle.meta.model_spec
        self.dtype_bytes = 4 if bundle.meta.dtype == "float32" else 2
        by_op = {
            str(op): PiecewiseLinear(rows["num_tokens"], rows["time_us"] * 1e-6)
            for op, rows in bundle.linear.groupby("op")
        }
        self.linear = {op: by_op[op] for op in LAYER_OPS}
        self.embedding = by_op["embedding"]
        self.lm_head = by_op["lm_head"]
        self.prefill = prefill_surface(
            *_columns(bundle.attn_prefill, "chunk_tokens", "context_tokens")
        )
        self.decode = decode_surface(*_columns(bundle.attn_decode, "batch_size", "context_tokens"))
        self.all_reduce = (
            PiecewiseLinear(bundle.all_reduce["num_bytes"], bundle.all_reduce["time_us"] * 1e-6)
            if self.tp > 1
            else None
        )
        self.send = {
            str(scope): PiecewiseLinear(rows["num_bytes"], rows["time_us"] * 1e-6)
            for scope, rows in bundle.send_recv.groupby("scope")
        }
        self.skew = fit_skew(self.decode, bundle.attn_decode_skew)
        self.whole_layer = fit_whole_layer(self, bundle.mixed)


def prefill_surface(chunk: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of one chunk, by its tokens and the tokens cached before it."""
    return PhysicalSurface(chunk, context, time_s, _prefill_terms, _log_place)


def decode_surface(batch: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of a batch of decodes, by their number and mean context."""
    return PhysicalSurface(batch, context, time_s, _decode_terms, _log_place)


def _columns(table: pd.DataFrame, a: str, b: str) -> tuple[Floats, Floats, Floats]:
    first, second, time_us = (table[name].to_numpy(np.float64) for name in (a, b, "time_us"))
    return first, second, time_us * 1e-6
