"""The answer of a search for capacities, in words and tables, and its tables as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sarathi_sim.experiments.capacity.slo import OVERLOAD, REJECTED
from sarathi_sim.experiments.content import (
    Section,
    SortableTable,
    assumed_of,
    doubts_of,
    number_or_dash,
)
from sarathi_sim.experiments.sweeps.points import halfway, neighbours
from sarathi_sim.simulator.views.metric_registry import number_text

Deployments = Sequence[Mapping[str, Any]]
UNITS = {"rate": "requests/s", "clients": "clients"}
_BECAUSE = {
    "memory": "the KV cache is full",
    "bubbles": "stages wait for each other",
    "queueing": "requests wait for their first chunk",
    "iterations": "the batches themselves take that long",
    "too long": "they are longer than the deployment serves",
}


MORE = "give more capacity.requests, most_requests or replications"
NOT_SETTLED = "not settled"
MUCH_LESS = 0.5
"""The part of the best's load below which its neighbour carries much less."""


def capacity_answer(found: Mapping[str, Any]) -> Section:
    """The answer of what ``capacity`` found, as its ``summary.json`` has it: which deployment
    carries how much, how sure that is, what binds, and what its tokens cost."""
    deployments, unit, load = list(found["deployments"]), UNITS[found["load"]], found["load"]
    currency = found["prices"]["currency"]
    what = "rate of requests" if load == "rate" else "number of clients"
    broken = breaking(deployments)
    return Section(
        kind="capacity",
        name=str(found["name"]),
        question=f"Up to which {what} does each deployment hold the SLO {found['slo']}?",
        answer=sentence(deployments, unit, currency),
        table=_table(deployments, unit, currency),
        assumptions=assumed(found),
        details=[broken] if broken.rows else [],
        about=str(found["description"] or ""),
        warnings=[
            *(*doubts_of(found), *doubts(deployments, found["tolerance"], MORE)),
            *_cliffs(deployments),
        ],
    )


def _table(deployments: Deployments, unit: str, currency: str) -> SortableTable:
    rows = []
    for one in deployments:
        binds, capacity = one.get("binds") or {}, one["capacity"]
        cells = [one["name"], binds.get("slo", one.get("error", "")), binds.get("because", "")]
        sure = (one["interval"], one.get("band")) if capacity is not None else (None, None)
        numbers = (
            *(*sure, one["gpus"], None if capacity is None else capacity / one["gpus"]),
            one.get("per_million_output_tokens"),
        )
        rows.append([*map(str, cells), capacity_text(one), *map(number_or_dash, numbers)])
    headings = (
        *("deployment", "breaks first", "because of", f"capacity ({unit})", "95 % interval"),
        *("with op errors, 90 %", "GPUs", f"{unit} a GPU"),
        f"{currency} a million output tokens".lstrip(),
    )
    note = "Predicted. docs/capacity.md says what each number is."
    return SortableTable("Capacity", headings, rows, note, text=3)


def capacity_text(one: Mapping[str, Any]) -> str:
    """A deployment's capacity, and the share of requests that it rejects; or "not settled"."""
    if one["capacity"] is None:
        return "-" if one.get("error") else NOT_SETTLED
    share = one["rejected_share"]
    text = number_text(one["capacity"])
    return f"{text} ({share:.1%} more rejected)" if share and one["capacity"] else text


def assumed(found: Mapping[str, Any]) -> list[str]:
    """What was assumed: of the deployments, of capacities and prices, and what was not tried."""
    prices, told = found["prices"], assumed_of(found)
    if found.get("workload", "") is None:
        told.insert(0, "workload: none was given, so Azure's conversations of 2023")
    lengths = {
        (one["at_capacity"]["requests"], one["simulated_replicas"] < one["replicas"])
        for one in found["deployments"]
        if one.get("at_capacity")
    }
    if lengths:
        shortest, longest = min(lengths)[0], max(lengths)[0]
        many = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        told.append(
            f"capacity: {found['keep']:.0%} of runs of {many} requests keep the SLO there, and all "
            "runs pooled"
        )
        if any(alike for _, alike in lengths):
            told.append(
                "replicas: one stands for all, as a router that takes turns hands each the same "
                "traffic"
            )
    told.append(f"prices: {prices['currency']} of {prices['date']}, {prices['mark']}")
    return [*told, f"not tried: {found['not_tried']}"] if "not_tried" in found else told


def doubts(deployments: Deployments, tolerance: float, advice: str) -> list[str]:
    """Capacities that are not known, or less certain than the tolerance asks for, with what to do
    about it; and those that stand next to one that breaks."""
    lines = []
    for one in deployments:
        if one.get("error"):
            lines.append(f"{one['name']}: no capacity: {one['error']}")
        elif not one["settled"]:
            lines.append(f"{one['name']}: {NOT_SETTLED}: {one['why_not']}: {advice}")
        elif one["capacity"]:
            low, high = one["interval"]
            width = (high - low) / one["capacity"]
            if width > tolerance:
                lines.append(
                    f"{one['name']}: the interval is {100 * width:.1f} % wide, more than the "
                    f"tolerance: {advice}"
                )
        if share := one.get("rejected_share"):
            too_many = ", more than `rejected` allows" if _refuses(one) else ""
            why = one["rejected_because"]
            told = f"{share:.1%} of the requests are rejected{too_many}: the longest one {why}"
            lines.append(f"{one['name']}: {told}")
    return lines


