"""From probes to a capacity: the highest load at which 90 % of replications keep an SLO.

A search is a generator: it yields the probes that it needs, gets their results, and returns its
result. ``probing.py`` decides which worker simulates them and in which order, so the result does
not depend on it.

Each replication (one seed) has a load where its SLO breaks, its *crossing*: under its random
numbers the same requests come faster or slower, so its latencies grow with the load. Short runs,
the pilot, and bisection find the first crossing; every other replication takes one probe near it,
as each clause's stress and slope say how far away its own is. The capacity is the quantile of the
crossings that 90 % of replications exceed (``confidence/quantile.py``), and at most the saturation.
The first replications then run at it: pooled, they must keep the SLO, and their arrivals must last
long enough to show an overload."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from sarathi_sim.simulator.confidence.quantile import Estimate, quantile, spread
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
"""Largest relative distance of the two loads between which a crossing is interpolated, and of a
probe from the crossing that its slopes say."""
APART, PAIRS, STEEPEST = 0.025, 3, 100.0
"""Least relative distance of two loads that tell a slope, replications that tell slopes, and the
largest slope."""
TELLING = 0.01
"""The least stress that tells a slope."""
MOST_NEAR = 3
"""Probes of a replication before bisection."""
LASTS = 20
"""Arrivals last so many times the mean latency, and the SLO's largest limit."""
SCATTER = 0.05
"""The relative standard deviation of crossings above which runs are made longer, once."""
LONGEST = 4
"""The largest factor by which runs are made longer at a time."""
LONGEST_PILOT = 16_000
"""Requests of the longest pilot, for an SLO that no load breaks in shorter ones."""
FAR = 0.93
"""Part of the throughput up to which no saturation can lower a capacity."""
SHORT = 4
"""Runs of the headroom curve are so many times shorter."""
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
    """One run: ``load`` in requests/s or clients, seed, length, and the factor on all op times;
    ``pooled`` if it is judged with others."""

    load: float
    seed: int
    requests: int
    slower: float = 1.0
    pooled: bool = False


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
    """The load where one replication's SLO breaks, between a load that kept it and one above; or
    beside one probe, which is both, as the slopes that were ``known`` say."""

    load: float
    kept: Probed
    broken: Probed
    known: Mapping[str, float] = field(default_factory=dict)

    @property
    def slopes(self) -> Mapping[str, float]:
        """By clause, the rise of its stress in percent for a percent of load."""
        return self.known or _rises((self.kept, self.broken))

    @property
    def slope(self) -> float:
        """That of the clause that breaks."""
        return self.slopes.get(self.broken.verdict.worst, SLOPE)


@dataclass(frozen=True)
class Capacity:
    """The highest ``load`` at which the asked share of replications keeps the SLO, and its 95 %
    ``interval``; both 0 if the SLO breaks under any load (then ``pilot`` is a probe that shows it).
    For each replication, ``crossings`` has a crossing; ``at`` has probes at the capacity, and
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


@dataclass(frozen=True)
class Begun:
    """A search after its first replications: what is known before a capacity is settled."""

    plan: SearchPlan
    rough: Crossing
    crossings: tuple[Crossing, ...]

    @property
    def quantile(self) -> Estimate:
        """The load that the asked share of replications exceeds, with its 95 % interval."""
        return quantile([exact(one, self.plan) for one in self.crossings], 1 - self.plan.keep)


def capacity(plan: SearchPlan) -> Search[Capacity]:
    """The search for a deployment's capacity, with its headroom curve."""
    found = yield from begin(plan)
    return found if isinstance(found, Capacity) else (yield from settle(found))


def begin(plan: SearchPlan, known: Crossing | None = None) -> Search[Begun | Capacity]:
    """The first replications of a search, with a pilot unless its outcome is ``known``; the
    capacity itself if no load keeps the SLO."""
    rough: Crossing | Probed
    rough, plan = (known, plan) if known else (yield from breakable_pilot(plan))
    if not isinstance(rough, Crossing):
        return Capacity(pilot=rough)
    found = yield from replications(lengthened(plan, [rough.kept]), rough)
    if isinstance(found, Probed):
        return Capacity(pilot=found)
    return Begun(found[0], rough, tuple(found[1]))


