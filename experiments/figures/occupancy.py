"""What paged memory held and what iterations were filled with, over the time of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from experiments.figures.style import policy_styles
from simulator.loop.records import Floats, ReplicaLog
from simulator.views.metrics import Analysis

_BINS = 240


def occupancy(runs: Mapping[str, Analysis], policies: Mapping[str, str]) -> Figure:
    """KV occupancy, tokens of an iteration and running sequences of the runs with paged memory.

    Over simulated time, a line a scenario, of its first replica; ``policies`` are the scenarios'.
    Each point is the mean over the iterations formed in a 240th of the run.
    """
    shown = {name: run.records.replicas[0] for name, run in runs.items()}
    shown = {name: log for name, log in shown.items() if log.pool is not None}
    figure = Figure(figsize=(8.0, 8.4), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    styles = policy_styles([policies[name] for name in shown])
    for (name, log), style in zip(shown.items(), styles, strict=True):
        assert log.pool is not None
        columns = log.iterations
        tokens = columns["prefill_tokens"] + columns["decodes"]
        carried = columns["chunks"] + columns["decodes"]
        for axes, values in zip(
            panels, (100 * log.pool.kv_tokens / log.kv_capacity, tokens, carried), strict=True
        ):
            axes.plot(*_means(log, values), label=name, drawstyle="steps-mid", **style)
    panels[0].set_ylabel("KV blocks in use (%)")
    panels[0].set_ylim(0, 102)
    panels[1].set_ylabel("tokens of an iteration")
    panels[2].set_ylabel("sequences of an iteration")
    panels[2].set_xlabel("time (s)")
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def _means(log: ReplicaLog, values: Floats) -> tuple[Floats, Floats]:
    """Middles of stretches of time, and the mean over what was formed in each; NaN for nothing."""
    ready = log.iterations["ready_s"]
    busy = log.iterations["prefill_tokens"] + log.iterations["decodes"] > 0
    edges = np.linspace(0.0, max(float(ready[-1]), 1e-9), _BINS + 1)
    count, _ = np.histogram(ready[busy], edges)
    total, _ = np.histogram(ready[busy], edges, weights=values[busy].astype(np.float64))
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return (edges[:-1] + edges[1:]) / 2, mean
