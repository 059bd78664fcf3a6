"""The time of a whole layer beyond the sum of its ops, and of decodes beyond their mean context.

Ops are measured one by one. Two tables of a bundle measure how they interact. A few parameters are
fitted to each; without the tables the sum and the mean are used.

*Whole layers* (``mixed``): a layer of a chunk alone or of decodes alone takes ``scale`` times the
sum of its ops, plus ``extra_s`` (launches, say). A layer with both takes more, within the scale:
the shares ``both`` of the sum and ``decode`` of its decode attention. Reasons are kernels that
share a launch or the caches.

*Skewed decodes* (``attn_decode_skew``): a batch takes the time of equal contexts of its mean, and a
share of what equal contexts of its longest take longer (``Skew`` in ``op_times.py``). This is used
only where it predicts batch sizes that its fit did not see better than the mean context does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.physics.fit import Bools, Rows, leave_one_group_out
from ..loop.records import Floats
from .iteration import IterationCost
from .op_times import MEAN, SUM, OpTimes, Skew, WholeLayer

#: Weight of the prior "no such effect", in measured points.
_PRIOR = 0.05
_MICRO = 1e-6


def fit_whole_layer(ops: OpTimes, mixed: pd.DataFrame) -> WholeLayer:
    """The terms fitted to a bundle's ``mixed`` table; SUM if it is empty."""
    return _fit_layer(_Layers.of(ops, mixed)) if len(mixed) else SUM


def interaction_errors(bundle: Bundle, ops: OpTimes) -> pd.DataFrame:
    """Absolute held-out errors in percent, a row per measured layer.

    Columns: kind (``mixed``, ``prefill`` or ``decode``), ``sum`` (of the ops, as measured one by
    one) and ``measured`` (with the whole-layer terms). Layers with the same number of tokens are
    held out together. ``ops`` are the bundle's.
    """
    if bundle.mixed.empty:
        return pd.DataFrame({"kind": [], "sum": [], "measured": []})
    layers = _Layers.of(ops, bundle.mixed)
    predicted = layers.ops.copy()
    for fitted, scored in leave_one_group_out(layers.tokens):
        predicted[scored] = layers.take(scored).predict(_fit_layer(layers.take(fitted)))
    return pd.DataFrame(
        {
            "kind": np.select(
                [layers.both, layers.decode > 0],
                ["mixed", "decode"],
                "prefill",
            ),
            "sum": _off(layers.ops, layers.time),
            "measured": _off(predicted, layers.time),
        }
    )


@dataclass(frozen=True, eq=False)
class _Layers:
    """Measured layers: tokens; seconds of the layer, of its ops one by one, of decode attention."""

    tokens: npt.NDArray[np.int64]
    time: Floats
    ops: Floats
    decode: Floats
    both: Bools

    @classmethod
    def of(cls, ops: OpTimes, mixed: pd.DataFrame) -> _Layers:
        names = ("chunk_tokens", "context_tokens", "batch_size", "decode_context_tokens")
        chunk, context, batch, held = (mixed[name].to_numpy(np.int64) for name in names)
        cost = IterationCost(ops)
        prefill = np.where(
            chunk > 0,
            cost.prefill_s(np.maximum(chunk, 1), context),
            0.0,
        )
        decode = np.where(
            batch > 0,
            cost.decode_s(np.maximum(batch, 1), held),
            0.0,
        )
        parts = cost.layer_parts(chunk + batch)  # whole layers are timed without all-reduces
        total = sum((parts[op] for op in ops.linear), np.zeros(len(mixed)))
        time = mixed["time_us"].to_numpy(np.float64) * _MICRO
        both = (chunk > 0) & (batch > 0)
        return cls(chunk + batch, time, total + prefill + decode, decode, both)

    def take(self, rows: Bools | Rows) -> _Layers:
        return _Layers(
            self.tokens[rows], self.time[rows], self.ops[rows], self.decode[rows], self.both[rows]
        )

    def predict(self, terms: WholeLayer) -> Floats:
        ops, decode = terms.scale * self.ops, terms.scale * self.decode
        return (
            ops
            + np.where(
                self.both,
                terms.mixing_s(ops, decode),
                0.0,
            )
            + terms.extra_s
        )


