"""The 90 % band of a predicted op time, from the residuals of points that no fit saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.physics.hold_out import Bools, Folds, Rows
from simulator.confidence.held_out import FOLDS, Fit, OpTable, between, beyond, residuals
from simulator.confidence.region import MeasuredRegion
from simulator.loop.records import Floats

LEVEL = 0.9
FEWEST = 8
"""Residuals needed for a width; with fewer, the next wider kind is used."""

TINY = 1e-9
UNKNOWN = 0.25
"""Half-width (log) assumed where a table has too few points for any hold-out."""


@dataclass(frozen=True)
class Band:
    """Half-widths on the logarithm of an op's time.

    ``inside`` holds in the measured region, ``edges`` at tile edges that were not measured, and
    ``beyond``, per octave, outside of the region (for at least one octave, on top of ``inside``).

    Over one size the first two are multiples of the local roughness: the distance of the
    surrounding points from the line through their neighbours, plus ``floor``. So a band is narrow
    where times are smooth, or the grid is dense.
    """

    inside: float
    edges: float
    beyond: float
    floor: float

    def half_widths(self, table: OpTable, points: Floats) -> Floats:
        """Of predictions at ``points`` by a fit to ``table``."""
        region = MeasuredRegion(table.points)
        octaves = np.log2(region.times_beyond(points))
        measured = np.isin(points[:, 0], table.points[:, 0])
        edge = table.at_edge(points) & ~measured
        width = np.where(edge, self.edges, self.inside) * _roughness(table, points, self.floor)
        further = self.beyond * np.maximum(octaves, 1.0)
        return np.asarray(np.where(region.outside(points), np.hypot(width, further), width))


def _roughness(table: OpTable, points: Floats, floor: float) -> Floats:
    """The local roughness, the unit of half-widths inside; 1 over two sizes."""
    if points.shape[1] > 1:
        return np.ones(len(points))
    size, time = table.points[:, 0], table.time_s
    if len(size) < 3:
        return np.full(len(points), UNKNOWN)
    share = (size[1:-1] - size[:-2]) / (size[2:] - size[:-2])
    through = time[:-2] + share * (time[2:] - time[:-2])
    off = np.pad(np.abs(np.log(time[1:-1] / through)), 1, mode="edge")
    above = np.clip(np.searchsorted(size, points[:, 0]), 1, len(size) - 1)
    return np.asarray(np.minimum(off[above], off[above - 1]) + floor)


def fit_band(table: OpTable) -> Band:
    """The band of one op of a bundle, from grouped hold-outs of its own points."""
    folds = between(table)
    errors, rows = residuals(table, folds, table.fit)
    flat = table.points.shape[1] > 1
    floor = 0.0 if flat or not len(errors) else max(float(np.median(np.abs(errors))), TINY)
    rough = [_roughness(table.only(fit), table.points[rows], floor) for fit, rows in folds]
    scaled = np.abs(errors) / np.concatenate([np.empty(0), *rough])
    edge = table.at_edge(table.points[rows])
    inside = covering_width(scaled[~edge], UNKNOWN if flat else 1.0)
    outside = beyond(table, share=2)
    misses, far = residuals(table, outside, table.far)
    for fitted, _ in outside:
        octaves = np.log2(MeasuredRegion(table.points[fitted]).times_beyond(table.points[far]))
        misses = misses / np.maximum(octaves, 1.0)
    return Band(
        inside=inside,
        edges=max(inside, covering_width(scaled[edge], inside)),
        beyond=covering_width(np.abs(misses), UNKNOWN),
        floor=floor,
    )


def scored(table: OpTable, folds: Folds, fit: Fit) -> tuple[Floats, Bools, Rows]:
    """Of all scored rows: log errors, whether the band covers them, and their indices.

    The band as well is that of a fold's fitted rows alone.
    """
    off, rows = residuals(table, folds, fit)
    widths = [np.empty(0)]
    for fitted, out in folds:
        part = table.only(fitted)
        widths.append(fit_band(part).half_widths(part, table.points[out]))
    return off, np.abs(off) <= np.concatenate(widths) + 1e-12, rows


def coverage(table: OpTable) -> tuple[int, float]:
    """The number of points that tested the band, and the share that it covered.

    The points inside, a fifth at a time (over two sizes: two fifths, which takes seconds enough):
    neither the fit nor the residuals that gave the width saw them.
    """
    folds = between(table)[: FOLDS if table.points.shape[1] == 1 else 2]
    _, covered, _ = scored(table, folds, table.fit)
    return len(covered), float(covered.mean()) if len(covered) else float("nan")


def covering_width(misses: Floats, default: float) -> float:
    """The smallest width that covers :data:`LEVEL`, of a finite sample (split conformal)."""
    if len(misses) < FEWEST:
        return default
    rank = min(int(np.ceil(LEVEL * (len(misses) + 1))), len(misses))
    return float(np.sort(misses)[rank - 1])
