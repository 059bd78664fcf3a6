"""Charts of runs and workloads, as data: a figure of ``run`` and a report's page show the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.load.requests import without_times
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import METRICS, Analysis, Metric, number_text, with_unit
from ..results import Tables
from ..run.experiment import ExperimentResult
from .palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    KIND_COLOURS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Style,
    policy_colour,
    policy_styles,
)
from .section import Axis, Chart, Series, enumerated, first_upper
from .timeline import (
    KINDS,
    StageSlices,
    Window,
    bubble_name,
    busy_shares,
    memory_curves,
    stage_slices,
)

_MOST_POINTS = 1000
MOST_ROWS = 16
"""Rows of a timeline in a file."""
WIDE = 20.0
"""The largest value over the first decile, from which on an axis is logarithmic."""

# Account of the ledger -> colour and name; the order in which they are stacked.
ACCOUNTS = {
    "busy_s": ("#d9d9d9", "busy"),
    "sending_s": (GREY, "sending"),
    "pb1_s": (BLUE, "PB1: prefills of different length"),
    "pb2_s": (VERMILION, "PB2: prefill next to decodes"),
    "pb3_s": (ORANGE, "PB3: decodes of different context"),
    "equal_s": (YELLOW, "equal prefill, or equal decodes"),
    "communication_s": (PURPLE, "communication"),
    "turnaround_s": (GREEN, "scheduler turn-around"),
    "slowest_rank_s": ("#8c564b", "waiting for the slowest rank"),
    "fill_drain_s": (SKY, "pipeline fill and drain"),
    "no_work_s": (BLACK, "no work"),
}
OTHER = "#bfbfbf"
_MOST_ACCOUNTS = 6
CDFS = {
    "ttft_s": "Time to first token",
    "tbt_s": "Time between tokens",
    "latency_s": "Latency of requests",
    "bubble_s": "Bubble time of requests",
}


def axis_of(values: Iterable[Any], label: str, **options: Any) -> Axis:
    """The axis of values: logarithmic, from the first percentile on, where they differ by much;
    else from 0 on."""
    every = np.concatenate([np.zeros(0), *(np.asarray(each, float) for each in values)])
    positive = every[every > 0]
    if not len(positive):
        return Axis(label, ends=(0.0, 1.0), **options)
    high = float(positive.max())
    if high > WIDE * np.quantile(positive, 0.1):
        low = float(np.quantile(positive, 0.01))
        return Axis(
            f"{label}, log scale",
            log=True,
            ends=(low / 1.5, 1.5 * high),
            **options,
        )
    return Axis(label, ends=(0.0, 1.05 * high), **options)


def run_charts(tables: Mapping[str, Tables]) -> dict[str, list[Chart]]:
    """The charts that need only a run's tables, by the name of their figure. Those of bubbles need
    a pipeline."""
    keys = [key for key in CDFS if key != "bubble_s" or _pipelined(tables)]
    found = {f"{key.removesuffix('_s')}_cdf": [cdf(key, tables)] for key in keys}
    return {**found, "completions": [completions(tables)], "ledger": ledger(tables)}


def _pipelined(tables: Mapping[str, Tables]) -> bool:
    return any(table.ledger["stage"].nunique() > 1 for table in tables.values())


def table_styles(tables: Mapping[str, Tables]) -> list[Style]:
    """Colour and dash of a line for each scenario, after its policy."""
    return policy_styles([table.policy for table in tables.values()])


def cdf(key: str, tables: Mapping[str, Tables]) -> Chart:
    """CDF of a metric, a line a scenario: over all tokens for ``tbt_s``, else over requests.

    For a metric that grows in an overloaded run, the requests of a steady run's warm-up are left
    out, as in the printed table. The names tell the overloaded runs.
    """
    metric, series, seen = METRICS[key], [], []
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        values, share = distribution(table, key)
        label = f"{name}: {middle_and_tail(metric, values, share)}"
        if metric.grows and table.steady.get("state") == "overloaded":
            label += " (overloaded)"
        seen.append(values)
        series.append(Series("step", label, *steps(values, share), *style))
    along = axis_of(seen, with_unit(metric.name, metric.unit))
    caption = "" if along.log or any(values.any() for values in seen) else "All are zero."
    of = "all tokens" if key == "tbt_s" else "requests"
    up = Axis(f"share of {of} (%)", ends=(0.0, 1.02), shares=True)
    return Chart(
        CDFS.get(key, first_upper(metric.name)),
        along,
        up,
        series,
        caption,
    )


def distribution(table: Tables, key: str) -> tuple[Floats, Floats]:
    """Values in rising order, and the cumulative share of each."""
    if key == "tbt_s":
        gaps = table.token_gaps
        if gaps is None:
            return np.zeros(0), np.zeros(0)
        return gaps["tbt_s"].to_numpy(np.float64), gaps["share"].to_numpy(np.float64)
    requests = table.requests.dropna(subset=["finish_s"])
    if METRICS[key].grows and table.steady.get("state") == "steady":
        requests = requests.sort_values("arrival_s", kind="stable")
        requests = requests[table.steady["warmup_requests"] :]
    return cumulative(requests[key].dropna())


def cumulative(values: Any) -> tuple[Floats, Floats]:
    """Values in rising order, and the share of all up to each."""
    x = np.sort(np.asarray(values, np.float64))
    return x, np.arange(1, len(x) + 1) / max(len(x), 1)


def middle_and_tail(metric: Metric, values: Floats, share: Floats) -> str:
    """The median and the 99th percentile, with their unit; as the summary has them."""
    if not len(values):
        return "not kept" if metric.key == "tbt_s" else "nothing finished"
    if not values[-1]:
        return "none"
    if metric.key == "tbt_s":
        middle, tail = (values[np.searchsorted(share, q - 1e-9)] for q in (0.5, 0.99))
    else:
        middle, tail = np.quantile(values, (0.5, 0.99))
    return f"median {number_text(middle)}, p99 {number_text(tail)} {metric.unit}"


def steps(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The curve from zero, thinned to the resolution of a figure."""
    if not len(x):
        return x, y
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(int))
    return np.concatenate([x[:1], x[keep]]), np.concatenate([[0.0], y[keep]])


