"""Common parts of a sweep's figures: labels, names and colours of lines, scales, legends."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sarathi_sim.experiments.config.parameter_names import parameter, value_name
from sarathi_sim.experiments.figures.style import BLACK, line_styles, policy_styles
from sarathi_sim.experiments.sweeps.store import POLICY
from sarathi_sim.simulator.views.metric_registry import METRICS, STEADY, quantity

_MOST_LINES, _MOST_TICKS = 9, 6


def label(column: str) -> str:
    """The label of an axis for ``tbt_s.p99`` or ``policy.chunk_size``: in words, with its unit."""
    found = quantity(column)
    return parameter(column).axis if found is None else found.axis


def shown(table: pd.DataFrame, metric: str) -> pd.Series[float]:
    """A metric's column in the unit of its label."""
    found = quantity(metric)
    return table[metric] if found is None else found.metric.scale * table[metric]


def overloaded(table: pd.DataFrame) -> pd.Series[bool]:
    """Which runs' latencies (:data:`STEADY`) say how long the run was: no figure shows them."""
    return table["steady.state"] == "overloaded"


def overload_note(table: pd.DataFrame, columns: Sequence[str]) -> str:
    """The number of runs left out, and of which columns; empty if there are none."""
    count = int(overloaded(table).sum())
    keys = [column.partition(".")[0] for column in columns]
    latencies = [METRICS[key].name for key in dict.fromkeys(keys) if key in STEADY]
    if not count or not latencies:
        return ""
    return f"{count} of {len(table)} runs are overloaded and left out of: {', '.join(latencies)}"


class RunGroup(NamedTuple):
    """The runs behind a line, its name, and its style."""

    name: str
    rows: pd.DataFrame
    style: dict[str, Any]


def groups(table: pd.DataFrame, by: str | None, most: int | None = _MOST_LINES) -> list[RunGroup]:
    """The rows of each value of ``by``, in the sweep's order; all of them without it.

    Where every line is of one policy it has that policy's colour.
    """
    parts = [("", table)]
    if by is not None:
        values = list(dict.fromkeys(table[by].dropna()))[:most]
        parts = [(value_name(value), table[table[by] == value]) for value in values]
    policies = [_policy(rows) for _, rows in parts]
    styles: Iterable[dict[str, Any]] = line_styles()
    if all(policies):
        styles = policy_styles(policies)
    elif by is None:
        styles = [{"color": BLACK, "linestyle": "-"}]
    return [RunGroup(name, rows, style) for (name, rows), style in zip(parts, styles, strict=False)]


def _policy(rows: pd.DataFrame) -> str:
    """The policy of all of them; empty if there are several."""
    names = set(rows[POLICY]) if POLICY in rows else set()
    return str(names.pop()) if len(names) == 1 else ""


def scale(axes: Axes, which: str, values: pd.Series[float]) -> None:
    """Logarithmic where the values span more than a factor of twenty."""
    positive = values[values > 0]
    if len(positive) == len(values.dropna()) and positive.max() > 20 * positive.min():
        getattr(axes, f"set_{which}scale")("log")
        axis = getattr(axes, f"{which}axis")
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def ticks_at(axes: Axes, values: pd.Series[float]) -> None:
    """Ticks where there are values, if those are few; logarithmic where they would be too close."""
    few = sorted(values.dropna().unique())
    if len(few) <= _MOST_TICKS:
        if few[0] > 0 and len(few) > 2 and np.diff(few).min() < 0.1 * (few[-1] - few[0]):
            axes.set_xscale("log")
        axes.set_xticks(few, [f"{value:g}" for value in few])
        axes.minorticks_off()


def panels(figure: Figure, count: int, **options: Any) -> list[Axes]:
    """``count`` panels, three in a row at most."""
    columns = min(3, count)
    found = figure.subplots(-(-count // columns), columns, squeeze=False, **options).ravel()
    for axes in found[count:]:
        axes.set_axis_off()
    return list(found[:count])


def panel_size(count: int, height: float, more: float) -> tuple[float, float]:
    """The size of the figure with so many panels, in inches; ``more`` is for their surroundings."""
    columns = min(3, count)
    return max(7.0, 1.0 + 4.6 * columns), more + height * -(-count // columns)


def legend(figure: Figure, axes: Axes, by: str | None) -> None:
    """The legend below the panels, with the keys that distinguish the lines."""
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=int(np.clip(figure.get_figwidth() // 3.2, 1, len(labels))),
            fontsize=12,
            title=None if by is None else label(by),
            title_fontsize=12,
            handlelength=3.2,
        )


def heading(figure: Figure, *lines: str) -> None:
    """The heading of the whole figure, in lines no wider than it."""
    width = int(11 * figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, width) for line in lines if line)
    if text:
        figure.suptitle(text, fontsize=12)
