"""What is equal to a recommendation, and what it saves against the next: worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from sarathi_sim.experiments.capacity.rivals import Rival, paired, weigh
from sarathi_sim.experiments.capacity.search import Capacity, Crossing


def option(stack: str | None = "vllm", device: str = "h200-sxm", gpus: int = 1) -> Any:
    scenario, kind = SimpleNamespace(stack=stack), SimpleNamespace(name=device)
    pool = SimpleNamespace(scenario=scenario, device=kind)
    return SimpleNamespace(deployment=SimpleNamespace(pools=[pool]), gpus=gpus)


def searched(*loads: float, first_seed: int = 0) -> Capacity:
    """A capacity whose replications have crossings at these loads."""
    probes = [SimpleNamespace(probe=SimpleNamespace(seed=first_seed + n)) for n in range(9)]
    crossings = [Crossing(load, probes[n], probes[n]) for n, load in enumerate(loads)]  # type: ignore[arg-type]
    return Capacity(crossings=tuple(crossings))


def at_rate(rate: float) -> Any:
    """GPUs times their price of 1, as many replicas as the rate takes."""
    return lambda one, load: rate / (math.ceil(rate / load * (1 - 1e-12)) * one.gpus)


def errors(of: dict[str, float]) -> Any:
    return lambda one: of[one.deployment.pools[0].scenario.stack]


NONE = errors({})
BEST = Rival("best", option(), 2.0, 8 / 5)


def test_at_a_rate_equal_money_is_equal_whatever_the_capacities() -> None:
    """8 requests/s take 5 GPUs of 1.6 or more each, and 6 of less; without errors of op times
    nothing else counts."""
    others = [
        Rival("same money", option(), 1.61, 8 / 5),
        Rival("one GPU more", option(), 1.59, 8 / 6),
        Rival("of two", option(gpus=2), 2.7, 8 / 6),
    ]
    found = weigh(BEST, others, at_rate(8), NONE, 0.0)
    assert (found.equal, found.next, found.at_least) == (("same money",), "one GPU more", False)
    assert found.saves == pytest.approx(1 / 6) and found.errors == {}


def test_errors_of_op_times_cancel_on_one_engine_and_gpu_and_count_in_full_otherwise() -> None:
    """1.59 of another engine may be 1.6: half of a percent is within the root of 0.03 and 0.04."""
    others = [Rival("its own", option(), 1.59, 8 / 6)]
    others += [Rival("another", option("sglang"), 1.59, 8 / 6)]
    others += [Rival("far", option("sglang"), 1.52, 8 / 6)]
    sizes = errors({"vllm": 0.03, "sglang": 0.04})
    found = weigh(BEST, others, at_rate(8), sizes, 0.0)
    assert found.equal == ("another",) and found.next == "its own"
    assert found.errors == {"vllm on h200-sxm": 0.03, "sglang on h200-sxm": 0.04}
    assert 1.52 * math.exp(0.05) < 1.6 < 1.59 * math.exp(0.05)
    other_gpu = [Rival("another", option(device="b200-sxm"), 1.59, 8 / 6)]
    assert weigh(BEST, other_gpu, at_rate(8), sizes, 0.0).equal == ("another",)


def test_paired_differences_tell_what_single_capacities_do_not() -> None:
    """Replications scatter by 20 %, but each is 4 to 6 % lower for the second deployment."""
    first, second = (10.0, 8.0, 12.0, 9.0), (9.5, 7.68, 11.28, 8.55)
    ratios = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    low, high = stats.t.interval(0.95, 3, stats.tmean(ratios), stats.sem(ratios))
    mean, half = paired(searched(*first), searched(*second))
    assert (mean, half) == (pytest.approx(-(low + high) / 2), pytest.approx((high - low) / 2))
    assert paired(searched(*first), searched(*second, first_seed=9)) == (0.0, 0.0)
    best = Rival("best", option(), 10, 10, searched(*first))
    worse = Rival("worse", option(), 9.5, 9.5, searched(*second))
    alike = Rival("alike", option(), 9.5, 9.5, searched(9.5, 9.0, 10.8, 8.5))
    found = weigh(best, [worse, alike], lambda _, load: load, NONE, 0.0)
    assert (found.equal, found.next) == (("alike",), "worse")
    assert found.saves == pytest.approx(0.05)


def test_what_was_only_screened_counts_as_uncertain_as_it_is() -> None:
    half = math.log(1.05)
    others = [Rival(n, option(), x, x, half=half) for n, x in (("near", 9.6), ("further", 9.4))]
    best = Rival("best", option(), 10, 10)
    found = weigh(best, others, lambda _, load: load, NONE, 9.0)
    assert (found.equal, found.next, found.at_least) == (("near",), "further", False)
    found = weigh(best, others[:1], lambda _, load: load, NONE, 9.0)
    assert (found.next, found.at_least) == ("", True) and found.saves == pytest.approx(0.1)
