"""The answer of a sweep: the best choice under each load, and its cost in other metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from sarathi_sim.profiler.storage.files import regular
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import UserError, one_line
from sarathi_sim.simulator.views.metrics import METRICS, STEADY, Quantity, known
from ..config.scenario import parameter, value_name
from ..report.section import Section, Table, anchor, enumerated, thinned
from ..results import SUMMARY, SWEEP_FORMAT, read_summary
from ..run.trade_off import (
    ALIKE,
    WEIGHED,
    Load,
    best_word,
    deciding,
    over_loads,
    trade_off,
    winner,
)
from .store import POLICY, RESULTS

_SHOWN = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")
_PAIRED = ("makespan_s", "ttft_s.p50", "tbt_s.p99", "latency_s.p50")
_MOST_POINTS, _FEW = 1000, 3
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
        """The swept keys that are a load: the model, keys of the workload, and the scenario if its
        workload differs."""
        if "scenario" not in self.axes:
            return [axis for axis in self.axes if axis.partition(".")[0] in _GIVEN]
        named = self.table.groupby("name", sort=False)["run"].first()
        own = [self.configured(run, str(name)) for name, run in named.items()]
        load = any(
            {key: one.get(key) for key in _GIVEN} != {key: own[0].get(key) for key in _GIVEN}
            for one in own
        )
        return [
            axis
            for axis in self.axes
            if axis.partition(".")[0] in _GIVEN or (load and axis == "scenario")
        ]

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
        choice = rows.groupby(self.chosen or ["name"], dropna=False, sort=False).ngroup()
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
    """The finished runs in the folder of a sweep. Raises UserError if there are none, or if it is
    damaged."""
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


def read_answer(folder: Path) -> tuple[Sweep, Section]:
    """A sweep and its answer. Raises UserError for a changed folder, whatever the error that its
    content causes."""
    try:
        swept = read_sweep(folder)
        return swept, sweep_answer(swept)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{folder}: the sweep is damaged: {problem}") from error


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
    """The values of each row in words: ``TP 4, PP 2``; of a row without any: ``no speculative
    decoding``."""
    columns = [
        ["" if pd.isna(value) else _word(axis, value) for value in table[axis]] for axis in axes
    ]
    if not axes:
        return [""] * len(table)
    nothing = f"no {parameter(axes[0]).name}"
    return [", ".join(filter(None, row)) or nothing for row in zip(*columns, strict=True)]


def _word(axis: str, value: Any) -> str:
    """A value beside its key: ``TP 4``; a text alone."""
    text = value_name(value)
    return text if isinstance(value, str) else parameter(axis).called(text)


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


def sweep_answer(swept: Sweep) -> Section:
    """The answer of a sweep, from its table and its summary."""
    table, summary, loads = swept.table, swept.summary, swept.weighed
    compared = [load for load in loads if len(load.options) > 1]
    tables = [_best_table(swept, compared)] if len(compared) > 1 else []
    tables += [_points_table(swept), *_paired_tables(summary)]
    left = len(summary.get("missing", {}))
    said = trade_off(compared) if compared else over_loads(loads)
    return Section(
        kind="sweep",
        name=str(summary.get("name")),
        question=_question(swept),
        answer=f"{said or 'No point has a result that can be compared'}.",
        command=_best_command(swept, compared),
        assumed=thinned(summary.get("notes", ())),
        tables=tables,
        about=str(summary.get("description") or ""),
        warnings=[
            *filter(None, [overload_note(table, _SHOWN)]),
            *([f"{left} of {summary.get('runs')} runs have no result yet"] if left else []),
        ],
    )


def _question(swept: Sweep) -> str:
    choices, loads = (varying(swept.table, axes) for axes in (swept.chosen, swept.given))
    each = f" at each {short_names(loads)}" if loads else ""
    values = list(dict.fromkeys(called(swept.table, choices)))
    if not choices:
        return f"What does the {short_names(loads) or 'load'} do to throughput and latencies?"
    what = short_names(choices) if len(choices) < 2 else f"combination of {short_names(choices)}"
    if len(choices) == 1 and len(values) <= _FEW and not is_numeric_dtype(swept.table[choices[0]]):
        what = f"of {enumerated(values)}"
    return f"Which {what} is best{each}, and what does it cost?"


def short_names(axes: Sequence[str]) -> str:
    """The axes, in words."""
    named = [parameter(axis) for axis in axes]
    return enumerated(["seeds" if n.name == "seed" else n.short or n.name for n in named])


def _best_command(swept: Sweep, loads: Sequence[Load]) -> str:
    """The command that runs the best choice again, under the last load where it leads."""
    metric = deciding(loads) if loads else None
    if metric is None:
        return ""
    best = winner(loads, metric)
    load = [load for load in loads if best in load.leaders(metric)][-1]
    run = swept.table["run"][load.places[load.options.index(best)]]
    return f"sarathi-sim run {swept.folder / 'runs' / run / 'config.yaml'}"


def _best_table(swept: Sweep, loads: Sequence[Load]) -> Table:
    """A row for each load: the best choice in each metric."""
    shown = [known(metric) for metric in WEIGHED]
    rows = [
        [load.name, *(_leaders(load, quantity) for quantity in shown)]
        for load in loads[:_MOST_POINTS]
    ]
    headings = [
        short_names(varying(swept.table, swept.given)),
        *(f"{best_word(each)} {each.axis}" for each in shown),
    ]
    note = "Not told apart: within 1 %, or within the noise of the seeds (95 %)."
    return Table("The best under each load", headings, rows, note, text=len(headings))


def _leaders(load: Load, quantity: Quantity) -> str:
    leaders, means = load.leaders(quantity.path), load.means(quantity.path)
    if not leaders:
        return "-"
    value = quantity.text(means[leaders[0]])
    if len(leaders) == len(means) > 1 and load.spread(quantity.path) <= ALIKE:
        return f"{value}: all equal"
    more = f" and {len(leaders) - 1} not told apart" if len(leaders) > 1 else ""
    return f"{value}: {leaders[0]}{more}"


def _points_table(swept: Sweep) -> Table:
    """A row per point of the swept keys: its values, and means over its seeds."""
    table, shown = swept.table, [known(path) for path in _SHOWN]
    keys = [axis for axis in swept.axes if axis != "seed"]
    rows, anchors = [], []
    for _, some in table.groupby(keys or ["name"], dropna=False, sort=False):
        values = (some[axis].iloc[0] for axis in keys)
        cells = ["-" if pd.isna(value) else value_name(value) for value in values]
        rows.append([*cells, *(_mean(some, quantity) for quantity in shown)])
        anchors.append(anchor(some["run"].iloc[0]))
    seeds = table["seed"].nunique() if "seed" in table else 1
    said = ["Predicted." if seeds < 2 else f"Predicted, means over {seeds} seeds."]
    if len(rows) > _MOST_POINTS:
        said.append(f"The first {_MOST_POINTS:,} of {len(rows):,} points.")
    if (table["steady.state"] == "overloaded").any():
        said.append(f"Latencies of overloaded runs are in {RESULTS}, over all their requests.")
    headings = [parameter(axis).heading for axis in keys] + [each.axis for each in shown]
    return Table(
        *("Every point", headings, rows[:_MOST_POINTS], " ".join(said), len(keys)),
        anchors[:_MOST_POINTS],
    )


def _mean(rows: pd.DataFrame, quantity: Quantity) -> str:
    if quantity.metric.grows and (rows["steady.state"] == "overloaded").any():
        return "overloaded"
    mean = rows[quantity.path].mean(skipna=False)
    return "-" if pd.isna(mean) else quantity.text(float(mean))


def _paired_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The paired differences: ratios with their 95 % intervals. None if there are none."""
    entries = summary.get("paired")
    if not entries:
        return []
    contrast, against = parameter(summary["contrast"]), value_name(entries[0]["against"])
    others = list(entries[0]["point"])
    rows = []
    for entry in entries[:_MOST_POINTS]:
        names = [value_name(v) for v in (*map(entry["point"].get, others), entry["value"])]
        rows.append([*names, *(_ratio(entry, metric) for metric in _PAIRED)])
    headings = [parameter(axis).heading for axis in (*others, summary["contrast"])]
    return [
        Table(
            f"{contrast.name}: ratio to {against}",
            [*headings, *(known(path).label for path in _PAIRED)],
            rows,
            "In brackets the 95 % interval." if entries[0]["seeds"] > 1 else "",
            len(headings),
        )
    ]


def _ratio(entry: Mapping[str, Any], metric: str) -> str:
    ratio = entry["ratios"].get(metric)
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"{ratio['ratio']:.3f}"
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
