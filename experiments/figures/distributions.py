"""Figures drawn from the tables of one or several runs, and the figure of a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.load.describe import without_times
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import METRICS, Metric, number_text, with_unit
from ..results import Tables
from .style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    policy_colour,
    policy_styles,
)

_MOST_POINTS = 1000
_SIZE = (7.0, 4.6)
_WIDE = 30.0  # largest value over the first decile, from which on a logarithmic axis shows more

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


def run_figures(tables: Mapping[str, Tables]) -> dict[str, Callable[[], Figure]]:
    """The figures that need only the tables, by file name, each drawn when called.

    The figures of bubbles need a pipeline.
    """
    drawn = {
        "ttft_cdf": lambda: cdf("ttft_s", tables),
        "tbt_cdf": lambda: cdf("tbt_s", tables),
        "latency_cdf": lambda: cdf("latency_s", tables),
        "completions": lambda: completions(tables),
        "ledger": lambda: ledger_bars(tables),
    }
    if any(table.ledger["stage"].nunique() > 1 for table in tables.values()):
        drawn["bubble_cdf"] = lambda: cdf("bubble_s", tables)
    return drawn


def cdf(key: str, tables: Mapping[str, Tables]) -> Figure:
    """CDF of a metric, a line a scenario: over all tokens for ``tbt_s``, else over requests.

    For a metric that grows in an overloaded run, the requests of a steady run's warm-up are left
    out, as in the printed table. The legend names the overloaded runs.
    """
    figure, axes = _panel()
    draw_cdf(axes, key, tables)
    _legend(figure)
    return figure


def draw_cdf(axes: Axes, key: str, tables: Mapping[str, Tables]) -> None:
    """Draw :func:`cdf` on given axes."""
    metric = METRICS[key]
    shown = [np.zeros(0)]
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        values, share = distribution(table, key)
        shown.append(values)
        label = f"{name}: {middle_and_tail(metric, values, share)}"
        if metric.grows and table.steady.get("state") == "overloaded":
            label += " (overloaded)"
        axes.plot(*steps(values, share), label=label, **style)
    unit = _log_where_wide(axes, np.concatenate(shown), metric.unit)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(with_unit(metric.name, unit))
    axes.set_ylabel("share of all tokens" if key == "tbt_s" else "share of requests")


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
    values = np.sort(requests[key].dropna().to_numpy(np.float64))
    return values, np.arange(1, len(values) + 1) / max(len(values), 1)


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


def _log_where_wide(axes: Axes, values: Floats, unit: str) -> str:
    """Fit the axis to the values, logarithmic where they differ by much; returns its unit.

    A logarithmic axis begins at the first percentile, because a few values are almost zero.
    """
    positive = values[values > 0]
    if not len(positive):
        axes.set_xlim(0, 1)
        axes.text(0.5, 0.5, "Nothing to show: all are zero.", ha="center", transform=axes.transAxes)
        return unit
    high = float(positive.max())
    if high < _WIDE * np.quantile(positive, 0.1):
        axes.set_xlim(0, 1.05 * high)
    else:
        unit += ", log scale"
        axes.set(xscale="log", xlim=(float(np.quantile(positive, 0.01)) / 1.5, high * 1.5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    return unit


def completions(tables: Mapping[str, Tables]) -> Figure:
    """Completed requests over time, one line per scenario; and arrivals, if all share them."""
    figure, axes = _panel()
    draw_completions(axes, tables)
    _legend(figure)
    return figure


def draw_completions(axes: Axes, tables: Mapping[str, Tables]) -> None:
    """Draw :func:`completions` on given axes."""
    arrivals = [np.sort(table.requests["arrival_s"].to_numpy()) for table in tables.values()]
    alike = all(np.array_equal(arrivals[0], other) for other in arrivals[1:])
    if alike and arrivals[0][-1] > arrivals[0][0]:
        x, y = steps(arrivals[0], np.arange(1.0, len(arrivals[0]) + 1))
        axes.plot(x, y, color=GREY, linewidth=1.2, label="arrived")
    for (name, table), style in zip(tables.items(), table_styles(tables), strict=True):
        finish = np.sort(table.requests["finish_s"].dropna().to_numpy())
        if not len(finish):
            axes.plot([], [], label=f"{name}: nothing finished", **style)
            continue
        x, y = steps(finish, np.arange(1.0, len(finish) + 1))
        axes.plot(x, y, label=f"{name}: all after {_seconds(finish[-1])} s", **style)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.set(xlabel="time (s)", ylabel="requests completed")


def _panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.subplots()


def table_styles(tables: Mapping[str, Tables]) -> list[dict[str, Any]]:
    """Colour and dash of a line for each scenario, after its policy."""
    return policy_styles([table.policy for table in tables.values()])


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _legend(figure: Figure) -> None:
    """The legend, below the axes, where it covers no curves."""
    figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.27 * len(figure.axes[0].lines))
    figure.legend(loc="outside lower left", fontsize=12)


def ledger_bars(tables: Mapping[str, Tables]) -> Figure:
    """Each stage's time by account in percent of the run, averaged over replicas."""
    shares = {name: stage_shares(table.ledger) for name, table in tables.items()}
    stages = [len(share) for share in shares.values()]
    heights = [max(count, 1.6) for count in stages]
    height = 2.2 + 0.27 * sum(heights) + 0.25 * len(heights)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    panels = figure.subplots(
        len(shares), 1, sharex=True, squeeze=False, height_ratios=heights
    ).ravel()
    used = [key for key in ACCOUNTS if any(share[key].max() > 5e-5 for share in shares.values())]
    for axes, name in zip(panels, shares, strict=True):
        draw_ledger(axes, name, tables[name], used)
    panels[-1].set(xlim=(0, 100), xlabel="share of the run (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=11)
    return figure


def draw_ledger(
    axes: Axes, name: str, table: Tables, accounts: Sequence[str] = tuple(ACCOUNTS)
) -> None:
    """One scenario's bars of :func:`ledger_bars`, on given axes."""
    share = stage_shares(table.ledger)
    left = np.zeros(len(share))
    for key in accounts:
        colour, label = ACCOUNTS[key]
        width = 100 * share[key].to_numpy()
        axes.barh(share.index, width, 0.86, left, color=colour, label=label)
        left += width
    replicas = table.ledger["replica"].nunique()
    where = f", mean of {replicas} replicas" if replicas > 1 else ""
    axes.set_title(
        f"{name}{where}: {100 * share['busy_s'].mean():.0f} % busy",
        color=policy_colour(table.policy),
    )
    few = len(share) < 3  # too low a panel for a label beside it
    axes.set_yticks(share.index, [f"stage {s}" if few else str(s) for s in share.index])
    axes.set_ylim(len(share) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.grid(False, axis="y")
    axes.set_ylabel("" if few else "stage")


def stage_shares(ledger: pd.DataFrame) -> pd.DataFrame:
    """Accounts as shares of the wall clock, by stage."""
    table = ledger.assign(fill_drain_s=ledger["fill_s"] + ledger["drain_s"])
    mean = table.groupby("stage")[[*ACCOUNTS, "wall_s"]].mean()
    return mean[list(ACCOUNTS)].div(mean["wall_s"].where(mean["wall_s"] > 0, 1.0), axis=0)


def steps(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The curve from zero, thinned to the resolution of a figure."""
    if not len(x):
        return x, y
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(int))
    return np.concatenate([x[:1], x[keep]]), np.concatenate([[0.0], y[keep]])


_BINS = 60
_MOST_ARRIVALS = 5000


def workload_figure(requests: Sequence[Request], title: str, clients: int | None = None) -> Figure:
    """Distributions of prompt and output tokens, each request by both, the arrival rate over time,
    and the gaps between arrivals beside those of Poisson arrivals. The ``clients`` of a closed loop
    have neither."""
    arrival_s = np.sort([request.arrival_s for request in requests])
    prompt = np.array([request.prompt_tokens for request in requests])
    output = np.array([request.output_tokens for request in requests])
    figure = Figure(figsize=(10.0, 7.0), layout="constrained")
    (lengths, both), (rate, gaps) = figure.subplots(2, 2)
    figure.suptitle(f"{title}: {len(requests):,} requests")
    for values, label, colour in ((prompt, "prompt", BLUE), (output, "output", VERMILION)):
        _distribution(lengths, values, label=label, color=colour)
    lengths.set(xscale="log", xlabel="tokens", ylabel="share of requests", ylim=(0, 1))
    lengths.legend()
    step = -(-len(requests) // _MOST_ARRIVALS)
    both.plot(prompt[::step], output[::step], ".", color=GREY, markersize=3, rasterized=True)
    both.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="output tokens")
    if arrival_s[-1] > arrival_s[0]:
        counts, edges = np.histogram(arrival_s, _BINS)
        rate.stairs(counts / np.diff(edges), edges, color=BLUE)
        rate.set(xlabel="time (s)", ylabel="requests a second", ylim=(0, None))
        between = np.diff(arrival_s)
        _distribution(gaps, between, label="gaps", color=BLUE)
        wait = np.linspace(0, float(np.quantile(between, 0.995)), 200)
        poisson = 1 - np.exp(-wait / between.mean())
        gaps.plot(wait, poisson, color=GREY, linestyle="--", label="Poisson of the same rate")
        gaps.set(xlabel="gap between arrivals (s)", ylim=(0, 1), xlim=(0, wait[-1] or None))
        gaps.legend()
    else:
        for axes in (rate, gaps):
            note = without_times(clients).replace(": ", ":\n")
            axes.text(0.5, 0.5, note, ha="center", transform=axes.transAxes)
            axes.set_axis_off()
    return figure


def _distribution(axes: Axes, values: Floats, **style: str) -> None:
    """The cumulative share of values."""
    x = np.sort(values)
    some = np.unique(np.linspace(0, len(x) - 1, 1000).astype(int))
    axes.plot(x[some], (some + 1) / len(x), **style)  # type: ignore[arg-type]
