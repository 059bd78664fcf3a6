"""From a question to a deployment: which layout sustains most for its price under an SLO?

Layouts that do not fit, or break the SLO with a single request, are dropped without a simulation.
The others race with short runs of one replica, in the order of their bounds: each first at the load
that would make it nearly as good as the best. For the best few the search for a capacity begins;
those that its first replications show to be worse leave, and the others are settled. On the way
there are partial answers: the first after one race, of the layout with the highest bound."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from typing import Any

import numpy as np

from sarathi_sim.profiler.storage.child import Say
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import number_text
from ..config.base import Source
from ..config.loading import check_scenario
from ..config.pools import without_hidden
from ..results import SUMMARY, json_bytes
from ..sweeps.backends import InProcess
from ..sweeps.execute import duration
from ..sweeps.points import apart, between
from .answer import (
    COSTS,
    Answer,
    Prices,
    add_costs,
    answers,
    as_json,
    headroom,
    layout,
    numbers,
    pooled_numbers,
    said_of,
    scenario_at,
    slower_factors,
    with_counts,
)
from .bounds import alone, most_requests_per_s
from .launch import TRACE, Launch, launch, load_test
from .options import Described, Left, Option, Wanted, deployable, layouts, named, plan_of
from .pool_layouts import pool_layouts
from .probing import RECOMMEND_FORMAT, Laboratory
from .rivals import NOT_WEIGHED, Rival, Weighed, kind_of, paired, weigh
from .search import (
    UNBOUNDED,
    Begun,
    Capacity,
    Crossing,
    Probed,
    at_load,
    begin,
    lengthened,
    race,
    settle,
)
from .slo import Verdict

FINALISTS = 4
"""Deployments that are searched exactly, at first."""
MOST_SEARCHED = 8
"""Most deployments that are searched exactly."""
WAVE = 16
"""Deployments screened side by side before they are compared again."""
SCREENING = 0.05
"""The tolerance of screening: within it of the best a deployment is searched, too."""
BEHIND, MARGIN = 0.3, 0.1
"""The margin below the best for another layout: to be screened to the end, and to be a finalist."""
BETTER = 0.01
"""The margin by which a deployment must exceed other sequence limits of its layout."""
MUCH_LESS = 0.5
"""The part of the best's load below which its neighbour sustains much less."""
LIKELY = 0.6
"""The part of its bound at which the search for a deployment without a rival starts."""
ROUGH, OTHERS = (0.8, 1.15), 0.7
"""Parts of a screened load between which the settled one lies, and the part of its bound that what
has not run sustains at most, 9 times in 10: chosen with 26 questions, and checked with as many
others, as are the next two (docs/capacity.md)."""
RACES, SEARCHES = 1500, 30
"""Requests of the race of a deployment that waits, and runs of a contender's search."""


@dataclass(frozen=True, eq=False)
class Screened:
    """A deployment after screening: the load that one replica carries, and the number of replicas.
    ``value`` ranks it: requests a second for a unit of money an hour. ``per_hour`` is the price of
    one replica, ``rough`` where short runs broke the SLO, and ``half`` the half-width of its load,
    in logarithms, if it left a search."""

    option: Option
    load: float
    replicas: int
    value: float
    per_hour: float
    rough: Crossing | None = None
    half: float | None = None

    @property
    def name(self) -> str:
        """With the number of replicas."""
        return whole(self.option, self.replicas).name

    @property
    def ends(self) -> tuple[float, float]:
        """Between which its settled load lies."""
        low, high = ROUGH if self.half is None else (math.exp(-self.half), math.exp(self.half))
        return low * self.load, high * self.load


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
        needed = f"{most.replicas * option.gpus} GPUs at least"
        return f"{self.wanted.rate:g} requests/s take {'more workers' if option.pooled else needed}"

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
        return _per_hour(option, self.prices) / option.gpus


@dataclass(frozen=True)
class AtRate:
    """A deployment's replications at the rate that was asked for, pooled."""

    option: Option
    at: list[Probed]
    verdict: Verdict


@dataclass(frozen=True)
class Open:
    """What a partial answer leaves open: how many deployments have not run (``not_run``), and how
    many contenders are not settled. The settled best has a value, and the first of the partial
    answer's takes a number of servers, ``between`` and ``servers`` 9 times in 10. The whole answer
    is expected after so many more seconds (``left_s``; None if earlier runs are there)."""

    not_run: int
    not_settled: int
    between: tuple[float, float]
    servers: tuple[int, int]
    left_s: float | None


