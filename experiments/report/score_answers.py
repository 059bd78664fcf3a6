"""The answers of score and tune: one's own server beside its simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.simulator.views.metrics import METRICS, known, number_text
from ..measured.replay import (
    COUNTS,
    MEASURES,
    NUMBERS,
    VARIANTS,
)
from ..measured.score import ScoredRun
from ..measured.tune import NOISE
from ..run.compare import part_label
from .charts import cumulative
from .palette import BLACK, BLUE, GREEN, PURPLE, VERMILION, Style, line_styles
from .section import (
    Axis,
    Chart,
    Section,
    Series,
    Table,
    enumerated,
    first_upper,
    read_section,
    thinned,
)

SETTLED, OPEN = 0.6, 0.2
"""A constant is settled, or still open, if the runs tell so much of it."""
DOUBTFUL_PCT = 20
"""An error after the fit beyond which the calibration is doubted."""
SMALLEST_S = 0.005
"""Parts of the latency below this are not shown."""


def score_answer(content: Mapping[str, Any], name: str = "") -> Section:
    """Of what ``score --json`` prints; the headline is the mean latency."""
    runs = content["runs"]
    rows, worst = [], dict[str, list[float]]()
    for run, found in runs.items():
        for label, one in variants_of(found).items():
            errors = [one["off_pct"][m]["mean"] for m in MEASURES]
            rows.append([run, label, f"{found['requests']:,}", *(f"{e:+.1f}" for e in errors)])
            worst.setdefault(label, []).append(abs(errors[-1]))
    said = enumerated(
        [f"{number_text(max(e))} % ({w})" for w, e in worst.items() if len(e) == len(runs)]
    )
    off = (f"mean {METRICS[m].name} (off, %)" for m in MEASURES)
    headings = ("run", "host time", "requests", *off)
    note = "Predicted beside measured. 'Fitted to these' has seen the run, the others have not."
    whole = {run: found for run, found in runs.items() if "remains" in found}
    details = [
        beside_table(run, found["measured"], variants_of(found), NUMBERS)
        for run, found in whole.items()
    ]
    notes = (note for found in whole.values() for note in found["zero"]["notes"])
    return Section(
        kind="score",
        name=name,
        question="How far are simulated runs of a server from the recorded ones?",
        answer=f"The mean latency of {len(runs)} recorded runs is off by at most {said}.",
        assumed=thinned(notes),
        warnings=[found["too_fast"] for found in runs.values() if found.get("too_fast")],
        tables=[
            Table("Errors by run", headings, rows, note, text=2),
            *details,
            *([_lacking(whole), _beside_others(whole)] if whole else []),
        ],
    )


def variants_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The simulations of a recorded run, by what they are shown as."""
    return {label: run[key] for key, label in VARIANTS.items() if "off_pct" in run.get(key, {})}


def beside_table(
    title: str, measured: Mapping[str, Any], simulated: Mapping[str, Any], paths: Iterable[str]
) -> Table:
    """A row a number: what was measured, and each simulation with how far it is off."""
    rows = []
    for path in paths:
        off = [
            (_number(one, path), _number(one["off_pct"], path, "{:+.1f} %"))
            for one in simulated.values()
        ]
        rows.append(
            (known(path).axis, _number(measured, path), *(f"{value} ({far})" for value, far in off))
        )
    for key in COUNTS:
        if any(key in one for one in simulated.values()):
            counts = (_number(one, key) for one in simulated.values())
            rows.append((key.replace("_", " "), "not recorded", *counts))
    return Table(title, ("", "measured", *(f"{name} (off)" for name in simulated)), rows)


def _number(numbers: Mapping[str, Any], path: str, form: str = "{:.4g}") -> str:
    """The number at ``KEY`` or ``KEY.STATISTIC``; a dash where there is none."""
    key, _, statistic = path.partition(".")
    value = numbers.get(key)
    value = value[statistic] if statistic and value is not None else value
    return "-" if value is None else form.format(value)


def _lacking(runs: Mapping[str, Any]) -> Table:
    rows = []
    for name, run in runs.items():
        remains = run["remains"]
        parts = ", ".join(
            f"{part_label('mean_latency', part)} {value:+.3f}"
            for part, value in sorted(remains["parts"].items(), key=lambda one: -abs(one[1]))
            if abs(value) >= SMALLEST_S
        )
        keys = ("latency_s", "host", "frontend", "first_token", "later_tokens")
        rows.append((name, parts, *(f"{remains[key]:+.3f}" for key in keys)))
    what = ("in all", "host, fitted", "frontend, fitted", "first token", "later tokens")
    title = "What the mean latency lacks without host time (s)"
    return Table(title, ("run", "of which the host's", *what), rows, text=2)


def _beside_others(runs: Mapping[str, Any]) -> Table:
    rows = [
        (
            *(name, str(group["requests"]), f"{group['running']:.0f}"),
            *(f"{1e3 * group[f'{key}_s']:.1f}" for key in ("measured", "zero", "fitted")),
        )
        for name, run in runs.items()
        for group in run["by_batch"]
    ]
    headings = ("run", "requests", "running", "TPOT measured (ms)", "no host time", "fitted")
    return Table("By requests running beside", headings, rows)


