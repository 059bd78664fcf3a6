"""Times of a mixture's experts: measured over expected, interpolated over shapes and tokens.

The expected time is a roofline, one formula for every device. The logarithm of measured / expected
is linear in the logarithm of the tokens. A measured shape keeps its own curve. Any other shape
takes the trend of the table, and a weighted mean of the measured shapes' residuals (kriging with an
exponential covariance: a near shape's residual, the median of far ones).

The trend is a sum of parts of the busiest rank's time, each with a factor fitted to the table
(non-negative least squares of the relative errors): a launch; weights read from HBM and from L2;
FLOPs of whole tiles of rows; rows in and out; a part for every expert. Some kernels also carry the
rows of all ranks, or compute them, which are parts of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.device import load_device
from ..facts.formats import MOE_BYTES, MOE_SPEEDUP, MoeDtype, exponent_of
from ..facts.layer_kinds import busiest
from ..facts.roofline import HALF, HBM_SHARE, Array
from .gemm_lattice import LEAST, choose_knots, from_memory, rising
from .stack_file import StoredSurface

#: The columns of a shape: a model's sizes, and the sharding of its experts over ranks.
SHAPE = ("hidden", "inter", "top_k", "experts", "tp", "ep")
#: In the expected time: the launch of both GEMMs and the routing, and the share of peak FLOP/s.
_LAUNCH_US, _FLOP_SHARE = 20.0, 0.6
TILE = 128
"""Rows of a tile of DeepGEMM's grouped GEMM."""
#: Prior factors of the trend's parts, for parts that a table does not determine (few models, or
#: ranks of one kind); the prior's weight beside the mean of the squared errors.
_USUAL = (20.0, 1.25, 0.5, 1.7, 0.1, 4.0, 4.0, 2.0, 1.0, 1.0, 0.05)
_LEAN = 1e-4
#: Weights up to the first share of L2 are all found in it, from the second share on none.
_FITS, _OUTGROWS = 0.8, 1.2


@dataclass(frozen=True)
class Rates:
    """The rates that bound the experts: peak FLOP/s and bytes/s, bytes of a weight, bytes of L2.
    ``exponent`` is the exponent of the power law of tokens over experts, 0 for evenly."""

    flops: float
    bandwidth: float
    weight_bytes: float
    cache: float = 0.0
    exponent: float = 0.0


def rates_of(device: str, dtype: MoeDtype, distribution: str) -> Rates:
    """The rates of a shipped device for experts in ``dtype``."""
    spec = load_device(device)
    return Rates(
        spec.peak_flops * MOE_SPEEDUP[dtype], spec.memory_bandwidth, MOE_BYTES[dtype],
        spec.l2_bytes or 0.0, exponent_of(distribution),
    )  # fmt: skip


def moved_bytes(shapes: Array, tokens: Array, weight_bytes: float) -> Array:
    """Bytes of the weights of chosen experts, and of rows in and out of them and the layer. One row
    a shape (:data:`SHAPE`), one column a number of tokens."""
    hidden, inter, top_k, experts, tp, ep = shapes.T[:, :, None]
    chosen = experts / ep * (1.0 - (1.0 - top_k / experts) ** tokens)
    rows, width = tokens * top_k / ep, inter / tp
    numbers = rows * (2 * hidden + 3 * width) + 2 * tokens * hidden
    found: Array = weight_bytes * chosen * 3 * hidden * width + HALF * numbers
    return found


def read_us(shapes: npt.NDArray[np.int64], tokens: Array, rates: Rates) -> Array:
    """Reading the weights of the busiest rank's chosen experts from memory: [shape, tokens]."""
    at, (hidden, inter, *_, tp, _) = tuple(tokens.tolist()), shapes.astype(np.float64).T
    loads = (busiest(*shape, at, rates.exponent) for shape in shapes[:, [3, 2, 5]].tolist())
    touched = np.array([load.touched for load in loads])
    expert_us = 3e6 * rates.weight_bytes * hidden * inter / tp / rates.bandwidth
    return np.asarray(expert_us[:, None] * touched)


