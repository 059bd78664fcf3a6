"""Fitted tables of a stack's kernels, and their errors on rows left out of the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
    decode_us,
    fit_decode,
    fit_prefill,
    fit_prefix,
    prefill_us,
    prefix_us,
)
from sarathi_sim.profiler.kernels.gemm_lattice import (
    GemmCube,
    fit_lattice,
    gemm_cube,
    rising,
    through,
)
from sarathi_sim.profiler.kernels.moe_surface import MoeTable, Rates, between_knots, fit_moe, groups
from sarathi_sim.profiler.kernels.reduce_curves import fit_reduce
from sarathi_sim.profiler.kernels.stack_file import KernelFit, LeftOut, StoredSurface
from sarathi_sim.profiler.physics.hold_out import Rows, median_p95_worst
from sarathi_sim.profiler.physics.prompt_law import NEAR_CALLS, PromptLaw

#: Log errors against the cleaned rows, and against the rows as they were measured.
Errors = tuple[Array, Array]
#: Microseconds by two sizes and (query heads, KV heads).
HeadTime = Callable[[Array, Array, int, int], Array]

_COVER = 0.9


@dataclass(frozen=True, eq=False)
class Fitted:
    """One table's surface, and the record of it."""

    table: str
    surface: StoredSurface
    fit: KernelFit


def record(
    version: str,
    rows: int,
    time: Array,
    clean: Array,
    numbers: int,
    kinds: dict[str, Iterator[Errors]],
    timed: Array | None = None,
) -> KernelFit:
    """The record of a fit: its rows, the effect of cleaning on their times, and its errors.

    ``kinds`` are the errors by kind of hold-out; ``timed`` are the times before those below the
    memory's bound were raised (None: none were).
    """
    known = ~np.isnan(time)
    lowered = np.log(time[known] / clean[known])
    scores = {kind: summary(errors) for kind, errors in kinds.items()}
    return KernelFit(
        version=version,
        rows=rows,
        numbers=numbers,
        repaired_pct=round(100 * float((lowered > np.log(1.05)).mean()), 2),
        repaired_far_pct=round(100 * float((lowered > np.log(1.5)).mean()), 2),
        left_out={kind: score for kind, score in scores.items() if score is not None},
        raised_pct=0.0 if timed is None else round(100 * float((time > timed)[known].mean()), 2),
    )


def summary(parts: Iterable[Errors]) -> LeftOut | None:
    """All errors of one kind of hold-out together; None without any."""
    found = list(parts)
    if not found:
        return None
    clean, raw = (np.concatenate([np.ravel(part[i]) for part in found]) for i in (0, 1))
    known = np.isfinite(clean) & np.isfinite(raw)
    if not known.any():
        return None
    off, measured = clean[known], raw[known]
    median, p95, worst = median_p95_worst(off)
    raw_median, raw_p95, _ = median_p95_worst(measured)
    halves = np.abs(off[::2]), np.abs(off[1::2])
    covered = [
        float((other <= _covering(half)).mean())
        for half, other in (halves, halves[::-1])
        if len(half) and len(other)
    ]
    width = 100 * float(np.expm1(_covering(np.abs(off))))
    share = 100 * float(np.mean(covered)) if covered else 100.0
    return LeftOut(
        len(off), *(round(v, 2) for v in (median, p95, worst, raw_median, raw_p95, width, share))
    )


def _covering(errors: Array) -> float:
    """The half-width that covers 90 % of further errors: of n errors in order, the one at
    0.9 (n + 1), or the largest of fewer than nine."""
    return float(np.quantile(errors, _COVER, method="weibull"))


def _errors(predicted: Array, measured: Array, clean: Array | None = None) -> Errors:
    """Errors against the ``clean`` rows (None: the measured ones), and the measured rows."""
    off = np.log(predicted / measured)
    return off if clean is None else np.log(predicted / clean), off


def _every_other(sizes: int) -> Iterator[tuple[Rows, Rows]]:
    """Indices to fit and to score: each half of them in turn; the ends are always fitted."""
    for first in (0, 1):
        kept = np.unique([0, *range(first, sizes, 2), sizes - 1])
        yield kept, np.setdiff1d(np.arange(sizes), kept)


# GEMMs ------------------------------------------------------------------------------------------


def gemm_token_counts(
    clean: GemmCube, raw: GemmCube, knots: Rows, scored: Rows
) -> Iterator[Errors]:
    """The token counts that are no knots, of the ``scored`` n (the others chose the knots)."""
    rest = np.setdiff1d(np.arange(len(clean.m)), knots)
    if len(rest):
        times = through(clean, knots), raw.time_us, clean.time_us
        yield _errors(*(each[scored][..., rest] for each in times))


