"""A recommendation as its result: numbers, a table, sentences, a command line, a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.capacity.answer import as_json, numbers
from experiments.capacity.asked import warnings
from experiments.capacity.curves import figure_files, frontier_figures, headroom_figure
from experiments.capacity.folder import RECOMMEND_FORMAT
from experiments.capacity.launch import launch_command
from experiments.capacity.layouts import Wanted
from experiments.capacity.prices import Prices, add_costs
from experiments.capacity.recommend import Recommendation, Screened
from experiments.capacity.written import breaks, headroom, prices_line
from experiments.figures.style import styled
from experiments.results import SUMMARY, json_bytes
from experiments.run.report import number_or_dash
from experiments.run.rich_table import rich_table
from profiler.storage.plain_yaml import dump_yaml
from simulator.views.metric_registry import number_text


def answer_of(found: Recommendation, wanted: Wanted, prices: Prices) -> dict[str, Any]:
    """The content of ``summary.json``."""
    rows = ranked(found, wanted, prices)
    best = found.finalists[0]
    command = launch_command(best.option.scenario)
    replicas = best.option.scenario.cluster.replicas
    content: dict[str, Any] = {
        "format": RECOMMEND_FORMAT,
        "name": "recommend",
        "model": wanted.model,
        "devices": list(wanted.devices),
        "gpus": wanted.gpus if wanted.rate is None else None,
        "rate": wanted.rate,
        "slo": wanted.section.slo,
        "load": wanted.section.load,
        "tolerance": wanted.section.tolerance,
        "winner": rows[0]["name"],
        "command": command,
        "replicas": replicas,
        "deployments": rows,
        "screened": [_only_screened(one, wanted) for one in found.screened],
        "dropped": found.dropped,
        "prices": prices.stated,
        "provenance": "predicted",
    }
    content["lines"] = _lines(content, rows, wanted)
    return content


def ranked(found: Recommendation, wanted: Wanted, prices: Prices) -> list[dict[str, Any]]:
    """The finalists in numbers, each with its price and what it loses by."""
    rows = []
    for answer in found.finalists:
        row = as_json(answer)
        row["gpus_paid"] = paid = wanted.gpus if wanted.rate is None else answer.option.gpus
        add_costs(row, prices.of(row["device"]) * paid, wanted.section.load)
        if answer.load and wanted.rate is not None:  # what it has to spare earns nothing
            row["per_million_output_tokens"] *= max(answer.load / wanted.rate, 1.0)
        rows.append(row)
    best, rate = rows[0], wanted.rate or 0.0
    others = [row for row in rows[1:] if (row["capacity"] or 0.0) >= rate]
    for row in rows:
        row["why"] = _why(best, others) if row is best else _loses(row, best)
    return rows


def _why(best: Mapping[str, Any], others: list[dict[str, Any]]) -> str:
    if not best["capacity"]:
        return _loses(best, best)
    text = (
        f"carries {number_text(best['capacity'])} requests/s at "
        f"{number_text(best['per_million_output_tokens'])} per million output tokens; above that "
        f"{breaks(best['binds'])}"
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
    return f"{', '.join(parts)}; {breaks(binds)}"


def _only_screened(one: Screened, wanted: Wanted) -> dict[str, Any]:
    """What all replicas carry, roughly, and the numbers of one at the largest load it was seen to
    carry."""
    curve = [] if one.kept is None else [numbers(one.kept, one.option)]
    row: dict[str, Any] = {"name": one.option.name, "replicas": one.replicas}
    row |= {"about": one.load * one.replicas, "curve": curve}
    add_costs(row, one.per_hour, wanted.section.load)
    return row


def _lines(content: Mapping[str, Any], rows: list[dict[str, Any]], wanted: Wanted) -> list[str]:
    looked_at = len(rows) + len(content["screened"]) + len(content["dropped"])
    lines = [f"first: {rows[0]['name']} {rows[0]['why']}"]
    lines += [f"next: {row['name']}: {row['why']}" for row in rows[1:2]]
    if content["rate"]:
        lines += _about_replicas(rows, content["rate"])
    each = "" if content["replicas"] == 1 else f" ({content['replicas']} such servers)"
    lines += warnings(rows, wanted.section, "give `capacity` winner.yaml with capacity.requests")
    lines.append(f"start{each}: {content['command']}")
    reasons = Counter(_kind(reason) for reason in content["dropped"].values())
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    lines.append(
        f"{looked_at} deployments: {len(rows)} searched, {len(content['screened'])} screened"
        + (f", {told}" if told else "")
    )
    lines.append(prices_line(content["prices"]))
    return lines


def _about_replicas(rows: list[dict[str, Any]], rate: float) -> list[str]:
    """Whether the first carries the rate, and by how much it misses it with one replica fewer."""
    if not rows[0]["capacity"] or rows[0]["capacity"] < rate:
        return [f"warning: none of them was seen to carry {rate:g} requests/s"]
    name, _, replicas = rows[0]["name"].rpartition(" x ")
    fewer = f"{name} x {int(replicas) - 1}"
    return [
        f"one replica fewer would not do: {fewer} carries {number_text(row['capacity'] or 0.0)} "
        f"requests/s, {100 * (1 - (row['capacity'] or 0.0) / rate):.1f} % less than asked"
        for row in rows
        if row["name"] == fewer
    ]


_UNFIT = "that do not fit or have no op times"


def _kind(reason: str) -> str:
    if "by its op times" in reason:
        return "bounded by their op times"
    if "behind" in reason or "no better" in reason:
        return "behind after one run"
    if "alone" in reason or "under any load" in reason:
        return "that break the SLO under any load"
    return _UNFIT


def recommend_table(content: Mapping[str, Any]) -> Table:
    """The finalists, the best first; the best of those that were only screened; of the other
    shapes, why they were left out."""
    rows = []
    for row in content["deployments"]:
        interval = row.get("interval")
        numbers = [
            number_text(float(row["capacity"] or 0)),
            "-" if interval is None else " to ".join(map(number_text, interval)),
            number_text(row["gpus"]),
            number_or_dash(row["per_million_output_tokens"]),
        ]
        rows.append([row["name"], row["why"], *numbers])
    for one in _of_layouts(content)[:8]:
        name = f"{one['name']} x {one['replicas']}"
        rows.append([name, "screened only", f"about {number_text(one['about'])}", "", "", ""])
    rows += [[name, why, "", "", "", ""] for name, why in list(_left_out(content).items())[:8]]
    currency = content["prices"]["currency"]
    return rich_table(
        ("deployment", "why"),
        ("requests/s", "mean, 95 %", "GPUs", f"{currency} a million output tokens"),
        rows,
        title=f"{content['model']} under {content['slo']!r}",
        caption="predicted; docs/capacity.md says what each number is",
    )


def _of_layouts(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of those that were screened only, the best of each layout that has no other row."""
    found = {_layout(row["name"]): row for row in content["deployments"]}
    searched = len(found)
    for one in content["screened"]:
        found.setdefault(_layout(one["name"]), one)
    return list(found.values())[searched:]


