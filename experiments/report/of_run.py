"""The section of one or several runs: their scenarios side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import number_text
from ..results import Tables, read_summary, read_text
from ..run.compare import SimulatedAgain, labelled_tables, simulate_again
from ..run.run_answer import OF_SCENARIOS, ratios_table, run_answer
from .charts import occupancy, overviews, run_charts, timelines
from .of_capacity import op_times_grid
from .section import Chart, Section, enumerated
from .timeline import MOST_ROWS, boxes_window, default_window


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
        charts=[*_of_tables(tables), *_again_charts(again, tables)],
        tables=[
            section.tables[0],
            *filter(None, [*map(ratios_table, heads.values()), op_times]),
        ],
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


def _of_tables(tables: Mapping[str, Tables]) -> list[Chart]:
    """The distributions, and the ledger."""
    found = run_charts(tables)
    bars = found.pop("ledger")
    del found["completions"]
    cdfs = [one for charts in found.values() for one in charts if one.series]
    caption = "Each stage's time by account, mean over replicas. The accounts add up exactly."
    said = "Where the time of the stages goes"
    return cdfs + [replace(one, title=f"{said}: {one.title}", caption=caption) for one in bars]


def _again_charts(again: Mapping[str, SimulatedAgain], tables: Mapping[str, Tables]) -> list[Chart]:
    """The charts that need the records of a run."""
    worked = {n: each.analysis for n, each in again.items() if each.analysis.records.end_s > 0}
    if not worked:
        return []
    window = boxes_window(worked.values())
    view = default_window([analysis.records for analysis in worked.values()])
    caption = (
        f"Seconds {number_text(window.start_s)} to {number_text(window.end_s)} of the simulated "
        "time: drag to move, and zoom with the buttons or the wheel. A box is a micro-batch; "
        "the space before it is a bubble where it is tinted."
    )
    policies = [tables[name].policy for name in worked]
    stages = timelines(worked, window, view, MOST_ROWS, policies)
    named = [
        replace(one, title=f"Timeline of the stages: {one.title}", caption=caption)
        for one in stages
    ]
    memory = occupancy(worked, policies, {})[:1]
    return [*named, *overviews(worked), *memory]
