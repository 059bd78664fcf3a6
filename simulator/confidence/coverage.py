"""The batches of a run outside the region that its bundle measured, and the points to profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.facts.ops import op_of
from sarathi_sim.simulator.confidence.held_out import OpTable
from sarathi_sim.simulator.confidence.region import MeasuredRegion
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.breakdown import OpUse, distinct_sizes

FEW = 3
"""Points that are proposed for an op."""


@dataclass(frozen=True)
class Outside:
    """One op's sizes outside the measured region.

    ``iterations`` is their share of the iterations that use the op, ``time`` that of the op's
    time, ``beyond`` the largest ratio to the measured sizes (1: beside or below them), ``profile``
    the points that would bring most of them inside, as keys of the op's table.
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
    """Where most of the time outside is, by octave: each octave's far end.

    That is its largest size, or its smallest where it lies below all that was measured.
    """
    octave = np.floor(np.log2(np.maximum(points, 1)))
    cells, which = np.unique(octave, axis=0, return_inverse=True)
    which = which.ravel()
    ends = []
    for cell in range(len(cells)):
        least, most = points[which == cell].min(axis=0), points[which == cell].max(axis=0)
        ends.append(np.where(least < low, least, most))
    best = np.argsort(-np.bincount(which, weight), kind="stable")[:FEW]
    return tuple(tuple(int(v) for v in ends[cell]) for cell in best)
