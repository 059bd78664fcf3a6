"""From a question to a deployment: which layout sustains most for its price under an SLO?

Layouts that do not fit, or break the SLO with a single request, are dropped without a simulation.
The others race with short runs of one replica, in the order of their bounds: each first at the load
that would make it nearly as good as the best. For the best few the search for a capacity begins;
those that its first replications show to be worse leave, and the others are settled. On the way
there are partial answers: the first after one race, of the layout with the highest bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
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
from .launch import TRACE, Launch, launch, load_test
from .options import Left, Option, Wanted, named, plan_of
from .probing import RECOMMEND_FORMAT, Laboratory
from .rivals import NOT_WEIGHED, Rival, Weighed, kind_of, paired, weigh
from .screening import (
    BEHIND,
    SCREENING,
    Open,
    Screened,
    Screening,
    Worth,
    per_hour,
    whole,
)
from .search import (
    UNBOUNDED,
    Begun,
    Capacity,
    Crossing,
    Probed,
    at_load,
    begin,
    settle,
)
from .slo import Verdict

FINALISTS = 4
"""Deployments that are searched exactly, at first."""
MOST_SEARCHED = 8
"""Most deployments that are searched exactly."""
MARGIN = 0.1
"""The margin below the best for another layout to be a finalist."""
MUCH_LESS = 0.5
"""The part of the best's load below which its neighbour sustains much less."""


@dataclass(frozen=True)
class AtRate:
    """A deployment's replications at the rate that was asked for, pooled."""

    option: Option
    at: list[Probed]
    verdict: Verdict


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
    screening, errors = Screening(lab, Worth(wanted, prices)), OpErrors(lab)
    for known in screening.run():
        yield from _partial(screening, known)
    screened, worth, dropped = list[Screened](), screening.worth, screening.dropped
    for one in screening.found:
        if why := worth.too_many(one.option, one.load):
            dropped[one.option.name] = Left("rate", at=one.load, clause=why)
        else:
            screened.append(one)
    if not screened:
        raise UserError(_nothing(wanted, dropped, screening.lone))
    screening.expect(finalists(screened))
    search = Searches(screening, screened, say)
    yield from search.begin()
    ends = [*search.began.values()]
    if all(isinstance(end, str) and end.startswith(UNBOUNDED) for end in ends):
        raise UserError(f"--slo {wanted.section.slo}: {ends[0]}")
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
    result = Recommendation(ranked, others, dropped, checked, screening.options)
    weighed, at_rate = _weighed(lab, result, worth, errors, screened[0].value * (1 - BEHIND))
    yield replace(result, weighed=weighed, checked=checked | at_rate)


@dataclass
class Searches:
    """The searches for the capacities of the best ``screened`` deployments: those that ``began``,
    and the answers of those that are ``settled``."""

    screening: Screening
    screened: list[Screened]
    say: Say
    began: dict[Screened, Begun | Capacity | str] = field(default_factory=dict)
    settled: list[Answer] = field(default_factory=list)

    def begin(self) -> Iterator[Recommendation]:
        """The first replications of all contenders; the partial answer after each."""
        lab, chosen = self.screening.lab, finalists(self.screened)
        while chosen:
            self.say(f"capacity searches begun: {len(chosen)}")
            exactly = {whole(one.option, one.replicas): one for one in chosen}
            plans = {option: plan_of(option, lab.section, "recommend") for option in exactly}
            pilots = {option: _pilot(one, option) for option, one in exactly.items()}
            yield from self._partial(len({*self.began, *chosen}))
            for first in lab.ended({o: begin(plan, pilots[o]) for o, plan in plans.items()}):
                self.began |= {exactly[option]: one for option, one in first.items()}
                yield from self._partial(len({*self.began, *chosen}))
            further = _contenders(self.screened, self.began, self.screening.worth)
            chosen = further[: MOST_SEARCHED - len(self.began)]

    def settle(self, chosen: Sequence[Screened]) -> Iterator[Recommendation]:
        """The capacities of some; the partial answer after each."""
        options = {whole(one.option, one.replicas): self.began[one] for one in chosen}
        self.say(f"capacity searches to finish: {len(options)}")
        ended = {one: end for one, end in options.items() if not isinstance(end, Begun)}
        searches = {one: settle(end) for one, end in options.items() if isinstance(end, Begun)}
        for outcomes in self.screening.lab.ended(searches):
            ends = ended | outcomes
            self.settled = [Answer.of(one, ends[one]) for one in options if one in ends]
            yield from self._partial(len(options) - len(ends))

    def _partial(self, not_settled: int) -> Iterator[Recommendation]:
        worth, loads = self.screening.worth, dict[Screened, float]()
        settled, rows = {one.option.name: one for one in self.settled}, list[Screened]()
        for one, found in self.began.items():
            load, answer = _load(one, found), settled.get(one.name)
            ends = found.quantile.interval if isinstance(found, Begun) else (0.0, 0.0)
            most = found.quantile.value if isinstance(found, Begun) else 1.0
            if answer is not None:
                load, most = answer.load / (1 if one.option.pooled else one.replicas), answer.load
                ends = answer.interval if load else ends
            if load:
                known = (load * ends[0] / most, load * ends[1] / most)
                rows.append(replace(worth.of(one.option, load), rough=one.rough, known=known))
            loads[one] = load
        rows += [one for _, one in _not_searched(self.screened, loads, worth)]
        rows.sort(key=lambda one: (-one.value, one.name))
        yield from _partial(self.screening, rows, not_settled)