@dataclass(frozen=True)
class Recommendation:
    """The finalists' answers, the best first; the other screened deployments; why others were
    dropped. ``checked``: by name, the runs at the rate. ``options``: all possible deployments, one
    replica each. ``weighed``: what is equal to the first, and what it saves. A partial one has no
    finalists, but all that is known as ``screened``, and what is ``open``."""

    finalists: list[Answer]
    screened: list[Screened]
    dropped: dict[str, Left]
    checked: dict[str, AtRate]
    options: list[Option] = field(default_factory=list)
    weighed: Weighed = NOT_WEIGHED
    open: Open | None = None


def recommendations(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say
) -> Iterator[Recommendation]:
    """The best deployments: partial answers, and then the whole one. Raises UserError where none
    keeps the SLO, under the rate if any."""
    race, errors = Race(lab, Worth(wanted, prices)), OpErrors(lab)
    for _ in screen(race):
        yield from race.partial(race.found)
    screened, worth, dropped = list[Screened](), race.worth, race.dropped
    for one in race.found:
        if why := worth.too_many(one.option, one.load):
            dropped[one.option.name] = Left("rate", at=one.load, clause=why)
        else:
            screened.append(one)
    if not screened:
        raise UserError(_nothing(wanted, dropped, race.lone))
    race.expect(finalists(screened))
    search = Searches(race, screened, say)
    yield from search.begin()
    began, left = search.began, _beaten(search.began, worth, errors)
    yield from search.settle([one for one in began if one not in left])
    found, checked = search.settled, dict[str, AtRate]()
    if wanted.rate is not None:
        found, checked = _least_replicas(lab, found, wanted, prices)
    ranked = sorted(found, key=lambda one: -_value(one, wanted, prices, checked))
    sustained = {one.option.name: one.load for one in found}
    beaten = {}
    for one, behind in left.items():
        short = _load(behind.than, began[behind.than]) * behind.than.replicas
        beaten[one] = behind.at(one, sustained[behind.than.name] or short, worth)
    loads = {one: sustained.get(one.name, 0.0) / one.replicas for one in began}
    loads |= {one: now.load for one, now in beaten.items()}
    others = [one for _, one in _not_searched(screened, loads, worth)] + [*beaten.values()]
    others.sort(key=lambda one: (-one.value, one.name))
    result = Recommendation(ranked, others, dropped, checked, race.options)
    weighed, at_rate = _weighed(lab, result, worth, errors, screened[0].value * (1 - BEHIND))
    yield replace(result, weighed=weighed, checked=checked | at_rate)


@dataclass
class Searches:
    """The searches for the capacities of the best ``screened`` deployments: those that ``began``,
    and the answers of those that are ``settled``."""

    race: Race
    screened: list[Screened]
    say: Say
    began: dict[Screened, Begun | Capacity | str] = field(default_factory=dict)
    settled: list[Answer] = field(default_factory=list)

    def begin(self) -> Iterator[Recommendation]:
        """The first replications of all contenders; the partial answer after each."""
        lab, chosen = self.race.lab, finalists(self.screened)
        while chosen:
            self.say(f"searching {len(chosen)} of them")
            exactly = {whole(one.option, one.replicas): one for one in chosen}
            plans = {option: plan_of(option, lab.section, "recommend") for option in exactly}
            pilots = {option: _pilot(one, option) for option, one in exactly.items()}
            for first in lab.ended({o: begin(plan, pilots[o]) for o, plan in plans.items()}):
                self.began |= {exactly[option]: one for option, one in first.items()}
                yield from self._partial(len({*self.began, *chosen}))
            further = _contenders(self.screened, self.began, self.race.worth)
            chosen = further[: MOST_SEARCHED - len(self.began)]

    def settle(self, chosen: Sequence[Screened]) -> Iterator[Recommendation]:
        """The capacities of some; the partial answer after each."""
        options = {whole(one.option, one.replicas): self.began[one] for one in chosen}
        self.say(f"settling {len(options)} of them")
        ended = {one: end for one, end in options.items() if not isinstance(end, Begun)}
        searches = {one: settle(end) for one, end in options.items() if isinstance(end, Begun)}
        for outcomes in self.race.lab.ended(searches):
            ends = ended | outcomes
            self.settled = [Answer.of(one, ends[one]) for one in options if one in ends]
            yield from self._partial(len(options) - len(ends))

    def _partial(self, not_settled: int) -> Iterator[Recommendation]:
        worth, loads = self.race.worth, dict[Screened, float]()
        settled, rows = {one.option.name: one for one in self.settled}, list[Screened]()
        for one, found in self.began.items():
            load, answer = _load(one, found), settled.get(one.name)
            ends = found.quantile.interval if isinstance(found, Begun) else (1.0, 1.0)
            if answer is not None:
                load, ends = answer.load / (1 if one.option.pooled else one.replicas), (1.0, 1.0)
                ends = answer.interval if load else ends
            if load:
                half, now = math.log(ends[1] / ends[0]) / 2, worth.of(one.option, load)
                rows.append(replace(now, rough=one.rough, half=half))
            loads[one] = load
        rows += [one for _, one in _not_searched(self.screened, loads, worth)]
        rows.sort(key=lambda one: (-one.value, one.name))
        yield from self.race.partial(rows, not_settled)


