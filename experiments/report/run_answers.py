"""The answers of run, sweep, compare and workload, and of their dry runs: sections from the data of
their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sarathi_sim.simulator.confidence.coverage import Outside
from sarathi_sim.simulator.load.requests import without_times
from sarathi_sim.simulator.views.metric_registry import (
    METRICS,
    STEADY,
    known,
    number_text,
    number_texts,
    quantity,
)
from ..config.scenario import parameter, value_name
from ..results import SUMMARY
from ..run.compare import part_label
from ..run.ranking import WEIGHED, Load, deciding, ranked
from ..sweeps.store import RESULTS
from ..sweeps.sweep import Sweep, called, overload_note, read_sweep, short_names, varying
from .charts import bars
from .palette import policy_styles
from .section import (
    Axis,
    Chart,
    Section,
    Table,
    anchor,
    assumed_of,
    damaged,
    doubts_of,
    enumerated,
    sentence,
    table,
    thinned,
)

if TYPE_CHECKING:
    from ..config.deployment import Deployment

Summaries = Mapping[str, Mapping[str, Any]]
_FEW, _MOST_POINTS = 3, 1000
_DEFINED = "docs/reference/metrics.md defines every number."


def _few(names: Iterable[str]) -> str:
    some = list(dict.fromkeys(names))
    return enumerated([*some[:_FEW], *([f"{len(some) - _FEW} more"] if len(some) > _FEW else [])])


def _cannot_tell(seeds: int) -> str:
    few = {1: "one seed", 2: "two seeds"}
    return f"not known from {few[seeds]} (use three)" if seeds in few else ""


# Runs --------------------------------------------------------------------------------------------

SHOWN = (
    *("makespan_s", "makespan_s_band", "requests_per_s", "tokens_per_s", "tokens_per_s_band"),
    *("output_tokens_per_s", "mfu", "mean_batch", "hit_rate", "preemption_rate"),
    *("recomputed_share", "extra_decodes", "empty_iterations", "accepted_per_step"),
    *("ttft_s.p50", "ttft_s.p50_band", "ttft_s.p99", "ttft_s.p99_band"),
    *("slot_s.p50", "slot_s.p99", "transfer_s.p50", "transfer_s.p99"),
    *("tbt_s.p50", "tbt_s.p99", "tbt_s.p99_band"),
    *("latency_s.p50", "latency_s.p99", "bubble_s.p50", "bubble_share", "rejected"),
)
"""Paths of the metrics in the table; ``_band`` at the end stands for a metric's 90 % band."""
_NARROW = {
    "clients": "too narrow: with slower ops the clients would send later",
    "arrivals": "narrow because the arrivals determine makespan and throughput; they say nothing "
    "about latencies",
}


def run_section(content: Mapping[str, Any]) -> Section:
    """The answer of a run, from the content of its ``summary.json``."""
    summaries: Summaries = content["scenarios"]
    names, deployments = list(summaries), content.get("deployments", {})
    used = [[one[key] for one in deployments.values()] for key in ("model", "device")]
    models, devices = (enumerated(list(dict.fromkeys(some))) for some in used)
    several = len(names) > 1
    parts = _side_by_side({n: summaries[n] for n in names[:_FEW]}, *([] if several else ["p50"]))
    parts["not shown here"] = _few(names[_FEW:])
    parts["winner"] = _cannot_tell(1) if several else ""
    narrow = content.get("narrow_bands", {})
    outside = [
        (name, ": ".join(filter(None, [deployments.get(name, {}).get("op_times"), text])))
        for name, one in summaries.items()
        for op in one.get("outside_profile", ())
        for text in [str(Outside(**op | {"profile": tuple(map(tuple, op["profile"]))}))]
    ]
    note = f"Predicted; TTFT, latency: after any warm-up; 90 % bands of op time errors. {_DEFINED}"
    rows = filter(None, (number_row(path, list(summaries.values())) for path in SHOWN))
    return Section(
        kind="run",
        name=str(content["name"]),
        question=f"How {'do' if several else 'does'} {enumerated(names)} serve {models} on "
        f"{devices}: throughput, time to first token, time between tokens?",
        answer=sentence(parts),
        tables=[
            *filter(None, [ratios_table(content)]),  # they were asked for
            Table("Numbers", ("metric", "unit", *names), list(rows), note, text=2),
        ],
        assumed=assumed_of(content),
        about=str(content.get("description") or ""),
        warnings=[
            *_by_text(content.get("rejections", {}).items()),
            *doubts_of(content),
            *(_overloaded(name, one) for name, one in summaries.items() if _grows(one)),
            *_by_text(outside),
            *_by_text((name, f"the 90 % bands are {_NARROW[why]}") for name, why in narrow.items()),
        ],
    )


