"""From a question to a deployment: which layout carries most for its price under an SLO?

What cannot be deployed, or cannot keep the SLO even alone, is dropped without a simulation. The
others race with short runs of one replica. They start in the order of their bounds. Once one was
seen to carry something, another one needs a single run: at the load that would make it nearly as
good. Only if it keeps the SLO there it is searched further. All runs share their random numbers.
The best few are then searched as ``capacity`` does, with all their replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from sarathi_sim.experiments.capacity.answer import Answer, answers
from sarathi_sim.experiments.capacity.bounds import alone, most_requests_per_s
from sarathi_sim.experiments.capacity.judgement import Verdict
from sarathi_sim.experiments.capacity.layouts import Wanted, deployable
from sarathi_sim.experiments.capacity.options import Option, plan_of
from sarathi_sim.experiments.capacity.prices import Prices
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.search import Crossing, Probed, at_load, race
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.sweeps.neighbours import between
from sarathi_sim.profiler.storage.child import Say
from sarathi_sim.simulator.views.metric_registry import number_text

FINALISTS = 4
"""How many are searched exactly, at first."""
MOST_SEARCHED = 8
"""How many in all."""
CLOSE = 0.03
"""How much worse than the best, by its screening, another one may be that is searched, too."""
FIRST, WAVE = 4, 16
"""Deployments screened side by side before they are compared again: the first time, and later."""
SCREENING = 0.05
"""The tolerance of screening."""
BEHIND, MARGIN = 0.3, 0.1
"""How far below the best another layout may be: to be screened to the end, and a finalist."""
BETTER = 0.01
"""How much more than another sequence limit of its layout a deployment must carry."""
LIKELY = 0.6
"""The part of its bound where the search for a deployment starts that has no rival yet."""


@dataclass(frozen=True)
class Screened:
    """A deployment after screening: what one replica carries, and how many replicas there are.

    ``value`` is what is ranked: requests a second for a unit of money an hour. ``per_hour`` is what
    is paid for one replica, ``kept`` the largest load that it was seen to carry.
    """

    option: Option
    load: float
    replicas: int
    value: float
    per_hour: float
    kept: Probed | None = None

    @property
    def carried(self) -> str:
        """Requests a second of all replicas, as text."""
        return f"{number_text(self.load * self.replicas)} requests/s"


@dataclass(frozen=True)
class Worth:
    """What deployments are worth to who asks."""

    wanted: Wanted
    prices: Prices

    def of(self, option: Option, load: float) -> Screened:
        """A deployment with replicas that carry ``load`` each."""
        wanted, gpus = self.wanted, option.gpus
        if wanted.rate is None:
            replicas, paid = wanted.gpus // gpus, wanted.gpus
            carried = replicas * load
        else:
            replicas = max(1, math.ceil(wanted.rate / load))
            paid, carried = replicas * gpus, wanted.rate
            if paid > wanted.gpus:
                carried = 0.0
        per_hour = self._price(option) * paid
        return Screened(option, load, replicas, carried / per_hour, per_hour / replicas)

    def too_many(self, option: Option, load: float) -> str:
        """Why replicas that carry ``load`` each cannot carry the rate; empty if they can."""
        most = self.of(option, load)
        if self.wanted.rate is None or most.value:
            return ""
        return f"{self.wanted.rate:g} requests/s take {most.replicas * option.gpus} GPUs at least"

    def load_for(self, option: Option, value: float) -> float:
        """The load that a replica must carry for the deployment to be worth ``value``."""
        wanted, price = self.wanted, self._price(option)
        if wanted.rate is None:
            return value * price * wanted.gpus / (wanted.gpus // option.gpus)
        paid = min(wanted.rate / max(value * price, 1e-12), wanted.gpus)
        replicas = math.floor(paid / option.gpus * (1 + 1e-9))
        return wanted.rate / replicas if replicas else math.inf

    def _price(self, option: Option) -> float:
        return _per_hour(option, self.prices) / option.gpus


@dataclass(frozen=True)
class AtRate:
    """What a deployment does at the rate that was asked for: the replications, pooled."""

    option: Option
    at: list[Probed]
    verdict: Verdict


@dataclass(frozen=True)
class Recommendation:
    """The finalists' answers, the best first; the others that were screened; why others were
    dropped. ``checked`` has, by name, what deployments do at the rate: finalists, and the first
    with one replica fewer. ``doubts`` are those about the op times of all that could be deployed,
    each with the first that it is about."""

    finalists: list[Answer]
    screened: list[Screened]
    dropped: dict[str, str]
    checked: dict[str, AtRate]
    doubts: dict[str, list[str]] = field(default_factory=dict)


def recommend(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, most: int = FINALISTS
) -> Recommendation:
    """The best deployments. Raises ConfigError where none keeps the SLO, under the rate if any."""
    options, dropped = deployable(wanted)
    bounded, worth = dict[Option, float](), Worth(wanted, prices)
    for number, option in enumerate(options):
        lab.progress("bounds", number, len(options))
        why = alone(option, lab.section.objectives)
        if not why:
            bounded[option] = most_requests_per_s(option, lab.section.objectives)
            why = worth.too_many(option, bounded[option])
        if why:
            dropped[option.name] = why
            bounded.pop(option, None)
    lab.progress("bounds", len(options), len(options))
    screened = []
    for one in screen(lab, worth, bounded, dropped, say):
        if why := worth.too_many(one.option, one.load):
            dropped[one.option.name] = why
        else:
            screened.append(one)
    if not screened:
        raise ConfigError(_nothing(wanted, dropped))
    found, chosen = list[Answer](), finalists(screened, most)
    searched = list[Screened]()
    while chosen:
        say(f"searching {len(chosen)} of them exactly")
        searched += chosen
        exactly = [whole(one.option, one.replicas) for one in chosen]
        found += answers(lab, exactly, "recommend", bands=False)
        chosen = _contenders(screened, searched, found, worth)[: MOST_SEARCHED - len(searched)]
    checked: dict[str, AtRate] = {}
    if wanted.rate is not None:
        found, checked = _least_replicas(lab, found, wanted, prices)
    ranked = sorted(found, key=lambda one: -_value(one, wanted, prices, checked))
    others = [one for one in screened if one not in searched]
    return Recommendation(ranked, others, dropped, checked, doubts_by_name(options))


def doubts_by_name(options: Sequence[Option]) -> dict[str, list[str]]:
    """Each doubt about op times, by the first option that it is about."""
    first = {line: one.name for one in reversed(options) for line in one.deployment.doubts}
    return {name: [line for line in first if first[line] == name] for name in first.values()}


def refined(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, rounds: int
) -> Recommendation:
    """The best deployments; each of the rounds also tries the token budgets and sequence limits
    half-way between the best's and the next ones. Raises ConfigError as :func:`recommend` does."""
    found = recommend(lab, wanted, prices, say)
    for _ in range(rounds):
        best = found.finalists[0]
        keys = ("budget", "seqs")
        tried = [dict(zip(keys, p, strict=True)) for p in product(wanted.budgets, wanted.sequences)]
        there = tried.index({key: best.option.point[key] for key in keys})
        further = between(there, tried) if best.load else []
        if not further:
            break
        budgets, sequences = ({point[key] for point in further} for key in keys)
        budgets, sequences = budgets.union(wanted.budgets), sequences.union(wanted.sequences)
        wanted = replace(wanted, budgets=tuple(sorted(budgets)), sequences=tuple(sorted(sequences)))
        say(f"refining: budgets {wanted.budgets}, sequence limits {wanted.sequences}")
        found = recommend(lab, wanted, prices, say)
    return found


