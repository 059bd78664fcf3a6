"""The 90 % band of a predicted op time, from the residuals of points that no fit saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.held_out import FOLDS, OpTable, between, beyond, residuals
from simulator.hull import Hull
from simulator.records import Floats

LEVEL = 0.9
FEWEST = 8
"""Residuals from which a width is taken; with fewer, the next wider kind stands in."""

UNKNOWN = 0.25
"""Half-width (log) assumed where a table has too few points for any hold-out."""


@dataclass(frozen=True)
class Band:
    """Half-widths on the logarithm of an op's time.

    ``inside`` the measured region; at ``edges`` of tiles that were not measured themselves; and,
    per octave, ``beyond`` the region (at least one octave's worth; it adds to the one inside).
    """

    inside: float
    edges: float
    beyond: float

    def half_widths(self, table: OpTable, points: Floats) -> Floats:
        """Of predictions at ``points`` by a fit to ``table``."""
        hull = Hull(table.points)
        octaves = np.log2(hull.times_beyond(points))
        measured = np.isin(points[:, 0], table.points[:, 0])
        edge = table.at_edge(points) & ~measured
        width = np.where(edge, self.edges, self.inside)
        further = self.beyond * np.maximum(octaves, 1.0)
        return np.asarray(np.where(hull.outside(points), np.hypot(width, further), width))


def fit_band(table: OpTable) -> Band:
    """The band of one op of a bundle, from grouped hold-outs of its own points."""
    errors, rows = residuals(table, between(table), table.fit)
    edge = table.at_edge(table.points[rows])
    inside = _width(np.abs(errors[~edge]), UNKNOWN)
    outside = beyond(table)
    misses, far = residuals(table, outside, table.far)
    for fitted, _ in outside:
        octaves = np.log2(Hull(table.points[fitted]).times_beyond(table.points[far]))
        misses = misses / np.maximum(octaves, 1.0)
    return Band(
        inside=inside,
        edges=max(inside, _width(np.abs(errors[edge]), inside)),
        beyond=_width(np.abs(misses), max(UNKNOWN, inside)),
    )


def coverage(table: OpTable) -> tuple[int, float]:
    """How many points the band was tried on, and the share of them it covered.

    The points inside, a fifth at a time: neither the fit nor the residuals that gave the width saw
    them.
    """
    covered = np.empty(0, bool)
    for fitted, scored in between(table)[:FOLDS]:
        part = table.only(fitted)
        band = fit_band(part)
        predicted = part.fit(part.points, part.time_s)(table.points[scored])
        off = np.abs(np.log(predicted / table.time_s[scored]))
        widths = band.half_widths(part, table.points[scored])
        covered = np.concatenate([covered, off <= widths + 1e-12])
    return len(covered), float(covered.mean()) if len(covered) else float("nan")


def _width(misses: Floats, default: float) -> float:
    """The smallest width that covers :data:`LEVEL`, of a finite sample (split conformal)."""
    if len(misses) < FEWEST:
        return default
    rank = min(int(np.ceil(LEVEL * (len(misses) + 1))), len(misses))
    return float(np.sort(misses)[rank - 1])
