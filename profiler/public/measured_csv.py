"""Reads published measurement files, and checks every used cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.profiler.bundle.csv_cells import (
    check_end,
    numbers,
    read_cells,
    refuse,
    whole_numbers,
)
from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.storage.strict import show

#: Two rows for one point may differ by this factor; they are merged by their median.
_REPEAT_FACTOR = 2.0


def source_folder(datasets: Path, name: str) -> Path:
    """``datasets/name``, or ``datasets`` if it is already the source's own folder."""
    inside = datasets / name
    return inside if inside.is_dir() else datasets


def read_measurements(
    path: Path,
    *,
    counts: Sequence[str] = (),
    from_zero: Sequence[str] = (),
    times: Sequence[str] = (),
    optional_times: Sequence[str] = (),
    labels: Sequence[str] = (),
    keep: tuple[str, Any] | None = None,
) -> pd.DataFrame:
    """The columns named, of the rows whose column ``keep[0]`` is ``keep[1]`` (all by default).

    ``counts`` are whole numbers from 1, ``from_zero`` from 0; ``times`` are finite and positive,
    as are ``optional_times`` where the file has them; ``labels`` are text. A point (equal counts
    and labels) may occur twice, with times that differ by less than a factor of 2. Rows keep their
    number in the file as index. Raises FileNotFoundError, or BundleError naming file, row (the
    header is row 1) and value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file among the public measurements")
    check_end(path)
    raw = read_cells(path, low_memory=False)
    times = [*times, *(column for column in optional_times if column in raw.columns)]
    wanted = [*labels, *counts, *from_zero, *times]
    for column in [*wanted, *([keep[0]] if keep else [])]:
        if column not in raw.columns:
            raise BundleError(
                f"{path}: column {column!r} is missing; has {show(list(raw.columns))}"
            )
    if keep is not None:
        raw = raw[_chosen(raw, path, *keep)]
    found: dict[str, Any] = {column: raw[column] for column in labels}
    for column in labels:
        refuse(raw[column].isna(), raw[column], path, f"{column} is missing")
    for column in counts:
        found[column] = whole_numbers(raw[column], path, 1)
    for column in from_zero:
        found[column] = whole_numbers(raw[column], path, 0)
    for column in times:
        found[column] = times_us = numbers(raw[column], path)
        problem = f"{column} must be positive"
        refuse(times_us <= 0, raw[column], path, problem)
    frame = pd.DataFrame(found, index=raw.index)
    _check_repeats(frame, [*labels, *counts, *from_zero], times, path)
    return frame


def tidy(time_us: pd.Series[float], **inputs: pd.Series[int] | int) -> pd.DataFrame:
    """A frame of the inputs, in their order, and ``time_us``, :func:`merged`."""
    return merged(pd.DataFrame({**inputs, "time_us": time_us}))


def merged(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per distinct input, with the median ``time_us``: some files hold a point twice."""
    inputs = [c for c in frame.columns if c != "time_us"]
    return frame.groupby(inputs, sort=True)[["time_us"]].median().reset_index()


def _chosen(raw: pd.DataFrame, path: Path, column: str, value: Any) -> pd.Series[bool]:
    cells = raw[column]
    if isinstance(value, bool):
        # Of a column with an empty cell, pandas makes text; bool("False") would be true.
        known = cells.astype(str).str.lower()
        wrong = ~known.isin(["true", "false"])
        refuse(wrong, cells, path, f"{column} must be True or False")
        return known == str(value).lower()
    chosen: pd.Series[bool] = cells == value
    return chosen


def _check_repeats(frame: pd.DataFrame, key: list[str], times: list[str], path: Path) -> None:
    repeated = frame[frame.duplicated(key, keep=False)]
    for column in times:
        spread = repeated.groupby(key)[column].agg(["min", "max"])
        far = spread[spread["max"] > _REPEAT_FACTOR * spread["min"]]
        if len(far):
            point = far.index[0] if isinstance(far.index[0], tuple) else (far.index[0],)
            same = (repeated[key] == list(point)).all(axis=1)
            rows = ", ".join(str(row) for row in repeated.index[same])
            named = ", ".join(f"{k}={v}" for k, v in zip(key, point, strict=True))
            raise BundleError(
                f"{path}: rows {rows} hold the same point ({named}) with {column} from "
                f"{far['min'].iloc[0]} to {far['max'].iloc[0]}: too far apart to be repeats"
            )