def _fit_layer(layers: _Layers) -> WholeLayer:
    """Fit the terms of all layers to unmixed ones, then the terms of mixed layers."""
    scale, extra_s = 1.0, 0.0
    alone = layers.take(~layers.both)
    if len(alone.time):
        unit = float(alone.time.min())
        found = _relative(
            [alone.ops, np.full(len(alone.time), unit)], alone.time - alone.ops, alone.time,
            lowest=(-0.5, 0.0),
        )  # fmt: skip
        scale, extra_s = 1.0 + float(found[0]), float(found[1]) * unit
    mixed = layers.take(layers.both)
    if not len(mixed.time):
        return WholeLayer(scale, extra_s)
    rest = (mixed.time - extra_s) / scale - mixed.ops
    both, decode = _relative(
        [mixed.ops, mixed.decode],
        rest,
        mixed.time,
        lowest=(-0.5, -0.5),
    )
    return WholeLayer(scale, extra_s, float(both), float(decode))


def _relative(
    terms: list[Floats], target: Floats, time: Floats, lowest: tuple[float, float]
) -> Floats:
    """Bounded least squares of relative errors, regularised towards 0 by the prior's weight."""
    from scipy.optimize import lsq_linear

    rows = np.stack(terms, axis=-1) / time[:, None]
    towards_0 = np.sqrt(_PRIOR) * np.eye(len(terms))
    solved = lsq_linear(
        np.concatenate([rows, towards_0]),
        np.concatenate([target / time, np.zeros(len(terms))]),
        bounds=(np.array(lowest), np.full(len(terms), np.inf)),
    )
    return np.asarray(solved.x, np.float64)


# Skewed decodes --------------------------------------------------------------------------------


def fit_skew(decode: Callable[[Floats, Floats], Floats], skewed: pd.DataFrame) -> Skew:
    """The law of unequal contexts; MEAN without rows, and where that is no worse on rows of batch
    sizes that were not fitted (by the median of relative errors). ``decode(batch, context)`` gives
    the seconds of equal contexts."""
    if skewed.empty:
        return MEAN
    rows = _Skewed.of(decode, skewed)
    better = np.median(_off(rows.held_out(), rows.time)) < np.median(_off(rows.mean, rows.time))
    return rows.fit() if better else MEAN


def skew_errors(bundle: Bundle, ops: OpTimes) -> pd.DataFrame:
    """Absolute errors in percent, a row per point of ``attn_decode_skew``. Columns: ``mean`` (the
    mean context alone), ``longest`` (all padded to the longest) and ``skew`` (fitted without the
    points of the same batch size). ``ops`` are the bundle's."""
    if bundle.attn_decode_skew.empty:
        return pd.DataFrame({"mean": [], "longest": [], "skew": []})
    rows = _Skewed.of(ops.decode, bundle.attn_decode_skew)
    found = {"mean": rows.mean, "longest": rows.longest, "skew": rows.held_out()}
    return pd.DataFrame({name: _off(predicted, rows.time) for name, predicted in found.items()})


@dataclass(frozen=True, eq=False)
class _Skewed:
    """Decodes of unequal contexts: sequences; seconds with every context at the mean, with every
    context at the longest, and measured."""

    batch: Floats
    mean: Floats
    longest: Floats
    time: Floats

    @classmethod
    def of(cls, decode: Callable[[Floats, Floats], Floats], rows: pd.DataFrame) -> _Skewed:
        names = ("batch_size", "context_tokens", "max_context_tokens", "time_us")
        batch, mean, longest, time_us = (rows[name].to_numpy(np.float64) for name in names)
        return cls(batch, decode(batch, mean), decode(batch, longest), time_us * _MICRO)

    def predict(self, skew: Skew) -> Floats:
        return self.mean + skew.of(self.batch) * (self.longest - self.mean)

    def held_out(self) -> Floats:
        """Each batch size predicted from the others; by the mean where there is no other."""
        predicted = self.mean.copy()
        for seen, scored in leave_one_group_out(self.batch):
            predicted[scored] = self._take(scored).predict(self._take(seen).fit())
        return predicted

    def fit(self) -> Skew:
        """Least squares of relative errors: over the share, for each of some numbers of sequences
        (four an octave up to the largest batch, and infinitely many, which equal errors prefer)."""
        octaves = np.arange(4 * np.log2(self.batch.max()), -1, -1) / 4
        best, least = MEAN, np.inf
        for sequences in (np.inf, *2.0**octaves):
            step = Skew(1.0, sequences).of(self.batch) * (self.longest - self.mean) / self.time
            target = (self.time - self.mean) / self.time
            share = max(0.0, float(step @ target) / max(float(step @ step), 1e-12))
            error = float(((target - share * step) ** 2).sum())
            if error < least - 1e-9:
                best, least = Skew(share, float(sequences)), error
        return best

    def _take(self, rows: Rows) -> _Skewed:
        return _Skewed(
            self.batch[rows],
            self.mean[rows],
            self.longest[rows],
            self.time[rows],
        )


def _off(predicted: Floats, time: Floats) -> Floats:
    return np.asarray(100 * np.abs(predicted / time - 1))
