"""Charts of runs and workloads, as data: a figure of ``run`` and a report's page show the
same, and so do the user's own axes (docs/research/python.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.requests import without_times
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import METRICS, Metric, number_text, with_unit
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.assumptions import arrivals_line
from ..results import Tables
from ..run.experiment import ExperimentResult, ScenarioRun
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
    line_colour,
    policy_colour,
    policy_styles,
)
from .section import Axis, Chart, Series, first_upper, heading
from .timeline import (
    KINDS,
    StageSlices,
    Window,
    bubble_name,
    busy_shares,
    joined,
    memory_curves,
    stage_slices,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS, _INSTANTS = 1000, 240
MOST_ROWS, _MOST_BOXES = 16, 250
"""Rows of a timeline in a file, and boxes in a row."""
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
OTHER = "#999933"
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
        ends = (low / 1.5, 1.5 * high)
        return Axis(f"{label}, log scale", log=True, ends=ends, **options)
    return Axis(label, ends=(0.0, 1.05 * high), **options)


def bars(
    title: str,
    along: Axis,
    rows: Sequence[str],
    values: Mapping[str, Iterable[float]],
    colours: Iterable[str],
    **about: Any,
) -> Chart:
    """The values of each name in every row, as bars beside each other."""
    places = np.arange(len(rows), dtype=float)
    series = [
        Series("bars", name, np.array([*some], float), places, colour)
        for (name, some), colour in zip(values.items(), colours, strict=False)
    ]
    return Chart(title, along, Axis("", rows=rows), series, **about)


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
    """CDF of a metric, a line per scenario: over all tokens for ``tbt_s``, else over requests. Of a
    metric that grows in an overloaded run, the requests of a steady run's warm-up are left out, as
    in the printed table."""
    metric, series, seen = METRICS[key], [], []
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        values, share = distribution(table, key)
        label = f"{name}: {middle_and_tail(metric, values, share)}"
        if metric.grows and table.steady.get("state") == "overloaded":
            label += " (overloaded)"
        seen.append(values)
        series.append(Series("step", label, *steps(values, share), *style))
    along = axis_of(seen, with_unit(metric.name, metric.unit))
    later = "A steady run's warm-up is left out." * metric.grows
    caption = later if along.log or any(values.any() for values in seen) else "All are zero."
    of = "all tokens" if key == "tbt_s" else "requests"
    up = Axis(f"share of {of} (%)", ends=(0.0, 1.02), shares=True)
    return Chart(CDFS.get(key, first_upper(metric.name)), along, up, series, caption)


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
    keep = np.unique(
        np.linspace(
            0,
            len(x) - 1,
            min(len(x), _MOST_POINTS),
        )
        .round()
        .astype(int)
    )
    return np.concatenate([x[:1], x[keep]]), np.concatenate([[0.0], y[keep]])


def completions(tables: Mapping[str, Tables]) -> Chart:
    """Completed requests over time, a line per scenario. Where requests arrive one after the other,
    those that have arrived and are not complete: the completed ones follow the arrivals."""
    some = [table.requests for table in tables.values()]
    arrives = any(one["arrival_s"].max() > one["arrival_s"].min() for one in some)
    end = max(1e-9, *(float(one["finish_s"].max()) for one in some if len(one)))
    when, series = np.linspace(0.0, end, _INSTANTS), []
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        finish = np.sort(table.requests["finish_s"].dropna().to_numpy())
        said = f"all after {number_text(finish[-1])} s" if len(finish) else "nothing finished"
        if arrives:
            served = table.requests.dropna(subset=["finish_s"])
            came = np.searchsorted(np.sort(served["arrival_s"].to_numpy()), when, "right")
            left = np.searchsorted(finish, when, "right")
            counted = (when, (came - left).astype(float))
        else:
            counted = steps(finish, np.arange(1.0, len(finish) + 1))
        series.append(Series("step", f"{name}: {said}", *counted, *style))
    what = "requests in the system" if arrives else "requests completed"
    time, count = Axis("time (s)", ends=(0.0, None)), Axis(what, ends=(0.0, None))
    return Chart(first_upper(what), time, count, series)


def ledger(tables: Mapping[str, Tables]) -> list[Chart]:
    """Each stage's time by account in percent of the run, averaged over replicas: a chart per
    scenario; one for all without a pipeline, a row per scenario."""
    shares = {name: stage_shares(table.ledger) for name, table in tables.items()}
    titles, parts = list[str](), list[tuple[str, pd.DataFrame, list[str], str]]()
    for (name, table), share in zip(tables.items(), shares.values(), strict=True):
        replicas = table.ledger["replica"].nunique()
        where = f", mean of {replicas} replicas" if replicas > 1 else ""
        titles.append(f"{name}{where}: {100 * share['busy_s'].mean():.0f} % busy")
        stages = [f"stage {stage}" for stage in share.index]
        parts.append((titles[-1], share, stages, policy_colour(table.policy)))
    every = pd.concat(shares.values())
    if not _pipelined(tables):
        parts = [("Time by account", every, titles, BLACK)]
    largest = every[list(ACCOUNTS)].max().nlargest(_MOST_ACCOUNTS)
    used = [key for key in ACCOUNTS if largest.get(key, 0.0) > 5e-5]
    along = Axis("share of the run (%)", ends=(0.0, 100.0))
    return [
        Chart(
            title,
            along,
            Axis("", rows=rows),
            _accounts(share, used),
            colour=colour,
        )
        for title, share, rows, colour in parts
    ]


def _accounts(share: pd.DataFrame, used: Sequence[str]) -> list[Series]:
    """A row of boxes for each row of shares; the accounts that are not ``used`` are one."""
    left, rows, series = np.zeros(len(share)), np.arange(len(share), dtype=float), []
    for key in used:
        colour, label = ACCOUNTS[key]
        right = left + 100 * share[key].to_numpy(np.float64)
        series.append(Series("bars", label, right, rows, colour, start=left))
        left = right
    rest = 100 * share.drop(columns=list(used)).to_numpy(np.float64).sum(axis=1)
    if rest.max() > 0.05:
        series.append(Series("bars", "other", left + rest, rows, OTHER, start=left))
    return series


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
    """The stages' work in a window: a chart per scenario, a row per stage (``most`` rows);
    ``view`` is the part that is seen at first."""
    charts = []
    for (name, analysis), policy in zip(analyses.items(), policies, strict=True):
        stages = stage_slices(analysis, window)
        shown, caption = stages[:most], ""
        if window == view and sum(len(one.row) for one in shown) > _MOST_BOXES * len(shown):
            caption = "Boxes are merged: each 1/500 of the time has the colour of its largest part."
            every = [joined(stage, window) for stage in shown]
            parts = [[dict(zip(("start", "end"), one[kind], strict=True)) for one in every]
                     for kind in range(len(KINDS) + 1)]  # fmt: skip
        else:
            parts = [[_worked(analysis, s, kind) for s in shown] for kind in range(len(KINDS))]
            parts.append([_idle(stage) for stage in shown])
        kinds = zip((*KINDS, "bubble"), parts, strict=True)
        series = [
            _boxes(kind, some) for kind, some in kinds if any(len(one["end"]) for one in some)
        ]
        more = f" (first {len(shown)} of {len(stages)} rows)" if len(stages) > most else ""
        along = Axis("time (s)", ends=(view.start_s, view.end_s))
        rows, colour = Axis("", rows=_rows(stages)[:most]), policy_colour(policy)
        charts.append(Chart(name + more, along, rows, series, caption, colour=colour))
    return charts


def _rows(stages: Sequence[StageSlices]) -> list[str]:
    if stages and stages[0].rank:
        return [stage.label for stage in stages]
    if len({stage.replica for stage in stages}) == 1:
        return [f"stage {stage.stage}" for stage in stages]
    several = len({stage.stage for stage in stages}) > 1
    rows = [f"{s.called}:{s.stage}" if several else s.called for s in stages]
    return [f"replica {row}" if row.isdecimal() else row for row in rows]


def _boxes(name: str, parts: Sequence[Mapping[str, Any]]) -> Series:
    rows = np.repeat(np.arange(len(parts), dtype=float), [len(one["end"]) for one in parts])
    more = {key: np.concatenate([one[key] for one in parts]) for key in parts[0]}
    colour, start, end = KIND_COLOURS.get(name, VERMILION), more.pop("start"), more.pop("end")
    faint = name == "bubble"
    return Series("gantt", name, end, rows, colour, start=start, faint=faint, more=more)


def _worked(analysis: Analysis, stage: StageSlices, kind: int) -> dict[str, Any]:
    chosen = stage.kind == kind
    columns, which = analysis.records.replicas[stage.replica].iterations, stage.row[chosen]
    return {
        "start": stage.start[chosen],
        "end": stage.finish[chosen],
        "prompt tokens": columns["prefill_tokens"][which].astype(np.int32),
        "decodes": columns["decodes"][which].astype(np.int32),
    }


def _idle(stage: StageSlices) -> dict[str, Any]:
    chosen = stage.bubble_s > 0
    why = np.array([bubble_name(kind) for kind in stage.bubble_kind[chosen]], dtype=object)
    return {"start": stage.bubble_start[chosen], "end": stage.start[chosen], "why": why}


def overviews(analyses: Mapping[str, Analysis]) -> list[Chart]:
    """The share of the stages' time that each kind of batch takes, over the whole run."""
    charts = []
    for name, analysis in analyses.items():
        edges, shares = busy_shares(analysis)
        series = [
            Series("step", kind, edges[:-1], share, line_colour(KIND_COLOURS[kind]))
            for kind, share in zip(KINDS, shares, strict=True)
            if share.any()
        ]
        up = Axis("share of the stages' time (%)", ends=(0.0, 1.0), shares=True)
        charts.append(Chart(f"The whole run: {name}", Axis("time (s)"), up, series))
    return charts


