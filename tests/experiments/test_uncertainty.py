"""Bands and warnings of a run, as its user sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.run.experiment import simulate_all
from sarathi_sim.experiments.run.uncertainty import capacity_interval
from sarathi_sim.profiler.bundle.schema import bundle_path, load_bundle, write_bundle
from sarathi_sim.simulator.op_times.iteration import WholeLayer
from tests.experiments.small_config import SMALL, loaded
from tests.sampled import profile_folder
from tests.simulator.test_interaction import layers


def test_bands_hold_the_numbers_and_ratios_are_surer_than_runs() -> None:
    summary = simulate_all(loaded(SMALL)).summary()
    widths = []
    for scenario in summary["scenarios"].values():
        low, high = scenario["makespan_s_band"]
        assert low < scenario["makespan_s"] < high
        widths.append(high / low)
        assert scenario["outside_profile"] == []
        for metric in ("requests_per_s", "tokens_per_s", "mfu"):
            slow, fast = scenario[f"{metric}_band"]
            assert slow / scenario[metric] == pytest.approx(scenario["makespan_s"] / high, rel=5e-3)
            assert fast > scenario[metric]
    low, high = summary["ratio_bands"]["speedup"]
    assert low < summary["ratios"]["speedup"] < high
    # Errors that both have in common cancel.
    assert high / low < widths[0] * widths[1]
    assert min(widths) > 1.005 and max(widths) < 1.3


def test_ratios_of_a_run_over_itself_and_without_a_band() -> None:
    """A run over itself is sure; what does not follow from the makespan has no band."""
    same = "scenarios.sarathi.policy={name: orca, case: best}"
    assert simulate_all(loaded(SMALL, same)).ratio_bands == {"speedup": [1.0, 1.0]}
    changed = loaded(SMALL, "compare.speedup.metric=ttft_s.p50")
    assert simulate_all(changed).ratio_bands == {}


@pytest.mark.slow
def test_whole_layers_that_scatter_make_a_run_less_sure(tmp_path: Path) -> None:
    shard = ("a100-80g-sxm", "gpt3-175b", 8)
    shipped = load_bundle(profile_folder(*shard))
    widths = []
    for noise in (0.0, 0.2):
        mixed = layers(shipped, WholeLayer(1.1), noise)
        root = tmp_path / str(noise)
        write_bundle(replace(shipped, mixed=mixed), bundle_path(root, *shard))
        both = []
        for more in ([], ["engine.layer_time=sum"]):
            changed = loaded(SMALL, f"profiles={root}", *more)
            one = simulate_all(changed).summary()["scenarios"]["sarathi"]
            both.append(np.diff(one["makespan_s_band"])[0] / one["makespan_s"])
        width, ops = both
        widths.append(width)
        # All-reduces lie outside of whole layers: of longer layers their errors are a smaller part.
        assert widths[-1] > 0.9 * ops
    assert widths[1] > 1.2 * widths[0]


LOGS = [(-0.04, 0.04), (-0.12, 0.0), (0.01, 0.04), (-math.inf, 0.04)]


@pytest.mark.parametrize(
    ("intervals", "low", "high"),
    [
        ([], -0.03, 0.03),
        (LOGS[:1], -0.05, 0.05),  # 3, 4 and 5
        (LOGS[:2], -0.13, 0.05),  # 5, 12 and 13
        (LOGS[2:3], -0.03, 0.05),  # the capacity lies below it: no error downwards
        (LOGS[3:], -math.inf, 0.05),
    ],
)
def test_independent_errors_of_a_capacity_add_in_squares(
    intervals: list[tuple[float, float]], low: float, high: float
) -> None:
    ends = [[7 * math.exp(end) for end in interval] for interval in intervals]
    whole = capacity_interval(7.0, 0.03, *ends)
    assert whole == pytest.approx((7 * math.exp(low), 7 * math.exp(high)))
