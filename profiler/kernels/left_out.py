"""Errors of the surfaces on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels.attention_grid import (
    HeadGrid,
    decode_us,
    fit_decode,
    fit_prefill,
    prefill_us,
)
from sarathi_sim.profiler.kernels.gemm_lattice import (
    GemmCube,
    GemmLattice,
    fit_lattice,
    gemm_cube,
    through,
)
from sarathi_sim.profiler.kernels.moe_surface import MoeTable, between_knots, fit_moe, groups
from sarathi_sim.profiler.kernels.prefix_grid import fit_prefix, prefix_us
from sarathi_sim.profiler.kernels.reduce_curves import cleaned_messages, reduce_curve
from sarathi_sim.profiler.kernels.stack_file import LeftOut
from sarathi_sim.profiler.physics.hold_out import Rows, median_p95_worst
from sarathi_sim.profiler.physics.moe_expected import Rates
from sarathi_sim.profiler.physics.prompt_law import NEAR_CALLS, PromptLaw

#: Log errors against the cleaned rows, and against the rows as they were measured.
Errors = tuple[Array, Array]

_COVER = 0.9


def summary(parts: Iterable[Errors]) -> LeftOut | None:
    """All errors of one kind of hold-out together; None where there are none."""
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
    """What covers 90 % of further errors like these n: the one at 0.9 (n + 1) in their order, or
    the largest of fewer than nine."""
    return float(np.quantile(errors, _COVER, method="weibull"))


def gemm_token_counts(
    clean: GemmCube, raw: GemmCube, knots: Rows, scored: Rows
) -> Iterator[Errors]:
    """The token counts that are no knots, of the ``scored`` n (the others chose the knots)."""
    rest = np.setdiff1d(np.arange(len(clean.m)), knots)
    if len(rest):
        predicted = through(clean, knots)[scored][..., rest]
        yield _errors(predicted, clean.time_us[scored][..., rest], raw.time_us[scored][..., rest])


def gemm_pairs(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """Every inner token count in turn with its neighbour one token on, from what is around."""
    group = np.cumsum(np.concatenate([[1], np.diff(clean.m) > 1]))
    for number in np.unique(group)[1:-1]:
        out = np.flatnonzero(group == number)
        if len(out) > 2:
            continue
        kept = np.setdiff1d(np.arange(len(clean.m)), out)
        predicted = through(clean, kept)[..., out]
        yield _errors(predicted, clean.time_us[..., out], raw.time_us[..., out])


def gemm_shapes(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """Every other n, then k, in turn: no shape with that n (or k) was fitted or cleaned with."""
    every_m = np.arange(len(clean.m))
    for axis, size in enumerate((clean.n, clean.k)):
        for first in (0, 1):
            kept = np.unique([0, *range(first, len(size), 2), len(size) - 1])
            out = np.setdiff1d(np.arange(len(size)), kept)
            n_kept, k_kept = (kept if a == axis else np.arange(len(s)) for a, s in _sides(clean))
            n_out, k_out = (out if a == axis else np.arange(len(s)) for a, s in _sides(clean))
            lattice = fit_lattice(raw.some(n_kept, k_kept, every_m).cleaned())
            yield _scored(
                lattice, clean.some(n_out, k_out, every_m), raw.some(n_out, k_out, every_m)
            )


def gemm_each_shape(rows: pd.DataFrame) -> Iterator[Errors]:
    """Every (n, k) in turn, of a table with few: from all others."""
    for n, k in rows[["n", "k"]].drop_duplicates().to_numpy().tolist():
        out = rows[(rows["n"] == n) & (rows["k"] == k)]
        raw = gemm_cube(rows.drop(out.index))
        predicted = fit_lattice(raw.cleaned()).time_us(out["m"].to_numpy(np.float64), n, k)
        off = np.log(predicted / out["time_us"].to_numpy())
        yield off, off


def gemm_beyond(clean: GemmCube, raw: GemmCube) -> Iterator[Errors]:
    """The sides above 16384 and, apart, token counts above 8192, from the smaller ones."""
    everything = [np.arange(len(s)) for s in (clean.n, clean.k, clean.m)]
    for axis, most in ((0, 16384.0), (1, 16384.0), (2, 8192.0)):
        size = (clean.n, clean.k, clean.m)[axis]
        inside, outside = list(everything), list(everything)
        inside[axis], outside[axis] = np.flatnonzero(size <= most), np.flatnonzero(size > most)
        if len(outside[axis]):
            lattice = fit_lattice(raw.some(*inside).cleaned())
            yield _scored(lattice, clean.some(*outside), raw.some(*outside))


def _sides(cube: GemmCube) -> tuple[tuple[int, Array], ...]:
    return ((0, cube.n), (1, cube.k))


def _scored(lattice: GemmLattice, clean: GemmCube, raw: GemmCube) -> Errors:
    predicted = np.array(
        [[lattice.time_us(clean.m, int(n), int(k)) for k in clean.k] for n in clean.n]
    )
    return _errors(predicted, clean.time_us, raw.time_us)


def _errors(predicted: Array, clean: Array, raw: Array) -> Errors:
    return np.log(predicted / clean), np.log(predicted / raw)


def decode_sizes(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Every other context, then every other batch: neighbours a factor of 4 apart."""
    whole = fit_decode(rows, window=window)
    for column in ("context", "batch"):
        sizes = np.unique(rows[column])
        for first in (0, 1):
            kept = np.unique([0, *range(first, len(sizes), 2), len(sizes) - 1])
            fitted = rows[column].isin(sizes[kept])
            grid = fit_decode(rows[fitted], window=window)
            yield from _decode_errors(grid, whole, rows[~fitted], window)


