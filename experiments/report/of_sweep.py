"""The section of a sweep: its answer, with charts of each load by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.strict import UserError
from ..results import read_text
from ..sweeps.sweep_answer import Sweep, read_answer
from .op_origins import first_deployments, op_times_grid
from .section import Section
from .sweep_charts import SHOWN, lines, numeric_axes, pareto, that_vary

_MOST_AXES, _MOST_LOADS, _MOST_CHARTS = 6, 3, 24


def sweep_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The finished runs of a sweep. Raises UserError where it is damaged, or none is finished."""
    swept, section = read_answer(folder)
    metrics = that_vary(swept, SHOWN)[0]
    axes = [axis for axis in numeric_axes(swept) if axis != "seed"][:_MOST_AXES]
    charts = [one for y, x in combinations(SHOWN, 2) for one in pareto(swept, x, y, _MOST_LOADS)]
    charts += [one for axis in axes for one in lines(swept, axis, metrics)]
    deployments, problems = first_deployments(folder, swept.table)
    op_times = op_times_grid(deployments)
    return replace(
        section,
        charts=charts[:_MOST_CHARTS],
        tables=[*section.tables, *([op_times] if op_times else [])],
        configuration=_first_configuration(swept),
        warnings=[*section.warnings, *problems],
    )


def _first_configuration(swept: Sweep) -> dict[str, str]:
    path = swept.folder / "runs" / str(swept.table["run"].iloc[0]) / "config.yaml"
    try:
        return {f"of the first run, {path.parent.name}": read_text(path)}
    except UserError as error:
        raise UserError(f"the sweep is damaged: {error}") from None
