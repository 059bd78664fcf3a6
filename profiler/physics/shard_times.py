"""Op times without a profile: those of a stack's tables or of a calibrated device, by any size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle, BundleMeta
from sarathi_sim.profiler.bundle.tables import TABLES, empty_table
from sarathi_sim.profiler.facts.device import device_sha256
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, PREFILL
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.physics.device_model import DeviceModel, Provenance
from sarathi_sim.profiler.physics.layer_mix import mean_time

TILE = 128
#: The longest context of the measurements behind the device models.
_DEVICE_CONTEXT = 8192


class ShardTimes(Protocol):
    """How long each op of one tensor-parallel rank of a model takes, in microseconds.

    Inputs are arrays of equal shape. ``added`` (None where that was not measured) gives what each
    of several equal chunks in one call adds: a row for each of ``batches`` chunks. ``meta`` says
    where the times come from, and identifies them; up to ``longest_context`` cached tokens they
    rest on measurements.
    """

    model: ModelSpec
    tp: int

    @property
    def longest_context(self) -> int: ...

    @property
    def meta(self) -> BundleMeta: ...

    @property
    def batches(self) -> Array: ...

    def by_rows(self, op: str, tokens: Array) -> Array:
        """An op by token rows."""

    def prefill(self, chunk: Array, context: Array) -> Array:
        """Attention of one sequence's chunk after ``context`` cached tokens, in a mean layer."""

    def decode(self, batch: Array, context: Array) -> Array:
        """Attention of one token for each of ``batch`` sequences with ``context`` cached tokens."""

    def added(self, chunk: Array) -> Array:
        """What each of several equal chunks in one call adds: shape (batches, chunks)."""

    def all_reduce(self, num_bytes: Array) -> Array:
        """One all-reduce of ``num_bytes`` on each rank."""

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        """One message over a link."""

    def provenance(self) -> dict[str, Provenance]:
        """Of every op."""


class DeviceTimes:
    """Op times of one ``tp`` rank of ``model`` on a calibrated device.

    Raises SpecError for a device without fits, ValueError for a tp that does not fit the model or
    the node.
    """

    longest_context = _DEVICE_CONTEXT
    batches = np.empty(0)

    def __init__(self, device: str, model: ModelSpec, tp: int) -> None:
        self._times = DeviceModel(device)
        self.model, self.tp = model, tp
        if tp > 1 and f"all_reduce_{tp}" not in (self._times.spec.fitted or {}):
            raise ValueError(
                f"device {device}: no all-reduce was fitted for tp {tp}; allowed: 1, 2, 4, 8"
            )
        model.check_tp(tp)
        self._origins = self._times.provenance(model, tp)

    @property
    def meta(self) -> BundleMeta:
        """Where the times come from; the same device files give the same."""
        spec, files = self._times.spec, device_sha256(self._times.spec.name)
        return BundleMeta(
            device=spec.name,
            model=self.model.name,
            model_spec=self.model,
            tp=self.tp,
            source="modelled",
            created=max(fit.date for fit in (spec.fitted or {}).values()),  # of the fit
            generator="device model",
            tile=TILE,
            device_file_sha256=files,
            notes="the fitted device model; its held-out errors are in the device file",
            content_sha256=identity(files, self.model, self.tp),
        )

    def by_rows(self, op: str, tokens: Array) -> Array:
        return self._times.by_rows(op, tokens, self.model, self.tp)

    def prefill(self, chunk: Array, context: Array) -> Array:
        times = self._times
        return mean_time(
            times.attn_prefill, times.prefill_within, chunk, context, self.model, self.tp
        )

    def decode(self, batch: Array, context: Array) -> Array:
        times = self._times
        return mean_time(
            times.attn_decode, times.decode_within, batch, context, self.model, self.tp
        )

    def added(self, chunk: Array) -> Array:
        return np.empty((0, len(chunk)))

    def all_reduce(self, num_bytes: Array) -> Array:
        return self._times.all_reduce(num_bytes, self.tp)

    def send_recv(self, num_bytes: Array, scope: str) -> Array:
        return self._times.send_recv(num_bytes, scope)

    def provenance(self) -> dict[str, Provenance]:
        return self._origins


def identity(*what: object) -> str:
    """The hash of what op times are computed from."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


def asked_at(times: ShardTimes, sizes: Bundle) -> Bundle:
    """The bundle of these times at the sizes of another one's ops, transfers and attention."""

    def timed(rows: pd.DataFrame, time_us: Callable[..., Array], *keys: str) -> pd.DataFrame:
        rows = rows.drop(columns=[name for name in rows if name in _MEASURED])
        asked = time_us(*(rows[key].to_numpy(np.float64) for key in keys))
        return rows.assign(time_us=rounded_us(asked))

    none = empty_table(TABLES[ALL_REDUCE])
    linear = [
        timed(rows, partial(times.by_rows, str(op)), "num_tokens")
        for op, rows in sizes.linear.groupby("op")
    ]
    messages = [
        timed(rows, partial(times.send_recv, scope=str(scope)), "num_bytes")
        for scope, rows in sizes.send_recv.groupby("scope")
    ]
    return Bundle(
        times.meta,
        pd.concat(linear, ignore_index=True),
        timed(sizes.attn_prefill, times.prefill, *TABLES[PREFILL].key),
        timed(sizes.attn_decode, times.decode, *TABLES[DECODE].key),
        timed(sizes.all_reduce, times.all_reduce, "num_bytes") if times.tp > 1 else none,
        pd.concat(messages, ignore_index=True) if messages else sizes.send_recv,
    )


#: Columns that a bundle has only of what was measured.
_MEASURED = ("time_us", *TABLES[PREFILL].extras)


def rounded_us(times_us: Array) -> Array:
    """Round to six digits: more than the precision, the same text on every machine."""
    return np.array([float(f"{t:.6g}") for t in times_us])
