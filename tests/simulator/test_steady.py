"""Overload is recognised, and what warms up is left out."""

from __future__ import annotations

import heapq
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import simulate_all
from sarathi_sim.experiments.run.run_answer import ratios_table, run_answer
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import Analysis
from sarathi_sim.simulator.views.steady import BLOCKS, CRITICAL, kendall_s, mser5, steady_state


def queue(load: float, servers: int, count: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """M/D/c by Lindley's recursion: arrivals, waiting times and latencies. Capacity 1 a second."""
    arrival = np.cumsum(np.random.default_rng([seed, 7]).exponential(1 / load, count))
    free = [0.0] * servers
    waited = np.empty(count)
    for number, when in enumerate(arrival):
        start = max(heapq.heappop(free), when)
        waited[number] = start - when
        heapq.heappush(free, start + servers)
    return arrival, waited, waited + servers


def share_overloaded(load: float, servers: int) -> float:
    states = [steady_state(*queue(load, servers, 1000, seed)).state for seed in range(40)]
    return states.count("overloaded") / len(states)


@pytest.mark.parametrize("servers", [1, 50])
def test_a_queue_that_grows_is_told_from_one_that_does_not(servers: int) -> None:
    assert share_overloaded(0.5, servers) <= 0.05
    assert share_overloaded(0.8, servers) <= 0.05
    assert share_overloaded(1.1, servers) >= 0.9
    assert share_overloaded(1.3, servers) == 1.0


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
    changes = [f"workload.arrivals.rate={rate}", "workload.requests=400"]
    experiment = load_experiment("first_experiment", changes)
    deployment = deploy(experiment.scenarios["orca"], experiment.sources["orca"])
    analysis = Analysis(deployment.simulate())
    summary = analysis.summary(deployment.model, deployment.device, 1)
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
    section = run_answer(outcome.summary())
    assert len(section.warnings) == 2  # no band is narrow: op times alone set the makespan
    assert "orca is overloaded: its queue grows" in section.warnings[0]
    where = "Those over all its 300 requests are in summary.json (scenarios.orca:"
    assert where in section.warnings[0]
    rows = [row[0] for row in section.table.rows]
    assert "latency, median" not in rows
    assert "time between tokens, median" in rows


@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        ({"kind": "poisson", "rate": 0.05}, "the arrivals set makespan and throughput"),
        ({"kind": "closed_loop", "clients": 4}, "they keep the arrivals as they were"),
    ],
)
def test_a_band_that_is_narrow_because_of_its_arrivals_says_so(
    arrivals: dict[str, object], reason: str
) -> None:
    changes = ["workload.requests=20", f"workload.arrivals={json.dumps(arrivals)}"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    (note,) = run_answer(outcome.summary()).warnings
    assert note.startswith("orca, sarathi: the 90 % bands") and reason in note


def test_a_ratio_of_latencies_of_an_overloaded_run_is_no_number() -> None:
    changes = ["workload.requests=300", "workload.arrivals.rate=4"]
    ratio = "{metric: latency_s.p50, over: [orca, sarathi], paper: 1.5}"
    times = "{metric: makespan_s, over: [orca, sarathi]}"
    changes += [f"compare.latency={ratio}", f"compare.makespan={times}"]
    table = ratios_table(simulate_all(load_experiment("first_experiment", changes)).summary())
    assert table is not None
    rows = {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert rows["latency"]["predicted"] == "overloaded"
    assert float(rows["makespan"]["predicted"]) > 0
    assert rows["latency"]["difference"] == ""
