"""One fitted table of a stack's kernels, and the record of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels.attention_grid import HeadGrid
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.left_out import Errors, summary
from sarathi_sim.profiler.kernels.moe_surface import MoeSurface
from sarathi_sim.profiler.kernels.reduce_curves import ReduceCurve
from sarathi_sim.profiler.kernels.stack_file import KernelFit

Surface = GemmLattice | HeadGrid | ReduceCurve | MoeSurface


@dataclass(frozen=True, eq=False)
class Fitted:
    """One table's surface, and the record of it."""

    table: str
    surface: Surface
    fit: KernelFit


def record(
    version: str,
    rows: int,
    time: Array,
    clean: Array,
    numbers: int,
    kinds: dict[str, Iterator[Errors]],
) -> KernelFit:
    """The record of a fit: its rows, what cleaning did to their times, and its errors.

    ``kinds`` are the errors by what was left out.
    """
    known = ~np.isnan(time)
    lowered = np.log(time[known] / clean[known])
    scores = {kind: summary(errors) for kind, errors in kinds.items()}
    return KernelFit(
        version=version,
        rows=rows,
        numbers=numbers,
        repaired_pct=round(100 * float((lowered > np.log(1.05)).mean()), 2),
        repaired_far_pct=round(100 * float((lowered > np.log(1.5)).mean()), 2),
        left_out={kind: score for kind, score in scores.items() if score is not None},
    )
