"""The answers of ``capacity``, ``recommend`` and ``sensitivity``: words and tables, from their
``summary.json``; tables as CSV."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sarathi_sim.simulator.views.metrics import number_text
from ..report.section import (
    Section,
    Table,
    assumed_of,
    doubts_of,
    enumerated,
    number_or_dash,
)
from ..sweeps.points import apart
from .options import DRAFTING
from .slo import OVERLOAD, REJECTED

Deployments = Sequence[Mapping[str, Any]]
UNITS = {"rate": "requests/s", "clients": "clients"}
_BECAUSE = {
    "memory": "the KV cache is full",
    "bubbles": "stages or ranks wait for each other",
    "queueing": "requests wait for their first chunk",
    "slot": "requests wait for a decode slot",
    "transfer": "the KV cache has to be sent",
    "iterations": "the batches themselves take that long",
    "too long": "they are longer than the deployment serves",
}


MORE = "give more capacity.requests, most_requests or replications"
NOT_SETTLED = "not settled"
MUCH_LESS = 0.5
"""The part of the best's load below which its neighbour carries much less."""


def capacity_answer(found: Mapping[str, Any]) -> Section:
    """The answer of ``capacity``, from its ``summary.json``: each deployment's capacity with its
    interval, its bound, and the cost of its tokens."""
    deployments, unit, load = list(found["deployments"]), UNITS[found["load"]], found["load"]
    currency = found["prices"]["currency"]
    what = "rate of requests" if load == "rate" else "number of clients"
    broken = breaking(deployments)
    return Section(
        kind="capacity",
        name=str(found["name"]),
        question=f"Up to which {what} does each deployment hold the SLO {found['slo']}?",
        answer=sentence(deployments, unit, currency),
        assumed=assumed(found),
        tables=[_table(deployments, unit, currency), *([broken] if broken.rows else [])],
        about=str(found["description"] or ""),
        warnings=[
            *(*doubts_of(found), *doubts(deployments, found["tolerance"], MORE)),
            *_cliffs(deployments),
        ],
    )


def _table(deployments: Deployments, unit: str, currency: str) -> Table:
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
    return Table("Capacity", headings, rows, note, text=3)


def capacity_text(one: Mapping[str, Any]) -> str:
    """A deployment's capacity, and the share of requests that it rejects; or "not settled"."""
    if one["capacity"] is None:
        return "-" if one.get("error") else NOT_SETTLED
    share = one["rejected_share"]
    text = number_text(one["capacity"])
    return f"{text} ({share:.1%} more rejected)" if share and one["capacity"] else text


def assumed(found: Mapping[str, Any]) -> list[str]:
    """The assumptions: on deployments, capacities and prices, and the settings not tried."""
    prices, told = found["prices"], assumed_of(found)
    if rates := found.get("log_rates"):
        mean, busiest = map(number_text, rates)
        told.insert(
            0,
            f"workload: the log has {mean} requests/s in the mean and {busiest} in its busiest "
            f"minute, {rates[1] / rates[0]:.1f} times as many; lengths alone are taken from it",
        )
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
    """Capacities that are not known, or less certain than the tolerance, with a remedy; and
    neighbours of the best that carry much less."""
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
    """Each neighbour of the best that carries much less, if there are deployments between them."""
    loads = [one["capacity"] or 0.0 for one in deployments]
    best, points = loads.index(max(loads)), [one.get("point", {}) for one in deployments]
    return [
        f"{deployments[best]['name']} carries the most, and {deployments[place]['name']} next to "
        f"it {number_text(loads[place])}: between them another may carry more: give --refine"
        for place in apart(best, points)
        if loads[place] < MUCH_LESS * loads[best] and deployments[place]["capacity"] is not None
    ]


def _refuses(one: Mapping[str, Any]) -> bool:
    """Whether a deployment carries nothing because it rejects too many requests."""
    return one["capacity"] == 0 and (one.get("binds") or {}).get("slo") == REJECTED


def breaks(binds: Mapping[str, Any], much: str = "") -> str:
    """The clause that breaks first above a capacity (by ``much``), and the cause, in words."""
    why = _BECAUSE[binds["because"]]
    if binds["slo"] == REJECTED:
        return f"too many requests are rejected, because {why}"
    if binds["slo"] != OVERLOAD:
        return f"{binds['slo']}{much} breaks first, because {why}"
    said = "more requests arrive than are served, so that they wait longer than the SLO allows"
    return said if binds["because"] == "queueing" else f"{said}, because {why}"


