"""Two bundles of the same shard, op by op: the ratio of the second one's times to the first's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import TABLES, Bundle, BundleError
from sarathi_sim.profiler.bundle.tables import OVERHEADS, UNLABELLED
from sarathi_sim.profiler.facts.ops import ALL_ROW_OPS, SCOPES
from sarathi_sim.profiler.facts.roofline import Array

#: With fewer common sizes than this, times are interpolated between the sizes of each bundle.
_ENOUGH = 8


@dataclass(frozen=True)
class OpDiff:
    """Ratios second / first of one op over ``points`` sizes: quantiles, and the furthest from 1.

    ``interpolated``: the bundles have too few sizes in common. ``worst_at`` names the size of
    ``worst``.
    """

    op: str
    points: int
    interpolated: bool
    median: float
    p5: float
    p95: float
    worst: float
    worst_at: str


def diff_bundles(first: Bundle, second: Bundle) -> tuple[list[OpDiff], list[str]]:
    """The ops that both bundles hold at overlapping sizes, and a message for each that is left out.

    Devices and sources may differ. Raises BundleError where model or tp differ.
    """
    _check_same(first, second)
    found: list[OpDiff] = []
    left_out: list[str] = []
    for op in (*ALL_ROW_OPS, *UNLABELLED, *_SENDS, *_OVERHEADS):
        rows = _rows(first, op), _rows(second, op)
        if rows[0].empty and rows[1].empty:
            continue
        diff = None
        if not rows[0].empty and not rows[1].empty:
            diff = _diff(op, *rows)
        if diff is None:
            who = "first" if rows[0].empty else "second" if rows[1].empty else ""
            reason = f"the {who} bundle has none" if who else "their sizes do not overlap"
            left_out.append(f"{op}: {reason}")
        else:
            found.append(diff)
    return found, left_out


def backend_differences(first: Bundle, second: Bundle) -> list[str]:
    """A message for each table whose attention backends differ between the two bundles."""
    return [
        f"{name}: {was} in the first, {now} in the second"
        for name, table in TABLES.items()
        if "backend" in table.extras
        and (was := _backends(first, name)) != (now := _backends(second, name))
        and was
        and now
    ]


def _backends(bundle: Bundle, table: str) -> str:
    """The backends of a table's points; empty if it has none."""
    rows = bundle.tables()[table]
    return " and ".join(sorted(rows["backend"].unique())) if "backend" in rows else ""


_OVERHEADS = {f"overhead {what}": what for what in OVERHEADS}
_SENDS = {f"send_recv {scope}": scope for scope in SCOPES}


def _check_same(first: Bundle, second: Bundle) -> None:
    a, b = first.meta, second.meta
    for what, one, other in (("model", a.model, b.model), ("tp", a.tp, b.tp)):
        if one != other:
            raise BundleError(
                f"cannot compare bundles of different {what}s: the first has {one}, the second "
                f"{other}; give two folders of the same model and tp"
            )
    if a.model_spec != b.model_spec:
        raise BundleError(
            f"cannot compare: both are called {a.model}, but their architectures differ "
            "(model_spec in meta.yaml)"
        )


def _rows(bundle: Bundle, op: str) -> pd.DataFrame:
    if op in _SENDS:
        rows = bundle.send_recv
        return rows[rows["scope"] == _SENDS[op]][["num_bytes", "time_us"]]
    if op in _OVERHEADS:
        rows = bundle.overhead
        return rows[rows["what"] == _OVERHEADS[op]][["time_us"]]
    if op in TABLES:
        return bundle.tables()[op][[*TABLES[op].key, "time_us"]]
    return bundle.linear[bundle.linear["op"] == op][["num_tokens", "time_us"]]


def _diff(op: str, first: pd.DataFrame, second: pd.DataFrame) -> OpDiff | None:
    keys = [c for c in first.columns if c != "time_us"]
    joined = first.merge(
        second, on=keys or None, how="inner" if keys else "cross", suffixes=("_a", "_b")
    )
    # Whole layers and skewed decodes are too few to interpolate: the points they share must do.
    interpolated = len(joined) < _ENOUGH and len(keys) in (1, 2)
    if interpolated:
        joined = (_along if len(keys) == 1 else _over)(first, second, keys)
    if joined.empty:
        return None
    ratio = (joined["time_us_b"] / joined["time_us_a"]).to_numpy(np.float64)
    worst = int(np.argmax(np.abs(np.log(ratio))))
    at = " ".join(f"{key}={int(joined[key].iloc[worst])}" for key in keys)
    low, middle, high = (float(q) for q in np.percentile(ratio, [5, 50, 95]))
    return OpDiff(op, len(joined), interpolated, middle, low, high, float(ratio[worst]), at)


def _along(first: pd.DataFrame, second: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Both, linear between points, at all sizes of either within the common range."""
    (key,) = keys
    low = max(first[key].min(), second[key].min())
    high = min(first[key].max(), second[key].max())
    sizes = np.union1d(first[key], second[key])
    sizes = sizes[(sizes >= low) & (sizes <= high)]
    columns = {
        f"time_us_{name}": np.interp(sizes, rows[key], rows["time_us"])
        for name, rows in (("a", first), ("b", second))
    }
    return pd.DataFrame({key: sizes, **columns})


def _over(first: pd.DataFrame, second: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The second, log-linear between its points, at the first's sizes inside its convex hull."""
    from scipy.interpolate import LinearNDInterpolator

    def coordinates(rows: pd.DataFrame) -> Array:
        # A context may be 0, and is not infinitely far from 1 there.
        shift = {"context_tokens": 32.0}
        columns = [np.log2(rows[key].to_numpy(np.float64) + shift.get(key, 0.0)) for key in keys]
        return np.stack(columns, axis=-1)

    points = coordinates(second)
    if np.linalg.matrix_rank(points - points[0]) < 2:
        return pd.DataFrame(columns=[*keys, "time_us_a", "time_us_b"])
    between = LinearNDInterpolator(points, np.log(second["time_us"].to_numpy(np.float64)))
    joined = first.rename(columns={"time_us": "time_us_a"})
    return joined.assign(time_us_b=np.exp(between(coordinates(first)))).dropna()