def completions(tables: Mapping[str, Tables]) -> Chart:
    """Completed requests over time, one line per scenario; and arrivals, if all share them."""
    arrivals = [np.sort(table.requests["arrival_s"].to_numpy()) for table in tables.values()]
    series = []
    alike = all(np.array_equal(arrivals[0], other) for other in arrivals[1:])
    if alike and arrivals[0][-1] > arrivals[0][0]:
        counted = steps(arrivals[0], np.arange(1.0, len(arrivals[0]) + 1))
        series.append(Series("step", "arrived", *counted, GREY))
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        finish = np.sort(table.requests["finish_s"].dropna().to_numpy())
        said = f"all after {number_text(finish[-1])} s" if len(finish) else "nothing finished"
        counted = steps(finish, np.arange(1.0, len(finish) + 1))
        series.append(Series("step", f"{name}: {said}", *counted, *style))
    time, count = Axis("time (s)", ends=(0.0, None)), Axis("requests completed", ends=(0.0, None))
    return Chart("Completed requests", time, count, series)


def ledger(tables: Mapping[str, Tables]) -> list[Chart]:
    """Each stage's time by account in percent of the run, averaged over replicas: a chart a
    scenario."""
    shares = {name: stage_shares(table.ledger) for name, table in tables.items()}
    largest = pd.concat([share.max() for share in shares.values()], axis=1).max(axis=1)
    used = [key for key in ACCOUNTS if key in largest.nlargest(_MOST_ACCOUNTS).index]
    used = [key for key in used if largest[key] > 5e-5]
    charts = []
    for (name, table), share in zip(tables.items(), shares.values(), strict=True):
        replicas, left, series = table.ledger["replica"].nunique(), np.zeros(len(share)), []
        rows = np.arange(len(share), dtype=float)
        for key in used:
            colour, label = ACCOUNTS[key]
            right = left + 100 * share[key].to_numpy(np.float64)
            series.append(Series("bars", label, right, rows, colour, start=left))
            left = right
        rest = 100 * share.drop(columns=used).to_numpy(np.float64).sum(axis=1)
        if rest.max() > 0.05:
            series.append(Series("bars", "other", left + rest, rows, OTHER, start=left))
        where = f", mean of {replicas} replicas" if replicas > 1 else ""
        title = f"{name}{where}: {100 * share['busy_s'].mean():.0f} % busy"
        rows_of = Axis("", rows=[f"stage {stage}" for stage in share.index])
        along = Axis("share of the run (%)", ends=(0.0, 100.0))
        charts.append(Chart(title, along, rows_of, series, colour=policy_colour(table.policy)))
    return charts


