"""GEMM times over a lattice of measured (n, k): log(time / (n k)) between the four neighbours.

In m a curve is linear between its knots. Beyond the last knot it is proportional to m, and beyond
the largest n and k to n k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.roofline import HBM_SHARE, Array
from .stack_file import StoredSurface

#: Smaller sides of a GEMM count as this; no shard of a model has any.
LEAST_SIDE = 256
#: Largest 95th percentile, over all shapes, of the error at a size that is no knot.
_KNOT_P95 = 0.06


#: A kernel takes at least this part of the time of its bytes and FLOPs at the data sheet's rates:
#: clocks are above the sheet's, and some activations are still in L2.
LEAST = 0.9
#: With weights of more than so many times L2 a loop finds none in L2; GEMMs of up to so many tokens
#: are bound by reading them.
_BEYOND, _WAITING = 2.0, 256
#: The quantile of these GEMMs that gives the fastest reading of weights.
_FASTEST = 0.01


def from_memory(time_us: Array, read_us: Array, cache_us: float, fastest: float = LEAST) -> Array:
    """Times by shape and, last, tokens, without times that only weights in L2 make possible.

    Reading the weights from memory takes ``read_us`` at the data sheet's bandwidth; reading all of
    L2 takes ``cache_us``. A time below ``fastest`` times ``read_us`` is replaced by ``read_us``
    times the median ratio of the shapes too large for L2, at the same number of tokens.
    """
    share, beyond = time_us / read_us, read_us > _BEYOND * cache_us
    shares = np.where(beyond, share, np.nan).reshape(-1, share.shape[-1])
    usual = np.full(share.shape[-1], 1 / HBM_SHARE)
    known = ~np.isnan(shares).all(axis=0)
    usual[known] = np.nanmedian(shares[:, known], axis=0)
    faulty = share < np.where(beyond, LEAST, fastest)
    return np.where(faulty, np.maximum(usual, fastest) * read_us, time_us)


def rising(times: Array, *axes: int) -> Array:
    """Nothing larger along these axes takes less time: a running minimum from the largest on."""
    for axis in axes:
        times = np.flip(np.minimum.accumulate(np.flip(times, axis), axis=axis), axis)
    return times


@dataclass(frozen=True, eq=False)
class GemmLattice(StoredSurface):
    """``log_rate[i, j, l]`` is the logarithm of microseconds / (n k) at n[i], k[j], m[l]."""

    n: Array
    k: Array
    m: Array
    log_rate: Array

    def curve(self, n: int, k: int) -> Array:
        """Microseconds at every knot in m."""
        wide, deep = max(float(n), self.n[0]), max(float(k), self.k[0])
        over_n = _between(np.log(wide), np.log(self.n), self.log_rate)
        rate = np.exp(_between(np.log(deep), np.log(self.k), over_n))
        return np.asarray(rate * wide * deep)

    def time_us(self, m: Array, n: int, k: int) -> Array:
        """Microseconds of ``out[m, n] = a[m, k] x b[k, n]``."""
        inside = np.interp(m, self.m, self.curve(n, k))
        return np.asarray(inside * np.maximum(m / self.m[-1], 1.0))

    def measured(self, n: int, k: int) -> bool:
        """Whether (n, k) is a point of the lattice."""
        return n in self.n and k in self.k


@dataclass(frozen=True)
class FastestGemm:
    """Of several kernels the fastest for a size."""

    kernels: Sequence[GemmLattice]

    def time_us(self, m: Array, n: int, k: int) -> Array:
        """See :meth:`GemmLattice.time_us`."""
        return np.asarray(np.min([kernel.time_us(m, n, k) for kernel in self.kernels], axis=0))


def _between(at: float, sizes: Array, values: Array) -> Array:
    """Linear over the first axis; the edge's value beyond."""
    if len(sizes) == 1:
        return np.asarray(values[0])
    upper = int(
        np.clip(
            np.searchsorted(sizes, at),
            1,
            len(sizes) - 1,
        )
    )
    share = np.clip(
        (at - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1]),
        0.0,
        1.0,
    )
    found: Array = (1 - share) * values[upper - 1] + share * values[upper]
    return found


