"""The next point to measure: where the fit through the points so far may have its largest error.

Every point beyond the coarse ones is predicted from its neighbours before it is measured. So its
error is a held-out one, and decides when to stop. No torch.
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
    """The next point of a grid; ``score`` is its expected worth, for comparison with other ops."""

    key: Key
    score: float


class Grid(Protocol):
    """Points of one op, and the next one to measure."""

    #: Held-out errors of the points added, as fractions of their times, noise taken off.
    held_out: list[float]
    #: The relative spread of each of these points.
    noise: list[float]

    def propose(self) -> Proposal | None:
        """The next point, or None where the target is met everywhere."""

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point; ``noise`` is its relative spread, which is not an error of the
        fit."""

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again (it does not fit in memory, say)."""


class SizeGrid:
    """Times over one size, piecewise linear between the points.

    The next point halves the interval with the largest relative step between its ends, times the
    root of its length: bisection finds a step, and wide intervals are visited, too. An interval is
    finished if its ends are within ``target`` of each other, or if its last :data:`LOOKS` points
    were on the line (a single one may be so by accident, between a step up and a step down).

    ``coarse`` are the points to start from, ``target`` the held-out error (a fraction) to reach,
    ``resolution`` the finest interval to halve, as a fraction of the size (0: single tokens).
    """

    LOOKS = 2

    def __init__(self, coarse: Mapping[Key, float], target: float, resolution: float = 0.0) -> None:
        self.held_out: list[float] = []
        self.noise: list[float] = []
        self._target = target
        self._resolution = resolution
        self._time = {key[0]: time for key, time in coarse.items()}
        self._skipped: set[int] = set()
        self._good_looks: dict[tuple[int, int], int] = {}  # of an interval, one after the other

    def propose(self) -> Proposal | None:
        """The middle of the interval most likely to hide a step, or None."""
        sizes = sorted(self._time)
        best: Proposal | None = None
        for low, high in pairwise(sizes):
            middle = (low + high) // 2
            step = abs(self._time[high] / self._time[low] - 1)
            too_fine = high - low <= max(1.0, self._resolution * low)
            content = step <= self._target or self._good_looks.get((low, high), 0) >= self.LOOKS
            if too_fine or content or middle in self._skipped:
                continue
            score = step * float(np.sqrt((high - low) / sizes[-1]))
            if best is None or score > best.score:
                best = Proposal((middle,), score)
        return best

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point, which lies between two earlier ones."""
        size = key[0]
        sizes = sorted(self._time)
        index = int(np.searchsorted(sizes, size))
        low, high = sizes[index - 1], sizes[index]
        guess = _between(size, low, high, self._time[low], self._time[high])
        error = max(0.0, abs(guess - time) / time - noise)
        self.held_out.append(error)
        self.noise.append(noise)
        self._time[size] = time
        looks = self._good_looks.get((low, high), 0) + 1 if error <= self._target else 0
        self._good_looks[low, size] = self._good_looks[size, high] = looks

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again."""
        self._skipped.add(key[0])


def _between(x: float, low: float, high: float, at_low: float, at_high: float) -> float:
    return at_low + (at_high - at_low) * (x - low) / (high - low)


class Surface:
    """Times over two sizes: physical terms, times a ratio that is linear in each triangle.

    A triangle has the error of the point measured in it last (a coarse one: half the range of the
    ratio at its corners, and never less than would get it one look); the next point goes where
    error times area (in octaves) is largest. ``terms(a, b)`` gives the physical terms, shape
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
        self.noise: list[float] = []
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
        self._points = np.array([self._coordinates(key) for key in self._keys])
        try:
            self._mesh = Delaunay(self._points)
        except (QhullError, ValueError):  # too few points, or all on one line
            self._mesh = None

    def _of(self, keys: list[Key]) -> Floats:
        sizes = np.asarray(keys, dtype=np.float64)
        return self._terms(sizes[:, 0], sizes[:, 1])

    def _coordinates(self, key: Key) -> tuple[float, float]:
        return float(np.log2(key[0])), float(np.log2(key[1] + self.SHIFT))

    def propose(self) -> Proposal | None:
        """The centre of the triangle with the largest error times area, or None."""
        if self._mesh is None:
            return None
        best: Proposal | None = None
        for corners in self._mesh.simplices:
            coordinates = self._points[corners]
            error = self._triangle_error(corners)
            edges = coordinates[1:] - coordinates[0]
            area = abs(float(edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0])) / 2
            centre = 2.0 ** coordinates.mean(axis=0)
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
        coordinates = np.array([self._coordinates(key)])
        triangle = -1 if self._mesh is None else int(self._mesh.find_simplex(coordinates)[0])
        if self._mesh is None or triangle < 0:
            nearest = int(np.argmin(((self._points - coordinates) ** 2).sum(axis=1)))
            return physical * float(self._ratio[nearest])
        affine = self._mesh.transform[triangle]
        share = affine[:2] @ (coordinates[0] - affine[2])
        weights = np.append(share, 1 - share.sum())
        return physical * float(weights @ self._ratio[self._mesh.simplices[triangle]])

    def add(self, key: Key, time: float, noise: float = 0.0) -> None:
        """Book a measured point."""
        error = max(0.0, abs(self._guess(key) - time) / time - noise)
        self.held_out.append(error)
        self.noise.append(noise)
        self._keys.append(key)
        self._times.append(time)
        self._error.append(error)
        self._skipped.add(key)
        self._refit()

    def skip(self, key: Key) -> None:
        """Never propose ``key`` again."""
        self._skipped.add(key)
