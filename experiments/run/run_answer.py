"""The answer of a run: its scenarios side by side, in numbers and in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sarathi_sim.simulator.confidence.coverage import Outside
from sarathi_sim.simulator.views.metrics import (
    STEADY,
    Quantity,
    known,
    number_text,
    quantity,
)
from ..report.section import (
    Section,
    Table,
    assumed_of,
    doubts_of,
    enumerated,
    number_or_dash,
)
from ..results import SUMMARY
from .trade_off import WEIGHED, Load, trade_off

Summaries = Mapping[str, Mapping[str, Any]]
OF_SCENARIOS = ("scenarios", "deployments", "notes", "doubts", "rejections", "narrow_bands")
"""The keys of a run's summary with entries by scenario."""

SHOWN = (
    *("makespan_s", "makespan_s_band", "requests_per_s", "tokens_per_s", "tokens_per_s_band"),
    *(
        "output_tokens_per_s",
        "mfu",
        "mean_batch",
        "hit_rate",
        "preemption_rate",
        "recomputed_share",
        "extra_decodes",
        "empty_iterations",
        "accepted_per_step",
    ),
    *("ttft_s.p50", "ttft_s.p50_band", "ttft_s.p99", "ttft_s.p99_band"),
    *("slot_s.p50", "slot_s.p99", "transfer_s.p50", "transfer_s.p99"),
    *("tbt_s.p50", "tbt_s.p99", "tbt_s.p99_band"),
    *("latency_s.p50", "latency_s.p99", "bubble_s.p50", "bubble_share", "rejected"),
)
"""Paths of the metrics in the table; ``_band`` at the end stands for a metric's 90 % band."""
_WHERE_ANY = (
    *("bubble_s.p50", "bubble_share", "rejected"),
    *("hit_rate", "preemption_rate", "recomputed_share", "extra_decodes", "empty_iterations"),
)
"""Metrics that the table leaves out if they are 0 in every scenario."""


