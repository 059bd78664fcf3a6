"""The use of paged memory and the sizes of iterations, over the time of a run."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from sarathi_sim.experiments.figures.slices import MemoryCurves
from sarathi_sim.experiments.figures.style import GREY, policy_styles


def occupancy(
    curves: Mapping[str, MemoryCurves], policies: Mapping[str, str], budgets: Mapping[str, int]
) -> Figure:
    """KV occupancy, tokens of an iteration and running sequences of the runs with paged memory.

    Over simulated time, one line per scenario. ``policies`` are the scenarios'. ``budgets`` are the
    largest numbers of tokens in an iteration, of the scenarios that have one: dotted lines.
    """
    figure = Figure(figsize=(8.0, 8.4), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    styles = policy_styles([policies[name] for name in curves])
    for (name, values), style in zip(curves.items(), styles, strict=True):
        for axes, curve in zip(panels, values, strict=True):
            axes.plot(*curve, label=name, drawstyle="steps-mid", **style)
    for number, budget in enumerate(sorted(set(budgets.values()))):
        label = "" if number else "token budget of an iteration"
        panels[1].axhline(budget, color=GREY, linestyle=":", label=label)
    panels[0].set(ylabel="KV blocks in use (%)", ylim=(0, 102))
    panels[1].set_ylabel("tokens of an iteration")
    panels[2].set(ylabel="sequences of an iteration", xlabel="time (s)")
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    handles = panels[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", ncols=2)
    return figure
