"""Whether a run reached a steady state, and from which request on.

**Overload.** A request *waits* while it is in no iteration: before its first chunk, between two
chunks, for a slot or for its KV cache in another pool, after a preemption. The requests are
divided, in order of arrival, into :data:`BLOCKS` blocks of equal size. A run is *overloaded* if the
blocks' mean numbers of waiting requests, counted at each arrival, rise (Kendall's S, the number of
rising pairs minus that of falling ones, is at least :data:`CRITICAL`: one-sided 1 % for ten values
in random order), and if from the first to the last block they rise by what arrives in a tenth of
the median latency. Below the capacity they fluctuate; above it they grow while requests arrive,
in whatever order and place these wait.

**Warm-up.** MSER-5 (White 1997): latencies in order of arrival are averaged in fives. The first
averages are dropped, at most half, so that the standard error of the mean of the rest is smallest.

How often the first rule errs is measured in ``tests/simulator/test_steady.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..loop.records import Floats

BLOCKS, CRITICAL = 10, 27
FEWEST = 50
"""Requests below which a run is not judged."""

State = Literal["steady", "overloaded", "closed", "short"]


@dataclass(frozen=True)
class SteadyState:
    """``state`` is closed if all requests arrive at once, and short if there are too few.

    ``kendall_s`` is the trend of the waiting requests, -45 to 45 (0 where not tested);
    ``warmup_requests`` is the number of first requests that a steady state leaves out.
    """

    state: State
    kendall_s: int = 0
    warmup_requests: int = 0


def waiting_at(
    arrival_s: Floats, finish_s: Floats, begin_s: Floats, end_s: Floats
) -> npt.NDArray[np.int64]:
    """How many earlier requests wait when each arrives: those in the system less those at work.

    ``arrival_s`` and ``finish_s`` (s) are of all requests, arrivals in order; ``begin_s`` and
    ``end_s`` (s) of all stretches of iterations that they took part in, in any order.
    """
    done, *work = (
        np.searchsorted(np.sort(times), arrival_s, "right") for times in (finish_s, begin_s, end_s)
    )
    return np.arange(len(arrival_s)) - done - (work[0] - work[1])


def steady_state(
    arrival_s: Floats, waiting: npt.NDArray[np.int64], latency_s: Floats
) -> SteadyState:
    """Judge a run by its finished requests, in order of arrival: their times in seconds, and the
    requests that were :func:`waiting_at` each arrival."""
    if not len(arrival_s) or arrival_s[0] == arrival_s[-1]:
        return SteadyState("closed")
    if len(arrival_s) < FEWEST:
        return SteadyState("short")
    rising, (first, *_, last) = trend(waiting), np.array_split(waiting, BLOCKS)
    grown_s = (last.mean() - first.mean()) * (arrival_s[-1] - arrival_s[0]) / len(arrival_s)
    if rising >= CRITICAL and grown_s > 0.1 * np.median(latency_s):
        return SteadyState("overloaded", rising)
    return SteadyState("steady", rising, mser5(latency_s))


def trend(values: npt.NDArray[Any]) -> int:
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
