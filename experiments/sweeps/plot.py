"""Selects the figures of a sweep, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from sarathi_sim.simulator.views.metric_registry import STEADY, Better, quantity
from ..content import Section
from ..results import (
    FIGURES_FORMAT,
    SUMMARY,
    SWEEP_FORMAT,
    check_kept,
    check_replaceable,
    percentile_in,
    read_requests,
    read_summary,
    result_folder,
    write_summary,
)
from ..run.trade_off import ALIKE
from .sweep_answer import Sweep, overload_note, read_answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


METRICS = ("output_tokens_per_s", "tbt_s.p99", "ttft_s.p99")
CDF_COLUMNS = ("ttft_s", "tbt_max_s", "latency_s")
_MOST_HEAT_MAPS, _MOST_REQUESTS = 6, 2_000_000


class Drawn(NamedTuple):
    """The answer, the written files, and a note on data that the figures leave out."""

    section: Section
    files: list[Path]
    note: str


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (folder / SUMMARY).is_file() and read_summary(folder).get("format") == SWEEP_FORMAT


def plot_sweep(
    folder: Path,
    out: Path,
    metrics: Sequence[str] = (),
    over: Sequence[str] = (),
    progress: Progress = silent,
) -> Drawn:
    """Draw a sweep: lines over each numeric axis, heat maps over pairs, a Pareto front, CDFs.

    ``metrics`` are columns of its table (by default :data:`METRICS`), ``over`` the axes. The Pareto
    front shows the first two metrics with a better direction. Latencies of overloaded runs are left
    out, and every such figure says so. A metric that is equal under each load is left out, and the
    note names it. Raises UserError for an unknown metric or axis, or if no run has finished.
    """
    from . import drawing
    from .drawing import better

    check_replaceable(out, FIGURES_FORMAT)
    swept, section = read_answer(folder)
    columns = [str(c) for c in swept.table if quantity(str(c)) is not None]
    _known("--metric", [m for m in metrics if not _percentile_of(m, columns)], columns)
    swept = replace(swept, table=swept.table.assign(**_percentiles(folder, swept, metrics)))
    empty = [m for m in metrics or METRICS if drawing.shown(swept.table, m).isna().all()]
    chosen = [metric for metric in metrics or METRICS if metric not in empty]
    for metric in metrics:
        if metric in empty:
            raise UserError(f"--metric {metric}: no run has it, or all that do are overloaded")
    chosen, flat_note = that_vary(swept, chosen)
    numeric = numeric_axes(swept)
    _known("--over", over, numeric)
    wanted = list(over or (axis for axis in numeric if axis != "seed"))
    drawn: dict[str, Callable[[], Figure | None]] = {}
    for axis in wanted:
        drawn[f"lines_{axis}"] = lambda x=axis: drawing.lines(swept, x, chosen)  # type: ignore[misc]
    for x, y in list(combinations(wanted, 2))[:_MOST_HEAT_MAPS]:
        if swept.table.dropna(subset=[x, y, chosen[0]]).empty:  # keys of two policies, say
            continue
        drawn[f"heat_{x}_{y}"] = lambda x=x, y=y: drawing.heat_maps(swept, x, y, chosen[0])  # type: ignore[misc]
    weighed = [metric for metric in chosen if better(metric) is not Better.NEITHER][:2]
    if len(weighed) == 2:
        drawn["pareto"] = lambda: drawing.pareto(swept, weighed[1], weighed[0])
    drawn["cdf"] = lambda: drawing.cdfs(swept, lambda runs: _requests(folder, runs), CDF_COLUMNS)
    notes = (overload_note(swept.table, [*chosen, *CDF_COLUMNS]), flat_note)
    with result_folder(out, FIGURES_FORMAT) as scratch:
        files = _save(drawn, scratch, progress)
        write_summary(scratch, FIGURES_FORMAT, {"plotted": [folder.name]})
    return Drawn(section, [out / file.name for file in files], "; ".join(filter(None, notes)))


def _percentile_of(metric: str, columns: Sequence[str]) -> bool:
    """Whether it is a percentile of a distribution that is there with others."""
    name = metric.rpartition(".")[0]
    return quantity(metric) is not None and f"{name}.p50" in columns


def _percentiles(folder: Path, swept: Sweep, metrics: Sequence[str]) -> dict[str, list[float]]:
    """The columns of percentiles that the table has not, from the requests of the runs."""
    found = {}
    for metric in metrics:
        if metric not in swept.table:
            check_kept(metric, "--metric")
            found[metric] = [
                percentile_in(
                    folder / "runs" / row["run"] / row["name"],
                    metric,
                    {key: row[f"steady.{key}"] for key in ("state", "warmup_requests")},
                )
                for _, row in swept.table.iterrows()
            ]
    return found


def that_vary(swept: Sweep, metrics: Sequence[str]) -> tuple[list[str], str]:
    """The metrics that vary under some load (without choices: over the runs), and a note on the
    others; all metrics if none varies."""
    loads, said, left = swept.loads(metrics), [], []
    for metric in metrics:
        column = swept.table[metric].dropna()
        low, high = column.min(), column.max()
        alike = high <= ALIKE * low
        if any(len(load.options) > 1 for load in loads):
            alike = all(load.spread(metric) <= ALIKE for load in loads)
        if not alike or len(swept.table) < 2:
            left.append(metric)
        elif low == high:
            said.append(f"{metric} is {low:g} in every run")
        else:
            said.append(f"{metric} is equal under each load, {low:.4g} to {high:.4g}")
    return (left, f"not drawn: {', '.join(said)}") if left and said else (list(metrics), "")


def _save(
    drawn: dict[str, Callable[[], Figure | None]], out: Path, progress: Progress
) -> list[Path]:
    from ..figures.style import save, styled

    written = []
    for done, (name, draw) in enumerate(drawn.items()):
        progress("figures", done, len(drawn))
        with styled():
            figure = draw()
            written += save(figure, out, name) if figure is not None else []
    return written


def numeric_axes(swept: Sweep) -> list[str]:
    """The swept keys, and keys within them, that have several numbers as values."""
    from .drawing import within

    table = swept.table
    inside = [c for c in map(str, table) if any(within(c, axis) for axis in swept.axes)]
    return [c for c in inside if _is_number(table[c]) and table[c].nunique() > 1]


def _is_number(column: pd.Series[Any]) -> bool:
    values = column.dropna()
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _known(option: str, given: Sequence[str], allowed: Sequence[Any]) -> None:
    for name in given:
        if name not in allowed:
            names = [str(a) for a in allowed]
            raise UserError(
                f"{option} {name}: not one of {', '.join(names) or 'none'}"
                f"{did_you_mean(name, names)}"
            )


def _requests(folder: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """The requests of some runs; a regular sample of very many. Latencies of overloaded runs are
    NaN."""
    latencies = [column for column in CDF_COLUMNS if column.startswith(STEADY)]
    step = max(1, int(np.ceil(runs["requests"].sum() / _MOST_REQUESTS)))
    found = []
    for _, row in runs.iterrows():
        requests = read_requests(folder / "runs" / row["run"] / row["name"], CDF_COLUMNS)
        if row["steady.state"] == "overloaded":
            requests[latencies] = np.nan
        found.append(requests[::step])
    return pd.concat(found)