def _contenders(
    screened: Sequence[Screened],
    searched: Sequence[Screened],
    found: Sequence[Answer],
    worth: Worth,
) -> list[Screened]:
    """Those that were screened only, and would be nearly as good as the best of those that were
    searched, or better, if the exact search took as much from them; the next two where all of
    those carry nothing."""
    others = [one for one in screened if one not in searched]
    exact = [
        worth.of(one.option, answer.load / one.replicas).value if answer.load else 0.0
        for one, answer in zip(searched, found, strict=True)
    ]
    if not max(exact):
        return others[:2]
    kept = np.median([there / one.value for one, there in zip(searched, exact, strict=True)])
    return [one for one in others if one.value * kept > max(exact) * (1 - CLOSE)]


def _least_replicas(
    lab: Laboratory, found: list[Answer], wanted: Wanted, prices: Prices
) -> tuple[list[Answer], dict[str, AtRate]]:
    """The answers, and those with other numbers of replicas; and what was run at the rate.

    What falls short of the rate is searched with one replica more. What carries it runs at the
    rate, and again with one replica fewer, if that would be the cheapest: where this keeps the SLO,
    it is searched, too.
    """
    rate = wanted.rate
    assert rate is not None
    tried, checked = list(found), dict[str, AtRate]()
    wave = [_changed(one.option, 1) for one in found if one.load < rate]
    while True:
        wave = [option for option in wave if option.gpus <= wanted.gpus]
        if wave:
            tried += answers(lab, wave, "recommend", bands=False)
        carry = [one for one in tried if one.load >= rate]
        checked |= _run_at(lab, [one for one in carry if one.option.name not in checked], 0, rate)
        carry = [one for one in carry if checked[one.option.name].verdict.holds]
        least = min((_per_hour(one.option, prices) for one in carry), default=0.0)
        fewer = [
            one
            for one in carry
            if one.option.scenario.cluster.replicas > 1
            and (less := _changed(one.option, -1)).name not in checked
            and _per_hour(less, prices) < least
        ]
        if not fewer:
            return tried, checked
        found_fewer = _run_at(lab, fewer, -1, rate)
        checked |= found_fewer
        names = {one.option.name for one in tried}
        kept = (one.option for one in found_fewer.values() if one.verdict.holds)
        wave = [option for option in kept if option.name not in names]