def settle(found: Begun) -> Search[Capacity]:
    """The capacity: all replications that it takes, and the first ones at the capacity."""
    plan, crossings, scatter = found.plan, list(found.crossings), SCATTER
    while True:
        settled = yield from _enough(plan, crossings, scatter)
        if isinstance(settled, Probed):
            return Capacity(pilot=settled)
        plan, crossings = settled
        estimate = quantile([exact(one, plan) for one in crossings], 1 - plan.keep)
        saturation = yield from _saturation(plan, estimate.value)
        most = saturation * _told(plan)
        most /= 1 - max(one.kept.verdict.rejected for one in crossings)  # as a load that arrives
        load, at, verdict = yield from kept_at(plan, min(estimate.value, most), crossings)
        longer, scatter = lengthened(plan, at), math.inf
        if longer.requests <= plan.requests:
            break
        plan, crossings = longer, crossings[:1]
    why = too_short(plan, at)
    if not verdict.holds:
        why = why or f"replications at {load:g} break {verdict.worst}, however often it is lowered"
    low, high = (min(bound, most) for bound in estimate.interval)
    ends = (min(low, load), max(high, load))
    curve = yield from _curve(plan, load)
    rough = found.rough
    return Capacity(load, ends, tuple(crossings), saturation, rough, curve, at, verdict, why)


def _enough(
    plan: SearchPlan, crossings: list[Crossing], scatter: float
) -> Search[tuple[SearchPlan, list[Crossing]] | Probed]:
    """As many replications as make the interval no wider than the tolerance; of longer runs, once,
    if those so far ``scatter`` too much."""
    while True:
        count = len(crossings)
        apart = spread([one.load for one in crossings]) / scatter if count > 1 else 0.0
        longer = lengthened(plan, [one.kept for one in crossings], apart)
        if longer.requests > crossings[0].kept.probe.requests:
            again = yield from replications(longer, crossings[0])
            if isinstance(again, Probed):
                return again
            (plan, crossings), scatter = again, math.inf
            continue
        estimate = quantile([exact(one, plan) for one in crossings], 1 - plan.keep)
        wide = estimate.interval[1] - estimate.interval[0]
        wide /= max(plan.tolerance * estimate.value, 1.0 if plan.whole else 0.0)
        if wide <= 1 or count >= plan.most:
            return plan, crossings
        wanted = min(max(math.ceil(count * wide), count + 1), plan.most)
        more = yield from beside(plan, crossings, wanted)
        if isinstance(more, Probed):
            return more
        crossings = [*crossings, *more]


def _told(plan: SearchPlan) -> float:
    """The part of a saturation up to which a run shows whether its queue ends."""
    return max(1 - RESOLUTION * math.sqrt(plan.variance / plan.requests), 0.5)


def breakable_pilot(plan: SearchPlan) -> Search[tuple[Crossing | Probed, SearchPlan]]:
    """The pilot, with longer runs if no load breaks the SLO in short ones."""
    while True:
        try:
            return (yield from pilot(plan)), plan
        except UnbreakableError:
            most = min(plan.budget, LONGEST_PILOT)
            if plan.pilot_requests >= most:
                raise
            longer = min(4 * plan.pilot_requests, most)
            plan = replace(plan, pilot_requests=longer, requests=max(longer, plan.requests))


def replications(
    plan: SearchPlan, start: Crossing
) -> Search[tuple[SearchPlan, list[Crossing]] | Probed]:
    """The crossings of the ``least`` replications, of runs as long as the first one shows to be
    necessary; the probe of one that breaks the SLO under any load."""
    while True:
        like = Probe(0, plan.seed, plan.requests)
        first = yield from crossing(like, start.load, start.slope, plan)
        if isinstance(first, Probed):
            return first
        longer = lengthened(plan, [first.kept])
        if longer.requests <= plan.requests:
            break
        plan, start = longer, first
    known = [first]
    for count in (min(PAIRS, plan.least), plan.least):
        more = yield from beside(plan, known, count)
        if isinstance(more, Probed):
            return more
        known += more
    return plan, known


def beside(
    plan: SearchPlan, known: Sequence[Crossing], count: int
) -> Search[list[Crossing] | Probed]:
    """The crossings of further replications up to ``count``, each searched from the known ones;
    the probe of one that breaks the SLO under any load."""
    load = float(np.median([one.load for one in known]))
    nearest = NEAREST if len(known) >= PAIRS else 0.0
    slopes = _median([one.slopes for one in known])
    seeds = range(plan.seed + len(known), plan.seed + count)
    found = yield from together(
        _near(Probe(0, seed, plan.requests), load, slopes, plan, nearest) for seed in seeds
    )
    crossings = [one for one in found if isinstance(one, Crossing)]
    return next((one for one in found if isinstance(one, Probed)), crossings)


