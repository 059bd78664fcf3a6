"""How fast the event loop and what follows it are. Not collected by default; run it with

    python -m pytest tests/benchmarks/bench_loop.py --benchmark-only -s

A speed-up that changes what happens is none, so every benchmark asserts how much happened.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import pytest

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.op_times.group_times import GroupPredictor
from sarathi_sim.simulator.views.metrics import Analysis
from tests.benchmarks.timing import _fast, _textbook

REQUESTS = 2000
# Requests finished and tokens processed follow from the workload alone; iterations from the system.
ITERATIONS = {"orca_pp": 16445, "sarathi_pp": 20901, "orca_tp": 37870}


@lru_cache
def deployed(scenario: str) -> Deployment:
    experiment = load_experiment("gpt3_pp", [f"workload.requests={REQUESTS}"])
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    _fast(deployment)  # tabulates what the run asks for
    return deployment


def check(records: Records, scenario: str) -> None:
    assert sum(log.num_iterations for log in records.replicas) == ITERATIONS[scenario]
    tokens = sum(
        log.iterations["prefill_tokens"].sum() + log.iterations["decodes"].sum()
        for log in records.replicas
    )
    assert tokens == (records.prompt_tokens + records.output_tokens - 1).sum()


@pytest.mark.parametrize("scenario", ["orca_pp", "sarathi_pp"])
def test_loop_against_textbook(benchmark: Any, scenario: str) -> None:
    deployment = deployed(scenario)
    records = benchmark(_fast, deployment)
    check(records, scenario)
    began = time.perf_counter()
    check(_textbook(deployment), scenario)
    ratio = (time.perf_counter() - began) / benchmark.stats.stats.median
    benchmark.extra_info["times_faster_than_textbook"] = ratio


def test_loop_without_a_pipeline(benchmark: Any) -> None:
    check(benchmark(_fast, deployed("orca_tp")), "orca_tp")


def test_a_step_of_64_ranks(benchmark: Any) -> None:
    """A rank's step as a multiple of an iteration of the same batch on a replica of its own."""
    deployment = deployed("orca_tp")
    times: Any = GroupPredictor(deployment.predictor.cost, deployment.predictor)

    def served(ranks: int) -> Records:
        requests = [Request(i, 0.0, 16, 1500, 1500) for i in range(32 * ranks)]
        pools = [
            Pool(
                Vllm(2048, 64, async_scheduling=False),
                Blocks(4000, 16),
                max_in_flight=1,
                max_length=2048,
            )
            for _ in range(ranks)
        ]
        predict = deployment.predictor if ranks == 1 else times
        return simulate(requests, pools, predict, deployment.layers, ranks=ranks)

    records = benchmark(served, 64)
    assert [log.num_iterations for log in records.replicas] == [1500] * 64
    began = time.perf_counter()
    assert served(1).replicas[0].num_iterations == 1500
    each = (time.perf_counter() - began, benchmark.stats.stats.median / 64)
    benchmark.extra_info["times_an_iteration"] = each[1] / each[0]


@pytest.mark.parametrize("scenario", ["orca_pp", "sarathi_pp"])
def test_stage_traces(benchmark: Any, scenario: str) -> None:
    deployment = deployed(scenario)
    records = _fast(deployment)
    times = benchmark(stage_times, records.replicas[0])
    assert times.start.shape == (ITERATIONS[scenario], 8)


def test_summary(benchmark: Any) -> None:
    deployment = deployed("sarathi_pp")
    records = _fast(deployment)
    summary = benchmark(lambda: Analysis(records).summary(deployment.model, deployment.device, 8))
    assert summary["iterations"] == ITERATIONS["sarathi_pp"]