def sentence(deployments: Deployments, unit: str, currency: str) -> str:
    """The answer in a sentence: the deployment that carries most, its lead, and its bound."""
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
    servers = _servers(best, _parallel(best))
    said = f"{best['name']}, {servers}, {what} {number_text(best['capacity'])} {unit}{_runs(best)}"
    if best.get("per_million_output_tokens"):
        said += f" at {_price(best, currency)}"
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
    one = min(cheap, key=lambda one: one["per_million_output_tokens"], default=best)
    if one is not best:
        said += f"; {one['name']} is the cheapest, {_price(one, currency)}"
    per_gpu = max(able, key=lambda one: one["capacity"] / one["gpus"])
    if per_gpu["gpus"] != best["gpus"]:
        rate = number_text(per_gpu["capacity"] / per_gpu["gpus"])
        said += f"; {per_gpu['name']} carries the most a GPU, {rate} {unit}"
    return f"{said}."


def _runs(one: Mapping[str, Any]) -> str:
    """The length of the runs for which a capacity holds: longer queues show in longer runs."""
    at = one.get("at_capacity")
    return f" in runs of {at['requests']:,} requests" if at else ""


def _parallel(one: Mapping[str, Any]) -> str:
    """``TP 4 PP 2``; empty for two pools, which have one each."""
    if one["tp"] is None:
        return ""
    others = (f" {key.upper()} {one[key]}" for key in ("pp", "dp") if one.get(key, 1) > 1)
    return f"TP {one['tp']}" + "".join(others)


def _servers(one: Mapping[str, Any], layout: str, what: str = "server") -> str:
    """A deployment in words: ``2 servers of 4 GPUs each (TP 4)``."""
    if pools := one.get("pools"):
        words = (_servers(each, _parallel(each), f"{name} worker") for name, each in pools.items())
        return " and ".join(words)
    replicas, gpus = one["replicas"], one["gpus"] // one["replicas"]
    of = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    many = f"{replicas} {what}s of {of} each" if replicas > 1 else f"1 {what} of {of}"
    return f"{many} ({layout})"


def _price(one: Mapping[str, Any], currency: str) -> str:
    cost = number_text(one["per_million_output_tokens"])
    return f"{cost} {currency} per million output tokens"


def breaking(deployments: Deployments) -> Table:
    """For each finished search: the clause that breaks first, the cause, and the utilisation."""
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
    return Table("What breaks first", headings, rows, text=2)


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
        row = {"name": one["name"], "device": one["device"], **layout(one)}
        row |= {"policy": one["policy"], "capacity": one["capacity"], "settled": one["settled"]}
        row |= {key: one.get(key) for key in ("offered", "rejected_share", "saturation")}
        row |= {"interval_low": low, "interval_high": high, "band_low": slow, "band_high": fast}
        row |= {key: one.get(key) for key in ("per_hour", "per_million_output_tokens")}
        rows.append({**row, "breaks_first": binds.get("slo"), "because": binds.get("because")})
    return with_counts(rows)


_COUNTS = ("tp", "pp", "dp", "drafts", "replicas", "gpus")


def layout(one: Mapping[str, Any]) -> dict[str, int | None]:
    """A deployment's degrees of parallelism, draft length, replicas and GPUs; of two pools each
    pool's, too, as ``prefill_tp`` (its replicas are the workers)."""
    found = {key: one[key] for key in _COUNTS if key in one}
    for pool, each in one.get("pools", {}).items():
        found |= {f"{pool}_{key}": each[key] for key in _COUNTS if key in each}
    return found