def shifted(plan: SearchPlan, known: Sequence[Crossing]) -> Search[list[Crossing | Probed]]:
    """The crossings of the same replications after a change, the first searched from its known
    one, and the others where they are as far away as that."""
    slopes, found, moved = _median([one.slopes for one in known]), list[Crossing | Probed](), 1.0
    for those in (known[:1], known[1:]):
        found += yield from together(
            _near(one.kept.probe, moved * one.load, slopes, plan, NEAREST / 2) for one in those
        )
        moved = found[0].load / known[0].load if isinstance(found[0], Crossing) else 1.0
    return found


def _near(
    like: Probe, load: float, slopes: Mapping[str, float], plan: SearchPlan, nearest: float
) -> Search[Crossing | Probed]:
    """A crossing near a load: from one probe there if it is at most ``nearest`` away, or from two
    apart, which tell the slopes; else by bisection."""
    before = None
    for _ in range(0 if plan.whole else MOST_NEAR):
        (one,) = yield [replace(like, load=_rounded(load, plan))]
        if before is not None:
            slopes = _rises((before, one), slopes)
        if (there := _breaks(one, slopes)) is None:
            break
        away = there / one.probe.load - 1
        if abs(away) <= (nearest if before is None else nearest or NEAREST):
            return Crossing(there, one, one, slopes)
        before, step = one, min(max(abs(away), APART), 0.25)
        load = one.probe.load * (1 + math.copysign(step, away))
    return (yield from crossing(like, load, min(slopes.values(), default=SLOPE), plan))


def _breaks(one: Probed, slopes: Mapping[str, float]) -> float | None:
    """The load where the first clause breaks, as its stress and its slope say; None if the probe
    breaks another bound."""
    verdict = one.verdict
    if verdict.rejects or (verdict.overloaded and verdict.stress <= 1):
        return None
    bounded = {clause: min(max(each, 0.05), 20.0) for clause, each in verdict.stresses.items()}
    return min(one.probe.load * math.pow(each, -1 / slopes[c]) for c, each in bounded.items())


def _rises(pair: Sequence[Probed], known: Mapping[str, float] | None = None) -> dict[str, float]:
    """By clause, the rise of its stress in percent for a percent of load, between two probes; what
    was ``known`` where it is far below its limit."""
    low, high = sorted(pair, key=lambda one: one.probe.load)
    apart, found = math.log(high.probe.load / low.probe.load), dict(known or {})
    for clause, before in low.verdict.stresses.items():
        after = high.verdict.stresses[clause]
        if apart and min(before, after) >= TELLING:
            found[clause] = min(max(math.log(after / before) / apart, 0.5), STEEPEST)
        else:
            found.setdefault(clause, SLOPE)
    return found