def doubts_by_name(options: Sequence[Option]) -> dict[str, list[str]]:
    """Each doubt about op times, by the first option that has it."""
    first = {line: one.name for one in reversed(options) for line in one.deployment.doubts}
    return {name: [line for line in first if first[line] == name] for name in first.values()}


def far_neighbours(found: Recommendation) -> list[dict[str, Any]]:
    """The neighbours of the first, with another token budget or sequence limit, that sustain much
    less, where there are values between: those may be better. ``load``: what one server sustains
    at most, in requests/s; None if it breaks the SLO with a single request."""
    best, *others = found.finalists
    if not best.load or best.option.pooled:
        return []
    most = best.load / best.option.replicas
    known = [one for one in others if not one.unsettled]
    loads = {named(one.option.point): one.load / one.option.replicas for one in known}
    loads |= {one.option.name: one.load for one in found.screened}
    far: dict[str, float | None] = {n: load for n, load in loads.items() if load < MUCH_LESS * most}
    for name, left in found.dropped.items():
        part = 1 - BEHIND if left.stage == "race" else MUCH_LESS
        if left.stage == "alone" or (left.at is not None and left.at <= part * most * (1 + 1e-9)):
            far[name] = left.at
    points = [{key: one.point[key] for key in ("shape", "budget", "seqs")} for one in found.options]
    names = [one.name for one in found.options]
    near = apart(names.index(named(best.option.point)), points)
    return [{"name": names[at], "load": far[names[at]]} for at in near if names[at] in far]


def refined(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, rounds: int
) -> Iterator[Recommendation]:
    """As :func:`recommendations`; each round also tries the token budgets and sequence limits
    halfway between the best deployment's and the next ones, and yields its whole answer. Two pools
    have the largest of both, so nothing is tried beside them."""
    keys = ("budget", "seqs")
    for found in recommendations(lab, wanted, prices, say):
        yield found
    for _ in range(rounds):
        best = found.finalists[0]
        tried = [dict(zip(keys, p, strict=True)) for p in product(wanted.budgets, wanted.sequences)]
        there = tried.index({key: best.option.point[key] for key in keys})
        further = between(there, tried) if best.load and not best.option.pooled else []
        if not further:
            break
        budgets, sequences = (
            tuple(sorted({*before, *(point[key] for point in further)}))
            for key, before in zip(keys, (wanted.budgets, wanted.sequences), strict=True)
        )
        wanted = replace(wanted, budgets=budgets, sequences=sequences)
        say(f"refining: budgets {budgets}, sequence limits {sequences}")
        *_, found = recommendations(lab, wanted, prices, say)
        yield found


def _load(one: Screened, found: Begun | Capacity | str) -> float:
    """What one of the replicas carries, as far as it is known; 0 if it is not."""
    replicas = 1 if one.option.pooled else one.replicas
    if isinstance(found, Begun):
        served = 1 - found.crossings[0].kept.verdict.rejected
        return found.quantile.value * served / replicas
    return 0.0 if isinstance(found, str) else found.carried / replicas


def _pilot(one: Screened, option: Option) -> Crossing | None:
    """The screening's crossing as that of all replicas, where their runs are those of one."""
    alike, replicas = option.alike, option.scenario.cluster.replicas
    if one.rough is None or not (option.pooled or alike == replicas):
        return None
    return replace(one.rough, load=one.rough.load * alike / one.rough.kept.scale)


def _contenders(
    screened: Sequence[Screened],
    began: Mapping[Screened, Begun | Capacity | str],
    worth: Worth,
) -> list[Screened]:
    """Screened deployments that may be as good as the best searched one, or better, if the search
    lowers their load by as much; the next two if all searched ones sustain nothing."""
    best = max(
        worth.of(one.option, load).value if (load := _load(one, found)) else 0.0
        for one, found in began.items()
    )
    if not best:
        return [one for one in screened if one not in began][:2]
    others = _not_searched(
        screened, {one: _load(one, found) for one, found in began.items()}, worth
    )
    return [one for one, lowered in others if lowered.value > best * (1 - SCREENING)]


