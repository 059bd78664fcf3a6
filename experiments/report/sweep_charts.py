"""Charts of a sweep as data, a panel for each load: lines over an axis, also for each value of
another one, CDFs of requests, and the Pareto front of two metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from sarathi_sim.simulator.views.metric_registry import STEADY, Better, known, quantity
from ..config.scenario import parameter, value_name
from ..results import check_kept, percentile_in, read_requests
from ..run.ranking import ALIKE, Load
from ..sweeps.store import POLICY
from ..sweeps.sweep import Sweep, called, grouped, overload_note, short_names, varying
from .charts import WIDE, axis_of, cumulative, steps
from .palette import BLACK, GREY, Style, line_styles, policy_styles
from .section import Axis, Chart, Series, first_upper, heading

T = TypeVar("T")
_MOST_LINES, _MOST_TICKS = 7, 6
_MOST_LOADS, _MOST_PANELS = 3, 6


def label(column: str) -> str:
    """The label of an axis for ``tbt_s.p99`` or ``policy.chunk_size``: in words, with its unit."""
    found = quantity(column)
    return parameter(column).axis if found is None else found.axis


def shown(table: pd.DataFrame, metric: str) -> pd.Series[float]:
    """A metric's column in the unit of its label; without the latencies of overloaded runs, which
    grow with the length of the run."""
    found = quantity(metric)
    values = table[metric] if found is None else found.metric.scale * table[metric]
    return (
        values.mask(table["steady.state"] == "overloaded") if metric.startswith(STEADY) else values
    )


def better(metric: str) -> Better:
    """The better direction, from :mod:`sarathi_sim.simulator.views.metric_registry`."""
    found = quantity(metric)
    return Better.NEITHER if found is None else found.metric.better


def few(parts: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the parts, spread evenly from the first to the last."""
    count = min(most, len(parts))
    return [parts[round(at)] for at in np.linspace(0, len(parts) - 1, count)] if parts else []


def within(column: str, axis: str) -> bool:
    """Whether a column is an axis, or a key within one."""
    return column == axis or column.startswith(f"{axis}.")


def varies(values: pd.Series[float]) -> bool:
    """Whether two values differ by more than a tie."""
    return bool(values.abs().max() > ALIKE * values.abs().min())


class RunGroup(NamedTuple):
    """The runs behind a line, its name, and its style."""

    name: str
    rows: pd.DataFrame
    style: Style


def groups(
    table: pd.DataFrame, by: str | None, most: int = _MOST_LINES, first: Collection[Any] = ()
) -> list[RunGroup]:
    """The rows of each value of ``by``, in the sweep's order, in the colour of their policy; of
    many values ``first`` and some of the others; a single group without it."""
    parts = [("", table)]
    if by is not None:
        values = list(dict.fromkeys(table[by].dropna()))
        if len(values) > most:
            kept = [value for value in values if value in first][:most]
            kept += few([value for value in values if value not in kept], most - len(kept))
            values = [value for value in values if value in kept]
        parts = [(_named(by, value), table[table[by] == value]) for value in values]
    policies = [_policy(rows) for _, rows in parts]
    styles: Iterable[Style] = [Style(BLACK, "-")] if by is None else line_styles()
    if all(policies):
        styles = policy_styles(policies)
    return [RunGroup(name, rows, style) for (name, rows), style in zip(parts, styles, strict=False)]


def left_out(table: pd.DataFrame, by: str | None) -> str:
    """What :func:`groups` leaves out, in words."""
    count = 0 if by is None else table[by].nunique()
    return f"{_MOST_LINES} of {count} values are drawn" if count > _MOST_LINES else ""


def _named(by: str, value: Any) -> str:
    """``chunk 128``; of what is no number its name alone."""
    name = value_name(value)
    return f"{parameter(by).name} {name}" if isinstance(value, int | float | np.number) else name


def _policy(rows: pd.DataFrame) -> str:
    """The policy of all rows; empty if there are several."""
    names = set(rows[POLICY]) if POLICY in rows else set()
    return str(names.pop()) if len(names) == 1 else ""


