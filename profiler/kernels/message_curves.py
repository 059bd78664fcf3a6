"""Times of messages and elementwise kernels, by bytes; and of sending tokens to the experts of
other ranks, and of getting them back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.device import Link
from ..facts.ops import OPS, Shard
from ..facts.roofline import HALF, Array
from .gemm_lattice import rising
from .stack_file import StoredSurface

#: Tokens of the largest batch that a stack captures as a CUDA graph; beyond it runs its eager
#: kernel (assumed: vLLM's and SGLang's defaults on these GPUs).
CAPTURED_TOKENS = 512
#: Latency of a message of one byte: AIConfigurator's assumption for all systems.
SEND_LATENCY_US = 10.0


def sent_us(num_bytes: Array, link: Link) -> Array:
    """One message where nothing was measured: latency and the link's bandwidth."""
    return SEND_LATENCY_US + 1e6 * num_bytes / link.bandwidth


@dataclass(frozen=True, eq=False)
class ReduceCurve(StoredSurface):
    """Microseconds by bytes a rank; in proportion beyond the largest. Between sizes the ratio to a
    law (latency of the smallest, bandwidth of the largest) is linear in the logarithm of the bytes;
    no message takes less time than the next smaller size."""

    size: Array
    log_us: Array

    @property
    def num_bytes(self) -> Array:
        """Sizes are stored in kinds of 128 bytes."""
        return 128.0 * self.size

    def time_us(self, num_bytes: Array) -> Array:
        """One call."""
        sizes, known = self.num_bytes, np.exp(self.log_us)
        rate = known[-1] / sizes[-1]
        inside = np.clip(num_bytes, sizes[0], sizes[-1])
        reached = np.interp(
            np.log(inside),
            np.log(sizes),
            (known[0] + rate * sizes) / known,
        )
        least = known[np.searchsorted(sizes, inside, side="right") - 1]
        time = np.maximum((known[0] + rate * inside) / reached, least)
        return np.asarray(time * np.maximum(num_bytes / sizes[-1], 1.0))


def stream_bytes(op: str, shard: Shard) -> float:
    """The bytes that an op's elementwise kernels move for a token."""
    streams = OPS[op].streams
    assert streams is not None
    return sum(HALF * s.times * s.numbers for s in streams(shard))


def fit_reduce(rows: pd.DataFrame) -> ReduceCurve:
    """From rows (num_bytes, time_us) of one kernel and number of ranks. A larger message takes no
    less time."""
    ordered = rows.sort_values("num_bytes")
    size, time = (ordered[c].to_numpy(np.float64) for c in ("num_bytes", "time_us"))
    return ReduceCurve(size / 128, np.log(rising(time, 0)))


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
