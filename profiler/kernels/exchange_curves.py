"""Times of sending tokens to the experts of other ranks, and of getting them back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.roofline import Array
from .gemm_lattice import rising
from .stack_file import StoredSurface

#: The columns of a shape: a model's sizes, and the ranks among which tokens are exchanged.
EXCHANGE = ("hidden", "top_k", "experts", "ranks")
Exchange = tuple[int, int, int, int]


def reached(top_k: Array | int, ranks: Array | int) -> Array:
    """The ranks that hold one or more of a token's experts, on average: experts spread evenly."""
    return np.asarray(ranks * (1 - (1 - 1 / ranks) ** top_k))


@dataclass(frozen=True, eq=False)
class ExchangeCurves(StoredSurface):
    """``log_us[i, j]`` of shape ``shapes[i]`` at ``tokens[j]`` of one rank: logarithms of
    microseconds. ``each``: a token goes once to each of its experts, else once to each rank that
    holds some of them."""

    shapes: npt.NDArray[np.int64]
    tokens: Array
    log_us: Array
    each: bool = False
    whole = ("shapes",)

    def time_us(self, tokens: Array, shape: Exchange, scale: float = 1.0) -> Array:
        """Microseconds for ``tokens`` of one rank, each of ``scale`` times the measured bytes.

        Of a shape that was not measured: as long as the nearest one takes for as many bytes.
        Between two measured numbers of ranks linear in their logarithm; beyond them by the bytes
        that go to other ranks.
        """
        measured, ranks = np.unique(self.shapes[:, 3]), shape[3]
        low = measured[measured <= ranks].max(initial=measured[0])
        high = measured[measured >= ranks].min(initial=measured[-1])
        if low == high:
            return self._at(tokens, shape, low, scale)
        share = np.log(ranks / low) / np.log(high / low)
        of = [self._at(tokens, (*shape[:3], int(r)), r, scale) for r in (low, high)]
        return np.asarray((1 - share) * of[0] + share * of[1])

    def _at(self, tokens: Array, shape: Exchange, ranks: int, scale: float) -> Array:
        """By the shapes with so many ranks."""
        sent, known = self._sent(np.array([shape]))[0], self._sent(self.shapes)
        far = np.abs(np.log(known / sent)) + 0.01 * np.abs(np.log(self.shapes[:, 2] / shape[2]))
        far[(self.shapes[:, :3] == shape[:3]).all(axis=1)] = -1.0
        far[self.shapes[:, 3] != ranks] = np.inf
        row = int(np.argmin(far))
        wanted = tokens * scale * sent / known[row]
        inside = np.clip(wanted, self.tokens[0], self.tokens[-1])
        time = np.exp(
            np.interp(
                np.log(inside),
                np.log(self.tokens),
                self.log_us[row],
            )
        )
        return np.asarray(time * np.maximum(wanted / self.tokens[-1], 1.0))

    def _sent(self, shapes: npt.NDArray[np.int64]) -> Array:
        """Numbers that a token sends to other ranks, in proportion."""
        hidden, top_k, _, ranks = shapes.T.astype(np.float64)
        copies = top_k if self.each else reached(top_k, ranks)
        return np.asarray(hidden * copies * (1 - 1 / ranks))

    def measured(self, shape: Exchange) -> str:
        """The hold-out that judges a shape: ``sizes`` if measured, ``ranks`` between numbers of
        ranks, ``shapes`` of another model; empty beyond the measured ranks."""
        ranks = self.shapes[:, 3]
        if not ranks.min() <= shape[3] <= ranks.max():
            return ""
        mine = (self.shapes[:, :3] == shape[:3]).all(axis=1)
        if not mine.any():
            return "shapes"
        return "sizes" if (mine & (ranks == shape[3])).any() else "ranks"

    def some(self, rows: npt.NDArray[np.bool_]) -> ExchangeCurves:
        """These shapes alone."""
        return ExchangeCurves(self.shapes[rows], self.tokens, self.log_us[rows], self.each)


def fit_exchange(rows: pd.DataFrame, each: bool = False) -> ExchangeCurves:
    """From rows (:data:`EXCHANGE`, tokens, time_us). More tokens take no less time. Tokens that
    some shape lacks are left out."""
    table = rows.pivot_table(index=list(EXCHANGE), columns="tokens", values="time_us")
    table = table.dropna(axis=1)
    shapes = np.array(table.index.to_list(), dtype=np.int64)
    log = np.log(rising(table.to_numpy(np.float64), 1))
    return ExchangeCurves(shapes, table.columns.to_numpy(np.float64), log, each)