class Panel(NamedTuple):
    """A load, and its runs, a group for each line."""

    load: str
    groups: list[RunGroup]


def over(swept: Sweep, x: str) -> tuple[list[Panel], str]:
    """The runs with a value of ``x``: a panel for each load (which may differ in x itself), a group
    for each value of the compared axis; and the axes over which a line is the median, in words."""
    table, by = swept.policies.dropna(subset=[x]), lines_by(swept, x)
    given = [axis for axis in swept.given if not within(x, axis) and axis != by]
    rest = [a for a in varying(table, swept.axes) if not within(x, a) and a not in (by, *given)]
    return by_load(table, given, by), f"median over {short_names(rest)}" if rest else ""


def by_load(table: pd.DataFrame, given: Sequence[str], by: str | None) -> list[Panel]:
    """A panel for each load (for some of many), and a group for each value of ``by``."""
    lines, panels = groups(table, by), []
    for load, rows in few(list(grouped(table, given)), _MOST_LOADS):
        mine = (line._replace(rows=line.rows[line.rows.index.isin(rows.index)]) for line in lines)
        panels.append(Panel(load, [line for line in mine if len(line.rows)]))
    return panels


def lines_by(swept: Sweep, x: str) -> str | None:
    """The axis with a line per value: the compared axis, or another axis if x is part of it."""
    if swept.contrast is not None and not within(x, swept.contrast):
        return swept.contrast
    others = (a for a in swept.chosen if not within(x, a) and 1 < swept.table[a].nunique() < 10)
    return next(others, None)


LOWER, UPPER, LEAST_FOR_PERCENTILES = 0.1, 0.9, 10


def axis(values: pd.Series[float], label: str, *, ticks: bool = False) -> Axis:
    """An axis: logarithmic if its values span more than a factor of twenty; of nearly equal ones a
    tenth of them wide. ``ticks``: at the values, if they are few."""
    some = values.dropna()
    marks = sorted(some.unique()) if ticks and some.nunique() <= _MOST_TICKS else []
    if len(some) and some.min() > 0:
        close = len(marks) > 2 and np.diff(marks).min() < 0.1 * np.ptp(marks)
        if close or some.max() > WIDE * some.min():
            ends = (some.min() / 1.2, 1.2 * some.max())
            return Axis(f"{label}, log scale", log=True, ends=ends, ticks=marks)
    if len(some) and not varies(some):
        return Axis(
            label,
            ends=(0.95 * some.min(), 1.05 * some.max() or 1.0),
            ticks=marks,
        )
    return Axis(label, ticks=marks)


def lines(swept: Sweep, x: str, metrics: Sequence[str]) -> list[Chart]:
    """Each metric over one axis: a chart per load and metric, a line per value of another axis, the
    median over the other choices and the seeds. The band is the 10th to 90th percentile; with fewer
    than ten values somewhere, the smallest to the largest value."""
    parts, pooled = over(swept, x)
    left = left_out(swept.policies.dropna(subset=[x]), lines_by(swept, x))
    return _lines(parts, x, metrics, pooled, left)


def _lines(
    parts: Sequence[Panel], x: str, metrics: Sequence[str], pooled: str = "", left: str = ""
) -> list[Chart]:
    table = pd.concat([line.rows for part in parts for line in part.groups])
    sizes = [line.rows.groupby(x).size() for part in parts for line in part.groups]
    many = min(size.min() for size in sizes) >= LEAST_FOR_PERCENTILES
    ends = (LOWER, UPPER) if many else (0.0, 1.0)
    band = "10th to 90th percentile" if many else "smallest to largest"
    several = max(size.max() for size in sizes) > 1
    said = "; ".join(filter(None, (pooled, f"band: {band}"))) if several else ""
    charts = []
    for part in parts:
        for metric in metrics:
            series = list(_medians(part.groups, x, metric, ends if several else None))
            if not series:
                continue
            along = axis(table[x], label(x), ticks=True)
            up = axis(pd.concat([shown(line.rows, metric) for line in part.groups]), label(metric))
            name = f"{label(metric)} over {parameter(x).name}" + _under(part.load)
            notes = _sentences(said, left, overload_note(table, [metric]))
            charts.append(Chart(name, along, up, series, notes))
    return charts


