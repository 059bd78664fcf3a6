"""The section of one or several runs: their scenarios side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import METRICS, number_text, with_unit
from ..content import Chart, Section, enumerated
from ..figures.distributions import (
    ACCOUNTS,
    distribution,
    middle_and_tail,
    stage_shares,
    steps,
    table_styles,
)
from ..figures.slices import first_decoder, memory_curves
from ..results import Tables, read_summary, read_text
from ..run.compare import SimulatedAgain, labelled_tables, simulate_again
from ..run.run_answer import OF_SCENARIOS, ratios_table, run_answer
from .charts import (
    StyledLine,
    boxes_window,
    lines,
    overviews,
    stacked_bars,
    timelines,
)
from .of_capacity import op_times_grid

_CDFS = {
    "ttft_s": "Time to first token",
    "tbt_s": "Time between tokens",
    "latency_s": "Latency of requests",
    "bubble_s": "Bubble time of requests",
}


def run_section(folders: Sequence[Path], progress: Progress = silent) -> Section:
    """All scenarios of the runs in ``folders``.

    They are simulated again for the timelines; where that cannot be done, a warning says why.
    Raises UserError where a folder is not a result.
    """
    found, again = labelled_tables(folders), dict[str, SimulatedAgain]()
    problems: list[str] = []
    for label, (folder, name, _) in found.items():
        try:
            again[label] = simulate_again(folder, name, label, progress)
            problems += again[label].notes
        except UserError as error:
            problems.append(f"{label}: no timeline, and no errors of op times: {error}")
    heads = {folder: read_summary(folder) for folder in folders}
    content = _together(found, heads)
    section = run_answer(content, _unlike(content, again) if len(folders) > 1 else ())
    tables = {label: table for label, (_, _, table) in found.items()}
    op_times = op_times_grid([each.deployment for each in again.values()])
    return replace(
        section,
        charts=[*_tables_charts(tables), *_again_charts(again, tables)],
        details=[*filter(None, [*map(ratios_table, heads.values()), op_times])],
        configuration={
            f"{folder.name}/config.yaml": read_text(folder / "config.yaml") for folder in folders
        },
        warnings=[*section.warnings, *problems],
    )


def _together(
    found: Mapping[str, tuple[Path, str, Tables]], heads: Mapping[Path, Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of several results as one, without their ratios."""
    content: dict[str, Any] = {
        "name": enumerated([str(head["name"]) for head in heads.values()]),
        "description": "\n\n".join(filter(None, (h.get("description") for h in heads.values()))),
    }
    for key in OF_SCENARIOS:
        content[key] = {
            label: heads[folder][key][name]
            for label, (folder, name, _) in found.items()
            if name in heads[folder].get(key, ())
        }
    return content


def _unlike(content: Mapping[str, Any], again: Mapping[str, SimulatedAgain]) -> list[str]:
    """The inputs in which the runs of several results differ, so that they cannot be ranked."""
    served, workloads = (
        content["deployments"].values(),
        [each.deployment.scenario.workload for each in again.values()],
    )
    notes = content["notes"].values()
    traffic = [[line for line in each if line.startswith("traffic: ")] for each in notes]
    differs = {
        "the model": _several([one["model"] for one in served]),
        "the GPU": _several([one["device"] for one in served]),
        "the traffic": _several(workloads) or _several(traffic),
    }
    return [what for what, differ in differs.items() if differ]


def _several(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


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
    """The accounts of the stages' time; empty if no stage was busy."""
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
    """The charts that need the records of a run."""
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
        log = first_decoder(analysis.records)
        if log.pool is not None:
            x, y = memory_curves(log)[0]
            memory[name] = StyledLine(x[~np.isnan(y)], y[~np.isnan(y)], styles[name])
    if memory:
        chart = lines(memory, "time (s)", "KV cache in use (%)")
        charts.append(
            Chart(
                "Memory",
                chart,
                "Of replica 0 (of two pools: decode 0), mean of 240 parts.",
            )
        )
    return charts
