"""The CSV tables of a profile bundle: which columns they have, and what their rows must obey."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.ops import ALL_ROW_OPS, SCOPES
from ..storage.files import LARGEST_DATA, read_bounded
from ..storage.strict import UserError, did_you_mean, one_line, show

#: A layer of one decode: what the host takes to launch its kernels one by one, and all of them as
#: one CUDA graph; what the device takes to run them. A CPU has the first (its dispatch) and last.
OVERHEADS = ("layer_graph_launch", "layer_graph_run", "layer_launch", "layer_run")

#: Columns that are no whole numbers, and whether they may be 0.
REAL = {"time_us": False, "spread_pct": True, "power_w": True, "sm_clock_mhz": True}
#: Up to here a float holds every whole number.
LARGEST = 2**53 - 1
#: The shortest and the longest time of an op, microseconds. No clock measures a picosecond, and a
#: quarter of an hour is no time of one layer.
SHORTEST_US, LONGEST_US = 1e-6, 1e9
#: Columns of text: any line of it.
TEXT = ("backend",)

#: What no row may be, and which rows are.
Rule = tuple[str, Callable[[pd.DataFrame], "pd.Series[bool]"]]


class BundleError(UserError):
    """A bundle that is missing or cannot be used; the message names file, row and value."""


@dataclass(frozen=True)
class BundleTable:
    """One CSV of a bundle: ``sizes`` (integers, or names from ``labels``), then ``time_us``.

    Rows are sorted by ``key`` (labels first) and no key comes twice. ``extras`` are columns that
    follow where the times were measured here: ``spread_pct``, a point's interquartile range over
    its median; ``power_w`` and ``sm_clock_mhz``, a GPU's meanwhile (0: not told); ``backend``, what
    computed an attention. ``minimum`` is the smallest allowed integer. ``optional``: the file may
    be absent (``Bundle.lacking``: what a run needs). ``rules`` are about several cells of a row.
    """

    sizes: tuple[str, ...]
    extras: tuple[str, ...] = ("spread_pct", "power_w", "sm_clock_mhz")
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    minimum: dict[str, int] = field(default_factory=dict)
    optional: bool = False
    rules: tuple[Rule, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every file has, in their order."""
        return (*self.sizes, "time_us")

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which rows are sorted: labels first."""
        return tuple(sorted(self.sizes, key=lambda name: name not in self.labels))


_ATTENTION = (*BundleTable.extras, "backend")
_MIXED = ("chunk_tokens", "context_tokens", "batch_size", "decode_context_tokens")

TABLES: dict[str, BundleTable] = {
    "linear": BundleTable(("op", "num_tokens"), labels={"op": ALL_ROW_OPS}),
    # One sequence's chunk; context_tokens are cached before the chunk.
    "attn_prefill": BundleTable(
        ("chunk_tokens", "context_tokens"),
        extras=_ATTENTION,
        minimum={"context_tokens": 0},
        optional=True,
    ),
    # context_tokens per sequence, cached before the new token; all sequences equal.
    "attn_decode": BundleTable(
        ("batch_size", "context_tokens"),
        extras=_ATTENTION,
        minimum={"context_tokens": 0},
        optional=True,
    ),
    # One call over the bundle's tp ranks; num_bytes is the tensor on each rank.
    "all_reduce": BundleTable(("num_bytes",), optional=True),
    "send_recv": BundleTable(
        ("num_bytes", "scope"),
        labels={"scope": SCOPES},
        minimum={"num_bytes": 0},
        optional=True,
    ),
    # As attn_decode, but the contexts differ: context_tokens is their mean, the rest follows.
    "attn_decode_skew": BundleTable(
        ("batch_size", "context_tokens", "max_context_tokens"),
        extras=_ATTENTION,
        optional=True,
        rules=(
            (
                "max_context_tokens is less than the mean, context_tokens",
                lambda rows: rows["max_context_tokens"] < rows["context_tokens"],
            ),
            (
                "max_context_tokens is more than all contexts together",
                lambda rows: (
                    rows["max_context_tokens"] > rows["batch_size"] * rows["context_tokens"]
                ),
            ),
        ),
    ),
    # A whole layer, timed as one: a chunk (0 tokens: none) after context_tokens cached ones, and
    # batch_size decodes (0: none) that hold decode_context_tokens each.
    "mixed": BundleTable(
        _MIXED,
        extras=_ATTENTION,
        minimum=dict.fromkeys(_MIXED, 0),
        optional=True,
        rules=(
            (
                "holds neither a chunk nor decodes",
                lambda rows: (rows["chunk_tokens"] == 0) & (rows["batch_size"] == 0),
            ),
            (
                "context_tokens without a chunk",
                lambda rows: (rows["chunk_tokens"] == 0) & (rows["context_tokens"] > 0),
            ),
            (
                "decode_context_tokens without decodes",
                lambda rows: (rows["batch_size"] == 0) & (rows["decode_context_tokens"] > 0),
            ),
        ),
    ),
    "overhead": BundleTable(("what",), labels={"what": OVERHEADS}, optional=True),
}

#: Tables whose rows are the points of one op (or of whole layers); the others have labels.
UNLABELLED = tuple(name for name, table in TABLES.items() if not table.labels)


def empty_table(table: BundleTable) -> pd.DataFrame:
    """A table without rows, its columns typed."""
    kinds = {c: "float64" if c in REAL else "int64" for c in table.columns}
    kinds.update(dict.fromkeys(table.labels, "str"))
    return pd.DataFrame({c: pd.Series(dtype=kinds[c]) for c in table.columns})


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


def read_table(path: Path, table: BundleTable) -> pd.DataFrame:
    """The rows of one CSV, typed and checked; empty for an optional table whose file is absent. The
    frame has the table's columns, and those of its ``extras`` that the file has. Raises BundleError
    naming file, row (the header is row 1) and value."""
    if not path.is_file():
        if table.optional:
            return empty_table(table)
        raise BundleError(f"{path}: no such file")
    raw = _read_text_cells(path)
    for column in table.columns:
        if column not in raw.columns:
            raise BundleError(
                f"{path}: column {column!r} is missing; has {show(list(raw.columns))}"
            )
    allowed = (*table.columns, *table.extras)
    unknown = [c for c in raw.columns if c not in allowed]
    if unknown:
        raise BundleError(
            f"{path}: unknown column {show(unknown[0])}{did_you_mean(unknown[0], allowed)}; "
            f"allowed {list(allowed)}"
        )
    short = np.asarray(raw.fillna("") == "").any(axis=1)
    if short.any():
        raise BundleError(
            f"{path}: row {raw.index[int(np.argmax(short))]} is truncated: it lacks a cell"
        )
    typed = {c: _typed(raw[c], c, path, table) for c in allowed if c in raw.columns}
    frame = pd.DataFrame(typed, index=raw.index).reset_index(drop=True)
    _check_keys(frame, path, table)
    for fault, broken in table.rules:
        rows = broken(frame).to_numpy()
        if rows.any():
            at = int(np.argmax(rows))
            raise BundleError(f"{path}: row {at + 2} ({_named(frame, table, at)}): {fault}")
    return frame


def _read_text_cells(path: Path) -> pd.DataFrame:
    check_end(path)  # as we write them
    for number, line in enumerate(read_bounded(path, LARGEST_DATA).split(b"\n"), start=1):
        if line.count(b'"') % 2:  # no cell has more than one line
            raise BundleError(f"{path}: row {number} is truncated: a quoted cell does not end")
    return read_cells(path, dtype=str, keep_default_na=False)


def _typed(cells: pd.Series[str], column: str, path: Path, table: BundleTable) -> Any:
    """One column's values. Labels are checked against the allowed ones, numbers against range."""
    if column in TEXT:
        unprintable = [not cell.isprintable() or cell != cell.strip() for cell in cells]
        refuse(unprintable, cells, path, f"{column} must be text")
        return cells
    if column in table.labels:
        allowed = table.labels[column]
        wrong = ~cells.isin(allowed).to_numpy()
        if wrong.any():
            value = str(cells[wrong].iloc[0])
            raise BundleError(
                f"{path}: row {cells.index[wrong][0]}: unknown {column} {value!r}"
                f"{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}"
            )
        return cells
    if column not in REAL:
        return whole_numbers(cells, path, table.minimum.get(column, 1))
    found, zero_allowed = numbers(cells, path), REAL[column]
    if zero_allowed:
        refuse(found < 0, cells, path, f"{column} must be at least 0")
        return found
    refuse(found <= 0, cells, path, f"{column} must be positive")
    absurd = (found < SHORTEST_US) | (found > LONGEST_US)
    refuse(absurd, cells, path, f"{column} must be from {SHORTEST_US:g} to {LONGEST_US:g}")
    return found


def _check_keys(frame: pd.DataFrame, path: Path, table: BundleTable) -> None:
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


def _named(frame: pd.DataFrame, table: BundleTable, row: int) -> str:
    return ", ".join(f"{key}={frame[key].iloc[row]}" for key in table.key)


def write_table(frame: pd.DataFrame, path: Path, table: BundleTable) -> None:
    """Write the table's columns of ``frame`` and the ``extras`` it has, sorted by key. Raises
    BundleError where a column is missing."""
    missing = [c for c in table.columns if c not in frame.columns]
    if missing:
        raise BundleError(f"{path.name}: column {missing[0]!r} is missing")
    columns = [*table.columns, *(c for c in table.extras if c in frame.columns)]
    ordered = frame[columns].sort_values(list(table.key), kind="stable")
    ordered.to_csv(path, index=False, lineterminator="\n")
