"""A rough capacity of each deployment, from bounds and short runs of one replica: who is behind the
best leaves. What the answer is likely to be stands after the first race."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ..sweeps.backends import InProcess
from ..sweeps.execute import duration
from ..sweeps.plan import SharedRequests
from .answer import Prices
from .bounds import alone, most_requests_per_s
from .options import (
    Described,
    Left,
    Option,
    Wanted,
    deployable,
    layouts,
    named,
    plan_of,
)
from .pool_layouts import pool_layouts
from .probing import Laboratory
from .search import Crossing, Probed, lengthened, race

WAVE = 16
"""Deployments screened side by side before they are compared again."""
SCREENING = 0.05
"""The tolerance of screening: within it of the best a deployment is searched, too."""
BEHIND = 0.3
"""The margin below the best for another layout to be screened to the end."""
BETTER = 0.01
"""The margin by which a deployment must exceed other sequence limits of its layout."""
LIKELY = 0.6
"""The part of its bound at which the search for a deployment without a rival starts."""
ROUGH, OTHERS = (0.8, 1.15), 0.7
"""Parts of a screened load between which the settled one lies, and the part of its bound that what
has not run sustains at most, 9 times in 10: chosen with 23 questions, and checked with others, as
are the next two (docs/plan/settings.md)."""
RACES, SEARCHES = 1500, 30
"""Requests of the race of a deployment that waits, and runs of a contender's search."""


@dataclass(frozen=True, eq=False)
class Screened:
    """A deployment after screening: the load that one replica carries, and the number of replicas.
    ``value`` ranks it: requests a second for a unit of money an hour. ``per_hour`` is the price of
    one replica, ``rough`` where short runs broke the SLO, and ``half`` the half-width of its load,
    in logarithms, if it left a search; while that goes on, its load is ``known`` to be between."""

    option: Option
    load: float
    replicas: int
    value: float
    per_hour: float
    rough: Crossing | None = None
    half: float | None = None
    known: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """With the number of replicas."""
        return whole(self.option, self.replicas).name

    @property
    def ends(self) -> tuple[float, float]:
        """Between which its settled load lies."""
        return self.known or (ROUGH[0] * self.load, ROUGH[1] * self.load)


@dataclass(frozen=True)
class Worth:
    """A deployment's value, requests a second for money an hour; and the load that it takes."""

    wanted: Wanted
    prices: Prices

    def of(self, option: Option, load: float) -> Screened:
        """A deployment with replicas that carry ``load`` each."""
        wanted, gpus = self.wanted, option.gpus
        if wanted.rate is None:
            replicas, paid = 1 if option.pooled else wanted.gpus // gpus, wanted.gpus
            carried = replicas * load
        elif option.pooled:
            replicas, paid = 1, gpus
            carried = wanted.rate if load >= wanted.rate else 0.0
        else:
            replicas = max(1, math.ceil(wanted.rate / load))
            paid = replicas * gpus
            carried = wanted.rate if paid <= wanted.gpus else 0.0
        per_hour = self._price(option) * paid
        return Screened(option, load, replicas, carried / per_hour, per_hour / replicas)

    def too_many(self, option: Option, load: float) -> str:
        """Why replicas that carry ``load`` each cannot carry the rate; empty if they can."""
        most = self.of(option, load)
        if self.wanted.rate is None or most.value:
            return ""
        needed = f"at least {most.replicas * option.gpus} GPUs"
        return f"{self.wanted.rate:g} requests/s need {'more workers' if option.pooled else needed}"

    def value_of(self, option: Option, load: float) -> float:
        """The value of a deployment whose replicas carry ``load`` each."""
        return self.of(whole(option, 1), load).value

    def load_for(self, option: Option, value: float) -> float:
        """The load that a replica must carry for the deployment to be worth ``value``."""
        wanted, price = self.wanted, self._price(option)
        if wanted.rate is None:
            replicas = 1 if option.pooled else wanted.gpus // option.gpus
            return value * price * wanted.gpus / replicas
        if option.pooled:
            enough = wanted.rate / (price * option.gpus) >= value
            return wanted.rate if enough else math.inf
        paid = min(wanted.rate / max(value * price, 1e-12), wanted.gpus)
        replicas = math.floor(paid / option.gpus * (1 + 1e-9))
        return wanted.rate / replicas if replicas else math.inf

    def _price(self, option: Option) -> float:
        return per_hour(option, self.prices) / option.gpus


