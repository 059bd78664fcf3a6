"""Errors of a bundle's regressions on held-out points.

Every error comes from a model fitted without the scored points:

``between``  a random fifth left out in turn (the ends of the range stay): inside the range
``edges``    the ``between`` points at a multiple of the bundle's tile, and one token above it
``beyond``   fitted up to a quarter of the range, scored on the rest: extrapolation
``unseen``   a GEMM's shape, predicted from the bundle's other GEMMs

The baselines are those of known tools, a random forest and a polynomial of degree three, on the
same folds. scikit-learn is imported when the table is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.ops import (
    ALL_REDUCE,
    ATTENTION,
    BATCH,
    DECODE,
    LOCAL,
    OPS,
    PREFILL,
    GemmShape,
)
from sarathi_sim.profiler.physics.fit import (
    Bools,
    Folds,
    Rows,
    leave_one_group_out,
    median_p95_worst,
)
from ..loop.records import Floats
from ..op_times.op_times import OpTimes
from ..op_times.regression import (
    Gemms,
    PiecewiseLinear,
    decode_surface,
    gemm_shapes,
    pooled_roofline,
    prefill_surface,
)

Model = Callable[[Floats], Floats]
Fit = Callable[[Floats, Floats], Model]

FOLDS = 5
FOREST = 50
"""Trees of the random forest."""
TOKEN_OPS = tuple(op for op in LOCAL if BATCH not in OPS[op].sizes)
"""Ops by tokens, whose times step at the edges of a tile."""
_SURFACES = {"prefill": prefill_surface, "decode": decode_surface}


@dataclass(frozen=True)
class OpTable:
    """One op of a bundle: points, shape (n, sizes), times in seconds, and its regression ``fit``.
    ``far`` is the regression used beyond the range, if it differs."""

    op: str
    points: Floats
    time_s: Floats
    fit: Fit
    far: Fit
    tile: int | None = None
    shape: GemmShape | None = None

    def only(self, rows: Rows) -> OpTable:
        """The table with these points alone."""
        return replace(self, points=self.points[rows], time_s=self.time_s[rows])

    def at_edge(self, points: Floats) -> Bools:
        """Whether points lie at the edge of a tile."""
        if self.tile is None:
            return np.zeros(len(points), bool)
        size = points[:, 0]
        return np.asarray((size >= self.tile) & (size % self.tile <= 1))


def op_tables(bundle: Bundle) -> list[OpTable]:
    """Every op of a bundle, as the simulator fits it."""
    tile = bundle.meta.tile
    shapes = gemm_shapes(bundle)
    by_op = {str(op): _columns(rows, "num_tokens") for op, rows in bundle.linear.groupby("op")}
    gemms = {op: shapes[op] for op in by_op if op in shapes}
    found = []
    for op, (points, time) in by_op.items():
        far: Fit = linear_fit
        if op in gemms:
            others = {o: (gemms[o], by_op[o][0][:, 0], by_op[o][1]) for o in gemms if o != op}
            far = far_gemm(gemms[op], others, float(points.max()))
        found.append(
            OpTable(
                op,
                points,
                time,
                linear_fit,
                far,
                tile,
                gemms.get(op),
            )
        )
    for op in ATTENTION:
        if bundle.tables()[op].empty:  # an imported bundle may lack it
            continue
        points, time = _columns(bundle.tables()[op], *OPS[op].columns)
        fit = surface_fit(_SURFACES[OPS[op].family])
        found.append(OpTable(op, points, time, fit, fit, tile if op in TOKEN_OPS else None))
    if len(bundle.all_reduce):
        points, time = _columns(bundle.all_reduce, "num_bytes")
        found.append(OpTable(ALL_REDUCE, points, time, linear_fit, linear_fit))
    for scope, rows in bundle.send_recv.groupby("scope"):
        points, time = _columns(rows, "num_bytes")
        found.append(OpTable(f"send_recv_{scope}", points, time, linear_fit, linear_fit))
    return found


def modelled_tables(ops: OpTimes) -> list[OpTable]:
    """Tables of modelled op times, which are not fitted: the corners of their supported sizes.
    These are the tokens, sequences and bytes of batches, and contexts up to the longest that was
    measured."""
    longest = float(ops.longest_context)
    chunks = np.array([(c, k) for c in (1.0, longest) for k in (0.0, longest)])
    decodes = np.array([(b, k) for b in (1.0, _MOST_SEQUENCES) for k in (1.0, longest)])
    by_size = {op: (time, np.array([[1.0], [_MOST_TOKENS]])) for op, time in ops.by_rows.items()}
    if ops.all_reduce is not None:
        by_size[ALL_REDUCE] = ops.all_reduce, _MESSAGES
    by_size |= {f"send_recv_{scope}": (time, _MESSAGES) for scope, time in ops.send.items()}
    corners = [(op, points, time(points[:, 0])) for op, (time, points) in by_size.items()]
    corners.append((PREFILL, chunks, ops.prefill(*chunks.T)))
    corners.append((DECODE, decodes, ops.decode(*decodes.T)))
    return [OpTable(op, points, time, linear_fit, linear_fit) for op, points, time in corners]


_MOST_TOKENS, _MOST_SEQUENCES = 131072.0, 512.0
_MESSAGES = np.array([[1024.0], [4.0 * 2**30]])


def _columns(table: pd.DataFrame, *names: str) -> tuple[Floats, Floats]:
    return table[list(names)].to_numpy(np.float64), table["time_us"].to_numpy(np.float64) * 1e-6


def between(table: OpTable) -> Folds:
    """Folds that leave out a random fifth of the points; the ends of the range (over two sizes: its
    corners) stay in, so that no point left out lies beyond the others."""
    points = table.points
    low, high = points.min(axis=0), points.max(axis=0)
    ends = ((points == low) | (points == high)).all(axis=1)
    inner = np.random.default_rng(0).permutation(np.flatnonzero(~ends))
    fold = np.full(len(points), FOLDS)
    fold[inner] = np.arange(len(inner)) % FOLDS
    return leave_one_group_out(fold, ~ends)


def beyond(table: OpTable, share: int = 4) -> Folds:
    """The fold of the points up to ``1 / share`` of the range, and the rest; empty if too few."""
    points = table.points
    near = (points <= points.max(axis=0) / share).all(axis=1)
    if near.sum() < 8 or near.all():
        return []
    return [(np.flatnonzero(near), np.flatnonzero(~near))]


def residuals(table: OpTable, folds: Folds, fit: Fit) -> tuple[Floats, Rows]:
    """``log(predicted / measured)`` of all scored rows, and their indices."""
    found = [np.empty(0)]
    for fitted, scored in folds:
        predicted = fit(table.points[fitted], table.time_s[fitted])(table.points[scored])
        with np.errstate(divide="ignore"):  # a polynomial may fall below zero
            found.append(np.log(np.maximum(predicted, 0) / table.time_s[scored]))
    rows = [scored for _, scored in folds]
    return np.concatenate(found), np.concatenate([np.empty(0, np.intp), *rows])


def unseen_shape(table: OpTable, tables: list[OpTable]) -> Floats:
    """``log(predicted / measured)`` of a GEMM, from the bundle's GEMMs of other shapes. Empty for
    an op that is no GEMM, or without another shape."""
    others = {
        t.op: (t.shape, t.points[:, 0], t.time_s)
        for t in tables
        if t.shape is not None and t.shape != table.shape
    }
    if table.shape is None or not others:
        return np.empty(0)
    roofline = pooled_roofline(others)
    return np.asarray(np.log(roofline.time_s(table.shape, table.points[:, 0]) / table.time_s))


def held_out_errors(
    bundle: Bundle, progress: Callable[[int], None] = lambda done: None
) -> pd.DataFrame:
    """One row per op and kind of hold-out: absolute errors in percent of the bundle's times.

    Columns: op, where, points, median, p95, worst; and ``forest_median``, ``forest_p95``,
    ``poly3_median``, ``poly3_p95`` of the baselines (NaN where they do not apply). ``progress`` is
    called with the ops done.
    """
    tables = op_tables(bundle)
    found = []
    for done, table in enumerate(tables):
        progress(done)
        for where, folds, fit in _hold_outs(table):
            found += _beside_baselines(table, where, folds, fit)
        unseen = unseen_shape(table, tables)
        if len(unseen):
            found.append({"op": table.op, "where": "unseen", **_stats(unseen)})
    return pd.DataFrame(found)


def _beside_baselines(
    table: OpTable, where: str, folds: Folds, fit: Fit
) -> list[dict[str, object]]:
    """The row of ``where``; for "between" also the row of the tile edges among its points."""
    errors, rows = residuals(table, folds, fit)
    forest, poly3 = (residuals(table, folds, other)[0] for other in (_forest, _polynomial))
    kinds = {where: np.ones(len(rows), bool)}
    if where == "between":
        kinds["edges"] = table.at_edge(table.points[rows])
    found = []
    for kind, kept in kinds.items():
        if kept.any():
            row = {"op": table.op, "where": kind, **_stats(errors[kept])}
            for name, theirs in (("forest", forest), ("poly3", poly3)):
                stats = _stats(theirs[kept])
                row |= {f"{name}_median": stats["median"], f"{name}_p95": stats["p95"]}
            found.append(row)
    return found


def _stats(log_errors: Floats) -> dict[str, float]:
    median, p95, worst = median_p95_worst(log_errors)
    return {"points": len(log_errors), "median": median, "p95": p95, "worst": worst}


def _hold_outs(table: OpTable) -> Iterator[tuple[str, Folds, Fit]]:
    inside = between(table)
    if inside:
        yield "between", inside, table.fit
    outside = beyond(table)
    if outside:
        yield "beyond", outside, table.far


def linear_fit(points: Floats, time: Floats) -> Model:
    """Piecewise linear over one size."""
    through = PiecewiseLinear(points[:, 0], time)
    return lambda wanted: through(wanted[:, 0])


def far_gemm(shape: GemmShape, others: Gemms, most: float) -> Fit:
    """The fit of a GEMM beyond its range of ``most`` tokens, of which it sees a part; it sees the
    same part of each other GEMM's range. So an LM head of few rows has the rates of the GEMMs of
    many, as in a simulation."""

    def fit(points: Floats, time: Floats) -> Model:
        tokens = points[:, 0]
        seen = {op: m <= tokens[-1] / most * m[-1] for op, (_, m, _) in others.items()}
        near = {op: (other, m[seen[op]], t[seen[op]]) for op, (other, m, t) in others.items()}
        roofline = pooled_roofline({"": (shape, tokens, time), **near})
        continued = PiecewiseLinear(tokens, time, roofline.beyond(shape, tokens, time))
        return lambda wanted: continued(wanted[:, 0])

    return fit


def surface_fit(make: Callable[[Floats, Floats, Floats], Callable[..., Floats]]) -> Fit:
    """A surface over two sizes."""

    def fit(points: Floats, time: Floats) -> Model:
        surface = make(points[:, 0], points[:, 1], time)
        return lambda wanted: surface(wanted[:, 0], wanted[:, 1])

    return fit


def _forest(points: Floats, time: Floats) -> Model:
    from sklearn.ensemble import RandomForestRegressor

    model = RandomForestRegressor(n_estimators=FOREST, random_state=0).fit(points, time)
    return lambda wanted: np.asarray(model.predict(wanted), np.float64)


def _polynomial(points: Floats, time: Floats) -> Model:
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(StandardScaler(), PolynomialFeatures(3), LinearRegression())
    model.fit(points, time)
    return lambda wanted: np.asarray(model.predict(wanted), np.float64)
