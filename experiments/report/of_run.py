"""The section of one or several runs: their scenarios side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures.distributions import (
    ACCOUNTS,
    distribution,
    middle_and_tail,
    stage_shares,
    steps,
    table_styles,
)
from experiments.figures.slices import memory_curves
from experiments.report.charts import StyledLine, lines, stacked_bars
from experiments.report.provenance import op_times_grid
from experiments.report.stages_chart import boxes_window, overviews, timelines
from experiments.results import Tables, read_summary
from experiments.run.compare import SimulatedAgain, simulate_again
from experiments.run.overlay import labelled_tables
from experiments.run.report import SHOWN, load_notes, number_or_dash, shown_row
from experiments.content import Chart, Section, SortableTable, enumerated
from profiler.storage.plain_yaml import read_mapping
from profiler.storage.progress import Progress, silent
from profiler.storage.strict import UserError
from simulator.confidence.coverage import Outside
from simulator.views.metric_registry import METRICS, known, number_text, with_unit

Summaries = Mapping[str, Mapping[str, Any]]
_KEY = {
    "makespan_s": "makespan (s)",
    "output_tokens_per_s": "output tokens/s",
    "ttft_s.p50": "TTFT p50 (s)",
    "ttft_s.p99": "TTFT p99 (s)",
    "tbt_s.p50": "TBT p50 (s)",
    "tbt_s.p99": "TBT p99 (s)",
    "latency_s.p50": "latency p50 (s)",
    "latency_s.p99": "latency p99 (s)",
    "mfu": "MFU (%)",
    "bubble_share": "bubbles (%)",
}
"""The numbers of the first table, and their headings."""
_CDFS = {
    "ttft_s": "Time to first token",
    "tbt_s": "Time between tokens",
    "latency_s": "Latency of requests",
    "bubble_s": "Bubble time of requests",
}
_ALIKE = 1.02
"""Makespans within this factor follow the arrivals, and say nothing of the scenarios."""


def run_section(folders: Sequence[Path], progress: Progress = silent) -> Section:
    """All scenarios of the runs in ``folders``.

    They are simulated again for the timelines; where that cannot be done, a warning says why.
    Raises ConfigError where a folder is not a result.
    """
    found = labelled_tables(folders)
    summaries = {
        label: read_summary(folder)["scenarios"][name] for label, (folder, name, _) in found.items()
    }
    tables = {label: table for label, (_, _, table) in found.items()}
    warnings, again = list(load_notes(summaries, Path(folders[0].resolve().name))), {}
    for label, (folder, name, _) in found.items():
        try:
            again[label] = simulate_again(folder, name, label, progress)
            warnings += again[label].notes
        except UserError as error:
            warnings.append(f"{label}: no timeline, and no errors of op times: {error}")
    warnings += _outside(summaries)
    warnings += [note for each in again.values() for note in each.deployment.notes]
    configs = {folder: (folder / "config.yaml").read_text("utf-8") for folder in folders}
    heads = [read_summary(folder) for folder in folders]
    details = [
        _all_numbers(summaries),
        *filter(None, map(_ratios, folders, heads)),
        *filter(None, [op_times_grid([each.deployment for each in again.values()])]),
    ]
    return Section(
        kind="run",
        name=enumerated([str(head["name"]) for head in heads]),
        question=_question(list(tables), again),
        answer=answer(summaries),
        table=_key_table(summaries),
        charts=[*_tables_charts(tables), *_again_charts(again, tables)],
        details=details,
        about=_descriptions(folders),
        configuration={f"{path.name}/config.yaml": text for path, text in configs.items()},
        warnings=list(dict.fromkeys(warnings)),
    )


def _question(labels: Sequence[str], again: Mapping[str, SimulatedAgain]) -> str:
    what = "how many tokens a second, how soon, and where does the time go?"
    where = ""
    if again:
        deployments = [each.deployment for each in again.values()]
        models = enumerated(list(dict.fromkeys(d.model.name for d in deployments)))
        devices = enumerated(list(dict.fromkeys(d.device.name for d in deployments)))
        where = f" {models} on {devices}"
    if len(labels) == 1:
        return f"How does {labels[0]} serve{where or ' its requests'}: {what}"
    return f"Which of {enumerated(labels)} serves{where or ' its requests'} best: {what}"


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
    growing = [name for name, one in summaries.items() if _latency(one) is None]
    if len(served) == 1 and not growing and max(spans.values()) > _ALIKE * min(spans.values()) > 0:
        first, *others = sorted(spans, key=lambda name: spans[name])
        ratios = enumerated(
            [f"{spans[name] / spans[first]:.3g} times as fast as {name}" for name in others[:4]]
        )
        said = f"{first} is the fastest: it is done after {number_text(spans[first])} s, {ratios}"
        return f"{said}; {_waits(summaries[first])}."
    rated = {
        name: number for name, one in summaries.items() if (number := _latency(one)) is not None
    }
    if not rated:
        most = max(summaries, key=lambda name: summaries[name]["output_tokens_per_s"] or 0.0)
        rate = _text(summaries[most], "output_tokens_per_s")
        return f"All are overloaded; {most} has the most output tokens/s, {rate}."
    best = min(rated, key=lambda name: rated[name])
    rest = enumerated([f"{name} {number_text(rated[name])} s" for name in rated if name != best])
    beside = f" ({rest})" if len(rated) > 1 else ""
    said = (
        f"{best} has the lowest latency: 99 % of its requests are done within "
        f"{number_text(rated[best])} s{beside}"
    )
    return said + (f"; {enumerated(growing)}: overloaded." if growing else ".")


def _latency(one: Mapping[str, Any]) -> float | None:
    """The 99th percentile of the latency, of the steady part where there is one."""
    state = one["steady"]["state"]
    part = one["steady"] if state == "steady" else one
    found = part["latency_s"]["p99"]
    return None if state == "overloaded" or found is None else float(found)


def _waits(one: Mapping[str, Any]) -> str:
    state = one["steady"]["state"]
    if state == "overloaded":
        return "it is overloaded: its queue grows while requests arrive"
    part = one["steady"] if state == "steady" else one
    gap = f"99 % of the gaps between tokens are at most {_text(one, 'tbt_s.p99')} s"
    if state == "closed":
        return f"{gap} (all requests arrive at once, so most wait long for their first token)"
    return f"99 % of the first tokens come within {_text(part, 'ttft_s.p99')} s, and {gap}"


def _text(summary: Mapping[str, Any], path: str) -> str:
    found: Any = summary
    for part in path.split("."):
        found = found.get(part)
    return "-" if found is None else known(path).text(found)


def _key_table(summaries: Summaries) -> SortableTable:
    found = {path: shown_row(path, summaries.values()) for path in _KEY}
    columns = {_KEY[path]: row[2:] for path, row in found.items() if row is not None}
    rows = [[name, *cells] for name, *cells in zip(summaries, *columns.values(), strict=True)]
    note = (
        "Predicted. TTFT: time to first token. TBT: time between tokens. docs/metrics.md defines "
        "every number."
    )
    return SortableTable("Key numbers", ["scenario", *columns], rows, note)


def _all_numbers(summaries: Summaries) -> SortableTable:
    rows = [row for path in SHOWN if (row := shown_row(path, summaries.values())) is not None]
    note = "The 90 % bands follow from the errors of the op times (docs/uncertainty.md)."
    return SortableTable("All numbers", ["number", "unit", *summaries], rows, note, text=2)


def _ratios(folder: Path, summary: Mapping[str, Any]) -> SortableTable | None:
    ratios, bands, stated = (summary.get(k, {}) for k in ("ratios", "ratio_bands", "reference"))
    if not ratios:
        return None
    asked = read_mapping(folder / "config.yaml").get("compare") or {}
    rows = []
    for name in ratios:
        one = {"metric": name, "over": (), **asked.get(name, {})}
        what = ": ".join(filter(None, [one.get("label") or one["metric"], " / ".join(one["over"])]))
        rows.append([what, *(number_or_dash(f.get(name)) for f in (ratios, bands, stated))])
    return SortableTable("Ratios", ["ratio", "predicted", "90 % band", "stated elsewhere"], rows)


def _outside(summaries: Summaries) -> list[str]:
    return [
        f"{name}: {Outside(**(one | {'profile': tuple(map(tuple, one['profile']))}))}"
        for name, summary in summaries.items()
        for one in summary.get("outside_profile", [])
    ]


def _descriptions(folders: Sequence[Path]) -> str:
    return "\n\n".join(
        str(text) for f in folders if (text := read_mapping(f / "config.yaml").get("description"))
    )


def _tables_charts(tables: Mapping[str, Tables]) -> list[Chart]:
    """The distributions, and the ledger."""
    charts = []
    for key, title in _CDFS.items():
        metric = METRICS[key]
        curves = {}
        for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
            values, share = distribution(table, key)
            if len(values) and values[-1] > 0:
                label = f"{name}: {middle_and_tail(metric, values, share)}"
                curves[label] = StyledLine(*steps(values, share), style)
        if curves:
            of = "all tokens" if key == "tbt_s" else "requests"
            chart = lines(curves, with_unit(metric.name, metric.unit), f"share of {of}", share=True)
            charts.append(Chart(title, chart, "A click on a name hides its line."))
    return [*charts, *_ledger(tables)]


def _ledger(tables: Mapping[str, Tables]) -> list[Chart]:
    """Where the stages' time goes; nothing where no stage did anything."""
    shares = {name: stage_shares(table.ledger) for name, table in tables.items()}
    rows = [(name, str(stage)) for name, share in shares.items() for stage in share.index]
    parts = {}
    for key, (colour, label) in ACCOUNTS.items():
        values = 100 * np.concatenate(
            [share[key].to_numpy(np.float64) for share in shares.values()]
        )
        if values.max() > 0.005:
            parts[label] = (colour, values)
    if not parts:
        return []
    chart = stacked_bars(rows, parts, "share of the run (%)")
    caption = "Each stage's time by account, mean over replicas. The accounts add up exactly."
    return [Chart("Where the time of the stages goes", chart, caption)]