def expected_us(shapes: Array, tokens: Array, rates: Rates) -> Array:
    """The expected time: one row a shape (:data:`SHAPE`), one column a number of tokens."""
    hidden, inter, top_k, _, tp, ep = shapes.T[:, :, None]
    moved = moved_bytes(shapes, tokens, rates.weight_bytes)
    memory = 1e6 * moved / (HBM_SHARE * rates.bandwidth)
    compute = 6e6 * tokens * top_k / ep * hidden * inter / tp / (_FLOP_SHARE * rates.flops)
    found: Array = _LAUNCH_US + np.hypot(memory, compute)
    return found


def padded_us(shape: tuple[int, ...], tokens: Array, rates: Rates) -> Array:
    """Experts in tiles of :data:`TILE` rows, all of them, chosen or not: the longer of reading
    their weights and of the padded rows' FLOPs, and a launch. Rows are padded by a tile less one
    an expert."""
    hidden, inter, top_k, experts, tp, ep = shape
    rows = (np.asarray(tokens) * top_k + (TILE - 1) * experts) / ep
    compute = 6e6 * rows * hidden * inter / tp / (_FLOP_SHARE * rates.flops)
    weights = 3 * rates.weight_bytes * experts / ep * hidden * inter / tp
    found: Array = _LAUNCH_US + np.maximum(compute, 1e6 * weights / (HBM_SHARE * rates.bandwidth))
    return found


def parts_us(shapes: npt.NDArray[np.int64], tokens: Array, rates: Rates) -> Array:
    """The parts of the trend at peak rates: [shape, tokens, part]."""
    at = tuple(tokens.tolist())
    loads = [busiest(*shape, at, rates.exponent) for shape in shapes[:, [3, 2, 5]].tolist()]
    rows, touched, padded = np.array(loads).transpose(1, 0, 2)
    hidden, inter, top_k, experts, tp, ep = shapes.astype(np.float64).T[:, :, None]
    width, byte_us = inter / tp, 1e6 / rates.bandwidth
    expert = 3 * hidden * width
    weights = rates.weight_bytes * expert * touched
    over = weights / rates.cache if rates.cache else np.inf
    missed = np.clip((over - _FITS) / (_OUTGROWS - _FITS), 0.0, 1.0)
    parts = (
        np.ones_like(rows),
        byte_us * weights * missed,
        byte_us * weights * (1.0 - missed),
        2e6 * expert * padded / rates.flops,
        2e6 * expert * tokens * top_k / rates.flops,
        byte_us * HALF * rows * hidden,
        byte_us * HALF * rows * width,
        byte_us * HALF * tokens * hidden,
        byte_us * HALF * tokens * top_k * hidden,
        byte_us * HALF * tokens * top_k * width,
        np.broadcast_to(experts / ep, rows.shape),
    )
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def factors(parts: Array, time_us: Array) -> Array:
    """The factor of each part, by least squares of the relative errors of their sum."""
    from scipy.optimize import nnls

    usual = np.array(_USUAL)
    share = (parts / time_us[..., None]).reshape(-1, len(usual)) * usual
    basis, triangle = np.linalg.qr(share)  # the same minimum, of fewer rows
    lean = np.sqrt(_LEAN * len(share))
    rows = np.concatenate([triangle, lean * np.eye(len(usual))])
    found, _ = nnls(rows, np.concatenate([basis.sum(axis=0), np.full(len(usual), lean)]))
    return np.asarray(found * usual)


#: Tokens at which reading the chosen experts' weights is counted.
_COUNTS = np.unique(np.round(np.exp2(np.arange(0.0, 14.6, 0.5))))
#: Correlation length of two shapes in octaves; the results hardly depend on it (3 to 16).
_OCTAVES = 12.0
#: Variance of a point's own noise over the variance between shapes; its growth for a shape that the
#: other models' shapes contradict by as much as the median error.
_NOISE, _DOUBT = 1e-3, 0.03
#: Lower bound of the median error of the shapes (natural logarithm).
_LEAST_OFF = 0.02


