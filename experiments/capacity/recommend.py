"""From a question to a deployment: which layout carries most for its price under an SLO?

What cannot be deployed, or cannot keep the SLO even alone, is dropped without a simulation. The
others are screened in the order of their bounds, one replica each, with short runs; those whose
bound is below what another one was seen to carry are not simulated. The best few are then searched
as ``capacity`` does, with all their replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.capacity.answer import Answer, answers, as_json
from experiments.capacity.bounds import alone, most_requests_per_s
from experiments.capacity.layouts import Wanted, deployable
from experiments.capacity.options import Option, plan_of
from experiments.capacity.prices import Prices, per_million_tokens
from experiments.capacity.probing import Laboratory
from experiments.capacity.search import Crossing, pilot
from experiments.config.errors import ConfigError
from profiler.storage.progress import Say
from simulator.views.metric_registry import number_text

WAVE = 12
"""Deployments screened side by side, before bounds are compared again."""
SCREENING = 0.05
"""The tolerance of screening; what is this much below the best may still be better."""
MARGIN, FINALISTS = 0.1, 4
"""How far below the best screened one a finalist may be, and how many there are."""


@dataclass(frozen=True)
class Screened:
    """A deployment after screening: what one replica carries, and how many replicas there are.

    ``value`` is what is ranked: requests a second for a unit of money an hour.
    """

    option: Option
    load: float
    replicas: int
    value: float


@dataclass(frozen=True)
class Recommendation:
    """The finalists' answers, the best first; the others that were screened; why others were
    dropped."""

    finalists: list[Answer]
    screened: list[Screened]
    dropped: dict[str, str]


def recommend(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, finalists: int = FINALISTS
) -> Recommendation:
    """The best deployments. Raises ConfigError where none keeps the SLO under any load."""
    options, dropped = deployable(wanted)
    bounded: dict[Option, float] = {}
    for number, option in enumerate(options):
        lab.progress("bounds", number, len(options))
        why = alone(option, lab.section.objectives)
        if why:
            dropped[option.name] = why
        else:
            bounded[option] = most_requests_per_s(option)
    lab.progress("bounds", len(options), len(options))
    screened = _screen(lab, wanted, prices, bounded, dropped, say)
    if not screened:
        raise ConfigError(_nothing(wanted, dropped))
    least = screened[0].value * (1 - MARGIN)
    chosen = [one for one in screened if one.value >= least][:finalists]
    say(f"searching {len(chosen)} finalists exactly")
    found = answers(lab, [_whole(one) for one in chosen], "recommend", bands=False)
    ranked = sorted(found, key=lambda one: -_value(one, wanted, prices))
    names = {one.option.name for one in chosen}
    return Recommendation(ranked, [s for s in screened if s.option.name not in names], dropped)


def _nothing(wanted: Wanted, dropped: Mapping[str, str]) -> str:
    reasons = dict.fromkeys(dropped.values())
    listed = "".join(f"\n  {reason}" for reason in list(reasons)[:5])
    return (
        f"--slo {wanted.section.slo}: no deployment of {wanted.model} on up to {wanted.gpus} GPUs "
        f"of {', '.join(wanted.devices)} keeps it under any load:{listed}"
    )


def _screen(
    lab: Laboratory,
    wanted: Wanted,
    prices: Prices,
    bounded: Mapping[Option, float],
    dropped: dict[str, str],
    say: Say,
) -> list[Screened]:
    """What each carries, roughly, the best first; adds those not worth a simulation to
    ``dropped``."""
    waiting = sorted(
        bounded, key=lambda option: -_screened(option, bounded[option], wanted, prices).value
    )
    total, found, best = len(waiting), list[Screened](), None
    while waiting:
        wave, waiting = waiting[:WAVE], waiting[WAVE:]
        plans = {option: plan_of(option, lab.section, "recommend") for option in wave}
        searches = {
            option: pilot(replace(plan, tolerance=max(plan.tolerance, SCREENING)))
            for option, plan in plans.items()
        }
        done = total - len(waiting) - len(wave)
        for option, outcome in lab.pursue(searches, done, total).items():
            if isinstance(outcome, str):
                dropped[option.name] = outcome
            elif not isinstance(outcome[1], Crossing):
                dropped[option.name] = f"breaks {outcome[1].verdict.worst} under any load"
            else:
                found.append(_screened(option, outcome[1].load, wanted, prices))
        found.sort(key=lambda one: (-one.value, one.option.name))
        if found and found[0] is not best:
            best = found[0]
            say(f"best so far: {_told(best)}")
        left = []
        for option in waiting:
            most = _screened(option, bounded[option], wanted, prices)
            if best is not None and most.value < best.value:
                dropped[option.name] = (
                    f"at most {number_text(most.load * most.replicas)} requests/s by its op times, "
                    f"less than {best.option.name} for its price"
                )
            else:
                left.append(option)
        waiting = left
    return found


def _screened(option: Option, load: float, wanted: Wanted, prices: Prices) -> Screened:
    gpus = option.gpus
    if wanted.rate is None:
        replicas, paid = wanted.gpus // gpus, wanted.gpus
        carried = replicas * load
    else:
        replicas = max(1, math.ceil(wanted.rate / load))
        paid, carried = replicas * gpus, wanted.rate
        if paid > wanted.gpus:
            carried = 0.0
    value = carried / max(prices.of(option.deployment.device.name) * paid, 1e-9)
    return Screened(option, load, replicas, value)


def _told(one: Screened) -> str:
    carried = number_text(one.load * one.replicas)
    return f"{one.option.name} x {one.replicas}: about {carried} requests/s"


def _whole(one: Screened) -> Option:
    """The deployment with all its replicas."""
    scenario = one.option.scenario
    cluster = scenario.cluster.model_copy(update={"replicas": one.replicas})
    whole = scenario.model_copy(update={"cluster": cluster})
    deployment = replace(one.option.deployment, scenario=whole)
    return Option(f"{one.option.name} x {one.replicas}", one.option.point, deployment)


def _value(answer: Answer, wanted: Wanted, prices: Prices) -> float:
    paid = wanted.gpus if wanted.rate is None else answer.option.gpus
    price = max(prices.of(answer.option.deployment.device.name) * paid, 1e-9)
    if wanted.rate is None:
        return answer.load / price
    # Of those that carry the rate the cheapest, and then the one with most to spare.
    return (1e6 + answer.load if answer.load >= wanted.rate else answer.load) / price


# The table -----------------------------------------------------------------------------------


def ranked(found: Recommendation, wanted: Wanted, prices: Prices) -> list[dict[str, Any]]:
    """The finalists in numbers, each with its price and what it loses by."""
    rows = []
    for answer in found.finalists:
        row = as_json(answer)
        at = row.get("at_capacity")
        per_request = at["output_tokens_per_s"] / at["load"] if at else 0.0
        load = answer.load if wanted.rate is None else min(wanted.rate, answer.load)
        paid = wanted.gpus if wanted.rate is None else answer.option.gpus
        price = prices.of(row["device"])
        row["gpus_paid"] = paid
        row["per_hour"] = price * paid
        row["per_million_output_tokens"] = per_million_tokens(price, paid, load * per_request)
        rows.append(row)
    best = rows[0]
    for row in rows:
        row["why"] = _why(best, rows[1:]) if row is best else _loses(row, best)
    return rows


def _why(best: Mapping[str, Any], others: list[dict[str, Any]]) -> str:
    binds = best["binds"]
    text = (
        f"carries {number_text(best['capacity'])} requests/s at "
        f"{number_text(best['per_million_output_tokens'])} per million output tokens; then "
        f"{binds['slo']} breaks ({binds['because']})"
    )
    if others and others[0]["capacity"]:
        ahead = best["per_million_output_tokens"] / others[0]["per_million_output_tokens"] - 1
        text += f"; {-100 * ahead:.1f} % cheaper a token than the next"
    return text


def _loses(row: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    if not row["capacity"]:
        return str(row.get("error") or "keeps the SLO under no load")
    parts = [f"{100 * (row['capacity'] / best['capacity'] - 1):+.1f} % requests/s"]
    dearer = row["per_million_output_tokens"] / best["per_million_output_tokens"] - 1
    parts.append(f"{100 * dearer:+.1f} % a token")
    low, high = best["interval"] or (best["capacity"], best["capacity"])
    if low <= row["mean"] <= high:
        parts.append("within the interval of the first")
    binds, first = row["binds"], best["binds"]
    for key, name in (("bubble_share", "bubbles"), ("kv_peak_share", "KV cache full")):
        if abs(binds[key] - first[key]) >= 0.05:
            parts.append(f"{name} {100 * binds[key]:.0f} %, there {100 * first[key]:.0f} %")
    return f"{', '.join(parts)}; {binds['slo']} breaks ({binds['because']})"