def tune_answer(content: Mapping[str, Any], name: str = "") -> Section:
    """Of what ``tune --json`` prints."""
    runs, known = content["runs"], content["known"]
    worst = {
        when: {m: max(abs(r[m][when]) for r in runs.values() if m in r) for m in NOISE
               if any(m in r for r in runs.values())}
        for when in ("before_pct", "after_pct")
    }  # fmt: skip
    after, before = worst["after_pct"], worst["before_pct"]
    change = enumerated(
        [f"{METRICS[m].name} by at most {after[m]:.1f} % (before {before[m]:.1f} %)" for m in after]
    )
    rows = [
        (
            key,
            _constant(key, content["before"]),
            _constant(key, content["tuned"]),
            "yes" if known[key] >= SETTLED else "no" if known[key] < OPEN else "partly",
        )
        for key in known
    ]
    errors = [(run, *(_beside(of.get(m)) for m in NOISE)) for run, of in runs.items()]
    next_runs = sorted(content["next_runs"].items(), key=lambda one: -one[1])
    warnings = content["too_fast"] + [
        f"the runs cannot tell {a} and {b} apart: trust their sum, not each"
        for a, b in content["mixed_up"]
    ]
    warnings += [
        f"{METRICS[m].name} is still {off:.0f} % off: the configuration is not of this "
        "server, or something of it is not modelled"
        for m, off in after.items()
        if off > DOUBTFUL_PCT
    ]
    return Section(
        kind="tune",
        name=name,
        question="Which constants make the simulation of this server what was measured?",
        answer=f"Tuned to {', '.join(runs)}, the simulation is off in {change}."
        + "".join(f" The next run that would tell most: {best}." for best, _ in next_runs[:1]),
        command=content.get("command", ""),
        tables=[
            Table(
                "Constants",
                ("constant", "of the stack", "tuned", "settled by the runs"),
                rows,
                "Constants that the runs do not settle stay near those of the stack.",
            ),
            Table(
                "Means beside measured",
                ("run", *(f"{METRICS[m].name}: measured, before, after" for m in NOISE)),
                errors,
                "In sample: these runs were fitted to. Other loads are less certain.",
            ),
            Table(
                "What a next run would tell",
                ("load", "information (nats)"),
                [(text, f"{gain:.2f}") for text, gain in next_runs],
            ),
        ],
        assumed=thinned(content["notes"]),
        warnings=warnings,
    )


def _constant(key: str, values: Mapping[str, float]) -> str:
    value = values[key]
    return f"{value:.3f}" if key in ("kernels", "links") else f"{1e3 * value:.3g} ms"


def _beside(one: Mapping[str, float] | None) -> str:
    if one is None:
        return ""
    return (
        f"{1e3 * one['measured_s']:.4g} ms, {one['before_pct']:+.1f} %, {one['after_pct']:+.1f} %"
    )


# Charts -----------------------------------------------------------------------------------------

_STYLES = {
    "measured": Style(BLACK, "-"),
    "zero": Style(BLUE, "--"),
    "configured": Style(GREEN, "-."),
    "fitted": Style(VERMILION, ":"),
    "left_out": Style(PURPLE, (0, (5, 1, 1, 1))),
}


def score_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The section of a ``score --out`` folder, of recorded runs or of the laboratory."""
    name = folder.resolve().name
    if "runs" not in found:
        return replace(read_section(folder), name=name)
    section = score_answer(found, name)
    return replace(section, charts=[_latencies(found["runs"])] if section.tables[0].rows else [])


def _latencies(runs: Mapping[str, Any]) -> Chart:
    """The errors of the mean latency, for the simulations that every run has."""
    latencies: dict[str, list[float]] = {}
    for run in runs.values():
        for label, one in variants_of(run).items():
            latencies.setdefault(label, []).append(one["off_pct"]["latency_s"]["mean"])
    places = np.arange(len(runs), dtype=float)
    series = [
        Series("bars", label, np.array(each, float), places, style.colour)
        for (label, each), style in zip(latencies.items(), line_styles(), strict=False)
        if len(each) == len(runs)
    ]
    return Chart("Mean latency", Axis("mean latency, off (%)"), Axis("", rows=[*runs]), series)


def run_distributions(scored: ScoredRun) -> list[Chart]:
    """A chart for each measure: the share of requests up to each time."""
    tables = {"measured": scored.case.run.requests}
    tables |= {name: each.requests for name, each in scored.simulated.items()}
    share = Axis("share of requests (%)", ends=(0.0, 1.0), shares=True)
    charts = []
    for key in MEASURES:
        scale, unit = (1e3, "ms") if key == "tpot_s" else (1.0, "s")
        series = [
            Series("step", VARIANTS[name], *cumulative(scale * table[key].dropna()), *_STYLES[name])
            for name, table in tables.items()
        ]
        title = METRICS[key].name
        charts.append(Chart(first_upper(title), Axis(f"{title} ({unit})"), share, series))
    return charts
