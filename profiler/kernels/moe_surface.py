"""Times of a mixture's experts: measured over expected, interpolated over shapes and tokens.

Expected is a roofline: the weights of the experts that some token chose, their FLOPs, and the rows
carried to them and back. The logarithm of measured / expected is linear in the logarithm of the
tokens. At a shape that was not measured it is a weighted mean of the others' (kriging with an
exponential covariance: a measured shape keeps its own curve, a far one the mean's).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from profiler.facts.device import load_device
from profiler.facts.formats import MOE_BYTES, MOE_SPEEDUP, MoeDtype
from profiler.facts.roofline import HALF, HBM_SHARE, Array
from profiler.kernels.gemm_lattice import Stored, packed, unpacked

#: The columns of a shape: a model's sizes, and how its experts are divided among ranks.
SHAPE = ("hidden", "inter", "top_k", "experts", "tp", "ep")
#: Of the expected time: a launch of both GEMMs and the routing, and the share of the peak FLOP/s.
_LAUNCH_US, _FLOP_SHARE = 20.0, 0.6
#: Octaves over which two shapes become unlike; the results hardly depend on it (3 to 16).
_OCTAVES = 12.0
#: Variance of a point's own noise over that between shapes.
_NOISE = 1e-3
#: Of a knot left out: the 95th percentile of its error over all shapes may be this much.
_KNOT_P95 = 0.06


@dataclass(frozen=True)
class Rates:
    """What bounds the experts: FLOP/s and bytes/s at peak, bytes of a weight."""

    flops: float
    bandwidth: float
    weight_bytes: float


def rates_of(device: str, dtype: MoeDtype) -> Rates:
    """Those of a shipped device for experts in ``dtype``."""
    spec = load_device(device)
    return Rates(spec.peak_flops * MOE_SPEEDUP[dtype], spec.memory_bandwidth, MOE_BYTES[dtype])


def moved_bytes(shapes: Array, tokens: Array, weight_bytes: float) -> Array:
    """Weights of the experts that some token chose, and rows in and out of them and the layer.

    One row a shape (:data:`SHAPE`), one column a number of tokens.
    """
    hidden, inter, top_k, experts, tp, ep = shapes.T[:, :, None]
    chosen = experts / ep * (1.0 - (1.0 - top_k / experts) ** tokens)
    rows, width = tokens * top_k / ep, inter / tp
    numbers = rows * (2 * hidden + 3 * width) + 2 * tokens * hidden
    found: Array = weight_bytes * chosen * 3 * hidden * width + HALF * numbers
    return found


def expected_us(shapes: Array, tokens: Array, rates: Rates) -> Array:
    """One row a shape (:data:`SHAPE`), one column a number of tokens."""
    hidden, inter, top_k, _, tp, ep = shapes.T[:, :, None]
    moved = moved_bytes(shapes, tokens, rates.weight_bytes)
    memory = 1e6 * moved / (HBM_SHARE * rates.bandwidth)
    compute = 6e6 * tokens * top_k / ep * hidden * inter / tp / (_FLOP_SHARE * rates.flops)
    found: Array = _LAUNCH_US + np.hypot(memory, compute)
    return found


@dataclass(frozen=True, eq=False)
class MoeSurface:
    """``log_ratio[i, j]`` of shape ``shapes[i]`` at ``tokens[j]``: measured over expected."""

    shapes: npt.NDArray[np.int64]
    tokens: Array
    log_ratio: Array

    def time_us(self, tokens: Array, shape: tuple[int, ...], rates: Rates) -> Array:
        """Microseconds of one rank's experts for ``tokens`` of the layer, before the choice."""
        wanted = np.asarray(tokens, np.float64)
        (curve,) = self.curves(np.array([shape]))
        at = np.log(np.clip(wanted, self.tokens[0], self.tokens[-1]))
        ratio = np.exp(np.interp(at, np.log(self.tokens), curve))
        expected = expected_us(np.array([shape], np.float64), wanted.reshape(-1), rates)
        return np.asarray(ratio * expected.reshape(wanted.shape))

    def curves(self, shapes: npt.NDArray[np.int64]) -> Array:
        """The logarithms of the ratio at the knots, for each of ``shapes``."""
        near = _alike(_features(shapes), _features(self.shapes))
        mean = self.log_ratio.mean(axis=0)
        found: Array = mean + near @ np.linalg.solve(self._covariance, self.log_ratio - mean)
        known = {tuple(shape): at for at, shape in enumerate(self.shapes.tolist())}
        for row, shape in enumerate(shapes.tolist()):
            if tuple(shape) in known:
                found[row] = self.log_ratio[known[tuple(shape)]]
        return found

    @cached_property
    def _covariance(self) -> Array:
        own = _features(self.shapes)
        return _alike(own, own) + _NOISE * np.eye(len(own))

    def from_what(self, shape: tuple[int, ...]) -> str:
        """What the times of a shape come from, as the errors of a fit call it: ``between`` its own
        token counts, other ``shapes``, or ``beyond`` them: none chooses as many experts."""
        if (self.shapes == shape).all(axis=1).any():
            return "between"
        return "shapes" if shape[SHAPE.index("top_k")] in self.shapes[:, 2] else "beyond"

    def some(self, rows: npt.NDArray[np.bool_]) -> MoeSurface:
        """These shapes alone."""
        return MoeSurface(self.shapes[rows], self.tokens, self.log_ratio[rows])

    def arrays(self) -> dict[str, npt.NDArray[np.int16] | npt.NDArray[np.int32]]:
        """As plain integers."""
        return {
            "shapes": self.shapes.astype(np.int32),
            "tokens": self.tokens.astype(np.int32),
            "log_ratio": packed(self.log_ratio),
        }

    @classmethod
    def from_arrays(cls, arrays: Stored) -> MoeSurface:
        """From what :meth:`arrays` gave."""
        ratio = unpacked(np.asarray(arrays["log_ratio"], np.int16))
        return cls(arrays["shapes"].astype(np.int64), arrays["tokens"].astype(np.float64), ratio)


