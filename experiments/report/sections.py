"""From results to the sections of a report, with charts: a function for each kind of result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.manifest import spoken
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import number_text
from ..capacity.probing import CAPACITY_FORMAT, RECOMMEND_FORMAT, SENSITIVITY_FORMAT
from ..results import (
    ACCURACY_FORMAT,
    FIGURES_FORMAT,
    FORMAT,
    SCORE_FORMAT,
    SUMMARY,
    SWEEP_FORMAT,
    VALIDATION_FORMAT,
    read_summary,
    read_text,
)
from ..run.compare import SimulatedAgain, labelled_tables, simulate_again
from .capacity_answers import capacity_section, recommend_section, sensitivity_section
from .charts import occupancy, overviews, run_charts, timelines
from .op_origins import first_deployments, op_times_grid
from .run_answers import comparison_section, ratios_table, read_sweep_section, run_section
from .score_answers import scored
from .section import Chart, Section, damaged, enumerated, heading_of, read_section
from .sweep_charts import SHOWN, lines, numeric_axes, pareto, sweep_heading, that_vary
from .timeline import MOST_ROWS, boxes_window, default_window

_OF_SCENARIOS = ("scenarios", "deployments", "notes", "doubts", "rejections", "narrow_bands")
"""The keys of a run's summary with entries by scenario."""
_MOST_AXES, _MOST_LOADS, _MOST_CHARTS = 6, 3, 24


def _runs(folders: Sequence[Path], progress: Progress = silent) -> Section:
    """All scenarios of the runs in ``folders``, with charts. They are simulated again for the
    timelines; where that cannot be done, a warning says why."""
    found, again = labelled_tables(folders), dict[str, SimulatedAgain]()
    problems: list[str] = []
    for label, (folder, name, _) in found.items():
        try:
            again[label] = simulate_again(folder, name, label, progress)
            problems += again[label].notes
        except UserError as error:
            problems.append(f"{label}: no timeline, and no errors of op times: {error}")
    heads = {folder: read_summary(folder) for folder in folders}
    content: dict[str, Any] = {
        "name": enumerated([str(head["name"]) for head in heads.values()]),
        "description": "\n\n".join(filter(None, (h.get("description") for h in heads.values()))),
    }
    for key in _OF_SCENARIOS:
        content[key] = {
            label: heads[folder][key][name]
            for label, (folder, name, _) in found.items()
            if name in heads[folder].get(key, ())
        }
    section = run_section(content)
    charts = run_charts({label: table for label, (_, _, table) in found.items()})
    bars = charts.pop("ledger")
    del charts["completions"]
    caption = "Each stage's time by account, mean over replicas. The accounts add up exactly."
    said = "Where the time of the stages goes"
    op_times = op_times_grid([each.deployment for each in again.values()])
    return replace(
        section,
        charts=[
            *(one for some in charts.values() for one in some if one.series),
            *(replace(one, title=f"{said}: {one.title}", caption=caption) for one in bars),
            *_again_charts(again, {label: table.policy for label, (_, _, table) in found.items()}),
        ],
        tables=[section.tables[0], *filter(None, [*map(ratios_table, heads.values()), op_times])],
        configuration={f"{f.name}/config.yaml": read_text(f / "config.yaml") for f in folders},
        warnings=[*section.warnings, *problems],
    )


def _again_charts(again: Mapping[str, SimulatedAgain], policy: Mapping[str, str]) -> list[Chart]:
    worked = {n: each.analysis for n, each in again.items() if each.analysis.records.end_s > 0}
    if not worked:
        return []
    window = boxes_window(worked.values())
    view = default_window([analysis.records for analysis in worked.values()])
    caption = (
        f"Seconds {number_text(window.start_s)} to {number_text(window.end_s)} of the simulated "
        "time: drag to move, and zoom with the buttons or the wheel. A box is a micro-batch; "
        "a tinted space before it is a bubble."
    )
    policies = [policy[name] for name in worked]
    stages = timelines(worked, window, view, MOST_ROWS, policies)
    title = "Timeline of the stages"
    named = [replace(one, title=f"{title}: {one.title}", caption=caption) for one in stages]
    return [
        *named,
        *overviews(worked),
        *occupancy(worked, policies, {})[:1],
    ]


def _sweep(folder: Path, _: Mapping[str, Any]) -> Section:
    """The answer of a sweep with charts of each load by itself, and the origin of its op times."""
    swept, section = read_sweep_section(folder)
    metrics = that_vary(swept, SHOWN)[0]
    axes = [axis for axis in numeric_axes(swept) if axis != "seed"][:_MOST_AXES]
    charts = [one for y, x in combinations(SHOWN, 2) for one in pareto(swept, x, y, _MOST_LOADS)]
    charts += [one for axis in axes for one in lines(swept, axis, metrics)]
    deployments, problems = first_deployments(folder, swept.table)
    first = folder / "runs" / str(swept.table["run"].iloc[0]) / "config.yaml"
    return replace(
        section,
        heading=sweep_heading(swept),
        charts=charts[:_MOST_CHARTS],
        tables=[*section.tables, *filter(None, [op_times_grid(deployments)])],
        configuration={f"of the first run, {first.parent.name}": read_text(first)},
        warnings=[*section.warnings, *problems],
    )


def _comparison(folder: Path, found: Mapping[str, Any]) -> Section:
    if not found.keys() >= {"a", "b", "policies", "notes", "summaries"}:
        raise UserError(f"{folder}: holds figures only: name the folders of the results in them")
    return comparison_section(found)


SectionOf = Callable[[Path, Mapping[str, Any]], Section]
SECTIONS: dict[str, SectionOf] = {
    SWEEP_FORMAT: _sweep,
    FIGURES_FORMAT: _comparison,
    SCORE_FORMAT: scored,
    CAPACITY_FORMAT: capacity_section,
    RECOMMEND_FORMAT: recommend_section,
    SENSITIVITY_FORMAT: sensitivity_section,
    VALIDATION_FORMAT: lambda folder, _: read_section(folder),
    ACCURACY_FORMAT: lambda folder, _: read_section(folder),
}
"""By the format of the result's summary, which they get with its folder; runs come together."""


def sections_of(folders: Sequence[Path], progress: Progress = silent) -> list[Section]:
    """The sections of a report on the results in ``folders``: first all runs, in one section.

    Raises UserError for a folder that is none of these results, or a damaged one.
    """
    kinds = {folder: _kind(folder) for folder in folders}
    runs = [folder for folder, kind in kinds.items() if kind == FORMAT]
    found = []
    if runs:
        with damaged(", ".join(map(str, runs)), "run"):
            heading = heading_of(*map(read_summary, runs))
            found.append(replace(_runs(runs, progress), heading=heading))
    for folder, kind in kinds.items():
        if kind != FORMAT:
            with damaged(str(folder), "compare" if kind == FIGURES_FORMAT else spoken(kind)):
                summary = read_summary(folder)
                section = SECTIONS[kind](folder, summary)
                found.append(replace(section, heading=section.heading or heading_of(summary)))
    return found


def _kind(folder: Path) -> str:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    kind = read_summary(folder).get("format")
    if kind == FORMAT or (isinstance(kind, str) and kind in SECTIONS):
        return kind
    known = ", ".join(spoken(name) for name in (FORMAT, *SECTIONS) if name != FIGURES_FORMAT)
    raise UserError(
        f"{folder}: holds no {SUMMARY} of a result that a report shows: one of {known}, or what "
        "compare --out wrote"
    )
