"""A recommendation as its result: numbers, an answer in words and tables, a command line, a
configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sarathi_sim.experiments.capacity.answer import (
    as_json,
    numbers,
    pooled_numbers,
    said_of,
    scenario_at,
)
from sarathi_sim.experiments.capacity.curves import figure_files, frontier_figures, headroom_figure
from sarathi_sim.experiments.capacity.folder import RECOMMEND_FORMAT
from sarathi_sim.experiments.capacity.launch import Launch, launch
from sarathi_sim.experiments.capacity.layouts import Wanted
from sarathi_sim.experiments.capacity.prices import Prices, add_costs
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.recommend import (
    Recommendation,
    Screened,
    carries_rate,
    refined,
    whole,
)
from sarathi_sim.experiments.capacity.written import (
    MUCH_LESS,
    NOT_SETTLED,
    UNITS,
    assumed,
    breaking,
    breaks,
    capacity_text,
    doubts,
    headroom,
)
from sarathi_sim.experiments.content import Section, SortableTable, doubts_of, number_or_dash
from sarathi_sim.experiments.figures.style import styled
from sarathi_sim.experiments.results import SUMMARY, json_bytes
from sarathi_sim.experiments.sweeps.neighbours import halfway, neighbours
from sarathi_sim.profiler.storage.child import Say
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.simulator.views.metric_registry import number_text


def recommended(
    lab: Laboratory, wanted: Wanted, prices: Prices, say: Say, rounds: int
) -> dict[str, Any]:
    """Look for the best deployments; the content of ``summary.json``. Raises ConfigError where none
    keeps the SLO."""
    found = refined(lab, wanted, prices, say, rounds)
    lab.write_tables()
    return answer_of(found, wanted, prices)


def answer_of(found: Recommendation, wanted: Wanted, prices: Prices) -> dict[str, Any]:
    """The content of ``summary.json``. Without a deployment that carries anything, or the rate,
    ``winner`` and ``command`` are None; ``needs`` says which checkpoint a command would need."""
    rows = ranked(found, wanted, prices)
    best = found.finalists[0].option
    carries = rows[0]["carries"]
    started = launch(best.scenario) if carries else Launch(None)
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
        "keep": wanted.section.replications.keep,
        "may_reject": wanted.section.rejected,
        "workload": wanted.stated,
        "winner": rows[0]["name"] if carries else None,
        "command": started.command,
        "needs": started.needs,
        "replicas": best.scenario.cluster.replicas,
        "deployments": rows,
        "one_fewer": _one_fewer(found, wanted) if carries else None,
        "screened": [_only_screened(one) for one in found.screened],
        "dropped": found.dropped,
        **said_of([one.option for one in found.finalists], wanted.section.load),
        "doubts": found.doubts,
        "not_tried": wanted.not_tried,
        "prices": prices.stated,
        "provenance": "predicted",
    }
    return content | recommend_answer(content).words()


def ranked(found: Recommendation, wanted: Wanted, prices: Prices) -> list[dict[str, Any]]:
    """The finalists in numbers, each with its price and what it loses by.

    ``carries`` is the load that each is asked for: the rate, or its capacity; None where it does
    not carry that. ``per_million_output_tokens`` is the price of a million at that load, and
    ``at_rate`` what replications do at the rate.
    """
    rows = []
    for answer in found.finalists:
        row = as_json(answer, wanted.section.load)
        row["gpus_paid"] = paid = wanted.gpus if wanted.rate is None else answer.option.gpus
        row["carries"], row["at_rate"] = row["capacity"] or None, None
        if wanted.rate is not None:
            carries = carries_rate(answer, wanted.rate, found.checked)
            row["carries"] = wanted.rate if carries else None
            there = found.checked.get(row["name"])
            if there is not None:
                row["at_rate"] = at = pooled_numbers(there.at, there.verdict, there.option)
                row["scenario"] = scenario_at(there.option, at, wanted.section.load)
        add_costs(row, prices.of(row["device"]) * paid)
        rows.append(row)
    best = rows[0]
    others = [row for row in rows[1:] if row["carries"]]
    currency = prices.currency
    for row in rows:
        row["why"] = _why(best, others, currency) if row is best else _loses(row, best)
    return rows


def _why(best: Mapping[str, Any], others: list[dict[str, Any]], currency: str) -> str:
    if not best["carries"]:
        return _loses(best, best)
    share, cost = best["rejected_share"], best["per_million_output_tokens"]
    text = (
        f"carries {number_text(best['carries'])} requests/s at {number_text(cost)} {currency} per "
        "million output tokens"
    )
    if share:
        text += f" and rejects {share:.1%} of what is offered"
    if best["at_rate"]:
        dearest = best["at_capacity"]["per_million_output_tokens"]
        text += (
            f"; it carries up to {number_text(best['capacity'])} requests/s, then at "
            f"{number_text(dearest)} {currency}"
        )
    text += f"; above that {breaks(best['binds'])}"
    if others:
        ahead = cost / others[0]["per_million_output_tokens"] - 1
        text += f"; {-100 * ahead:.1f} % cheaper a token than the next"
    return text


def _loses(row: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    if not row["capacity"]:
        kept = f"{NOT_SETTLED}: {row.get('why_not')}" if not row["settled"] else ""
        return str(row.get("error") or kept or "keeps the SLO under no load")
    if not best["capacity"]:
        return breaks(row["binds"])
    parts = [f"{100 * (row['capacity'] / best['capacity'] - 1):+.1f} % requests/s"]
    if row["carries"] and best["carries"]:
        dearer = row["per_million_output_tokens"] / best["per_million_output_tokens"] - 1
        parts.append(f"{100 * dearer:+.1f} % a token")
    low, high = best["interval"]
    if low <= row["capacity"] <= high:
        parts.append("within the interval of the first")
    binds, first = row["binds"], best["binds"]
    for key, name in (("bubble_share", "bubbles"), ("kv_peak_share", "KV cache full")):
        if abs(binds[key] - first[key]) >= 0.05:
            parts.append(f"{name} {100 * binds[key]:.0f} %, there {100 * first[key]:.0f} %")
    return f"{', '.join(parts)}; {breaks(binds)}"


def _one_fewer(found: Recommendation, wanted: Wanted) -> dict[str, Any] | None:
    """What the first does at the rate with one replica fewer, where that was run."""
    best = found.finalists[0].option
    name, _, replicas = best.name.rpartition(" x ")
    there = found.checked.get(f"{name} x {int(replicas) - 1}")
    if there is None or there.verdict.holds:
        return None
    worst = there.verdict.worst
    return {"name": there.option.name, "load": wanted.rate, "breaks": worst} | {
        "value": there.verdict.values.get(worst),
        "slo": there.verdict.values,
        "overloaded": there.verdict.overloaded,
    }


def _only_screened(one: Screened) -> dict[str, Any]:
    """What all replicas carry, roughly, and the numbers at the largest load that short runs of one
    were seen to carry."""
    row: dict[str, Any] = {"name": one.option.name, "replicas": one.replicas, "curve": []}
    row["about"], scale = one.load * one.replicas, 1
    if one.kept is not None:
        scale = one.kept.scale
        row["curve"] = [numbers(one.kept, whole(one.option, scale))]
    add_costs(row, one.per_hour * scale)
    return row


def recommend_answer(found: Mapping[str, Any]) -> Section:
    """The answer of what ``recommend`` found, as its ``summary.json`` has it: which deployment,
    why, what the others lose by, and the command that starts it."""
    rows, unit, rate = found["deployments"], UNITS[found["load"]], found["rate"]
    carried, first = found["winner"] is not None, rows[0]
    warnings = [*doubts_of(found), *doubts(rows, found["tolerance"], _MORE), *_cliffs(found)]
    if carried:
        answer = f"{first['name']} {first['why']}{_of_one_fewer(found)}."
    elif rate:
        answer = f"No deployment was seen to carry {rate:g} requests/s."
    elif any(not one["settled"] for one in rows):
        answer = "No capacity was found: the runs were too short, or failed."
    else:
        answer = "No deployment was seen to keep the SLO under any load."
    others = (breaking(rows), _screened(found, unit), _dropped(found))
    each = "" if found["replicas"] == 1 else f", for each of {found['replicas']} servers"
    return Section(
        kind="recommendation",
        name=str(found["model"]),
        question=_question(found),
        answer=answer,
        table=_table(found, unit),
        assumptions=assumed(found),
        details=[grid for grid in others if grid.rows],
        configuration={f"launch.sh{each}": found["command"]} if found["command"] else {},
        warnings=[*warnings, found["needs"]] if found["needs"] else warnings,
    )


def _question(found: Mapping[str, Any]) -> str:
    devices = " or ".join(found["devices"])
    if found["rate"] is None:
        what = f"carries most for its price on {found['gpus']} GPUs ({devices})"
    else:
        what = f"is the cheapest for {found['rate']:g} requests/s ({devices})"
    return f"Which deployment of {found['model']} {what} under the SLO {found['slo']}?"


def _of_one_fewer(found: Mapping[str, Any]) -> str:
    """That one replica fewer breaks the SLO at the rate, as a run of it shows."""
    fewer = found["one_fewer"]
    if fewer is None:
        return ""
    how = fewer["breaks"]
    if fewer["value"] is not None and not fewer["overloaded"]:
        how = f"{how} is {number_text(fewer['value'])}"
    elif fewer["overloaded"]:
        how = "it is overloaded"
    return (
        f"; one replica fewer does not do: {fewer['name']} at {number_text(fewer['load'])} "
        f"requests/s breaks the SLO ({how})"
    )


def _cliffs(found: Mapping[str, Any]) -> list[str]:
    """What was tried next to the first, with another token budget or sequence limit, and breaks
    the SLO or carries much less, where something lies between."""
    best, *others = found["deployments"]
    if found["winner"] is None or not _place(best["name"]):
        return []
    most, unit = best["capacity"] / best["replicas"], UNITS[found["load"]]
    tried = {best["name"]: ""}
    for one in (*others, *found["screened"]):
        load = (one["about"] if "about" in one else one["capacity"] or 0.0) / one["replicas"]
        known = load < MUCH_LESS * most and one.get("settled", True)
        tried[one["name"]] = f"carries {number_text(load)} {unit} a replica" if known else ""
    for name, why in found["dropped"].items():
        tried[name] = why.partition(": ")[0] if _far_behind(why, best["capacity"]) else ""
    names = list(
        {str(_place(name)): name for name in reversed(tried)}.values()
    )  # the first of each
    points, here = [_place(name) for name in names], names.index(best["name"])
    return [
        f"{best['name']} is the best, and {names[place]} next to it is far behind "
        f"({tried[names[place]]}): between them another may be better: give --refine"
        for key, place in neighbours(here, points)
        if tried[names[place]] and halfway(points[here][key], points[place][key]) is not None
    ]


def _far_behind(why: str, capacity: float) -> bool:
    """Whether something was dropped because it broke the SLO, or carries much less by its bound."""
    most = re.match(r"at most ([\d.,]+) ", why)
    if most:
        return float(most[1].replace(",", "")) < MUCH_LESS * capacity
    return _kind(why) == _UNDER_ANY or (why.startswith("breaks") and "behind" in why)


def _place(name: str) -> dict[str, Any]:
    """The shape, token budget and sequence limit that a deployment is named after, if it is."""
    named = re.fullmatch(r"(.+) budget (\d+) seqs (\d+)( x \d+)?", name)
    return {"shape": named[1], "budget": int(named[2]), "seqs": int(named[3])} if named else {}


_MORE = "give `capacity` winner.yaml with capacity.requests"
_MOST_DROPPED = 200
_UNDER_ANY = "that break the SLO under any load"
_UNFIT = "that do not fit or have no op times"


def _kind(reason: str) -> str:
    if "by its op times" in reason:
        return "bounded by their op times"
    if "behind" in reason or "no better" in reason:
        return "behind after one run"
    if "alone" in reason or "under any load" in reason:
        return _UNDER_ANY
    return _UNFIT


def _table(found: Mapping[str, Any], unit: str) -> SortableTable:
    """The finalists, the best first."""
    rows = []
    for one in found["deployments"]:
        sure = one["interval"] if one["capacity"] is not None else None
        cost = one.get("per_million_output_tokens")
        numbers = (sure, one["gpus"], one.get("per_hour"), cost)
        rows.append([one["name"], one["why"], capacity_text(one), *map(number_or_dash, numbers)])
    currency = found["prices"]["currency"]
    headings = (
        *("deployment", "why", f"capacity ({unit})", "95 % interval", "GPUs"),
        *(f"{currency} an hour", f"{currency} a million output tokens{_where(found)}"),
    )
    screened, dropped = found["screened"], found["dropped"]
    reasons = Counter(_kind(reason) for reason in dropped.values())
    told = "".join(f", {count} {reason}" for reason, count in reasons.most_common())
    note = (
        f"Of {len(rows) + len(screened) + len(dropped)} deployments {len(rows)} searched, "
        f"{len(screened)} screened{told}. Predicted; prices as stated. docs/capacity.md says what "
        "each number is."
    )
    return SortableTable("The best deployments", headings, rows, note, text=2)


def _where(found: Mapping[str, Any]) -> str:
    """The load that the prices belong to."""
    return f" at {found['rate']:g} requests/s" if found["rate"] else " at the capacity"


def _screened(found: Mapping[str, Any], unit: str) -> SortableTable:
    """Those that were screened only: first the best of each layout that was not searched."""
    first = _of_layouts(found)
    ordered = [*first, *(one for one in found["screened"] if one not in first)]
    rows = [
        [one["name"], *(number_or_dash(one[key]) for key in ("replicas", "about"))]
        for one in ordered
    ]
    headings = ("deployment", "replicas", f"about ({unit})")
    note = "One replica in short runs, times their number: several percent off."
    return SortableTable("Screened only", headings, rows, note)


def _dropped(found: Mapping[str, Any]) -> SortableTable:
    """Those that were left out: first one of each shape that has no other row."""
    dropped = list((_left_out(found) | found["dropped"]).items())
    more = len(dropped) - _MOST_DROPPED
    note = f"And {more} more in summary.json." if more > 0 else ""
    rows = [[name, why] for name, why in dropped[:_MOST_DROPPED]]
    return SortableTable("Not simulated, or dropped", ("deployment", "why"), rows, note, text=2)


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


def recommend_files(wanted: Wanted, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    rows = content["deployments"]
    table = pd.DataFrame({key: row.get(key) for key in _COLUMNS} for row in rows)
    with styled():
        fronts = frontier_figures(rows, content["screened"], content["prices"]["currency"])
        drawn = figure_files({"headroom": headroom_figure(rows, wanted.section), **fronts})
    files = {
        SUMMARY: json_bytes(content),
        "recommend.csv": table.to_csv(index=False).encode(),
        "headroom.csv": headroom(rows).to_csv(index=False).encode(),
        **drawn,
    }
    if content["winner"] is not None:
        files["winner.yaml"] = dump_yaml(winner(content, wanted)).encode()
    if content["command"] is not None:
        files["launch.sh"] = f"{content['command']}\n".encode()
    return files


_COLUMNS = (
    *("name", "device", "tp", "pp", "replicas", "gpus", "capacity", "settled", "rejected_share"),
    *("carries", "per_hour", "per_million_output_tokens", "why"),
)


def winner(content: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """A configuration of the first, to simulate it again, at its capacity or at the rate asked
    for, or to search its capacity."""
    section = wanted.section.model_dump(mode="json", exclude_none=True)
    return {"name": "winner", "capacity": section, **content["deployments"][0]["scenario"]}