def decode_heads(
    rows: pd.DataFrame, by_group: bool = False, window: float = np.inf, inside: bool = True
) -> Iterator[Errors]:
    """Every pair of head counts in turn; ``inside``: those between others, else those beyond."""
    whole = fit_decode(rows, by_group, window)
    for grid, out in _each_pair(whole, rows, inside, decode=True):
        yield from _decode_errors(grid, whole, out, window)


def _each_pair(
    whole: HeadGrid, rows: pd.DataFrame, inside: bool, decode: bool
) -> Iterator[tuple[HeadGrid, pd.DataFrame]]:
    """Without each pair of head counts in turn: the grid, and the rows of that pair."""
    for row, (heads, kv_heads) in enumerate(whole.heads.tolist()):
        grid = whole.only(np.arange(len(whole.heads)) != row)
        if len(grid.heads) and grid.between(heads, kv_heads, decode) == inside:
            yield grid, rows[(rows["heads"] == heads) & (rows["kv_heads"] == kv_heads)]


def _decode_errors(
    grid: HeadGrid, whole: HeadGrid, out: pd.DataFrame, window: float
) -> Iterator[Errors]:
    for heads, kv_heads, part in _by_heads(out):
        batch, context = (part[c].to_numpy(np.float64) for c in ("batch", "context"))
        predicted = decode_us(grid, batch, context, heads, kv_heads, window)
        clean = decode_us(whole, batch, context, heads, kv_heads, window)
        yield _errors(predicted, clean, part["time_us"].to_numpy())


def _by_heads(rows: pd.DataFrame) -> Iterator[tuple[int, int, pd.DataFrame]]:
    for _, part in rows.groupby(["heads", "kv_heads"], sort=False):
        yield int(part["heads"].iloc[0]), int(part["kv_heads"].iloc[0]), part


