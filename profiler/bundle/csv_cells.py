"""The cells of a CSV table: read, checked, and refused by row. A row's index is its line."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from profiler.bundle.tables import LARGEST, BundleError
from profiler.storage.files import LARGEST_DATA, read_bounded
from profiler.storage.strict import one_line, show


def read_cells(path: Path, **options: Any) -> pd.DataFrame:
    """A CSV file as pandas reads it with ``options``; the header is line 1.

    Raises BundleError for a file that is no CSV; SpecError for what is no file, or a huge one.
    """
    content = read_bounded(path, LARGEST_DATA)
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
