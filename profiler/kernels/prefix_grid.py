"""Attention of a chunk after cached tokens, by that of a prompt, and where measured by a factor."""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiler.facts.roofline import KEY_BLOCK, Array, attended
from profiler.kernels.attention_grid import HeadGrid, prefill_us


def alike(chunk: Array, context: Array) -> Array:
    """Tokens of the prompt with the query-key pairs of a chunk after ``context`` cached tokens.

    A row of queries attends to what is before it and on average half a block of keys more.
    """
    pairs = attended(chunk, context, 0.5, KEY_BLOCK)[1]
    return np.asarray(np.sqrt(KEY_BLOCK**2 + 2 * pairs) - KEY_BLOCK)


def fit_prefix(rows: pd.DataFrame, prefill: HeadGrid) -> HeadGrid:
    """Measured times over those of the prompts alike, by chunk and cached tokens.

    From rows (chunk, context, heads, kv_heads, time_us) with a context; head counts are pooled.
    """
    ratio = rows.assign(log=np.log(rows["time_us"] / _composed(rows, prefill)))
    table = ratio.pivot_table(index="chunk", columns="context", values="log").sort_index()
    chunks, contexts = (axis.to_numpy(np.float64) for axis in (table.index, table.columns))
    # What is missing: as at the next smaller context.
    logs = table.ffill(axis=1).bfill(axis=1).to_numpy(np.float64)
    return HeadGrid(np.array([[0, 0]]), (chunks, contexts), logs[None])


def prefix_factor(grid: HeadGrid, chunk: Array, context: Array) -> Array:
    """The factor, linear in the logarithms of both sizes; that of the edge beyond."""
    from scipy.interpolate import RegularGridInterpolator

    inside = [
        np.log(np.clip(size, known[0], known[-1]))
        for size, known in zip((chunk, context), grid.sizes, strict=True)
    ]
    at = RegularGridInterpolator(tuple(map(np.log, grid.sizes)), grid.log_us[0])
    found: Array = np.exp(at(np.stack(np.broadcast_arrays(*inside), axis=-1)))
    return found


def prefix_us(grid: HeadGrid, prefill: HeadGrid, rows: pd.DataFrame) -> Array:
    """The times of such rows by both grids."""
    sizes = (rows[name].to_numpy(np.float64) for name in ("chunk", "context"))
    return np.asarray(_composed(rows, prefill) * prefix_factor(grid, *sizes))


def _composed(rows: pd.DataFrame, prefill: HeadGrid) -> Array:
    columns = ("chunk", "context", "heads", "kv_heads")
    chunk, context, *heads = (rows[name].to_numpy(np.float64) for name in columns)
    found = np.empty(len(rows))
    for pair in np.unique(np.stack(heads), axis=1).T.astype(int):
        at = (heads[0] == pair[0]) & (heads[1] == pair[1])
        found[at] = prefill_us(prefill, alike(chunk[at], context[at]), *map(int, pair))
    return found
