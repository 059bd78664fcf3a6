"""Options under equal load: the best option in each metric, its cost in the others, and ties.

An *option* is a choice (a policy, a chunk size, a layout), a *load* comes from outside (requests,
their rate). Values are equal within :data:`ALIKE`, or within the noise of the seeds: seed by seed
all options serve the same requests, so the logarithm of a ratio is taken seed by seed, and its mean
has a Student-t interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Better, Quantity, known
from ..report.section import enumerated

WEIGHED = ("output_tokens_per_s", "ttft_s.p99", "tbt_s.p99")
"""The metrics that rank options. The first decides if it differs by over :data:`DECIDES`, else the
latency that differs most."""
ALIKE, DECIDES = 1.01, 1.05
_MOST_NAMED = 3
CONFIDENCE = 0.95

Spread = TypeVar("Spread", float, Floats)
Bools = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
Places = np.ndarray[tuple[int], np.dtype[np.intp]]


def half_width(spread: Spread, count: int, freedom: int) -> Spread:
    """The half-width of a Student-t interval of a mean of ``count`` values."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * spread / math.sqrt(count)


def ahead(these: Floats, others: Floats, better: Better) -> Bools:
    """Whether an option of ``these`` (row) is better than an option of ``others`` (column), beyond
    a tie.

    Both have a row per option and a column per seed. An option that lacks a value is never better.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = (
            np.log(each if better is Better.MORE else 1 / each) for each in (these, others)
        )
        apart = first[:, None] - second[None, :]
        least = np.full(apart.shape[:2], math.log(ALIKE))
        if (seeds := these.shape[1]) > 1:
            noise = np.nan_to_num(half_width(apart.std(axis=2, ddof=1), seeds, seeds - 1))
            least = np.maximum(least, noise)
        return np.asarray(apart.mean(axis=2) > least, np.bool_)


def pareto_front(cost: Floats, gain: Floats) -> Places:
    """Indices of the points on the front: no point is as cheap and better, or as good and cheaper.

    In order of cost.
    """
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
        """Means over the seeds, for options with a value for each seed. An overloaded option does
        not compete with steady ones."""
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

    def equal(self, metric: str) -> bool:
        """Whether all options that have a value are equal."""
        return len(self.leaders(metric)) == len(self.means(metric))

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


def best_word(quantity: Quantity) -> str:
    """``highest`` or ``lowest``; for a time ``shortest``."""
    low = "shortest" if quantity.metric.unit == "s" else "lowest"
    return "highest" if quantity.metric.better is Better.MORE else low


def deciding(loads: Sequence[Load]) -> str | None:
    """The metric by which options are chosen; None if all options are equal in all metrics."""
    first, *latencies = WEIGHED
    differ = [m for m in WEIGHED if not all(load.equal(m) for load in loads)]
    if first in differ and np.median([load.spread(first) for load in loads]) > DECIDES:
        return first
    differ = [m for m in latencies if m in differ] or differ
    return max(differ, key=lambda m: max(load.spread(m) for load in loads), default=None)


def winner(loads: Sequence[Load], metric: str) -> str:
    """The option that leads under most loads; a tie goes to the lead in most other metrics."""
    count = Counter(option for load in loads for option in load.leaders(metric))
    also = Counter(option for load in loads for m in WEIGHED for option in load.leaders(m))
    return max(count, key=lambda option: (count[option], also[option]))


def trade_off(loads: Sequence[Load]) -> str:
    """The best option in words, what it costs in the other metrics, and what is equal."""
    metric = deciding(loads)
    present = [m for m in WEIGHED if any(load.means(m) for load in loads)]
    equal = [m for m in present if all(load.equal(m) for load in loads)]
    said = list[str]()
    if metric is not None:
        best = winner(loads, metric)
        rest = [m for m in present if m not in (metric, *equal)]
        said = [_lead(loads, metric, best), *(_cost(loads, m, best) for m in rest)]
    same = {m: max(load.spread(m) for load in loads) <= ALIKE for m in equal}
    all_of_them = "equal" if said else f"all {len(loads[0].options)} are equal"
    for alike, words in ((True, all_of_them), (False, "not told apart by the seeds")):
        some = [f"{spoken(m)}, {_range(loads, m)}" for m in equal if same[m] is alike]
        said += [f"{words}: {enumerated(some)}"] if some else []
    growing = list(dict.fromkeys(option for load in loads for option in load.overloaded))
    if growing:
        where = _at([load for load in loads if load.overloaded], loads)
        named = growing if len(growing) <= _MOST_NAMED else [f"{len(growing)} of them"]
        said.append(f"overloaded{where}: {enumerated(named)}")
    return "; ".join(filter(None, said))


def over_loads(loads: Sequence[Load]) -> str:
    """The results of a single option over its loads, in words."""
    present = [m for m in WEIGHED if any(load.means(m) for load in loads)]
    found = [f"{spoken(m)} {_range(loads, m)}" for m in present]
    ends = dict.fromkeys(load.name for load in (loads[0], loads[-1]))
    where = f"From {' to '.join(ends)}: " if len(ends) > 1 else "The only point: "
    return f"{where}{', '.join(found)}" if found else ""


def _lead(loads: Sequence[Load], metric: str, best: str) -> str:
    """``b has the highest output token throughput: 12 tokens/s (a 10 tokens/s)``; and its loss
    under loads where another option leads."""
    led = [load for load in loads if best in load.leaders(metric)]
    lost = [load for load in loads if load not in led and best in load.means(metric)]
    others = list(dict.fromkeys(o for load in led for o in load.means(metric) if o != best))
    equal = set.intersection(*(set(load.leaders(metric)) for load in led))
    tied = [option for option in others if option in equal]
    text = f"{best} has the {best_word(known(metric))} {spoken(metric)}{_at(led, loads)}: "
    text += _range(led, metric, best)
    if others:
        name = others[0] if len(others) == 1 else "the others"
        text += f" ({name} {_range(led, metric, *others)})"
    if tied:
        text += f", as {f'has {tied[0]}' if len(tied) == 1 else f'have {len(tied)} others'}"
    return f"{text}; elsewhere it {_loss(lost, metric, best)}" if lost else text


def _cost(loads: Sequence[Load], metric: str, best: str) -> str:
    """What the best option loses in another metric."""
    its = [load for load in loads if best in load.means(metric)]
    lost = [load for load in its if best not in load.leaders(metric)]
    if lost:
        return f"its {spoken(metric)}{_at(lost, loads)} {_loss(lost, metric, best)}"
    return f"none has a better {spoken(metric)}: {_range(its, metric, best)}" if its else ""


def _loss(lost: Sequence[Load], metric: str, best: str) -> str:
    """``is 40 % longer: 7.00 s (a 5.00 s)``."""
    quantity = known(metric)
    leaders = {load.name: load.leaders(metric)[0] for load in lost}
    ratios = [load.means(metric)[best] / load.means(metric)[leaders[load.name]] for load in lost]
    share = 100 * (max(ratios) - 1)
    longer = "longer" if quantity.metric.unit == "s" else "higher"
    worse = f"{max(ratios):.2g} times as long" if share >= 100 else f"{share:.2g} % {longer}"
    if quantity.metric.better is Better.MORE:
        worse = f"{100 * (1 - min(ratios)):.2g} % lower"
    others = list(dict.fromkeys(leaders.values()))
    name = others[0] if len(others) == 1 else "the best there"
    text = f"is {'up to ' if len(lost) > 1 else ''}{worse}: {_range(lost, metric, best)}"
    return f"{text} ({name} {_range(lost, metric, *others, best_only=True)})"


def spoken(metric: str) -> str:
    """``p99 time to first token``."""
    return " ".join(filter(None, (known(metric).statistic, known(metric).metric.name)))


def _at(some: Sequence[Load], loads: Sequence[Load]) -> str:
    if len(loads) == 1:
        return ""
    return (
        f" at all {len(loads)} loads"
        if len(some) == len(loads)
        else (f" at {len(some)} of {len(loads)} loads")
    )


def _range(loads: Sequence[Load], metric: str, *options: str, best_only: bool = False) -> str:
    """The values of options (default: all) under some loads, from the smallest to the largest; with
    ``best_only`` of each load's best option."""
    quantity, values = known(metric), list[float]()
    for load in loads:
        means, leaders = load.means(metric), load.leaders(metric)[:1]
        names = leaders if best_only else [o for o in options or means if o in means]
        values += [means[name] for name in names]
    ends = dict.fromkeys((quantity.text(min(values)), quantity.text(max(values))))
    return f"{' to '.join(ends)} {quantity.metric.unit}".strip()
