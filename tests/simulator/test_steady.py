"""Overload is recognised, and what warms up is left out."""

from __future__ import annotations

import heapq
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.run_answers import ratios_table, run_section
from sarathi_sim.experiments.run.experiment import simulate_all
from sarathi_sim.simulator.views.metrics import (
    BLOCKS,
    CRITICAL,
    Analysis,
    kendall_s,
    mser5,
    steady_state,
    waiting_at,
)
from tests.experiments.small_config import deployed


def queue(load: float, servers: int, count: int, seed: int, shortest: bool = False) -> str:
    """The state of a queue with Poisson arrivals and a capacity of 1 a second. First come, first
    served, all requests alike; or the shortest first, with service times from 0 to twice the mean.
    """
    rng = np.random.default_rng([seed, 7])
    arrival = np.cumsum(rng.exponential(1 / load, count))
    service = servers * (2 * rng.random(count) if shortest else np.ones(count))
    free, waiting, start, came = [0.0] * servers, list[tuple[float, int]](), np.empty(count), 0
    for _ in range(count):
        now = heapq.heappop(free)
        if not waiting:
            now = max(now, arrival[came])
        while came < count and arrival[came] <= now:
            heapq.heappush(waiting, (service[came] if shortest else came, came))
            came += 1
        number = heapq.heappop(waiting)[1]
        start[number] = now
        heapq.heappush(free, now + service[number])
    finish = start + service
    waits = waiting_at(arrival, finish, start, finish)
    return steady_state(arrival, waits, finish - arrival).state


@pytest.mark.parametrize("shortest", [False, True])
@pytest.mark.parametrize("servers", [1, 50])
def test_a_queue_that_grows_is_told_from_one_that_does_not(servers: int, shortest: bool) -> None:
    def overloaded(load: float) -> float:
        states = [queue(load, servers, 1000, seed, shortest) for seed in range(40)]
        return states.count("overloaded") / len(states)

    assert overloaded(0.5) <= 0.05
    assert overloaded(0.8) <= 0.05
    assert overloaded(1.1) >= 0.9
    assert overloaded(1.3) == 1.0


def test_who_waits_when_another_arrives() -> None:
    """0 is at work from 1 to 3 and, preempted, from 7 to 9; 1 from 4 to 5; 2 waits to its end."""
    arrival, finish = np.array([0.0, 2, 4, 6, 8]), np.array([9.0, 5, 20, 20, 20])
    begin, end = np.array([1.0, 4, 7, 19, 19, 19]), np.array([3.0, 5, 9, 20, 20, 20])
    assert waiting_at(arrival, finish, begin, end).tolist() == [0, 0, 1, 2, 2]


def test_the_critical_value_is_that_of_one_per_cent() -> None:
    """The distribution of S over all orders of n values, one value inserted after the other."""
    ways = {0: 1}
    for size in range(2, BLOCKS + 1):
        found: dict[int, int] = {}
        for s, count in ways.items():
            for place in range(size):
                change = (size - 1) - 2 * place
                found[s + change] = found.get(s + change, 0) + count
        ways = found
    total = sum(ways.values())
    assert sum(n for s, n in ways.items() if s >= CRITICAL) / total <= 0.01
    assert sum(n for s, n in ways.items() if s >= CRITICAL - 2) / total > 0.01


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_kendall(values: list[int]) -> None:
    pairs = itertools.combinations(values, 2)
    assert kendall_s(np.array(values, float)) == sum((b > a) - (b < a) for a, b in pairs)