def _again_charts(again: Mapping[str, SimulatedAgain], tables: Mapping[str, Tables]) -> list[Chart]:
    """What only the records of a run show."""
    worked = {n: each.analysis for n, each in again.items() if each.analysis.records.end_s > 0}
    if not worked:
        return []
    window = boxes_window(worked)
    caption = (
        f"Seconds {number_text(window.start_s)} to {number_text(window.end_s)} of the simulated "
        "time: drag to move, and zoom with the buttons or the wheel. A box is a micro-batch; "
        "the space before it is a bubble where it is tinted."
    )
    charts = [
        Chart("Timeline of the stages", timelines(worked, window), caption),
        Chart("The whole run", overviews(worked), "Share of the stages' time, in 240 parts."),
    ]
    styles = dict(zip(tables, table_styles(tables), strict=True))
    memory = {}
    for name, analysis in worked.items():
        log = analysis.records.replicas[0]
        if log.pool is not None:
            x, y = memory_curves(log)[0]
            memory[name] = StyledLine(x[~np.isnan(y)], y[~np.isnan(y)], styles[name])
    if memory:
        chart = lines(memory, "time (s)", "KV cache in use (%)")
        charts.append(Chart("Memory", chart, "Of replica 0, mean of 240 parts of the run."))
    return charts