def stage_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Accounts as shares of the wall clock, by stage."""
    table = table.assign(fill_drain_s=table["fill_s"] + table["drain_s"])
    mean = table.groupby("stage")[[*ACCOUNTS, "wall_s"]].mean()
    return mean[list(ACCOUNTS)].div(mean["wall_s"].where(mean["wall_s"] > 0, 1.0), axis=0)


# Over simulated time -----------------------------------------------------------------------------


def timelines(
    analyses: Mapping[str, Analysis],
    window: Window,
    view: Window,
    most: int,
    policies: Sequence[str],
) -> list[Chart]:
    """The stages' work in a window of time, a chart a scenario and a row a stage (``most`` rows);
    ``view`` is the part that is seen at first."""
    charts = []
    for (name, analysis), policy in zip(analyses.items(), policies, strict=True):
        stages = stage_slices(analysis, window)
        charts.append(_timeline(name, analysis, stages, view, most, policy_colour(policy)))
    return charts


def _timeline(
    name: str, analysis: Analysis, stages: list[StageSlices], view: Window, most: int, colour: str
) -> Chart:
    shown = stages[:most]
    series = [_worked(analysis, shown, kind) for kind in range(len(KINDS))]
    series.append(_idle(shown))
    one_replica = len({stage.replica for stage in stages}) == 1
    if shown and shown[0].rank:
        rows = [stage.label for stage in shown]
    elif one_replica:
        rows = [f"stage {stage.stage}" for stage in shown]
    else:
        several = len({stage.stage for stage in stages}) > 1
        rows = [f"{s.called}:{s.stage}" if several else s.called for s in shown]
        rows = [f"replica {row}" if row.isdecimal() else row for row in rows]
    more = f" (first {len(shown)} of {len(stages)} rows)" if len(stages) > most else ""
    along = Axis("time (s)", ends=(view.start_s, view.end_s))
    drawn = [one for one in series if len(one.x)]
    return Chart(name + more, along, Axis("", rows=rows), drawn, colour=colour)


def _worked(analysis: Analysis, stages: Sequence[StageSlices], kind: int) -> Series:
    """The batches of a kind."""
    parts: dict[str, list[Any]] = {"prompt tokens": [], "decodes": []}
    start, end, rows = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for row, stage in enumerate(stages):
        chosen = stage.kind == kind
        columns = analysis.records.replicas[stage.replica].iterations
        which = stage.row[chosen]
        parts["prompt tokens"].append(columns["prefill_tokens"][which].astype(np.int32))
        parts["decodes"].append(columns["decodes"][which].astype(np.int32))
        start.append(stage.start[chosen])
        end.append(stage.finish[chosen])
        rows.append(np.full(int(chosen.sum()), row))
    x, y, begun = (np.concatenate(each) for each in (end, rows, start))
    more = {name: np.concatenate([np.zeros(0, np.int32), *each]) for name, each in parts.items()}
    colour = KIND_COLOURS[KINDS[kind]]
    return Series("gantt", KINDS[kind], x, y, colour, start=begun, more=more)


def _idle(stages: Sequence[StageSlices]) -> Series:
    """The idle time before batches, and why."""
    x, y, start = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    why = list[str]()
    for row, stage in enumerate(stages):
        chosen = stage.bubble_s > 0
        start.append(stage.bubble_start[chosen])
        x.append(stage.start[chosen])
        y.append(np.full(int(chosen.sum()), row))
        why += [bubble_name(kind) for kind in stage.bubble_kind[chosen]]
    ends, rows, begun = (np.concatenate(each) for each in (x, y, start))
    about = {"why": np.array(why, dtype=object)}
    return Series("gantt", "bubble", ends, rows, VERMILION, start=begun, faint=True, more=about)


def overviews(analyses: Mapping[str, Analysis]) -> list[Chart]:
    """The share of the stages' time that each kind of batch takes, over the whole run."""
    charts = []
    for name, analysis in analyses.items():
        edges, shares = busy_shares(analysis)
        series = [
            Series("step", kind, edges[:-1], share, KIND_COLOURS[kind])
            for kind, share in zip(KINDS, shares, strict=True)
        ]
        up = Axis("share of the stages' time (%)", ends=(0.0, 1.0), shares=True)
        charts.append(Chart(f"The whole run: {name}", Axis("time (s)"), up, series))
    return charts


_MEMORY = ("KV cache in use (%)", "tokens of an iteration", "sequences of an iteration")


