"""Data-parallel attention from a configuration to a result: GPUs, memory, times of a step, tables,
figures, and the engines' own commands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.experiments.report.timeline import Window, stage_slices
from sarathi_sim.experiments.run.compare import explanation
from sarathi_sim.experiments.run.uncertainty import uncertainty
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Sequence
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.views.explain import breakdown
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import deployed

CONFIG = """\
name: ranks
model: qwen3-30b-a3b
device: h100-80g-sxm
stack: vllm
workload:
  requests: 60
  lengths: {kind: random, prompt: 800, decode: 60, range_ratio: 0.2, tool: sglang}
  arrivals: {kind: poisson, rate: 60}
cluster:
  {tp: 1, dp: 4, replicas: 2, expert_parallel: true, moe_a2a_backend: nccl, max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 16}
scenarios: {it: {}}
"""


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return deployed(CONFIG)["it"]


@pytest.fixture(scope="module")
def records(deployment: Deployment) -> Records:
    return deployment.simulate()


def test_a_run_counts_the_gpus_of_all_ranks(deployment: Deployment, records: Records) -> None:
    analysis = Analysis(records)
    summary = deployment.summary(analysis)
    assert summary["gpus"] == 8 and deployment.scenario.cluster.gpus == 4
    assert summary["finished"] == 60 and len(records.replicas) == 8
    assert (np.bincount(records.replica, minlength=8) > 0).all()
    assert summary["ledger_s"]["slowest_rank"] > 0
    assert summary["ledger_s"]["wall"] == 8 * records.end_s
    assert any(
        note.startswith("memory: ") and "KV blocks per rank" in note for note in deployment.notes
    )


def test_a_step_takes_the_experts_of_all_ranks(deployment: Deployment) -> None:
    """Two ranks prefill, one decodes, one has nothing; each at its own tokens, beside experts at
    those of all and an exchange at those of the first."""
    one, other = (Sequence(i, 400, 9, 0) for i in range(2))
    step = [
        Batch(0, ((one, 300, 0),), 300, 0, 0, 0),
        Batch(0, ((other, 200, 100),), 200, 5, 1000, 300),
        Batch(0, (), 0, 7, 3500, 600),
        None,
    ]
    ranks, whole = deployment.step_predictor(step)
    cost = deployment.predictor.cost
    assert deployment.step_predictor.cost == cost
    host = replace(host_of(deployment.scenario.engine), launch_layer_s=0.0)
    predict = deployment._predictor(deployment.ops, host)
    shared = cost.op_s(MOE, 300 + 205 + 7) + cost.op_s(ALL_TO_ALL, 300)
    for batch, (layer_s, first_s, last_s, _) in zip(step[:3], ranks, strict=False):
        assert batch is not None
        alone = predict(batch)
        own = cost.op_s(MOE, batch.num_tokens) + cost.op_s(ALL_TO_ALL, batch.num_tokens)
        expected = alone[0] - own + shared
        if batch.chunks:
            expected = max(expected, cost.host.launch_layer_s)
        assert layer_s == pytest.approx(float(expected), abs=5e-9)
        assert (first_s, last_s) == pytest.approx(alone[1:3])
    assert whole == tuple(max(part) for part in zip(*ranks[:3], strict=True))


def test_a_batch_takes_as_long_among_others(deployment: Deployment) -> None:
    batches = [Batch(0, (), 0, n, 100 * n, 150) for n in (1, 3, 16, 40)]
    sequence = Sequence(0, 400, 9, 0)
    batches.append(Batch(0, ((sequence, 30, 10),), 30, 2, 60, 40))
    found = deployment.predictor.of_each([*batches, None])
    assert found == [*map(deployment.predictor, batches), (0.0,) * 4]


def test_the_breakdown_of_a_rank_has_the_experts_of_all(
    deployment: Deployment, records: Records
) -> None:
    log = records.replicas[0]
    used = breakdown(log, deployment.predictor)
    assert np.array_equal(used[MOE].size[:, 0], log.iterations["all_tokens"])
    assert np.array_equal(used[ALL_TO_ALL].size[:, 0], log.iterations["most_tokens"])
    total = sum(
        use.time_s for op, use in used.items() if op not in ("embedding", "lm_head", "send_recv")
    )
    assert total == pytest.approx(log.iterations["layer_s"], abs=2e-9)


def test_explanation_and_band_close(deployment: Deployment, records: Records) -> None:
    analysis = Analysis(records)
    found = explanation(analysis, deployment.predictor)
    assert sum(found.stages.values()) == found.wall and found.stages["slowest_rank"] > 0
    assert sum(found.latency.values()) == found.mean_latency
    band = uncertainty(deployment, analysis)
    assert band is not None
    low, high = np.quantile(band.slower, [0.05, 0.95])
    assert low < 1.05 and high > 0.95


def test_ranks_are_rows_of_their_own_and_wait_before_the_next_step(records: Records) -> None:
    slices = stage_slices(Analysis(records), Window(0.0, records.end_s))
    assert slices[5].called == "1 rank 1"
    for one, log in zip(slices, records.replicas, strict=True):
        assert log.waited_s is not None
        assert np.array_equal(one.finish, log.iterations["finish_s"] - log.waited_s)
        assert np.array_equal(one.bubble_start[1:], one.finish[:-1])
        gap = one.start - one.bubble_start
        assert (one.bubble_s[1:] <= gap[1:]).all()
