"""Attention times by head counts: prefill over the chunk, decode over batch and context.

Prompts follow a law of their blocks (:mod:`sarathi_sim.profiler.physics.prompt_law`), decodes a law
of the KV tokens read (:mod:`sarathi_sim.profiler.physics.decode_law`). Decodes of other head counts
are interpolated in the logarithm of the query heads. For unmeasured KV heads, a decode of ``b``
sequences with twice the KV heads counts as a decode of ``2 b`` sequences. A chunk after cached
tokens takes as long as a prompt with its query-key pairs, or its measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..facts.roofline import KEY_BLOCK, Array, attended
from ..physics.decode_law import DecodeLaw
from ..physics.prompt_law import NEAR_CALLS, PromptLaw, call_rows
from .gemm_lattice import rising
from .stack_file import StoredSurface

#: Largest reachable share of HBM's bandwidth: tables exceed it if their loop finds the KV cache in
#: L2 (TensorRT-LLM on A100 by 65 %), from which a server's weights evict it.
_MOST_OF_HBM = 0.9


def fastest_us(num_bytes: Array, bandwidth: float) -> Array:
    """The least time to read ``num_bytes`` from a memory of ``bandwidth``."""
    return np.asarray(1e6 * num_bytes / (_MOST_OF_HBM * bandwidth))


@dataclass(frozen=True, eq=False)
class HeadGrid(StoredSurface):
    """``log_us[i]`` are the times of ``heads[i]`` = (query heads, KV heads), one axis a size.
    ``by_group``: for unmeasured KV heads, decodes with as many query heads per KV head come
    first."""

    heads: npt.NDArray[np.int64]
    sizes: tuple[Array, ...]
    log_us: Array
    by_group: bool = False
    whole = ("heads",)

    def measured(self, heads: int, kv_heads: int) -> bool:
        """Whether these head counts are in the grid."""
        return bool((self.heads == (heads, kv_heads)).all(axis=1).any())

    def around(self, heads: float, kv_heads: int) -> list[tuple[int, float]]:
        """(row, weight) of the query heads below and above, by ratio; a single row at the ends.
        Only rows with exactly these KV heads count."""
        mine = np.flatnonzero(self.heads[:, 1] == kv_heads)
        rows = mine[np.argsort(self.heads[mine, 0])].tolist()
        counts, wanted = np.log(self.heads[rows, 0]), np.log(heads)
        upper = int(np.searchsorted(counts, wanted - 1e-9))
        if upper == len(rows):
            return [(rows[-1], 1.0)]
        if upper == 0 or abs(counts[upper] - wanted) < 1e-9:
            return [(rows[upper], 1.0)]
        share = float((wanted - counts[upper - 1]) / (counts[upper] - counts[upper - 1]))
        return [(rows[upper - 1], 1 - share), (rows[upper], share)]

    def between(self, heads: int, kv_heads: int, decode: bool) -> bool:
        """Whether there are head counts on both sides, so that these need no extrapolation."""
        same = self.of_kind(heads == kv_heads)
        if decode:
            near = same.nearest_kv(heads, kv_heads)
            wanted, have = heads / kv_heads * near, same.heads[same.heads[:, 1] == near, 0]
        else:
            wanted, have = heads, same.heads[:, 0]
        return bool(have.min() <= wanted <= have.max())

    def nearest_kv(self, heads: int, kv_heads: int) -> int:
        """The measured number of KV heads that is nearest by ratio; with ``by_group`` of the same
        group, if there is one. A power of two counts as an octave nearer: it maps measured batches
        to measured batches."""
        alike = self.heads[:, 0] * kv_heads == self.heads[:, 1] * heads
        have = np.unique(self.heads[alike if self.by_group and alike.any() else slice(None), 1])
        octaves = np.abs(np.log2(have / kv_heads))
        return int(have[np.argmin(octaves + (octaves % 1 > 0))])

    def only(self, rows: npt.NDArray[np.bool_]) -> HeadGrid:
        """The grid with these pairs of head counts alone."""
        return HeadGrid(self.heads[rows], self.sizes, self.log_us[rows], self.by_group)

    def of_kind(self, multi_head: bool) -> HeadGrid:
        """The pairs with as many KV heads as query heads, or those with fewer; all if there are
        none: the two are different kernels."""
        rows = (self.heads[:, 0] == self.heads[:, 1]) == multi_head
        return self.only(rows) if rows.any() else self


def prefill_us(
    grid: HeadGrid, chunk: Array, heads: int, kv_heads: int, window: float = np.inf
) -> Array:
    """One sequence's causal attention of ``chunk`` tokens without a prefix, within ``window``."""
    return _prompts(grid, heads, kv_heads, window).us(chunk)


