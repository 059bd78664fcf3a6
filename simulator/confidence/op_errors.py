"""The errors of a bundle's op times, and joint samples of them.

Errors are normal on the logarithm of an op's time and of two kinds: one *common* to all sizes of
an op (another efficiency of the kernel), and *local* ones, shared by the sizes of one octave. Two
sources add up:

- a bundle's own regression, by its held-out residuals, local: inside the measured region, and
  growing with the octaves beyond it;
- for an op that was not measured on this shape (marked ``modelled``, or in an imported bundle
  ``scaled`` or ``interpolated``), the held-out error of the device's calibrated model, or
  ``UNKNOWN`` if the device has none; for a ``modelled`` op also the difference of another software
  stack's kernels (``stack_pct``). If its origin is in doubt (``DOUBT``), a faster kernel may run
  than the one that was timed: this error is common, and only makes times shorter.

If whole layers were measured, their error beyond their ops' errors is a separate error.

Not included are common errors of all measurements of a bundle (clocks, drivers, another library).
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np

from sarathi_sim.profiler.bundle.schema import BundleMeta
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.physics.shard_times import DOUBT
from sarathi_sim.profiler.storage.strict import SpecError
from ..loop.records import Floats
from ..op_times.interaction import interaction_errors
from ..op_times.op_times import OpTimes
from ..op_times.regression import kept_of
from .bands import UNKNOWN, Band, covering_width, fit_band
from .held_out import OpTable, modelled_tables, op_tables

COMMON_SHARE = 0.25
"""The share of a device model's held-out error variance that all sizes of one shape have in common.

Measured on the public data with the hold-outs of ``calibrate``: 0.05 (A100) and 0.23 (A6000) for
GEMMs, 0.01 to 0.58 for attention.
"""

NORMAL_90, NORMAL_95 = 1.645, 1.96
"""Half-widths of a normal's central 90 and 95 % in standard deviations."""

OCTAVES = 48

_MODELLED = Band(inside=0.0, edges=0.0, beyond=UNKNOWN, floor=0.0)
"""The band of modelled op times: no regression error up to the sizes of :func:`modelled_tables`,
an assumed one beyond."""


@dataclass(frozen=True)
class OpError:
    """One op's errors: standard deviations on the logarithm of its time. ``common`` and ``local``
    come from the device model behind the op (0 if it was measured), ``band`` from the regression,
    by place. ``slow`` is common, too, and only makes times shorter."""

    table: OpTable
    band: Band
    common: float
    local: float
    slow: float = 0.0

    def sigmas(self, points: Floats) -> Floats:
        """The local standard deviation at ``points``, both sources together."""
        own = self.band.half_widths(self.table, points) / NORMAL_90
        return np.asarray(np.hypot(own, self.local))


@dataclass(frozen=True)
class LayerError:
    """The error of measured layers beyond their ops' errors, with the fitted whole-layer terms: one
    local standard deviation for all sizes, on the logarithm of a layer's time."""

    local: float
    common: float = 0.0
    slow: float = 0.0

    def sigmas(self, points: Floats) -> Floats:
        """The same everywhere."""
        return np.full(len(points), self.local)


@lru_cache(maxsize=8)
def layer_error(ops: OpTimes) -> LayerError:
    """From the held-out errors of the bundle's whole layers, which it must have."""
    bundle = ops.bundle
    assert bundle is not None

    def off() -> Floats:
        return interaction_errors(bundle, ops)["measured"].to_numpy(np.float64) / 100

    misses = np.log1p(kept_of(bundle, "whole layers", off))
    return LayerError(covering_width(misses, UNKNOWN) / NORMAL_90)


@lru_cache(maxsize=8)
def op_errors(ops: OpTimes) -> dict[str, OpError]:
    """The errors of every op, by name (``send_recv_<scope>`` for transfers)."""
    bundle, meta = ops.bundle, ops.meta
    tables, widths = [] if bundle is None else op_tables(bundle), np.empty((0, 4))
    if bundle is not None:
        widths = kept_of(
            bundle,
            "bands by octave",
            lambda: np.array([astuple(fit_band(table)) for table in tables]),
        )
    fitted = {table.op for table in tables}
    asked = [table for table in modelled_tables(ops) if table.op not in fitted]
    try:
        device = load_device(meta.device)
    except SpecError:  # a device of the user's own: nothing was fitted for it
        device = None
    return {
        table.op: OpError(
            table,
            Band(*map(float, width)),
            *_model_error(meta, table.op, device),
        )
        for table, width in [
            *zip(tables, widths, strict=True),
            *((table, astuple(_MODELLED)) for table in asked),
        ]
    }


def _model_error(meta: BundleMeta, op: str, device: DeviceSpec | None) -> tuple[float, ...]:
    """(common, local, slow) standard deviations of the device model behind an op; zeros without
    one."""
    if meta.kernels is not None:
        half_width = meta.kernels.half_width_pct.get(op, 100 * UNKNOWN)
        sigma = float(np.log1p(half_width / 100)) / NORMAL_90
        in_doubt = DOUBT in str(meta.environment.get(op, ""))
        return (0.0, 0.0, sigma) if in_doubt else _split(sigma)
    mark = str(meta.environment.get(op, meta.source)).partition(":")[0]
    if mark not in ("modelled", "scaled", "interpolated"):
        return 0.0, 0.0
    behind = device.behind(op, meta.tp) if device is not None else []
    if not behind:
        return _split(UNKNOWN / NORMAL_90)
    # The 95th percentile, not the median: errors have heavy tails, and large errors set the band.
    p95_pct = float(np.mean([fit.held_out.p95_pct for fit in behind]))
    # Interpolated and scaled times come from measurements of the source's own stack.
    stack_pct = float(np.mean([fit.stack_pct for fit in behind])) if mark == "modelled" else 0.0
    return _split(float(np.hypot(p95_pct / 100 / NORMAL_95, stack_pct / 100 / NORMAL_90)))


def _split(sigma: float) -> tuple[float, float]:
    return sigma * float(np.sqrt(COMMON_SHARE)), sigma * float(np.sqrt(1 - COMMON_SHARE))


def standard_normals(key: str, samples: int) -> Floats:
    """Draws for ``key``, shape (1 + OCTAVES, samples): a common draw, and one per octave. Samples
    come in pairs of opposite sign, so their mean is 0. The same key gives the same draws, so errors
    that two runs share cancel in their ratio."""
    half = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(
        (1 + OCTAVES, samples // 2)
    )
    return np.concatenate([half, -half], axis=1)
