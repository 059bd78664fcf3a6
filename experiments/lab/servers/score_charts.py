"""Charts of measurements beside simulations, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis
from ...report.charts import MOST_ROWS, bars, timelines
from ...report.palette import BLACK, BLUE, GREEN, GREY, KIND_COLOURS, ORANGE, line_styles
from ...report.section import Axis, Chart, Series
from ...report.timeline import Window
from .mlperf import BOUND, CAPACITY, ScoredMlperf
from .rows import METRICS, Measured, Predictions
from .score import ScoredRows

if TYPE_CHECKING:
    from ..engines.session import Comparison

_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}
_MOST_GROUPS = 40


def _beside(
    title: str,
    groups: Iterable[tuple[str, str, tuple[Floats, Floats]]],
    factors: Iterable[float],
    caption: str,
) -> Chart:
    """Points of predicted over measured times in ms, with a line of equality, and lines at
    ``factors`` of it; of each group the name, the colour, and both times."""
    series = [Series("points", name, *pair, colour) for name, colour, pair in groups]
    times = np.concatenate([np.zeros(0), *(np.concatenate([one.x, one.y]) for one in series)])
    ends = np.array([times.min(), times.max()])
    series.append(Series("line", "", ends, ends, BLACK))
    series += [Series("line", "", ends, factor * ends, GREY, ":") for factor in factors]
    along, up = Axis("measured (ms), log scale", log=True), Axis("predicted (ms), log scale", True)
    return Chart(title, along, up, series, caption)


def score_charts(found: ScoredRows | ScoredMlperf) -> dict[str, list[Chart]]:
    """Of servers a point a row without flags; of audited runs the capacities."""
    if isinstance(found, ScoredMlperf):
        return {"capacity": [audited_capacities(found)]} if found.best else {}
    rows = [row for row in found.rows if not row.flags and row.id in found.best]
    return {"measured_predicted": list(_measured_predicted(rows, found.best))} if rows else {}


def _measured_predicted(rows: Sequence[Measured], best: Predictions) -> Iterable[Chart]:
    """A chart a metric, a point a row, a colour an engine."""
    engines = dict(zip(sorted({row.backend for row in rows}), line_styles(), strict=False))
    for metric, name in _NAMES.items():
        pairs = np.array([(row.of(metric), best[row.id].of(row, metric)) for row in rows], float)
        groups = []
        for engine, style in engines.items():
            own = pairs[[row.backend == engine for row in rows]]
            groups.append((engine, style.colour, (own[:, 0], own[:, 1])))
        yield _beside(name, groups, (0.8, 1.25), "Dotted: a quarter off.")


def median_errors(groups: Mapping[str, Any]) -> list[Chart]:
    """Bars of the median error of each group of rows; none without a group."""
    some = dict([(name, one) for name, one in groups.items() if one["n"]][:_MOST_GROUPS])
    medians = {m.upper(): [one[m]["median"] for one in some.values()] for m in METRICS}
    colours = (BLUE, ORANGE)
    chart = bars("Median error by group", Axis("error (%)"), [*some], medians, colours)
    return [chart] if some else []


def audited_capacities(found: ScoredMlperf) -> Chart:
    """A row a system and scenario: the predicted capacity with its band over the measured rate,
    beside the bracket from the rate to Offline."""
    runs = [run for run in found.runs if run.id in found.best]
    names = sorted({f"{run.cell}, {run.scenario}" for run in runs})
    numbers = np.array([found.best[run.id].numbers[CAPACITY] for run in runs], float)
    rates = np.array([run.rate for run in runs])
    value, low, high = numbers.T / rates
    rows = np.array([names.index(f"{run.cell}, {run.scenario}") for run in runs], float)
    most = np.array([run.offline_samples_per_s for run in runs]) / rates
    measured = Series(
        "gantt", "measured: rate to Offline", most, rows, GREY, start=np.ones(len(runs)), faint=True
    )
    series = [measured]
    for stopped, colour, name in (
        (True, BLUE, f"predicted, P99 at {BOUND:g} of a limit or more"),
        (False, GREEN, "predicted, no limit near"),
    ):
        own = np.array([run.stopped == stopped for run in runs])
        ends = (low[own], high[own])
        series.append(
            Series(
                "points",
                name,
                value[own],
                rows[own],
                colour,
                ends_x=ends,
            )
        )
    along = Axis("capacity over the measured rate (90 % bands), log scale", log=True)
    return Chart("Audited capacities", along, Axis("", rows=names), series, edge=1.0)


def validation_charts(outcomes: Mapping[str, Sequence[Comparison]]) -> dict[str, list[Chart]]:
    """Of the repeat of each cell with the middle makespan: every micro-batch's time, predicted over
    measured; and measured and simulated stages of pipelines, in the middle of the run."""
    middle = {
        name: sorted(repeats, key=lambda o: o.measured["makespan"])[len(repeats) // 2]
        for name, repeats in outcomes.items()
    }
    charts = {"iterations": [_iterations(name, one) for name, one in middle.items()]}
    runs = dict[str, Analysis]()
    for name, one in middle.items():
        if "bubble_stage1" in one.measured:
            runs[f"{name}: measured"] = Analysis(one.records["measured"])
            runs[f"{name}: simulated"] = Analysis(one.records["calibrated"])
    if runs:
        shortest = min(analysis.records.end_s for analysis in runs.values())
        window = Window(0.3 * shortest, 0.25 * shortest)
        charts["timelines"] = timelines(runs, window, window, MOST_ROWS, [""] * len(runs))
    return charts


def _iterations(name: str, outcome: Comparison) -> Chart:
    measured, predicted = 1e3 * outcome.measured_iterations, 1e3 * outcome.iterations["calibrated"]
    groups = []
    for kind, colour in KIND_COLOURS.items():
        some = (outcome.steps["kind"] == kind).to_numpy()
        if some.any():
            groups.append((kind, colour, (measured[some], predicted[some])))
    return _beside(name, groups, (0.9, 1.1), "Dotted: 10 % off.")
