"""A configuration whose model is a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.profiler.facts.formats import MOE_BYTES
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE, OPS
from sarathi_sim.simulator.op_times.breakdown import breakdown
from tests.experiments.small_config import message

TEXT = """\
name: mixtures
seed: 7
model: qwen3-30b-a3b
device: h100-80g-sxm
stack: vllm
dtype: fp8
workload: {requests: 8, lengths: {kind: uniform, min: 200, max: 600}, pd_ratio: 5}
cluster: {tp: 2, max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 1024, max_num_seqs: 16}
scenarios:
  divided: {}
  sent: {cluster: {expert_parallel: true, moe_a2a_backend: nccl}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mixtures.yaml"
    path.write_text(TEXT)
    return path


def test_mixtures_run_and_say_where_their_experts_times_come_from(config: Path) -> None:
    runs = deploy_all(load_experiment(config, ()))
    run = runs["divided"]
    (note,) = (note for note in run.notes if note.startswith("op times: "))
    assert MOE in note
    mark = str(run.ops.meta.environment[MOE])
    assert mark.startswith("measured: fp8 experts of vllm 0.24.0") and "tp 2 x ep 1" in mark
    (log,) = run.simulate().replicas
    used = breakdown(log, run.predictor)
    assert used[MOE].time_s.sum() > used["moe_router"].time_s.sum() > 0
    assert ALL_TO_ALL not in used and run.ops.reduces == OPS["all_reduce"].calls
    sent = runs["sent"]
    assert sent.bundle_name.endswith("qwen3-30b-a3b/tp2-vllm-fp8-ep-a2a-nccl")
    assert run.kv_capacity == sent.kv_capacity
    assert ALL_TO_ALL in sent.ops.linear and sent.ops.reduces == 1
    marks = {op: str(mark) for op, mark in sent.ops.meta.environment.items()}
    assert "NCCL" in marks[ALL_TO_ALL] and "dispatch and combine" in marks[ALL_TO_ALL]
    assert "tp 1 x ep 2" in marks[MOE]
    parts, whole = (one.predictor.cost.layer_parts(64) for one in (sent, run))
    assert parts["all_reduce"] == whole["all_reduce"] / 2 and parts[ALL_TO_ALL] > 0


def test_experts_count_in_the_memory_by_their_own_format(config: Path) -> None:
    model = load_model("qwen3-30b-a3b")
    routed, matrices, plain = model.parameters_in(tp=2)
    tables = 2 * 2 * model.vocab_size * model.hidden_size
    for assignments, dtype in (((), "fp8"), (("moe_dtype=bf16",), "bf16")):
        run = deploy_all(load_experiment(config, assignments))["divided"]
        memory = run.memory
        expected = (MOE_BYTES[dtype] * routed + matrices + 2 * plain + tables) / 2
        assert memory is not None and memory.weight_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (("model=llama-3.1-8b",), "cluster.expert_parallel: value true: model llama-3.1-8b has no"),
        (
            ("cluster.moe_a2a_backend=nccl",),
            "cluster.moe_a2a_backend: value 'nccl': needs cluster.expert_parallel: true",
        ),
        (("cluster.dp=2",), "cluster.dp: value 2: must be 1: not modelled: data-parallel"),
        (("expert_distribution=even",), "expert_distribution: value 'even': "),
        (
            ("stack=null", "dtype=null", "moe_dtype=fp8"),
            "moe_dtype: value 'fp8': needs stack: sglang, trtllm, vllm",
        ),
    ],
)
def test_mistakes(config: Path, assignments: tuple[str, ...], expected: str) -> None:
    assert expected in message(config, *assignments)