def occupancy(
    analyses: Mapping[str, Analysis], policies: Sequence[str], budgets: Mapping[str, int]
) -> list[Chart]:
    """KV occupancy, tokens of an iteration and running sequences of the runs with paged memory,
    over simulated time. ``budgets`` are the largest numbers of tokens in an iteration."""
    charts = []
    for number, label in enumerate(_MEMORY):
        series = []
        for (name, analysis), style in zip(analyses.items(), policy_styles(policies), strict=True):
            if (curves := memory_curves(analysis.records)) is not None:
                x, y = curves[number]
                seen = ~np.isnan(y)
                series.append(Series("line", name, x[seen], y[seen], *style))
        ends = [series[0].x[0], max(float(one.x[-1]) for one in series)] if series else []
        for budget in sorted(set(budgets.values())) if ends and number == 1 else ():
            said = "token budget of an iteration"
            series.append(Series("line", said, ends, [budget, budget], GREY, ":"))
        if series:
            up = Axis(label, ends=(0.0, None))
            charts.append(
                Chart(first_upper(label.partition(" (")[0]), Axis("time (s)"), up, series)
            )
    return charts


def heading(found: ExperimentResult) -> str:
    """What stands above the figures of a run: its name, model, GPU and load."""
    used = [run.deployment for run in found.runs.values()]
    what = enumerated(list(dict.fromkeys(one.model.name for one in used)))
    on = enumerated(list(dict.fromkeys(one.device.name for one in used)))
    counts = {len(one.requests) for one in used}
    requests = f", {counts.pop():,} requests" if len(counts) == 1 else ""
    return f"{found.experiment.name}: {what} on {on}{requests}"


def all_run_charts(found: ExperimentResult, window: Window) -> dict[str, list[Chart]]:
    """All charts of a run by the name of their figure; ``window`` is that of the timeline."""
    tables = found.tables
    analyses = {name: run.analysis for name, run in found.runs.items()}
    policies = [table.policy for table in tables.values()]
    cuts = {
        name: run.deployment.pools[-1].scenario.policy.build().chunking
        for name, run in found.runs.items()
    }
    budgets = {name: cut.rows for name, cut in cuts.items() if cut is not None}
    charts = run_charts(tables)
    charts["timeline"] = timelines(analyses, window, window, MOST_ROWS, policies)
    if memory := occupancy(analyses, policies, budgets):
        charts["occupancy"] = memory
    return charts


# A workload --------------------------------------------------------------------------------------

_BINS, _MOST_ARRIVALS = 60, 5000


def workload_charts(requests: Sequence[Request], clients: int | None = None) -> list[Chart]:
    """Distributions of prompt and output tokens, each request by both, the arrival rate over time,
    and the gaps between arrivals beside those of Poisson arrivals. The ``clients`` of a closed loop
    have neither."""
    arrival_s = np.sort([request.arrival_s for request in requests])
    prompt = np.array([request.prompt_tokens for request in requests], float)
    output = np.array([request.output_tokens for request in requests], float)
    share = Axis("share of requests (%)", ends=(0.0, 1.0), shares=True)
    lengths = [
        Series("step", name, *steps(*cumulative(values)), colour)
        for values, name, colour in ((prompt, "prompt", BLUE), (output, "output", VERMILION))
    ]
    some = slice(None, None, -(-len(requests) // _MOST_ARRIVALS))
    both = Series("points", "", prompt[some], output[some], GREY)
    note = ""
    if arrival_s[-1] <= arrival_s[0]:
        note = without_times(clients)
    charts = [
        Chart("Lengths", Axis("tokens, log scale", log=True), share, lengths, note),
        Chart(
            "Each request",
            Axis("prompt tokens, log scale", log=True),
            Axis("output tokens, log scale", log=True),
            [both],
        ),
    ]
    return charts if note else [*charts, *_arrivals(arrival_s, share)]


def _arrivals(arrival_s: Floats, share: Axis) -> list[Chart]:
    counts, edges = np.histogram(arrival_s, _BINS)
    rates = Series("step", "", edges[:-1], counts / np.diff(edges), BLUE)
    rate = Axis("requests a second", ends=(0.0, None))
    between = np.diff(arrival_s)
    wait = np.linspace(0, float(np.quantile(between, 0.995)), 200)
    poisson = 1 - np.exp(-wait / between.mean())
    gaps = [
        Series("step", "gaps", *steps(*cumulative(between)), BLUE),
        Series("line", "Poisson of the same rate", wait, poisson, GREY, "--"),
    ]
    along = Axis("gap between arrivals (s)", ends=(0.0, float(wait[-1]) or None))
    return [
        Chart("Arrivals", Axis("time (s)"), rate, [rates]),
        Chart("Gaps between arrivals", along, share, gaps),
    ]
