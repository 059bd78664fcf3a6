"""The quantile of replications and its interval, against what a normal sample has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from sarathi_sim.simulator.confidence import quantile as module
from sarathi_sim.simulator.confidence.quantile import mean_and_interval, quantile, spread


@pytest.mark.parametrize(("count", "factor"), [(5, 3.407), (10, 2.355), (20, 1.926)])
def test_factors_are_those_of_published_tables(
    count: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-sided tolerance factors of a normal sample, 90 % of the population with 95 % confidence
    (Natrella 1963, table A-7): of an interval with 5 % beyond each end, the lower one."""
    monkeypatch.setattr(module, "LEVEL", 0.9)
    module._factors.cache_clear()
    values = np.exp(norm.ppf((np.arange(count) + 0.5) / count))
    logs = np.log(values)
    low, _ = quantile(values.tolist(), 0.1).interval
    module._factors.cache_clear()
    assert (logs.mean() - math.log(low)) / logs.std(ddof=1) == pytest.approx(factor, abs=2e-3)


@pytest.mark.parametrize("count", [3, 5, 10])
def test_the_estimate_is_right_in_the_median(count: int) -> None:
    """Whatever the number of replications, half of the estimates are above the quantile."""
    rng = np.random.default_rng(count)
    true = math.exp(-1.2816 * 0.04)
    drawn = np.exp(rng.normal(0, 0.04, (2000, count)))
    above = np.mean([quantile(row, 0.1).value > true for row in drawn.tolist()])
    assert above == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("scatter", [0.1, 0.3, 0.5, 1.0, 2.0])
def test_the_interval_covers_95_percent_with_the_rule_that_ends_it(scatter: float) -> None:
    """From 5 to 10 replications, as many more as would make the interval no wider than 3 %."""
    rng, repeats, covered = np.random.default_rng(7), 2000, 0
    deviation = 0.03 * scatter
    true = math.exp(norm.ppf(0.1) * deviation)
    for row in np.exp(rng.normal(0, deviation, (repeats, 10))):
        count = 0
        while count < 10:
            count = max(count, 5)
            found = quantile(row[:count].tolist(), 0.1)
            low, high = found.interval
            if (wide := (high - low) / (0.03 * found.value)) <= 1:
                break
            count = min(max(math.ceil(count * wide), count + 1), 10)
        covered += low <= true <= high
    assert 0.94 <= covered / repeats <= 0.98


def test_values_that_are_all_alike() -> None:
    found = quantile([3.0, 3.0, 3.0], 0.1)
    assert found.value == pytest.approx(3.0)
    assert found.interval == pytest.approx((3.0, 3.0))
    assert quantile([2.0], 0.1).value == pytest.approx(2.0)
    assert spread([1.0, 1.0]) == 0
    assert math.isnan(spread([1.0]))


def test_intervals_of_means_are_students() -> None:
    mean, (low, high) = mean_and_interval([1.0, 2.0, 3.0])
    assert (mean, high - mean) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert mean_and_interval([2.0]) == (2.0, (2.0, 2.0))
    assert low == pytest.approx(2 * mean - high)
