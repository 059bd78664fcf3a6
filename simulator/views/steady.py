"""Whether a run reached a steady state, and from which request on.

**Overload.** The requests are divided, in order of arrival, into :data:`BLOCKS` blocks of equal
size.
A run is *overloaded* if the blocks' mean queueing delays rise (Kendall's S, the number of rising
pairs minus that of falling ones, is at least :data:`CRITICAL`: one-sided 1 % for ten values in
random order) and the last block's is more than a tenth of the median latency. Below the capacity
the delays of a queue fluctuate; above it they grow while requests arrive.

**Warm-up.** MSER-5 (White 1997): latencies in order of arrival are averaged in fives. The first
averages are dropped, at most half, so that the standard error of the mean of the rest is smallest.

How often the first rule errs is measured in ``tests/simulator/test_steady.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sarathi_sim.simulator.loop.records import Floats

BLOCKS, CRITICAL = 10, 27
FEWEST = 50
"""Requests below which a run is not judged."""

State = Literal["steady", "overloaded", "closed", "short"]


@dataclass(frozen=True)
class SteadyState:
    """``state`` is closed if all requests arrive at once, and short if there are too few.

    ``kendall_s`` is the trend of the queueing delay, -45 to 45 (0 where not tested);
    ``warmup_requests`` is the number of first requests that a steady state leaves out.
    """

    state: State
    kendall_s: int = 0
    warmup_requests: int = 0


def steady_state(arrival_s: Floats, queueing_s: Floats, latency_s: Floats) -> SteadyState:
    """Judge a run by its finished requests, in order of arrival; all in seconds."""
    if not len(arrival_s) or arrival_s[0] == arrival_s[-1]:
        return SteadyState("closed")
    if len(arrival_s) < FEWEST:
        return SteadyState("short")
    rising, last = trend(queueing_s), np.array_split(queueing_s, BLOCKS)[-1]
    if rising >= CRITICAL and last.mean() > 0.1 * np.median(latency_s):
        return SteadyState("overloaded", rising)
    return SteadyState("steady", rising, mser5(latency_s))


def trend(values: Floats) -> int:
    """Kendall's S of the means of :data:`BLOCKS` blocks; 0 of fewer than :data:`FEWEST` values."""
    if len(values) < FEWEST:
        return 0
    return kendall_s(np.array([block.mean() for block in np.array_split(values, BLOCKS)]))


def kendall_s(values: Floats) -> int:
    """Pairs in rising order minus pairs in falling order."""
    first, second = np.triu_indices(len(values), 1)
    return int(np.sign(values[second] - values[first]).sum())


def mser5(values: Floats) -> int:
    """How many of the first values to drop: a multiple of five, at most half."""
    count = len(values) // 5
    if count < 2:
        return 0
    means = values[: 5 * count].reshape(count, 5).mean(axis=1)
    # Sums of the values left when the first d are dropped, for every d at once. Values are centred,
    # because the variance is a difference of two sums.
    centred = means - means.mean()
    left = count - np.arange(count)
    total = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1]
    error = np.maximum(squares - total**2 / left, 0) / left.astype(float) ** 2
    return 5 * int(np.argmin(error[: count // 2 + 1]))