@dataclass(frozen=True)
class Open:
    """What a partial answer leaves open: how many deployments have not run (``not_run``), and how
    many contenders are not settled. 9 times in 10 the settled best has requests/s, or at a rate a
    price per hour, ``between``, and the best so far takes ``servers``, at least and at most. The
    whole answer is expected after so many more seconds (``left_s``; None if earlier runs are
    there)."""

    not_run: int
    not_settled: int
    between: tuple[float, float]
    servers: tuple[int, int]
    left_s: float | None


@dataclass
class Screening:
    """Deployments on their way to the search: all possible ones (``options``), how long requests
    take that are alone (``lone``), the loads that replicas cannot exceed (``bounded``), who is
    ``waiting``, who has run (``found``, the best first), and why others were ``dropped``. The whole
    answer is expected at ``done_s``, of the monotonic clock."""

    lab: Laboratory
    worth: Worth
    dropped: dict[str, Left] = field(default_factory=dict)
    lone: dict[str, tuple[float, str]] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    bounded: dict[Option, float] = field(default_factory=dict)
    waiting: list[Option] = field(default_factory=list)
    found: list[Screened] = field(default_factory=list)
    done_s: float | None = None
    requests_of: SharedRequests = field(default_factory=SharedRequests)

    def add(self, described: Sequence[Described]) -> None:
        """Further deployments, with their bounds. They wait, if they may keep the SLO."""
        objectives = self.lab.section.objectives
        further, unfit = deployable(self.worth.wanted, described, self.requests_of)
        self.dropped |= unfit
        self.options += further
        for number, option in enumerate(further):
            self.lab.progress("bounds", number, len(further))
            self.lab.check_time()
            self.lone[option.name] = alone(option, objectives)
            if why := self.lone[option.name][1]:
                self.dropped[option.name] = Left("alone", clause=why)
                continue
            most = most_requests_per_s(option, objectives)
            if why := self.worth.too_many(option, most):
                self.dropped[option.name] = Left("rate", at=most, clause=why)
            else:
                self.bounded[option] = most
                self.waiting.append(option)
        self.lab.progress("bounds", len(further), len(further))

    def race(self, wave: Sequence[Option], lab: Laboratory) -> Iterator[list[Screened]]:
        """Race deployments; yields ``found`` whenever one has ended."""
        worth, bounded, searches, asked = self.worth, self.bounded, {}, dict[Option, Option]()
        goals = {option: _goal(worth, option, self.found) for option in wave}
        for option in wave:
            short = replace(plan_of(option, lab.section, "recommend"), tolerance=SCREENING)
            several = whole(option, worth.of(option, bounded[option]).replicas)
            one = several if several.alike > 1 else option  # else a single replica
            offered = one.alike / (1 - option.deployment.rejected)  # goals count served requests
            wanted, start = offered * goals[option][0], offered * LIKELY * bounded[option]
            searches[one] = race(replace(short, scale=one.alike), wanted, start)
            asked[one] = option
        done = len(self.bounded) - len(self.waiting)
        for outcomes in lab.ended(searches, done, len(self.bounded)):
            for one in [one for one in outcomes if one in asked]:
                outcome, option = outcomes[one], asked.pop(one)
                self.waiting.remove(option)
                served = (1 - option.deployment.rejected) / one.alike
                if isinstance(outcome, Crossing):
                    rough = worth.of(option, outcome.load * served)
                    self.found.append(replace(rough, rough=outcome))
                elif isinstance(outcome, float):
                    self.found.append(worth.of(option, outcome * served))
                elif isinstance(outcome, Probed):
                    at, rival = outcome.probe.load * served, goals[option][1]
                    self.dropped[option.name] = Left("race", rival, at, outcome.verdict.worst)
                else:
                    failed = outcome in lab.report.failures.values()
                    self.dropped[option.name] = Left("failed" if failed else "race", clause=outcome)
            self.found.sort(key=lambda one: (-one.value, one.option.name))
            yield self.found

    def expect(self, chosen: Sequence[Screened]) -> None:
        """Say when the whole answer is expected, if these are searched: unless earlier runs are
        there, from the time that requests took so far."""
        report, lab = self.lab.report, self.lab
        longest = 0
        for one in chosen:
            plan = plan_of(whole(one.option, one.replicas), lab.section, "recommend")
            longest += lengthened(plan, [one.rough.kept] if one.rough else []).requests
        simulated = sum(run.point["requests"] for run in lab.runs.values())
        if simulated and longest and not report.earlier:
            requests = RACES * len(self.waiting) + SEARCHES * longest
            left_s = report.run_s / simulated * requests / lab.backend.workers
            self.done_s = time.monotonic() + left_s
            lab.say(f"the final answer takes about {duration(left_s)} more")

    def leave_behind(self) -> None:
        """Drop what waits and whose bound is behind the best, or another of its layout."""
        for option in self.waiting:
            load, rival = _goal(self.worth, option, self.found)
            if self.bounded[option] < load * (1 - SCREENING):  # which is rough
                self.dropped[option.name] = Left("bound", rival, self.bounded[option])
        self.waiting = [one for one in self.waiting if one.name not in self.dropped]

    def open(self, known: Sequence[Screened], not_settled: int = 0) -> Open:
        """What is open, if so much is ``known`` of deployments, the best first."""
        worth, best = self.worth, known[0]
        ends = [(one.option, *one.ends) for one in known]
        ends += [(one, 0.0, OTHERS * self.bounded[one]) for one in self.waiting]
        values = {option: worth.value_of(option, max(high, 1e-9)) for option, _, high in ends}
        least = max(worth.value_of(option, max(low, 1e-9)) for option, low, _ in ends)
        gpus, rate = worth.wanted.gpus, worth.wanted.rate
        loads = [
            (least * paid, most * paid)
            for option, most in values.items()
            if most >= least and (paid := gpus * per_hour(option, worth.prices) / option.gpus)
        ]
        between = (min(low for low, _ in loads), max(high for _, high in loads))
        if rate is not None:
            between = (rate / max(values.values()), rate / least if least else math.inf)
        fewest, most = (worth.of(best.option, load).replicas for load in reversed(best.ends))
        left_s = self.done_s and max(self.done_s - time.monotonic(), 0.0)
        return Open(len(self.waiting), not_settled, between, (fewest, most), left_s)

    def run(self) -> Iterator[list[Screened]]:
        """All of them; yields ``found`` whenever one has run. The first is of the layout whose
        widest deployment has the highest bound; it runs in this process, before all others are
        deployed."""
        worth, wanted = self.worth, self.worth.wanted
        described, widest = [*layouts(wanted)], dict[object, Described]()
        for point, tree in described:
            widest.setdefault(point["layout"], (point, tree))
            if point["seqs"] > widest[point["layout"]][0]["seqs"]:
                widest[point["layout"]] = (point, tree)
        self.add([*widest.values()])
        for best in _in_order(worth, self.bounded)[:1]:
            at = best.point["layout"]
            self.add([one for one in described if one[0]["layout"] == at and one != widest[at]])
            own = {one: most for one, most in self.bounded.items() if one.point["layout"] == at}
            yield from self.race(_in_order(worth, own)[:1], replace(self.lab, backend=InProcess()))
        there = {one.name for one in self.options} | self.dropped.keys()
        self.add([one for one in described if named(one[0]) not in there])
        places = {named(point): place for place, (point, _) in enumerate(described)}
        self.options.sort(key=lambda one: places[one.name])
        if wanted.pools:
            objectives = self.lab.section.objectives
            self.add([*pool_layouts(wanted, self.options, objectives, worth.prices.of)])
        self.waiting = [one for one in _in_order(worth, self.bounded) if one in self.waiting]
        self.leave_behind()
        self.expect(2 * self.found[:1])
        while self.waiting:
            yield from self.race(self.waiting[:WAVE], self.lab)
            self.leave_behind()