def _run_at(lab: Laboratory, like: list[Answer], by: int, rate: float) -> dict[str, AtRate]:
    """Deployments with so many replicas more (``by``) under the rate, with runs as long as those of
    the answers."""
    searches, options = {}, {}
    for one in like:
        assert one.found is not None
        option = _changed(one.option, by) if by else one.option
        plan = plan_of(option, lab.section, "recommend")
        requests = one.found.at[0].probe.requests
        offered = rate / (1 - one.found.rejected)
        searches[option] = at_load(replace(plan, requests=requests), offered)
        options[option] = option.name
    found = lab.pursue(searches)
    return {
        name: AtRate(option, *outcome)
        for option, name in options.items()
        if not isinstance(outcome := found[option], str)
    }


def _nothing(wanted: Wanted, dropped: Mapping[str, str]) -> str:
    reasons = dict.fromkeys(dropped.values())
    load = "any load" if wanted.rate is None else f"{wanted.rate:g} requests/s"
    listed = "".join(f"\n  {reason}" for reason in list(reasons)[:5])
    return (
        f"--slo {wanted.section.slo}: no deployment of {wanted.model} on up to {wanted.gpus} GPUs "
        f"of {', '.join(wanted.devices)} keeps it under {load}:{listed}"
    )


def whole(option: Option, replicas: int) -> Option:
    """The deployment with so many replicas; it may have some number of them already."""
    scenario = option.scenario
    cluster = scenario.cluster.model_copy(update={"replicas": replicas})
    whole = scenario.model_copy(update={"cluster": cluster})
    deployment = replace(option.deployment, scenario=whole)
    return Option(f"{option.name.partition(' x ')[0]} x {replicas}", option.point, deployment)


def _changed(option: Option, by: int) -> Option:
    """The deployment with so many replicas more than it has."""
    return whole(option, option.scenario.cluster.replicas + by)


def _per_hour(option: Option, prices: Prices) -> float:
    """What the GPUs of all replicas cost an hour."""
    return max(prices.of(option.deployment.device.name), 1e-9) * option.gpus


def _value(answer: Answer, wanted: Wanted, prices: Prices, checked: Mapping[str, AtRate]) -> float:
    idle = 1.0 if wanted.rate is not None else wanted.gpus / answer.option.gpus
    price = _per_hour(answer.option, prices) * idle
    if wanted.rate is None:
        return answer.load / price
    # Of those that carry the rate the cheapest, and then the one with most to spare.
    carries = carries_rate(answer, wanted.rate, checked)
    return (1e6 + answer.load if carries else answer.load) / price


def carries_rate(answer: Answer, rate: float, checked: Mapping[str, AtRate]) -> bool:
    """Whether a deployment's capacity reaches the rate, and runs at it keep the SLO."""
    there = checked.get(answer.option.name)
    return answer.load >= rate and there is not None and there.verdict.holds