def _features(shapes: npt.NDArray[np.int64]) -> Array:
    """What a rank's kernel sees, in units of the range over which it changes."""
    hidden, inter, top_k, experts, tp, ep = shapes.T.astype(np.float64)
    seen = np.stack([hidden, inter / tp, experts / ep, top_k / experts, top_k, ep], axis=-1)
    return np.asarray(np.log2(seen) / _OCTAVES)


def _alike(some: Array, others: Array) -> Array:
    """The covariance of the curves of two shapes, 1 for the same."""
    far = np.sqrt(((some[:, None] - others[None]) ** 2).sum(axis=-1))
    found: Array = np.exp(-far)
    return found


@dataclass(frozen=True, eq=False)
class MoeTable:
    """Measured times by shape and tokens; shapes with a gap are left out."""

    shapes: npt.NDArray[np.int64]
    tokens: Array
    time_us: Array

    def cleaned(self) -> MoeTable:
        """More tokens take no less time: a running minimum from the largest number on."""
        times = np.flip(np.minimum.accumulate(np.flip(self.time_us, 1), axis=1), 1)
        return MoeTable(self.shapes, self.tokens, times)

    def some(self, rows: npt.NDArray[np.bool_]) -> MoeTable:
        """These shapes alone."""
        return MoeTable(self.shapes[rows], self.tokens, self.time_us[rows])

    def log_ratio(self, rates: Rates) -> Array:
        """The logarithm of measured over expected."""
        shapes = self.shapes.astype(np.float64)
        return np.asarray(np.log(self.time_us / expected_us(shapes, self.tokens, rates)))


def moe_table(rows: pd.DataFrame) -> MoeTable:
    """From rows of :data:`SHAPE`, ``tokens`` and ``time_us``."""
    table = rows.pivot_table(index=list(SHAPE), columns="tokens", values="time_us").dropna()
    shapes = np.array(table.index.to_list(), dtype=np.int64).reshape(-1, len(SHAPE))
    return MoeTable(shapes, table.columns.to_numpy(np.float64), table.to_numpy(np.float64))


def fit_moe(table: MoeTable, rates: Rates, knots: npt.NDArray[np.intp] | None = None) -> MoeSurface:
    """The surface of a cleaned table, with all token counts as knots, or those of these indices."""
    at = np.arange(len(table.tokens)) if knots is None else knots
    return MoeSurface(table.shapes, table.tokens[at], table.log_ratio(rates)[:, at])


def choose_tokens(table: MoeTable, rates: Rates) -> npt.NDArray[np.intp]:
    """Indices of the token counts to keep, so that the others are close to the lines between them.

    The one with the largest error (95th percentile over the shapes) is added until none is above
    6 %.
    """
    ratio = table.log_ratio(rates)
    chosen = [0, len(table.tokens) - 1]
    while len(chosen) < len(table.tokens):
        p95 = np.quantile(np.abs(between_knots(ratio, table.tokens, chosen) - ratio), 0.95, axis=0)
        if p95.max() <= _KNOT_P95:
            break
        chosen = sorted([*chosen, int(np.argmax(p95))])
    return np.array(chosen)


def between_knots(ratio: Array, tokens: Array, knots: npt.ArrayLike) -> Array:
    """Every token count's logarithm, linear between these knots."""
    at, where = np.asarray(knots), np.log(tokens)
    return np.stack([np.interp(where, where[at], row[at]) for row in ratio])


def groups(shapes: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.bool_], bool]]:
    """The rows of each model's shapes (hidden, inter, experts), however divided; and whether
    another model chooses as many experts a token."""
    models, which = np.unique(shapes[:, [0, 1, 3]], axis=0, return_inverse=True)
    which = which.reshape(-1)
    for number in range(len(models)):
        mine = which == number
        yield mine, bool(np.isin(shapes[mine, 2], shapes[~mine, 2]).all())
