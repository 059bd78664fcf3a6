"""Random variation of stage times, from a seeded stream of its own."""

from __future__ import annotations

import math

import numpy as np

from sarathi_sim.policies.batch import Batch
from sarathi_sim.simulator.loop.pipeline import nominal_times
from sarathi_sim.simulator.loop.quantum import ROUNDER, quantize
from sarathi_sim.simulator.loop.switches import Switches


class Jitter:
    """Log-normal factors with mean 1 and coefficient of variation ``cv``, one per stage and batch.

    The stream depends only on ``seed``, not on the number of factors per call.
    """

    def __init__(self, cv: float, num_stages: int, seed: np.random.SeedSequence) -> None:
        if not 0 < cv < 10:
            raise ValueError(f"jitter must lie between 0 and 10, not {cv}")
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._num_stages = num_stages
        self._generator = np.random.default_rng(seed)
        self._block: list[list[float]] = []

    def factors(self) -> list[float]:
        """One factor for each stage."""
        if not self._block:
            normal = self._generator.standard_normal((1024, self._num_stages))
            self._block = np.exp(self._sigma * normal - self._sigma**2 / 2)[::-1].tolist()
        return self._block.pop()


class JitteredService:
    """Predicted stage times with random variation (a
    :class:`~sarathi_sim.simulator.loop.replica.Service`)."""

    def __init__(
        self, layers: tuple[int, ...], switches: Switches, seed: np.random.SeedSequence
    ) -> None:
        self._layers = layers
        self._turnaround_s = float(quantize(switches.turnaround_s))
        self._jitter = Jitter(switches.jitter, len(layers), seed)

    def __call__(
        self, batch: Batch, nominal: tuple[float, float, float, float]
    ) -> tuple[list[float], list[float], float]:
        """Seconds on each stage, on each link, and the turn-around; ``nominal`` as predicted."""
        durations, sends = nominal_times(self._layers, *nominal)
        factors = self._jitter.factors()
        varied = [(d * f + ROUNDER) - ROUNDER for d, f in zip(durations, factors, strict=True)]
        return varied, sends, self._turnaround_s
