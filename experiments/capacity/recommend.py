"""From a question to a deployment: which layout carries most for its price under an SLO?

What cannot be deployed, or cannot keep the SLO even alone, is dropped without a simulation. The
others are screened (``screening.py``). The best few are then searched as ``capacity`` does, with
all their replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.capacity.answer import Answer, answers, as_json
from experiments.capacity.bounds import alone, most_requests_per_s
from experiments.capacity.layouts import Wanted, deployable
from experiments.capacity.options import Option
from experiments.capacity.prices import Prices, per_million_tokens
from experiments.capacity.probing import Laboratory
from experiments.capacity.screening import Screened, Worth, finalists, screen
from experiments.config.errors import ConfigError
from profiler.storage.progress import Say
from simulator.views.metric_registry import number_text

FINALISTS = 4
"""How many are searched exactly, at most."""


@dataclass(frozen=True)
class Recommendation:
    """The finalists' answers, the best first; the others that were screened; why others were
    dropped."""

    finalists: list[Answer]
    screened: list[Screened]
    dropped: dict[str, str]


def recommend(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, most: int = FINALISTS
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
            bounded[option] = most_requests_per_s(option, lab.section.objectives)
    lab.progress("bounds", len(options), len(options))
    screened = screen(lab, Worth(wanted, prices), bounded, dropped, say)
    if not screened:
        raise ConfigError(_nothing(wanted, dropped))
    chosen = finalists(screened, most)
    say(f"searching {len(chosen)} of them exactly")
    found = answers(lab, [_whole(one) for one in chosen], "recommend", bands=False)
    ranked = sorted(found, key=lambda one: -_value(one, wanted, prices))
    return Recommendation(ranked, [one for one in screened if one not in chosen], dropped)


def _nothing(wanted: Wanted, dropped: Mapping[str, str]) -> str:
    reasons = dict.fromkeys(dropped.values())
    listed = "".join(f"\n  {reason}" for reason in list(reasons)[:5])
    return (
        f"--slo {wanted.section.slo}: no deployment of {wanted.model} on up to {wanted.gpus} GPUs "
        f"of {', '.join(wanted.devices)} keeps it under any load:{listed}"
    )


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
