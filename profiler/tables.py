"""The CSV tables of a profile bundle: their columns, and reading them with every row checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from profiler.strict import did_you_mean

#: Per-token ops of one layer; ``others`` is all norms, activation, residuals and rotary together.
LAYER_OPS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2", "others")
#: Whole ops: ``embedding`` by tokens, ``lm_head`` by the token rows whose logits are needed.
EDGE_OPS = ("embedding", "lm_head")
SCOPES = ("inter_node", "intra_node")
#: A layer of one decode: what the host takes to launch its kernels one by one, and all of them as
#: one CUDA graph; what the device takes to run them. A CPU has the first (its dispatch) and last.
OVERHEADS = ("layer_graph_launch", "layer_launch", "layer_run")

#: Columns that are no whole numbers, and whether they may be 0.
_REAL = {"time_us": False, "spread_pct": True}

#: What no row may be, and which rows are.
Rule = tuple[str, Callable[[pd.DataFrame], "pd.Series[bool]"]]


class BundleError(ValueError):
    """A bundle that is missing or cannot be used; the message names file, row and value."""


@dataclass(frozen=True)
class Table:
    """One CSV of a bundle: key columns (integers, or names from ``labels``), then ``time_us``.

    Rows are sorted by ``key`` and no key comes twice. ``minimum`` is the smallest allowed integer.
    ``optional``: the file may be absent. ``rules`` are about several cells of a row.
    """

    columns: tuple[str, ...]
    key: tuple[str, ...]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    minimum: dict[str, int] = field(default_factory=dict)
    optional: bool = False
    rules: tuple[Rule, ...] = ()


TABLES: dict[str, Table] = {
    "linear": Table(
        columns=("op", "num_tokens", "time_us"),
        key=("op", "num_tokens"),
        labels={"op": LAYER_OPS + EDGE_OPS},
    ),
    # One sequence's chunk; context_tokens are cached before the chunk.
    "attn_prefill": Table(
        columns=("chunk_tokens", "context_tokens", "time_us"),
        key=("chunk_tokens", "context_tokens"),
        minimum={"context_tokens": 0},
    ),
    # context_tokens per sequence, cached before the new token; all sequences equal.
    "attn_decode": Table(
        columns=("batch_size", "context_tokens", "time_us"),
        key=("batch_size", "context_tokens"),
        minimum={"context_tokens": 0},
    ),
    # One call over the bundle's tp ranks; num_bytes is the tensor on each rank.
    "all_reduce": Table(columns=("num_bytes", "time_us"), key=("num_bytes",), optional=True),
    "send_recv": Table(
        columns=("num_bytes", "scope", "time_us"),
        key=("scope", "num_bytes"),
        labels={"scope": SCOPES},
        minimum={"num_bytes": 0},
        optional=True,
    ),
    # As attn_decode, but the contexts differ: context_tokens is their mean, the rest follows.
    "attn_decode_skew": Table(
        columns=("batch_size", "context_tokens", "max_context_tokens", "time_us"),
        key=("batch_size", "context_tokens", "max_context_tokens"),
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
    "mixed": Table(
        columns=(
            "chunk_tokens",
            "context_tokens",
            "batch_size",
            "decode_context_tokens",
            "time_us",
            "spread_pct",
        ),
        key=("chunk_tokens", "context_tokens", "batch_size", "decode_context_tokens"),
        minimum=dict.fromkeys(
            ("chunk_tokens", "context_tokens", "batch_size", "decode_context_tokens"), 0
        ),
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
    "overhead": Table(
        columns=("what", "time_us"), key=("what",), labels={"what": OVERHEADS}, optional=True
    ),
}


def read_table(path: Path, table: Table) -> pd.DataFrame:
    """The rows of one CSV, typed and checked; empty for an optional table whose file is absent.

    Raises BundleError naming file, row (the header is row 1) and value.
    """
    if not path.is_file():
        if table.optional:
            return empty_table(table)
        raise BundleError(f"{path}: no such file")
    raw = _read_text_cells(path)
    for column in table.columns:
        if column not in raw.columns:
            raise BundleError(f"{path}: column {column!r} is missing; has {list(raw.columns)}")
    unknown = [c for c in raw.columns if c not in table.columns]
    if unknown:
        raise BundleError(f"{path}: unknown column {unknown[0]!r}; allowed {list(table.columns)}")
    short = np.asarray(raw.fillna("") == "").any(axis=1)
    if short.any():
        raise BundleError(f"{path}: row {_row(short)} is truncated: it lacks a cell")
    columns: dict[str, Any] = {c: _typed(raw[c], c, path, table) for c in table.columns}
    frame = pd.DataFrame(columns)
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
    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: not a valid CSV: {error}") from error


def _typed(cells: pd.Series[str], column: str, path: Path, table: Table) -> Any:
    """One column's values. Labels are checked against the allowed ones, numbers against range."""
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
    is_real = column in _REAL
    wrong = ~np.isfinite(numbers)
    if not is_real:
        wrong |= numbers != np.floor(np.where(wrong, 0.5, numbers))
    if wrong.any():
        kind = "a finite number" if is_real else "an integer"
        raise BundleError(
            f"{path}: row {_row(wrong)}: {column} must be {kind}, got {cells[wrong].iloc[0]!r}"
        )
    least = 0 if _REAL.get(column) else table.minimum.get(column, 1)
    positive = is_real and not _REAL[column]
    low = numbers <= 0 if positive else numbers < least
    if low.any():
        bound = "positive" if positive else f"at least {least}"
        raise BundleError(
            f"{path}: row {_row(low)}: {column} must be {bound}, got {cells[low].iloc[0]!r}"
        )
    return numbers if is_real else numbers.astype(np.int64)


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
    """Write the table's columns of ``frame``, sorted by key; the same rows give the same bytes.

    Raises BundleError where a column is missing.
    """
    missing = [c for c in table.columns if c not in frame.columns]
    if missing:
        raise BundleError(f"{path.name}: column {missing[0]!r} is missing")
    ordered = frame[list(table.columns)].sort_values(list(table.key), kind="stable")
    ordered.to_csv(path, index=False, lineterminator="\n")


def empty_table(table: Table) -> pd.DataFrame:
    """A table without rows, its columns typed."""
    kinds = {c: "float64" if c in _REAL else "int64" for c in table.columns}
    kinds.update(dict.fromkeys(table.labels, "str"))
    return pd.DataFrame({c: pd.Series(dtype=kinds[c]) for c in table.columns})


def _row(mask: Any) -> int:
    """Line number of the first true entry; the header is row 1."""
    return int(np.argmax(mask)) + 2
