"""A fitted op, the least squares that find the constants of its physics, and hold-outs.

Every regression is judged by its errors on rows that it did not see. Rows of one group (a GEMM's
shape, a model, a batch size) are left out together, so that no row is predicted from its own group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..facts.roofline import Array, Columns
from .forms import Form
from .residual import Residual

Rows = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]
Folds = list[tuple[Rows, Rows]]
"""Pairs of (rows to fit, rows to score)."""


@dataclass(frozen=True, eq=False)
class OpModel:
    """A fitted op: physics with constants, times the exponential of the residual."""

    form: Form
    constants: dict[str, float]
    residual: Residual | None

    def roofline(self, columns: Columns) -> Array:
        """Microseconds from the physics alone."""
        return self.form.physics(columns, self.constants)

    def predict(self, columns: Columns) -> Array:
        """Microseconds, with the learned residual."""
        base = self.roofline(columns)
        if self.residual is None:
            return base
        total: Array = base * np.exp(self.residual.predict(self.form.features(columns)))
        return total


def fit_constants(
    physics_us: Callable[[Array], Array],
    time_us: Array,
    start: Array,
    low: Array,
    high: Array,
    max_steps: int | None = None,
) -> tuple[Array, float]:
    """The constants (all positive) with which ``physics_us`` fits the measured times best. Least
    squares on the logarithm of the ratio. Returns the constants and the residuals."""
    from scipy.optimize import least_squares

    # Soft L1: kernel switches leave outliers that should not move the constants.
    found = least_squares(
        lambda x: np.log(physics_us(np.exp(x)) / time_us),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=max_steps,
    )
    return np.exp(found.x), float(found.cost)


def leave_one_group_out(groups: npt.ArrayLike, scored: Bools | None = None) -> Folds:
    """Every group in turn: the rows of all the others to fit, its own to score. Of those only the
    ``scored`` ones count (all by default). No folds where there is one group."""
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
