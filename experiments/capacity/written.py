"""The answer of a search for capacities, in words and tables, and its tables as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pandas as pd

from experiments.capacity.judgement import OVERLOAD
from experiments.content import Section, SortableTable, number_or_dash, thinned
from simulator.views.metric_registry import number_text

Deployments = Sequence[Mapping[str, Any]]
UNITS = {"rate": "requests/s", "clients": "clients"}
_BECAUSE = {
    "memory": "the KV cache is full",
    "bubbles": "stages wait for each other",
    "queueing": "requests wait for their first chunk",
    "iterations": "the batches themselves take that long",
}


MORE = "give more capacity.requests or replications"


def capacity_answer(found: Mapping[str, Any]) -> Section:
    """The answer of what ``capacity`` found, as its ``summary.json`` has it: which deployment
    carries how much, how sure that is, what binds, and what its tokens cost."""
    deployments, unit, load = list(found["deployments"]), UNITS[found["load"]], found["load"]
    currency = found["prices"]["currency"] if found.get("prices") else ""  # once there was none
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
        warnings=doubts(deployments, found["tolerance"], MORE),
    )


def _table(deployments: Deployments, unit: str, currency: str) -> SortableTable:
    rows = []
    for one in deployments:
        binds, capacity = one.get("binds") or {}, one["capacity"]
        cells = [one["name"], binds.get("slo", one.get("error", "")), binds.get("because", "")]
        numbers = (
            *(capacity, one.get("mean"), one.get("interval"), one.get("band")),
            *(one["gpus"], None if capacity is None else capacity / one["gpus"]),
            one.get("per_million_output_tokens"),
        )
        rows.append([*map(str, cells), *map(number_or_dash, numbers)])
    headings = (
        *("deployment", "breaks first", "because of", f"capacity ({unit})", "mean"),
        *("95 % interval", "with op errors, 90 %", "GPUs", f"{unit} a GPU"),
        f"{currency} a million output tokens".lstrip(),
    )
    note = "Predicted. docs/capacity.md says what each number is."
    return SortableTable("Capacity", headings, rows, note, text=3)


def assumed(found: Mapping[str, Any]) -> list[str]:
    """What op times, memory, the host's time and prices are from."""
    prices = found.get("prices")
    told = thinned(chain(*found.get("notes", {}).values()))
    if prices:
        told.append(f"prices in {prices['currency']} of {prices['date']}: {prices['mark']}")
    return told


def doubts(deployments: Deployments, tolerance: float, advice: str) -> list[str]:
    """Capacities that are less certain than the tolerance asks for, with what to do about it."""
    lines = []
    for one in deployments:
        if one.get("error"):
            lines.append(f"{one['name']}: no capacity: {one['error']}")
        elif one["capacity"] and one["interval"] is None:
            lines.append(f"{one['name']}: one run, so it has no interval")
        elif one["capacity"]:
            low, high = one["interval"]
            width = (high - low) / one["mean"]
            if width > tolerance:
                lines.append(
                    f"{one['name']}: the interval is {100 * width:.1f} % wide, more than the "
                    f"tolerance: {advice}"
                )
        at = one.get("at_capacity")
        if at and at["overloaded"]:
            lines.append(
                f"{one['name']}: its queue still grows at {one['capacity']:.3g}, so runs of "
                f"{at['requests']:,} requests end before the SLO breaks: {advice}"
            )
    return lines


def breaks(binds: Mapping[str, Any], much: str = "") -> str:
    """What breaks first above a capacity (by ``much``), and why, in words."""
    why = _BECAUSE[binds["because"]]
    if binds["slo"] != OVERLOAD:
        return f"{binds['slo']}{much} breaks first, because {why}"
    said = "more requests arrive than are served, so that they wait longer than the SLO allows"
    return said if binds["because"] == "queueing" else f"{said}, because {why}"


def sentence(deployments: Deployments, unit: str, currency: str) -> str:
    """The answer in a sentence: which deployment carries most, by how much, and what binds it."""
    able = [one for one in deployments if one["capacity"]]
    if not able:
        if any(one["capacity"] is None for one in deployments):
            return "No capacity was found."
        return "No deployment holds the SLO, even under a small load."
    best, *others = sorted(able, key=lambda one: -one["capacity"])
    what = "carries the most," if others else "carries"
    gpus = f"{best['gpus']} GPU{'s' if best['gpus'] > 1 else ''}"
    said = f"{best['name']} {what} {number_text(best['capacity'])} {unit} on {gpus}"
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
        if not one["capacity"]:
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
            share = probe["load"] / one["capacity"] if one["capacity"] else None
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
        row |= {"policy": one["policy"], "capacity": one["capacity"], "mean": one.get("mean")}
        row |= {"interval_low": low, "interval_high": high, "band_low": slow, "band_high": fast}
        row |= {key: one.get(key) for key in ("per_hour", "per_million_output_tokens")}
        rows.append({**row, "breaks_first": binds.get("slo"), "because": binds.get("because")})
    return pd.DataFrame(rows)
