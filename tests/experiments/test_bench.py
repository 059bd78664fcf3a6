"""`python -m tests.bench` times two simulations of one and the same system."""

from __future__ import annotations

import json

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.storage.strict import UserError
from tests.bench import main
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


@pytest.mark.slow
def test_paged_memory_is_compared_with_reserved_memory() -> None:
    """By default, beside the demo: with room for all, with preemption and with prefix caching."""
    changes = ("workload.requests=24", "scenarios.vllm_preempting.kv_cache.num_blocks=200")
    experiment = load_experiment("bench_paged", changes)
    pool = deploy_all(experiment)["vllm_preempting"].simulate().replicas[0].pool
    assert pool is not None and len(pool.events), "nobody is preempted"
    numbers = benchmark([experiment], 1, lambda *_: None)
    paged = ["vllm", "vllm_preempting", "vllm_caching"]
    assert list(numbers["oracle_s"]) == ["sarathi_reserved", *paged]
    assert list(numbers["over_reserved"]) == paged
    for name in paged:
        least, most = numbers["over_reserved_range"][name]
        assert 0 < least <= numbers["over_reserved"][name] <= most
        assert list(numbers["iteration_us"][name]) == ["8", "128"]


@pytest.mark.slow
def test_the_printed_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the demo's two scenarios."""
    options = ["--config", "gpt3_pp", "--set", "workload.requests=60", "--repeats", "1"]
    assert main([*options, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    for key in ("loop_s", "oracle_s", "speedup_vs_oracle", "loop_iteration_us"):
        assert set(numbers[key]) == {"orca", "sarathi"}
        assert all(value > 0 for value in numbers[key].values())
    assert numbers["peak_rss_mb"] > 0
    for policy, costs in numbers["iteration_us"].items():
        assert list(costs) == ["8", "128"], policy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--set", "cluster.pp=0"], "--set cluster.pp: value 0: must be at least"),
        (["--config", "absent.yaml"], "absent.yaml: no such file"),
        (["--repeats", "0"], "--repeats: must be at least 1"),
    ],
)
def test_what_the_user_can_correct(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err
