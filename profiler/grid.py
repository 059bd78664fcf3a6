"""Where to measure next: where a fit through the points so far was furthest off.

Every point beyond the coarse ones is predicted from its neighbours before it is measured, so its
error is a held-out one. An interval (over two sizes: a triangle) has the error of the point that
was measured in it last; a coarse one, in which nothing was measured yet, the leave-one-out error
of its ends, and never less than would get it one look: both ends are blind to a step between them.
The next point goes where error times size (in octaves) is largest. torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

Key = tuple[int, ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Proposal:
    """The next point of a grid; ``score`` is its expected worth, error times octaves."""

    key: Key
    score: float


class Grid(Protocol):
    """Points of one op, and the next one to measure."""

    #: Held-out errors of the points added, as fractions of their times, noise taken off.
    held_out: list[float]

    def propose(self) -> Proposal | None:
        """The next point, or None where the target is met everywhere."""

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point; ``noise`` is its relative spread, which is no error of the fit."""

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again (it does not fit in memory, say)."""


class Line:
    """Times over one size, piecewise linear between the points.

    ``coarse`` are the points to start from, ``target`` the held-out error (a fraction) to reach,
    ``resolution`` the finest interval to look into, as a fraction of the size (0: single tokens).
    """

    def __init__(self, coarse: Mapping[Key, float], target: float, resolution: float = 0.0) -> None:
        self.held_out: list[float] = []
        self._target = target
        self._resolution = resolution
        self._time = {key[0]: time for key, time in coarse.items()}
        self._order: dict[int, int] = dict.fromkeys(self._time, 0)
        self._skipped: set[int] = set()
        self._error = self._leave_one_out()

    def _leave_one_out(self) -> dict[int, float]:
        sizes = sorted(self._time)
        errors = {}
        for low, middle, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
            guess = _between(middle, low, high, self._time[low], self._time[high])
            errors[middle] = abs(guess - self._time[middle]) / self._time[middle]
        return errors

    def _interval_error(self, low: int, high: int) -> float:
        newest = max(low, high, key=lambda size: self._order[size])
        if self._order[newest]:
            return self._error[newest]
        coarse = max(self._error.get(low, 0.0), self._error.get(high, 0.0))
        return max(coarse, self._target * 1.01)

    def propose(self) -> Proposal | None:
        """The middle of the interval with the largest error times octaves, or None."""
        sizes = sorted(self._time)
        best: Proposal | None = None
        for low, high in pairwise(sizes):
            middle = (low + high) // 2
            error = self._interval_error(low, high)
            too_fine = high - low <= max(1.0, self._resolution * low)
            if too_fine or middle in self._skipped or error <= self._target:
                continue
            score = error * float(np.log2(high / low))
            if best is None or score > best.score:
                best = Proposal((middle,), score)
        return best

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point, which lies between two earlier ones."""
        size = key[0]
        sizes = sorted(self._time)
        place = int(np.searchsorted(sizes, size))
        low, high = sizes[place - 1], sizes[place]
        guess = _between(size, low, high, self._time[low], self._time[high])
        error = max(0.0, abs(guess - time) / time - noise)
        self.held_out.append(error)
        self._time[size] = time
        self._error[size] = error
        self._order[size] = len(self.held_out)

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again."""
        self._skipped.add(key[0])


def _between(x: float, low: float, high: float, at_low: float, at_high: float) -> float:
    return at_low + (at_high - at_low) * (x - low) / (high - low)


class Surface:
    """Times over two sizes: physical terms, times a ratio that is linear in each triangle.

    This is how the simulator reads attention times. ``terms(a, b)`` gives the physical terms, shape
    (points, terms); ``allowed(key)`` says which points exist. Sizes enter as logarithms, the second
    one shifted by 32 so that 0 is a size like others.
    """

    SHIFT = 32

    def __init__(
        self,
        coarse: Mapping[Key, float],
        target: float,
        terms: Callable[[Floats, Floats], Floats],
        allowed: Callable[[Key], bool],
    ) -> None:
        self.held_out: list[float] = []
        self._target = target
        self._terms = terms
        self._allowed = allowed
        self._keys = list(coarse)
        self._times = list(coarse.values())
        self._skipped: set[Key] = set(coarse)
        self._error: list[float | None] = [None] * len(self._keys)
        self._refit()

    def _refit(self) -> None:
        from scipy.optimize import nnls
        from scipy.spatial import Delaunay, QhullError

        times = np.asarray(self._times)
        terms = self._of(self._keys)
        scaled = terms / times[:, None]
        unit = scaled.max(axis=0)
        self._coefficients = nnls(scaled / unit, np.ones(len(times)))[0] / unit
        self._ratio = times / (terms @ self._coefficients)
        self._places = np.array([self._place(key) for key in self._keys])
        try:
            self._mesh = Delaunay(self._places)
        except (QhullError, ValueError):  # too few points, or all on one line
            self._mesh = None

    def _of(self, keys: list[Key]) -> Floats:
        sizes = np.asarray(keys, dtype=np.float64)
        return self._terms(sizes[:, 0], sizes[:, 1])

    def _place(self, key: Key) -> tuple[float, float]:
        return float(np.log2(key[0])), float(np.log2(key[1] + self.SHIFT))

    def propose(self) -> Proposal | None:
        """The centre of the triangle with the largest error times area, or None."""
        if self._mesh is None:
            return None
        best: Proposal | None = None
        for corners in self._mesh.simplices:
            place = self._places[corners]
            error = self._triangle_error(corners)
            edges = place[1:] - place[0]
            area = abs(float(edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0])) / 2
            centre = 2.0 ** place.mean(axis=0)
            key = (round(float(centre[0])), max(0, round(float(centre[1])) - self.SHIFT))
            known = key in self._skipped or not self._allowed(key)
            if not known and error > self._target and (best is None or error * area > best.score):
                best = Proposal(key, error * area)
        return best

    def _triangle_error(self, corners: npt.NDArray[np.int32]) -> float:
        newest = int(corners.max())
        error = self._error[newest]
        if error is not None:
            return error
        # Nothing measured inside yet: how much the ratio varies over the corners.
        ratio = self._ratio[corners]
        return max(float(ratio.max() - ratio.min()) / 2, self._target * 1.01)

    def _guess(self, key: Key) -> float:
        physical = float((self._of([key]) @ self._coefficients)[0])
        place = np.array([self._place(key)])
        triangle = -1 if self._mesh is None else int(self._mesh.find_simplex(place)[0])
        if self._mesh is None or triangle < 0:
            nearest = int(np.argmin(((self._places - place) ** 2).sum(axis=1)))
            return physical * float(self._ratio[nearest])
        affine = self._mesh.transform[triangle]
        share = affine[:2] @ (place[0] - affine[2])
        weights = np.append(share, 1 - share.sum())
        return physical * float(weights @ self._ratio[self._mesh.simplices[triangle]])

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point."""
        error = max(0.0, abs(self._guess(key) - time) / time - noise)
        self.held_out.append(error)
        self._keys.append(key)
        self._times.append(time)
        self._error.append(error)
        self._skipped.add(key)
        self._refit()

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again."""
        self._skipped.add(key)
