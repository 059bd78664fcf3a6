"""Random variation of stage times, from a seeded stream of its own."""

from __future__ import annotations

import math

import numpy as np


class Jitter:
    """Log-normal factors with mean 1 and coefficient of variation ``cv``, one per stage and batch.

    The stream depends only on ``seed``, never on how many factors are asked for at a time.
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