def _side_by_side(summaries: Summaries, *further: str) -> dict[str, str]:
    parts = {}
    for name, one in summaries.items():
        phrases = [f"{number_text(one[WEIGHED[0]] or 0.0)} output tokens/s"]
        for key in ("ttft_s", "tbt_s"):
            values = {q: _value(one, f"{key}.{q}") for q in (*further, "p99")}
            texts = [f"{q} {number_text(v)} s" for q, v in values.items() if v is not None]
            phrases += [f"{METRICS[key].name} {', '.join(texts)}"] if texts else []
        parts[name] = ", ".join([*phrases, *(["overloaded"] if _grows(one) else [])])
    if all(one["steady"]["state"] == "closed" for one in summaries.values()):
        parts["arrivals"] = "all at once"
    return parts


def number_row(path: str, summaries: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """A row of the results: name, unit, the runs' numbers. None where no run has any but 0."""
    metric = known(path.removesuffix("_band"))
    values = [_value(summary, path) for summary in summaries]
    if not any(values):
        return None
    # A band without an end: the run with slower ops is overloaded.
    cells = [cell.replace("to -", "to overload") for cell in _cells(metric.texts, values)]
    band = ", 90 % band" if path.endswith("_band") else ""
    return [metric.label + band, metric.metric.unit, *cells]


def _cells(
    texts: Callable[[Sequence[float | None]], list[str]], values: Sequence[Any]
) -> list[str]:
    """Numbers, or the two ends of bands, all with as many decimals."""
    ends = [value if isinstance(value, list) else [value] for value in values]
    cells = iter(texts([end for pair in ends for end in pair]))
    return [" to ".join(next(cells) for _ in pair) for pair in ends]


def _value(summary: Mapping[str, Any], path: str) -> Any:
    """Latencies are those of the steady part, if a run has one; overloaded: none."""
    value: Any = summary
    if known(path.removesuffix("_band")).metric.grows:
        state = summary["steady"]["state"]
        value = {"steady": summary["steady"], "overloaded": {}}.get(state, summary)
    for part in path.split("."):
        value = value.get(part) if value else None
    return value


def _grows(one: Mapping[str, Any]) -> bool:
    return bool(one["steady"]["state"] == "overloaded")


def ratios_table(content: Mapping[str, Any]) -> Table | None:
    """The ratios of the ``compare`` section beside those stated elsewhere; None without any."""
    if not content.get("ratios"):
        return None
    names, references, values = [], [], []
    for name, value in content["ratios"].items():
        ratio = {"metric": name, "over": ()} | content.get("compare", {}).get(name, {})
        metric, over = quantity(ratio["metric"]), ratio["over"]
        usual = f"{metric.label if metric else name}, {' / '.join(over)}"
        names.append((name, ratio.get("label") or usual))
        references.append(ratio.get("paper"))
        overloaded = ratio["metric"].startswith(STEADY)
        overloaded = overloaded and any(_grows(content["scenarios"][one]) for one in over)
        values.append(None if overloaded else value)
    pairs = zip(values, references, strict=True)
    bands = [content.get("ratio_bands", {}).get(name) for name, _ in names]
    off = [f"{100 * (p / s - 1):+.0f} %" if p is not None and s else "" for p, s in pairs]
    columns = [number_texts(values), _cells(number_texts, bands), number_texts(references), off]
    width = 4 if any(one is not None for one in references) else 2
    rows = [(*name, *cells) for name, *cells in zip(names, *columns[:width], strict=True)]
    headings = ("ratio", "of what", "predicted", "90 % band", "published", "difference")
    lost = None in values and any(map(_grows, content["scenarios"].values()))
    note = "A dash is a ratio of latencies of an overloaded run." if lost else ""
    return Table("Ratios", headings[: 2 + width], rows, note, text=2)


def _by_text(pairs: Iterable[tuple[str, str]]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, text in pairs:
        names.setdefault(text, []).append(name)
    return [f"{', '.join(some)}: {text}" for text, some in names.items()]


def _overloaded(name: str, one: Mapping[str, Any]) -> str:
    return (
        f"{name} is overloaded: its queue and latencies grow while requests arrive (Kendall's S "
        f"{one['steady']['kendall_s']} of 45 over ten blocks). The latencies over all its "
        f"{one['finished']:,} requests are in {SUMMARY} (scenarios.{name})"
    )


# Two results beside each other -------------------------------------------------------------------

_COMPARED = ("ttft_s.p50", "ttft_s.p99", "tbt_s.p50", "tbt_s.p99", "latency_s.p50", "latency_s.p99")
PARTS = {
    "mean_latency": "Latency of a request (mean)",
    "wall": "Wall clock, by what the stages did (mean over stages)",
}
"""The two breakdowns of :func:`sarathi_sim.experiments.run.compare.comparison`."""
_NEAR_NOTHING = 0.01


def comparison_section(content: Mapping[str, Any]) -> Section:
    """The answer of :func:`sarathi_sim.experiments.run.compare.comparison`: the numbers of both,
    then each part's difference in seconds and in percent."""
    names = [Path(content[side]).name for side in "ab"]
    a, b = names if names[0] != names[1] else (content["a"], content["b"])
    summaries = content["summaries"]
    parts = _side_by_side({f"{a} (A)": summaries["A"], f"{b} (B)": summaries["B"]}, "p50")
    if (latency := content.get("mean_latency")) and _divisible(latency["total"]):
        whole = latency["total"]["difference_s"]
        name = max(latency["parts"], key=lambda n: latency["parts"][n]["difference_s"] / whole)
        parts["mean latency, B - A"] = (
            f"{_signed(whole)} s, the largest part {part_label('mean_latency', name)} "
            f"({_signed(latency['parts'][name]['difference_s'])} s)"
        )
    rows = []
    rest = (path for path in SHOWN if path not in _COMPARED and not path.endswith("_band"))
    for path in (*_COMPARED, *rest):
        if row := number_row(path, list(summaries.values())):
            one, other = (_value(each, path) for each in summaries.values())
            rows.append([*row, "-" if None in (one, other) else _percent(other - one, one)])
    headings = ("metric", "unit", "A", "B", "B - A")
    unlike = [] if content["same_requests"] else ["A and B serve different requests."]
    return Section(
        kind="comparison",
        name=f"{a} and {b}",
        question=f"How do the latencies of {a} (A) and {b} (B) differ?",
        answer=sentence(parts | {"winner": _cannot_tell(1)}),
        tables=[
            Table("Numbers", headings, rows, f"Predicted. {_DEFINED}", text=2),
            *(_parts_table(key, content[key]) for key in PARTS if key in content),
        ],
        assumed=assumed_of({"notes": content["assumed"]}),
        charts=parts_charts(content),
        warnings=[*content["notes"], *unlike],
    )


def _divisible(total: Mapping[str, float]) -> bool:
    """Whether the totals differ by enough for shares of the difference."""
    return abs(total["difference_s"]) >= _NEAR_NOTHING * max(total["a_s"], total["b_s"]) > 0


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 1) + 0.0:+.1f} %" if whole else "-"