@dataclass(frozen=True, eq=False)
class MoeSurface(StoredSurface):
    """``log_ratio[i, j]`` of shape ``shapes[i]`` at ``tokens[j]``: measured over expected."""

    shapes: npt.NDArray[np.int64]
    tokens: Array
    log_ratio: Array
    whole = ("shapes",)

    def time_us(self, tokens: Array, shape: tuple[int, ...], rates: Rates) -> Array:
        """Microseconds of one rank's experts for ``tokens`` of the layer, before the choice."""
        wanted = np.asarray(tokens, np.float64)
        own = (self.shapes == shape).all(axis=1)
        of = np.array([shape])
        (curve,) = self.log_ratio[own] if own.any() else self.unmeasured(of, rates)
        at = np.log(np.clip(wanted, self.tokens[0], self.tokens[-1]))
        ratio = np.exp(np.interp(at, np.log(self.tokens), curve))
        expected = expected_us(of.astype(np.float64), wanted.reshape(-1), rates)
        least = np.interp(wanted, _COUNTS, LEAST * read_us(of, _COUNTS, rates)[0])
        return np.asarray(np.maximum(ratio * expected.reshape(wanted.shape), least))

    def unmeasured(self, shapes: npt.NDArray[np.int64], rates: Rates) -> Array:
        """The logarithms of the ratio at the knots, for each of ``shapes``, from the measured ones.
        More tokens take no less time, as in a cleaned table."""
        every, own = np.concatenate([self.shapes, shapes]), len(self.shapes)
        expected = np.log(expected_us(every.astype(np.float64), self.tokens, rates))
        parts = parts_us(every, self.tokens, rates)
        log_us = self.log_ratio + expected[:own]
        trend = np.log(np.maximum(parts @ factors(parts[:own], np.exp(log_us)), 1.0))
        # Kernels change with the tokens, and with the rows of an expert: half of each.
        place = np.log2(self.tokens) + 0.5 * np.log2(every[:, [2]] / every[:, [3]])
        grid = np.arange(
            np.floor(place.min()),
            np.ceil(place.max()) + 0.5,
            0.5,
        )
        off = _through(grid[None], place[:own], log_us - trend[:own])
        features = _features(every)
        near = _covariance(features[own:], features[:own])
        middle = np.asarray(np.median(off, axis=0), np.float64)
        kriged = middle + near @ self._pull(off - middle)
        log_us = trend[own:] + _through(place[own:], grid[None], kriged)
        least = np.log(LEAST * read_us(shapes, self.tokens, rates))
        return np.maximum(rising(log_us, 1), least) - expected[own:]

    def _pull(self, off: Array) -> Array:
        """The kriging weights of the shapes' curves. Shapes that other models contradict weigh
        less: a badly chosen kernel says little about another shape."""
        models = [mine for mine, _ in groups(self.shapes)]
        alike = _covariance(*[_features(self.shapes)] * 2)
        noise = np.full(len(off), _NOISE)
        for _ in range(2):
            inverse = np.linalg.inv(alike + np.diag(noise))
            pull, missed = inverse @ off, np.empty(len(off))
            for mine in models:  # the errors of each model, from all others
                left = np.linalg.solve(inverse[np.ix_(mine, mine)], pull[mine])
                missed[mine] = np.median(np.abs(left), axis=1)
            noise = _NOISE + _DOUBT * (missed / max(float(np.median(missed)), _LEAST_OFF)) ** 2
        return np.asarray(np.linalg.solve(alike + np.diag(noise), off), np.float64)

    def from_what(self, shape: tuple[int, ...]) -> str:
        """The kind of hold-out that judges a shape: ``between`` its own token counts, from other
        ``shapes``, or ``beyond`` them (no shape chooses as many experts)."""
        if (self.shapes == shape).all(axis=1).any():
            return "between"
        return "shapes" if shape[SHAPE.index("top_k")] in self.shapes[:, 2] else "beyond"

    def some(self, rows: npt.NDArray[np.bool_]) -> MoeSurface:
        """These shapes alone."""
        return MoeSurface(self.shapes[rows], self.tokens, self.log_ratio[rows])


def _features(shapes: npt.NDArray[np.int64]) -> Array:
    """The features of a rank's kernel, in units of the range over which it changes."""
    hidden, inter, top_k, experts, tp, ep = shapes.T.astype(np.float64)
    seen = np.stack(
        [
            hidden,
            inter / tp,
            experts / ep,
            top_k / experts,
            top_k,
            ep,
        ],
        axis=-1,
    )
    return np.asarray(np.log2(seen) / _OCTAVES)


def _covariance(some: Array, others: Array) -> Array:
    """The covariance of the curves of two shapes, 1 for the same."""
    far = np.sqrt(((some[:, None] - others[None]) ** 2).sum(axis=-1))
    found: Array = np.exp(-far)
    return found


