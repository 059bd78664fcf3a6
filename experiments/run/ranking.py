"""Options under equal load, ranked: who leads in a metric, and the Pareto front of two.

An *option* is a choice (a policy, a chunk size, a layout), a *load* comes from outside. Values are
equal within :data:`ALIKE`, or within the noise of the seeds: a Student-t interval of the mean of
the logarithms of ratios, as seed by seed all options serve the same requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import Better, known

WEIGHED = ("output_tokens_per_s", "ttft_s.p99", "tbt_s.p99")
"""The metrics that rank options. The first decides if it differs by over :data:`DECIDES`, else the
latency that differs most."""
ALIKE, DECIDES = 1.01, 1.05
CONFIDENCE = 0.95
SEEDS = 3
"""So many seeds at least say whether a lead is more than their spread."""

Spread = TypeVar("Spread", float, Floats)
Bools = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
Places = np.ndarray[tuple[int], np.dtype[np.intp]]


def half_width(spread: Spread, count: int, freedom: int) -> Spread:
    """The half-width of a Student-t interval of a mean of ``count`` values."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * spread / math.sqrt(count)


def ahead(these: Floats, others: Floats, better: Better) -> Bools:
    """Whether an option of ``these`` (row) is better than an option of ``others`` (column), beyond
    a tie. Rows are options, columns seeds. NaN is never better."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = (
            np.log(each if better is Better.MORE else 1 / each) for each in (these, others)
        )
        apart = first[:, None] - second[None, :]
        least = np.full(apart.shape[:2], math.log(ALIKE))
        if (seeds := these.shape[1]) > 1:
            noise = np.nan_to_num(
                half_width(
                    apart.std(axis=2, ddof=1),
                    seeds,
                    seeds - 1,
                )
            )
            least = np.maximum(least, noise)
        return np.asarray(apart.mean(axis=2) > least, np.bool_)


def pareto_front(cost: Floats, gain: Floats) -> Places:
    """Indices of the points on the front, by cost: none is as cheap and better, or vice versa."""
    order = np.lexsort((-gain, cost))
    best = np.maximum.accumulate(gain[order])
    before = np.concatenate([[-np.inf], best[:-1]])
    return np.asarray(order[gain[order] > before], np.intp)


@dataclass(frozen=True)
class Load:
    """The results of each option under one load: by metric a row per option and a column per seed,
    NaN if a run lacks the number (because it is overloaded, say). ``places`` are the options'
    places in a table, ``overloaded`` the options whose queue grows."""

    name: str
    options: Sequence[str]
    values: Mapping[str, Floats]
    places: Sequence[int] = ()
    overloaded: Sequence[str] = ()

    def means(self, metric: str) -> dict[str, float]:
        """Means over the seeds; without options that lack a value, or are overloaded alone."""
        found = zip(self.options, self.values[metric].mean(axis=1).tolist(), strict=True)
        out = () if set(self.overloaded) == set(self.options) else self.overloaded
        return {name: mean for name, mean in found if not (math.isnan(mean) or name in out)}

    def leaders(self, metric: str) -> list[str]:
        """The best option, then the options equal to it; empty if none has a value."""
        means, better = self.means(metric), known(metric).metric.better
        if not means:
            return []
        best = (max if better is Better.MORE else min)(means, key=lambda name: means[name])
        first = self.values[metric][[list(self.options).index(best)]]
        (behind,) = ahead(first, self.values[metric], better)
        others = zip(self.options, behind.tolist(), strict=True)
        return [best, *(o for o, lost in others if o in means and o != best and not lost)]

    def winner(self, metric: str) -> str | None:
        """The option that leads by more than the spread over at least :data:`SEEDS` seeds."""
        leaders = self.leaders(metric)
        alone = len(leaders) == 1 < len(self.means(metric))
        return leaders[0] if alone and self.seeds >= SEEDS else None

    def equal(self, metric: str) -> bool:
        """Whether all options that have a value are equal."""
        return len(self.leaders(metric)) == len(self.means(metric))

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return max((values.shape[1] for values in self.values.values()), default=0)

    def left_out(self, *metrics: str) -> dict[str, str]:
        """The options that are not ranked by these metrics, and why: they are overloaded, or lack a
        seed. A metric that no option has counts for none."""
        reasons = dict.fromkeys(self.overloaded, "overloaded")
        for metric in metrics:
            seeds = np.isfinite(self.values[metric]).sum(axis=1)
            for option, count in zip(self.options, seeds.tolist(), strict=True):
                if count < self.seeds and seeds.any() and option not in reasons:
                    reasons[option] = f"only {count} of {self.seeds} seeds"
        return reasons

    def front(self, *metrics: str) -> list[str]:
        """The Pareto front in two metrics, in order of the first. An option beats another if it is
        ahead in one metric and not behind in the other."""
        both = [self.means(metric) for metric in metrics]
        options = [option for option in both[0] if option in both[1]]
        if not options:
            return []
        ways = [known(metric).metric.better for metric in metrics]
        along, up = (
            np.array([(1 if way is Better.MORE else -1) * means[option] for option in options])
            for means, way in zip(both, ways, strict=True)
        )
        places = pareto_front(-along, up)
        rows = [list(self.options).index(options[place]) for place in places]
        values = [self.values[metric][rows] for metric in metrics]
        one, other = (ahead(v, v, way) for v, way in zip(values, ways, strict=True))
        beaten = np.any((one & ~other.T) | (other & ~one.T), axis=0).tolist()
        return [options[place] for place, lost in zip(places, beaten, strict=True) if not lost]

    def spread(self, metric: str) -> float:
        """The largest over the smallest value; 1 without any."""
        found = [value for value in self.means(metric).values() if value > 0]
        return max(found, default=1.0) / min(found, default=1.0)


def deciding(loads: Sequence[Load]) -> str:
    """The metric by which options are chosen; the first if all options are equal in all metrics."""
    first, *latencies = WEIGHED
    differ = [m for m in WEIGHED if not all(load.equal(m) for load in loads)]
    if first in differ and np.median([load.spread(first) for load in loads]) > DECIDES:
        return first
    differ = [m for m in latencies if m in differ] or differ
    return max(differ, key=lambda m: max(load.spread(m) for load in loads), default=first)


def ranked(loads: Sequence[Load], metric: str) -> list[str]:
    """The options that have the metric: first who wins under most loads, then who leads or is equal
    under most, of those who leads in most other metrics; then the lowest sum of places."""
    wins, leads, others, places = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for load in loads:
        means = load.means(metric)
        wins.update(filter(None, [load.winner(metric)]))
        leads.update(load.leaders(metric))
        others.update(option for m in WEIGHED if m != metric for option in load.leaders(m))
        best_last = known(metric).metric.better is Better.MORE
        order = sorted(means, key=lambda option: means[option], reverse=best_last)
        places.update({option: place for place, option in enumerate(order)})
    return sorted(
        places, key=lambda o: (-wins[o], -leads[o], -others[o] * bool(leads[o]), places[o])
    )
