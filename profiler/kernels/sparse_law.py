"""Prompts of sparse attention (DSA): a law of five rates, fitted to the measured blocks of a model.

A chunk takes time for its tokens, and for its tokens on each head; for the scores of an indexer's
heads (its query-key pairs with all tokens before); and for the pairs that it attends to, which
``top_k`` bounds, on each head and on all together (kernels pad heads to 64). Other tables of
attention are interpolated; of these blocks most rows are launches of the host, and what is left
follows the law.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..facts.layer_kinds import Indexer
from ..facts.roofline import Array, attended_within
from .stack_file import StoredSurface

#: The logarithm of a rate that is nothing.
_NOTHING = -18.0


@dataclass(frozen=True, eq=False)
class SparseLaw(StoredSurface):
    """Logarithms of the rates in microseconds: of a token, of a token and head, of an indexer
    head's pair, of a pair attended to and head, and of a pair attended to."""

    log_rate: Array

    def us(self, chunk: Array, context: Array, heads: int, indexer: Indexer) -> Array:
        """Microseconds of one sequence's chunk after ``context`` cached tokens on ``heads``."""
        rate = np.where(self.log_rate > _NOTHING, np.exp(self.log_rate), 0.0)
        return np.asarray(_work(chunk, context, heads, indexer) @ rate)


def _work(chunk: Array, context: Array, heads: Array | float, indexer: Indexer) -> Array:
    """What the rates multiply: a column each."""
    pairs = indexer.heads * chunk * (context + chunk / 2)
    near = attended_within(chunk, context, indexer.top_k)
    parts = (chunk, chunk * heads, pairs, near * heads, near)
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def fit_sparse(rows: pd.DataFrame, indexer: Indexer) -> SparseLaw:
    """From rows (heads, chunk, context, time_us): the least squares of the relative errors, of
    rates that are not negative; once more without rows that are off by half (the host's stalls)."""
    from scipy.optimize import nnls

    sizes = (rows[name].to_numpy(np.float64) for name in ("chunk", "context", "heads", "time_us"))
    chunk, context, heads, time = sizes
    work = _work(chunk, context, heads, indexer)
    most, known = work.max(axis=0), np.full(len(rows), True)
    for _ in range(2):
        shares = work[known] / most / time[known, None]
        rates = nnls(shares, np.ones(known.sum()))[0] / most
        known = np.abs(np.log(work @ rates / time)) < np.log(1.5)
    with np.errstate(divide="ignore"):
        return SparseLaw(np.maximum(np.log(rates), _NOTHING))