@dataclass(frozen=True, eq=False)
class GemmCube:
    """A table of GEMMs by n, k and m; NaN where nothing was measured."""

    n: Array
    k: Array
    m: Array
    time_us: Array

    def some(self, n: npt.ArrayLike, k: npt.ArrayLike, m: npt.ArrayLike) -> GemmCube:
        """The cube of these indices."""
        i, j, at = np.asarray(n), np.asarray(k), np.asarray(m)
        return GemmCube(
            self.n[i],
            self.k[j],
            self.m[at],
            self.time_us[np.ix_(i, j, at)],
        )

    def from_memory(self, weight_us: float, cache_us: float) -> GemmCube:
        """The cube without weights found in L2 (:func:`from_memory`): no weights are read faster
        than those of shapes too large for L2. Reading a weight takes ``weight_us``."""
        read = weight_us * self.n[:, None, None] * self.k[None, :, None] + 0 * self.time_us
        share = (self.time_us / read)[..., self.m <= _WAITING]
        beyond = share[(read > _BEYOND * cache_us)[..., self.m <= _WAITING] & ~np.isnan(share)]
        fastest = np.quantile(beyond, _FASTEST) if len(beyond) else LEAST
        times = from_memory(self.time_us, read, cache_us, max(float(fastest), LEAST))
        return GemmCube(self.n, self.k, self.m, times)

    def cleaned(self) -> GemmCube:
        """The cube in which no GEMM takes longer than a larger one (m, n and k no smaller). A
        running minimum from the largest sizes on, over each size in turn: a longer time is a bad
        sample of the tables, or a kernel that a server avoids by padding."""
        unknown = np.isnan(self.time_us)
        times = rising(np.where(unknown, np.inf, self.time_us), 0, 1, 2)
        return GemmCube(
            self.n,
            self.k,
            self.m,
            np.where(unknown, np.nan, times),
        )


def gemm_cube(rows: pd.DataFrame) -> GemmCube:
    """Rows (m, n, k, time_us), sides from :data:`LEAST_SIDE` on."""
    rows = rows[(rows["n"] >= LEAST_SIDE) & (rows["k"] >= LEAST_SIDE)]
    n, k, m = (np.unique(rows[size].to_numpy(np.float64)) for size in ("n", "k", "m"))
    times = np.full((len(n), len(k), len(m)), np.nan)
    at = [np.searchsorted(sizes, rows[name]) for sizes, name in ((n, "n"), (k, "k"), (m, "m"))]
    times[tuple(at)] = rows["time_us"]
    return GemmCube(n, k, m, times)


def fit_lattice(cube: GemmCube, knots: npt.ArrayLike | None = None) -> GemmLattice:
    """The surface of a cleaned cube, with all m as knots, or those of these indices."""
    at = np.arange(len(cube.m)) if knots is None else np.asarray(knots)
    rate = np.log(_filled(cube) / (cube.n[:, None, None] * cube.k[None, :, None]))
    return GemmLattice(
        cube.n,
        cube.k,
        cube.m[at],
        rate[:, :, at],
    )


def _filled(cube: GemmCube) -> Array:
    """The times, with missing ones in proportion to m, or to n k from the next smaller n or k."""
    times = cube.time_us.copy()
    for i, j in np.argwhere(np.isnan(times).any(axis=2)):
        known = ~np.isnan(times[i, j])
        if known.any():
            last = cube.m[known][-1]
            inside = np.interp(
                cube.m,
                cube.m[known],
                times[i, j, known],
            )
            times[i, j] = inside * np.maximum(cube.m / last, 1.0)
    rate = times / (cube.n[:, None, None] * cube.k[None, :, None])
    for axis in (1, 0):
        for along in (rate, np.flip(rate, axis)):
            moved = np.moveaxis(along, axis, 0)
            for one, following in pairwise(moved):
                following[np.isnan(following)] = one[np.isnan(following)]
    filled: Array = rate * cube.n[:, None, None] * cube.k[None, :, None]
    return filled


def choose_knots(off: Callable[[list[int]], Array], count: int) -> npt.NDArray[np.intp]:
    """Indices of the sizes to keep as knots, so that lines between them fit the other sizes.

    ``off(kept)`` are the logarithmic errors with these indices kept, the ``count`` sizes last. The
    size with the largest error is added until no error is above 6 % (95th percentile over all
    shapes).
    """
    chosen = [0, count - 1]
    while len(chosen) < count:
        p95 = np.nanquantile(
            np.abs(off(chosen)).reshape(-1, count),
            0.95,
            axis=0,
        )
        if p95.max() <= _KNOT_P95:
            break
        chosen = sorted([*chosen, int(np.argmax(p95))])
    return np.array(chosen)


def through(cube: GemmCube, knots: npt.ArrayLike) -> Array:
    """The cube's times at every m, linear between these knots."""
    at = np.asarray(knots)
    upper = np.clip(
        np.searchsorted(at, np.arange(len(cube.m))),
        1,
        len(at) - 1,
    )
    low, high = at[upper - 1], at[upper]
    share = (cube.m - cube.m[low]) / (cube.m[high] - cube.m[low])
    times = cube.time_us
    found: Array = (1 - share) * times[..., low] + share * times[..., high]
    return found
