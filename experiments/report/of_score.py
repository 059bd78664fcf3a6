"""The section of a score: predictions beside measured servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sarathi_sim.experiments.content import Chart, Section, SortableTable, enumerated
from sarathi_sim.experiments.figures.style import BLUE, ORANGE, line_styles
from sarathi_sim.experiments.report.charts import paired_bars
from sarathi_sim.experiments.score.figure import LABELS
from sarathi_sim.experiments.score.measured import METRICS
from sarathi_sim.experiments.score.server_run import MEASURES
from sarathi_sim.simulator.views.metric_registry import METRICS as METRICS_BY_KEY
from sarathi_sim.simulator.views.metric_registry import number_text

_STATISTICS = {"mape": "mean", "median": "median", "p90": "p90", "bias": "bias"}
_MOST_DRAWN = 40
_COLOURS = dict(zip(METRICS, (BLUE, ORANGE), strict=True))


def score_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """What ``score --out`` wrote."""
    return (_recorded if "runs" in found else _section)(folder, found)


def _section(folder: Path, found: Mapping[str, Any]) -> Section:
    groups = {name: one for name, one in found["groups"].items() if one["n"]}
    headings = ["group", "rows"]
    headings += [f"{m.upper()}, {s} (%)" for m in METRICS for s in _STATISTICS.values()]
    rows = [
        [name, f"{one['n']:,}", *(f"{one[m][key]:.1f}" for m in METRICS for key in _STATISTICS)]
        for name, one in groups.items()
    ]
    note = "Errors of predictions on measured servers; nothing was fitted to these rows."
    drawn = dict(list(groups.items())[:_MOST_DRAWN])
    medians = {
        m.upper(): (_COLOURS[m], [one[m]["median"] for one in drawn.values()]) for m in METRICS
    }
    details = [_beside(path, peer) for path, peer in found.get("peers", {}).items()]
    refused = [[reason, f"{count:,}"] for reason, count in found["refused"].items()]
    if refused:
        details.append(SortableTable("Rows without a prediction", ["reason", "rows"], refused))
    return Section(
        kind="score",
        name=folder.resolve().name,
        question="How far are predictions of TTFT and TPOT from measured servers?",
        answer=_answer(found, groups),
        table=SortableTable("Errors by group", headings, rows, note),
        charts=[Chart("Median error by group", paired_bars(list(drawn), medians, "error (%)"))]
        if groups
        else [],
        details=details,
    )


def _recorded(folder: Path, found: Mapping[str, Any]) -> Section:
    """Recorded runs, simulated request by request."""
    rows, latencies = [], dict[str, list[float]]()
    for name, run in found["runs"].items():
        variants = {key: label for key, label in LABELS.items() if "off_pct" in run.get(key, {})}
        for key, label in variants.items():
            errors = [run[key]["off_pct"][m]["mean"] for m in MEASURES]
            rows.append([name, label, f"{run['requests']:,}", *(f"{e:+.1f}" for e in errors)])
            latencies.setdefault(label, []).append(errors[-1])
    headings = ["run", "host time", "requests"]
    headings += [f"mean {METRICS_BY_KEY[m].name} (off, %)" for m in MEASURES]
    note = "Predicted beside measured. 'Fitted to these' has seen the run, the others have not."
    names = list(found["runs"])
    whole = {
        label: (style["color"], each)
        for (label, each), style in zip(latencies.items(), line_styles(), strict=False)
        if len(each) == len(names)
    }
    worst = {label: max(map(abs, each)) for label, (_, each) in whole.items()}
    said = enumerated([f"{number_text(error)} % ({label})" for label, error in worst.items()])
    chart = paired_bars(names, whole, "mean latency, off (%)")
    return Section(
        kind="score",
        name=folder.resolve().name,
        question="How far are simulated runs of a server from the recorded ones?",
        answer=f"The mean latency of {len(names)} recorded runs is off by at most {said}.",
        table=SortableTable("Errors by run", headings, rows, note, text=2),
        charts=[Chart("Mean latency", chart)],
    )


def _answer(found: Mapping[str, Any], groups: Mapping[str, Any]) -> str:
    answered = f"{found['answered']:,} of {found['rows']:,} rows have a prediction"
    which = next((name for name in ("all", "flagged") if name in groups), None)
    if which is None:
        return f"{answered}."
    one, flagged = groups[which], groups.get("flagged")
    errors = " and ".join(f"{one[m]['median']:.1f} % for {m.upper()}" for m in METRICS)
    of = (
        ""
        if flagged is None
        else f" of the {one['n']:,} that are {'not ' * (which == 'all')}flagged"
    )
    return f"{answered}; the median error{of} is {errors}."


def _beside(path: str, peer: Mapping[str, Any]) -> SortableTable:
    groups = {name: one for name, one in peer["groups"].items() if one["n"]}
    sides = [(side, m) for m in METRICS for side in ("ours", "theirs")]
    rows = [
        [name, f"{one['n']:,}", *(f"{one[side][m]['median']:.1f}" for side, m in sides)]
        for name, one in groups.items()
    ]
    headings = ["group", "rows", *(f"{m.upper()}, {side} (%)" for side, m in sides)]
    return SortableTable(f"Median error beside {Path(path).name}", headings, rows)
