"""Hold-outs: rows left out of a fit, and the errors on them. Every regression is judged by this.

A fit is scored on rows that it did not see. Rows of one group (a GEMM's shape, a model, a batch
size) are left out together, so that no row is predicted from its own group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..facts.roofline import Array

Rows = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]
Folds = list[tuple[Rows, Rows]]
"""Pairs of (rows to fit, rows to score)."""


def leave_one_group_out(groups: npt.ArrayLike, scored: Bools | None = None) -> Folds:
    """Every group in turn: the rows of all the others to fit, its own to score.

    Of those only the ``scored`` ones count (all by default). No folds where there is one group.
    """
    from sklearn.model_selection import LeaveOneGroupOut

    of_row = np.asarray(groups)
    if len(np.unique(of_row)) < 2:
        return []
    splits = LeaveOneGroupOut().split(of_row, groups=of_row)
    folds = [(fit, out if scored is None else out[scored[out]]) for fit, out in splits]
    return [(fit, out) for fit, out in folds if len(out)]


def median_p95_worst(log_errors: Array) -> tuple[float, float, float]:
    """Of absolute errors in percent, from ``log(predicted / measured)``."""
    percent = 100 * np.abs(np.expm1(log_errors))
    return float(np.median(percent)), float(np.quantile(percent, 0.95)), float(percent.max())
