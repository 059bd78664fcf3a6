"""Prompts' attention by what the kernel does: a law, and how far the rows near by are off it.

The law is a launch, the keys that the last block of queries walks through, the rows of all heads
and their query-key pairs, each with a rate fitted to all rows of the table. What is measured over
the law is interpolated (kriging): rows say something of another the nearer they are in chunk, head
counts and batch (of equal prompts in one call), and besides where as many blocks (chunk times query
heads times batch) fill the GPU in waves.
The constants are the same for every table; they were chosen on rows left out of 27 of 284 tables.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.roofline import Array, attended_within

#: Pairs of head counts that say something of another, and in calls of several prompts.
_NEAR, NEAR_CALLS = 8, 4
#: Queries of a block; the first block belongs to the launch.
_BLOCK = 128
#: E-folds of the chunk, the query heads, the KV heads and the batch over which rows are alike.
_CHUNK_FOLDS, _HEAD_FOLDS, _KV_FOLDS, _BATCH_FOLDS = 2.5, 8.0, 8.0, 8.0
#: E-folds of the blocks and the query heads over which waves are alike, and their share.
_BLOCK_FOLDS, _WAVE_HEAD_FOLDS, _WAVES = 0.8, 2.0, 0.25
#: What a row says of its own head counts alone: e-folds of the chunk, and share.
_OWN_FOLDS, _OWN = 0.1, 0.04
#: A row that takes so many times as long as a longer prompt is a fault of the measurement.
_FAULT = 4.0

Heads = npt.NDArray[np.int64]


def prompt_us(
    known: Heads, lengths: Array, log_us: Array, chunk: Array, heads: Heads, window: float
) -> Array:
    """Microseconds of prompts of ``chunk`` tokens with ``heads`` = (query heads, KV heads).

    ``log_us[i, j]`` was measured at ``known[i]`` and ``lengths[j]``, each query seeing ``window``
    keys. Longer prompts take as much more as the law says, shorter ones as long as the shortest.
    """
    alone = np.ones(1)
    wanted = call_rows(heads[None], alone, np.maximum(np.ravel(chunk), lengths[0]))
    found = calls_us(call_rows(known, alone, lengths), np.ravel(log_us), wanted, window)
    return found.reshape(np.shape(chunk))


def calls_us(rows: Array, log_us: Array, wanted: Array, window: float, near: int = _NEAR) -> Array:
    """Microseconds of calls of equal prompts, of one pair of head counts.

    ``rows`` and ``wanted`` are (chunk, query heads, KV heads, batch), as :func:`call_rows` gives;
    ``near`` pairs of head counts say something of another. Faults of a measurement say nothing, not
    even of themselves.
    """
    from scipy.optimize import nnls

    work = _work(rows, window)
    rates = nnls(work / np.exp(log_us)[:, None], np.ones(len(work)))[0]
    pairs = np.unique(rows[:, 1:3], axis=0)
    apart = np.abs(np.log(pairs / wanted[0, 1:3])).sum(axis=1)
    chosen = pairs[np.argsort(apart, kind="stable")[:near]]
    at = np.flatnonzero((rows[:, None, 1:3] == chosen).all(axis=2).any(axis=1))
    at = at[~_faults(rows[at], log_us[at])]
    off = log_us[at] - np.log(work[at] @ rates)
    weights = np.linalg.solve(likeness(rows[at], rows[at]), off)
    held = np.minimum(wanted, [rows[:, 0].max(), np.inf, np.inf, np.inf])
    return np.asarray(_work(wanted, window) @ rates * np.exp(likeness(held, rows[at]) @ weights))


def call_rows(heads: Heads, batches: Array, lengths: Array) -> Array:
    """(chunk, query heads, KV heads, batch) of every length in every batch at each of ``heads``."""
    sizes = (len(heads), len(batches), len(lengths))
    pair, batch, length = np.indices(sizes).reshape(3, -1)
    return np.column_stack([lengths[length], heads[pair], batches[batch]])


def _faults(rows: Array, log_us: Array) -> npt.NDArray[np.bool_]:
    """Which rows take far longer than a longer prompt with the same head counts and batch."""
    alike = (rows[:, None, 1:] == rows[None, :, 1:]).all(axis=2)
    longer = alike & (rows[:, None, 0] < rows[None, :, 0])
    least = np.where(longer, log_us, np.inf).min(axis=1)
    return np.asarray(log_us > least + np.log(_FAULT))


def _work(rows: Array, window: float) -> Array:
    """What the law counts of ``rows``: a column each."""
    chunk, heads, _, batch = rows.T
    walked = np.clip(chunk, _BLOCK, window + 2 * _BLOCK) - _BLOCK
    pairs = attended_within(chunk, np.zeros_like(chunk), np.minimum(window, chunk), edge=0.0)
    each = heads * batch
    return np.column_stack([np.ones_like(chunk), walked, each * chunk, each * pairs])


def likeness(left: Array, right: Array) -> Array:
    """How much rows (chunk, query heads, KV heads, batch) say of each other: 1.29 of themselves."""
    a, b = np.log(left).T[:, :, None], np.log(right).T[:, None, :]
    size, heads, kv, batch = np.abs(a - b)
    blocks = np.abs(a[0] + a[1] + a[3] - b[0] - b[1] - b[3])
    near = np.exp(-size / _CHUNK_FOLDS - heads / _HEAD_FOLDS - batch / _BATCH_FOLDS)
    near += _WAVES * np.exp(-blocks / _BLOCK_FOLDS - (heads + batch) / _WAVE_HEAD_FOLDS)
    own = _OWN * np.exp(-(size + batch) / _OWN_FOLDS) * (heads + kv == 0.0)
    return np.asarray(near * np.exp(-kv / _KV_FOLDS) + own)
