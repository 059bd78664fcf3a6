"""Attention of prompts: a law of the kernel's work, and the kriged residual of measured rows.

The law is a launch, the keys that the last block of queries walks through, the rows of all heads
and their query-key pairs, each with a rate fitted to all rows of the table. The residual of the law
is interpolated (kriging): two rows correlate more the nearer they are in chunk, head counts and
batch (of equal prompts in one call), and also if their blocks (chunk times query heads times batch)
fill the GPU in equal waves.
The constants are the same for every table; they were chosen on rows left out of 27 of 284 tables.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..facts.roofline import Array, attended_within

#: Nearest pairs of head counts that count for another, and in calls of several prompts.
_NEAR, NEAR_CALLS = 8, 4
#: Queries of a block; the first block belongs to the launch.
_BLOCK = 128
#: Correlation lengths in e-folds of the chunk, the query heads, the KV heads and the batch.
_CHUNK_FOLDS, _HEAD_FOLDS, _KV_FOLDS, _BATCH_FOLDS = 2.5, 8.0, 8.0, 8.0
#: Correlation lengths of waves in e-folds of the blocks and the query heads, and their share.
_BLOCK_FOLDS, _WAVE_HEAD_FOLDS, _WAVES = 0.8, 2.0, 0.25
#: Correlation within the same head counts: length in e-folds of the chunk, and share.
_OWN_FOLDS, _OWN = 0.1, 0.04
#: Lengths an octave at which a prompt is compared with longer ones.
_STEPS = 32
#: A row that takes so many times as long as a longer prompt is a fault of the measurement.
_FAULT = 4.0

Heads = npt.NDArray[np.int64]


class PromptLaw:
    """Microseconds of calls of equal prompts of one pair of ``heads`` = (query heads, KV heads).

    ``rows`` are (chunk, query heads, KV heads, batch), as :func:`call_rows` gives, and each took
    ``exp(log_us)`` microseconds; a query sees ``window`` keys. The ``near`` nearest pairs of head
    counts count. Faults of a measurement count nowhere, not even at their own size.
    """

    def __init__(
        self, rows: Array, log_us: Array, heads: Heads, window: float, near: int = _NEAR
    ) -> None:
        from scipy.optimize import nnls

        work = _work(rows, window)
        self._rates = nnls(work / np.exp(log_us)[:, None], np.ones(len(work)))[0]
        pairs = np.unique(rows[:, 1:3], axis=0)
        apart = np.abs(np.log(pairs / heads)).sum(axis=1)
        chosen = pairs[np.argsort(apart, kind="stable")[:near]]
        at = np.flatnonzero((rows[:, None, 1:3] == chosen).all(axis=2).any(axis=1))
        at = at[~_faults(rows[at], log_us[at])]
        off = log_us[at] - np.log(work[at] @ self._rates)
        self._weights = np.linalg.solve(likeness(rows[at], rows[at]), off)
        self._rows, self._heads, self._window = rows[at], heads, window
        self._ends = rows[:, 0].min(), rows[:, 0].max()
        self._tables: dict[float, tuple[Array, Array]] = {}

    def us(self, chunk: Array, batch: Array | float = 1.0) -> Array:
        """Calls of ``batch`` prompts of ``chunk`` tokens, no slower than calls of longer prompts.
        Longer prompts than measured are extrapolated by the law; shorter ones take the time of the
        shortest."""
        shape = np.broadcast(chunk, batch).shape
        size, many = (np.broadcast_to(each, shape).ravel() for each in (chunk, batch))
        size = np.maximum(size, self._ends[0])
        time = self._kriged(size, many)
        for calls in np.unique(many):
            sizes, rising = self._rising(float(calls))
            here = (many == calls) & (size <= sizes[-1])
            at = np.searchsorted(sizes, size[here])
            least = np.where(
                at > 0,
                rising[np.maximum(at - 1, 0)],
                0.0,
            )
            time[here] = np.clip(time[here], least, rising[at])
        return time.reshape(shape)

    def _rising(self, calls: float) -> tuple[Array, Array]:
        """A dense grid of lengths, and the times of calls of each, which do not fall. A shorter
        measured length takes no longer than a longer one (else its kernel is not chosen, or was
        badly timed), and lengths between two measured ones no less than the shorter."""
        if calls not in self._tables:
            first, last = np.log2(self._ends)
            steps = np.exp2(
                np.linspace(
                    first,
                    last,
                    int(_STEPS * (last - first)) + 2,
                )
            )[1:-1]
            batches = np.unique(self._rows[:, 3])
            near = batches[min(int(np.searchsorted(batches, calls)), len(batches) - 1)]
            known = np.unique(self._rows[self._rows[:, 3] == near, 0])
            most = np.minimum.accumulate(self._kriged(known, np.full(len(known), calls))[::-1])
            sizes = np.union1d(steps[(steps > known[0]) & (steps < known[-1])], known)
            times = self._kriged(sizes, np.full(len(sizes), calls))
            times = np.minimum(times, most[::-1][np.searchsorted(known, sizes)])
            self._tables[calls] = sizes, np.maximum.accumulate(times)
        return self._tables[calls]

    def _kriged(self, size: Array, many: Array) -> Array:
        """The law, times the kriged residual of the rows near by."""
        pair = np.broadcast_to(self._heads, (len(size), 2))
        law = _work(np.column_stack([size, pair, many]), self._window) @ self._rates
        held, over = np.log(np.minimum(size, self._ends[1])), np.empty(len(size))
        for calls in np.unique(many):
            over[many == calls] = self._over(held[many == calls], np.log(calls))
        return np.asarray(law * np.exp(over))

    def _over(self, size: Array, batch: float) -> Array:
        """:func:`likeness` of calls of so many e-folds of tokens and prompts, times the weights."""
        known = np.log(self._rows).T
        apart = np.abs(known[1:] - np.array([*np.log(self._heads), batch])[:, None])
        heads, kv, calls = apart
        weights = self._weights * np.exp(-kv / _KV_FOLDS)
        near = weights * np.exp(-heads / _HEAD_FOLDS - calls / _BATCH_FOLDS)
        waves = _WAVES * weights * np.exp(-(heads + calls) / _WAVE_HEAD_FOLDS)
        own = _OWN * self._weights * np.exp(-calls / _OWN_FOLDS) * (heads + kv == 0.0)
        blocks = size + np.log(self._heads[0]) + batch
        return (
            _exponential_sum(size, known[0], near, _CHUNK_FOLDS)
            + _exponential_sum(blocks, known[0] + known[1] + known[3], waves, _BLOCK_FOLDS)
            + _exponential_sum(size, known[0], own, _OWN_FOLDS)
        )


def _exponential_sum(x: Array, knots: Array, weights: Array, folds: float) -> Array:
    """The sum over ``knots`` of ``weights * exp(-abs(x - knots) / folds)``, for every ``x``: by
    running sums from both ends, so that it costs little more for many knots than for few."""
    order = np.argsort(knots)
    known, weight, wanted = knots[order] / folds, weights[order], x / folds
    below = np.append(0.0, np.cumsum(weight * np.exp(known)))
    above = np.append(np.cumsum((weight * np.exp(-known))[::-1])[::-1], 0.0)
    at = np.searchsorted(known, wanted)
    return np.asarray(below[at] * np.exp(-wanted) + above[at] * np.exp(wanted))


def call_rows(heads: Heads, batches: Array, lengths: Array) -> Array:
    """(chunk, query heads, KV heads, batch) of every length in every batch at each of ``heads``."""
    sizes = (len(heads), len(batches), len(lengths))
    pair, batch, length = np.indices(sizes).reshape(3, -1)
    return np.column_stack([lengths[length], heads[pair], batches[batch]])


def _faults(rows: Array, log_us: Array) -> npt.NDArray[np.bool_]:
    """Whether a row takes far longer than a longer prompt with the same head counts and batch."""
    alike = (rows[:, None, 1:] == rows[None, :, 1:]).all(axis=2)
    longer = alike & (rows[:, None, 0] < rows[None, :, 0])
    least = np.where(longer, log_us, np.inf).min(axis=1)
    return np.asarray(log_us > least + np.log(_FAULT))


def _work(rows: Array, window: float) -> Array:
    """The law's counts for ``rows``: a column each."""
    chunk, heads, _, batch = rows.T
    walked = np.clip(chunk, _BLOCK, window + 2 * _BLOCK) - _BLOCK
    pairs = attended_within(
        chunk,
        np.zeros_like(chunk),
        np.minimum(window, chunk),
        edge=0.0,
    )
    each = heads * batch
    return np.column_stack([np.ones_like(chunk), walked, each * chunk, each * pairs])


def likeness(left: Array, right: Array) -> Array:
    """The covariance of rows (chunk, query heads, KV heads, batch): 1.29 of a row with itself."""
    a, b = np.log(left).T[:, :, None], np.log(right).T[:, None, :]
    size, heads, kv, batch = np.abs(a - b)
    blocks = np.abs(a[0] + a[1] + a[3] - b[0] - b[1] - b[3])
    near = np.exp(-size / _CHUNK_FOLDS - heads / _HEAD_FOLDS - batch / _BATCH_FOLDS)
    near += _WAVES * np.exp(-blocks / _BLOCK_FOLDS - (heads + batch) / _WAVE_HEAD_FOLDS)
    own = _OWN * np.exp(-(size + batch) / _OWN_FOLDS) * (heads + kv == 0.0)
    return np.asarray(near * np.exp(-kv / _KV_FOLDS) + own)
