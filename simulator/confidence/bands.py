"""The 90 % band of a predicted op time, from the residuals of held-out points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.physics.fit import Bools, Folds, Rows
from ..loop.records import Floats
from ..op_times.regression import coordinates
from .coverage import MeasuredRegion
from .held_out import (
    FOLDS,
    Fit,
    OpTable,
    between,
    beyond,
    residuals,
)

LEVEL = 0.9
FEWEST = 8
"""Residuals needed for a half-width; with fewer, the next wider kind of residual is used."""

NEAR = 0.1
"""Distance in octaves within which times of an op over two sizes differ by noise alone."""
AT_ONCE = 1000
TINY = 1e-9
UNKNOWN = 0.25
"""Half-width (log) assumed where a table has too few points for any hold-out."""


@dataclass(frozen=True)
class Band:
    """Half-widths on the logarithm of an op's time.

    ``inside`` holds in the measured region, ``edges`` at unmeasured tile edges, both in units of
    :func:`_unit`; ``beyond`` holds outside of the region, for each octave (at least one). So a band
    is narrow where times are smooth, the grid is dense, or a measured point is near.
    """

    inside: float
    edges: float
    beyond: float
    floor: float

    def half_widths(self, table: OpTable, points: Floats) -> Floats:
        """Half-widths of predictions at ``points`` by a fit to ``table``."""
        region = MeasuredRegion(table.points)
        octaves = np.log2(region.times_beyond(points))
        measured = np.isin(points[:, 0], table.points[:, 0])
        edge = table.at_edge(points) & ~measured
        width = np.where(edge, self.edges, self.inside) * _unit(table, points, self.floor)
        further = self.beyond * np.maximum(octaves, 1.0)
        return np.asarray(np.where(region.outside(points), further, width))


def _unit(table: OpTable, points: Floats, floor: float) -> Floats:
    """The unit of half-widths inside the measured region.

    Over one size: the local roughness (distance of the surrounding points from the line through
    their neighbours; at most the difference of their times) in the middle of a gap, less towards
    its ends, as for a parabola or a step anywhere in the gap; plus ``floor``. Over two sizes: the
    root of the distance to the nearest measured point, as for a random walk.
    """
    if points.shape[1] > 1:
        return np.sqrt(np.maximum(_octaves_away(table.points, points), NEAR))
    size, time = table.points[:, 0], table.time_s
    if len(size) < 3:
        return np.full(len(points), UNKNOWN)
    share = (size[1:-1] - size[:-2]) / (size[2:] - size[:-2])
    through = time[:-2] + share * (time[2:] - time[:-2])
    off = np.pad(
        np.abs(np.log(time[1:-1] / through)),
        1,
        mode="edge",
    )
    above = np.clip(
        np.searchsorted(size, points[:, 0]),
        1,
        len(size) - 1,
    )
    at = np.clip(
        (points[:, 0] - size[above - 1]) / (size[above] - size[above - 1]),
        0,
        1,
    )
    step = table.at_edge(points) & (at > 0) & (at < 1)
    within = np.where(step, 1.0, 4 * at * (1 - at))
    rough = np.minimum(off[above], off[above - 1])
    rough = np.minimum(rough, np.abs(np.log(time[above] / time[above - 1])))
    return np.asarray(within * rough + floor)


def _octaves_away(measured: Floats, points: Floats) -> Floats:
    """The distance of points over two sizes to the nearest measured one, in octaves."""
    wanted, known = coordinates(*points.T), coordinates(*measured.T)
    found = np.empty(len(points))
    for first in range(0, len(points), AT_ONCE):
        some = wanted[first : first + AT_ONCE]
        nearest = ((known**2).sum(axis=1) - 2 * some @ known.T).min(axis=1)
        found[first : first + AT_ONCE] = nearest + (some**2).sum(axis=1)
    return np.asarray(np.sqrt(np.maximum(found, 0)))


def _left_out(table: OpTable) -> tuple[Folds, Floats]:
    """Points to leave out in turn, and each point's weight. Over one size: every fifth point, so
    that no two neighbours are left out together, weighted by the octaves around it, because a
    profile is dense where times are rough, and its uses are not."""
    count = len(table.points)
    if table.points.shape[1] > 1 or count < 3:
        return between(table), np.ones(count)
    inner = np.arange(1, count - 1)
    octaves = np.log2(np.maximum(table.points[:, 0], 1))
    return (
        [
            (np.delete(np.arange(count), out), out)
            for i in range(FOLDS)
            if len(out := inner[i::FOLDS])
        ],
        np.concatenate([[0], (octaves[2:] - octaves[:-2]) / 2, [0]]),
    )


def fit_band(table: OpTable) -> Band:
    """The band of one op of a bundle, from grouped hold-outs of its own points."""
    folds, counts = _left_out(table)
    errors, rows = residuals(table, folds, table.fit)
    weight = counts[rows]
    flat = table.points.shape[1] > 1
    floor = 0.0 if flat or not len(errors) else max(_quantile(np.abs(errors), weight, 0.5), TINY)
    units = [_unit(table.only(fit), table.points[rows], floor) for fit, rows in folds]
    scaled = np.abs(errors) / np.concatenate([np.empty(0), *units])
    edge = table.at_edge(table.points[rows])
    inside = covering_width(scaled[~edge], UNKNOWN if flat else 1.0, weight[~edge])
    outside = beyond(table, share=2)
    misses, far = residuals(table, outside, table.far)
    for fitted, _ in outside:
        octaves = np.log2(MeasuredRegion(table.points[fitted]).times_beyond(table.points[far]))
        misses = misses / np.maximum(octaves, 1.0)
    return Band(
        inside=inside,
        edges=max(inside, covering_width(scaled[edge], inside, weight[edge])),
        beyond=covering_width(np.abs(misses), UNKNOWN),
        floor=floor,
    )


def scored(table: OpTable, folds: Folds, fit: Fit) -> tuple[Floats, Bools, Rows]:
    """Log errors of all scored rows, whether the band covers them, and the rows' indices. The band,
    too, is fitted to a fold's fitted rows alone."""
    off, rows = residuals(table, folds, fit)
    widths = [np.empty(0)]
    for fitted, out in folds:
        part = table.only(fitted)
        widths.append(fit_band(part).half_widths(part, table.points[out]))
    return off, np.abs(off) <= np.concatenate(widths) + 1e-12, rows