def gemm_pairs(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """Every inner token count in turn, with its neighbour one token on, from the counts around."""
    group = np.cumsum(np.concatenate([[1], np.diff(clean.m) > 1]))
    for number in np.unique(group)[1:-1]:
        out = np.flatnonzero(group == number)
        if len(out) > 2:
            continue
        kept = np.setdiff1d(np.arange(len(clean.m)), out)
        predicted = through(clean, kept)[..., out]
        yield _errors(predicted, raw.time_us[..., out], clean.time_us[..., out])


def gemm_shapes(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """Every other n, then k, in turn: no shape with that n (or k) was fitted or cleaned with."""
    for axis in (0, 1):
        for kept, out in _every_other(clean.time_us.shape[axis]):
            yield _without(clean, raw, axis, kept, out)


def gemm_beyond(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """The sides above 16384 and, apart, token counts above 8192, from the smaller ones."""
    for axis, most in ((0, 16384.0), (1, 16384.0), (2, 8192.0)):
        outside = (clean.n, clean.k, clean.m)[axis] > most
        if outside.any():
            yield _without(clean, raw, axis, np.flatnonzero(~outside), np.flatnonzero(outside))


def gemm_each_shape(rows: pd.DataFrame) -> Iterator[Errors]:
    """Every (n, k) in turn, from all others, for a table with few."""
    for n, k in rows[["n", "k"]].drop_duplicates().to_numpy().tolist():
        out = rows[(rows["n"] == n) & (rows["k"] == k)]
        lattice = fit_lattice(gemm_cube(rows.drop(out.index)).cleaned())
        predicted = lattice.time_us(out["m"].to_numpy(np.float64), n, k)
        yield _errors(predicted, out["time_us"].to_numpy())


def _without(clean: GemmCube, raw: GemmCube, axis: int, kept: Rows, out: Rows) -> Errors:
    """The errors at ``out`` of one axis, fitted and cleaned with the ``kept`` indices alone."""
    every = [np.arange(size) for size in clean.time_us.shape]
    fitted, scored = ([*every[:axis], rows, *every[axis + 1 :]] for rows in (kept, out))
    lattice = fit_lattice(raw.some(*fitted).cleaned())
    raw, clean = raw.some(*scored), clean.some(*scored)
    predicted = [[lattice.time_us(clean.m, int(n), int(k)) for k in clean.k] for n in clean.n]
    return _errors(np.array(predicted), raw.time_us, clean.time_us)


# Attention --------------------------------------------------------------------------------------


def decode_sizes(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Every other context, then every other batch: neighbours a factor of 4 apart."""
    whole = fit_decode(rows, window=window)
    for column in ("context", "batch"):
        sizes = np.unique(rows[column])
        for kept, _ in _every_other(len(sizes)):
            fitted = rows[column].isin(sizes[kept])
            grid = fit_decode(rows[fitted], window=window)
            yield from _decodes(grid, whole, rows[~fitted], window)


def decode_heads(
    rows: pd.DataFrame, by_group: bool = False, window: float = np.inf, inside: bool = True
) -> Iterator[Errors]:
    """Every pair of head counts in turn; ``inside``: those between others, else those beyond."""
    whole = fit_decode(rows, by_group, window)
    for grid, out in _each_pair(whole, rows, inside, decode=True):
        yield from _decodes(grid, whole, out, window)


def prefill_sizes(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Every inner chunk size in turn."""
    for chunk in np.unique(rows["chunk"])[1:-1]:
        grid = fit_prefill(rows[rows["chunk"] != chunk])
        yield from _prompts(grid, rows[rows["chunk"] == chunk], window)


def prefill_heads(
    rows: pd.DataFrame, window: float = np.inf, inside: bool = True
) -> Iterator[Errors]:
    """Every pair of head counts in turn; ``inside``: those between others, else those beyond."""
    for grid, out in _each_pair(fit_prefill(rows), rows, inside, decode=False):
        yield from _prompts(grid, out, window)


def prefix_sizes(rows: pd.DataFrame, prompt: HeadGrid, units: int) -> Iterator[Errors]:
    """Every inner chunk, then every inner context in turn: neighbours a factor of 4 apart."""
    for column in ("chunk", "context"):
        for size in np.unique(rows[column])[1:-1]:
            grid = fit_prefix(rows[rows[column] != size], prompt, units)
            yield from _by_heads(
                rows[rows[column] == size],
                ("chunk", "context"),
                lambda chunk, context, h, kv, of=grid: prefix_us(  # type: ignore[misc]
                    of, prompt, chunk, context, h, kv, units
                ),
            )


def together(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Several prompts in one call: every other batch between one prompt and the most."""
    place, sizes = ["heads", "kv_heads", "chunk"], ["chunk", "heads", "kv_heads", "batch"]
    order = rows.groupby(place)["batch"].rank() - 1
    ends = (order == 0) | (order == order.groupby([rows[c] for c in place]).transform("max"))
    for first in (0, 1):
        fitted = ends | (order % 2 == first)
        known, log = rows[fitted][sizes].to_numpy(float), np.log(rows["time_us"][fitted])

        def law(chunk: Array, batch: Array, heads: int, kv_heads: int) -> Array:
            pair = np.array([heads, kv_heads])
            return PromptLaw(known, log.to_numpy(), pair, window, NEAR_CALLS).us(chunk, batch)  # noqa: B023

        yield from _by_heads(rows[~fitted], ("chunk", "batch"), law)


def _each_pair(
    whole: HeadGrid, rows: pd.DataFrame, inside: bool, decode: bool
) -> Iterator[tuple[HeadGrid, pd.DataFrame]]:
    """Without each pair of head counts in turn: the grid, and the rows of that pair."""
    for row, (heads, kv_heads) in enumerate(whole.heads.tolist()):
        grid = whole.only(np.arange(len(whole.heads)) != row)
        if len(grid.heads) and grid.between(heads, kv_heads, decode) == inside:
            yield grid, rows[(rows["heads"] == heads) & (rows["kv_heads"] == kv_heads)]


def _decodes(grid: HeadGrid, whole: HeadGrid, out: pd.DataFrame, window: float) -> Iterator[Errors]:
    """Errors of decodes; the cleaned times are those of the ``whole`` table."""
    predicted, clean = (
        lambda batch, context, h, kv, of=of: decode_us(of, batch, context, h, kv, window)
        for of in (grid, whole)
    )
    return _by_heads(out, ("batch", "context"), predicted, clean)


def _prompts(grid: HeadGrid, out: pd.DataFrame, window: float) -> Iterator[Errors]:
    return _by_heads(
        out, ("chunk", "chunk"), lambda chunk, _, h, kv: prefill_us(grid, chunk, h, kv, window)
    )


def _by_heads(
    rows: pd.DataFrame, sizes: tuple[str, str], time: HeadTime, clean: HeadTime | None = None
) -> Iterator[Errors]:
    """The errors of one pair of head counts after the other."""
    for _, part in rows.groupby(["heads", "kv_heads"], sort=False):
        heads, kv_heads = int(part["heads"].iloc[0]), int(part["kv_heads"].iloc[0])
        a, b = (part[size].to_numpy(np.float64) for size in sizes)
        known = None if clean is None else clean(a, b, heads, kv_heads)
        yield _errors(time(a, b, heads, kv_heads), part["time_us"].to_numpy(), known)


# Experts and messages ---------------------------------------------------------------------------


def moe_tokens(raw: MoeTable, rates: Rates, knots: Rows, scored: Rows) -> Iterator[Errors]:
    """The token counts that are no knots, of the ``scored`` shapes (the others chose the knots)."""
    clean = raw.cleaned(rates)
    rest = np.setdiff1d(np.arange(len(clean.tokens)), knots)
    if len(rest) and len(scored):
        ratio = clean.log_ratio(rates)
        off = (between_knots(ratio, clean.tokens, knots) - ratio)[scored][:, rest]
        lowered = np.log(clean.time_us / raw.time_us)[scored][:, rest]
        yield off.T, (off + lowered).T  # every second shape is scored


def moe_shapes(raw: MoeTable, rates: Rates, inside: bool) -> Iterator[Errors]:
    """Each model's shapes in turn, from the other models' shapes.

    ``inside``: models that share their number of chosen experts with another; else the others.
    """
    clean = raw.cleaned(rates)
    surface = fit_moe(clean, rates)
    for mine, alike in groups(clean.shapes):
        if alike == inside and not mine.all():
            off = surface.some(~mine).unmeasured(clean.shapes[mine], rates)
            off -= surface.log_ratio[mine]
            yield off, off + np.log(clean.time_us[mine] / raw.time_us[mine])


def moe_ranks(raw: MoeTable, rates: Rates) -> Iterator[Errors]:
    """Each shape in turn whose model was timed on fewer and on more ranks, from all others."""
    clean = raw.cleaned(rates)
    surface = fit_moe(clean, rates)
    for mine, _ in groups(clean.shapes):
        ranks = clean.shapes[:, 5]
        inner = mine & (ranks > ranks[mine].min()) & (ranks < ranks[mine].max())
        for one in np.flatnonzero(inner):
            alone = np.arange(len(ranks)) == one
            off = surface.some(~alone).unmeasured(clean.shapes[alone], rates)
            off -= surface.log_ratio[alone]
            yield off, off + np.log(clean.time_us[alone] / raw.time_us[alone])


def messages(rows: pd.DataFrame) -> Iterator[Errors]:
    """Every inner message size in turn: neighbours a factor of 4 apart."""
    ordered = rows.sort_values("num_bytes").reset_index(drop=True)
    size, time = (ordered[c].to_numpy(np.float64) for c in ("num_bytes", "time_us"))
    inner = range(1, len(ordered) - 1)
    predicted = [fit_reduce(ordered.drop(out)).time_us(size[out]) for out in inner]
    yield _errors(np.array(predicted), time[1:-1], rising(time, 0)[1:-1])
