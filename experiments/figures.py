"""Figures drawn from the tables of one or several runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from experiments.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    line_styles,
)
from simulator.records import Floats

_MOST_POINTS = 1000
_SIZE = (7.0, 4.6)
_MOST_INSIDE = 6  # lines of a legend that leave room for the curves

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
    "fill_drain_s": (SKY, "pipeline fill and drain"),
    "no_work_s": (BLACK, "no work to be had"),
}
# What the figures need of the tables.
REQUEST_COLUMNS = ("bubble_s", "finish_s")
LEDGER_COLUMNS = (
    *("replica", "stage", "wall_s", "fill_s", "drain_s"),
    *(account for account in ACCOUNTS if account != "fill_drain_s"),
)


def bubble_cdf(requests: Mapping[str, pd.DataFrame]) -> Figure:
    """CDF over requests of the bubble time each one saw, one line per scenario."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    positive = [np.zeros(0)]
    for style, (name, table) in zip(line_styles(), requests.items(), strict=False):
        bubble = np.sort(table["bubble_s"].dropna().to_numpy())
        if not len(bubble):
            axes.plot([], [], label=f"{name}: nothing finished", **style)
            continue
        positive.append(bubble[bubble > 0])
        median = np.quantile(bubble, 0.5)
        label = f"{name}: median {median:.3g} s" if bubble[-1] > 0 else f"{name}: none"
        share = np.arange(1, len(bubble) + 1) / len(bubble)
        axes.plot(*_steps(bubble, share), label=label, **style)
    values = np.concatenate(positive)
    unit = "s"
    axes.set_xlim(0, 1)
    if len(values):
        # Bubbles differ by orders of magnitude between schedulers. The axis begins at the first
        # percentile, because a few requests meet next to none.
        unit = "s, log scale"
        axes.set_xscale("log")
        axes.set_xlim(float(np.quantile(values, 0.01)) / 2, float(values.max()) * 1.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    else:
        axes.text(0.5, 0.5, "No request met a bubble.", ha="center", transform=axes.transAxes)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"bubble time of a request ({unit})")
    axes.set_ylabel("share of requests")
    _legend(figure, axes)
    return figure


def completions(requests: Mapping[str, pd.DataFrame]) -> Figure:
    """Requests completed over time, one line per scenario."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    for style, (name, table) in zip(line_styles(), requests.items(), strict=False):
        finish = np.sort(table["finish_s"].dropna().to_numpy())
        if not len(finish):
            axes.plot([], [], label=f"{name}: nothing finished", **style)
            continue
        x, y = _steps(finish, np.arange(1.0, len(finish) + 1))
        axes.plot(x, y, label=f"{name}: all after {_seconds(finish[-1])} s", **style)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.set_xlabel("time (s)")
    axes.set_ylabel("requests completed")
    _legend(figure, axes)
    return figure


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _legend(figure: Figure, axes: Axes) -> None:
    """Within the axes; below them where it would cover the curves."""
    lines = len(axes.lines)
    if lines <= _MOST_INSIDE:
        axes.legend(loc="best")
        return
    figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.25 * lines)
    figure.legend(loc="outside lower left", fontsize=11)


def ledger_bars(ledgers: Mapping[str, pd.DataFrame]) -> Figure:
    """Where each stage's time went in percent of the run, averaged over replicas."""
    shares = {name: _shares(table) for name, table in ledgers.items()}
    stages = [len(share) for share in shares.values()]
    heights = [max(count, 1.6) for count in stages]
    height = 2.2 + 0.27 * sum(heights) + 0.25 * len(heights)
    figure = Figure(figsize=(8.4, height), layout="constrained")
    panels = figure.subplots(
        len(shares), 1, sharex=True, squeeze=False, height_ratios=heights
    ).ravel()
    used = [key for key in ACCOUNTS if any(share[key].max() > 5e-5 for share in shares.values())]
    for axes, (name, share) in zip(panels, shares.items(), strict=True):
        left = np.zeros(len(share))
        for key in used:
            colour, label = ACCOUNTS[key]
            width = 100 * share[key].to_numpy()
            axes.barh(share.index, width, 0.86, left, color=colour, label=label)
            left += width
        replicas = ledgers[name]["replica"].nunique()
        where = f", mean of {replicas} replicas" if replicas > 1 else ""
        axes.set_title(f"{name}{where}: {100 * share['busy_s'].mean():.0f} % busy")
        few = len(share) < 3  # too low a panel for a label beside it
        axes.set_yticks(share.index, [f"stage {s}" if few else str(s) for s in share.index])
        axes.set_ylim(len(share) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0, labelsize=10)
        axes.grid(False, axis="y")
        axes.set_ylabel("" if few else "stage")
    panels[-1].set_xlim(0, 100)
    panels[-1].set_xlabel("share of the run (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=11)
    return figure


def _shares(ledger: pd.DataFrame) -> pd.DataFrame:
    """Accounts as shares of the wall clock, by stage."""
    table = ledger.assign(fill_drain_s=ledger["fill_s"] + ledger["drain_s"])
    mean = table.groupby("stage")[[*ACCOUNTS, "wall_s"]].mean()
    return mean[list(ACCOUNTS)].div(mean["wall_s"].where(mean["wall_s"] > 0, 1.0), axis=0)


def _steps(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The curve from zero, thinned to what a figure can show."""
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(int))
    return np.concatenate([x[:1], x[keep]]), np.concatenate([[0.0], y[keep]])