def _signed(seconds: float) -> str:
    return f"{seconds:+,.0f}" if abs(seconds) >= 100 else f"{seconds:+.3g}"


def _by_difference(parts: Summaries) -> list[str]:
    return sorted(parts, key=lambda name: -abs(parts[name]["difference_s"]))


def _parts_table(key: str, breakdown: Mapping[str, Any]) -> Table:
    """A row a part; no shares of the difference where the totals are nearly equal."""
    total, parts = breakdown["total"], breakdown["parts"]
    whole = total["difference_s"] if _divisible(total) else 0.0
    named = [(part_label(key, name), parts[name]) for name in _by_difference(parts)]
    rows = [
        {"part": label, "A (s)": f"{row['a_s']:z,.4f}", "B (s)": f"{row['b_s']:z,.4f}"}
        | {"B - A (s)": f"{row['difference_s']:+z,.4f}"}
        | {"of A's total": _percent(row["difference_s"], total["a_s"])}
        | {"of the difference": _percent(row["difference_s"], whole)}
        for label, row in [*named, ("total", total)]
    ]
    return table(PARTS[key], rows, note="The parts add up to the difference exactly.")


def parts_charts(content: Mapping[str, Any]) -> list[Chart]:
    """A pair of bars for each part of the mean latency and of the wall clock, in seconds; none
    where the results are not divided into parts."""
    charts = []
    colours = [style.colour for style in policy_styles(content["policies"])]
    for key, title in PARTS.items() if "wall" in content else ():
        parts = content[key]["parts"]
        names = _by_difference(parts)
        values = {
            f"{side.upper()}: {content[side]}": [parts[name][f"{side}_s"] for name in names]
            for side in "ab"
        }
        rows = [part_label(key, name) for name in names]
        charts.append(bars(title, Axis("time (s)"), rows, values, colours))
    return charts


