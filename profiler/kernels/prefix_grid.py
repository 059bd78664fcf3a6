"""Attention of a chunk after cached tokens: by that of a prompt, and where it was measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.roofline import KEY_BLOCK, Array, attended
from sarathi_sim.profiler.kernels.attention_grid import HeadGrid, prefill_us

#: Queries of a block: FlashAttention 2's on GPUs with little shared memory, which were measured.
_BLOCK = 64


def alike(chunk: Array, context: Array) -> Array:
    """Tokens of the prompt with the query-key pairs of a chunk after ``context`` cached tokens.

    A row of queries attends to what is before it and on average half a block of keys more.
    """
    pairs = attended(chunk, context, 0.5, KEY_BLOCK)[1]
    return np.asarray(np.sqrt(KEY_BLOCK**2 + 2 * pairs) - KEY_BLOCK)


def expected_us(
    prompt: HeadGrid, chunk: Array, context: Array, heads: int, kv_heads: int, units: int
) -> Array:
    """The chunk alone, and its pairs with the cached tokens at the rate of the longest prompt.

    A chunk that leaves some of the ``units`` without a block of queries takes as long as one that
    has a block for each.
    """
    longest = prompt.sizes[0][-1:]
    alone = prefill_us(prompt, np.append(longest, chunk), heads, kv_heads)
    rate = alone[0] / attended(longest, 0 * longest, 0.5, KEY_BLOCK)[1]
    rows = np.maximum(chunk, _BLOCK * units / heads)
    return np.asarray(alone[1:].reshape(np.shape(chunk)) + rate * rows * context)


def fit_prefix(rows: pd.DataFrame, prompt: HeadGrid, units: int) -> HeadGrid:
    """Measured times over those expected, by chunk and cached tokens.

    From rows (chunk, context, heads, kv_heads, time_us) with a context; head counts are pooled.
    """
    parts = []
    for heads, kv_heads in rows[["heads", "kv_heads"]].drop_duplicates().to_numpy().tolist():
        part = rows[(rows["heads"] == heads) & (rows["kv_heads"] == kv_heads)]
        chunk, context = (part[name].to_numpy(np.float64) for name in ("chunk", "context"))
        expected = expected_us(prompt, chunk, context, heads, kv_heads, units)
        parts.append(part.assign(log=np.log(part["time_us"] / expected)))
    table = pd.concat(parts).pivot_table(index="chunk", columns="context", values="log")
    chunks, contexts = (axis.to_numpy(np.float64) for axis in (table.index, table.columns))
    # What is missing: as at the next smaller context.
    logs = table.ffill(axis=1).bfill(axis=1).to_numpy(np.float64)
    return HeadGrid(np.array([[0, 0]]), (chunks, contexts), logs[None])


def prefix_us(
    grid: HeadGrid,
    prompt: HeadGrid,
    chunk: Array,
    context: Array,
    heads: int,
    kv_heads: int,
    units: int,
) -> Array:
    """Chunks after a prefix: linear in the cached tokens, and over what is expected linear in the
    logarithm of the chunk; beyond the measured as far off as at the edge."""

    def expected(chunk: Array, context: Array) -> Array:
        return expected_us(prompt, chunk, context, heads, kv_heads, units)

    chunks, contexts = grid.sizes
    size, held = (np.ravel(each) for each in np.broadcast_arrays(chunk, context))
    inside = np.clip(held, contexts[0], contexts[-1])
    known = np.exp(grid.log_us[0]) * expected(chunks[:, None], contexts)
    times = np.array([np.interp(inside, contexts, row) for row in known])
    logs = np.log(times / expected(chunks[:, None], inside))
    upper = np.clip(np.searchsorted(chunks, size), 1, len(chunks) - 1)
    low, high, at = np.log(chunks[upper - 1]), np.log(chunks[upper]), np.arange(len(size))
    share = np.clip((np.log(size) - low) / (high - low), 0.0, 1.0)
    ratio = np.exp((1 - share) * logs[upper - 1, at] + share * logs[upper, at])
    return np.asarray((ratio * expected(size, held)).reshape(np.broadcast(chunk, context).shape))