@lru_cache(maxsize=256)
def _prompts(grid: HeadGrid, heads: int, kv_heads: int, window: float) -> PromptLaw:
    rows = call_rows(grid.heads, np.ones(1), grid.sizes[-1])
    return PromptLaw(
        rows,
        grid.log_us.ravel(),
        np.array([heads, kv_heads]),
        window,
    )


def together_us(
    prompt: HeadGrid,
    added: HeadGrid,
    batch: Array,
    chunk: Array,
    heads: int,
    kv_heads: int,
    window: float = np.inf,
) -> Array:
    """Calls of ``batch`` equal prompts of ``chunk`` tokens without a prefix, within ``window``."""
    return _calls(prompt, added, heads, kv_heads, window).us(chunk, batch)


@lru_cache(maxsize=256)
def _calls(
    prompt: HeadGrid, added: HeadGrid, heads: int, kv_heads: int, window: float
) -> PromptLaw:
    batches, lengths = added.sizes
    alone = call_rows(prompt.heads, np.ones(1), *prompt.sizes)
    rows = np.vstack([alone, call_rows(added.heads, batches, lengths)])
    calls = added.log_us + np.log(batches)[:, None]
    logs = np.concatenate([prompt.log_us.ravel(), calls.ravel()])
    return PromptLaw(rows, logs, np.array([heads, kv_heads]), window, NEAR_CALLS)


def decode_us(
    grid: HeadGrid,
    batch: Array,
    context: Array,
    heads: int,
    kv_heads: int,
    window: float = np.inf,
) -> Array:
    """One new token for each of ``batch`` sequences of ``context`` tokens, which read the last
    ``window`` of them."""
    law, rows = _law(grid, window), grid.of_kind(heads == kv_heads)
    near = rows.nearest_kv(heads, kv_heads)
    parts = rows.around(heads / kv_heads * near, near)
    times = (
        weight
        * np.log(
            law.us(
                rows.heads[row],
                batch * kv_heads / near,
                context,
            )
        )
        for row, weight in parts
    )
    return np.exp(sum(times, np.zeros(1)))


@lru_cache(maxsize=256)
def _law(grid: HeadGrid, window: float) -> DecodeLaw:
    """The law of a table; sizes beyond a measurement's memory take no less than smaller decodes."""
    log_us = np.maximum.accumulate(np.maximum.accumulate(grid.log_us, axis=1), axis=2)
    return DecodeLaw(grid.heads, grid.sizes, log_us, window)


def fit_prefill(rows: pd.DataFrame) -> HeadGrid:
    """From rows (chunk, heads, kv_heads, time_us) of one head dimension."""
    table = rows.pivot_table(index=["heads", "kv_heads"], columns="chunk", values="time_us")
    lengths = table.columns.to_numpy(np.float64)
    times = table.to_numpy(np.float64, copy=True)
    for at in range(1, len(lengths)):
        missing = np.isnan(times[:, at])
        grown = times[:, at - 1] * (lengths[at] / lengths[at - 1]) ** 2
        times[missing, at] = grown[missing]
    for at in range(len(lengths) - 2, -1, -1):  # the shortest, where MHA was not measured at 1
        missing = np.isnan(times[:, at])
        times[missing, at] = times[missing, at + 1]
    return HeadGrid(_heads(table), (lengths,), np.log(times))


def fit_added(rows: pd.DataFrame) -> HeadGrid:
    """The time that a prompt adds to a batch: its share of a call of 2, 4, ... equal prompts. From
    rows (batch, chunk, heads, kv_heads, time_us) of one head dimension. Batches between are
    interpolated linearly; beyond the largest the shares stay."""
    table = rows.pivot_table(
        index=["heads", "kv_heads", "chunk"], columns="batch", values="time_us"
    )
    batches = table.columns.to_numpy(np.float64)
    shares = np.array([_shares(batches, times) for times in table.to_numpy()])
    keys = table.index.to_frame(index=False)
    grids = [fit_prefill(keys.assign(time_us=share)) for share in shares.T[batches > 1]]
    logs = np.stack([grid.log_us for grid in grids], axis=1)
    return HeadGrid(
        grids[0].heads,
        (batches[batches > 1], *grids[0].sizes),
        logs,
    )


def _shares(batches: Array, times: Array) -> Array:
    """The share of each prompt in calls of equal prompts; NaN where a time is not known."""
    known = ~np.isnan(times)
    most = batches[known][-1]
    inside = np.interp(batches, batches[known], times[known]) / batches
    return np.where(batches > most, times[known][-1] / most, inside)