@given(st.lists(st.floats(0, 100), min_size=10, max_size=80))
def test_mser5_is_the_smallest_standard_error(values: list[float]) -> None:
    count = len(values) // 5
    means = np.array(values[: 5 * count]).reshape(count, 5).mean(axis=1)
    errors = [means[d:].var() / (count - d) for d in range(count // 2 + 1)]
    dropped = mser5(np.array(values))
    assert dropped % 5 == 0
    assert errors[dropped // 5] <= min(errors) + 1e-9


def test_a_warm_up_is_dropped() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 1000)
    assert 95 <= mser5(np.concatenate([np.full(100, 5.0), np.full(900, 1.0)]) + noise) <= 130
    assert mser5(np.full(1000, 1.0)) == 0


def test_closed_and_short() -> None:
    zeros = np.zeros(100)
    assert steady_state(zeros, zeros, zeros).state == "closed"
    few = np.arange(20.0)
    assert steady_state(few, few, few).state == "short"
    assert steady_state(few[:0], few[:0], few[:0]).state == "closed"


@pytest.mark.parametrize(("rate", "state"), [(0.5, "steady"), (4.0, "overloaded")])
def test_of_a_simulated_cluster(rate: float, state: str) -> None:
    changes = (f"workload.arrivals.rate={rate}", "workload.requests=400")
    deployment = deployed("first_experiment", *changes)["orca"]
    analysis = Analysis(deployment.simulate())
    summary = deployment.summary(analysis)
    steady = summary["steady"]
    assert steady["state"] == state
    if state == "steady":
        kept = analysis.requests.sort_values("arrival_s")[steady["warmup_requests"] :]
        assert steady["ttft_s"]["p99"] == kept["ttft_s"].quantile(0.99)
    else:
        assert np.isnan(steady["ttft_s"]["p99"])


def test_latencies_of_an_overloaded_run_are_not_printed() -> None:
    changes = ["workload.arrivals.rate=4", "workload.requests=300"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    section = run_section(outcome.summary())
    assert len(section.warnings) == 2  # no band is narrow: op times alone set the makespan
    assert "orca is overloaded: its queue and latencies grow" in section.warnings[0]
    where = "The latencies over all its 300 requests are in summary.json (scenarios.orca)"
    assert where in section.warnings[0]
    rows = [row[0] for row in section.tables[-1].rows]
    assert "latency, median" not in rows
    assert "time between tokens, median" in rows


@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        ({"kind": "poisson", "rate": 0.05}, "the arrivals determine makespan and throughput"),
        ({"kind": "closed_loop", "clients": 4}, "with slower ops the clients would send later"),
    ],
)
def test_a_band_narrow_for_its_arrivals_says_so(arrivals: dict[str, object], reason: str) -> None:
    changes = ["workload.requests=20", f"workload.arrivals={json.dumps(arrivals)}"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    (note,) = run_section(outcome.summary()).warnings
    assert note.startswith("orca, sarathi: the 90 % bands") and reason in note


def test_a_ratio_of_latencies_of_an_overloaded_run_is_no_number() -> None:
    changes = ["workload.requests=300", "workload.arrivals.rate=4"]
    ratio = "{metric: latency_s.p50, over: [orca, sarathi], paper: 1.5}"
    times = "{metric: makespan_s, over: [orca, sarathi]}"
    changes += [f"compare.latency={ratio}", f"compare.makespan={times}"]
    table = ratios_table(simulate_all(load_experiment("first_experiment", changes)).summary())
    assert table is not None
    rows = {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert rows["latency"]["predicted"] == "-" and "overloaded" in table.note
    assert float(rows["makespan"]["predicted"]) > 0
    assert rows["latency"]["difference"] == ""


SHORTEST = """
from sarathi_sim.policies.policy import named


@named("shortest_first")
class ShortestFirst:
    pooled = True

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs

    @staticmethod
    def order(sequence):
        return sequence.prompt_tokens

    def plan(self, pool):
        pool.decodes_all()
        while pool.waiting and len(pool.running) < self.max_num_seqs:
            first = pool.waiting[0]
            if first.stale or pool.blocks.need(first, first.target) > pool.blocks.free:
                break
            pool.admit(first, first.target)
"""


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        # One decode worker with 8 slots serves half of what arrives: requests wait for a slot.
        ({"disaggregation.decode.policy.max_num_seqs": 8}, "overloaded"),
        ({"disaggregation.decode.policy.max_num_seqs": 64}, "steady"),
        # 300 tokens of 131 kB take 0.39 s of a link of 0.1 GB/s, which 6 requests a second need.
        ({"disaggregation.handover.bandwidth": 1e8}, "overloaded"),
        # Served are about 0.5 a second, the shortest first; the mean delay falls from block to
        # block.
        ({"workload.arrivals.rate": 0.2}, "steady"),
        ({"workload.arrivals.rate": 1}, "overloaded"),
    ],
)
def test_requests_that_wait_between_two_pools_or_are_overtaken(
    tmp_path: Path, changes: dict[str, Any], state: str
) -> None:
    config: dict[str, Any] = {
        **{"name": "x", "model": "llama-3-8b", "device": "a100-80g-sxm"},
        "workload": {
            "requests": 300,
            "arrivals": {"kind": "poisson", "rate": 6},
            "lengths": {"kind": "fixed", "prompt": 300, "decode": 200},
        },
        "cluster": {"max_length": 8192},
        "policy": {"name": "vllm"},
        "disaggregation": {"prefill": {}, "decode": {}},
    }
    if "workload.arrivals.rate" in changes:
        (tmp_path / "mine.py").write_text(SHORTEST)
        named = {"file": str(tmp_path / "mine.py"), "name": "shortest_first", "max_num_seqs": 4}
        config |= {"policy": named, "disaggregation": None}
        lengths = {"kind": "uniform", "min": 300, "max": 6000}
        config["workload"] |= {"lengths": lengths, "pd_ratio": 5}
    (deployment,) = deployed(config, *(f"{key}={value}" for key, value in changes.items())).values()
    summary = deployment.summary(Analysis(deployment.simulate()))
    assert summary["steady"]["state"] == state
