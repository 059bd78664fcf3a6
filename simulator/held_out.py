"""How far off the regressions of a bundle are on points they did not see. Never training error.

Every figure comes from models fitted without the points it is scored on:

``between``  a random fifth left out in turn (the ends of the range stay): inside the range
``edges``    of those, tokens at a multiple of the bundle's tile and one above it
``beyond``   fitted up to a quarter of the range, scored on the rest: extrapolation

The baselines are what known tools use, a random forest and a polynomial of degree three, on the
same folds. scikit-learn is imported here only, when the table is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from profiler.schema import EDGE_OPS, LAYER_OPS, Bundle
from simulator.records import Floats
from simulator.regression import PiecewiseLinear, decode_surface, prefill_surface

Model = Callable[[Floats], Floats]
Fit = Callable[[Floats, Floats], Model]
FOLDS = 5
TOKEN_OPS = (*LAYER_OPS, *EDGE_OPS, "attn_prefill")
"""Ops by tokens, whose times step at the edges of a tile."""


def held_out_errors(bundle: Bundle) -> pd.DataFrame:
    """One row per op and kind of hold-out: absolute errors in percent of the bundle's times.

    Columns: op, where, points, median, p95, worst; and ``forest_median``, ``forest_p95``,
    ``poly3_median``, ``poly3_p95`` of the baselines.
    """
    rows = []
    for op, points, time, fit in _tables(bundle):
        tile = bundle.meta.tile if op in TOKEN_OPS else None
        for where, folds in _hold_outs(points, tile):
            if not folds:
                continue
            row: dict[str, object] = {"op": op, "where": where}
            row["points"] = sum(len(scored) for _, scored in folds)
            ours = _errors(points, time, folds, fit)
            row |= {"median": np.median(ours), "p95": np.quantile(ours, 0.95), "worst": ours.max()}
            for name, baseline in (("forest", _forest), ("poly3", _polynomial)):
                theirs = _errors(points, time, folds, baseline)
                row[f"{name}_median"] = np.median(theirs)
                row[f"{name}_p95"] = np.quantile(theirs, 0.95)
            rows.append(row)
    return pd.DataFrame(rows)


def _tables(bundle: Bundle) -> Iterator[tuple[str, Floats, Floats, Fit]]:
    """Every op with its points, shape (n, sizes), its times, and how the simulator fits it."""
    for op, rows in bundle.linear.groupby("op"):
        yield str(op), _columns(rows, "num_tokens"), rows["time_us"].to_numpy(float), _line
    prefill, decode = bundle.attn_prefill, bundle.attn_decode
    sizes = _columns(prefill, "chunk_tokens", "context_tokens")
    yield "attn_prefill", sizes, prefill["time_us"].to_numpy(float), _surface(prefill_surface)
    sizes = _columns(decode, "batch_size", "context_tokens")
    yield "attn_decode", sizes, decode["time_us"].to_numpy(float), _surface(decode_surface)
    if len(bundle.all_reduce):
        rows = bundle.all_reduce
        yield "all_reduce", _columns(rows, "num_bytes"), rows["time_us"].to_numpy(float), _line
    for scope, rows in bundle.send_recv.groupby("scope"):
        sizes = _columns(rows, "num_bytes")
        yield f"send_recv {scope}", sizes, rows["time_us"].to_numpy(float), _line


def _columns(table: pd.DataFrame, *names: str) -> Floats:
    return table[list(names)].to_numpy(np.float64)


Folds = list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]


def _hold_outs(points: Floats, tile: int | None) -> Iterator[tuple[str, Folds]]:
    """Named lists of (rows to fit, rows to score)."""
    rows = np.arange(len(points))
    hull = (points == points.min(axis=0)).any(axis=1) | (points == points.max(axis=0)).any(axis=1)
    inner = np.random.default_rng(0).permutation(rows[~hull])
    between: Folds = []
    for fold in range(FOLDS):
        scored = inner[fold::FOLDS]
        if len(scored):
            between.append((np.setdiff1d(rows, scored), scored))
    yield "between", between
    if tile is not None:
        size = points[:, 0]
        at_edge = (size >= tile) & (size % tile <= 1)
        edges = [(fitted, scored[at_edge[scored]]) for fitted, scored in between]
        yield "edges", [(fitted, scored) for fitted, scored in edges if len(scored)]
    near = (points <= points.max(axis=0) / 4).all(axis=1)
    enough = near.sum() >= 8 and (~near).any()
    yield "beyond", [(rows[near], rows[~near])] if enough else []


def _errors(points: Floats, time: Floats, folds: Folds, fit: Fit) -> Floats:
    """Absolute errors in percent over all scored rows."""
    found = []
    for fitted, scored in folds:
        predicted = fit(points[fitted], time[fitted])(points[scored])
        found.append(100 * np.abs(predicted / time[scored] - 1))
    return np.concatenate(found)


def _line(points: Floats, time: Floats) -> Model:
    line = PiecewiseLinear(points[:, 0], time)
    return lambda wanted: line(wanted[:, 0])


def _surface(make: Callable[[Floats, Floats, Floats], Callable[..., Floats]]) -> Fit:
    def fit(points: Floats, time: Floats) -> Model:
        surface = make(points[:, 0], points[:, 1], time)
        return lambda wanted: surface(wanted[:, 0], wanted[:, 1])

    return fit


def _forest(points: Floats, time: Floats) -> Model:
    from sklearn.ensemble import RandomForestRegressor

    model = RandomForestRegressor(n_estimators=50, random_state=0).fit(points, time)
    return lambda wanted: np.asarray(model.predict(wanted), np.float64)


def _polynomial(points: Floats, time: Floats) -> Model:
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(StandardScaler(), PolynomialFeatures(3), LinearRegression())
    model.fit(points, time)
    return lambda wanted: np.asarray(model.predict(wanted), np.float64)