def _sentences(*notes: str) -> str:
    return " ".join(f"{first_upper(note)}." for note in notes if note)


def _under(load: str) -> str:
    return f" ({load})" if load else ""


def _medians(
    groups: Sequence[RunGroup], x: str, metric: str, ends: tuple[float, float] | None
) -> Iterable[Series]:
    for name, rows, style in groups:
        found = shown(rows, metric).groupby(rows[x])
        middle = found.median().dropna()
        if middle.empty:
            continue
        edges = [found.quantile(end)[middle.index].to_numpy(float) for end in ends or ()]
        band = (edges[0], edges[1]) if edges else None
        values = (middle.index.to_numpy(float), middle.to_numpy(float))
        yield Series("line", name, *values, *style, marks=True, ends=band)


def pairs(swept: Sweep, x: str, y: str, metric: str) -> list[Chart]:
    """A metric over two axes: over x with a line for each value of y, a chart per load and value of
    the compared axis (some of many); the median over the other axes."""
    table = swept.policies.dropna(subset=[x, y])
    others = dict.fromkeys(filter(None, (*swept.given, swept.contrast)))
    apart = [axis for axis in others if not within(x, axis) and not within(y, axis)]
    panels = []
    for name, rows in few(list(grouped(table, apart)), _MOST_PANELS):
        values = few(sorted(rows[y].unique()), _MOST_LINES)
        found = [
            RunGroup(_named(y, value), rows[rows[y] == value], style)
            for value, style in zip(values, line_styles(), strict=False)
        ]
        panels.append(Panel(name, found))
    return _lines(panels, x, [metric], left=left_out(table, y)) if panels else []


def cdfs(
    swept: Sweep, requests: Callable[[pd.DataFrame], pd.DataFrame], columns: Sequence[str]
) -> list[Chart]:
    """CDFs over the requests of all runs of a line, a chart for each load and column; ``requests``
    reads those of some runs, with NaN for latencies that are left out. The caption gives the number
    of the overloaded runs of each line: without them it looks better than it is."""
    by, charts = swept.contrast, []
    note, left = overload_note(swept.table, columns), left_out(swept.table, by)
    for part in by_load(
        swept.policies,
        [axis for axis in swept.given if axis != by],
        by,
    ):
        read = [(line, requests(line.rows)) for line in part.groups]
        lost = [
            (n, int((rows["steady.state"] == "overloaded").sum())) for n, rows, _ in part.groups
        ]
        of_lines = ", ".join(f"{count} of {name}" for name, count in lost if count and by)
        for column in columns:
            curves = [cumulative(served[column].dropna()) for _, served in read]
            series = [
                Series("step", name, *steps(*curve), *style)
                for ((name, _, style), _), curve in zip(read, curves, strict=True)
            ]
            up = Axis("share of requests (%)", ends=(0.0, 1.02), shares=True)
            along = axis_of([values for values, _ in curves], label(column))
            name = label(column).partition(" (")[0] + _under(part.load)
            lines = f"overloaded{_under(part.load)}: {of_lines}" if of_lines else ""
            charts.append(Chart(name, along, up, series, _sentences(note, lines, left)))
    return charts


# Fronts ------------------------------------------------------------------------------------------

_LETTERS = [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]
_ALL_TEXTS = 12
"""With up to so many points in a chart all have a letter, not only the front."""


def points(swept: Sweep, load: Load, *metrics: str) -> pd.DataFrame:
    """A row per choice that has both metrics for each seed: each metric's mean over the seeds, in
    the unit of its label, with its ends ``NAME low`` and ``NAME high``; ``_option`` is the choice's
    name, ``_layout`` the name without the compared value."""
    rows = swept.policies.loc[list(load.places)]
    rest = [axis for axis in varying(swept.table, swept.chosen) if axis != swept.contrast]
    rows = rows.assign(_option=load.options, _layout=called(rows, rest))
    for metric in metrics:
        values = load.values[metric] * known(metric).metric.scale
        ends = {
            "": values.mean(axis=1),
            " low": values.min(axis=1),
            " high": values.max(axis=1),
        }
        rows = rows.assign(**{metric + end: found for end, found in ends.items()})
    return rows.dropna(subset=list(metrics))