def _not_searched(
    screened: Sequence[Screened], loads: Mapping[Screened, float], worth: Worth
) -> list[tuple[Screened, Screened]]:
    """What was only screened; and with a load lowered as much as in the median of those with
    ``loads``."""
    kept = [load / one.load for one, load in loads.items() if load]
    lower = float(np.median(kept)) if kept else 1.0
    return [
        (one, replace(worth.of(one.option, lower * one.load), rough=one.rough))
        for one in screened
        if one not in loads
    ]


@dataclass(frozen=True)
class Behind:
    """A deployment that leaves the search: the logarithm of its crossings over those of a better
    one (``than``), and the half-width of that."""

    than: Screened
    mean: float
    half: float

    def at(self, one: Screened, than: float, worth: Worth) -> Screened:
        """What is known of it, if the better one sustains a load."""
        replicas = 1 if one.option.pooled else one.replicas
        now = worth.of(one.option, than * math.exp(self.mean) / replicas)
        return replace(now, replicas=one.replicas, rough=one.rough, half=self.half)


def _beaten(
    began: Mapping[Screened, Begun | Capacity | str], worth: Worth, errors: OpErrors
) -> dict[Screened, Behind]:
    """Those that leave by their first replications: they are neither the best nor equal to it, or
    do the same as one that is."""
    known = {
        one: (found, load)
        for one, found in began.items()
        if isinstance(found, Begun) and (load := _load(one, found))
    }
    value = {one: worth.of(one.option, load).value for one, (_, load) in known.items()}
    left, twins = dict[Screened, Behind](), dict[object, Screened]()
    ordered = sorted(known, key=lambda one: (-value[one], one.name))
    for one in ordered:
        best, (first, most), found = ordered[0], known[ordered[0]], known[one][0]
        twin = twins.setdefault((value[one], *(each.load for each in found.crossings)), one)
        behind = left.get(twin, Behind(twin, 0.0, 0.0))
        if twin is one:
            behind = Behind(best, *paired(first, found))
            now = behind.at(one, most * best.replicas, worth)
            rival = Rival(one.name, one.option, now.load, now.value, half=behind.half)
            alone = Rival(best.name, best.option, 0.0, value[best])
            if one is best or weigh(alone, [rival], worth.value_of, errors, 0.0).equal:
                continue
        left[one] = behind
    return left


def _least_replicas(
    lab: Laboratory, found: list[Answer], wanted: Wanted, prices: Prices
) -> tuple[list[Answer], dict[str, AtRate]]:
    """The answers, also with one replica more where a deployment falls short of the rate; and the
    runs at the rate of those that sustain it, and with one replica fewer, if that would be the
    cheapest: if this keeps the SLO, it is searched, too."""
    rate = wanted.rate
    assert rate is not None
    tried, checked = list(found), dict[str, AtRate]()
    short = [one.option for one in found if one.load < rate and not one.option.pooled]
    wave = [_changed(option, 1) for option in short]
    while True:
        wave = [option for option in wave if option.gpus <= wanted.gpus]
        if wave:
            tried += answers(lab, wave, "recommend", bands=False)
        carry = [one for one in tried if one.load >= rate]
        again = {one.option: one for one in carry if one.option.name not in checked}
        checked |= _run_at(lab, again, rate)
        carry = [one for one in carry if checked[one.option.name].verdict.holds]
        least = min((_per_hour(one.option, prices) for one in carry), default=0.0)
        fewer = {
            less: one
            for one in carry
            if one.option.scenario.cluster.replicas > 1
            and (less := _changed(one.option, -1)).name not in checked
            and _per_hour(less, prices) < least
        }
        if not fewer:
            return tried, checked
        less_checked, names = _run_at(lab, fewer, rate), {one.option.name for one in tried}
        checked |= less_checked
        kept = (one.option for one in less_checked.values() if one.verdict.holds)
        wave = [option for option in kept if option.name not in names]


def _run_at(lab: Laboratory, like: Mapping[Option, Answer], rate: float) -> dict[str, AtRate]:
    searches = {}
    for option, one in like.items():
        assert one.found is not None
        plan = plan_of(option, lab.section, "recommend")
        requests = one.found.at[0].probe.requests
        offered = rate / (1 - one.found.rejected)
        searches[option] = at_load(replace(plan, requests=requests), offered)
    return {
        option.name: AtRate(option, *outcome)
        for option, outcome in lab.pursue(searches).items()
        if not isinstance(outcome, str)
    }


