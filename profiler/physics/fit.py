"""A fitted op, and the least squares that find the constants of its physics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..facts.roofline import Array, Columns
from .forms import Form
from .residual import Residual


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
    """The constants (all positive) with which ``physics_us`` fits the measured times best.

    Least squares on the logarithm of the ratio. Returns the constants and the residuals.
    """
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
