"""The form of published measurements, and the reader of their CSV files.

A frame has one row a measurement; its columns have the names of the sizes in
``profiler/facts/roofline.py``, and ``time_us`` is in microseconds. The files are not part of this
project: ``data/README.md`` lists their origin and licence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from sarathi_sim.profiler.bundle.tables import (
    BundleError,
    check_end,
    numbers,
    read_cells,
    refuse,
    whole_numbers,
)
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.storage.strict import show

#: Two rows for one point may differ by this factor; they are merged by their median.
_REPEAT_FACTOR = 2.0

DType = Literal["float16", "bfloat16"]
Kind = Literal["measured", "combined", "interpolated", "scaled"]


@dataclass(frozen=True, eq=False)
class OpRows:
    """Rows of one op: ``measured`` as the source has it, ``combined`` from several numbers,
    ``interpolated`` over GEMM shapes, or ``scaled`` to another head count. ``origin`` is for the
    reader: which file, and which of its rows."""

    frame: pd.DataFrame
    origin: str
    kind: Kind = "measured"


@dataclass(frozen=True, eq=False)
class Measurements:
    """What a source has for one tensor-parallel rank of a model: ``ops`` in the columns of their
    tables in a bundle (``mixed``: whole layers), ``gemms`` of any shape (m, n, k), ``attention`` of
    any heads by op (chunk or batch, context, heads, kv_heads, head_dim), and when, if known."""

    hardware: str
    dtype: DType
    ops: dict[str, OpRows] = field(default_factory=dict)
    gemms: OpRows | None = None
    attention: dict[str, OpRows] = field(default_factory=dict)
    profiled: str = ""


def source_folder(datasets: Path, name: str) -> Path:
    """``datasets/name``, or ``datasets`` if it is already the source's own folder."""
    inside = datasets / name
    return inside if inside.is_dir() else datasets


def check_device(source: str, folder: Path, measured_on: str, device: DeviceSpec) -> None:
    """Raises BundleError for another device than a folder's."""
    if device.name != measured_on:
        wrong = f"was measured on {measured_on}, not on {device.name}: leave --device out"
        raise BundleError(f"{source}: {folder} {wrong}")


def read_measurements(
    path: Path,
    *,
    counts: Sequence[str] = (),
    from_zero: Sequence[str] = (),
    times: Sequence[str] = (),
    optional_times: Sequence[str] = (),
    labels: Sequence[str] = (),
    keep: Mapping[str, Any] = MappingProxyType({}),
) -> pd.DataFrame:
    """The columns named, of the rows whose columns have the values of ``keep``.

    ``counts`` are whole numbers from 1, ``from_zero`` from 0; ``times`` are finite and positive, as
    are ``optional_times`` if there; ``labels`` are text. A point may occur twice, with times that
    differ by less than a factor of 2. Rows keep their number in the file as index. Raises
    FileNotFoundError, or BundleError naming file, row (the header is row 1) and value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file among the public measurements")
    check_end(path)
    raw = read_cells(path, low_memory=False)
    times = [*times, *(column for column in optional_times if column in raw.columns)]
    key = [*labels, *counts, *from_zero]
    if missing := [column for column in (*key, *times, *keep) if column not in raw.columns]:
        raise BundleError(
            f"{path}: column {missing[0]!r} is missing; has {show(list(raw.columns))}"
        )
    for column, value in keep.items():
        raw = raw[_chosen(raw[column], path, value)]
    frame = pd.DataFrame(index=raw.index)
    for column in labels:
        refuse(raw[column].isna(), raw[column], path, f"{column} is missing")
        frame[column] = raw[column]
    for column in (*counts, *from_zero):
        frame[column] = whole_numbers(raw[column], path, 1 if column in counts else 0)
    for column in times:
        frame[column] = numbers(raw[column], path)
        refuse(frame[column] <= 0, raw[column], path, f"{column} must be positive")
    for column in times:
        for point, same in frame[frame.duplicated(key, keep=False)].groupby(key)[column]:
            if same.max() > _REPEAT_FACTOR * same.min():
                named = ", ".join(f"{k}={v}" for k, v in zip(key, point, strict=True))
                raise BundleError(
                    f"{path}: rows {', '.join(map(str, same.index))} hold the same point ({named}) "
                    f"with {column} from {same.min()} to {same.max()}: too far apart to be repeats"
                )
    return frame


def timed(path: Path, column: str, **columns: Any) -> pd.DataFrame:
    """:func:`read_measurements` with ``column`` as its times, milliseconds, and ``time_us``."""
    rows = read_measurements(path, times=(column,), **columns)
    return rows.assign(time_us=1e3 * rows[column])


def tidy(time_us: pd.Series[float], **inputs: pd.Series[int] | int) -> pd.DataFrame:
    """A frame of the inputs, in their order, and ``time_us``, :func:`merged`."""
    return merged(pd.DataFrame({**inputs, "time_us": time_us}))


def merged(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per distinct input, with the median ``time_us``: some files hold a point twice."""
    inputs = [c for c in frame.columns if c != "time_us"]
    return frame.groupby(inputs, sort=True)[["time_us"]].median().reset_index()


def sum_of(rows: pd.DataFrame, counts: Mapping[str, int], of: str) -> OpRows:
    """Rows that are a sum of ops, each so many times: ``norm + 2 x add``, ``of`` a file."""
    text = " + ".join(f"{count} x {op}" if count > 1 else op for op, count in counts.items())
    kind: Kind = "measured" if [*counts.values()] == [1] else "combined"
    return OpRows(rows, f"{text} {of}", kind)


def _chosen(cells: pd.Series[Any], path: Path, value: Any) -> pd.Series[bool]:
    if isinstance(value, bool):
        # Of a column with an empty cell, pandas makes text; bool("False") would be true.
        raw, cells, value = cells, cells.astype(str).str.lower(), str(value).lower()
        refuse(~cells.isin(["true", "false"]), raw, path, f"{raw.name} must be True or False")
    chosen: pd.Series[bool] = cells == value
    return chosen