def _weighed(
    lab: Laboratory, found: Recommendation, worth: Worth, errors: OpErrors, most_left_out: float
) -> tuple[Weighed, dict[str, AtRate]]:
    """The first beside all others. At a rate, those that were only screened and would be cheaper
    than the next one run at it; the dropped ones are worth at most ``most_left_out``."""
    first, *answers_ = found.finalists
    wanted, rate, checked = worth.wanted, worth.wanted.rate, dict[str, AtRate]()

    def rival(one: Answer) -> Rival:
        load = one.load / (1 if one.option.pooled else one.option.scenario.cluster.replicas)
        value = _value(one, wanted, worth.prices, found.checked)
        if rate is not None:
            carries = carries_rate(one, rate, found.checked)
            value = rate / _per_hour(one.option, worth.prices) if carries else 0.0
        return Rival(one.option.name, one.option, load, value, one.found)

    best = rival(first)
    if not best.value or first.found is None or not first.found.at:
        return NOT_WEIGHED, checked
    own, _, _ = best.name.partition(" x ")
    others = [rival(one) for one in answers_ if one.load]
    others = [o for o in others if o.name.partition(" x ")[0] != own and (o.value or rate is None)]
    rest = found.screened
    several = {one.option: whole(one.option, one.replicas) for one in rest}
    if rate is not None:
        second = max([one.value for one in others if one.value < best.value], default=0.0)
        cheaper = sorted((one for one in rest if one.value > second), key=lambda one: -one.value)
        rest, left = cheaper[:MOST_SEARCHED], cheaper[MOST_SEARCHED:]
        most_left_out = max([most_left_out, *(one.value for one in left)])
        checked = _run_at(lab, {several[one.option]: first for one in rest}, rate)
    for one in rest:
        option, value = several[one.option], one.value
        if rate is not None and not ((at := checked.get(option.name)) and at.verdict.holds):
            more = _per_hour(_changed(option, 1), worth.prices)
            value = 0.0 if option.pooled else rate / more
        half = math.log1p(SCREENING) if one.half is None else one.half
        others.append(Rival(option.name, option, one.load, value, half=half))
    weighed = weigh(best, others, worth.value_of, errors, most_left_out)
    return weighed, checked


@dataclass
class OpErrors:
    """By option, the half-width of the 90 % band of its op times, in logarithms: that of the first
    asked for of its kind."""

    lab: Laboratory
    known: dict[str, float] = field(default_factory=dict)

    def __call__(self, option: Option) -> float:
        if (kind := kind_of(option)) not in self.known:
            ends = slower_factors(option, plan_of(option, self.lab.section, "recommend"))
            self.known[kind] = math.log(ends[-1] / ends[0]) / 2 if ends else 0.0
        return self.known[kind]


def _with_bands(lab: Laboratory, found: Recommendation) -> Recommendation:
    errors, banded = OpErrors(lab, dict(found.weighed.errors)), list[Answer]()
    for one in found.finalists:
        if one.load:
            factor = math.exp(errors(one.option))
            one = replace(one, band=(one.load / factor, one.load * factor))
        banded.append(one)
    return replace(found, finalists=banded)


def servers_90(uncertainty: Sequence[float] | None, replicas: int, rate: float) -> list[int] | None:
    """The fewest and the most replicas that ``rate`` needs, if ``replicas`` of them carry the
    higher, and the lower end of their capacity's ``uncertainty``; None if it is not known."""
    if not uncertainty or not uncertainty[0]:
        return None
    most, least = (math.ceil(rate * replicas / load - 1e-9) for load in uncertainty)
    return [least, max(most, replicas)]


def _nothing(
    wanted: Wanted, dropped: Mapping[str, Left], lone: Mapping[str, tuple[float, str]]
) -> str:
    """Why no deployment is left: if a request alone breaks the SLO in all that fit the memory, the
    nearest; else why those that it keeps were dropped, or why none fits."""
    said = {name: one.clause for name, one in dropped.items()}
    for name, one in dropped.items():
        if one.stage == "race" and one.at is not None:
            said[name] = f"breaks {one.clause} at {number_text(one.at)} requests/s a server"
    reasons = [why for name, why in said.items() if name in lone and not lone[name][1]]
    if lone and not reasons:
        nearest = min(lone, key=lambda name: lone[name])
        reasons = [f"{lone[nearest][1]}, with {nearest}; elsewhere longer"]
    reasons = list(dict.fromkeys(reasons or said.values()))
    if str(reasons[0]).startswith(UNBOUNDED):
        return f"--slo {wanted.section.slo}: {reasons[0]}"
    load = "any load" if wanted.rate is None else f"{wanted.rate:g} requests/s"
    listed = "".join(f"\n  {reason}" for reason in reasons[:5])
    return (
        f"--slo {wanted.section.slo}: no deployment of {wanted.model} on up to {wanted.gpus} GPUs "
        f"of {', '.join(wanted.devices)} keeps it under {load}:{listed}"
    )


