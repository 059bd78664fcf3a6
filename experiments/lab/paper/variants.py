"""The two sets of op times that every claim is computed with.

``predicted`` are the calibrated devices: constants from public kernel measurements, nothing of the
paper. ``paper-calibrated`` are the same with a few constants per device fitted to some of
the paper's numbers (``data/paper/calibration.yaml``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import cache, cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import GEMMS, LAYER_GEMMS
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.profiler.storage.plain_yaml import load_shipped
from sarathi_sim.profiler.storage.strict import strict_dataclass
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes, Scaled, TimeBySize
from ...run.machine import Machine

Variant = Literal["predicted", "paper-calibrated"]
VARIANTS: tuple[Variant, ...] = ("predicted", "paper-calibrated")

TILE = 128
LARGE = 4096
"""Rows at which an op runs at its full rate."""


@strict_dataclass
class Constants:
    """The constants fitted to the paper for one device. Factors multiply the shipped op's times.

    ``read`` and ``compute`` are factors on a GEMM's two limits, the time to read its weights and
    the time per row at full rate; ``p`` joins them: (read^p + compute^p)^(1/p), the rows rounded
    up to whole tiles of 128. Without ``p``, GEMMs are as shipped. ``mixed_us`` is the extra time of
    one layer of an iteration with both a prompt's chunk and decodes.
    """

    read: float = 1.0
    compute: float = 1.0
    p: float | None = None
    attn_prefill: float = 1.0
    attn_decode: float = 1.0
    mixed_us: float = 0.0


@strict_dataclass
class DeviceFit:
    """One device's constants, where their fit starts, the claims they are fitted to, and those that
    follow: sums, differences or quotients of fitted ones, or the same ops at nearly the same sizes.
    """

    constants: Constants
    start: dict[str, float]
    fitted_to: list[str]
    follow: list[str] = field(default_factory=list)


@strict_dataclass
class Calibration:
    """``data/paper/calibration.yaml``."""

    devices: dict[str, DeviceFit]

    @property
    def fitted(self) -> frozenset[str]:
        """Ids of the claims that are not predictions any more."""
        return frozenset(i for d in self.devices.values() for i in (*d.fitted_to, *d.follow))


@cache
def load_calibration() -> Calibration:
    """The shipped fit to the paper."""
    return load_shipped(Calibration, "paper/calibration.yaml")


class Lab:
    """The machines of one variant, each made at its first use. ``constants`` are fitted to the
    paper, by device; without any it is as shipped. ``change`` replaces op times, for controls."""

    def __init__(
        self,
        variant: Variant,
        constants: Mapping[str, Constants] | None = None,
        change: Callable[[OpTimes], OpTimes] = lambda ops: ops,
    ) -> None:
        self.variant, self._change = variant, change
        self.fitted: frozenset[str] = frozenset()
        self._constants = constants or {}
        if variant == "paper-calibrated" and constants is None:
            self._constants = {n: d.constants for n, d in load_calibration().devices.items()}
            self.fitted = load_calibration().fitted
        self._machines: dict[tuple[str, str, int], Machine] = {}

    def machine(self, device: str, model: str, tp: int = 1) -> Machine:
        """One tensor-parallel group of ``tp`` GPUs that holds all of a model's layers."""
        key = (device, model, tp)
        if key not in self._machines:
            ops = shipped(*key)
            if device in self._constants:
                ops = calibrated(ops, self._constants[device])
            self._machines[key] = Machine(self._change(ops), device)
        return self._machines[key]

    @cached_property
    def untiled(self) -> Lab:
        """The lab without a step of GEMM times past a multiple of the tile."""
        return Lab(self.variant, self._constants, untiled)

    @property
    def a6000(self) -> Machine:
        """LLaMA-13B on one A6000, where most of the paper was measured."""
        return self.machine("a6000", "llama-13b")


@cache
def shipped(device: str, model: str, tp: int) -> OpTimes:
    """The op times of the calibrated device."""
    return modelled_times(DeviceTimes(device, load_model(model), tp))


def calibrated(ops: OpTimes, constants: Constants) -> OpTimes:
    """Op times with the constants applied; other ops stay as they are."""
    if constants.p is not None:
        ops = with_rows(ops, partial(_gemm_s, constants, constants.p), GEMMS)
    return replace(
        ops,
        prefill=Scaled(ops.prefill, constants.attn_prefill),
        decode=Scaled(ops.decode, constants.attn_decode),
        whole_layer=replace(ops.whole_layer, both_s=constants.mixed_us * 1e-6),
    )


def _gemm_s(c: Constants, p: float, time: TimeBySize, rows: ArrayLike) -> Floats:
    """A GEMM's times by rows, from the shipped ones at its two limits. Up to one tile the kernel is
    bound by memory; beyond, a started tile costs as much as a whole one."""
    rows = np.asarray(rows, np.float64)
    padded = np.where(rows <= TILE, rows, np.ceil(rows / TILE) * TILE)
    read, compute = c.read * time(1), c.compute * time(LARGE) / LARGE * padded
    return np.asarray((read**p + compute**p) ** (1 / p))


def untiled(ops: OpTimes) -> OpTimes:
    """Op times whose GEMMs grow evenly from one whole tile to the next, without its step."""

    def between_tiles(time: TimeBySize, rows: ArrayLike) -> Floats:
        rows = np.asarray(rows, np.float64)
        below = np.maximum(TILE, np.floor(rows / TILE) * TILE)
        part = (rows - below) / TILE
        between = (1 - part) * time(below) + part * time(below + TILE)
        return np.where(rows <= TILE, time(rows), between)

    return with_rows(ops, between_tiles, LAYER_GEMMS)


def with_rows(
    ops: OpTimes, shape: Callable[[TimeBySize, ArrayLike], Floats], changed: Iterable[str]
) -> OpTimes:
    """The op times with ``shape(time, rows)`` in place of ``time(rows)`` for some ops."""
    by_rows = {op: partial(shape, ops.by_rows[op]) for op in changed}
    return replace(ops, by_rows={**ops.by_rows, **by_rows})
