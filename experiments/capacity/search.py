"""From probes to a capacity: the highest load under which an SLO holds.

A search is a generator: it yields the probes that it needs, gets their results, and returns what it
found. Who simulates them, where and in which order, is ``probing.py``'s business, so what is found
does not depend on it.

Each replication (one seed) has a capacity of its own: under its random numbers the same requests
come faster or slower, so its latencies grow with the load, and bisection finds where the SLO
breaks. A pilot with short runs says where to look; full runs then need three or four probes each.
The capacity is the mean over replications, with Student's 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy.special import stdtrit

from experiments.capacity.judgement import Verdict

T = TypeVar("T")
AT_ONCE = math.inf
"""The load of a probe whose requests all arrive at once: about the highest throughput."""
SLOPE = 6.0
"""Of the stress, before any is known."""
SMALLEST = 1e-3
"""Of the throughput: where the SLO breaks even under this load, the capacity is 0."""
LARGEST = 1e3
"""Of the load where a search begins: where the SLO holds even under this one, it always does."""
FRACTIONS = (0.5, 0.7, 0.85, 0.95, 1.05)
"""The loads of the headroom curve, in parts of the capacity."""


@dataclass(frozen=True)
class Probe:
    """One run: ``load`` in requests a second or clients, its seed, its length, and how many times
    longer every op takes than the profile says."""

    load: float
    seed: int
    requests: int
    slower: float = 1.0


@dataclass(frozen=True)
class Probed:
    """A finished probe: its run's key and summary, and how it fares under the SLO."""

    probe: Probe
    run: str
    summary: dict[str, Any]
    verdict: Verdict


Search = Generator[list[Probe], list[Probed], T]


class UnbreakableError(ValueError):
    """No load breaks the SLO."""


@dataclass(frozen=True)
class SearchPlan:
    """How exactly to search. ``whole``: the load counts clients."""

    tolerance: float
    least: int
    most: int
    requests: int
    pilot_requests: int
    seed: int
    whole: bool = False


@dataclass(frozen=True)
class Crossing:
    """Where one replication's SLO breaks, between a load that kept it and one that did not."""

    load: float
    kept: Probed
    broken: Probed

    @property
    def slope(self) -> float:
        """How steeply the stress rises: percent, for a percent of load."""
        return _slope(self.kept, self.broken)


@dataclass(frozen=True)
class Capacity:
    """The highest load under which every replication keeps the SLO: the least of ``crossings``.

    ``mean`` of the crossings, a replication each, has ``interval`` as its 95 % interval. Without a
    crossing all are 0: ``pilot`` then is the probe of the smallest load that was tried. ``curve``
    are single probes at parts of the load, ``at`` one of full length at the capacity itself.
    """

    load: float
    mean: float
    interval: tuple[float, float]
    crossings: tuple[Crossing, ...]
    saturated: Probed | None
    pilot: Crossing | Probed
    curve: tuple[Probed, ...] = ()
    at: Probed | None = None

    @property
    def spread(self) -> float:
        """The standard deviation of one replication, relative to their mean."""
        loads = [crossing.load for crossing in self.crossings]
        return float(np.std(loads, ddof=1) / self.mean) if len(loads) > 1 else float("nan")