def whole(option: Option, replicas: int) -> Option:
    """The deployment with ``replicas`` replicas in place of its own number; two pools are one."""
    if option.pooled:
        return option
    name = f"{option.name.partition(' x ')[0]} x {replicas}"
    return option.changed(name, option.scenario.having("cluster", replicas=replicas))


def _changed(option: Option, by: int) -> Option:
    return whole(option, option.scenario.cluster.replicas + by)


def _per_hour(option: Option, prices: Prices) -> float:
    return max(prices.of(option.deployment.device.name), 1e-9) * option.gpus


def _value(answer: Answer, wanted: Wanted, prices: Prices, checked: Mapping[str, AtRate]) -> float:
    price = _per_hour(answer.option, prices)
    if wanted.rate is None:
        return answer.load / (price * (wanted.gpus / answer.option.gpus))
    # The cheapest deployment that sustains the rate, then the largest reserve.
    carries = carries_rate(answer, wanted.rate, checked)
    return (1e6 + answer.load if carries else answer.load) / price


def carries_rate(answer: Answer, rate: float, checked: Mapping[str, AtRate]) -> bool:
    """Whether a deployment's capacity reaches the rate, and runs at it keep the SLO."""
    there = checked.get(answer.option.name)
    return answer.load >= rate and there is not None and there.verdict.holds


@dataclass
class Race:
    """Deployments on their way to the search: all possible ones (``options``), loads that their
    replicas cannot exceed (``bounded``), for how long the SLO's requests take ``lone``, those that
    are ``waiting``, those that short runs have given a rough load (``found``, the best first), and
    why others were ``dropped``."""

    lab: Laboratory
    worth: Worth
    dropped: dict[str, Left] = field(default_factory=dict)
    lone: dict[str, tuple[float, str]] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    bounded: dict[Option, float] = field(default_factory=dict)
    waiting: list[Option] = field(default_factory=list)
    found: list[Screened] = field(default_factory=list)
    done_s: float | None = None

    def add(self, described: Sequence[Described]) -> None:
        """Further deployments, with their bounds. They wait, if they may keep the SLO."""
        objectives = self.lab.section.objectives
        further, unfit = deployable(self.worth.wanted, described)
        self.dropped |= unfit
        self.options += further
        for number, option in enumerate(further):
            self.lab.progress("bounds", number, len(further))
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

    def run(self, wave: Sequence[Option], lab: Laboratory) -> Iterator[list[Screened]]:
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
        left, ended = len(self.waiting), dict[Option, Crossing | Probed | str]()
        done = len(self.bounded) - left
        self.waiting = [option for option in self.waiting if option not in goals]
        for outcomes in lab.ended(searches, done, len(self.bounded)):
            for one in outcomes.keys() - ended.keys():
                outcome, option = outcomes[one], asked[one]
                ended[one] = outcome
                served = (1 - option.deployment.rejected) / one.alike
                if isinstance(outcome, Crossing):
                    rough = worth.of(option, outcome.load * served)
                    self.found.append(replace(rough, rough=outcome))
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
            lab.say(f"the whole answer takes about {duration(left_s)} more")

    def leave_behind(self) -> None:
        """Drop what waits and whose bound is behind the best, or another of its layout."""
        for option in self.waiting:
            load, rival = _goal(self.worth, option, self.found)
            if self.bounded[option] < load * (1 - SCREENING):  # which is rough
                self.dropped[option.name] = Left("bound", rival, self.bounded[option])
        self.waiting = [one for one in self.waiting if one.name not in self.dropped]

    def partial(self, known: Sequence[Screened], not_settled: int = 0) -> Iterator[Recommendation]:
        """The answer so far, if there is one: what is ``known`` of deployments, the best first."""
        if not known:
            return
        worth, best = self.worth, known[0]
        ends = [(one.option, *one.ends) for one in known]
        ends += [(one, 0.0, OTHERS * self.bounded[one]) for one in self.waiting]
        values = [[worth.value_of(option, max(load, 1e-9)) for load in e] for option, *e in ends]
        between = tuple(max(each) for each in zip(*values, strict=True))
        fewest, most = (worth.of(best.option, load).replicas for load in reversed(best.ends))
        left_s = self.done_s and max(self.done_s - time.monotonic(), 0.0)
        still = Open(len(self.waiting), not_settled, between, (fewest, most), left_s)
        yield Recommendation([], [*known], self.dropped, {}, self.options, open=still)


