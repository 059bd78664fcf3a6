"""`python -m tests.bench` times two simulations of one and the same system."""

from __future__ import annotations

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.profiler.storage.strict import UserError
from tests.benchmarks.timing import _textbook, benchmark
from tests.experiments.small_config import deployed
from tests.simulator.oracle import assert_bitwise_equal

SWITCHES = (
    "workload.requests=40",
    "workload.arrivals={kind: poisson, rate: 2}",
    "cluster.replicas=2",
    "cluster.router=least_tokens",
    "batching.formation=lazy",
    "batching.micro_batches=free",
    "engine.send=blocking",
    "engine.turnaround_s=0.01",
    "engine.jitter=0.1",
)


@pytest.fixture(autouse=True)
def few_sizes(few_trees: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 512, or 4,096 tokens a sequence, take seconds."""
    monkeypatch.setattr("tests.benchmarks.timing.BATCHES", (8, 128))
    monkeypatch.setattr("tests.benchmarks.timing.OUTPUT", 40)


def test_both_sides_heed_every_switch() -> None:
    deployment = deployed("gpt3_pp", *SWITCHES)["orca_pp"]
    assert_bitwise_equal(deployment.simulate(), _textbook(deployment))


@pytest.mark.slow
def test_paged_memory_on_both_sides() -> None:
    """Preemption and the prefix cache, at two stages."""
    changes = ("workload.requests=60", "cluster.pp=2", "kv_cache.num_blocks=700")
    deployment = deployed("vllm_llama3_8b", *changes)["vllm"]
    records = deployment.simulate()
    assert records.replicas[0].pool is not None and len(records.replicas[0].pool.events)
    assert_bitwise_equal(records, _textbook(deployment))


def test_what_no_clock_sees_cannot_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clocks count whole ticks."""
    monkeypatch.setattr("tests.benchmarks.timing.BATCHES", ())
    monkeypatch.setattr("tests.benchmarks.timing.time.process_time", lambda: 0.25)
    with pytest.raises(UserError, match="larger workload"):
        benchmark([load_experiment("gpt3_pp", ("workload.requests=2",))], 1, lambda *_: None)