def _partial(
    screening: Screening, known: Sequence[Screened], not_settled: int = 0
) -> Iterator[Recommendation]:
    """The answer so far, if there is one: what is ``known`` of deployments, the best first."""
    if able := [one for one in known if one.value]:
        still = screening.open(able, not_settled)
        yield Recommendation([], able, screening.dropped, {}, screening.options, open=still)


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
        least = min((per_hour(one.option, prices) for one in carry), default=0.0)
        fewer = {
            less: one
            for one in carry
            if one.option.scenario.cluster.replicas > 1
            and (less := _changed(one.option, -1)).name not in checked
            and per_hour(less, prices) < least
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
            value = rate / per_hour(one.option, worth.prices) if carries else 0.0
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
            more = per_hour(_changed(option, 1), worth.prices)
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
            said[name] = f"breaks {one.clause} at {number_text(one.at)} requests/s per server"
    reasons = [why for name, why in said.items() if name in lone and not lone[name][1]]
    if lone and not reasons:
        nearest = min(lone, key=lambda name: lone[name])
        reasons = [f"{lone[nearest][1]}, with {nearest}; with all others it takes longer"]
    reasons = list(dict.fromkeys(reasons or said.values()))
    if str(reasons[0]).startswith(UNBOUNDED):
        return f"--slo {wanted.section.slo}: {reasons[0]}"
    load = "any load" if wanted.rate is None else f"{wanted.rate:g} requests/s"
    listed = "".join(f"\n  {reason}" for reason in reasons[:5])
    return (
        f"--slo {wanted.section.slo}: no deployment of {wanted.model} on up to {wanted.gpus} GPUs "
        f"of {', '.join(wanted.devices)} keeps it under {load}:{listed}"
    )


def _changed(option: Option, by: int) -> Option:
    return whole(option, option.scenario.cluster.replicas + by)


def _value(answer: Answer, wanted: Wanted, prices: Prices, checked: Mapping[str, AtRate]) -> float:
    price = per_hour(answer.option, prices)
    if wanted.rate is None:
        return answer.load / (price * (wanted.gpus / answer.option.gpus))
    # The cheapest deployment that sustains the rate, then the largest reserve.
    carries = carries_rate(answer, wanted.rate, checked)
    return (1e6 + answer.load if carries else answer.load) / price


def carries_rate(answer: Answer, rate: float, checked: Mapping[str, AtRate]) -> bool:
    """Whether a deployment's capacity reaches the rate, and runs at it keep the SLO."""
    there = checked.get(answer.option.name)
    return answer.load >= rate and there is not None and there.verdict.holds


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
        "open": found.open and asdict(found.open),
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
    most = None if one.half is None else one.load * math.exp(one.half)
    most = one.known[1] if one.known else most
    row = {
        "name": one.name,
        "point": option.point,
        "replicas": one.replicas,
        "holds_at_rate": None if there is None else there.verdict.holds,
        "device": " and ".join(option.deployment.gpus),
        "stack": option.deployment.pools[-1].scenario.stack,
        "gpus": option.gpus * one.replicas,
        "about": one.load * one.replicas,
        "at_most": most and most * one.replicas,
        "curve": [] if kept is None else [numbers(kept, whole(option, scale))],
    }
    add_costs(row, one.per_hour * scale)
    return row | {"per_hour": one.per_hour * one.replicas}


def recommend_files(wanted: Wanted, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    rows = content["deployments"]
    launched = {"launch.sh": f"{content['command']}\n".encode()} if content["command"] else {}
    if content["open"]:
        return {SUMMARY: json_bytes(content)} | launched
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
    files |= launched
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