def with_counts(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A table whose counts (:func:`layout`) are whole numbers where some rows have none."""
    table = pd.DataFrame(rows)
    counts = [name for name in table if str(name).rpartition("_")[2] in _COUNTS]
    return table.astype(dict.fromkeys(counts, "Int64"))


HEADINGS = ("elasticity", "95 % interval")


def panels(content: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of every deployment and measure, the strongest factor first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault((row["deployment"], row["measure"]), []).append(row)
    return {
        key: sorted(rows, key=lambda row: -abs(row["elasticity"])) for key, rows in found.items()
    }


def title(content: Mapping[str, Any], deployment: str, measure: str) -> str:
    """The title of a panel, with the value without any change."""
    (base,) = (d["base"][measure] for d in content["deployments"] if d["name"] == deployment)
    about = f"{deployment}: " if len(content["deployments"]) > 1 else ""
    return f"{about}{content['measures'][measure]}, {number_text(float(base))}"


def sides(content: Mapping[str, Any]) -> tuple[str, str]:
    """``-10 %`` and ``+10 %``."""
    by = f"{100 * content['by']:g} %"
    return f"-{by}", f"+{by}"


def sensitivity_answer(found: Mapping[str, Any]) -> Section:
    """The answer of ``sensitivity``, from its ``summary.json``: the effect of each factor on each
    measure of each deployment."""
    said = [_strongest(found, *key) for key in panels(found)]
    under = f" under the SLO {found['slo']}" if found["slo"] else ""
    rows = [
        [name, found["measures"][measure], row["factor"], row["kind"], *cells(row)]
        for (name, measure), some in panels(found).items()
        for row in some
    ]
    headings = ("deployment", "of what", "factor", "is a", *sides(found), *HEADINGS)
    note = (
        "Predicted. The elasticity is percent for a percent. docs/sensitivity.md says what each "
        "number is."
    )
    return Section(
        kind="sensitivity",
        name=str(found["name"]),
        question=f"What moves {enumerated(list(found['measures'].values()))}{under} most?",
        answer=f"{'; '.join(said)}." if said else "Nothing that was changed.",
        tables=[Table("What each factor does", headings, rows, note, text=4)],
        assumed=assumed_of(found),
        about=str(found["description"] or ""),
        warnings=[*doubts_of(found), *found["warnings"]],
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    """Both effects, the elasticity and its interval, as text."""
    interval = row["interval"]
    ends = "-" if interval is None else " to ".join(f"{end:+.2f}" for end in interval)
    return [f"{row['low_pct']:+.2f} %", f"{row['high_pct']:+.2f} %",
            f"{row['elasticity']:+.3f}", ends]  # fmt: skip


def _strongest(content: Mapping[str, Any], deployment: str, measure: str) -> str:
    """The factors that move a measure most, in words."""
    rows = panels(content)[deployment, measure]
    single = [f"{r['factor']} ({r['elasticity']:+.2f})" for r in rows if r["kind"] != "ops"][:3]
    text = f"{title(content, deployment, measure)}: moves most with {', '.join(single)}"
    for row in rows:
        if row["kind"] == "ops":
            text += f"; with {row['factor']} together {row['elasticity']:+.2f}"
    return f"{text} (percent for a percent)"


def why_best(best: Mapping[str, Any], weighed: Mapping[str, Any], currency: str) -> str:
    if not best["carries"]:
        return loses(best, best)
    share = best["rejected_share"]
    text = f"carries {number_text(best['carries'])} requests/s at {_price(best, currency)}"
    if share:
        text += f" and rejects {share:.1%} of what is offered"
    if not best["at_rate"]:
        text += _runs(best)
    else:
        dearest = best["at_capacity"]["per_million_output_tokens"]
        text += (
            f"; it carries up to {number_text(best['capacity'])} requests/s{_runs(best)}, then at "
            f"{number_text(dearest)} {currency}"
        )
    text += f"; above that {breaks(best['binds'])}"
    if equal := weighed["equal"]:
        text += f"; {enumerated(_few(equal))} {'is' if len(equal) == 1 else 'are'} equal in price"
    if second := weighed["next"]:
        least = "at least " if second["at_least"] else ""
        than = f"the next, {second['name']}" if second["name"] else "all others"
        text += f"; {least}{100 * second['saves']:.1f} % cheaper than {than}"
    return text


def _few(names: Sequence[str], most: int = 3) -> list[str]:
    """Some names, and how many more there are."""
    more = len(names) - most
    return [*names[:most], *([f"{more} more"] if more > 0 else [])]


def loses(row: Mapping[str, Any], best: Mapping[str, Any], equal: Sequence[str] = ()) -> str:
    if not row["capacity"]:
        kept = f"{NOT_SETTLED}: {row.get('why_not')}" if not row["settled"] else ""
        return str(row.get("error") or kept or "keeps the SLO under no load")
    if not best["capacity"]:
        return breaks(row["binds"])
    parts = [f"{100 * (row['capacity'] / best['capacity'] - 1):+.1f} % requests/s"]
    if row["carries"] and best["carries"]:
        what = "per_hour" if best["at_rate"] else "per_million_output_tokens"
        parts.append(f"{100 * (row[what] / best[what] - 1):+.1f} % of its price")
    if row["name"] in equal:
        parts.append("equal to the first within what their difference can tell")
    binds, first = row["binds"], best["binds"]
    for key, name in (("bubble_share", "bubbles"), ("kv_peak_share", "KV cache full")):
        if abs(binds[key] - first[key]) >= 0.05:
            parts.append(f"{name} {100 * binds[key]:.0f} %, there {100 * first[key]:.0f} %")
    return f"{', '.join(parts)}; {breaks(binds)}"


def recommend_answer(found: Mapping[str, Any]) -> Section:
    """The answer of ``recommend``, from its ``summary.json``: the deployment, the reason, the
    losses of the others, and the command that starts it."""
    rows, unit, rate = found["deployments"], UNITS[found["load"]], found["rate"]
    carried, first = found["winner"] is not None, rows[0]
    warnings = [
        *doubts_of(found),
        *doubts(rows, found["tolerance"], _MORE_REQUESTS),
        *_next_to_best(found),
        *_below_the_peak(found),
    ]
    if carried:
        verb = "carries" if first["replicas"] == 1 else "carry"
        told = f"{verb}{first['why'].removeprefix('carries')}"
        answer = f"{_in_words(first)}, {told}{_of_one_fewer(found)}."
    elif rate:
        answer = f"No deployment was seen to carry {rate:g} requests/s."
    elif any(not one["settled"] for one in rows):
        answer = "No capacity was found: the runs were too short, or failed."
    else:
        answer = "No deployment was seen to keep the SLO under any load."
    others = (breaking(rows), _screened(found, unit), _dropped(found))
    return Section(
        kind="recommendation",
        name=str(found["model"]),
        question=_question(found),
        answer=answer,
        assumed=assumed(found),
        tables=[_best_table(found, unit), *(grid for grid in others if grid.rows)],
        command=found["command"] or "",
        warnings=[*warnings, found["needs"]] if found["needs"] else warnings,
    )


_SETTINGS = (
    *("max_num_batched_tokens", "chunked_prefill_size", "max_num_tokens"),
    *("max_num_seqs", "max_running_requests", "max_batch_size"),
)
"""Token budgets and sequence limits, by the names that engines give them."""


def _in_words(one: Mapping[str, Any]) -> str:
    """The recommendation in words: the servers, and the chosen settings of the engine."""
    policy = one["scenario"]["policy"]
    chosen = [f"{key} {policy[key]}" for key in _SETTINGS if key in policy]
    drafts = [f"{one['drafts']} drafts a decode"] if one.get("drafts") else []
    return ", ".join([_servers(one, _shape(one["name"]).partition(DRAFTING)[0]), *drafts, *chosen])


def _question(found: Mapping[str, Any]) -> str:
    devices = " or ".join(found["devices"])
    if found["rate"] is None:
        what = f"carries most for its price on {found['gpus']} GPUs ({devices})"
    else:
        what = f"is the cheapest for {found['rate']:g} requests/s ({devices})"
    return f"Which deployment of {found['model']} {what} under the SLO {found['slo']}?"


def _of_one_fewer(found: Mapping[str, Any]) -> str:
    """A clause that says that one replica fewer breaks the SLO at the rate; empty without it."""
    fewer = found["one_fewer"]
    if fewer is None:
        return ""
    how = fewer["breaks"]
    if fewer["value"] is not None and not fewer["overloaded"]:
        how = f"{how} is {number_text(fewer['value'])}"
    elif fewer["overloaded"]:
        how = "it is overloaded"
    return (
        f"; one server fewer is too few: at {number_text(fewer['load'])} requests/s it breaks the "
        f"SLO ({how})"
    )


def _below_the_peak(found: Mapping[str, Any]) -> list[str]:
    """That a log's busiest minute has more requests than were asked for."""
    rate, (mean, busiest) = found["rate"], found.get("log_rates") or (0.0, 0.0)
    if rate is None or busiest <= rate:
        return []
    much = (
        f"{number_text(busiest)} requests/s in its busiest minute ({number_text(mean)} in the mean)"
    )
    return [f"the log has {much}, and {rate:g} were asked for"]


def _next_to_best(found: Mapping[str, Any]) -> list[str]:
    """Neighbours of the first, with another token budget or sequence limit, that break the SLO or
    carry much less, if there are deployments between them."""
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
    first = {str(_place(name)): name for name in reversed(tried)}
    names = list(first.values())
    return [
        f"{best['name']} is the best, and {names[place]} next to it is far behind "
        f"({tried[names[place]]}): between them another may be better: give --set refine=1"
        for place in apart(names.index(best["name"]), [_place(name) for name in names])
        if tried[names[place]]
    ]


def _far_behind(why: str, capacity: float) -> bool:
    """Whether a deployment was dropped because it breaks the SLO, or has a much lower bound."""
    most = re.match(r"at most ([\d.,]+) ", why)
    if most:
        return float(most[1].replace(",", "")) < MUCH_LESS * capacity
    return _kind(why) == _UNDER_ANY or (why.startswith("breaks") and "behind" in why)


def _place(name: str) -> dict[str, Any]:
    """The shape, token budget and sequence limit that a deployment is named after, if it is."""
    named = re.fullmatch(r"(.+) budget (\d+) seqs (\d+)( x \d+)?", name)
    return {"shape": named[1], "budget": int(named[2]), "seqs": int(named[3])} if named else {}


_MORE_REQUESTS = "give `capacity` winner.yaml with capacity.requests"
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


def _best_table(found: Mapping[str, Any], unit: str) -> Table:
    """The finalists, the best first."""
    rows = []
    for one in found["deployments"]:
        sure = one["interval"] if one["capacity"] is not None else None
        cost = one.get("per_million_output_tokens")
        numbers = (sure, one["gpus"], one.get("per_hour"), cost)
        rows.append([one["name"], one["why"], capacity_text(one), *map(number_or_dash, numbers)])
    currency = found["prices"]["currency"]
    where = f"at {found['rate']:g} requests/s" if found["rate"] else "at the capacity"
    headings = (
        *("deployment", "why", f"capacity ({unit})", "95 % interval", "GPUs"),
        *(f"{currency} an hour", f"{currency} a million output tokens {where}"),
    )
    screened, dropped = found["screened"], found["dropped"]
    reasons = Counter(_kind(reason) for reason in dropped.values())
    told = "".join(f", {count} {reason}" for reason, count in reasons.most_common())
    note = (
        f"Of {len(rows) + len(screened) + len(dropped)} deployments {len(rows)} searched, "
        f"{len(screened)} screened{told}. Predicted; prices as stated. docs/capacity.md says what "
        "each number is."
    )
    return Table("The best deployments", headings, rows, note, text=2)


def _screened(found: Mapping[str, Any], unit: str) -> Table:
    """The deployments that were only screened: first the best of each layout not searched."""
    seen = {_layout(row["name"]) for row in found["deployments"]}
    first, others = list[Any](), list[Any]()
    for one in found["screened"]:
        (others if (layout := _layout(one["name"])) in seen else first).append(one)
        seen.add(layout)
    rows = [
        [one["name"], *(number_or_dash(one[key]) for key in ("replicas", "about"))]
        for one in (*first, *others)
    ]
    headings = ("deployment", "replicas", f"about ({unit})")
    note = "One replica in short runs, times their number: several percent off."
    return Table("Screened only", headings, rows, note)


def _dropped(found: Mapping[str, Any]) -> Table:
    """The deployments left out: first one of each shape that has no other row."""
    dropped = list((_left_out(found) | found["dropped"]).items())
    more = len(dropped) - _MOST_DROPPED
    note = f"And {more} more in summary.json." if more > 0 else ""
    rows = [[name, why] for name, why in dropped[:_MOST_DROPPED]]
    return Table("Not simulated, or dropped", ("deployment", "why"), rows, note, text=2)


def _left_out(content: Mapping[str, Any]) -> dict[str, str]:
    """For each shape (TP, PP) without a row of its own, the deployment that came furthest, with the
    reason why it was dropped."""
    named = (one["name"] for key in ("deployments", "screened") for one in content[key])
    shown = {_shape(name) for name in named}
    found: dict[str, str] = {}
    dropped = content["dropped"].items()
    # Simulated deployments came further than bounded ones.
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
