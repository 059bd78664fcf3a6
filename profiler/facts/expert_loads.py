"""The load of a rank's experts by a layer's tokens, with the distributions of the measured tables.

``balanced``: every expert has equally many rows, and rank 0 at least one. A power law: each expert
draws its rows from it, from 1 row to 0.8 of the tokens (from 0.01 to 2 if there are no more rows
than experts), scaled to all rows and rounded; an expert gets each token at most once. The rank with
the most rows is timed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.roofline import Array

#: Rows of a tile of the grouped GEMM: an expert's rows are computed in whole tiles.
TILE = 64
#: Samples of a power law over which the mean is taken.
_SAMPLES = 16


class Loads(NamedTuple):
    """The busiest rank, by number of tokens: rows, experts with any, rows in whole tiles."""

    rows: Array
    touched: Array
    padded: Array


@lru_cache(maxsize=1024)
def busiest(
    experts: int, top_k: int, ranks: int, tokens: tuple[float, ...], exponent: float
) -> Loads:
    """The load of the busiest rank, for each of ``tokens``; ``ranks`` divide the experts.

    ``exponent`` is the exponent of the power law, 0 for balanced.
    """
    of = [_skewed(experts, top_k, ranks, t, exponent) for t in tokens] if exponent else [
        _even(experts / ranks, max(t * top_k / ranks, 1.0)) for t in tokens
    ]  # fmt: skip
    return Loads(*np.array(of, np.float64).T)


def _even(experts: float, rows: float) -> tuple[float, float, float]:
    touched = min(experts, rows)
    return rows, touched, touched * TILE * np.ceil(rows / touched / TILE)


def rows_of_experts(
    experts: int, top_k: int, tokens: int, exponent: float
) -> npt.NDArray[np.int64]:
    """Rows of each expert of a layer, ``tokens * top_k`` together: one sample, in whole numbers.

    The rows lost by rounding go, in equal parts if possible, to the experts with the fewest rows.
    """
    wanted = tokens * top_k
    if not exponent:
        return np.asarray(np.diff(np.arange(experts + 1) * wanted // experts), np.int64)
    load: npt.NDArray[np.int64] = _drawn(experts, top_k, tokens, exponent)[0].astype(np.int64)
    while more := wanted - int(load.sum()):
        able = np.flatnonzero(load < tokens if more > 0 else load > 0)
        able = able[np.argsort(load[able] if more > 0 else -load[able], kind="stable")]
        each = max(1, abs(more) // len(able))
        part = able[: abs(more)]
        load[part] = np.clip(load[part] + (each if more > 0 else -each), 0, tokens)
    return load


def _drawn(experts: int, top_k: int, tokens: float, exponent: float) -> Array:
    """Rows of each expert, by sample; rounded."""
    wanted, power = tokens * top_k, 1.0 - exponent
    least, most = (1.0, 0.8 * tokens) if wanted > experts else (0.01, 2.0)
    at = _samples(experts) * (most**power - least**power) + least**power
    drawn = at ** (1.0 / power)
    whole = np.round(drawn * wanted / drawn.sum(axis=1, keepdims=True))
    return np.asarray(np.minimum(whole, tokens), np.float64)


def _skewed(
    experts: int, top_k: int, ranks: int, tokens: float, exponent: float
) -> tuple[float, float, float]:
    wanted = tokens * top_k
    load = _drawn(experts, top_k, tokens, exponent).reshape(_SAMPLES, ranks, -1)
    # The rows lost by rounding: in equal parts to the ranks, one row to each expert without any.
    more = (wanted - load.sum(axis=(1, 2))) / ranks
    rows = load.sum(axis=2) + more[:, None]
    which = np.arange(_SAMPLES), rows.argmax(axis=1)
    mine = load[which]
    new = np.clip(more, 0.0, (mine == 0).sum(axis=1))
    touched = (mine > 0).sum(axis=1) + new
    padded = TILE * (np.ceil(mine / TILE).sum(axis=1) + new)
    return float(rows[which].mean()), float(touched.mean()), float(padded.mean())


@lru_cache(maxsize=64)
def _samples(experts: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(0).random((_SAMPLES, experts))