def screen(race: Race) -> Iterator[list[Screened]]:
    """A rough capacity of each deployment, the best first: of those so far, whenever one has run.
    The first is of the layout whose widest deployment has the highest bound; it runs in this
    process, before all others are deployed."""
    lab, worth, wanted = race.lab, race.worth, race.worth.wanted
    described, widest = [*layouts(wanted)], dict[object, Described]()
    for point, tree in described:
        widest.setdefault(point["layout"], (point, tree))
        if point["seqs"] > widest[point["layout"]][0]["seqs"]:
            widest[point["layout"]] = (point, tree)
    race.add([*widest.values()])
    for best in _in_order(worth, race.bounded)[:1]:
        at = best.point["layout"]
        alike = [one for one in described if one[0]["layout"] == at and one != widest[at]]
        race.add(alike)
        own = {one: most for one, most in race.bounded.items() if one.point["layout"] == at}
        first = _in_order(worth, own)[:1]
        yield from race.run(first, replace(lab, backend=InProcess()))
    there = {one.name for one in race.options} | race.dropped.keys()
    race.add([one for one in described if named(one[0]) not in there])
    race.leave_behind()
    race.expect(2 * race.found[:1])
    places = {named(point): place for place, (point, _) in enumerate(described)}
    race.options.sort(key=lambda one: places[one.name])
    if wanted.pools:
        race.add([*pool_layouts(wanted, race.options, lab.section.objectives, worth.prices.of)])
    race.waiting = [one for one in _in_order(worth, race.bounded) if one in race.waiting]
    while race.waiting:
        race.leave_behind()
        yield from race.run(race.waiting[:WAVE], lab)


def finalists(screened: Sequence[Screened]) -> list[Screened]:
    """The best deployment of each layout within the margin of the best of all; in any case, if they
    were screened to the end, the second, and the best with two pools and without."""
    of_layout: dict[object, Screened] = {}
    for one in screened:
        of_layout.setdefault(one.option.point["layout"], one)
    best = screened[0].value
    near = [one for one in of_layout.values() if one.value >= best * (1 - BEHIND)][:FINALISTS]
    chosen = near[:2] + [one for one in near[2:] if one.value >= best * (1 - MARGIN)]
    pooled = chosen[0].option.pooled
    other = next((one for one in screened if one.option.pooled != pooled), chosen[0])
    return chosen if other in chosen else [*chosen, other]


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


def recommended(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, rounds: int
) -> Iterator[dict[str, Any]]:
    """The contents of ``summary.json``: of partial answers, then of the whole one. Raises UserError
    if no deployment keeps the SLO."""
    for found in refined(lab, wanted, prices, say, rounds):
        if found.open is None:
            found = _with_bands(lab, found)
            lab.write_tables()
        yield answer_of(found, wanted, prices)


def answer_of(found: Recommendation, wanted: Wanted, prices: Prices) -> dict[str, Any]:
    """The content of ``summary.json``. If no deployment carries a load, or the rate, ``winner`` and
    ``command`` are None; ``needs`` names the checkpoint that a command would need."""
    rows = ranked(found, wanted, prices)
    tried = [one.option for one in found.finalists]
    tried = tried or [whole(one.option, one.replicas) for one in found.screened[:1]]
    best, carries = tried[0], bool(rows) and rows[0]["carries"]
    started = launch(best.scenario) if carries or found.open else Launch(None)
    load = _load_test(rows[0]) if carries else None
    return {
        "format": RECOMMEND_FORMAT,
        "name": "recommend",
        "model": wanted.model,
        "devices": list(wanted.devices),
        "gpus": wanted.gpus if wanted.rate is None else None,
        "rate": wanted.rate,
        "slo": wanted.section.slo,
        "load": wanted.section.load,
        "tolerance": wanted.section.tolerance,
        "keep": wanted.section.replications.keep,
        "may_reject": wanted.section.rejected,
        "workload": wanted.stated,
        "log_rates": wanted.log_rates,
        "open": found.open and _open(found.open, found.screened[0], wanted),
        "winner": rows[0]["name"] if carries else None,
        "command": started.command,
        "needs": started.needs,
        "load_command": load and load[0],
        "replicas": best.scenario.cluster.replicas,
        "deployments": rows,
        "one_fewer": _one_fewer(found, wanted) if carries else None,
        "screened": [_only_screened(one, found.checked) for one in found.screened],
        **found.weighed.as_json(),
        "dropped": {name: asdict(left) for name, left in found.dropped.items()},
        "far_neighbours": far_neighbours(found) if carries else [],
        **said_of(tried, wanted.section.load),
        "doubts": doubts_by_name(found.options),
        "not_tried": wanted.not_tried,
        "prices": prices.stated,
        "provenance": "predicted",
    }


