"""Fitting one op's form to measured rows, and the errors on rows that the fit did not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from profiler.facts.device import ErrorStats
from profiler.facts.roofline import Array, Columns
from profiler.physics.forms import Form
from profiler.physics.residual import Residual, fit_curve, fit_trees

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


def _fit_physics(form: Form, frame: pd.DataFrame) -> dict[str, float]:
    from scipy.optimize import least_squares

    columns = columns_of(frame)
    measured = np.log(columns["time_us"])
    names = list(form.fitted)
    start, low, high = np.log([form.fitted[n] for n in names]).T

    best: tuple[float, dict[str, float]] | None = None
    for choice in form.choices:

        def miss(x: Array, choice: dict[str, float] = choice) -> Array:
            constants = {**choice, **dict(zip(names, np.exp(x).tolist(), strict=True))}
            return np.log(form.physics(columns, constants)) - measured

        # Soft L1: kernel switches leave outliers that should not move the constants.
        found = least_squares(
            miss, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=60
        )
        fitted = dict(zip(names, np.exp(found.x).tolist(), strict=True))
        if best is None or found.cost < best[0]:
            best = (float(found.cost), {**choice, **fitted})
    assert best is not None
    # Six digits are more than the data holds, and keep the files stable.
    return {name: float(f"{value:.6g}") for name, value in best[1].items()}


def held_out(
    form: Form, frame: pd.DataFrame, groups: npt.NDArray[np.int64], scored: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Predictions for every scored row by a model that saw no row of its group.

    Returns the scored rows with ``predicted_us`` and ``roofline_us`` added.
    """
    parts = []
    for group in np.unique(groups[scored]):
        test = (groups == group) & scored
        model = fit_op(form, frame[groups != group])
        columns = columns_of(frame[test])
        parts.append(
            frame[test].assign(
                predicted_us=model.predict(columns), roofline_us=model.roofline(columns)
            )
        )
    scores: pd.DataFrame = pd.concat(parts)
    return scores


def errors(frame: pd.DataFrame, column: str = "predicted_us") -> ErrorStats:
    """Absolute error of ``column`` against ``time_us``: median, 95th percentile, worst."""
    miss = 100 * np.abs(frame[column].to_numpy() / frame["time_us"].to_numpy() - 1)
    return ErrorStats(
        median_pct=round(float(np.median(miss)), 2),
        p95_pct=round(float(np.percentile(miss, 95)), 2),
        worst_pct=round(float(np.max(miss)), 2),
    )


def fold_of(keys: pd.DataFrame, folds: int) -> npt.NDArray[np.int64]:
    """A fold number per row such that rows with equal keys share one; deterministic."""
    number = keys.groupby(list(keys.columns), sort=True).ngroup().to_numpy()
    shuffled = np.random.default_rng(0).permutation(int(number.max()) + 1)
    return (shuffled[number] % folds).astype(np.int64)