def pareto(swept: Sweep, x: str, y: str, most: int = _MOST_PANELS) -> list[Chart]:
    """Two metrics (with a direction) of every choice and their front, a chart per load where they
    differ (some of many). A point is the mean over its seeds, its whiskers their ends; a letter
    stands for the rest of the choice, such as its layout, the same in all charts."""
    found = [load for load in swept.loads((x, y)) if min(map(load.spread, (x, y))) > ALIKE]
    loads = few([load for load in found if load.front(x, y)], most)
    tables = [points(swept, load, x, y) for load in loads]
    fronts = [
        rows.set_index("_option", drop=False).loc[load.front(x, y)]
        for load, rows in zip(loads, tables, strict=True)
    ]
    labelled = [
        rows if len(rows) <= _ALL_TEXTS else best for rows, best in zip(tables, fronts, strict=True)
    ]
    layouts = dict.fromkeys(name for some in labelled for name in some["_layout"] if name)
    letters, by = dict(zip(layouts, _LETTERS, strict=False)), swept.contrast
    of_fronts = {value for best in fronts for value in (best[by] if by is not None else ())}
    lines = groups(swept.policies, by, _MOST_LINES - 2, of_fronts)
    seeds = swept.table["seed"].nunique() if "seed" in swept.axes else 1
    # No-break spaces: a line ends between layouts.
    names = (f"{a}: {layout}".replace(" ", "\N{NO-BREAK SPACE}") for layout, a in letters.items())
    notes = (
        f"mean over {seeds} seeds; whiskers: smallest and largest" if seeds > 1 else "",
        "the Pareto front: no other is better by more than 1 %" + " and the noise" * (seeds > 1),
        "; ".join(names),
    )
    charts = []
    for load, rows, best, some in zip(loads, tables, fronts, labelled, strict=True):
        seen = rows["_option"].isin(some["_option"])
        rows = rows.assign(_text=rows["_layout"].map(letters).where(seen, "").fillna(""))
        line = (best[x].to_numpy(float), best[y].to_numpy(float))
        series = [*_spots(rows, lines, x, y), Series("line", "the front", *line, BLACK, "--")]
        ends = (pd.concat([rows[f"{m} low"], rows[f"{m} high"]]) for m in (x, y))
        ways = (f"{label(m)}, {better(m)} is better" for m in (x, y))
        along, up = map(axis, ends, ways)
        name = f"{label(y)} against {label(x)}" + _under(load.name)
        left = ", ".join(f"{option} ({why})" for option, why in load.left_out(x, y).items())
        lost = f"left out{_under(load.name)}: {left}" if left else ""
        charts.append(Chart(name, along, up, series, _sentences(*notes, lost)))
    return charts


def _spots(rows: pd.DataFrame, lines: Sequence[RunGroup], x: str, y: str) -> Iterator[Series]:
    own = [at for line in lines for at in line.rows.index]
    parts = [line._replace(rows=rows[rows.index.isin(line.rows.index)]) for line in lines]
    parts.append(
        RunGroup(
            "the others",
            rows[~rows.index.isin(own)],
            Style(GREY, "-"),
        )
    )
    for name, some, style in parts:
        if len(some):
            yield Series(
                *("points", name or "choices", some[x].to_numpy(), some[y].to_numpy()),
                style.colour,
                ends=(some[f"{y} low"].to_numpy(), some[f"{y} high"].to_numpy()),
                ends_x=(some[f"{x} low"].to_numpy(), some[f"{x} high"].to_numpy()),
                more={"choice": some["_option"].tolist()},
                texts=some["_text"].tolist(),
                links=some["run"].tolist(),
            )