def capacity(plan: SearchPlan) -> Search[Capacity]:
    """The search for a deployment's capacity, with its headroom curve."""
    saturated, rough = yield from pilot(plan)
    if not isinstance(rough, Crossing):
        return Capacity(0.0, 0.0, (0.0, 0.0), (), saturated, rough)
    first = yield from crossing(Probe(0, plan.seed, plan.requests), rough.load, rough.slope, plan)
    found = [first]
    wanted = plan.least
    while len(found) < wanted and isinstance(first, Crossing):
        seeds = range(plan.seed + len(found), plan.seed + wanted)
        found += yield from together(
            crossing(Probe(0, seed, plan.requests), first.load, first.slope, plan) for seed in seeds
        )
        loads = [one.load for one in found if isinstance(one, Crossing)]
        if len(loads) == len(found):
            wanted = min(plan.most, replications_needed(loads, plan.tolerance))
    crossings = tuple(one for one in found if isinstance(one, Crossing))
    if len(crossings) < len(found):  # a replication breaks the SLO at any load
        broken = next(one for one in found if not isinstance(one, Crossing))
        return Capacity(0.0, 0.0, (0.0, 0.0), (), saturated, broken)
    mean, (low, high) = mean_and_interval([one.load for one in crossings])
    interval = max(low, 0.0), high
    load = min(one.load for one in crossings)
    loads = [_rounded(load * part, plan) for part in FRACTIONS]
    length = max(plan.pilot_requests, plan.requests // 4)
    short = [Probe(each, plan.seed, length) for each in dict.fromkeys(loads)]
    probed = yield [*short, Probe(_rounded(load, plan), plan.seed, plan.requests)]
    curve, at = tuple(probed[:-1]), probed[-1]
    return Capacity(load, mean, interval, crossings, saturated, rough, curve, at)


def pilot(plan: SearchPlan, slower: float = 1.0) -> Search[tuple[Probed | None, Crossing | Probed]]:
    """A rough capacity from short runs of one seed, and the run with all requests at once."""
    short = Probe(0, plan.seed, plan.pilot_requests, slower)
    if plan.whole:
        found = yield from crossing(short, 32.0, SLOPE, plan)
        return None, found
    (saturated,) = yield [_at(short, AT_ONCE)]
    most = saturated.summary["requests_per_s"]
    found = yield from crossing(short, 0.85 * most, SLOPE, plan)
    return saturated, found


def race(plan: SearchPlan, goal: float, start: float) -> Search[Crossing | Probed]:
    """A rough capacity from short runs, if it reaches ``goal``; else the probe of that load.

    Without a goal (0) the search begins at ``start``.
    """
    like = Probe(0, plan.seed, plan.pilot_requests)
    if goal:
        (first,) = yield [_at(like, _rounded(goal, plan))]
        if not first.verdict.holds:
            return first
    return (yield from crossing(like, goal or start, SLOPE, plan))


def crossing(
    like: Probe, start: float, slope: float, plan: SearchPlan
) -> Search[Crossing | Probed]:
    """Where the SLO breaks for probes ``like`` this one, first looked for at ``start``.

    From the first probe on, the stress and its ``slope`` say where it would be 1, and a load a
    little further brackets it. Then bisection, until the two loads are the tolerance apart: the
    middle is where the stress, linear in both logarithms, would be 1. Returns the probe of the
    smallest load where the SLO breaks even there. Raises UnbreakableError where it holds when all
    requests come at once.
    """
    margin, smallest = 1 + plan.tolerance / 3, SMALLEST * start
    (first,) = yield [_at(like, _rounded(start, plan))]
    kept = first if first.verdict.holds else None
    broken = None if first.verdict.holds else first
    while kept is None or broken is None:
        known = kept or broken
        assert known is not None
        load, up = known.probe.load, kept is not None
        if not up and load <= max(smallest, 1.0 if plan.whole else 0.0):
            return known
        if up and load >= (like.requests if plan.whole else LARGEST * start):
            raise UnbreakableError(
                "the SLO holds under any load: limit ttft or latency, too, or give more "
                f"capacity.requests than {like.requests}"
            )
        factor = margin if up else 1 / margin
        guess = load * min(max(_stress(known) ** (-1 / slope), 0.3), 3.0) * factor
        (further,) = yield [_at(like, _rounded(guess, plan, up))]
        margin = min(margin**2, 2.0)
        if further.verdict.holds:
            kept = further
        else:
            broken = further
    while (gap := broken.probe.load - kept.probe.load) > max(
        plan.tolerance * kept.probe.load, 1.0 if plan.whole else 0.0
    ):
        nearest = 1 / gap if plan.whole else 0.15
        part = min(max(_part(kept, broken), nearest), 1 - nearest)
        inner = kept.probe.load + part * gap
        (middle,) = yield [_at(like, _rounded(inner, plan))]
        if middle.verdict.holds:
            kept = middle
        else:
            broken = middle
    between = kept.probe.load + _part(kept, broken) * gap
    return Crossing(kept.probe.load if plan.whole else between, kept, broken)


def _part(kept: Probed, broken: Probed) -> float:
    """How far from one load to the other the stress would be 1, linear in its logarithm."""
    low, high = math.log(_stress(kept)), math.log(_stress(broken))
    return low / (low - high)


def _slope(kept: Probed, broken: Probed) -> float:
    rise = math.log(_stress(broken) / _stress(kept))
    return min(max(rise / math.log(broken.probe.load / kept.probe.load), 0.5), 50.0)


def _stress(probed: Probed) -> float:
    """The stress, within bounds, and above 1 where the SLO breaks because of overload alone."""
    stress = probed.verdict.stress
    if probed.verdict.holds:
        return min(max(stress, 0.05), 0.9999)
    return min(max(stress, 1.0001), 20.0) if stress > 1 else 1.02


def _at(like: Probe, load: float) -> Probe:
    return Probe(load, like.seed, like.requests, like.slower)


def _rounded(load: float, plan: SearchPlan, up: bool = False) -> float:
    """A load that may be asked for: whole clients, or six digits, as it is printed."""
    if plan.whole:
        return float(max(1, math.ceil(load) if up else round(load)))
    return float(f"{load:.6g}")


def together(searches: Iterable[Search[T]]) -> Search[list[T]]:
    """Searches side by side: each round asks for what all of them need."""
    under_way = dict(enumerate(searches))
    wanted = {number: next(search) for number, search in under_way.items()}
    found: dict[int, T] = {}
    while wanted:
        answers = iter((yield [probe for probes in wanted.values() for probe in probes]))
        for number, probes in list(wanted.items()):
            try:
                wanted[number] = under_way[number].send([next(answers) for _ in probes])
            except StopIteration as done:
                found[number] = done.value
                del wanted[number]
    return [found[number] for number in under_way]


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean, and Student's 95 % interval of it; of a single value no more than that."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, (mean, mean)
    half = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count))
    return mean, (mean - half, mean + half)


def replications_needed(values: Sequence[float], tolerance: float) -> int:
    """How many would make the interval as narrow as the tolerance, if they scatter as these."""
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    count = len(values)
    while count < 1000:
        half = stdtrit(count - 1, 0.975) * deviation / math.sqrt(count)
        if 2 * half <= tolerance * mean:
            break
        count += 1
    return count
