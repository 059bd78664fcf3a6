"""Rows left out of a stack's fits, and the errors on them: one protocol for every table.

A fold (:mod:`sarathi_sim.profiler.physics.fit`) has rows to fit and rows to score: what was
fitted to the former predicts the latter. A table has several kinds of hold-outs: between its sizes,
between its shapes or head counts, and beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.facts.layer_kinds import Indexer
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
from sarathi_sim.profiler.kernels.message_curves import ExchangeCurves, fit_reduce
from sarathi_sim.profiler.kernels.moe_surface import MoeTable, Rates, between_knots, fit_moe, groups
from sarathi_sim.profiler.kernels.sparse_law import fit_sparse
from sarathi_sim.profiler.kernels.stack_file import KernelFit, LeftOut, StoredSurface
from sarathi_sim.profiler.physics.fit import Folds, Rows, leave_one_group_out, median_p95_worst
from sarathi_sim.profiler.physics.prompt_law import NEAR_CALLS, PromptLaw

#: Log errors against the cleaned rows, and against the rows as they were measured.
Errors = tuple[Array, Array]
#: Errors by kind of hold-out; computed when they are iterated.
Kinds = dict[str, Iterator[Errors]]
#: Microseconds of rows that belong to one shape.
Law = Callable[[pd.DataFrame], Array]

PAIR = ["heads", "kv_heads"]


@dataclass(frozen=True, eq=False)
class Fitted:
    """One table's surface, and what its record is made of: ``time_us`` were measured, ``clean_us``
    fitted; ``timed_us`` are the times before those below the memory's bound were raised (None: none
    were). ``kinds`` are iterated once."""

    table: str
    surface: StoredSurface
    version: str
    rows: int
    time_us: Array
    clean_us: Array
    kinds: Kinds = field(default_factory=dict)
    timed_us: Array | None = None
    kernel: str = ""
    unlike: str = ""

    @cached_property
    def fit(self) -> KernelFit:
        """The record: the effect of cleaning on the rows, and the errors by kind of hold-out."""
        time, stored = self.time_us, self.surface.arrays()
        known = ~np.isnan(time)
        lowered = np.log(time[known] / self.clean_us[known])
        scores = {kind: summary(errors) for kind, errors in self.kinds.items()}
        raised = np.zeros(1) if self.timed_us is None else (time > self.timed_us)[known]
        return KernelFit(
            version=self.version,
            rows=self.rows,
            numbers=sum(array.size for name, array in stored.items() if name.startswith("log_")),
            repaired_pct=_percent(lowered > np.log(1.05)),
            repaired_far_pct=_percent(lowered > np.log(1.5)),
            left_out={kind: score for kind, score in scores.items() if score is not None},
            raised_pct=_percent(raised),
            kernel=self.kernel,
            unlike=self.unlike,
        )


def _percent(rows: npt.NDArray[Any]) -> float:
    return round(100 * float(rows.mean()), 2)


def fitted(
    table: str, surface: StoredSurface, rows: pd.DataFrame, version: str, kinds: Kinds
) -> Fitted:
    """A surface through ``rows`` as they were measured."""
    time = microseconds(rows)
    return Fitted(table, surface, version, len(rows), time, time, kinds)


def microseconds(rows: pd.DataFrame) -> Array:
    """The times of rows."""
    return rows["time_us"].to_numpy(np.float64)


def summary(parts: Iterable[Errors]) -> LeftOut | None:
    """All errors of one kind of hold-out together; None without any."""
    ravelled = [np.stack([np.ravel(clean), np.ravel(raw)]) for clean, raw in parts]
    errors = np.concatenate(ravelled or [np.empty((2, 0))], axis=1)
    off, measured = errors[:, np.isfinite(errors).all(axis=0)]
    if not len(off):
        return None
    even, odd = np.abs(off[::2]), np.abs(off[1::2])
    covered = [(b <= _covering(a)).mean() for a, b in ((even, odd), (odd, even)) if len(odd)]
    width = 100 * float(np.expm1(_covering(np.abs(off))))
    share = 100 * float(np.mean(covered)) if covered else 100.0
    values = (*median_p95_worst(off), *median_p95_worst(measured)[:2], width, share)
    return LeftOut(len(off), *(round(value, 2) for value in values))


def _covering(errors: Array) -> float:
    """The half-width that covers 90 % of further errors: of n errors in order, the one at
    0.9 (n + 1), or the largest of fewer than nine."""
    return float(np.quantile(errors, 0.9, method="weibull"))


def rows_left_out(
    rows: pd.DataFrame,
    folds: Folds,
    fit: Callable[[pd.DataFrame], Law],
    by: list[str] = PAIR,
    clean: Law | None = None,
) -> Iterator[Errors]:
    """The errors of each fold, of one shape (``by`` these columns) after the other, by the law
    that was fitted to the other rows; ``clean`` gives the cleaned times (None: as measured)."""
    for kept, out in folds:
        law = fit(rows.iloc[kept])
        for _, part in rows.iloc[out].groupby(by, sort=False):
            yield _errors(law(part), microseconds(part), None if clean is None else clean(part))


def _law(time_us: Callable[..., Array], sizes: list[str], by: list[str] = PAIR) -> Law:
    """The times of rows that agree in ``by``, from a function of their sizes and of these."""
    return lambda part: time_us(
        *(part[size].to_numpy(np.float64) for size in sizes), *part[by].iloc[0].astype(int).tolist()
    )


def _errors(predicted: Array, measured: Array, clean: Array | None = None) -> Errors:
    off = np.log(predicted / measured)
    return off if clean is None else np.log(predicted / clean), off


def each(rows: pd.DataFrame, *columns: str, inner: bool = True) -> Folds:
    """Every value of these columns in turn, one column after the other; ``inner``: but for the
    smallest and the largest."""
    folds = []
    for column in columns:
        value = rows[column].to_numpy()
        scored = (value > value.min()) & (value < value.max()) if inner else None
        folds += leave_one_group_out(value, scored)
    return folds


def every_other(place: npt.NDArray[Any], last: npt.NDArray[Any] | int) -> Folds:
    """Each half of the inner places in turn; place 0 and the ``last`` are always fitted."""
    inner = (place > 0) & (place < last)
    halves = (inner & (place % 2 != first) for first in (0, 1))
    return [(np.flatnonzero(~out), np.flatnonzero(out)) for out in halves if out.any()]


def gemm_kinds(rows: pd.DataFrame, clean: GemmCube, raw: GemmCube, knots: Rows, few: bool) -> Kinds:
    """Of a table of GEMMs: token counts (every second n chose the ``knots``, the others are scored
    between them); every other n, then k, or of ``few`` shapes each; the largest sides."""
    count_n, count_k, count_m = clean.time_us.shape
    group = np.cumsum(np.concatenate([[1], np.diff(clean.m) > 1]))  # neighbours one token apart
    small = (np.bincount(group)[group] <= 2) & (group > 1) & (group < group[-1])
    between = [(knots, np.setdiff1d(np.arange(count_m), knots))]
    halves = {axis: every_other(np.arange(n), n - 1) for axis, n in enumerate((count_n, count_k))}
    large = enumerate((clean.n > 16384, clean.k > 16384, clean.m > 8192))
    beyond = {axis: [(np.flatnonzero(~of), np.flatnonzero(of))] for axis, of in large if of.any()}
    return {
        "between": _gemm_tokens(clean, raw, between, np.arange(1, count_n, 2)),
        "token pairs": _gemm_tokens(clean, raw, leave_one_group_out(group, small)),
        "shapes": _gemm_each_shape(rows) if few else _gemm_without(clean, raw, halves),
        "beyond": _gemm_without(clean, raw, beyond),
    }


def _gemm_tokens(
    clean: GemmCube, raw: GemmCube, folds: Folds, n: Rows | slice = slice(None)
) -> Iterator[Errors]:
    for kept, out in folds:
        if len(out):
            times = through(clean, kept), raw.time_us, clean.time_us
            yield _errors(*(each[n][..., out] for each in times))


def _gemm_without(clean: GemmCube, raw: GemmCube, folds: dict[int, Folds]) -> Iterator[Errors]:
    """The indices ``out`` of an axis: nothing of them was fitted or cleaned with."""
    every = [np.arange(size) for size in clean.time_us.shape]
    for axis, kept, out in ((axis, *fold) for axis, of in folds.items() for fold in of):
        fit, rest = ([*every[:axis], some, *every[axis + 1 :]] for some in (kept, out))
        lattice = fit_lattice(raw.some(*fit).cleaned())
        measured, known = raw.some(*rest), clean.some(*rest)
        predicted = [[lattice.time_us(known.m, int(n), int(k)) for k in known.k] for n in known.n]
        yield _errors(np.array(predicted), measured.time_us, known.time_us)


def _gemm_each_shape(rows: pd.DataFrame) -> Iterator[Errors]:
    def fit(kept: pd.DataFrame) -> Law:
        lattice = fit_lattice(gemm_cube(kept).cleaned())
        return _law(lattice.time_us, ["m"], ["n", "k"])

    shape = rows.groupby(["n", "k"], sort=False).ngroup()
    yield from rows_left_out(rows, leave_one_group_out(shape), fit, ["n", "k"])


def decode_kinds(rows: pd.DataFrame, window: float, by_group: bool) -> Kinds:
    """Of decodes: every other context and batch (neighbours a factor of 4 apart); head counts."""

    def fit(kept: pd.DataFrame) -> Law:
        return _decodes(fit_decode(kept, window=window), window)

    places = (np.unique(rows[name], return_inverse=True)[1] for name in ("context", "batch"))
    folds = [fold for place in places for fold in every_other(place, place.max())]
    return {
        "sizes": rows_left_out(rows, folds, fit, clean=fit(rows)),
        "heads": decode_heads(rows, by_group, window),
        "beyond": decode_heads(rows, by_group, window, inside=False),
    }


def decode_heads(
    rows: pd.DataFrame, by_group: bool, window: float = np.inf, inside: bool = True
) -> Iterator[Errors]:
    """Every pair of head counts in turn; ``inside``: those between others, else those beyond."""
    whole = fit_decode(rows, by_group, window)
    law = partial(_decodes, window=window)
    yield from _each_pair(rows, whole, inside, law, clean=law(whole))


def _decodes(grid: HeadGrid, window: float) -> Law:
    return _law(partial(decode_us, grid, window=window), ["batch", "context"])


def prompt_kinds(rows: pd.DataFrame, window: float) -> Kinds:
    """Of prompts: every inner chunk size; head counts."""

    def law(grid: HeadGrid) -> Law:
        return _law(partial(prefill_us, grid, window=window), ["chunk"])

    return {
        "sizes": rows_left_out(rows, each(rows, "chunk"), lambda kept: law(fit_prefill(kept))),
        "heads": _each_pair(rows, fit_prefill(rows), True, law),
        "beyond": _each_pair(rows, fit_prefill(rows), False, law),
    }


def _each_pair(
    rows: pd.DataFrame,
    whole: HeadGrid,
    inside: bool,
    law: Callable[[HeadGrid], Law],
    clean: Law | None = None,
) -> Iterator[Errors]:
    """Each pair of head counts, by the ``whole`` grid without it; of decodes against ``clean``."""
    number, every = rows.groupby(PAIR).ngroup(), np.arange(len(whole.heads))
    if len(every) > 1:
        between = [
            whole.only(every != row).between(heads, kv_heads, decode=clean is not None)
            for row, (heads, kv_heads) in enumerate(whole.heads.tolist())
        ]
        folds = leave_one_group_out(number, (np.array(between) == inside)[number])

        def fit(kept: pd.DataFrame) -> Law:
            return law(whole.only(np.isin(every, number[kept.index])))

        yield from rows_left_out(rows, folds, fit, clean=clean)


def prefix_kinds(rows: pd.DataFrame, prompt: HeadGrid, units: int) -> Kinds:
    """Of chunks after cached tokens: every inner chunk, then every inner context."""

    def fit(kept: pd.DataFrame) -> Law:
        grid = fit_prefix(kept, prompt, units)
        return _law(partial(prefix_us, grid, prompt, units=units), ["chunk", "context"])

    return {"sizes": rows_left_out(rows, each(rows, "chunk", "context"), fit)}


def together(rows: pd.DataFrame, window: float = np.inf) -> Iterator[Errors]:
    """Several prompts in one call: every other batch between one prompt and the most."""
    of = [rows[name] for name in (*PAIR, "chunk")]
    order = rows["batch"].groupby(of).rank() - 1
    most = order.groupby(of).transform("max")

    def fit(kept: pd.DataFrame) -> Law:
        known, log = kept[["chunk", *PAIR, "batch"]].to_numpy(float), np.log(microseconds(kept))

        def time_us(chunk: Array, batch: Array, *pair: int) -> Array:
            return PromptLaw(known, log, np.array(pair), window, NEAR_CALLS).us(chunk, batch)

        return _law(time_us, ["chunk", "batch"])

    return rows_left_out(rows, every_other(order.to_numpy(), most.to_numpy()), fit)


def sparse_kinds(rows: pd.DataFrame, indexer: Indexer) -> Kinds:
    """Of prompts of sparse attention: each chunk, and each number of heads."""

    def fit(kept: pd.DataFrame) -> Law:
        law = fit_sparse(kept, indexer)
        return _law(partial(law.us, indexer=indexer), ["chunk", "context"], ["heads"])

    return {
        kind: rows_left_out(rows, each(rows, column, inner=False), fit, ["heads"])
        for kind, column in (("sizes", "chunk"), ("heads", "heads"))
    }


def moe_tokens(raw: MoeTable, rates: Rates, knots: Rows, scored: Rows) -> Iterator[Errors]:
    """The token counts that are no knots, of the ``scored`` shapes (the others chose the knots)."""
    clean = raw.cleaned(rates)
    rest = np.setdiff1d(np.arange(len(clean.tokens)), knots)
    if len(rest) and len(scored):
        ratio = clean.log_ratio(rates)
        off = (between_knots(ratio, clean.tokens, knots) - ratio)[scored][:, rest]
        lowered = np.log(clean.time_us / raw.time_us)[scored][:, rest]
        yield off.T, (off + lowered).T  # every second shape is scored


def moe_kinds(raw: MoeTable, rates: Rates, wide: bool) -> Kinds:
    """Each model's shapes in turn, from the other models': of models that share their number of
    chosen experts with another (``shapes``), and of the others (``beyond``). ``wide``: also each
    shape whose model was timed on fewer and on more ``ranks``."""
    model, alike, inner = (np.zeros(len(raw.shapes), dtype=of) for of in (int, bool, bool))
    for number, (mine, shared) in enumerate(groups(raw.shapes)):
        ranks = raw.shapes[:, 5]
        model[mine], alike[mine] = number, shared
        inner |= mine & (ranks > ranks[mine].min()) & (ranks < ranks[mine].max())
    folds = {
        "shapes": leave_one_group_out(model, alike),
        "beyond": leave_one_group_out(model, ~alike),
    }
    if wide:
        folds["ranks"] = leave_one_group_out(np.arange(len(model)), inner)
    return {kind: _moe_left_out(raw, rates, each_of) for kind, each_of in folds.items()}


def _moe_left_out(raw: MoeTable, rates: Rates, folds: Folds) -> Iterator[Errors]:
    clean = raw.cleaned(rates)
    surface = fit_moe(clean, rates)
    for kept, out in folds:
        others = np.isin(np.arange(len(clean.shapes)), kept)
        off = surface.some(others).unmeasured(clean.shapes[out], rates) - surface.log_ratio[out]
        yield off, off + np.log(clean.time_us[out] / raw.time_us[out])


def messages(rows: pd.DataFrame) -> Iterator[Errors]:
    """Every inner message size in turn: neighbours a factor of 4 apart."""
    ordered = rows.sort_values("num_bytes").reset_index(drop=True)
    clean = rising(microseconds(ordered), 0)

    def fit(kept: pd.DataFrame) -> Law:
        return _law(fit_reduce(kept).time_us, ["num_bytes"], [])

    folds = leave_one_group_out(ordered.index, ordered.index.isin(ordered.index[1:-1]))
    return rows_left_out(ordered, folds, fit, ["num_bytes"], lambda part: clean[part.index])


def exchange_kinds(whole: ExchangeCurves) -> Kinds:
    """Errors, each from all others: of an inner token count (``sizes``); of a model that was
    measured with one number of ranks (``shapes``), by other models; and of a model's number of
    ranks among several (``ranks``). Both within the numbers of ranks that are left."""
    every, tokens = np.arange(len(whole.shapes)), np.arange(len(whole.tokens))

    def off(curves: ExchangeCurves, row: int, at: Rows) -> Errors:
        times = curves.time_us(whole.tokens[at], tuple(whole.shapes[row].tolist()))
        error = np.log(times) - whole.log_us[row, at]
        return error, error

    def sizes() -> Iterator[Errors]:
        for kept, out in leave_one_group_out(tokens, (tokens > 0) & (tokens < tokens[-1])):
            left = replace(
                whole,
                tokens=whole.tokens[kept],
                log_us=whole.log_us[:, kept],
            )
            yield from (off(left, row, out) for row in every.tolist())

    def without(ranks: bool) -> Iterator[Errors]:
        of_model = np.unique(
            whole.shapes[:, :3],
            axis=0,
            return_inverse=True,
        )[1].reshape(-1)
        scored = (np.bincount(of_model)[of_model] > 1) == ranks
        for kept, out in leave_one_group_out(every, scored):
            others, mine = whole.shapes[kept, 3], whole.shapes[out[0], 3]
            if others.min() <= mine <= others.max():
                yield off(
                    whole.some(np.isin(every, kept)),
                    int(out[0]),
                    tokens,
                )

    return {"sizes": sizes(), "shapes": without(False), "ranks": without(True)}
