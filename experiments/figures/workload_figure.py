"""The figure of a workload: lengths, arrivals over time, and the gaps between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sarathi_sim.experiments.figures.style import BLUE, GREY, VERMILION
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.load.describe import without_times
from sarathi_sim.simulator.loop.records import Floats

_BINS = 60
_MOST_POINTS = 5000


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
    step = -(-len(requests) // _MOST_POINTS)
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
