"""The region that a bundle measured, a run's batches outside of it, and the points to profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.facts.ops import op_of
from ..loop.records import Floats
from ..op_times.regression import coordinates
from ..views.explain import OpUse, distinct_sizes
from .held_out import OpTable

SLACK = 1e-9


class MeasuredRegion:
    """The region that measured points span.

    Over one size this is the range. Over two it is the convex hull in the regression's coordinates
    (:func:`~sarathi_sim.simulator.op_times.regression.coordinates`): outside of it the regression
    extrapolates.
    """

    def __init__(self, points: Floats) -> None:
        """``points`` has shape (n, 1 or 2)."""
        self._largest = _extents(points).max(axis=0)
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._sides = _sides(coordinates(*points.T)) if points.shape[1] == 2 else None

    def outside(self, wanted: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each of ``wanted``, shape (n, 1 or 2), lies outside."""
        beyond = ((wanted < self._low) | (wanted > self._high)).any(axis=1)
        if self._sides is not None:
            away = coordinates(*wanted.T) @ self._sides[:, :2].T + self._sides[:, 2]
            beyond |= (away > SLACK).any(axis=1)
        return np.asarray(beyond)

    def times_beyond(self, wanted: Floats) -> Floats:
        """The largest ratio to the measured points: in a size, in the sum or product of both. It is
        1 if no size is larger, also for sizes below or beside the points."""
        over = (_extents(wanted) / np.maximum(self._largest, 1)).max(axis=1)
        return np.asarray(
            np.where(
                self.outside(wanted),
                np.maximum(over, 1.0),
                1.0,
            )
        )


def _sides(points: Floats) -> Floats | None:
    """Outward unit normal and offset of each side of the points' convex hull, shape (sides, 3).
    None if all points are on one line: then their bounding box counts. This is Andrew's monotone
    chain; scipy's hull gives the same, but takes a quarter of a second to import."""
    if np.linalg.matrix_rank(points - points[0]) < 2:
        return None
    ordered = np.unique(points, axis=0).tolist()
    corners = np.array(_lower_hull(ordered) + _lower_hull(ordered[::-1]))
    along = np.roll(corners, -1, axis=0) - corners
    normal = np.stack([along[:, 1], -along[:, 0]], axis=1) / np.hypot(*along.T)[:, None]
    return np.column_stack([normal, -(normal * corners).sum(axis=1)])


def _lower_hull(points: list[list[float]]) -> list[list[float]]:
    """The corners below sorted points, counter-clockwise and without the last."""
    found: list[list[float]] = []
    for x, y in points:
        while len(found) > 1:
            (x0, y0), (x1, y1) = found[-2:]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            found.pop()
        found.append([x, y])
    return found[:-1]


def _extents(points: Floats) -> Floats:
    if points.shape[1] == 1:
        return points
    a, b = points.T
    return np.stack([a, b, a + b, a * np.maximum(b, 1)], axis=1)


FEW = 3
"""The most points proposed for an op."""


@dataclass(frozen=True)
class Outside:
    """One op's sizes outside the measured region.

    ``iterations`` is their share of the iterations that use the op, ``time`` their share of the
    op's time, ``beyond`` the largest ratio to the measured sizes (1: beside or below them),
    ``profile`` the points to measure to bring most of them inside, as keys of the op's table.
    """

    op: str
    iterations: float
    time: float
    beyond: float
    profile: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        far = f", up to {self.beyond:.1f} times" if self.beyond > 1.05 else ""
        where = "beyond" if self.beyond > 1.05 else "beside or below"
        names = [size.name for size in op_of(self.op).sizes]
        points = "; ".join(
            " with ".join(f"{name} {value}" for name, value in zip(names, point, strict=True))
            for point in self.profile
        )
        return (
            f"{self.op}: {100 * self.iterations:.3g} % of its iterations ({100 * self.time:.3g} % "
            f"of its time) are {where} the measured region{far}; to profile next: {points}"
        )


def queries_outside(uses: list[dict[str, OpUse]], tables: dict[str, OpTable]) -> list[Outside]:
    """The ops with sizes outside, by their share of the time. ``uses`` are the replicas'."""
    found = []
    for op in uses[0]:
        used = [use[op].time_s > 0 for use in uses]
        if op not in tables or not any(rows.any() for rows in used):
            continue
        sizes = np.concatenate([use[op].size[rows] for use, rows in zip(uses, used, strict=True)])
        region = MeasuredRegion(tables[op].points)
        ends = np.round([sizes.min(axis=0), sizes.max(axis=0)])
        if sizes.shape[1] == 1 and not region.outside(ends).any():
            continue
        time = np.concatenate([use[op].time_s[rows] for use, rows in zip(uses, used, strict=True)])
        distinct, which = distinct_sizes(sizes)
        outside = region.outside(distinct)
        if not outside.any():
            continue
        counts = np.bincount(which)
        seconds = np.asarray(np.bincount(which, time), np.float64)
        low = tables[op].points.min(axis=0)
        found.append(
            Outside(
                op=op,
                iterations=float(counts[outside].sum() / counts.sum()),
                time=float(seconds[outside].sum() / seconds.sum()),
                beyond=float(region.times_beyond(distinct[outside]).max()),
                profile=_proposed(distinct[outside], seconds[outside], low),
            )
        )
    return sorted(found, key=lambda outside: -outside.time)


def _proposed(points: Floats, weight: Floats, low: Floats) -> tuple[tuple[int, ...], ...]:
    """Points to profile: the far ends of the octaves with most of the time outside. The far end is
    the largest size, or the smallest in octaves below the measured sizes."""
    octave = np.floor(np.log2(np.maximum(points, 1)))
    cells, which = np.unique(octave, axis=0, return_inverse=True)
    which = which.ravel()
    ends = []
    for cell in range(len(cells)):
        least, most = points[which == cell].min(axis=0), points[which == cell].max(axis=0)
        ends.append(np.where(least < low, least, most))
    best = np.argsort(-np.bincount(which, weight), kind="stable")[:FEW]
    return tuple(tuple(int(v) for v in ends[cell]) for cell in best)
