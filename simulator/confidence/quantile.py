"""The load that a share of all replications carries, estimated from the crossings of a few.

Logarithms of crossings are taken as normally distributed. Then a quantile lies ``k`` standard
deviations below the mean of ``n`` of them, where ``k sqrt(n)`` is a quantile of the noncentral t
distribution (the tolerance factor of a normal sample). The estimate takes its median, so it does
not depend on the number of replications; the interval covers the quantile itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import nctdtrit, ndtri, stdtrit

LEVEL = 0.97
"""Confidence of the interval for a fixed number of replications. The rule of
:func:`sarathi_sim.experiments.capacity.search.replications`, which stops when the interval is
narrow, leaves 95 % (tests/experiments/test_quantile.py)."""


class Estimate(NamedTuple):
    """A quantile, and its 95 % interval."""

    value: float
    interval: tuple[float, float]


def quantile(values: Sequence[float], share: float) -> Estimate:
    """The value that ``share`` of all replications lies below, from a sample of positive values.
    For a single value, or for equal values, it is this value."""
    count, logs = len(values), np.log(values)
    mean = float(logs.mean())
    deviation = float(logs.std(ddof=1)) if count > 1 else 0.0
    if deviation < 1e-12:
        return Estimate(math.exp(mean), (math.exp(mean), math.exp(mean)))
    low, middle, high = (math.exp(mean - k * deviation) for k in _factors(count, share))
    return Estimate(middle, (low, high))


@lru_cache(maxsize=256)
def _factors(count: int, share: float) -> tuple[float, float, float]:
    """Standard deviations below the mean: for the interval's lower end, the estimate, the upper."""
    root = math.sqrt(count)
    below = -float(ndtri(share)) * root
    tail = (1 - LEVEL) / 2
    low, middle, high = nctdtrit(count - 1, below, [1 - tail, 0.5, tail]) / root
    return float(low), float(middle), float(high)


def spread(values: Sequence[float]) -> float:
    """The standard deviation of replications, relative to their mean; NaN for a single one."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean and its 95 % Student interval; for a single value an interval of width 0."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, (mean, mean)
    half = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count))
    return mean, (mean - half, mean + half)