_FAR = 5
"""A limit is drawn if it is less than so many times what was used."""
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
        if not series:
            continue
        caption, said = "", "token budget of an iteration"
        ends = [series[0].x[0], max(float(one.x[-1]) for one in series)]
        most = max(float(one.y.max()) for one in series)
        for budget in sorted(set(budgets.values())) if number == 1 else ():
            if budget < _FAR * most:
                series.append(Series("line", said, ends, [budget, budget], GREY, ":"))
            else:
                caption += f"The {said}, {budget:,}, is far above. "
        name, up = first_upper(label.partition(" (")[0]), Axis(label, ends=(0.0, None))
        charts.append(Chart(name, Axis("time (s)"), up, series, caption.strip()))
    return charts


def run_heading(found: ExperimentResult) -> str:
    """What stands above the figures of a run."""
    used = [run.deployment for run in found.runs.values()]
    pools = [pool for one in used for pool in one.pools]
    loads = {arrivals_line(one.scenario.workload, None) for one in used}
    counts = {len(one.requests) for one in used}
    load = f"{counts.pop():,} requests" if len(counts) == 1 else ""
    load += f", {loads.pop()}" if load and len(loads) == 1 else ""
    models, gpus = [one.model.name for one in pools], [one.device.name for one in pools]
    return heading(found.experiment.name, models, gpus, load)


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
        Series("step", "prompt tokens", *steps(*cumulative(prompt)), BLUE),
        Series("step", "output tokens", *steps(*cumulative(output)), VERMILION),
    ]
    some = slice(None, None, -(-len(requests) // _MOST_ARRIVALS))
    both = Series("points", "", prompt[some], output[some], GREY)
    note = without_times(clients) if arrival_s[-1] <= arrival_s[0] else ""
    along, up = (Axis(f"{name} tokens, log scale", log=True) for name in ("prompt", "output"))
    charts = [
        Chart("Lengths", Axis("tokens, log scale", log=True), share, lengths, note),
        Chart("Each request", along, up, [both]),
    ]
    return charts if note else [*charts, *_arrivals(arrival_s, share)]


def _arrivals(arrival_s: Floats, share: Axis) -> list[Chart]:
    counts, edges = np.histogram(arrival_s, _BINS)
    rates = Series(
        "step",
        "",
        edges[:-1],
        counts / np.diff(edges),
        GREEN,
    )
    rate = Axis("arrivals (requests/s)", ends=(0.0, None))
    between = np.diff(arrival_s)
    wait = np.linspace(0, float(np.quantile(between, 0.995)), 200)
    poisson = 1 - np.exp(-wait / between.mean())
    gaps = [
        Series("step", "gaps between arrivals", *steps(*cumulative(between)), GREEN),
        Series("line", "Poisson of the same rate", wait, poisson, GREY, "--"),
    ]
    along = Axis("gap between arrivals (s)", ends=(0.0, float(wait[-1]) or None))
    return [
        Chart("Arrivals", Axis("time (s)"), rate, [rates]),
        Chart("Gaps between arrivals", along, share, gaps),
    ]


# On the user's own axes --------------------------------------------------------------------------

Shown = ExperimentResult | Mapping[str, Tables]


def plot_cdf(axes: Axes, shown: Shown, metric: str = "ttft_s") -> None:
    """Draw the distribution of a metric of requests (of all tokens for ``tbt_s``), a line per
    scenario."""
    known = [key for key, one in METRICS.items() if one.unit == "s" and one.statistics]
    if metric not in known or metric == "ledger_s":
        raise UserError(f"metric: value {metric!r}: one of {', '.join(known)}")
    _draw(axes, cdf(metric, _tables(shown)))


def plot_completions(axes: Axes, shown: Shown) -> None:
    """Draw the requests completed over time, a line per scenario."""
    _draw(axes, completions(_tables(shown)))


def plot_ledger(axes: Axes, shown: Shown, scenario: str) -> None:
    """Draw each stage's time by account, in percent of the run."""
    (chart,) = ledger({scenario: _tables(shown)[scenario]})
    _draw(axes, chart, titled=True)


def plot_timeline(axes: Axes, run: ScenarioRun, start_s: float, length_s: float) -> None:
    """Draw the work of every stage from ``start_s`` on, for ``length_s`` seconds."""
    window = Window(start_s, length_s)
    policy = run.deployment.scenario.policy.name
    (chart,) = timelines({policy: run.analysis}, window, window, MOST_ROWS, [policy])
    _draw(axes, chart, titled=True)


def _draw(axes: Axes, chart: Chart, *, titled: bool = False) -> None:
    from .draw import draw_on

    draw_on(axes, chart)
    if titled:
        axes.set_title(chart.title, color=chart.colour)


def _tables(shown: Shown) -> Mapping[str, Tables]:
    return shown.tables if isinstance(shown, ExperimentResult) else shown
