"""The time of a whole layer beyond the sum of its ops, and of decodes beyond their mean context.

Ops are measured one by one. Two tables of a bundle measure how they interact. A few parameters are
fitted to each; without the tables the sum and the mean are used.

*Whole layers* (``mixed``): a layer of a chunk alone or of decodes alone takes ``scale`` times the
sum of its ops, plus ``extra_s`` (launches, say). A layer with both takes more, within the scale:
the shares ``both`` of the sum and ``decode`` of its decode attention. Reasons are kernels that
share a launch or the caches.

*Skewed decodes* (``attn_decode_skew``): a batch takes the time of equal contexts of ``mean + skew *
(longest - mean)`` tokens. A kernel with skew 0 reads only the existing tokens; with skew 1 it pads
to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.physics.hold_out import Bools, Rows, leave_one_group_out
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import IterationCost, counted_context
from sarathi_sim.simulator.op_times.op_times import SUM, OpTimes, WholeLayer

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
            "kind": np.select([layers.both, layers.decode > 0], ["mixed", "decode"], "prefill"),
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
        prefill = np.where(chunk > 0, cost.prefill_s(np.maximum(chunk, 1), context), 0.0)
        decode = np.where(batch > 0, cost.decode_s(np.maximum(batch, 1), held), 0.0)
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
        return ops + np.where(self.both, terms.mixing_s(ops, decode), 0.0) + terms.extra_s


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
    both, decode = _relative([mixed.ops, mixed.decode], rest, mixed.time, lowest=(-0.5, -0.5))
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


def fit_skew(decode: Callable[[Floats, Floats], Floats], skewed: pd.DataFrame) -> float:
    """The share of the way from the mean to the longest context, from 0 to 1; 0 without rows.

    ``decode(batch, context)`` gives the seconds of equal contexts.
    """
    if skewed.empty:
        return 0.0
    mean, longest, time = _skewed(decode, skewed)
    return _skew(mean, longest, time)


def skew_errors(bundle: Bundle, ops: OpTimes) -> pd.DataFrame:
    """Absolute errors in percent, a row per point of ``attn_decode_skew``.

    Columns: ``mean`` (the mean context alone), ``longest`` (all padded to the longest) and
    ``skew`` (fitted without the points of the same batch size). ``ops`` are the bundle's.
    """
    rows = bundle.attn_decode_skew
    if rows.empty:
        return pd.DataFrame({"mean": [], "longest": [], "skew": []})
    mean, longest, time = _skewed(ops.decode, rows)
    sizes, share = rows["batch_size"].to_numpy(), np.zeros(len(rows))
    for seen, scored in leave_one_group_out(sizes):
        share[scored] = _skew(mean[seen], longest[seen], time[seen])
    context, most = (rows[c].to_numpy(np.float64) for c in ("context_tokens", "max_context_tokens"))
    fitted = ops.decode(sizes.astype(np.float64), counted_context(context, most, share))
    return pd.DataFrame(
        {"mean": _off(mean, time), "longest": _off(longest, time), "skew": _off(fitted, time)}
    )


def _skewed(
    decode: Callable[[Floats, Floats], Floats], rows: pd.DataFrame
) -> tuple[Floats, Floats, Floats]:
    """Seconds with every context at the mean, with every context at the longest, and measured."""
    batch, mean, longest, time_us = (
        rows[name].to_numpy(np.float64)
        for name in ("batch_size", "context_tokens", "max_context_tokens", "time_us")
    )
    return decode(batch, mean), decode(batch, longest), time_us * _MICRO


def _skew(mean: Floats, longest: Floats, time: Floats) -> float:
    """Least squares of relative errors; times are close to linear in the context."""
    step, target = (longest - mean) / time, (time - mean) / time
    return float(np.clip((step @ target) / max(float(step @ step), 1e-12), 0.0, 1.0))


def _off(predicted: Floats, time: Floats) -> Floats:
    return np.asarray(100 * np.abs(predicted / time - 1))
