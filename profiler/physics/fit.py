"""Fitting one op's form to measured rows, and the errors on rows that the fit did not see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import ErrorStats
from sarathi_sim.profiler.facts.roofline import Array, Columns
from sarathi_sim.profiler.physics.forms import Form
from sarathi_sim.profiler.physics.hold_out import Folds, median_p95_worst
from sarathi_sim.profiler.physics.residual import Residual, fit_curve, fit_trees

#: Physics needs few rows for its few constants; more only cost time.
_PHYSICS_ROWS = 4000
_CURVE_KNOTS = 24


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


def columns_of(frame: pd.DataFrame) -> dict[str, Array]:
    """The numeric columns of a tidy frame as float arrays."""
    numeric = frame.select_dtypes("number")
    return {str(name): numeric[name].to_numpy(dtype=np.float64) for name in numeric.columns}


def fit_op(form: Form, frame: pd.DataFrame) -> OpModel:
    """Fit ``form`` to rows with the form's inputs and ``time_us``; deterministic."""
    rows = frame
    if len(frame) > _PHYSICS_ROWS:
        picked = np.random.default_rng(0).choice(len(frame), _PHYSICS_ROWS, replace=False)
        rows = frame.iloc[np.sort(picked)]
    constants = _fit_physics(form, rows)
    model = OpModel(form, constants, residual=None)
    if form.residual == "none":
        return model
    columns = columns_of(frame)
    target = np.log(columns["time_us"] / model.roofline(columns))
    features = form.features(columns)
    residual: Residual
    if form.residual == "curve":
        residual = fit_curve(features[:, 0], target, _CURVE_KNOTS)
    else:
        residual = fit_trees(features, target, form.iterations, form.leaves)
    return OpModel(form, constants, residual)


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


def _fit_physics(form: Form, frame: pd.DataFrame) -> dict[str, float]:
    columns = columns_of(frame)
    names = list(form.fitted)
    start, low, high = np.log([form.fitted[n] for n in names]).T

    def constants(values: Array, choice: dict[str, float]) -> dict[str, float]:
        return {**choice, **dict(zip(names, values.tolist(), strict=True))}

    found = []
    for choice in form.choices:
        physics = partial(lambda chosen, x: form.physics(columns, constants(x, chosen)), choice)
        values, cost = fit_constants(physics, columns["time_us"], start, low, high, 60)
        found.append((cost, constants(values, choice)))
    best = min(found, key=lambda each: each[0])[1]
    # Six digits are more than the data holds, and keep the files stable.
    return {name: float(f"{value:.6g}") for name, value in best.items()}


def held_out(form: Form, frame: pd.DataFrame, folds: Folds) -> pd.DataFrame:
    """Predictions for every scored row by a model fitted to the rows of its fold alone.

    Returns the scored rows with ``predicted_us`` and ``roofline_us`` added.
    """
    parts = []
    for fitted, scored in folds:
        model, rows = fit_op(form, frame.iloc[fitted]), frame.iloc[scored]
        columns = columns_of(rows)
        parts.append(
            rows.assign(predicted_us=model.predict(columns), roofline_us=model.roofline(columns))
        )
    return pd.concat(parts)


def errors(frame: pd.DataFrame, column: str = "predicted_us") -> ErrorStats:
    """Absolute error of ``column`` against ``time_us``: median, 95th percentile, worst."""
    log_errors = np.log(frame[column].to_numpy() / frame["time_us"].to_numpy())
    return ErrorStats(*(round(value, 2) for value in median_p95_worst(log_errors)))
