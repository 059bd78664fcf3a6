"""What-if workloads: longer prompts and outputs, burstier arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.load.workload import burstier, longer_prefixes, longer_requests


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 3.0])
def test_gaps_vary_as_much_more_as_asked(factor: float) -> None:
    arrival_s = np.cumsum(np.random.default_rng(1).exponential(0.5, 5000))
    shifted = burstier(arrival_s, factor)
    before, after = np.diff(arrival_s), np.diff(shifted)
    assert after.std() / after.mean() == pytest.approx(factor * before.std() / before.mean())
    assert shifted[[0, -1]] == pytest.approx(arrival_s[[0, -1]])
    assert (np.argsort(after) == np.argsort(before)).all()


def test_what_has_no_gaps_stays() -> None:
    for arrival_s in (np.zeros(5), np.arange(5.0), np.array([1.0]), np.array([])):
        assert burstier(arrival_s, 2.0) is arrival_s
    assert np.isfinite(burstier(np.array([0.0, 0, 0, 1]), 100.0)).all()  # as far as it goes


def test_longer_requests_still_fit() -> None:
    prompt, output = np.array([1, 100, 900, 900]), np.array([1, 10, 100, 200])
    longer = longer_requests(prompt, output, (1.2, 1.1), 1000)
    assert longer[0].tolist() == [1, 120, 890, 1080]  # the last was too long before, too
    assert longer[1].tolist() == [1, 11, 110, 220]
    prefixes = longer_prefixes([(("a", 50), ("b", 900))], 1.2, np.array([890]))
    assert prefixes == [(("a", 60), ("b", 890))]


def requests(**workload: object) -> list[Request]:
    lengths = {"kind": "random", "prompt": 200, "decode": 40, "tool": "sglang", "range_ratio": 0.5}
    arrivals = {"kind": "poisson", "rate": 2.0}
    given = {"lengths": lengths, "arrivals": arrivals, "requests": 400, **workload}
    tree = {"model": "llama-13b", "device": "a6000", "workload": given, "policy": {"name": "orca"}}
    return build_requests(
        check_scenario(tree, Source("", "x", {}, ())), 1024, Source("", "x", {}, ())
    )


def test_a_shifted_workload_has_the_same_requests() -> None:
    base, shifted = requests(), requests(shift={"prompt": 1.5, "burstiness": 2.0})
    assert [round(1.5 * one.prompt_tokens) for one in base] == [
        pytest.approx(one.prompt_tokens, abs=1) for one in shifted
    ]
    assert [one.output_tokens for one in base] == [one.output_tokens for one in shifted]
    gaps = [np.diff([one.arrival_s for one in each]) for each in (base, shifted)]
    assert gaps[1].std() == pytest.approx(2 * gaps[0].std(), rel=1e-3)


def test_turns_grow_with_the_turns_before_them() -> None:
    sessions = {"min_turns": 2, "max_turns": 3, "think_s": 1.0}
    base, longer = requests(sessions=sessions), requests(sessions=sessions, shift={"output": 2.0})
    assert longer[1].prompt_tokens == base[1].prompt_tokens + base[0].output_tokens