def _left_out(content: Mapping[str, Any]) -> dict[str, str]:
    """A deployment of each shape (TP, PP) that has no row of its own, with the reason: the one
    that came furthest."""
    named = (one["name"] for key in ("deployments", "screened") for one in content[key])
    shown = {_shape(name) for name in named}
    found: dict[str, str] = {}
    dropped = content["dropped"].items()
    # Those that were simulated came further than those that were bounded.
    for name, why in sorted(
        dropped, key=lambda one: "behind" not in one[1] or "op times" in one[1]
    ):
        if _shape(name) not in shown and _kind(why) != _UNFIT:
            shown.add(_shape(name))
            found[name] = why
    return found


def _layout(name: str) -> str:
    return name.partition(" seqs ")[0]


def _shape(name: str) -> str:
    return name.partition(" budget ")[0]


def recommend_files(
    found: Recommendation, wanted: Wanted, content: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    rows = content["deployments"]
    table = pd.DataFrame({key: row.get(key) for key in _COLUMNS} for row in rows)
    with styled():
        fronts = frontier_figures(rows, content["screened"])
        drawn = figure_files({"headroom": headroom_figure(rows, wanted.section), **fronts})
    return {
        SUMMARY: json_bytes(content),
        "recommend.csv": table.to_csv(index=False).encode(),
        "headroom.csv": headroom(rows).to_csv(index=False).encode(),
        "winner.yaml": dump_yaml(winner(found, wanted)).encode(),
        "launch.sh": f"{content['command']}\n".encode(),
        **drawn,
    }


_COLUMNS = (
    *("name", "device", "tp", "pp", "replicas", "gpus", "capacity", "mean", "per_hour"),
    *("per_million_output_tokens", "why"),
)


def winner(found: Recommendation, wanted: Wanted) -> dict[str, Any]:
    """A configuration of the first, to simulate it again, at its capacity or at the rate asked
    for, or to search its capacity."""
    best = found.finalists[0]
    scenario = best.option.scenario.model_dump(mode="json", exclude_none=True)
    rate = wanted.rate or float(f"{best.load:.6g}")
    scenario["workload"] |= {"arrivals": {"kind": "poisson", "rate": rate}}
    section = wanted.section.model_dump(mode="json", exclude_none=True)
    return {"name": "winner", "capacity": section, **scenario}