def _median(slopes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {clause: float(np.median([one[clause] for one in slopes])) for clause in slopes[0]}


def _saturation(plan: SearchPlan, load: float) -> Search[float]:
    """Requests/s served under overload, from warm-up to last arrival, infinite without any; if the
    ``load`` is far below the throughput when all come at once, that."""
    if plan.whole:
        return math.inf
    (at_once,) = yield [Probe(AT_ONCE, plan.seed, plan.pilot_requests)]
    found = _throughput(at_once)
    for times in (1, 4):  # a longer run only where the capacity may depend on it
        if load <= FAR * _told(plan) * found:
            return found
        for part in OVERLOADS:
            over = _rounded(part * _throughput(at_once), plan)
            requests = min(times * plan.requests, plan.budget)
            (loaded,) = yield [Probe(over, plan.seed, requests)]
            if 0 < loaded.served < 0.97 * loaded.offered:
                found = loaded.served
                break
        else:
            return math.inf
    return found


def kept_at(
    plan: SearchPlan, load: float, crossings: Sequence[Crossing]
) -> Search[tuple[float, tuple[Probed, ...], Verdict]]:
    """The first replications at ``load``, or lower if they, pooled, break the SLO."""
    slope = max(1.0, min(one.slope for one in crossings))
    seeds = range(plan.seed, plan.seed + min(plan.least, len(crossings)))
    for _ in range(STEPS):
        load = _down(load, plan)
        at = yield [Probe(load, seed, plan.requests, pooled=True) for seed in seeds]
        verdict = plan.pooled(at)
        if verdict.holds or load <= (1.0 if plan.whole else 0.0):
            break
        less = min(max(max(verdict.stress, 1.0) ** (-1 / slope), 0.8), 1 - plan.tolerance / 6)
        load = load - 1 if plan.whole else load * less
    return load, tuple(at), verdict


def at_load(plan: SearchPlan, load: float) -> Search[tuple[list[Probed], Verdict]]:
    """The replications at a load, and whether they keep the SLO, pooled."""
    seeds = range(plan.seed, plan.seed + plan.least)
    at = yield [Probe(load, seed, plan.requests, pooled=True) for seed in seeds]
    return at, plan.pooled(at)


def _curve(plan: SearchPlan, load: float) -> Search[tuple[Probed, ...]]:
    """Single probes below the capacity, and above it up to the first that breaks the SLO."""
    loads = dict.fromkeys(_rounded(load * part, plan) for part in BELOW)
    requests = max(plan.requests // SHORT, plan.pilot_requests)
    curve = yield [Probe(each, plan.seed, requests) for each in loads if each != load]
    last = load
    for part in ABOVE:
        if (more := _rounded(load * part, plan, up=True)) == last:
            continue
        (above,) = yield [Probe(last := more, plan.seed, requests)]
        curve = [*curve, above]
        if not above.verdict.holds:
            break
    return tuple(curve)


def lengthened(plan: SearchPlan, at: Sequence[Probed], scatter: float = 0.0) -> SearchPlan:
    """The plan with enough requests, within its budget, that arrivals last :data:`LASTS` times the
    largest limit and the mean latency, and that crossings no longer ``scatter`` too much."""
    wanted = max([plan.requests, *(_needed(plan, probed) for probed in at)])
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
        return f"runs have {requests:,} requests: {wanted:,} are needed for any tolerance"
    if wanted == _resolving(plan):
        scatter = math.sqrt(plan.variance / requests)
        told = f"the offered load of runs of {requests:,} requests varies by {scatter:.0%}"
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


def pilot(plan: SearchPlan) -> Search[Crossing | Probed]:
    """A rough capacity from short runs of one seed."""
    short, start = Probe(0, plan.seed, plan.pilot_requests), 32.0
    if not plan.whole:
        (at_once,) = yield [replace(short, load=AT_ONCE)]
        if at_once.verdict.rejects:
            return at_once
        start = 0.85 * _throughput(at_once)
    return (yield from crossing(short, start, SLOPE, plan))


def _throughput(at_once: Probed) -> float:
    """The approximate load of which every accepted request is served."""
    served = at_once.scale * float(at_once.summary["requests_per_s"])
    return served / (1 - at_once.verdict.rejected)


def race(plan: SearchPlan, goal: float, start: float) -> Search[Crossing | Probed | float]:
    """A rough capacity from short runs, if it reaches ``goal``; else the probe at that load; or the
    throughput, if no load breaks the SLO in runs so short. Without a goal (0) the search begins at
    ``start``. Arrivals last ten times the largest limit."""
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
    try:
        return (yield from crossing(like, goal or start, SLOPE, plan))
    except UnbreakableError:
        (at_once,) = yield [replace(like, load=AT_ONCE)]
        return _throughput(at_once)


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
    tried = [first]
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
        tried.append(further)
        if further.verdict.holds == up:
            slope = _rises((known, further)).get(known.verdict.worst, slope)
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
        tried.append(middle)
        if middle.verdict.holds:
            kept = middle
        else:
            broken = middle
    between = kept.probe.load + _part(kept, broken) * gap
    apart = {
        high.probe.load / low.probe.load: (low, high)
        for low in tried
        for high in tried
        if high.probe.load >= (1 + APART) * low.probe.load and low.verdict.holds
    }
    slopes = _rises(apart[min(apart)] if apart else (kept, broken))
    return Crossing(kept.probe.load if plan.whole else between, kept, broken, slopes)


def exact(found: Crossing, plan: SearchPlan) -> float:
    """The load of stress 1, also between two numbers of clients."""
    if not plan.whole:
        return found.load
    gap = found.broken.probe.load - found.kept.probe.load
    return found.kept.probe.load + _part(found.kept, found.broken) * gap


def _part(kept: Probed, broken: Probed) -> float:
    """The place of the first clause's stress 1 between two loads, from 0 to 1, linear in the
    stress's logarithm; of the overload's, if no clause breaks."""
    stresses = [(kept.verdict.stresses[c], s) for c, s in broken.verdict.stresses.items() if s > 1]
    pairs = [(min(max(low, 0.05), 0.9999), min(max(high, 1.0001), 20.0)) for low, high in stresses]
    logs = [np.log(pair) for pair in pairs or [(_stress(kept), _stress(broken))]]
    return min(float(low / (low - high)) for low, high in logs)


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