# Which charts ------------------------------------------------------------------------------------

SHOWN = ("output_tokens_per_s", "tbt_s.p99", "ttft_s.p99")
CDF_COLUMNS = ("ttft_s", "tbt_max_s", "latency_s")
_MOST_PAIRS, _MOST_REQUESTS = 6, 2_000_000


def sweep_heading(swept: Sweep) -> str:
    """What stands above the figures of a sweep; the loads are those of its charts."""
    row = swept.table.iloc[0]
    first = swept.configured(str(row["run"]), str(row["name"]))
    every = {key: swept.table.get(key, [first.get(key)]) for key in ("model", "device")}
    models, gpus = ([one for one in some if isinstance(one, str)] for some in every.values())
    return heading(str(swept.summary.get("name")), models, gpus)


def sweep_charts(
    swept: Sweep, metrics: Sequence[str] = (), over: Sequence[str] = ()
) -> tuple[dict[str, list[Chart]], str]:
    """Charts by the name of their figure: lines over each numeric axis, lines over pairs, a Pareto
    front (of the first two ``metrics`` with a better direction), CDFs; and a note on data that they
    leave out: latencies of overloaded runs, metrics that are equal under each load. ``over`` are
    axes. Raises UserError for an unknown metric or axis."""
    columns = [str(c) for c in swept.table if quantity(str(c)) is not None]
    there = [m for m in metrics if quantity(m) and f"{m.rpartition('.')[0]}.p50" in columns]
    _known("--metric", [m for m in metrics if m not in there], columns)
    more = {m: _percentile(swept, m) for m in metrics if m not in swept.table}
    swept = replace(swept, table=swept.table.assign(**more))
    empty = [m for m in metrics or SHOWN if shown(swept.table, m).isna().all()]
    chosen = [metric for metric in metrics or SHOWN if metric not in empty]
    for metric in metrics:
        if metric in empty:
            raise UserError(f"--metric {metric}: no run has it, or all that do are overloaded")
    chosen, flat_note = that_vary(swept, chosen)
    numeric = numeric_axes(swept)
    _known("--over", over, numeric)
    wanted = list(over or (axis for axis in numeric if axis != "seed"))
    charts = {f"lines_{axis}": lines(swept, axis, chosen) for axis in wanted}
    for x, y in list(combinations(wanted, 2))[:_MOST_PAIRS]:
        if not swept.table.dropna(subset=[x, y, chosen[0]]).empty:  # keys of two policies, say
            charts[f"pair_{x}_{y}"] = pairs(swept, x, y, chosen[0])
    weighed = [metric for metric in chosen if better(metric) is not Better.NEITHER][:2]
    if len(weighed) == 2:
        charts["pareto"] = pareto(swept, weighed[1], weighed[0])
    charts["cdf"] = cdfs(swept, lambda runs: _requests(swept.folder, runs), CDF_COLUMNS)
    notes = (overload_note(swept.table, [*chosen, *CDF_COLUMNS]), flat_note)
    drawn = {name: some for name, some in charts.items() if some}
    return drawn, "; ".join(filter(None, notes))


def _percentile(swept: Sweep, metric: str) -> list[float]:
    """A percentile that the table has not, from the requests of the runs."""
    check_kept(metric, "--metric")
    keys, runs = ("state", "warmup_requests"), swept.folder / "runs"
    return [
        percentile_in(
            runs / row["run"] / row["name"], metric, {k: row[f"steady.{k}"] for k in keys}
        )
        for _, row in swept.table.iterrows()
    ]


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


def numeric_axes(swept: Sweep) -> list[str]:
    """The swept keys, and keys within them, that have several numbers as values."""
    table = swept.table
    inside = {c: table[c].dropna() for c in table if any(within(str(c), a) for a in swept.axes)}
    kinds = pd.api.types
    return [
        str(name)
        for name, values in inside.items()
        if kinds.is_numeric_dtype(values)
        and not kinds.is_bool_dtype(values)
        and values.nunique() > 1
    ]


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
