"""The CSV tables of a bundle on disk: every row checked, the same rows the same bytes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from profiler.bundle.tables import (
    LARGEST,
    LONGEST_US,
    REAL,
    SHORTEST_US,
    TEXT,
    BundleError,
    Table,
    empty_table,
)
from profiler.storage.strict import did_you_mean, one_line


def read_table(path: Path, table: Table) -> pd.DataFrame:
    """The rows of one CSV, typed and checked; empty for an optional table whose file is absent.

    The frame has the table's columns, and those of its ``extras`` that the file has. Raises
    BundleError naming file, row (the header is row 1) and value.
    """
    if not path.is_file():
        if table.optional:
            return empty_table(table)
        raise BundleError(f"{path}: no such file")
    raw = _read_text_cells(path)
    for column in table.columns:
        if column not in raw.columns:
            raise BundleError(f"{path}: column {column!r} is missing; has {list(raw.columns)}")
    allowed = (*table.columns, *table.extras)
    unknown = [c for c in raw.columns if c not in allowed]
    if unknown:
        raise BundleError(
            f"{path}: unknown column {unknown[0]!r}{did_you_mean(unknown[0], allowed)}; "
            f"allowed {list(allowed)}"
        )
    short = np.asarray(raw.fillna("") == "").any(axis=1)
    if short.any():
        raise BundleError(f"{path}: row {_row(short)} is truncated: it lacks a cell")
    frame = pd.DataFrame({c: _typed(raw[c], c, path, table) for c in allowed if c in raw.columns})
    _check_keys(frame, path, table)
    for fault, broken in table.rules:
        rows = broken(frame).to_numpy()
        if rows.any():
            at = int(np.argmax(rows))
            raise BundleError(f"{path}: row {at + 2} ({_named(frame, table, at)}): {fault}")
    return frame


def _read_text_cells(path: Path) -> pd.DataFrame:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        last = content.count(b"\n") + 1
        raise BundleError(f"{path}: row {last} is truncated: the file does not end with a newline")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.count(b'"') % 2:  # no cell has more than one line
            raise BundleError(f"{path}: row {number} is truncated: a quoted cell does not end")
    try:
        with warnings.catch_warnings():
            # pandas only warns where a row has more cells than the header, and drops them.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False)
    except pd.errors.ParserWarning:
        raise BundleError(
            f"{path}: not a valid CSV: a row has more cells than the header"
        ) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: not a valid CSV: {one_line(error)}") from error


def _typed(cells: pd.Series[str], column: str, path: Path, table: Table) -> Any:
    """One column's values. Labels are checked against the allowed ones, numbers against range."""
    if column in TEXT:
        wrong = np.array([not cell.isprintable() or cell != cell.strip() for cell in cells], bool)
        if wrong.any():
            value = cells[wrong].iloc[0]
            raise BundleError(f"{path}: row {_row(wrong)}: {column} must be text, got {value!r}")
        return cells
    if column in table.labels:
        allowed = table.labels[column]
        wrong = ~cells.isin(allowed).to_numpy()
        if wrong.any():
            value = str(cells[wrong].iloc[0])
            raise BundleError(
                f"{path}: row {_row(wrong)}: unknown {column} {value!r}"
                f"{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}"
            )
        return cells
    numbers = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=float)
    is_real = column in REAL
    wrong = ~np.isfinite(numbers)
    if not is_real:
        wrong |= numbers != np.floor(np.where(wrong, 0.5, numbers))
    if wrong.any():
        kind = "a finite number" if is_real else "an integer"
        raise BundleError(
            f"{path}: row {_row(wrong)}: {column} must be {kind}, got {cells[wrong].iloc[0]!r}"
        )
    least = 0 if REAL.get(column) else table.minimum.get(column, 1)
    positive = is_real and not REAL[column]
    low = numbers <= 0 if positive else numbers < least
    if low.any():
        bound = "positive" if positive else f"at least {least}"
        raise BundleError(
            f"{path}: row {_row(low)}: {column} must be {bound}, got {cells[low].iloc[0]!r}"
        )
    if positive:
        absurd = (numbers < SHORTEST_US) | (numbers > LONGEST_US)
        if absurd.any():
            raise BundleError(
                f"{path}: row {_row(absurd)}: {column} must be from {SHORTEST_US:g} to "
                f"{LONGEST_US:g}, got {cells[absurd].iloc[0]!r}"
            )
    if is_real:
        return numbers
    vast = numbers > LARGEST
    if vast.any():
        value = cells[vast].iloc[0]
        raise BundleError(f"{path}: row {_row(vast)}: {column} must be below 2^53, got {value!r}")
    return numbers.astype(np.int64)


def _check_keys(frame: pd.DataFrame, path: Path, table: Table) -> None:
    """Raises where a key comes twice, or where rows are not sorted by key."""
    if frame.empty:
        if table.optional:
            return
        raise BundleError(f"{path}: has no rows")
    keys = list(frame[list(table.key)].itertuples(index=False, name=None))
    for i in range(1, len(keys)):
        if keys[i] <= keys[i - 1]:
            fault = "is a duplicate" if keys[i] in keys[:i] else "is not in sorted order"
            raise BundleError(f"{path}: row {i + 2} ({_named(frame, table, i)}) {fault}")


def _named(frame: pd.DataFrame, table: Table, row: int) -> str:
    """The key of a row, for a message."""
    return ", ".join(f"{key}={frame[key].iloc[row]}" for key in table.key)


def write_table(frame: pd.DataFrame, path: Path, table: Table) -> None:
    """Write the table's columns of ``frame`` and the ``extras`` it has, sorted by key.

    Raises BundleError where a column is missing.
    """
    missing = [c for c in table.columns if c not in frame.columns]
    if missing:
        raise BundleError(f"{path.name}: column {missing[0]!r} is missing")
    columns = [*table.columns, *(c for c in table.extras if c in frame.columns)]
    ordered = frame[columns].sort_values(list(table.key), kind="stable")
    ordered.to_csv(path, index=False, lineterminator="\n")


def _row(mask: Any) -> int:
    """Line number of the first true entry; the header is row 1."""
    return int(np.argmax(mask)) + 2