def prefill_sizes(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Every inner chunk size in turn."""
    for chunk in np.unique(rows["chunk"])[1:-1]:
        grid = fit_prefill(rows[rows["chunk"] != chunk])
        yield from _prefill_errors(grid, rows[rows["chunk"] == chunk], window)


def prefill_heads(
    rows: pd.DataFrame, window: float = np.inf, inside: bool = True
) -> Iterator[Errors]:
    """Every pair of head counts in turn; ``inside``: those between others, else those beyond."""
    for grid, out in _each_pair(fit_prefill(rows), rows, inside, decode=False):
        yield from _prefill_errors(grid, out, window)


def together(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Several prompts in one call: every other batch between one prompt and the most."""
    place, sizes = ["heads", "kv_heads", "chunk"], ["chunk", "heads", "kv_heads", "batch"]
    order = rows.groupby(place)["batch"].rank() - 1
    ends = (order == 0) | (order == order.groupby([rows[c] for c in place]).transform("max"))
    for first in (0, 1):
        fitted = ends | (order % 2 == first)
        known, log_us = rows[fitted][sizes].to_numpy(float), np.log(rows["time_us"][fitted])
        for heads, kv_heads, part in _by_heads(rows[~fitted]):
            pair, log = np.array([heads, kv_heads]), log_us.to_numpy()
            law = PromptLaw(known, log, pair, window, NEAR_CALLS)
            predicted = law.us(part["chunk"].to_numpy(float), part["batch"].to_numpy(float))
            off = np.log(predicted / part["time_us"].to_numpy())
            yield off, off


def prefix_sizes(rows: pd.DataFrame, prompt: HeadGrid, units: int) -> Iterator[Errors]:
    """Every inner chunk, then every inner context in turn: neighbours a factor of 4 apart."""
    for column in ("chunk", "context"):
        for size in np.unique(rows[column])[1:-1]:
            grid = fit_prefix(rows[rows[column] != size], prompt, units)
            for heads, kv_heads, out in _by_heads(rows[rows[column] == size]):
                chunk, context = (out[c].to_numpy(np.float64) for c in ("chunk", "context"))
                predicted = prefix_us(grid, prompt, chunk, context, heads, kv_heads, units)
                off = np.log(predicted / out["time_us"].to_numpy())
                yield off, off


def _prefill_errors(grid: HeadGrid, out: pd.DataFrame, window: float) -> Iterator[Errors]:
    for heads, kv_heads, part in _by_heads(out):
        chunk = part["chunk"].to_numpy(np.float64)
        predicted = prefill_us(grid, chunk, heads, kv_heads, window)
        off = np.log(predicted / part["time_us"].to_numpy())
        yield off, off


def moe_tokens(raw: MoeTable, rates: Rates, knots: Rows, scored: Rows) -> Iterator[Errors]:
    """The token counts that are no knots, of the ``scored`` shapes (the others chose the knots)."""
    clean = raw.cleaned()
    rest = np.setdiff1d(np.arange(len(clean.tokens)), knots)
    if len(rest) and len(scored):
        ratio = clean.log_ratio(rates)
        off = (between_knots(ratio, clean.tokens, knots) - ratio)[scored][:, rest]
        lowered = np.log(clean.time_us / raw.time_us)[scored][:, rest]
        yield off.T, (off + lowered).T  # every second one: of other shapes


def moe_shapes(raw: MoeTable, rates: Rates, inside: bool) -> Iterator[Errors]:
    """Each model's shapes in turn, from those of the others.

    ``inside``: models of whose number of chosen experts there is another; else the others.
    """
    clean = raw.cleaned()
    surface = fit_moe(clean, rates)
    for mine, alike in groups(clean.shapes):
        if alike == inside and not mine.all():
            off = surface.some(~mine).unmeasured(clean.shapes[mine], rates)
            off -= surface.log_ratio[mine]
            yield off, off + np.log(clean.time_us[mine] / raw.time_us[mine])


def messages(rows: pd.DataFrame) -> Iterator[Errors]:
    """Every inner message size in turn: neighbours a factor of 4 apart."""
    ordered = rows.sort_values("num_bytes")
    size, time = (ordered[c].to_numpy(np.float64) for c in ("num_bytes", "time_us"))
    inner = np.arange(1, len(size) - 1)
    kept = (np.arange(len(size)) != out for out in inner)
    curves = (reduce_curve(size[rest], time[rest]) for rest in kept)
    predicted = [curve.time_us(size[out]) for out, curve in zip(inner, curves, strict=True)]
    yield _errors(np.array(predicted), cleaned_messages(time)[inner], time[inner])