# The race ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Goal:
    """The load that a replica must carry, and why."""

    load: float = 0.0
    reason: str = "under any load"


def screen(
    lab: Laboratory,
    worth: Worth,
    bounded: Mapping[Option, float],
    dropped: dict[str, str],
    say: Say,
) -> list[Screened]:
    """What each carries, roughly, the best first; adds those that are behind to ``dropped``.

    ``bounded`` has for each one a load that a replica cannot exceed.
    """
    waiting, found, total = _in_order(worth, bounded), list[Screened](), len(bounded)
    while waiting:
        best = found[0] if found else None
        goals = {option: _goal(worth, option, found) for option in waiting}
        for option, goal in goals.items():
            if bounded[option] < goal.load:
                most = worth.of(option, bounded[option])
                least = f"{most.replicas * option.gpus} GPUs at least"
                told = f"at most {most.carried}" if worth.wanted.rate is None else least
                dropped[option.name] = f"{told} by its op times: {goal.reason}"
        waiting = [option for option in waiting if option.name not in dropped]
        size = WAVE if found else FIRST
        wave, waiting = waiting[:size], waiting[size:]
        searches, asked = {}, {}
        for option in wave:
            short = replace(plan_of(option, lab.section, "recommend"), tolerance=SCREENING)
            several = whole(option, worth.of(option, bounded[option]).replicas)
            one = several if several.alike > 1 else option  # else one replica, by itself
            offered = one.alike / (1 - option.deployment.rejected)  # for what is served
            wanted, start = offered * goals[option].load, offered * LIKELY * bounded[option]
            searches[one] = race(replace(short, scale=one.alike), wanted, start)
            asked[one] = option
        done = total - len(waiting) - len(wave)
        for one, outcome in lab.pursue(searches, done, total).items():
            option = asked[one]
            served = (1 - option.deployment.rejected) / one.alike
            if isinstance(outcome, Crossing):
                rough = worth.of(option, outcome.load * served)
                found.append(replace(rough, kept=outcome.kept))
            elif isinstance(outcome, Probed):
                at = worth.of(option, outcome.probe.load * served).carried
                why = f"breaks {outcome.verdict.worst} at {at}: {goals[option].reason}"
                dropped[option.name] = why
            else:
                dropped[option.name] = outcome
        found.sort(key=lambda one: (-one.value, one.option.name))
        if found and found[0] is not best:
            say(f"best so far: {_named(found[0])}: about {found[0].carried}")
    return found


def finalists(screened: Sequence[Screened], most: int) -> list[Screened]:
    """The best of each layout that is not too far behind the best of all; the second anyway, if it
    was screened to the end."""
    of_layout: dict[object, Screened] = {}
    for one in screened:
        of_layout.setdefault(one.option.point["layout"], one)
    best = screened[0].value
    near = [one for one in of_layout.values() if one.value >= best * (1 - BEHIND)]
    return [
        one
        for place, one in enumerate(near[:most])
        if place < 2 or one.value >= best * (1 - MARGIN)
    ]


def _in_order(worth: Worth, bounded: Mapping[Option, float]) -> list[Option]:
    """By their bounds; first one of each layout, then others, with other sequence limits."""
    value = {option: worth.of(option, load).value for option, load in bounded.items()}
    ordered = sorted(bounded, key=lambda option: -value[option])
    place: dict[Option, int] = {}
    seen: dict[object, int] = {}
    for option in ordered:
        layout = option.point["layout"]
        place[option] = seen[layout] = seen.get(layout, -1) + 1
    return sorted(ordered, key=lambda option: place[option])


def _goal(worth: Worth, option: Option, found: Sequence[Screened]) -> _Goal:
    """What it takes to be nearly as good as the best, and better than others of its layout."""
    if not found:
        return _Goal()
    best = found[0]
    goals = [(best.value * (1 - BEHIND), f"over {BEHIND:.0%} behind {_named(best)}")]
    same = (one for one in found if one.option.point["layout"] == option.point["layout"])
    if (rival := next(same, None)) is not None:
        goals.append((rival.value * (1 + BETTER), f"no better than {_named(rival)}"))
    value, reason = max(goals)
    return _Goal(worth.load_for(option, value), reason)


def _named(one: Screened) -> str:
    return f"{one.option.name} x {one.replicas}"