def _cliffs(deployments: Deployments) -> list[str]:
    """Each neighbour of the best that carries much less, with something between them."""
    loads = [one["capacity"] or 0.0 for one in deployments]
    best, points = loads.index(max(loads)), [one.get("point", {}) for one in deployments]
    return [
        f"{deployments[best]['name']} carries the most, and {deployments[place]['name']} next to "
        f"it {number_text(loads[place])}: between them another may carry more: give --refine"
        for key, place in neighbours(best, points)
        if loads[place] < MUCH_LESS * loads[best]
        and deployments[place]["capacity"] is not None
        and halfway(points[best][key], points[place][key]) is not None
    ]


def _refuses(one: Mapping[str, Any]) -> bool:
    """Whether a deployment carries nothing because it rejects too many requests."""
    return one["capacity"] == 0 and (one.get("binds") or {}).get("slo") == REJECTED


def breaks(binds: Mapping[str, Any], much: str = "") -> str:
    """What breaks first above a capacity (by ``much``), and why, in words."""
    why = _BECAUSE[binds["because"]]
    if binds["slo"] == REJECTED:
        return f"too many requests are rejected, because {why}"
    if binds["slo"] != OVERLOAD:
        return f"{binds['slo']}{much} breaks first, because {why}"
    said = "more requests arrive than are served, so that they wait longer than the SLO allows"
    return said if binds["because"] == "queueing" else f"{said}, because {why}"


def sentence(deployments: Deployments, unit: str, currency: str) -> str:
    """The answer in a sentence: which deployment carries most, by how much, and what binds it."""
    able = [one for one in deployments if one["capacity"]]
    if not able:
        if any(not one["settled"] for one in deployments):
            return "No capacity was found: the runs were too short, or failed."
        if all(map(_refuses, deployments)):
            least = min(one["rejected_share"] for one in deployments)
            return (
                f"No deployment holds the SLO: {least:.1%} of the requests, or more, are rejected."
            )
        return "No deployment holds the SLO, even under a small load."
    best, *others = sorted(able, key=lambda one: -one["capacity"])
    what = "carries the most," if others else "carries"
    gpus = f"{best['gpus']} GPU{'s' if best['gpus'] > 1 else ''}"
    said = f"{best['name']} {what} {number_text(best['capacity'])} {unit} on {gpus}"
    if best["rejected_share"]:
        said += f" and rejects {best['rejected_share']:.1%} of what is offered"
    if others:
        second = others[0]
        more = 100 * (best["capacity"] / second["capacity"] - 1)
        lower, upper = best.get("interval"), second.get("interval")
        unsure = lower and upper and upper[1] >= lower[0]
        said += f" ({more:.0f} % more than {second['name']}"
        said += ", whose interval overlaps)" if unsure else ")"
    binds = best.get("binds") or {}
    if binds:
        said += f"; above that {breaks(binds)}"
    cheap = [one for one in able if one.get("per_million_output_tokens")]
    if len(cheap) > 1:
        one = min(cheap, key=lambda one: one["per_million_output_tokens"])
        cost = number_text(one["per_million_output_tokens"])
        said += f"; {one['name']} is the cheapest, {cost} {currency} a million output tokens"
    per_gpu = max(able, key=lambda one: one["capacity"] / one["gpus"])
    if per_gpu["gpus"] != best["gpus"]:
        rate = number_text(per_gpu["capacity"] / per_gpu["gpus"])
        said += f"; {per_gpu['name']} carries the most a GPU, {rate} {unit}"
    return f"{said}."


def breaking(deployments: Deployments) -> SortableTable:
    """For each deployment whose search ended: what breaks first, why, and how busy it is then."""
    rows = []
    for one in deployments:
        binds = one.get("binds")
        if not binds:
            continue
        even, much, slo = "", "", binds["slo"]
        if one["capacity"] == 0:
            even = "even under a small load "
            there = [p["stress"].get(slo) for p in one["curve"] if p["load"] == binds["at_load"]]
            much = f" ({number_text(there[0])} times the limit)" if any(there) else ""
        shares = [binds[key] for key in ("kv_peak_share", "bubble_share", "queueing_share_of_ttft")]
        rows.append(
            [one["name"], even + breaks(binds, much), number_text(binds["at_load"])]
            + [f"{100 * share:.0f}" for share in shares]
            + [f"{binds['mean_batch']:.0f}"]
        )
    headings = (
        *("deployment", "what breaks first", "at load", "KV cache full (%)", "bubbles (%)"),
        *("waiting, of TTFT (%)", "batch"),
    )
    return SortableTable("What breaks first", headings, rows, text=2)


def headroom(found: Deployments) -> pd.DataFrame:
    """A row a probe of the headroom curves."""
    rows = []
    for one in found:
        for probe in one.get("curve", ()):
            flat = {key: value for key, value in probe.items() if key not in ("slo", "stress")}
            share = probe["load"] / one["offered"] if one["capacity"] else None
            rows.append(
                {"deployment": one["name"], "part_of_capacity": share, **flat, **probe["slo"]}
                | {f"{text}, part of the limit": part for text, part in probe["stress"].items()}
            )
    return pd.DataFrame(rows)


def capacities(found: Deployments) -> pd.DataFrame:
    """A row a deployment."""
    rows = []
    for one in found:
        low, high = one.get("interval") or (None, None)
        slow, fast = one.get("band") or (None, None)
        binds = one.get("binds") or {}
        row = {key: one[key] for key in ("name", "device", "tp", "pp", "replicas", "gpus")}
        row |= {"policy": one["policy"], "capacity": one["capacity"], "settled": one["settled"]}
        row |= {key: one.get(key) for key in ("offered", "rejected_share", "saturation")}
        row |= {"interval_low": low, "interval_high": high, "band_low": slow, "band_high": fast}
        row |= {key: one.get(key) for key in ("per_hour", "per_million_output_tokens")}
        rows.append({**row, "breaks_first": binds.get("slo"), "because": binds.get("because")})
    return pd.DataFrame(rows)
