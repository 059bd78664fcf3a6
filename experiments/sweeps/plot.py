"""Selects the figures of a sweep, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.scenario import value_name
from sarathi_sim.experiments.results import (
    FIGURES_FORMAT,
    SUMMARY,
    SWEEP_FORMAT,
    check_replaceable,
    policy_of,
    read_summary,
    result_folder,
    write_summary,
)
from sarathi_sim.experiments.sweeps.store import POLICY, RESULTS
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.files import regular
from sarathi_sim.profiler.storage.strict import did_you_mean, one_line
from sarathi_sim.simulator.views.metric_registry import STEADY, Better, quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


METRICS = ("output_tokens_per_s", "tbt_s.p99")
CDF_COLUMNS = ("ttft_s", "tbt_max_s", "latency_s")
_MOST_HEAT_MAPS, _MOST_REQUESTS = 6, 2_000_000


class Drawn(NamedTuple):
    """The files written, and what the figures leave out, if anything."""

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

    ``metrics`` are columns of its table (by default throughput and the 99th percentile of the time
    between tokens), ``over`` the axes. The Pareto front shows the first two metrics with a better
    direction. Latencies of overloaded runs are left out, and every such figure says so. A metric
    that is the same in all runs is left out, and the note names it. Raises ConfigError for an
    unknown metric or axis, or if no run has finished.
    """
    from sarathi_sim.experiments.sweeps import drawing as figures
    from sarathi_sim.experiments.sweeps.drawing import better, overload_note, overloaded, pareto

    check_replaceable(out, FIGURES_FORMAT)
    table = read_table(folder)
    axes, contrast = read_axes(folder, table)
    chosen = list(metrics or METRICS)
    _known("--metric", chosen, [column for column in table if quantity(str(column)) is not None])
    table = with_policies(folder, table)
    growing = overloaded(table)
    _drop_latencies(table, growing, chosen)
    chosen, flat_note = _that_vary(table, chosen)
    numeric = numeric_axes(table, axes)
    _known("--over", over, numeric)
    wanted = list(over or (axis for axis in numeric if axis != "seed"))
    drawn: dict[str, Callable[[], Figure]] = {}
    for axis in wanted:
        by = _lines_by(axis, contrast, axes, table)
        drawn[f"lines_{axis}"] = lambda x=axis, by=by: figures.lines(table, x, by, chosen)  # type: ignore[misc]
    for x, y in list(combinations(wanted, 2))[:_MOST_HEAT_MAPS]:
        if table.dropna(subset=[x, y, chosen[0]]).empty:  # keys of two policies, say
            continue
        by = None if contrast is None or _within(x, contrast) or _within(y, contrast) else contrast
        drawn[f"heat_{x}_{y}"] = lambda x=x, y=y, by=by: figures.heat_maps(  # type: ignore[misc]
            table, x, y, by, chosen[0]
        )
    weighed = [metric for metric in chosen if better(metric) is not Better.NEITHER][:2]
    if len(weighed) == 2 and not table.dropna(subset=weighed).empty:
        workload = next((a for a in axes if a.startswith("workload.") and a != contrast), None)
        y, x = weighed
        drawn["pareto"] = lambda: pareto(table, x, y, axes, contrast, workload)
    drawn["cdf"] = lambda: figures.cdfs(
        table, _requests(folder, table, growing, contrast), CDF_COLUMNS, contrast
    )
    notes = (overload_note(table, [*chosen, *CDF_COLUMNS]), flat_note)
    with result_folder(out, FIGURES_FORMAT) as scratch:
        files = _save(drawn, scratch, progress)
        write_summary(scratch, FIGURES_FORMAT, {"plotted": [folder.name]})
    return Drawn([out / file.name for file in files], "; ".join(filter(None, notes)))


def with_policies(folder: Path, table: pd.DataFrame) -> pd.DataFrame:
    """The table with the policy of every run: the one swept, or that of the run's scenario.

    Raises ConfigError where a run's configuration is damaged.
    """
    swept = table[POLICY].astype(object) if POLICY in table else None
    found = pd.Series(np.nan, table.index, object) if swept is None else swept.copy()
    for name, rows in table[found.isna()].groupby("name"):
        found[rows.index] = policy_of(folder / "runs" / rows["run"].iloc[0], str(name))
    return table.assign(**{POLICY: found})


