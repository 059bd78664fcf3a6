"""One prompt's attention by what the kernel does: a law, and how far the rows near by are off it.

The law is a launch, the keys that the last block of queries walks through, the rows of all heads
and their query-key pairs, each with a rate fitted to all rows of the table. What is measured over
the law is interpolated (kriging): rows say something of another the nearer they are in chunk and
head counts, and besides where as many blocks (chunk times query heads) fill the GPU in waves.
The constants are the same for every table; they were chosen on rows left out of 27 of 284 tables.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiler.facts.roofline import Array, attended_within

#: Pairs of head counts that say something of another.
_NEAR = 8
#: Queries of a block; the first block belongs to the launch.
_BLOCK = 128
#: E-folds of the chunk, the query heads and the KV heads over which rows are alike.
_CHUNK_FOLDS, _HEAD_FOLDS, _KV_FOLDS = 2.5, 8.0, 8.0
#: E-folds of the blocks and the query heads over which waves are alike, and their share.
_BLOCK_FOLDS, _WAVE_HEAD_FOLDS, _WAVES = 0.8, 2.0, 0.25
#: What a row says of its own head counts alone: e-folds of the chunk, and share.
_OWN_FOLDS, _OWN = 0.1, 0.04

Heads = npt.NDArray[np.int64]


def prompt_us(
    known: Heads, lengths: Array, log_us: Array, chunk: Array, heads: Heads, window: float
) -> Array:
    """Microseconds of prompts of ``chunk`` tokens with ``heads`` = (query heads, KV heads).

    ``log_us[i, ..., j]`` was measured at ``known[i]`` and ``lengths[j]``, each query seeing
    ``window`` keys; axes between them come first in what is returned. Longer prompts take as much
    more as the law says, shorter ones as long as the shortest.
    """
    from scipy.optimize import nnls

    work = _work(_rows(known, lengths), window)
    by_head = log_us.reshape(len(known), -1, len(lengths))
    curves = by_head.swapaxes(0, 1).reshape(-1, len(work))
    ones = np.ones(len(work))
    rates = np.array([nnls(work / np.exp(curve)[:, None], ones)[0] for curve in curves])
    off = (curves - np.log(rates @ work.T)).reshape(len(curves), len(known), -1)
    near = np.argsort(np.abs(np.log(known / heads)).sum(axis=1), kind="stable")[:_NEAR]
    rows, wanted = _rows(known[near], lengths), np.maximum(np.ravel(chunk), lengths[0])
    weights = np.linalg.solve(likeness(rows, rows), off[:, near].reshape(len(curves), -1).T)
    held = _rows(heads[None], np.minimum(wanted, lengths[-1]))
    law = rates @ _work(_rows(heads[None], wanted), window).T
    time = law * np.exp(likeness(held, rows) @ weights).T
    return np.asarray(time.reshape(log_us.shape[1:-1] + np.shape(chunk)))


def _rows(heads: Heads, lengths: Array) -> Array:
    """(chunk, query heads, KV heads) of every length at each of ``heads``."""
    sizes = np.tile(lengths, len(heads))
    return np.column_stack([sizes, np.repeat(heads, len(lengths), axis=0)])


def _work(rows: Array, window: float) -> Array:
    """What the law counts of rows (chunk, query heads, KV heads): a column each."""
    chunk, heads, _ = rows.T
    walked = np.clip(chunk, _BLOCK, window + 2 * _BLOCK) - _BLOCK
    pairs = attended_within(chunk, np.zeros_like(chunk), np.minimum(window, chunk), edge=0.0)
    return np.column_stack([np.ones_like(chunk), walked, heads * chunk, heads * pairs])


def likeness(left: Array, right: Array) -> Array:
    """How much rows (chunk, query heads, KV heads) say of each other: 1.29 of themselves."""
    a, b = np.log(left).T[:, :, None], np.log(right).T[:, None, :]
    size, heads, kv = np.abs(a - b)
    blocks = np.abs(a[0] + a[1] - b[0] - b[1])
    near = np.exp(-size / _CHUNK_FOLDS - heads / _HEAD_FOLDS)
    near += _WAVES * np.exp(-blocks / _BLOCK_FOLDS - heads / _WAVE_HEAD_FOLDS)
    own = _OWN * np.exp(-size / _OWN_FOLDS) * (heads + kv == 0.0)
    return np.asarray(near * np.exp(-kv / _KV_FOLDS) + own)