def coverage(table: OpTable) -> tuple[int, float]:
    """The number of points that tested the band, and the weighted share that it covered
    (:func:`_left_out`).

    Points inside the region are held out, a fifth at a time (over two sizes two fifths only, which
    already takes seconds), from the fit and from the residuals that set the half-width.
    """
    folds, counts = _left_out(table)
    folds = folds if table.points.shape[1] == 1 else folds[:2]
    _, covered, rows = scored(table, folds, table.fit)
    share = np.average(covered, weights=counts[rows]) if len(rows) else np.nan
    return len(rows), float(share)


def covering_width(misses: Floats, default: float, weight: Floats | None = None) -> float:
    """The smallest half-width that covers :data:`LEVEL` of future residuals, by split conformal
    prediction from a finite, possibly weighted sample of ``misses``."""
    if len(misses) < FEWEST:
        return default
    counts = np.ones(len(misses)) if weight is None else weight
    own = (counts**2).sum() / counts.sum() ** 2  # expected weight of one more residual
    return _quantile(misses, counts, LEVEL * (1 + own))


def _quantile(values: Floats, weight: Floats, share: float) -> float:
    """The smallest value with ``share`` of the weight up to it; the largest if there is none."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    at = np.searchsorted(reached, share * reached[-1] - 1e-9 * reached[-1])
    return float(values[order][min(int(at), len(values) - 1)])
