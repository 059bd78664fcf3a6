"""From probes to a capacity: the highest load at which 90 % of replications keep an SLO.

A search is a generator: it yields the probes that it needs, gets their results, and returns its
result. ``probing.py`` decides which worker simulates them and in which order, so the result does
not depend on it.

Each replication (one seed) has a load where its SLO breaks: under its random numbers the same
requests come faster or slower, so its latencies grow with the load, and bisection finds its
*crossing*. Short runs, the pilot, give a starting load and the necessary length of a run; the full
runs take three or four probes per replication. The capacity is the quantile of the crossings that
90 % of replications exceed (``confidence/quantile.py``), and at most the saturation. All
replications then run at it: pooled, they must keep the SLO, and their arrivals must last long
enough to show an overload."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sarathi_sim.simulator.confidence.quantile import quantile, spread
from .slo import RunTables, Verdict

T = TypeVar("T")
AT_ONCE = math.inf
"""The load of a probe whose requests all arrive at once: about the highest throughput."""
SLOPE = 6.0
"""The slope of the stress that is assumed before it is known."""
SMALLEST = 1e-3
"""Part of the throughput: if the SLO breaks even under this load, the capacity is 0."""
LARGEST = 1e3
"""Multiple of a search's first load: if the SLO holds even under this load, it always does."""
NEAREST = 0.05
"""Largest relative distance of the two loads between which a crossing is interpolated."""
LASTS = 20
"""Arrivals last so many times the mean latency, and the SLO's largest limit."""
SCATTER = 0.05
"""The relative standard deviation of crossings above which runs are made longer, once."""
LONGEST = 4
"""The largest factor by which runs are made longer at a time."""
LONGEST_PILOT = 16_000
"""Requests of the longest pilot, for an SLO that no load breaks in shorter ones."""
OVERLOADS = (1.5, 3.0, 6.0)
"""Loads of the saturated run, in parts of the throughput when all requests come at once."""
BELOW, ABOVE = (0.5, 0.7, 0.85, 0.95), (1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""The loads of the headroom curve, in parts of the capacity; above it only up to the first load
that breaks the SLO."""
RESOLUTION = 2.0
"""Standard deviations of a run's offered load: nearer to the saturation a run is too short to show
whether its queue ends (it lasts four times a queue's memory, variance / distance ** 2 requests)."""
STEPS = 6
"""How often the load is lowered, at most, until the pooled replications keep the SLO."""


@dataclass(frozen=True)
class Probe:
    """One run: ``load`` in requests/s or clients, seed, length, and the factor on all op times."""

    load: float
    seed: int
    requests: int
    slower: float = 1.0


@dataclass(frozen=True)
class Probed:
    """A finished probe: its run's key and summary, and its verdict under the SLO. ``scale`` is the
    deployment's replicas over the run's (see
    :attr:`~sarathi_sim.experiments.capacity.options.Option.alike`). ``tables`` are the run's."""

    probe: Probe
    run: str
    summary: dict[str, Any]
    verdict: Verdict
    scale: int = 1
    tables: RunTables | None = None

    @property
    def latency_s(self) -> float:
        """The mean latency after the warm-up."""
        return float(self.summary["after_warmup"]["latency_s"]["mean"])

    @property
    def arrivals_s(self) -> float:
        """The time from the first to the last arrival."""
        return float(self.summary["after_warmup"]["arrivals_s"])

    @property
    def served(self) -> float:
        """Requests/s that the deployment finished between warm-up and last arrival."""
        return self.scale * float(self.summary["after_warmup"]["served_per_s"])

    @property
    def offered(self) -> float:
        """Requests/s that arrived in the same time."""
        return self.scale * float(self.summary["after_warmup"]["offered_per_s"])


Search = Generator[list[Probe], list[Probed], T]


UNBOUNDED = "the SLO holds under any load"


class UnbreakableError(ValueError):
    """No load breaks the SLO."""


@dataclass(frozen=True)
class SearchPlan:
    """The precision and the target of a search. A run has ``requests``, more if it must last
    longer, up to ``budget`` (fewer than ``fewest`` settle nothing): ``limit_s`` is the SLO's
    largest limit, and arrivals last at least ``pattern_s``. ``scale`` is the probes' scale,
    ``variance`` the relative variance of a request's work and gap, times the replicas of a run. The
    share ``keep`` of replications keeps the SLO at a capacity. ``whole``: the load counts clients.
    ``pooled`` judges several probes as one."""

    tolerance: float
    least: int
    most: int
    requests: int
    pilot_requests: int
    seed: int
    pooled: Callable[[Sequence[Probed]], Verdict]
    whole: bool = False
    keep: float = 0.9
    limit_s: float = 0.0
    pattern_s: float = 0.0
    budget: int = 1_000_000
    scale: int = 1
    variance: float = 0.0
    fewest: int = 0


@dataclass(frozen=True)
class Crossing:
    """The load where one replication's SLO breaks, between a load that kept it and one above."""

    load: float
    kept: Probed
    broken: Probed

    @property
    def slope(self) -> float:
        """The rise of the stress in percent, for a percent of load."""
        rise = math.log(_stress(self.broken) / _stress(self.kept))
        apart = math.log(self.broken.probe.load / self.kept.probe.load)
        return min(max(rise / apart, 0.5), 50.0)


@dataclass(frozen=True)
class Capacity:
    """The highest ``load`` at which the asked share of replications keeps the SLO, and its 95 %
    ``interval``; both 0 if the SLO breaks under any load (then ``pilot`` is a probe that shows it).
    For each replication, ``crossings`` has a crossing and ``at`` a probe at the capacity;
    ``verdict`` judges these, pooled. ``saturation``: requests/s served under overload (infinite for
    clients). ``curve``: single probes at parts of the load. ``unsettled``: why it is no capacity.
    """

    load: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    crossings: tuple[Crossing, ...] = ()
    saturation: float = math.inf
    pilot: Crossing | Probed | None = None
    curve: tuple[Probed, ...] = ()
    at: tuple[Probed, ...] = ()
    verdict: Verdict | None = None
    unsettled: str = ""

    @property
    def spread(self) -> float:
        """The relative standard deviation of one replication's crossing."""
        return spread([one.load for one in self.crossings])

    @property
    def rejected(self) -> float:
        """The share of rejected requests at the capacity, or at the pilot if nothing is carried."""
        verdict = self.pilot.verdict if isinstance(self.pilot, Probed) else self.verdict
        return verdict.rejected if verdict is not None else 0.0

    @property
    def carried(self) -> float:
        """The load less the rejected requests; 0 if the search did not settle."""
        return 0.0 if self.unsettled else self.load * (1 - self.rejected)


def capacity(plan: SearchPlan) -> Search[Capacity]:
    """The search for a deployment's capacity, with its headroom curve."""
    at_once, rough, plan = yield from breakable_pilot(plan)
    if not isinstance(rough, Crossing):
        return Capacity(pilot=rough)
    saturation = yield from _saturation(plan, at_once)
    start, plan = rough, lengthened(plan, [rough.kept])
    most_scatter = SCATTER
    while True:
        crossings = []
        for one in (yield from replications(plan, start)):
            if isinstance(one, Probed):
                return Capacity(pilot=one)
            crossings.append(one)
        estimate = quantile([exact(one, plan) for one in crossings], 1 - plan.keep)
        most = saturation * max(1 - RESOLUTION * math.sqrt(plan.variance / plan.requests), 0.5)
        most /= 1 - max(one.kept.verdict.rejected for one in crossings)  # as a load that arrives
        load, at, verdict = yield from kept_at(plan, min(estimate.value, most), crossings)
        longer = lengthened(plan, at, spread([one.load for one in crossings]) / most_scatter)
        if longer.requests <= plan.requests:
            break
        start, plan, most_scatter = crossings[0], longer, math.inf
    why = too_short(plan, at)
    if not verdict.holds:
        why = why or f"replications at {load:g} break {verdict.worst}, however often it is lowered"
    low, high = (min(bound, most) for bound in estimate.interval)
    ends = (min(low, load), max(high, load))
    curve = yield from _curve(plan, load)
    return Capacity(load, ends, tuple(crossings), saturation, rough, curve, at, verdict, why)


def breakable_pilot(
    plan: SearchPlan,
) -> Search[tuple[Probed | None, Crossing | Probed, SearchPlan]]:
    """The pilot, with longer runs if no load breaks the SLO in short ones."""
    while True:
        try:
            at_once, rough = yield from pilot(plan)
            return at_once, rough, plan
        except UnbreakableError:
            most = min(plan.budget, LONGEST_PILOT)
            if plan.pilot_requests >= most:
                raise
            longer = min(4 * plan.pilot_requests, most)
            plan = replace(plan, pilot_requests=longer, requests=max(longer, plan.requests))


def replications(plan: SearchPlan, start: Crossing) -> Search[list[Crossing | Probed]]:
    """The crossing of each replication: more replications until the capacity's interval is no wider
    than the tolerance. Ends early if a replication breaks the SLO under any load."""
    first = yield from crossing(
        Probe(0, plan.seed, plan.requests),
        start.load,
        start.slope,
        plan,
    )
    found: list[Crossing | Probed] = [first]
    if not isinstance(first, Crossing):
        return found
    start, wanted = first, plan.least
    while len(found) < wanted:
        seeds = range(plan.seed + len(found), plan.seed + wanted)
        found += yield from together(
            crossing(
                Probe(0, seed, plan.requests),
                start.load,
                start.slope,
                plan,
            )
            for seed in seeds
        )
        loads = [exact(one, plan) for one in found if isinstance(one, Crossing)]
        if len(loads) == len(found):
            low, high = (estimate := quantile(loads, 1 - plan.keep)).interval
            if high - low > max(plan.tolerance * estimate.value, 1.0 if plan.whole else 0.0):
                wanted = min(plan.most, len(found) + 1)
    return found


def _saturation(plan: SearchPlan, at_once: Probed | None) -> Search[float]:
    """Requests/s served under overload, from warm-up to last arrival; infinite without any."""
    if at_once is None:
        return math.inf
    for part in OVERLOADS:
        load = _rounded(part * _throughput(at_once), plan)
        (loaded,) = yield [
            Probe(
                load,
                plan.seed,
                min(4 * plan.requests, plan.budget),
            )
        ]
        if 0 < loaded.served < 0.97 * loaded.offered:
            return loaded.served
    return math.inf


def kept_at(
    plan: SearchPlan, load: float, crossings: Sequence[Crossing]
) -> Search[tuple[float, tuple[Probed, ...], Verdict]]:
    """The replications at ``load``, or at a lower load if, pooled, they break the SLO."""
    slope = max(1.0, min(one.slope for one in crossings))
    seeds = range(plan.seed, plan.seed + len(crossings))
    for _ in range(STEPS):
        load = _down(load, plan)
        at = yield [Probe(load, seed, plan.requests) for seed in seeds]
        verdict = plan.pooled(at)
        if verdict.holds or load <= (1.0 if plan.whole else 0.0):
            break
        less = min(max(max(verdict.stress, 1.0) ** (-1 / slope), 0.8), 1 - plan.tolerance / 6)
        load = load - 1 if plan.whole else load * less
    return load, tuple(at), verdict


def at_load(plan: SearchPlan, load: float) -> Search[tuple[list[Probed], Verdict]]:
    """The replications at a load, and whether they keep the SLO, pooled."""
    seeds = range(plan.seed, plan.seed + plan.least)
    at = yield [Probe(load, seed, plan.requests) for seed in seeds]
    return at, plan.pooled(at)


def _curve(plan: SearchPlan, load: float) -> Search[tuple[Probed, ...]]:
    """Single probes below the capacity, and above it up to the first that breaks the SLO."""
    loads = dict.fromkeys(_rounded(load * part, plan) for part in BELOW)
    curve = yield [Probe(each, plan.seed, plan.requests) for each in loads if each != load]
    last = load
    for part in ABOVE:
        if (more := _rounded(load * part, plan, up=True)) == last:
            continue
        (above,) = yield [Probe(last := more, plan.seed, plan.requests)]
        curve = [*curve, above]
        if not above.verdict.holds:
            break
    return tuple(curve)


def lengthened(plan: SearchPlan, at: Sequence[Probed], scatter: float = 0.0) -> SearchPlan:
    """The plan with enough requests, within its budget, that arrivals last :data:`LASTS` times the
    largest limit and the mean latency, and that crossings no longer ``scatter`` too much."""
    wanted = max(_needed(plan, probed) for probed in at)
    wanted = math.ceil(1.1 * wanted) if wanted > plan.requests else plan.requests
    if scatter > 1:
        wanted = max(wanted, math.ceil(plan.requests * scatter**2))
    wanted = min(100 * math.ceil(wanted / 100), LONGEST * plan.requests, plan.budget)
    return replace(plan, requests=max(wanted, plan.requests))


def _needed(plan: SearchPlan, probed: Probed) -> int:
    lasts_s = max(LASTS * max(plan.limit_s, probed.latency_s), plan.pattern_s)
    lasting = math.ceil(probed.probe.requests * lasts_s / max(probed.arrivals_s, 1e-9))
    return max(lasting, _resolving(plan), plan.fewest)


def _resolving(plan: SearchPlan) -> int:
    """The requests of a run that tells half of the saturation from all of it."""
    return math.ceil((2 * RESOLUTION) ** 2 * plan.variance)


def too_short(plan: SearchPlan, at: Sequence[Probed]) -> str:
    """Why runs of this length are too short to judge the load; empty if they are not."""
    wanted, requests = max(_needed(plan, probed) for probed in at), at[0].probe.requests
    if wanted <= requests:
        return ""
    if wanted == plan.fewest:
        return f"runs have {requests:,} requests: {wanted:,} are needed, whatever the tolerance"
    if wanted == _resolving(plan):
        scatter = math.sqrt(plan.variance / requests)
        told = f"the offered load of runs of {requests:,} requests scatters by {scatter:.0%}"
        return f"{told}: {wanted:,} are needed"
    lasts_s = min(probed.arrivals_s for probed in at)
    slowest = max(plan.limit_s, *(probed.latency_s for probed in at))
    told = f"{LASTS} times {slowest:,.1f} s (the largest limit, or the mean latency)"
    if plan.pattern_s > LASTS * slowest:
        told = f"the {plan.pattern_s:,.0f} s in which the arrivals vary"
    return (
        f"runs of {requests:,} requests last {lasts_s:,.0f} s, less than {told}: "
        f"{wanted:,} are needed"
    )


def pilot(plan: SearchPlan) -> Search[tuple[Probed | None, Crossing | Probed]]:
    """A rough capacity from short runs of one seed, and the run with all requests at once."""
    short = Probe(0, plan.seed, plan.pilot_requests)
    if plan.whole:
        found = yield from crossing(short, 32.0, SLOPE, plan)
        return None, found
    (at_once,) = yield [replace(short, load=AT_ONCE)]
    if at_once.verdict.rejects:
        return at_once, at_once
    found = yield from crossing(short, 0.85 * _throughput(at_once), SLOPE, plan)
    return at_once, found


def _throughput(at_once: Probed) -> float:
    """The approximate load of which every accepted request is served."""
    served = at_once.scale * float(at_once.summary["requests_per_s"])
    return served / (1 - at_once.verdict.rejected)


def race(plan: SearchPlan, goal: float, start: float) -> Search[Crossing | Probed]:
    """A rough capacity from short runs, if it reaches ``goal``; else the probe at that load.
    Without a goal (0) the search begins at ``start``. Arrivals last ten times the largest limit."""
    lasts = math.ceil(10 * plan.limit_s * (goal or start) / plan.scale)
    like = Probe(
        0,
        plan.seed,
        min(max(plan.pilot_requests, lasts), plan.budget),
    )
    if goal:
        (first,) = yield [replace(like, load=_rounded(goal, plan))]
        if not first.verdict.holds:
            return first
    return (yield from crossing(like, goal or start, SLOPE, plan))


def crossing(
    like: Probe, start: float, slope: float, plan: SearchPlan
) -> Search[Crossing | Probed]:
    """The load where the SLO breaks for probes ``like`` this one, searched from ``start``; the
    probe of the smallest load if the SLO breaks even there. Raises UnbreakableError if it holds
    when all requests come at once.

    The stress and its ``slope`` predict the load of stress 1, and a load a little beyond brackets
    it. Then bisection, until the two loads are the tolerance apart, at most :data:`NEAREST`:
    between them the load of stress 1 is interpolated in logarithms of both."""
    fine = min(plan.tolerance, NEAREST)
    margin, smallest = 1 + fine / 3, SMALLEST * start
    (first,) = yield [replace(like, load=_rounded(start, plan))]
    kept, broken = (first, None) if first.verdict.holds else (None, first)
    while kept is None or broken is None:
        known = kept or broken
        assert known is not None
        load, up = known.probe.load, kept is not None
        if not up and (known.verdict.rejects or load <= max(smallest, 1.0 if plan.whole else 0.0)):
            return known
        if up and load >= (like.requests if plan.whole else LARGEST * start):
            raise UnbreakableError(
                f"{UNBOUNDED}: limit ttft or latency, too, or give more capacity.requests than "
                f"{like.requests}"
            )
        factor = margin if up else 1 / margin
        guess = load * min(max(_stress(known) ** (-1 / slope), 0.3), 3.0) * factor
        (further,) = yield [replace(like, load=_rounded(guess, plan, up))]
        margin = min(margin**2, 2.0)
        if further.verdict.holds:
            kept = further
        else:
            broken = further
    while (gap := broken.probe.load - kept.probe.load) > max(
        fine * kept.probe.load, 1.0 if plan.whole else 0.0
    ):
        nearest = 1 / gap if plan.whole else 0.15
        part = min(max(_part(kept, broken), nearest), 1 - nearest)
        inner = kept.probe.load + part * gap
        (middle,) = yield [replace(like, load=_rounded(inner, plan))]
        if middle.verdict.holds:
            kept = middle
        else:
            broken = middle
    between = kept.probe.load + _part(kept, broken) * gap
    return Crossing(kept.probe.load if plan.whole else between, kept, broken)


def exact(found: Crossing, plan: SearchPlan) -> float:
    """The load of stress 1, also between two numbers of clients."""
    if not plan.whole:
        return found.load
    gap = found.broken.probe.load - found.kept.probe.load
    return found.kept.probe.load + _part(found.kept, found.broken) * gap


def _part(kept: Probed, broken: Probed) -> float:
    """The place of stress 1 between two loads, from 0 to 1, linear in the stress's logarithm."""
    low, high = math.log(_stress(kept)), math.log(_stress(broken))
    return low / (low - high)


def _stress(probed: Probed) -> float:
    """The stress within bounds; above 1 if the SLO breaks because of overload alone."""
    stress = probed.verdict.stress
    if probed.verdict.holds:
        return min(max(stress, 0.05), 0.9999)
    return min(max(stress, 1.0001), 20.0) if stress > 1 else 1.02


def _rounded(load: float, plan: SearchPlan, up: bool = False) -> float:
    """The nearest load that a probe may have: whole clients, or six digits, as printed."""
    if plan.whole:
        return float(max(1, math.ceil(load) if up else round(load)))
    return float(f"{load:.6g}")


def _down(load: float, plan: SearchPlan) -> float:
    """The largest load that a probe may have and that does not exceed ``load``."""
    if plan.whole:
        return float(max(1, math.floor(load + 1e-9)))
    digits = 10.0 ** (5 - math.floor(math.log10(load)))
    return float(f"{math.floor(load * digits + 1e-6) / digits:.6g}")


def together(searches: Iterable[Search[T]]) -> Search[list[T]]:
    """Searches side by side: each round yields the probes that all of them need."""
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
