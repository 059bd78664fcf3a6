"""The results of a sweep: its table, and its choices under each load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.files import regular
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError, one_line
from sarathi_sim.simulator.views.metric_registry import METRICS, STEADY, known
from ..config.scenario import parameter, value_name
from ..results import SUMMARY, SWEEP_FORMAT, read_summary
from ..run.ranking import WEIGHED, Load
from .store import POLICY, RESULTS

_GIVEN = ("workload", "model", "load", "requests")
"""Swept keys that are a load (the last two: of a capacity's probes); all other swept keys are
choices."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """The finished runs of a sweep, a row each; the swept keys (``axes``), the key that is compared
    pair by pair (``contrast``), and the sweep's summary."""

    folder: Path
    table: pd.DataFrame
    axes: list[str]
    contrast: str | None
    summary: Mapping[str, Any]

    @cached_property
    def given(self) -> list[str]:
        """The swept keys that are a load; the scenario is if its workload differs."""
        if "scenario" not in self.axes:
            return [axis for axis in self.axes if axis.partition(".")[0] in _GIVEN]
        named = self.table.groupby("name", sort=False)["run"].first()
        own = [self.configured(run, str(name)) for name, run in named.items()]
        loads = [{key: one.get(key) for key in _GIVEN} for one in own]
        given = (*_GIVEN, "scenario") if any(load != loads[0] for load in loads) else _GIVEN
        return [axis for axis in self.axes if axis.partition(".")[0] in given]

    @cached_property
    def chosen(self) -> list[str]:
        """The other swept keys, but the seed."""
        return [axis for axis in self.axes if axis not in (*self.given, "seed")]

    @cached_property
    def policies(self) -> pd.DataFrame:
        """The table with the policy of every run: the swept one, or its scenario's."""
        swept = self.table[POLICY].astype(object) if POLICY in self.table else None
        found = pd.Series(np.nan, self.table.index, object) if swept is None else swept.copy()
        for name, rows in self.table[found.isna()].groupby("name"):
            policy = self.configured(rows["run"].iloc[0], str(name)).get("policy")
            found[rows.index] = policy["name"] if isinstance(policy, dict) else None
        return self.table.assign(**{POLICY: found})

    def configured(self, run: str, scenario: str) -> Mapping[str, Any]:
        """The resolved scenario of a run. Raises UserError where its configuration is damaged."""
        path = self.folder / "runs" / run / "config.yaml"
        scenarios: Any = read_mapping(path).get("scenarios")
        found = scenarios.get(scenario) if isinstance(scenarios, dict) else None
        if not isinstance(found, dict):
            raise UserError(f"{path}: the result is damaged: it has no scenario {scenario}")
        return found

    @cached_property
    def weighed(self) -> list[Load]:
        """:meth:`loads`, with the metrics that rank choices."""
        return self.loads(WEIGHED)

    def loads(self, metrics: Sequence[str]) -> list[Load]:
        """The results of every choice under each load. Latencies of overloaded runs are NaN."""
        parts, swept = grouped(self.table, self.given), varying(self.table, self.chosen)
        return [self._load(name, rows, swept, metrics) for name, rows in parts]

    def _load(
        self, name: str, rows: pd.DataFrame, swept: Sequence[str], metrics: Sequence[str]
    ) -> Load:
        growing = rows["steady.state"] == "overloaded"
        choice = rows.groupby(
            self.chosen or ["name"],
            dropna=False,
            sort=False,
        ).ngroup()
        first = rows[~choice.duplicated()]
        seed, seeds = pd.factorize(rows["seed"]) if "seed" in rows else (0, [0])
        values = {}
        for metric in metrics:
            column = rows[metric].astype(float)
            if known(metric).metric.grows:
                column = column.mask(growing)
            values[metric] = np.full((len(first), len(seeds)), np.nan)
            values[metric][choice, seed] = column
        options = called(first, swept)
        lost = [options[place] for place in sorted(set(choice[growing]))]
        return Load(name, options, values, first.index.tolist(), lost)


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (folder / SUMMARY).is_file() and read_summary(folder).get("format") == SWEEP_FORMAT


def read_sweep(folder: Path) -> Sweep:
    """The finished runs of a sweep. Raises UserError if there are none, or it is damaged."""
    table, summary = read_table(folder), read_summary(folder)
    axes: Any = summary.get("axes")
    contrast: Any = summary.get("contrast")
    names = set(map(str, table))
    fits = (
        {"run", "name", "requests", "steady.state", *WEIGHED} <= names
        and isinstance(axes, list)
        and names.issuperset(map(str, axes))
        and contrast in (None, *axes)
        and not any("/" in name for name in names)  # they become names of files
    )
    if not fits:
        raise UserError(f"{folder}: the sweep is damaged: {SUMMARY} does not fit {RESULTS}")
    return Sweep(folder, table, axes, contrast, summary)


def read_table(folder: Path) -> pd.DataFrame:
    """A row for each finished run of a sweep. Raises UserError if there are none."""
    try:
        table = pd.read_parquet(regular(folder / RESULTS))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RESULTS}: the sweep is damaged: {one_line(error)}") from None
    if table.empty:
        raise UserError(f"{folder}: no run has finished yet")
    return table


def varying(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The axes with several values."""
    return [axis for axis in axes if table[axis].map(str).nunique() > 1]


def called(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The values of each row in words: ``TP 4, PP 2``; or ``no speculative decoding``."""
    if not axes:
        return [""] * len(table)

    def word(axis: str, value: Any) -> str:
        text = "" if pd.isna(value) else value_name(value)
        return text if not text or isinstance(value, str) else parameter(axis).called(text)

    columns = ([word(axis, value) for value in table[axis]] for axis in axes)
    nothing = f"no {parameter(axes[0]).name}"
    return [", ".join(filter(None, row)) or nothing for row in zip(*columns, strict=True)]


def grouped(table: pd.DataFrame, axes: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each combination of the axes' values, by these values in words."""
    if not axes:
        yield "", table
        return
    swept = varying(table, axes)
    for _, rows in table.groupby(list(axes), dropna=False, sort=False):
        yield called(rows.iloc[:1], swept)[0], rows


def overload_note(table: pd.DataFrame, columns: Sequence[str]) -> str:
    """The number of overloaded runs and the columns that leave them out; empty without any."""
    count = int((table["steady.state"] == "overloaded").sum())
    keys = [column.partition(".")[0] for column in columns]
    latencies = [METRICS[key].name for key in dict.fromkeys(keys) if key in STEADY]
    if not count or not latencies:
        return ""
    return f"{count} of {len(table)} runs are overloaded and left out of: {', '.join(latencies)}"


def short_names(axes: Sequence[str]) -> str:
    """The axes, in words."""
    named = [parameter(axis) for axis in axes]
    return ", ".join("seeds" if n.name == "seed" else n.short or n.name for n in named)
