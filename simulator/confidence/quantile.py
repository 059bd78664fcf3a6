"""The load that a share of all replications carries, from the crossings of a few.

Logarithms of crossings are taken as normally distributed. Then a quantile lies ``k`` standard
deviations below the mean of ``n`` of them, where ``k sqrt(n)`` is a quantile of the noncentral t
distribution (the tolerance factor of a normal sample): the median estimate has the quantile of
0.5. So the estimate does not depend on how many replications there are, and the interval is that of
the quantile itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import nctdtrit, ndtri, stdtrit

LEVEL = 0.97
"""Of the interval of a fixed number. With the rule of
:func:`sarathi_sim.experiments.capacity.search.replications`, which stops when the interval is
narrow, 95 % remain (tests/experiments/test_quantile.py)."""


class Estimate(NamedTuple):
    """A quantile, and its 95 % interval."""

    value: float
    interval: tuple[float, float]


def quantile(values: Sequence[float], share: float) -> Estimate:
    """The value that ``share`` of all replications lies below, from a sample of positive values.

    Of one value, or of values that are all alike, that value.
    """
    count, logs = len(values), np.log(values)
    mean = float(logs.mean())
    deviation = float(logs.std(ddof=1)) if count > 1 else 0.0
    if deviation < 1e-12:
        return Estimate(math.exp(mean), (math.exp(mean), math.exp(mean)))
    low, middle, high = (math.exp(mean - k * deviation) for k in _factors(count, share))
    return Estimate(middle, (low, high))


@lru_cache(maxsize=256)
def _factors(count: int, share: float) -> tuple[float, float, float]:
    """Standard deviations below the mean: of the interval's lower end, the middle, the upper."""
    root = math.sqrt(count)
    below = -float(ndtri(share)) * root
    tail = (1 - LEVEL) / 2
    low, middle, high = nctdtrit(count - 1, below, [1 - tail, 0.5, tail]) / root
    return float(low), float(middle), float(high)


def spread(values: Sequence[float]) -> float:
    """The standard deviation of one replication, relative to their mean; NaN of a single one."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean, and Student's 95 % interval of it; of a single value no more than that."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, (mean, mean)
    half = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count))
    return mean, (mean - half, mean + half)
