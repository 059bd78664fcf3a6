"""The cells of a CSV table: read, checked, and refused by row. A row's index is its line."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..storage.files import LARGEST_DATA, read_bounded
from ..storage.strict import one_line, show
from .tables import LARGEST, BundleError


def read_cells(path: Path, **options: Any) -> pd.DataFrame:
    """A CSV file as pandas reads it with ``options``; the header is line 1.

    Raises BundleError for a file whose last row is cut short, or that is no CSV; SpecError for what
    is no file, or a huge one. An editor may have left out the last newline; where a program wrote
    the file, see :func:`check_end`.
    """
    content = read_bounded(path, LARGEST_DATA)
    _check_last_row(content, path)
    try:
        with warnings.catch_warnings():
            # pandas only warns where a row has more cells than the header, and drops them.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame: pd.DataFrame = pd.read_csv(BytesIO(content), index_col=False, **options)
    except pd.errors.ParserWarning:
        raise BundleError(
            f"{path}: not a valid CSV: a row has more cells than the header"
        ) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as fault:
        raise BundleError(f"{path}: not a valid CSV: {one_line(fault)}") from fault
    frame.index += 2
    return frame


def _check_last_row(content: bytes, path: Path) -> None:
    """Raises BundleError where the last row has fewer cells than the header."""
    rows = content.splitlines()
    if rows and not content.endswith(b"\n") and rows[-1].count(b",") < rows[0].count(b","):
        raise BundleError(f"{path}: row {len(rows)} is truncated: it lacks a cell")


def check_end(path: Path) -> None:
    """Raises BundleError for a file whose last row does not end with a newline: its last number may
    have been cut."""
    content = read_bounded(path, LARGEST_DATA)
    if content and not content.endswith(b"\n"):
        last = len(content.splitlines())
        raise BundleError(f"{path}: row {last} is truncated: the file does not end with a newline")


def refuse(
    wrong: npt.ArrayLike,
    cells: pd.Series[Any],
    path: Path,
    problem: str,
) -> None:
    """Raises BundleError naming the first row where ``wrong``, the problem and the cell."""
    rows = np.asarray(wrong, bool)
    if rows.any():
        at = int(np.argmax(rows))
        got = cells.iloc[at : at + 1].tolist()[0]
        raise BundleError(f"{path}: row {cells.index[at]}: {problem}, got {show(got)}")


def as_numbers(cells: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """Cells as numbers; NaN or infinite where a cell is none, or has hundreds of digits."""
    try:
        return pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
    except OverflowError:
        return pd.to_numeric(cells.astype(str), errors="coerce").to_numpy(np.float64)


def numbers(cells: pd.Series[Any], path: Path) -> npt.NDArray[np.float64]:
    """Cells that are finite numbers."""
    found = as_numbers(cells)
    refuse(~np.isfinite(found), cells, path, f"{cells.name} must be a finite number")
    return found


def whole_numbers(cells: pd.Series[Any], path: Path, least: int) -> npt.NDArray[np.int64]:
    """Cells that are whole numbers from ``least`` to below 2^53."""
    found = as_numbers(cells)
    whole = np.isfinite(found) & (found == np.floor(found))
    refuse(~whole, cells, path, f"{cells.name} must be an integer")
    refuse(found < least, cells, path, f"{cells.name} must be at least {least}")
    refuse(found > LARGEST, cells, path, f"{cells.name} must be below 2^53")
    return found.astype(np.int64)