def _in_order(worth: Worth, bounded: Mapping[Option, float]) -> list[Option]:
    """Options by their bounds; first one of each layout, then other sequence limits."""
    value = {option: worth.of(option, load).value for option, load in bounded.items()}
    ordered = sorted(bounded, key=lambda option: -value[option])
    place, seen = dict[Option, int](), Counter[object]()
    for option in ordered:
        place[option] = seen[option.point["layout"]]
        seen[option.point["layout"]] += 1
    return sorted(ordered, key=lambda option: place[option])


def _goal(worth: Worth, option: Option, found: Sequence[Screened]) -> tuple[float, str | None]:
    """The load that a replica must carry to be nearly as good as the best, and better than others
    of its layout; and which of them sets it."""
    if not found:
        return 0.0, None
    goals = [(found[0].value * (1 - BEHIND), found[0].name)]
    same = (one for one in found if one.option.point["layout"] == option.point["layout"])
    goals += [(one.value * (1 + BETTER), one.name) for one in islice(same, 1)]
    value, name = max(goals)
    return worth.load_for(option, value), name


def whole(option: Option, replicas: int) -> Option:
    """The deployment with ``replicas`` replicas in place of its own number; two pools are one."""
    if option.pooled:
        return option
    name = f"{option.name.partition(' x ')[0]} x {replicas}"
    return option.changed(name, option.scenario.having("cluster", replicas=replicas))


def per_hour(option: Option, prices: Prices) -> float:
    return max(prices.of(option.deployment.device.name), 1e-9) * option.gpus
