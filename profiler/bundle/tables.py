"""The CSV tables of a profile bundle: which columns they have, and what their rows must obey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pandas as pd

from ..facts.ops import ALL_ROW_OPS, SCOPES
from ..storage.strict import UserError

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
    """One CSV of a bundle: key columns (integers, or names from ``labels``), then ``time_us``.

    Rows are sorted by ``key`` and no key comes twice. ``extras`` are columns that follow where the
    times were measured here: ``spread_pct``, a point's interquartile range over its median;
    ``power_w`` and ``sm_clock_mhz``, a GPU's meanwhile (0: not told); ``backend``, what computed an
    attention. ``minimum`` is the smallest allowed integer.
    ``optional``: the file may be absent (``Bundle.lacking``: what a run needs). ``rules`` are about
    several cells of a row.
    """

    columns: tuple[str, ...]
    key: tuple[str, ...]
    extras: tuple[str, ...] = ("spread_pct", "power_w", "sm_clock_mhz")
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    minimum: dict[str, int] = field(default_factory=dict)
    optional: bool = False
    rules: tuple[Rule, ...] = ()


_ATTENTION = (*BundleTable.extras, "backend")

TABLES: dict[str, BundleTable] = {
    "linear": BundleTable(
        columns=("op", "num_tokens", "time_us"),
        key=("op", "num_tokens"),
        labels={"op": ALL_ROW_OPS},
    ),
    # One sequence's chunk; context_tokens are cached before the chunk.
    "attn_prefill": BundleTable(
        columns=("chunk_tokens", "context_tokens", "time_us"),
        key=("chunk_tokens", "context_tokens"),
        extras=_ATTENTION,
        minimum={"context_tokens": 0},
        optional=True,
    ),
    # context_tokens per sequence, cached before the new token; all sequences equal.
    "attn_decode": BundleTable(
        columns=("batch_size", "context_tokens", "time_us"),
        key=("batch_size", "context_tokens"),
        extras=_ATTENTION,
        minimum={"context_tokens": 0},
        optional=True,
    ),
    # One call over the bundle's tp ranks; num_bytes is the tensor on each rank.
    "all_reduce": BundleTable(columns=("num_bytes", "time_us"), key=("num_bytes",), optional=True),
    "send_recv": BundleTable(
        columns=("num_bytes", "scope", "time_us"),
        key=("scope", "num_bytes"),
        labels={"scope": SCOPES},
        minimum={"num_bytes": 0},
        optional=True,
    ),
    # As attn_decode, but the contexts differ: context_tokens is their mean, the rest follows.
    "attn_decode_skew": BundleTable(
        columns=("batch_size", "context_tokens", "max_context_tokens", "time_us"),
        key=("batch_size", "context_tokens", "max_context_tokens"),
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
        columns=(
            "chunk_tokens",
            "context_tokens",
            "batch_size",
            "decode_context_tokens",
            "time_us",
        ),
        key=("chunk_tokens", "context_tokens", "batch_size", "decode_context_tokens"),
        extras=_ATTENTION,
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
    "overhead": BundleTable(
        columns=("what", "time_us"), key=("what",), labels={"what": OVERHEADS}, optional=True
    ),
}

#: Tables whose rows are the points of one op (or of whole layers); the others have labels.
UNLABELLED = tuple(name for name, table in TABLES.items() if not table.labels)


def empty_table(table: BundleTable) -> pd.DataFrame:
    """A table without rows, its columns typed."""
    kinds = {c: "float64" if c in REAL else "int64" for c in table.columns}
    kinds.update(dict.fromkeys(table.labels, "str"))
    return pd.DataFrame({c: pd.Series(dtype=kinds[c]) for c in table.columns})