# Sweeps ------------------------------------------------------------------------------------------

_IN_TABLE = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")
_PAIRED = ("makespan_s", "ttft_s.p50", "tbt_s.p99", "latency_s.p50")


def sweep_section(swept: Sweep) -> Section:
    """The answer of a sweep, from its table and its summary: the best option and the next in the
    metric that decides. The command runs the best again, under the last load where it wins."""
    summary, loads = swept.summary, swept.weighed
    contests = [load for load in loads if len(load.options) > 1]
    names = (short_names(varying(swept.table, axes)) for axes in (swept.chosen, swept.given))
    choices, load_names = names
    question = f"How does the {load_names or 'load'} change throughput and latencies?"
    if choices:
        choices = f"combination of {choices}" if ", " in choices else choices
        question = f"Which {choices} is best{f' at each {load_names}' if load_names else ''}?"
    warnings = [overload_note(swept.table, _IN_TABLE)]
    if missing := [one["point"] for one in summary.get("missing", {}).values()]:
        points = _few(called(pd.DataFrame(missing), swept.axes))
        warnings.append(f"{len(missing)} of {summary['runs']} runs have no result: {points}")
    metric, command = deciding(contests or loads), ""
    best = ranked(contests or loads, metric)[:2]
    wins = [load for load in contests if best and load.winner(metric) == best[0]]
    if wins:
        run = swept.table["run"][wins[-1].places[wins[-1].options.index(best[0])]]
        command = f"sarathi-sim run {swept.folder / 'runs' / run / 'config.yaml'}"
    return Section(
        kind="sweep",
        name=str(summary.get("name")),
        question=question,
        answer=sentence(_ranking(contests or loads, metric, best, wins)),
        command=command,
        assumed=thinned(summary.get("notes", ())),
        tables=[
            *([_best_table(load_names, contests)] if len(contests) > 1 else []),
            *(_points_table(swept), *_paired_tables(summary)),
        ],
        about=str(summary.get("description") or ""),
        warnings=[*filter(None, warnings)],
    )


def _ranges(loads: Sequence[Load], metric: str, options: Sequence[str]) -> list[str]:
    """The smallest and the largest mean of each option over the loads; ``-`` without any."""
    ends: list[float | None] = []
    for option in options:
        means = [load.means(metric)[option] for load in loads if option in load.means(metric)]
        ends += [min(means, default=None), max(means, default=None)]
    texts = known(metric).texts(ends)
    return [" to ".join(dict.fromkeys(pair)) for pair in zip(texts[::2], texts[1::2], strict=True)]


def _ranking(
    loads: Sequence[Load], metric: str, best: Sequence[str], wins: Sequence[Load]
) -> dict[str, str]:
    """The parts of the sentence: the ``best`` option and the next in the metric that decides, both
    in the others, and who is left out. Without ``wins`` none is best: its lead is within the spread
    of the seeds, or of less than three seeds."""
    parts, seeds = dict[str, str](), min(load.seeds for load in wins or loads)
    alone = " to ".join(dict.fromkeys((loads[0].name, loads[-1].name))) or "all runs"
    for name, text in zip(best, _ranges(loads, metric, best), strict=True):
        unit = "output tokens/s" if metric == WEIGHED[0] else f"s {known(metric).spoken}"
        value = f"{text} {unit}"
        parts |= {"next": f"{name}, {value}"} if parts and wins else {name or alone: value}
    for other in WEIGHED:
        texts = [f"{text} {known(other).metric.unit}" for text in _ranges(loads, other, best)]
        if other != metric and any(load.means(other) for load in loads):
            second = f" ({best[1]} {texts[1]})" if best[1:] else ""
            parts[known(other).spoken] = texts[0] + second
    left: dict[str, list[str]] = {}
    for load in loads:
        for option, why in load.left_out(*WEIGHED).items():
            left.setdefault(why, []).append(" at ".join(filter(None, (option, load.name))) or alone)
    parts |= {why: _few(names) for why, names in left.items()}
    if wins:
        at = f" at {len(wins)} of {len(loads)} loads" if len(loads) > 1 else ""
        parts["lead"] = f"more than the spread over {seeds} seeds{at}"
    elif len(best) > 1:
        parts["winner"] = _cannot_tell(seeds) or f"no significant difference over {seeds} seeds"
    return parts