def fit_decode(rows: pd.DataFrame, by_group: bool = False, window: float = np.inf) -> HeadGrid:
    """From rows (batch, context, heads, kv_heads, time_us) of one head dimension. A larger batch or
    context takes no less time: a running minimum from the largest on. Sizes that did not fit the
    memory are extrapolated by the law of decodes within ``window``."""
    table = rows.pivot_table(
        index=["heads", "kv_heads"], columns=["batch", "context"], values="time_us"
    )
    batches, contexts = (
        np.unique(rows[size].to_numpy(np.float64)) for size in ("batch", "context")
    )
    whole = pd.MultiIndex.from_product([batches.astype(int), contexts.astype(int)])
    flat = table.reindex(columns=whole).to_numpy(np.float64)
    known = flat.reshape(len(table), len(batches), len(contexts))
    most = most_decode(known)
    times = np.where(np.isnan(known), np.nan, most)
    law = DecodeLaw(
        _heads(table),
        (batches, contexts),
        np.log(times),
        window,
    ).expected
    along = [(np.moveaxis(times, axis, 0), np.moveaxis(law, axis, 0)) for axis in (1, 2)]
    for rows_of, expected in along:  # sizes that did not fit the memory
        for at in range(1, len(rows_of)):
            missing = np.isnan(rows_of[at])
            grown = rows_of[at - 1] * expected[at] / expected[at - 1]
            rows_of[at][missing] = grown[missing]
    for rows_of, _ in along:  # not measured at the smallest: as at the next
        for at in range(len(rows_of) - 2, -1, -1):
            missing = np.isnan(rows_of[at])
            rows_of[at][missing] = rows_of[at + 1][missing]
    times = np.minimum(times, most)  # a hole amid the measured
    return HeadGrid(_heads(table), (batches, contexts), np.log(times), by_group)


def most_decode(times: Array) -> Array:
    """The upper bound of each decode: the least time of measured decodes with no fewer sequences
    and no shorter contexts (infinite without any). ``times`` are by heads, batch and context, NaN
    where unknown."""
    return rising(np.where(np.isnan(times), np.inf, times), 1, 2)


def _heads(table: pd.DataFrame) -> npt.NDArray[np.int64]:
    return np.array(table.index.to_list(), dtype=np.int64)


#: Queries of a block in FlashAttention 2 on GPUs with little shared memory, as measured.
_BLOCK = 64


def alike(chunk: Array, context: Array) -> Array:
    """Tokens of the prompt with the query-key pairs of a chunk after ``context`` cached tokens. A
    row of queries attends to the tokens before it and, on average, half a block of keys more."""
    pairs = attended(chunk, context, 0.5, KEY_BLOCK)[1]
    return np.asarray(np.sqrt(KEY_BLOCK**2 + 2 * pairs) - KEY_BLOCK)


def expected_us(
    prompt: HeadGrid, chunk: Array, context: Array, heads: int, kv_heads: int, units: int
) -> Array:
    """The chunk alone, and its pairs with the cached tokens at the rate of the longest prompt. A
    chunk with fewer blocks of queries than ``units`` takes as long as one with a block for each."""
    longest = prompt.sizes[0][-1:]
    alone = prefill_us(prompt, np.append(longest, chunk), heads, kv_heads)
    rate = alone[0] / attended(longest, 0 * longest, 0.5, KEY_BLOCK)[1]
    rows = np.maximum(chunk, _BLOCK * units / heads)
    return np.asarray(alone[1:].reshape(np.shape(chunk)) + rate * rows * context)


def fit_prefix(rows: pd.DataFrame, prompt: HeadGrid, units: int) -> HeadGrid:
    """Measured times over those expected, by chunk and cached tokens. From rows (chunk, context,
    heads, kv_heads, time_us) with a context; head counts are pooled."""
    parts = []
    for heads, kv_heads in rows[["heads", "kv_heads"]].drop_duplicates().to_numpy().tolist():
        part = rows[(rows["heads"] == heads) & (rows["kv_heads"] == kv_heads)]
        chunk, context = (part[name].to_numpy(np.float64) for name in ("chunk", "context"))
        expected = expected_us(prompt, chunk, context, heads, kv_heads, units)
        parts.append(part.assign(log=np.log(part["time_us"] / expected)))
    table = pd.concat(parts).pivot_table(index="chunk", columns="context", values="log")
    chunks, contexts = (axis.to_numpy(np.float64) for axis in (table.index, table.columns))
    # Missing ratios are those of the next smaller context.
    logs = table.ffill(axis=1).bfill(axis=1).to_numpy(np.float64)
    return HeadGrid(
        np.array([[0, 0]]),
        (chunks, contexts),
        logs[None],
    )


def prefix_us(
    grid: HeadGrid,
    prompt: HeadGrid,
    chunk: Array,
    context: Array,
    heads: int,
    kv_heads: int,
    units: int,
) -> Array:
    """Chunks after a prefix: the expected time times a ratio that is linear in the cached tokens
    and in the logarithm of the chunk; beyond the measured range the ratio at its edge."""

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
    share = np.clip(
        (np.log(size) - low) / (high - low),
        0.0,
        1.0,
    )
    ratio = np.exp((1 - share) * logs[upper - 1, at] + share * logs[upper, at])
    return np.asarray((ratio * expected(size, held)).reshape(np.broadcast(chunk, context).shape))
