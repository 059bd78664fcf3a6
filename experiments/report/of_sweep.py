"""The section of a sweep: its answer, with charts of each load by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.strict import UserError
from ..config.scenario import parameter
from ..content import Chart, Section, anchor
from ..results import read_text
from ..run.trade_off import ALIKE, Load
from ..sweeps import drawing
from ..sweeps.drawing import few, groups, label, over, shown, varies
from ..sweeps.plot import METRICS, numeric_axes, that_vary
from ..sweeps.sweep_answer import Sweep, read_answer
from .charts import Spots, StyledLine, lines, points
from .of_capacity import first_deployments, op_times_grid

_MOST_AXES, _MOST_LOADS, _MOST_CHARTS = 6, 3, 24


def sweep_section(folder: Path, found: Mapping[str, Any]) -> Section:
    """The finished runs of a sweep. Raises UserError where it is damaged, or none is finished."""
    swept, section = read_answer(folder)
    metrics = that_vary(swept, METRICS)[0]
    deployments, problems = first_deployments(folder, swept.table)
    op_times = op_times_grid(deployments)
    return replace(
        section,
        charts=[*_fronts(swept), *_axes_charts(swept, metrics)][:_MOST_CHARTS],
        details=[*section.details, *([op_times] if op_times else [])],
        configuration=_first_configuration(swept),
        warnings=[*section.warnings, *problems],
    )


def _fronts(swept: Sweep) -> list[Chart]:
    """Every choice under a load, in each pair of metrics that differ there, with the front."""
    loads = [load for load in swept.weighed if len(load.options) > 1]
    return [
        _front(swept, load, x, y)
        for load in few(loads, _MOST_LOADS)
        for y, x in combinations(METRICS, 2)
        if min(load.spread(x), load.spread(y)) > ALIKE
    ]


def _front(swept: Sweep, load: Load, x: str, y: str) -> Chart:
    rows = drawing.points(swept, load, x, y)
    parts = {
        name: Spots(
            style["color"],
            some[x].to_numpy(),
            some[y].to_numpy(),
            some["_option"].tolist(),
            some["_layout" if some["_layout"].all() else "_option"].tolist(),
            [anchor(run) for run in some["run"]],
        )
        for name, some, style in groups(rows, swept.contrast, most=None)
    }
    best = rows.set_index("_option").loc[load.front(x, y)]
    front = (best[x].to_numpy(np.float64), best[y].to_numpy(np.float64))
    title = f"{label(y)} against {label(x)}" + (f" ({load.name})" if load.name else "")
    caption = (
        "The dashed line joins the points that no other one beats in both by more than 1 % and the "
        "noise of the seeds. A click on a point leads to its row."
    )
    return Chart(title, points(parts, front, label(x), label(y)), caption)


def _axes_charts(swept: Sweep, metrics: list[str]) -> list[Chart]:
    """Each metric over each axis, under each load."""
    charts = []
    for axis in [a for a in numeric_axes(swept) if a != "seed"][:_MOST_AXES]:
        panels, pooled = over(swept, axis)
        for load, lines_of in panels:
            for metric in metrics:
                curves = {}
                for name, rows, style in lines_of:
                    middle = shown(rows, metric).groupby(rows[axis]).median().dropna()
                    if len(middle):
                        x, y = np.asarray(middle.index, float), np.asarray(middle, float)
                        curves[name or "all"] = StyledLine(x, y, style)
                drawn = pd.Series(np.concatenate([[], *(curve.y for curve in curves.values())]))
                if len(drawn) and varies(drawn):
                    chart = lines(curves, label(axis), label(metric), marks=True)
                    where = f" ({load})" if load else ""
                    title = f"{label(metric)} over {parameter(axis).name}{where}"
                    charts.append(Chart(title, chart, f"{pooled.capitalize()}." if pooled else ""))
    return charts


def _first_configuration(swept: Sweep) -> dict[str, str]:
    path = swept.folder / "runs" / str(swept.table["run"].iloc[0]) / "config.yaml"
    try:
        return {f"of the first run, {path.parent.name}": read_text(path)}
    except UserError as error:
        raise UserError(f"the sweep is damaged: {error}") from None