def _best_table(load_names: str, loads: Sequence[Load]) -> Table:
    first, columns = loads[:_MOST_POINTS], []
    for metric in map(known, WEIGHED):
        leaders = [load.leaders(metric.path) for load in first]
        pairs = zip(first, leaders, strict=True)
        means = [load.means(metric.path)[best[0]] if best else None for load, best in pairs]
        equal = [f" and {len(best) - 1} equal" * (len(best) > 1) for best in leaders]
        cells = zip(metric.texts(means), leaders, equal, strict=True)
        columns.append([": ".join([text, *best[:1]]) + more for text, best, more in cells])
    note = "Equal: no significant difference (within 1 %, or within the spread over seeds, 95 %)."
    if why := _cannot_tell(min(load.seeds for load in loads)):
        note += f" Which is best is {why}."
    headings = [load_names, *(f"best {known(path).axis}" for path in WEIGHED)]
    rows = list(zip((load.name for load in first), *columns, strict=True))
    return Table("The best under each load", headings, rows, note, text=len(headings))


def _points_table(swept: Sweep) -> Table:
    """A row per point of the swept keys: its values, and means over its seeds."""
    keys = [axis for axis in swept.axes if axis != "seed"]
    points = [
        rows
        for _, rows in swept.table.groupby(
            keys or ["name"],
            dropna=False,
            sort=False,
        )
    ]
    firsts = [rows.iloc[0] for rows in points]
    columns = [["-" if pd.isna(r[a]) else value_name(r[a]) for r in firsts] for a in keys]
    headings = [parameter(axis).heading for axis in keys]
    seeds = swept.table["seed"].nunique() if "seed" in swept.table else 1
    if any(len(rows) < seeds for rows in points):
        columns.append([f"{len(rows)} of {seeds}" for rows in points])
        headings.append("seeds")
    text = len(headings)
    overloaded = [bool((rows["steady.state"] == "overloaded").any()) for rows in points]
    for metric in map(known, _IN_TABLE):
        out = [metric.metric.grows and grows for grows in overloaded]
        means = [float(rows[metric.path].mean(skipna=False)) for rows in points]
        texts = metric.texts([None if o else m for o, m in zip(out, means, strict=True)])
        columns.append(["overloaded" if o else t for o, t in zip(out, texts, strict=True)])
        headings.append(metric.axis)
    notes = ["Predicted." if seeds < 2 else f"Predicted, means over {seeds} seeds."]
    if len(points) > _MOST_POINTS:
        notes.append(f"The first {_MOST_POINTS:,} of {len(points):,} points.")
    if any(overloaded):
        notes.append(f"Latencies of overloaded runs are in {RESULTS}, over all their requests.")
    rows = list(zip(*columns, strict=True))[:_MOST_POINTS]
    anchors = [anchor(first["run"]) for first in firsts[:_MOST_POINTS]]
    return Table("Every point", headings, rows, " ".join(notes), text, anchors)


