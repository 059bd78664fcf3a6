"""The two sets of op times that every claim is computed with.

``predicted`` are the calibrated devices: constants from public kernel measurements, nothing of the
paper. ``paper-calibrated`` are the same with a few constants per device fitted to some of
the paper's numbers (``data/paper/calibration.yaml``; ``constants.py`` writes it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cache, cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sarathi_sim.experiments.run.machine import Machine
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import GEMMS, LAYER_GEMMS
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import parse, strict_dataclass
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes, Scaled, TimeBySize

Variant = Literal["predicted", "paper-calibrated"]
VARIANTS: tuple[Variant, ...] = ("predicted", "paper-calibrated")

TILE = 128
_LARGE = 4096  # tokens at which a GEMM runs at its full rate


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
    """One device's constants, the claims they were fitted to, and the claims derived from these."""

    constants: Constants
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
    path = data_dir() / "paper" / "calibration.yaml"
    return parse(Calibration, read_mapping(path), path)


class Lab:
    """The machines of one variant, each made at its first use.

    ``constants`` are fitted to the paper, by device; a device without constants is as shipped.
    ``change`` replaces a machine's op times, for controls.
    """

    def __init__(
        self,
        variant: Variant,
        constants: dict[str, Constants] | None = None,
        change: Callable[[OpTimes], OpTimes] | None = None,
    ) -> None:
        self.variant = variant
        self._change = change
        self.fitted: frozenset[str] = frozenset()
        self._constants = constants or {}
        if variant == "paper-calibrated" and constants is None:
            calibration = load_calibration()
            self._constants = {n: d.constants for n, d in calibration.devices.items()}
            self.fitted = calibration.fitted
        self._machines: dict[tuple[str, str, int], Machine] = {}

    def machine(self, device: str, model: str, tp: int = 1) -> Machine:
        """One tensor-parallel group of ``tp`` GPUs that holds all of a model's layers."""
        key = (device, model, tp)
        if key not in self._machines:
            ops = _op_times(*key)
            constants = self._constants.get(device)
            if constants is not None:
                ops = calibrated(ops, constants)
            if self._change is not None:
                ops = self._change(ops)
            self._machines[key] = Machine(ops, device)
        return self._machines[key]

    @cached_property
    def untiled(self) -> Lab:
        """The lab without a step of GEMM times past a multiple of the tile."""
        return Lab(self.variant, self._constants, untiled)

    @property
    def a6000(self) -> Machine:
        """LLaMA-13B on one A6000, where most of the paper was measured."""
        return self.machine("a6000", "llama-13b")

    @property
    def a100(self) -> Machine:
        """LLaMA-33B on one A100."""
        return self.machine("a100-80g-sxm", "llama-33b")


def calibrated(ops: OpTimes, constants: Constants) -> OpTimes:
    """Op times with the constants applied; other ops stay as they are."""
    if constants.p is not None:
        gemms = {op: partial(_gemm_s, ops.by_rows[op], constants, constants.p) for op in GEMMS}
        ops = with_rows(ops, gemms)
    return replace(
        ops,
        prefill=Scaled(ops.prefill, constants.attn_prefill),
        decode=Scaled(ops.decode, constants.attn_decode),
        whole_layer=replace(ops.whole_layer, both_s=constants.mixed_us * 1e-6),
    )


def _gemm_s(time: TimeBySize, c: Constants, p: float, rows: ArrayLike) -> Floats:
    """A GEMM's times by rows, from the shipped ones at its two limits.

    Up to one tile the kernel is bound by memory, and which tile it uses hardly shows; beyond, a
    started tile costs as much as a whole one.
    """
    rows = np.asarray(rows, np.float64)
    padded = np.where(rows <= TILE, rows, np.ceil(rows / TILE) * TILE)
    read, compute = c.read * time(1), c.compute * time(_LARGE) / _LARGE * padded
    return np.asarray((read**p + compute**p) ** (1 / p))


def untiled(ops: OpTimes) -> OpTimes:
    """Op times whose GEMMs grow evenly from one whole tile to the next, without its step."""
    gemms = {op: partial(_between_tiles, ops.linear[op]) for op in LAYER_GEMMS}
    return with_rows(ops, gemms)


def with_rows(ops: OpTimes, by_rows: Mapping[str, TimeBySize]) -> OpTimes:
    """The op times with other times by rows for the ops of ``by_rows``."""
    return replace(ops, by_rows={**ops.by_rows, **by_rows})


def _between_tiles(time: TimeBySize, rows: ArrayLike) -> Floats:
    rows = np.asarray(rows, np.float64)
    below = np.maximum(TILE, np.floor(rows / TILE) * TILE)
    part = (rows - below) / TILE
    between = (1 - part) * time(below) + part * time(below + TILE)
    return np.where(rows <= TILE, time(rows), between)


@cache
def _op_times(device: str, model: str, tp: int) -> OpTimes:
    return modelled_times(DeviceTimes(device, load_model(model), tp))
