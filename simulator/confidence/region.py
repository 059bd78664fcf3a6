"""The region that a bundle measured, and the distance of other sizes from it."""

from __future__ import annotations

import numpy as np

from simulator.loop.records import Floats
from simulator.op_times.surface import coordinates

SLACK = 1e-9


class MeasuredRegion:
    """The region that measured points span.

    Over one size this is the range. Over two it is the convex hull in the regression's coordinates
    (:func:`~simulator.op_times.surface.coordinates`), outside of which the regression extrapolates.
    """

    def __init__(self, points: Floats) -> None:
        """``points`` has shape (n, 1 or 2)."""
        self._largest = _extents(points).max(axis=0)
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._planes: Floats | None = None
        if points.shape[1] == 2:
            from scipy.spatial import ConvexHull, QhullError

            try:
                self._planes = ConvexHull(coordinates(*points.T)).equations
            except QhullError:  # all on one line: the box has to do
                self._planes = None

    def outside(self, wanted: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each of ``wanted``, shape (n, 1 or 2), lies outside."""
        beyond = ((wanted < self._low) | (wanted > self._high)).any(axis=1)
        if self._planes is not None:
            away = coordinates(*wanted.T) @ self._planes[:, :2].T + self._planes[:, 2]
            beyond |= (away > SLACK).any(axis=1)
        return np.asarray(beyond)

    def times_beyond(self, wanted: Floats) -> Floats:
        """The largest ratio to the measured points: in a size, in the sum or product of both.

        It is 1 for sizes that are no larger, also if they are below or beside the points.
        """
        over = (_extents(wanted) / np.maximum(self._largest, 1)).max(axis=1)
        return np.asarray(np.where(self.outside(wanted), np.maximum(over, 1.0), 1.0))


def _extents(points: Floats) -> Floats:
    if points.shape[1] == 1:
        return points
    a, b = points.T
    return np.stack([a, b, a + b, a * np.maximum(b, 1)], axis=1)
