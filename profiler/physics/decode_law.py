"""Attention of decodes: a law of the kernel's work, and the kriged residual of measured decodes.

The law is a soft maximum of a launch, the sequences (times KV heads) and the cached tokens read
(times KV heads, up to a window). The rates of the last two change from octave to octave, because a
measuring loop finds a small KV cache in L2; all head counts of a table share them. The residual of
the law is interpolated (kriging) among the sizes of the same head counts: two decodes correlate
more the nearer they are in batch, in context, and in the KV tokens that they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..facts.roofline import Array

#: Decodes whose covariances are in memory together.
_AT_ONCE = 1024
#: Correlation length in octaves of batch, context and cached tokens; 8 to 32 are as good.
_OCTAVES = 16.0


@dataclass(frozen=True, eq=False)
class DecodeLaw:
    """One table of decodes by batches and contexts (``sizes``). ``log_us[i, j, k]`` was measured
    with ``heads[i]`` = (query heads, KV heads), NaN where it was not; ``window`` tokens of a
    context are read."""

    heads: npt.NDArray[np.int64]
    sizes: tuple[Array, ...]
    log_us: Array
    window: float

    def us(self, heads: npt.NDArray[np.int64], batch: Array, context: Array) -> Array:
        """Microseconds of a measured pair of head counts; no less than for its smallest decode.
        Between sizes, times are bounded by the next smaller and the next larger measured decode;
        beyond the largest they are on the line through the last two."""
        from scipy.interpolate import RegularGridInterpolator

        row = int(np.flatnonzero((self.heads == heads).all(axis=1))[0])
        wanted = np.stack(np.broadcast_arrays(batch, context), axis=-1)
        wanted = np.maximum(wanted, [size[0] for size in self.sizes])
        inside = np.minimum(wanted, [size[-1] for size in self.sizes])
        pairs = [(size, inside[..., axis]) for axis, size in enumerate(self.sizes)]
        below = self.log_us[row][tuple(np.searchsorted(s, x, "right") - 1 for s, x in pairs)]
        above = self.log_us[row][tuple(np.searchsorted(s, x, "left") for s, x in pairs)]
        found, between = below.copy(), below < above
        if between.any():
            nodes = inside[between]
            law = np.log(self._law(nodes, int(self.heads[row, 1])))
            near = law + self._over(nodes, self._weights[:, row])
            found[between] = np.clip(near, below[between], above[between])
        time, beyond = np.exp(found), (wanted > inside).any(axis=-1)
        if beyond.any():
            line = RegularGridInterpolator(
                self.sizes, np.exp(self.log_us[row]), bounds_error=False, fill_value=None
            )
            time[beyond] *= line(wanted[beyond]) / line(inside[beyond])
        return np.asarray(time)

    @cached_property
    def expected(self) -> Array:
        """Microseconds of every size by the law alone, as ``log_us``."""
        each = [self._law(self._nodes, kv) for kv in self.heads[:, 1].tolist()]
        return np.reshape(each, self.log_us.shape)

    def _law(self, nodes: Array, kv_heads: int) -> Array:
        """The root of :meth:`_work` times the rates: each count pays for the octaves below it."""
        rates, squares = self._rates[1:], np.full(len(nodes), self._rates[0])
        for count, ends in zip(self._counts(nodes, kv_heads), self._octaves, strict=True):
            here, rates = rates[: len(ends)], rates[len(ends) :]
            below = np.append(0.0, np.cumsum(here[:-1] * ((ends[1:] / ends[:-1]) ** 2 - 1)))
            at = np.searchsorted(ends[1:], count, side="right")
            squares += below[at] + here[at] * np.maximum((count / ends[at]) ** 2 - 1, 0.0)
        return np.asarray(np.sqrt(squares))

    def _work(self, nodes: Array, kv_heads: int) -> Array:
        """The squares of the law's counts, octave by octave: a column each."""
        parts = [np.ones((len(nodes), 1))]
        for count, ends in zip(self._counts(nodes, kv_heads), self._octaves, strict=True):
            upper = np.append(ends[1:], np.inf)
            parts.append(np.clip(count[:, None], ends, upper) ** 2 / ends**2 - 1)
        return np.hstack(parts)

    def _counts(self, nodes: Array, kv_heads: int) -> tuple[Array, Array]:
        batch, context = nodes.T
        return batch * kv_heads, batch * kv_heads * np.minimum(context, self.window)

    @cached_property
    def _octaves(self) -> list[Array]:
        """The sizes at which the rates change. With a single number of KV heads they do not: no
        other has cache sizes between the measured ones."""
        kv_heads = np.unique(self.heads[:, 1]).tolist()
        counts = zip(*(self._counts(self._nodes, kv) for kv in kv_heads), strict=True)
        ends = [2.0 ** np.unique(np.round(np.log2(np.concatenate(count)))) for count in counts]
        return ends if len(kv_heads) > 1 else [end[:1] for end in ends]

    @cached_property
    def _nodes(self) -> Array:
        return np.stack(np.meshgrid(*self.sizes, indexing="ij"), axis=-1).reshape(-1, 2)

    @cached_property
    def _rates(self) -> Array:
        """Non-negative least squares of the relative error of the squares."""
        from scipy.optimize import nnls

        work = np.vstack([self._work(self._nodes, kv) for kv in self.heads[:, 1].tolist()])
        squares = np.exp(2 * self.log_us).reshape(-1, 1)
        known = np.isfinite(squares[:, 0])
        return np.asarray(nnls(work[known] / squares[known], np.ones(known.sum()))[0])

    @cached_property
    def _weights(self) -> Array:
        """The kriging weights of the measured sizes: a column for each pair of head counts."""
        off = (self.log_us - np.log(self.expected)).reshape(len(self.heads), -1)
        return np.asarray(np.linalg.solve(self._covariance(self._nodes), off.T), np.float64)

    def _over(self, nodes: Array, weights: Array) -> Array:
        """The log residual of the law at ``nodes``, from the measured sizes' ``weights``; some at a
        time, as arrays of all pairs would fit neither the processor's cache nor, at times, memory.
        """
        found = np.empty(len(nodes))
        for start in range(0, len(nodes), _AT_ONCE):
            here = slice(start, start + _AT_ONCE)
            found[here] = self._covariance(nodes[here]) @ weights
        return found

    def _covariance(self, nodes: Array) -> Array:
        """The covariance of decodes with each measured size: shape (nodes, sizes)."""
        mine, theirs = self._octaves_of(nodes), self._octaves_of(self._nodes)
        apart = sum(np.abs(a[:, None] - b) for a, b in zip(mine, theirs, strict=True))
        return np.asarray(np.exp(-apart / _OCTAVES))

    def _octaves_of(self, nodes: Array) -> tuple[Array, ...]:
        """Batch, context and tokens read, in octaves."""
        return tuple(np.log2([*nodes.T, self._counts(nodes, 1)[1]]))