def _through(wanted: Array, at: Array, curves: Array) -> Array:
    """Each curve, known ``at`` its places, at the ``wanted``; one row of either may serve all."""
    where = np.broadcast_to(wanted, (len(curves), wanted.shape[1]))
    known = np.broadcast_to(at, curves.shape)
    return np.stack([np.interp(*row) for row in zip(where, known, curves, strict=True)])


@dataclass(frozen=True, eq=False)
class MoeTable:
    """Measured times by shape and tokens; NaN where a shape has none at these tokens."""

    shapes: npt.NDArray[np.int64]
    tokens: Array
    time_us: Array

    def from_memory(self, rates: Rates) -> MoeTable:
        """The table without weights found in L2, and other times below the memory's bound
        (:func:`~sarathi_sim.profiler.kernels.gemm_lattice.from_memory`)."""
        read, cache = read_us(self.shapes, self.tokens, rates), 1e6 * rates.cache / rates.bandwidth
        return MoeTable(self.shapes, self.tokens, from_memory(self.time_us, read, cache))

    def cleaned(self, rates: Rates) -> MoeTable:
        """The table in which more tokens take no less time. Without gaps: a shape's time over the
        expected one is as at its nearest tokens."""
        times, unknown = self.time_us, np.isnan(self.time_us)
        if unknown.any():
            expected, at = expected_us(self.shapes.astype(float), self.tokens, rates), self.tokens
            filled = [
                np.exp(
                    np.interp(
                        np.log(at),
                        np.log(at[~gap]),
                        np.log(row[~gap] / usual[~gap]),
                    )
                )
                for gap, row, usual in zip(unknown, times, expected, strict=True)
            ]
            times = np.where(unknown, filled * expected, times)
        return MoeTable(self.shapes, self.tokens, rising(times, 1))

    def some(self, rows: npt.NDArray[np.bool_]) -> MoeTable:
        """These shapes alone."""
        return MoeTable(self.shapes[rows], self.tokens, self.time_us[rows])

    def log_ratio(self, rates: Rates) -> Array:
        """The logarithm of measured over expected."""
        shapes = self.shapes.astype(np.float64)
        return np.asarray(np.log(self.time_us / expected_us(shapes, self.tokens, rates)))


def moe_table(rows: pd.DataFrame, gaps: bool = False) -> MoeTable:
    """From rows of :data:`SHAPE`, ``tokens`` and ``time_us``. Shapes with a gap are left out, or
    with ``gaps`` kept."""
    table = rows.pivot_table(index=list(SHAPE), columns="tokens", values="time_us")
    table = table if gaps else table.dropna()
    shapes = np.array(table.index.to_list(), dtype=np.int64).reshape(-1, len(SHAPE))
    return MoeTable(shapes, table.columns.to_numpy(np.float64), table.to_numpy(np.float64))


def fit_moe(table: MoeTable, rates: Rates, knots: npt.NDArray[np.intp] | None = None) -> MoeSurface:
    """The surface of a cleaned table, with all token counts as knots, or those of these indices."""
    at = np.arange(len(table.tokens)) if knots is None else knots
    return MoeSurface(
        table.shapes,
        table.tokens[at],
        table.log_ratio(rates)[:, at],
    )


def choose_tokens(table: MoeTable, rates: Rates) -> npt.NDArray[np.intp]:
    """Indices of the token counts to keep (:func:`choose_knots`)."""
    ratio = table.log_ratio(rates)
    return choose_knots(
        lambda kept: between_knots(ratio, table.tokens, kept) - ratio, len(table.tokens)
    )


def between_knots(ratio: Array, tokens: Array, knots: npt.ArrayLike) -> Array:
    """Every token count's logarithm, linear between these knots."""
    at, where = np.asarray(knots), np.log(tokens)
    return np.stack([np.interp(where, where[at], row[at]) for row in ratio])


def groups(shapes: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.bool_], bool]]:
    """The rows of each model's shapes (hidden, inter, experts), however divided; and whether
    another model chooses as many experts a token."""
    models, which = np.unique(
        shapes[:, [0, 1, 3]],
        axis=0,
        return_inverse=True,
    )
    which = which.reshape(-1)
    for number in range(len(models)):
        mine = which == number
        yield mine, bool(np.isin(shapes[mine, 2], shapes[~mine, 2]).all())
