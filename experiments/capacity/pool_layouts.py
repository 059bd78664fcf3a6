"""Deployments to choose from whose prompts and decodes have workers of their own.

Both pools take the layouts of ``recommend`` without pipeline stages, with the largest token budget
and limit of sequences: a chunk holds up no decode there. The ratio of prefill to decode workers is
that of their saturations, and its neighbours, as a saturated prefill worker has a long queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..config.deployment import default_handover
from ..config.scenario import POOLS
from .bounds import alone, as_decode, as_prefill, saturation, sent_per_s
from .options import DRAFTING, Described, Option, Wanted, layouts, named
from .slo import Objective

MOST_PAIRS = 4
"""Pairs of layouts that are tried of each draft length, the best by their saturations."""
LOADED = (1.0, 0.75, 0.5)
"""The parts of their saturations to which workers are loaded by a rate that is asked for."""
PREFILLS = {"trtllm": {"policy": {"disable_overlap_scheduler": True}}}
"""Keys that prefill workers of an engine take."""


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and the requests a second that saturate each."""

    prefill: Option
    decode: Option
    rates: tuple[float, float]

    def gpus(self, workers: tuple[int, int]) -> int:
        return workers[0] * self.prefill.gpus + workers[1] * self.decode.gpus

    def saturation(self, workers: tuple[int, int]) -> float:
        """Requests a second that saturate the first pool."""
        return min(count * rate for count, rate in zip(workers, self.rates, strict=True))

    def on(self, gpus: int) -> list[tuple[int, int]]:
        """Numbers of workers that fill the GPUs: at first those with the highest saturation, then
        those with one prefill worker more, and fewer."""
        most = (gpus - self.decode.gpus) // self.prefill.gpus
        every = {
            n: (n, (gpus - n * self.prefill.gpus) // self.decode.gpus) for n in range(1, most + 1)
        }
        best = max(every, key=lambda count: self.saturation(every[count]), default=0)
        return [every[count] for count in (best, best + 1, best - 1) if count in every]

    def for_rate(self, rate: float, gpus: int) -> list[tuple[int, int]]:
        """Numbers of workers that a rate loads to :data:`LOADED` of their saturations at most."""
        first, second = (rate / each for each in self.rates)
        wanted = [(math.ceil(first / part), math.ceil(second / part)) for part in LOADED]
        return [each for each in dict.fromkeys(wanted) if self.gpus(each) <= gpus]


def pool_layouts(
    wanted: Wanted,
    options: Iterable[Option],
    objectives: Sequence[Objective],
    price: Callable[[str], float],
) -> Iterator[Described]:
    """The deployments with two pools to try; ``options`` are those without, one replica each, and
    ``price`` is that of a GPU, by device."""
    trees = {named(point): tree for point, tree in layouts(wanted)}
    ranked = []
    for pair in _pairs(wanted, options, objectives):
        rate = wanted.rate
        each = pair.on(wanted.gpus) if rate is None else pair.for_rate(rate, wanted.gpus)
        if not each:
            continue
        paid = wanted.gpus if rate is None else pair.gpus(each[0])
        value = (rate or pair.saturation(each[0])) / paid
        ranked.append((value / max(price(pair.decode.deployment.device.name), 1e-9), pair, each))
    ranked.sort(key=lambda one: -one[0])
    for drafts in wanted.drafts:
        same = [one for one in ranked if one[1].decode.drafts == drafts]
        for _, pair, each in same[:MOST_PAIRS]:
            for workers in each:
                yield _described(wanted, pair, workers, trees)


def _pairs(
    wanted: Wanted, options: Iterable[Option], objectives: Sequence[Objective]
) -> Iterator[Pair]:
    alike = dict[object, tuple[dict[Option, float], dict[Option, float]]]()
    largest = {"budget": max(wanted.budgets), "seqs": max(wanted.sequences)}
    first = [one for one in objectives if "ttft_s" in one.limits]
    rest = [one for one in objectives if "ttft_s" not in one.limits]
    for option in options:
        scenario, deployment = option.scenario, option.deployment
        if scenario.cluster.pp > 1 or not option.point.items() >= largest.items():
            continue
        kind = (scenario.device, scenario.stack, scenario.dtype)
        prefills, decodes = alike.setdefault(kind, ({}, {}))
        if option.drafts == min(wanted.drafts) and not alone(option, first)[1]:
            sent = sent_per_s(deployment, default_handover(deployment), deployment.requests)
            prefills[option] = min(saturation(as_prefill(deployment)), sent)
        if not alone(option, rest)[1]:
            decodes[option] = saturation(as_decode(deployment), objectives)
    for prefills, decodes in alike.values():
        for prefill, decode in product(prefills, decodes):
            yield Pair(prefill, decode, (prefills[prefill], decodes[decode]))


def _described(
    wanted: Wanted, pair: Pair, workers: tuple[int, int], trees: dict[str, dict[str, Any]]
) -> Described:
    pools: dict[str, dict[str, Any]] = {
        pool: {"cluster": {**trees[one.name]["cluster"], "replicas": count}}
        for pool, one, count in zip(POOLS, (pair.prefill, pair.decode), workers, strict=True)
    }
    pools["prefill"] |= PREFILLS.get(pair.decode.scenario.policy.name, {})
    tree = trees[pair.decode.name]
    # A degree that one pool has must not become that of the other.
    tree = {**tree, "cluster": {"max_length": wanted.max_length}, "disaggregation": pools}
    words = [str(one.point["shape"]) for one in (pair.prefill, pair.decode)]
    kind, _, prefill = words[0].partition(DRAFTING)[0].rpartition("TP ")
    shape = f"{kind}{workers[0]} prefill TP {prefill} + {workers[1]} decode TP "
    shape += words[1].rpartition("TP ")[2]
    point = pair.decode.point
    return {**point, "layout": f"{shape} budget {point['budget']}", "shape": shape}, tree
