"""The answer as tables: on the screen, as CSV, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.capacity.capacity_section import CapacitySection
from experiments.capacity.judgement import OVERLOAD
from experiments.run.report import number_or_dash
from experiments.run.rich_table import rich_table
from simulator.views.metric_registry import number_text

UNITS = {"rate": "requests/s", "clients": "clients"}
_BECAUSE = {
    "memory": "the KV cache is full",
    "bubbles": "stages wait for each other",
    "queueing": "requests wait for their first chunk",
    "iterations": "the batches themselves take that long",
}


def capacity_table(
    found: Sequence[Mapping[str, Any]], section: CapacitySection, currency: str
) -> Table:
    """A row a deployment: its capacity, how sure it is, what binds, and what its tokens cost."""
    unit, rows = UNITS[section.load], []
    for one in found:
        binds = one.get("binds") or {}
        cells = [one["name"], binds.get("slo", ""), binds.get("because", "")]
        numbers = [one["capacity"], one.get("mean"), one.get("interval"), one.get("band")]
        numbers.append(None if one["capacity"] is None else one["capacity"] / one["gpus"])
        numbers.append(one.get("per_million_output_tokens"))
        rows.append([*cells, *map(number_or_dash, numbers)])
    return rich_table(
        ("deployment", "breaks first", "because of"),
        (
            *(f"capacity ({unit})", "mean", "95 % interval", "with op errors, 90 %"),
            *(f"{unit} a GPU", f"{currency} a million output tokens"),
        ),
        rows,
        title=f"the SLO {section.slo!r} holds up to",
        caption="predicted; docs/capacity.md says what each number is",
    )


def breaks(binds: Mapping[str, Any], much: str = "") -> str:
    """What breaks first above a capacity (by ``much``), and why, in words."""
    why = _BECAUSE[binds["because"]]
    if binds["slo"] != OVERLOAD:
        return f"{binds['slo']}{much} breaks first, because {why}"
    said = "more requests arrive than are served, so that they wait longer than the SLO allows"
    return said if binds["because"] == "queueing" else f"{said}, because {why}"


def sentence(deployments: Sequence[Mapping[str, Any]], unit: str, currency: str) -> str:
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


def reasons(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each deployment whose search ended: what breaks first, and why."""
    lines = []
    for one in found:
        binds = one.get("binds")
        if not binds:
            continue
        even, much, slo = "", "", binds["slo"]
        if not one["capacity"]:
            even = "even under a small load "
            there = [p["stress"].get(slo) for p in one["curve"] if p["load"] == binds["at_load"]]
            much = f" ({number_text(there[0])} times the limit)" if any(there) else ""
        lines.append(
            f"{one['name']}: {even}{breaks(binds, much)} "
            f"(at {number_text(binds['at_load'])}: KV cache {100 * binds['kv_peak_share']:.0f} % "
            f"full, bubbles {100 * binds['bubble_share']:.0f} %, "
            f"{100 * binds['queueing_share_of_ttft']:.0f} % of TTFT is waiting, "
            f"batch {binds['mean_batch']:.0f})"
        )
    return lines


def headroom(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
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


def capacities(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
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


def prices_line(prices: Mapping[str, str]) -> str:
    """Where the prices are from."""
    return f"prices in {prices['currency']} of {prices['date']}: {prices['mark']}"