def shown_row(path: str, summaries: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """A row of the results: name, unit, the scenarios' numbers. None where no scenario has any."""
    metric = known(path.removesuffix("_band"))
    values = [_value(summary, path, metric) for summary in summaries]
    nothing = (None, "0") if path in _WHERE_ANY else (None,)
    if all(value in nothing for value in values):
        return None
    band = ", 90 % band" if path.endswith("_band") else ""
    cells = ("-" if value is None else value for value in values)
    return [metric.label + band, metric.metric.unit, *cells]


def _value(summary: Mapping[str, Any], path: str, quantity: Quantity) -> str | None:
    """A cell."""
    found = shown_value(summary, path, quantity)
    if isinstance(found, list):  # a band, without an end if a run with slower ops is overloaded
        return " to ".join("overload" if end is None else quantity.text(end) for end in found)
    return None if found is None else quantity.text(found)


def shown_value(summary: Mapping[str, Any], path: str, quantity: Quantity) -> Any:
    """A number, or a band's two. Latencies are those of the steady part, if a run has one;
    overloaded: none."""
    return _found(_part(summary) if quantity.metric.grows else summary, path)


_ALIKE = 1.02
"""Makespans within this factor are set by the arrivals, and do not distinguish scenarios."""
_NARROW = {
    "clients": (
        "the 90 % bands are too narrow: they keep the arrivals as they were, although with slower "
        "ops the clients would send later"
    ),
    "arrivals": (
        "the 90 % bands are narrow because the arrivals set makespan and throughput, not because "
        "op times are sure; they say nothing of latencies"
    ),
}


def run_answer(found: Mapping[str, Any], unlike: Sequence[str] = ()) -> Section:
    """The answer of a run, from the content of its ``summary.json``.

    Runs that differ in ``unlike`` (the model, say) are set side by side, not ranked.
    """
    summaries, ratios = found["scenarios"], ratios_table(found)
    narrow = {name: _NARROW[why] for name, why in found.get("narrow_bands", {}).items()}
    rows = filter(None, (shown_row(path, summaries.values()) for path in SHOWN))
    note = (
        "Predicted. The 90 % bands follow from the errors of the op times (docs/uncertainty.md). "
        "docs/metrics.md defines every number."
    )
    headings = ("number", "unit", *summaries)
    return Section(
        kind="run",
        name=str(found["name"]),
        question=_question(found, ranked=not unlike),
        answer=_side_by_side(summaries, unlike) if unlike else answer(summaries),
        assumed=assumed_of(found),
        tables=[
            Table("Numbers", headings, list(rows), note, text=2),
            *([] if ratios is None else [ratios]),
        ],
        about=str(found.get("description") or ""),
        warnings=[
            *(*_once(found.get("rejections", {})), *doubts_of(found), *_overloaded(summaries)),
            *(*_outside(found), *_once(narrow)),
        ],
    )


def _side_by_side(summaries: Summaries, unlike: Sequence[str]) -> str:
    each = " ".join(answer({name: one}) for name, one in summaries.items())
    return f"They differ in {enumerated(list(unlike))}, so none is called better. {each}"


def _question(found: Mapping[str, Any], *, ranked: bool) -> str:
    what = "how many tokens a second, how soon, and where does the time go?"
    served, names = found.get("deployments", {}).values(), list(found["scenarios"])
    models, devices = (
        enumerated(list(dict.fromkeys(one[key] for one in served))) for key in ("model", "device")
    )
    where = f"{models} on {devices}" if served else "its requests"
    if len(names) == 1:
        return f"How does {names[0]} serve {where}: {what}"
    if not ranked:
        return f"How do {enumerated(names)} serve {where}: {what}"
    return f"Which of {enumerated(names)} serves {where} best: {what}"


def _times(ratio: float) -> str:
    return "" if f"{ratio:.3g}" == "1" else f"{ratio:.3g} times "


def answer(summaries: Summaries) -> str:
    """The outcome in a sentence."""
    if len(summaries) == 1:
        ((name, one),) = summaries.items()
        said = (
            f"{name} serves {one['finished']:,} requests in {_text(one, 'makespan_s')} s, with "
            f"{_text(one, 'output_tokens_per_s')} output tokens/s on {one['gpus']} GPUs"
        )
        return f"{said}; {_waits(one)}."
    spans = {name: float(one["makespan_s"] or 0.0) for name, one in summaries.items()}
    served = {one["finished"] for one in summaries.values()}
    growing = any(_state(one) == "overloaded" for one in summaries.values())
    if len(served) == 1 and not growing and max(spans.values()) > _ALIKE * min(spans.values()) > 0:
        first, *others = sorted(spans, key=lambda name: spans[name])
        ratios = enumerated(
            [f"{_times(spans[name] / spans[first])}as fast as {name}" for name in others[:4]]
        )
        said = f"{first} is the fastest: it is done after {number_text(spans[first])} s, {ratios}"
        return f"{said}; {_waits(summaries[first])}."
    said = trade_off([_load(summaries)])
    return f"{said}." if said else "No scenario has a number that can be compared."


def _load(summaries: Summaries) -> Load:
    """The scenarios as options under one load; latencies of the steady part where there is one."""
    values = {}
    for metric in WEIGHED:
        parts = [_part(one) if known(metric).metric.grows else one for one in summaries.values()]
        found = [_found(part, metric) for part in parts]
        values[metric] = np.array([[math.nan if one is None else one] for one in found])
    growing = [name for name, one in summaries.items() if _state(one) == "overloaded"]
    return Load("", list(summaries), values, overloaded=growing)


def _state(one: Mapping[str, Any]) -> str:
    return str(one["steady"]["state"])


def _part(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The numbers from which latencies are read: the steady part of a run, all of a closed run,
    nothing of an overloaded run."""
    parts: dict[str, Mapping[str, Any]] = {"steady": one["steady"], "overloaded": {}}
    return parts.get(_state(one), one)


def _waits(one: Mapping[str, Any]) -> str:
    if _state(one) == "overloaded":
        return "it is overloaded: its queue grows while requests arrive"
    gap = f"99 % of the gaps between tokens are at most {_text(one, 'tbt_s.p99')} s"
    if _state(one) == "closed":
        return f"{gap} (all requests arrive at once, so most wait long for their first token)"
    return f"99 % of the first tokens come within {_text(_part(one), 'ttft_s.p99')} s, and {gap}"


def _found(summary: Mapping[str, Any], path: str) -> Any:
    found: Any = summary
    for part in path.split("."):
        found = found.get(part) if found else None
    return found


def _text(summary: Mapping[str, Any], path: str) -> str:
    found = _found(summary, path)
    return "-" if found is None else known(path).text(found)


def ratios_table(found: Mapping[str, Any]) -> Table | None:
    """The ratios of the ``compare`` section beside those stated elsewhere; None without any."""
    ratios, bands, scenarios = found.get("ratios"), found.get("ratio_bands", {}), found["scenarios"]
    if not ratios:
        return None
    rows = []
    for name, value in ratios.items():
        asked = {"metric": name, "over": (), **found.get("compare", {}).get(name, {})}
        growing = asked["metric"].startswith(STEADY) and any(
            _state(scenarios[over]) == "overloaded" for over in asked["over"]
        )
        label, stated, off = asked.get("label"), asked.get("paper"), ""
        if stated is not None and value is not None and not growing:
            off = f"{100 * (value / stated - 1):+.0f} %"
        predicted = "overloaded" if growing else number_or_dash(value)
        metric = quantity(asked["metric"])
        said = label or f"{metric.label if metric else name}, {' / '.join(asked['over'])}"
        cells = (number_or_dash(bands.get(name)), number_or_dash(stated), off)
        rows.append([name, said, predicted, *cells])
    headings = ("ratio", "of what", "predicted", "90 % band", "stated elsewhere", "difference")
    columns = 6 if any("paper" in asked for asked in found.get("compare", {}).values()) else 4
    return Table("Ratios", headings[:columns], [row[:columns] for row in rows], text=2)


def _once(said: Mapping[str, str]) -> list[str]:
    """Each text once, with the names of all runs that have it."""
    return [
        f"{', '.join(name for name in said if said[name] == text)}: {text}"
        for text in dict.fromkeys(said.values())
    ]


def _overloaded(summaries: Summaries) -> list[str]:
    """Each overloaded run, with the place of its latencies."""
    return [
        f"{name} is overloaded: its queue grows while requests arrive (Kendall's S "
        f"{summary['steady']['kendall_s']} of 45 over ten blocks). Its latencies depend on the "
        f"length of the run and are not printed. Those over all its {summary['finished']:,} "
        f"requests are in {SUMMARY} (scenarios.{name}: {', '.join(STEADY)})"
        for name, summary in summaries.items()
        if _state(summary) == "overloaded"
    ]


def _outside(found: Mapping[str, Any]) -> list[str]:
    """Each op with batches outside the measured region, once for all runs with the same text."""
    said: dict[str, list[str]] = {}
    for name, summary in found["scenarios"].items():
        bundle = found.get("deployments", {}).get(name, {}).get("op_times")
        for one in summary.get("outside_profile", ()):
            outside = Outside(**(one | {"profile": tuple(map(tuple, one["profile"]))}))
            said.setdefault(": ".join(filter(None, [bundle, str(outside)])), []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]
