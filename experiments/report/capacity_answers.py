"""The answers of ``capacity`` and ``capacity --sensitivity``, and of ``recommend`` with and without
``--policy``, from the content of their ``summary.json``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from sarathi_sim.profiler.facts.ops import op_label
from sarathi_sim.simulator.views.metric_registry import number_text
from ..capacity.answer import COSTS, per_million_tokens
from ..capacity.recommend import MUCH_LESS
from ..capacity.slo import REJECTED, UNITS
from ..results import read_text
from ..sweeps.execute import duration
from ..sweeps.points import apart
from .capacity_charts import (
    NAMES,
    axis_name,
    capacity_charts,
    panels,
    points,
    probed,
    sides,
    title,
)
from .op_origins import op_times_of_probes
from .section import (
    Section,
    Table,
    anchor,
    assumed_of,
    doubts_of,
    enumerated,
    number_or_dash,
    sentence,
    table,
    topic_of,
)

Row = Mapping[str, Any]
BECAUSE = {
    "memory": "the KV cache is full",
    "bubbles": "stages or ranks wait for each other",
    "queueing": "requests wait for their first chunk",
    "slot": "requests wait for a decode slot",
    "transfer": "the KV cache has to be sent",
    "iterations": "the iterations take too long",
    "too long": "requests are longer than the deployment serves",
}
STAGES = {
    "race": "worse after one short run",
    "bound": "ruled out by op times alone",
    "rate": "too small for the rate",
    "alone": "that break the SLO with a single request",
    "unfit": "that do not fit or have no op times",
    "failed": "with a failed run",
}
"""The stages at which deployments are left out, those that came furthest first."""
USE = {
    "KV cache full (%)": ("kv_peak_share", 100),
    "bubbles (%)": ("bubble_share", 100),
    "queueing, of TTFT (%)": ("queueing_share_of_ttft", 100),
    "batch": ("mean_batch", 1),
}
FIRST_TOPICS = ("workload", "traffic", "prices")
"""The assumptions that matter most."""
MOST_OPTIONS = 8
LINES, COLUMNS, LONG_NAME = 25, 100, 36
"""What ``recommend`` prints at most, and the length of a name that takes a line more."""
_UNKNOWN = "not known, because the runs were too short, or failed"
_OUTPUT = "per_million_output_tokens"
_NOTE = "Predicted. docs/plan/settings.md says what each number is."


def _table(name: str, rows: Sequence[Row], text: int = 1, note: str = "") -> list[Table]:
    return [table(name, rows, text, note)] if rows else []


def capacity_section(folder: Path | None, found: Row) -> Section:
    """The answer of ``capacity``: the capacity of each deployment, what limits it, and the price of
    its tokens. With the ``folder`` of the result also the charts, and every point of them."""
    rows, unit, currency = found["deployments"], UNITS[found["load"]], found["prices"]["currency"]
    what = "rate of requests" if found["load"] == "rate" else "number of clients"
    capacities = [
        {"deployment": one["name"], "limiting metric": _metric(one), unit: _capacity(one)}
        | {"95 % interval": one["interval"] if one["capacity"] is not None else None}
        | {"uncertainty": one.get("uncertainty"), "GPUs": one["gpus"]}
        | {"per GPU": None if one["capacity"] is None else one["capacity"] / one["gpus"]}
        | {f"{currency}/M out": one.get(_OUTPUT)}
        for one in rows
    ]
    more = "give more capacity.requests, most_requests or replications"
    section = Section(
        kind="capacity",
        name=str(found["name"]),
        question=f"What {what} does each deployment sustain under the SLO {found['slo']}?",
        answer=_most(rows, unit),
        tables=[*_table("Capacity", capacities, 2, _NOTE), *_searched(rows, unit)],
        assumed=_assumed(found),
        about=str(found["description"] or ""),
        warnings=[
            *(*doubts_of(found), *_doubts(rows, found["tolerance"], more)),
            *_far_neighbours(rows, unit),
        ],
    )
    return _with_files(folder, section, found, "config.yaml")


def _with_files(folder: Path | None, section: Section, found: Row, *names: str) -> Section:
    """The section with what its ``folder`` holds: charts and every point of them, the origin of op
    times, and the files of ``names``."""
    if folder is None:
        return section
    op_times, problems = op_times_of_probes(folder)
    points = [] if "measures" in found else _points(found)
    return replace(
        section,
        charts=[chart for some in capacity_charts(found).values() for chart in some],
        tables=[*section.tables, *points, *op_times],
        configuration={name: read_text(folder / name) for name in names},
        warnings=[*section.warnings, *problems],
    )


def _capacity(one: Row) -> str:
    if one["capacity"] is None:
        return "-" if one.get("error") else "not settled"
    share, text = one["rejected_share"], number_text(one["capacity"])
    return f"{text} ({share:.1%} of requests rejected)" if share and one["capacity"] else text


def _metric(one: Row) -> str:
    """The clause that limits a deployment; if only screened, the one nearest to its limit."""
    stress = one["curve"][0]["stress"] if "about" in one and one["curve"] else {}
    nearest = max(stress, key=stress.__getitem__, default="-")
    return str((one.get("binds") or {"slo": nearest})["slo"])


def _limit(one: Row) -> str:
    binds = one.get("binds")
    return f"{binds['slo']} ({BECAUSE[binds['because']]})" if binds else ""


def _sure(one: Row, key: str) -> str:
    return f" ({number_or_dash(one[key])} at 90 %)" if one.get(key) else ""


def _refuses(one: Row) -> bool:
    return one["capacity"] == 0 and (one.get("binds") or {}).get("slo") == REJECTED


def _most(rows: Sequence[Row], unit: str) -> str:
    able = sorted((one for one in rows if one["capacity"]), key=lambda one: -one["capacity"])
    if not able:
        none = "none keeps the SLO, even under a small load"
        if all(map(_refuses, rows)):
            least = min(one["rejected_share"] for one in rows)
            none = f"none keeps the SLO: {least:.1%} of the requests, or more, are rejected"
        return sentence({"best": none if all(one["settled"] for one in rows) else _UNKNOWN})

    def load(one: Row) -> str:
        return f"{one['name']}, {_capacity(one)} {unit}{_sure(one, 'uncertainty')}"

    best = able[0]
    parts = {"best": load(best)}
    for second in able[1:2]:
        lower, upper = best.get("interval"), second.get("interval")
        unsure = lower and upper and upper[1] >= lower[0]
        parts["next"] = load(second) + (" (no significant difference)" if unsure else "")
    return sentence(parts | {"limiting metric": _limit(best)})


def _assumed(found: Row) -> list[str]:
    """The assumptions and the settings that were not tried; those that matter most first."""
    prices, lines = found["prices"], assumed_of(found)
    if rates := found.get("log_rates"):
        mean, busiest = map(number_text, rates)
        lines.append(
            f"workload: the trace has {mean} requests/s on average and {busiest} in its busiest "
            f"minute, {rates[1] / rates[0]:.1f} times as many; only its lengths are used"
        )
    if found.get("workload", "") is None:
        lines.append("workload: Azure's conversation trace of 2023, as none was given")
    there = [one for one in found["deployments"] if one.get("at_capacity")]
    if there:
        requests = [one["at_capacity"]["requests"] for one in there]
        many = " to ".join(f"{count:,}" for count in sorted({min(requests), max(requests)}))
        kept = f"at the capacity {found['keep']:.0%} of the runs ({many} requests) keep the SLO"
        lines.append(f"capacity: {kept}, and so do all runs together")
    if any(one["simulated_replicas"] < one["replicas"] for one in there):
        lines.append("replicas: only one is simulated, as the router takes turns (round-robin)")
    lines.append(f"prices: {prices['currency']} of {prices['date']}, {prices['mark']}")
    if "not_tried" in found:
        lines.append(f"not tried: {found['not_tried']}")
    ranks = {topic: rank for rank, topic in enumerate(FIRST_TOPICS)}
    return sorted(lines, key=lambda line: ranks.get(topic_of(line)[0], len(ranks)))


def _doubts(rows: Sequence[Row], tolerance: float, advice: str) -> list[str]:
    """Capacities that are not known, or less certain than the tolerance, with a remedy."""
    lines = []
    for one in rows:
        if one.get("error"):
            lines.append(f"{one['name']}: no capacity: {one['error']}")
        elif not one["settled"]:
            lines.append(f"{one['name']}: not settled: {one['why_not']}: {advice}")
        elif one["capacity"]:
            low, high = one["interval"]
            width = (high - low) / one["capacity"]
            if width > tolerance:
                wide = f"the interval is {100 * width:.1f} % wide, more than the tolerance"
                lines.append(f"{one['name']}: {wide}: {advice}")
        if share := one.get("rejected_share"):
            too_many = ", more than `rejected` allows" if _refuses(one) else ""
            why = f"{share:.1%} of the requests are rejected{too_many}: the longest one"
            lines.append(f"{one['name']}: {why} {one['rejected_because']}")
    return lines


def _far_neighbours(rows: Sequence[Row], unit: str) -> list[str]:
    """The neighbours of the best that sustain much less, where there are deployments between."""
    loads = [one["capacity"] or 0.0 for one in rows]
    best = loads.index(max(loads))
    return [
        _next_to(rows[best], rows[at]["name"], f"{number_text(loads[at])} {unit}", "--refine")
        for at in apart(best, [one.get("point", {}) for one in rows])
        if loads[at] < MUCH_LESS * loads[best] and rows[at]["capacity"] is not None
    ]


def _next_to(best: Row, other: str, load: str, option: str) -> str:
    return (
        f"{best['name']} is the best, but its neighbour {other} sustains much less ({load}): a "
        f"deployment between them may be better: give {option}"
    )


def _searched(rows: Sequence[Row], unit: str, note: str = "") -> list[Table]:
    """For each search also the cause of the limit, and the use of the GPUs just above it."""
    searches = []
    for one in rows:
        binds, known = one.get("binds") or {}, one["capacity"] is not None
        stress = [p["stress"] for p in one.get("curve", ()) if p["load"] == binds.get("at_load")]
        row = {"deployment": one["name"], "limiting metric": _metric(one)}
        row |= {"because": BECAUSE.get(str(binds.get("because")), one.get("error", "-"))}
        row |= {f"capacity ({unit})": _capacity(one)}
        row |= {"95 % interval": one["interval"] if known else None}
        row |= {"uncertainty, 90 %": one.get("uncertainty"), "op errors, 90 %": one.get("band")}
        row |= {"at load": binds.get("at_load")}
        row |= {"value / limit": stress[0].get(binds["slo"]) if stress else None}
        for name, (key, factor) in USE.items():
            row[name] = f"{factor * binds[key]:.0f}" if binds else "-"
        searches.append(row)
    return _table("Searched", searches, 3, note)


def _points(found: Row) -> list[Table]:
    unit, currency = UNITS[found["load"]], found["prices"]["currency"]
    every, rows = points(*probed(found)), []
    for _, one in every.iterrows():
        row = {"deployment": one["deployment"], "SLO": "holds" if one["holds"] else "breaks"}
        row |= {"run": one["run"], f"load ({unit})": float(one["load"])}
        for key in (key for key in NAMES if key in every):
            row[axis_name(key, currency)] = None if pd.isna(one[key]) else float(one[key])
        rows.append(row)
    note = "probes/runs/RUN of the result has the configuration and the numbers of each run."
    anchors = [anchor(row["run"]) for row in rows]
    return [replace(one, anchors=anchors) for one in _table("Every point", rows, 3, note)]


# recommend -------------------------------------------------------------------------------------


def recommend_section(folder: Path | None, found: Row) -> Section:
    """The answer of ``recommend``: the best deployment of each GPU and engine, one server more and
    fewer, and the command that starts the first. With the ``folder`` of the result also charts."""
    rows, rate, unit = found["deployments"], found["rate"], UNITS[found["load"]]
    dropped, devices = found["dropped"], " or ".join(found["devices"])
    advice = "give `capacity` winner.yaml with capacity.requests"
    warnings = [*doubts_of(found), *_doubts(rows, found["tolerance"], advice)]
    failed = {name: one for name, one in dropped.items() if one["stage"] == "failed"}
    warnings += [f"{n}: left out, as a run failed: {one['clause']}" for n, one in failed.items()]
    for one in found["far_neighbours"]:
        load = f"at most {number_text(one['load'] or 0.0)} {unit} per server"
        load = "breaks the SLO with a single request" if one["load"] is None else load
        warnings.append(_next_to(rows[0], one["name"], load, "--set refine=1"))
    mean, busiest = found.get("log_rates") or (0.0, 0.0)
    if rate is not None and busiest > rate:
        minute = f"{number_text(busiest)} requests/s in its busiest minute"
        average = f"{number_text(mean)} on average"
        warnings.append(f"the trace has {minute} ({average}), but --rate is {rate:g}")
    what = f"sustains the highest load for its price on {found['gpus']} GPUs ({devices})"
    if rate is not None:
        what = f"is the cheapest for {rate:g} requests/s ({devices})"
    screened = [
        {"deployment": one["name"], "nearest to its limit": _metric(one), "GPUs": one["gpus"]}
        | {f"about ({unit})": one["about"]}
        for one in found["screened"]
    ]
    of_one = "From short runs of one server, times the number of servers: several percent off."
    left_out = [
        {"deployment": name, "left out": STAGES[stage], "worse than": one["beaten_by"] or "-"}
        | {"limiting metric or reason": one["clause"] or "-", f"{unit} per server": one["at"]}
        for stage in STAGES
        for name, one in dropped.items()
        if one["stage"] == stage
    ]
    stages, still = Counter(one["stage"] for one in dropped.values()), found.get("open")
    counts = {"searched": len(rows), "with short runs only": len(screened)}
    counts |= {"not yet run": still["not_run"]} if still else {}
    counts |= {said: stages[stage] for stage, said in STAGES.items()}
    told = ", ".join(f"{count} {said}" for said, count in counts.items() if count)
    note = f"Of {sum(counts.values())} deployments: {told}. {_NOTE}"
    warnings += filter(None, [found["needs"]])
    answer, sizes = _best(found), _other_sizes(found)
    fixed = 10 + len(warnings[:3]) + bool(warnings) + len(answer) // COLUMNS
    fixed += sum(1 + len(line) // COLUMNS for line in sizes)
    section = Section(
        kind="recommendation",
        name=str(found["model"]),
        question=f"Which deployment of {found['model']} {what} under the SLO {found['slo']}?",
        answer=answer,
        assumed=_assumed(found),
        tables=[
            *(*_options(found, LINES - fixed, sizes), *_searched(rows, unit, note)),
            *_table("Short runs only", screened, 2, of_one),
            *_table("Left out", left_out, 4),
        ],
        command=found["command"] or "",
        warnings=warnings,
    )
    return _with_files(folder, section, found, *["winner.yaml"][: found["winner"] is not None])


def _best_so_far(found: Row) -> str:
    best, still, rate = found["screened"][0], found["open"], found["rate"]
    count, gpus, currency = best["replicas"], best["gpus"], found["prices"]["currency"]
    fewest, most = still["servers"]
    servers = f"{count} server{'s' * (count > 1)}"
    value = f"about {number_text(best['about'])} requests/s"
    low, high = still["between"]
    between = number_or_dash([low, high]) if high and high < math.inf else f"{low:,.2f} or more"
    if rate:
        servers = f"about {servers} ({fewest} to {most})"
        value = f"{best['per_hour']:,.2f} {currency} per hour for {rate:g} requests/s"
    name, of, _ = best["name"].rpartition(" x ")
    name = f"{servers} of {name}" if of else best["name"]
    value = f"{gpus} GPU{'s' * (gpus > 1)}, {value} ({between})"
    counts = {"deployments not run yet": still["not_run"], "being searched": still["not_settled"]}
    what = enumerated([f"{count} {said}" for said, count in counts.items() if count])
    more = still["left_s"] and f"about {duration(still['left_s'])} more"
    begun = any(one["at_most"] for one in found["screened"])
    what = what or ("the last comparisons are left" if begun else "no search has begun")
    parts = {"best so far": f"{name}, {value}", "not settled": what}
    return sentence(parts | {"takes": more or ""})


def _best(found: Row) -> str:
    if found.get("open"):
        return _best_so_far(found)
    best, rate, currency = found["deployments"][0], found["rate"], found["prices"]["currency"]
    if found["winner"] is None:
        load = f"{rate:g} requests/s" if rate else "any load"
        none = f"no deployment sustains {load} under the SLO in these runs"
        known = rate or all(one["settled"] for one in found["deployments"])
        return sentence({"best": none if known else _UNKNOWN})
    name, count, gpus = best["name"], best["replicas"], best["gpus"]
    if "pools" not in best:
        servers = f"{count} server{'s' * (count > 1)}{_sure(best, 'servers_90')}"
        name = f"{servers} of {name.removesuffix(f' x {count}')}"
    value = f"{_capacity(best)} requests/s{_sure(best, 'uncertainty')} at "
    value += f"{number_text(best[_OUTPUT])} {currency} per million output tokens"
    if rate:
        value = f"{best['per_hour']:,.2f} {currency} per hour for {rate:g} requests/s"
        if best["rejected_share"]:
            value += f" ({best['rejected_share']:.1%} of requests rejected)"
    equal, more = found["equal"], len(found["equal"]) - 1
    parts = {"best": f"{name}, {gpus} GPU{'s' * (gpus > 1)}, {value}"}
    parts["equal"] = enumerated([*equal[:1], *([f"{more} more"] if more > 0 else [])])
    if second := found["next"]:
        saves = f"{'at least ' * second['at_least']}{100 * second['saves']:.1f} %"
        parts["next"] = f"{second['name'] or 'all other layouts'} (the best is {saves} cheaper)"
    return sentence(parts | {"limiting metric": _limit(best)})


def _options(found: Row, lines: int, notes: Sequence[str]) -> list[Table]:
    """The best deployment of each GPU and engine, or with one of each the best of each layout, the
    cheapest first: as many as fit in so many ``lines``."""
    rate, currency = found["rate"], found["prices"]["currency"]
    able = [one for one in found["deployments"] if one["carries"]] or found["deployments"]
    some = [one for one in found["screened"] if one.get("holds_at_rate") is not False]
    every, first, rows = [*able, *some], dict[object, Row](), list[Row]()
    several = len({(one["device"], one["stack"]) for one in every}) > 1

    def price(one: Row) -> tuple[bool, float, float]:
        load = one.get("about") or one.get("capacity") or 0.0
        cost = one["per_hour"] / (rate or load) if load else math.inf
        return one is not every[0], cost, -load

    for one in sorted(every, key=price):
        kind = (one["device"], one["stack"]) if several else one["point"]["shape"]
        first.setdefault(kind, one)
    for one in list(first.values())[:MOST_OPTIONS]:
        if (lines := lines - 1 - len(one["name"]) // LONG_NAME) < 0 and rows:
            break
        load = one.get("about") or one.get("capacity")
        reserve = number_or_dash(load / rate if rate and load else load)
        row = {"deployment": "= " * (one["name"] in found["equal"]) + one["name"]}
        row |= {"limiting metric": _metric(one), "GPUs": one["gpus"]}
        row[f"{currency}/h"] = f"{one['per_hour']:,.2f}"
        for what, each in zip(("in", "out"), _prices(one, rate), strict=True):
            row[f"{currency}/M {what}"] = None if each is None else f"{each:,.3f}"
        heading = "headroom" if rate else "requests/s"
        rows.append(row | {heading: "~" * ("about" in one) + reserve})
    return _table("", rows, 2, "\n".join(notes))


def _prices(one: Row, rate: float | None) -> list[float | None]:
    """The prices of a million input and of a million output tokens: at the rate, or at the
    capacity."""
    if "about" not in one or not one["curve"]:
        return [one.get(cost) for cost in COSTS]
    probe, load = one["curve"][0], rate or one["about"]
    served = probe["load"] * (1 - probe["rejected_share"])
    tokens = (probe[key] / served * load for key in COSTS.values())
    return [per_million_tokens(one["per_hour"], 1, each) for each in tokens]


def _other_sizes(found: Row) -> list[str]:
    """One server fewer, one more, and as many as twice the rate takes: price and capacity; and what
    the marks in the table mean."""
    if found["winner"] is None:
        return ["~: from short runs, or not settled."] if found.get("open") else []
    best, rate, currency = found["deployments"][0], found["rate"], found["prices"]["currency"]
    marks = ["=: no significant difference from the best"] * bool(found["equal"])
    marks += ["~: from short runs"] * bool(found["screened"])
    count, gpus = best["replicas"], best["gpus"] // best["replicas"]
    load, price = best["capacity"] / count, best["per_hour"] / best["gpus_paid"] * gpus
    cases = {"One server fewer": count - 1} if count > 1 else {}
    cases["One server more"] = count + 1
    if "pools" in best:
        cases = {"Twice the workers": 2}
    if rate:
        cases["Twice the rate"] = math.ceil(2 * rate / load * (1 - 1e-9))
    lines = []
    for what, servers in cases.items():
        does = f"sustains {number_text(servers * load)} requests/s (computed)"
        if servers < count and (fewer := found["one_fewer"]):
            value = "" if fewer["value"] is None else f" ({number_text(fewer['value'])})"
            does = f"breaks {fewer['breaks']}{value} at {number_text(fewer['load'])} requests/s"
        elif what == "Twice the rate":
            does = f"{servers} server{'s' * (servers > 1)} (computed from one, not simulated)"
        cost = (
            f"{servers * gpus} GPU{'s' * (servers * gpus > 1)}, "
            f"{servers * price:,.2f} {currency} per hour"
        )
        lines.append(f"{what}: {cost}, {does}")
    return [f"{line}." for line in ("; ".join(marks), *lines) if line]


def chunk_section(found: Row) -> Section:
    """The answer of ``recommend --policy sarathi``: the best batch of each chunk size."""
    of_chunk = dict[int, Row]()
    for one in found["verified"]:
        of_chunk.setdefault(one["chunk"], one)
    best, *others = of_chunk.values()

    def behind(one: Row) -> str:
        return f"{100 * (one['tokens_per_s'] / best['tokens_per_s'] - 1):+.1f} %"

    def said(one: Row, more: str) -> str:
        return f"chunk {one['chunk']}, batch {one['batch']}, {more}"

    limit = f"at most {found['largest_batch']} fit, {best['tokens_per_s']:,.0f} tokens/s"
    parts = {"best": said(best, limit), "next": "".join(said(o, behind(o)) for o in others[:1])}
    if faster := found["excluded"]:
        tbt_ms = f"{1e3 * faster['tbt_p99_s']:.0f} ms"
        parts["limiting metric"] = f"p99 tbt ({said(faster, behind(faster))}, has {tbt_ms})"
    rows = [
        {"chunk (tokens)": one["chunk"], "batch": one["batch"], "tokens/s": one["tokens_per_s"]}
        | {"from the best": behind(one), "time between tokens, p99 (ms)": 1e3 * one["tbt_p99_s"]}
        for one in of_chunk.values()
    ]
    return Section(
        *("recommendation", found["model"], "Which chunk size and batch?", sentence(parts)),
        tables=_table("", rows, 0, "The best batch of each chunk size. Predicted."),
        assumed=[f"workload: {found['workload']}"],
    )


# capacity --sensitivity ------------------------------------------------------------------------


def sensitivity_section(folder: Path | None, found: Row) -> Section:
    """The answer of ``capacity --sensitivity``: the effect of each factor on each measure of each
    deployment. With the ``folder`` of the result also the charts."""
    every, (lower, higher) = panels(found), sides(found)
    several = {"deployment": len(found["deployments"]) > 1, "metric": len(found["measures"]) > 1}
    rows = []
    for (name, measure), some in every.items():
        of = {"deployment": name, "metric": found["measures"][measure]}
        of = {heading: text for heading, text in of.items() if several[heading]}
        for one in some:
            row = of | {"factor": op_label(one["factor"]), "kind": one["kind"]}
            row |= {lower: f"{one['low_pct']:+.2f} %", higher: f"{one['high_pct']:+.2f} %"}
            row["elasticity"] = f"{one['elasticity']:+.3f}"
            ends = " to ".join(f"{end:+.2f}" for end in one["interval"] or ())
            rows.append(row | {"95 % interval": ends or "-"})
    under = f" under the SLO {found['slo']}" if found["slo"] else ""
    note = "Predicted. Elasticity: the change (%) if a factor grows by 1 % (docs/plan/settings.md)."
    parts = {} if every else {"most": "none of the factors"}
    for key, some in every.items():
        first, *others = [row for row in some if row["kind"] != "ops"] or some
        said = f"{op_label(first['factor'])} {first['elasticity']:+.2f}"
        parts[title(found, *key)] = f"{said} % per +1 %"
        if len(every) == 1:
            few = (f"{op_label(one['factor'])} {one['elasticity']:+.2f}" for one in others[:2])
            parts["next"] = ", ".join(few)
    section = Section(
        kind="sensitivity",
        name=str(found["name"]),
        question=f"What changes {enumerated(list(found['measures'].values()))}{under} most?",
        answer=sentence(parts),
        tables=_table("Effect of each factor", rows, 2 + sum(several.values()), note),
        assumed=assumed_of(found),
        about=str(found["description"] or ""),
        warnings=[*doubts_of(found), *found["warnings"]],
    )
    return _with_files(folder, section, found, "config.yaml")