def _drop_latencies(table: pd.DataFrame, growing: pd.Series[bool], metrics: Sequence[str]) -> None:
    """Leave out the latencies of the runs that are overloaded."""
    for metric in metrics:
        if metric.startswith(STEADY):
            table.loc[growing, metric] = np.nan
        if table[metric].isna().all():
            raise ConfigError(f"--metric {metric}: no run has it, or all that do are overloaded")


def _that_vary(table: pd.DataFrame, metrics: Sequence[str]) -> tuple[list[str], str]:
    """The metrics that are not the same in all runs, and which ones are; all if none varies."""
    flat = [metric for metric in metrics if len(table) > 1 and table[metric].nunique() == 1]
    left = [metric for metric in metrics if metric not in flat]
    said = (f"{metric} is {table[metric].dropna().iloc[0]:g} in every run" for metric in flat)
    return (left, f"not drawn: {', '.join(said)}") if left and flat else (list(metrics), "")


def _save(drawn: dict[str, Callable[[], Figure]], out: Path, progress: Progress) -> list[Path]:
    from sarathi_sim.experiments.figures.style import save, styled

    written = []
    for done, (name, draw) in enumerate(drawn.items()):
        progress("figures", done, len(drawn))
        with styled():
            written += save(draw(), out, name)
    return written


def read_table(folder: Path) -> pd.DataFrame:
    """A row for each finished run of a sweep. Raises ConfigError without any."""
    try:
        table = pd.read_parquet(regular(folder / RESULTS))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / RESULTS}: the sweep is damaged: {one_line(error)}") from None
    if table.empty:
        raise ConfigError(f"{folder}: no run has finished yet")
    return table


def read_axes(folder: Path, table: pd.DataFrame) -> tuple[list[str], str | None]:
    """The swept keys, and the compared one. Raises ConfigError if they do not fit."""
    summary = read_summary(folder)
    axes: Any = summary.get("axes")
    contrast: Any = summary.get("contrast")
    names = set(map(str, table))
    fits = (
        {"run", "name", "requests", "steady.state"} <= names
        and isinstance(axes, list)
        and names.issuperset(map(str, axes))
        and contrast in (None, *axes)
        and not any("/" in name for name in names)  # they become names of files
    )
    if not fits:
        raise ConfigError(f"{folder}: the sweep is damaged: {SUMMARY} does not fit {RESULTS}")
    return axes, contrast


def numeric_axes(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Those of the swept keys, and of the keys within them, that have several numbers."""
    within = [c for c in map(str, table) if any(_within(c, axis) for axis in axes)]
    return [c for c in within if _is_number(table[c]) and table[c].nunique() > 1]


def _within(column: str, axis: str) -> bool:
    return column == axis or column.startswith(f"{axis}.")


def _is_number(column: pd.Series[Any]) -> bool:
    values = column.dropna()
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _lines_by(x: str, contrast: str | None, axes: Sequence[str], table: pd.DataFrame) -> str | None:
    """The axis with a line per value: the compared one; or another one if x is part of it."""
    if contrast is not None and not _within(x, contrast):
        return contrast
    others = (a for a in axes if a not in (x, contrast, "seed") and 1 < table[a].nunique() < 10)
    return next(others, None)


def _known(option: str, given: Sequence[str], allowed: Sequence[Any]) -> None:
    for name in given:
        if name not in allowed:
            names = [str(a) for a in allowed]
            raise ConfigError(
                f"{option} {name}: not one of {', '.join(names) or 'none'}"
                f"{did_you_mean(name, names)}"
            )


def _requests(
    folder: Path, table: pd.DataFrame, growing: pd.Series[bool], by: str | None
) -> dict[str, pd.DataFrame]:
    """The requests of all runs by value of ``by``; of very many, a regular sample.

    The latencies of overloaded runs, for which ``growing`` is true, are NaN.
    """
    latencies = [column for column in CDF_COLUMNS if column.startswith(STEADY)]
    step = max(1, int(np.ceil(table["requests"].sum() / _MOST_REQUESTS)))
    found: dict[str, list[pd.DataFrame]] = {}
    for (_, row), overloaded in zip(table.iterrows(), growing, strict=True):
        path = folder / "runs" / row["run"] / row["name"] / "requests.parquet"
        try:
            requests = pd.read_parquet(regular(path), columns=list(CDF_COLUMNS))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: the sweep is damaged: {one_line(error)}") from None
        if overloaded:
            requests[latencies] = np.nan
        found.setdefault("" if by is None else value_name(row[by]), []).append(requests[::step])
    return {name: pd.concat(parts) for name, parts in found.items()}