def _open(still: Open, best: Screened, wanted: Wanted) -> dict[str, Any]:
    """What is open, with the requests/s of the settled best, or at a rate its price an hour."""
    low, high = still.between
    per_hour = best.per_hour * best.replicas
    ends = (low * per_hour, high * per_hour)
    if wanted.rate is not None:
        ends = (wanted.rate / high, wanted.rate / low if low else math.inf)
    return asdict(still) | {"between": list(ends), "servers": list(still.servers)}


def ranked(found: Recommendation, wanted: Wanted, prices: Prices) -> list[dict[str, Any]]:
    """The finalists in numbers, each with its costs. ``carries`` is the rate (None if it does not
    sustain it), or without one the capacity, ``at_rate`` has the replications at the rate, and
    ``servers_90`` is :func:`servers_90`'s."""
    rows = []
    for answer in found.finalists:
        row = as_json(answer, wanted.section.load)
        row["gpus_paid"] = paid = wanted.gpus if wanted.rate is None else answer.option.gpus
        row["carries"], row["at_rate"], row["servers_90"] = row["capacity"] or None, None, None
        if wanted.rate is not None:
            carries = carries_rate(answer, wanted.rate, found.checked)
            row["carries"] = wanted.rate if carries else None
            row["servers_90"] = servers_90(row.get("uncertainty"), row["replicas"], wanted.rate)
            if (there := found.checked.get(row["name"])) is not None:
                row["at_rate"] = at = pooled_numbers(there.at, there.verdict, there.option)
                row["scenario"] = scenario_at(there.option, at, wanted.section.load)
        add_costs(row, prices.of(row["device"]) * paid)
        rows.append(row)
    return rows


def _one_fewer(found: Recommendation, wanted: Wanted) -> dict[str, Any] | None:
    best = found.finalists[0].option
    there = found.checked.get(_changed(best, -1).name)
    if best.pooled or there is None or there.verdict.holds:
        return None
    verdict = there.verdict
    return {
        "name": there.option.name,
        "load": wanted.rate,
        "breaks": verdict.worst,
        "value": verdict.values.get(verdict.worst),
        "slo": verdict.values,
        "overloaded": verdict.overloaded,
    }


def _only_screened(one: Screened, checked: Mapping[str, AtRate]) -> dict[str, Any]:
    """A rough capacity of all replicas, and the numbers at the largest load that short runs of one
    replica carried. ``holds_at_rate``: whether runs at the rate kept the SLO, if there were any."""
    option, kept = one.option, one.rough.kept if one.rough is not None else None
    scale = kept.scale if kept is not None else 1
    there = checked.get(one.name)
    row = {
        "name": one.name,
        "point": option.point,
        "replicas": one.replicas,
        "holds_at_rate": None if there is None else there.verdict.holds,
        "device": " and ".join(option.deployment.gpus),
        "stack": option.deployment.pools[-1].scenario.stack,
        "gpus": option.gpus * one.replicas,
        "about": one.load * one.replicas,
        "at_most": None if one.half is None else one.load * one.replicas * math.exp(one.half),
        "curve": [] if kept is None else [numbers(kept, whole(option, scale))],
    }
    add_costs(row, one.per_hour * scale)
    return row | {"per_hour": one.per_hour * one.replicas}


def recommend_files(wanted: Wanted, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    rows = content["deployments"]
    rest = ("capacity", "settled", "rejected_share", "carries", "per_hour", *COSTS)
    table = with_counts(
        [
            {"name": row["name"], "device": row["device"], **layout(row)}
            | {key: row.get(key) for key in rest}
            for row in rows
        ]
    )
    files = {
        SUMMARY: json_bytes(content),
        "recommend.csv": table.to_csv(index=False).encode(),
        "headroom.csv": headroom(rows).to_csv(index=False).encode(),
    }
    if content["winner"] is not None:
        files["winner.yaml"] = dump_yaml(winner(content, wanted)).encode()
    if content["command"] is not None:
        files["launch.sh"] = f"{content['command']}\n".encode()
    if content["load_command"] is not None and (load := _load_test(rows[0])):
        files["load.sh"] = f"{load[0]}\n".encode()
        files |= {TRACE: load[1].encode()} if load[1] else {}
    return files


def _load_test(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """What checks a deployment: the load at which it was simulated."""
    scenario = without_hidden(row["scenario"])
    return load_test(check_scenario(scenario, Source("winner.yaml", "", {}, ())))


def winner(content: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """A configuration of the first deployment, to simulate it again at its capacity or at the rate
    asked for, or to search its capacity."""
    section = wanted.section.model_dump(mode="json", exclude_none=True)
    scenario = without_hidden(content["deployments"][0]["scenario"])
    return {"name": "winner", "capacity": section, **scenario}
