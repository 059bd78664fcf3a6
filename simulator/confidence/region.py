"""The region that a bundle measured, and the distance of other sizes from it."""

from __future__ import annotations

import numpy as np

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.surface import coordinates

SLACK = 1e-9


class MeasuredRegion:
    """The region that measured points span.

    Over one size this is the range. Over two it is the convex hull in the regression's coordinates
    (:func:`~sarathi_sim.simulator.op_times.surface.coordinates`), outside of which the regression
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
        """The largest ratio to the measured points: in a size, in the sum or product of both.

        It is 1 for sizes that are no larger, also if they are below or beside the points.
        """
        over = (_extents(wanted) / np.maximum(self._largest, 1)).max(axis=1)
        return np.asarray(np.where(self.outside(wanted), np.maximum(over, 1.0), 1.0))


def _sides(points: Floats) -> Floats | None:
    """Outward unit normal and offset of each side of the points' convex hull, shape (sides, 3).

    None if all are on one line: the box has to do. This is Andrew's monotone chain: scipy's hull is
    the same, but takes a quarter of a second to import.
    """
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
