"""Attention times over two sizes: physics, a learned residual, and interpolation of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.roofline import attended
from sarathi_sim.profiler.physics.residual import Trees, fit_trees
from sarathi_sim.simulator.loop.records import Floats

Columns = Callable[[Floats, Floats], Floats]
TREES, LEAVES = 200, 15


@dataclass(frozen=True)
class Kind:
    """What is known beforehand of an op over two sizes ``a`` and ``b``.

    ``terms(a, b)`` are its physical terms and ``features(a, b)`` what the residual may depend on,
    shape (..., columns).
    """

    terms: Columns
    features: Columns


def coordinates(a: Floats, b: Floats) -> Floats:
    """Coordinates in which neighbours are found, shape (..., 2)."""
    # + 32: a context of 0 is a point of its own, and not infinitely far from 1. A first size of 0,
    # which takes no time, is outside of every region.
    return np.stack([np.log2(np.maximum(a, 1)), np.log2(b + 32)], axis=-1)


class PhysicalSurface:
    """Time in seconds over two sizes, as a product of three factors.

    Non-negative physical terms, fitted to relative errors (not those of the device models:
    ``profiler/facts/roofline.py`` says why); boosted trees on the logarithm of what they leave over
    (tile edges, split keys, other kernels); and the ratio that still remains at the points,
    interpolated between them in logarithms of the sizes. So it passes through the points, and
    beyond them the physics extrapolates with the residual at the edge.
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
        self._trees = _fitted(features.shape, features.tobytes(), left.tobytes(), TREES, LEAVES)
        left -= self._trees.predict(features)
        points = coordinates(a, b)
        self._nearest = NearestNDInterpolator(points, left, rescale=True)
        # Points on one line cannot be triangulated; then the nearest one has to do.
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
    """Runs and hold-outs of one process often fit the same points, which takes 0.2 s."""
    x, y = (np.frombuffer(array).copy() for array in (features, left))
    return fit_trees(x.reshape(shape), y, trees, leaves)


def _prefill_terms(chunk: Floats, context: Floats) -> Floats:
    """Launch; rows; KV read and written; query-key pairs under the causal mask."""
    keys, pairs = attended(chunk, context)
    return np.stack([np.ones_like(chunk), chunk, keys, pairs], axis=-1)


def _prefill_features(chunk: Floats, context: Floats) -> Floats:
    """Sizes and work in octaves, and how the chunk fills tiles of query rows."""
    keys, pairs = attended(chunk, context, edge=0.0)
    columns = [np.log2(chunk), np.log2(keys), context / keys, np.log2(context + 32)]
    columns.append(np.log2(pairs))
    for tile in (16, 32, 64, 128):
        tiles = np.ceil(chunk / tile)
        columns += [tiles * tile / chunk, np.minimum(tiles, 64)]
    return np.stack(columns, axis=-1)


def _decode_terms(batch: Floats, context: Floats) -> Floats:
    """Launch; sequences; one sequence's KV (a serial loop over it); the whole batch's KV."""
    return np.stack([np.ones_like(batch), batch, context, batch * context], axis=-1)


def _decode_features(batch: Floats, context: Floats) -> Floats:
    """Sizes and KV in octaves, the batch itself (waves), and blocks of keys."""
    keys = np.maximum(context, 1)
    columns = [np.log2(batch), np.log2(keys), np.log2(batch * keys), batch, batch % 8]
    columns += [np.ceil(keys / 64) * 64 / keys, np.ceil(keys / 256)]
    return np.stack(columns, axis=-1)


def prefill_surface(chunk: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of one chunk, by its tokens and the tokens cached before it."""
    return PhysicalSurface(chunk, context, time_s, Kind(_prefill_terms, _prefill_features))


def decode_surface(batch: Floats, context: Floats, time_s: Floats) -> PhysicalSurface:
    """Attention of a batch of decodes, by their number and mean context."""
    return PhysicalSurface(batch, context, time_s, Kind(_decode_terms, _decode_features))