def _paired_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The paired differences: ratios with their 95 % intervals. None if there are none."""
    entries = summary.get("paired")
    if not entries:
        return []
    contrast, against = parameter(summary["contrast"]), value_name(entries[0]["against"])
    others = list(entries[0]["point"])
    rows = []
    for entry in entries[:_MOST_POINTS]:
        names = [value_name(v) for v in (*map(entry["point"].get, others), entry["value"])]
        rows.append([*names, *(_interval(entry["ratios"].get(metric)) for metric in _PAIRED)])
    headings = [parameter(axis).heading for axis in (*others, summary["contrast"])]
    note = "In brackets the 95 % interval." if entries[0]["seeds"] > 1 else ""
    title, labels = f"{contrast.name}: ratio to {against}", [known(m).label for m in _PAIRED]
    return [Table(title, [*headings, *labels], rows, note, len(headings))]


def _interval(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['ratio']:.3f}{ends}"


def read_sweep_section(folder: Path) -> tuple[Sweep, Section]:
    """A sweep and its answer. Raises UserError for a damaged folder, whatever the error that its
    content causes."""
    with damaged(str(folder), "sweep"):
        swept = read_sweep(folder)
        return swept, sweep_section(swept)


# Workloads, and dry runs -------------------------------------------------------------------------


def workload_section(workloads: Mapping[str, Mapping[str, Any]]) -> Section:
    """The numbers of :func:`sarathi_sim.experiments.run.traffic.describe`."""
    kinds = ("mean", "p50", "p90", "p99", "max", "sum")
    lengths = [
        [name, what, *(f"{one[f'{what}_tokens'][kind]:,.0f}" for kind in kinds)]
        for name, one in workloads.items()
        for what in ("prompt", "output", "total")
    ]
    parts = {}
    for name, one in workloads.items():
        rate = None if one["rate"] is None else f"{number_text(one['rate'])} requests/s"
        means = [f"{one[f'{w}_tokens']['mean']:,.0f} {w}" for w in ("prompt", "output")]
        parts[name] = (
            f"{one['requests']:,} requests, {rate or without_times(one['clients'])}, "
            f"{' and '.join(means)} tokens on average"
        )
    headings = {
        "users": "users",
        "rate": "requests/s",
        "peak_rate": "requests/s, busiest minute",
        "duration_s": "duration (s)",
        "gap_cv": "variation of arrival gaps (Poisson: 1)",
        "pd_ratio": "P:D",
        "shared": "prompt tokens shared (%)",
    }
    numbers = [one | {"shared": 100 * one["shared"]} for one in map(dict, workloads.values())]
    columns = [number_texts([one[key] for one in numbers]) for key in headings]
    arrivals = list(zip(workloads, *columns, strict=True))
    left = {name: one["left_out"] for name, one in workloads.items() if one["left_out"]}
    return Section(
        kind="workload",
        name=enumerated(list(workloads)),
        question="What is in these requests?",
        answer=sentence(parts),
        tables=[
            Table("Lengths", ("requests", "tokens", *kinds), lengths, text=2),
            Table("Arrivals", ("requests", *headings.values()), arrivals),
        ],
        assumed=[f"{name}: {note}" for name, one in workloads.items() for note in one["notes"]],
        warnings=[f"{n}: {c:,} requests lack tokens and are left out" for n, c in left.items()],
    )


_DEPLOYED: dict[str, Callable[[Deployment], str]] = {
    "model": lambda d: d.model.name,
    "device": lambda d: d.device.name,
    "policy": lambda d: d.scenario.policy.name,
    "TP x PP x replicas": lambda d: (
        f"{d.scenario.cluster.tp} x {d.scenario.cluster.pp} x {d.scenario.cluster.replicas}"
    ),
    "max batch": lambda d: str(d.scenario.batching.max_batch),
    "micro-batches in flight": lambda d: str(d.scenario.batching.max_in_flight),
    "KV tokens": lambda d: f"{d.kv_capacity:,}",
    "requests": lambda d: f"{len(d.requests):,}",
    "data-parallel ranks of attention": lambda d: str(d.scenario.cluster.dp),
}


def check_section(
    name: str, file: str, deployments: Mapping[str, Deployment], notes: Mapping[str, Any]
) -> Section:
    """The deployments of a configuration without mistakes, side by side, and what is assumed."""
    every = [d.pools for d in deployments.values()]
    rows = [
        (label, *(" + ".join(dict.fromkeys(map(cell, pools))) for pools in every))
        for label, cell in _DEPLOYED.items()
    ]
    if set(rows[-1][1:]) == {"1"}:
        del rows[-1]
    doubts = [line for d in deployments.values() for line in (d.rejections, *d.doubts) if line]
    return Section(
        kind="check",
        name=name,
        question="What would run?",
        answer=sentence({file: "no mistakes"}),
        tables=[Table("", ("", *deployments), rows)],
        assumed=assumed_of({"notes": notes}),
        warnings=thinned(doubts),
    )
