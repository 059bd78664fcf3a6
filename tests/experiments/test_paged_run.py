"""A run with paged memory, from its configuration to its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all, run_experiment
from tests.experiments.small_config import message

PAGED = """\
name: paged
model: llama-3-8b
device: a100-80g-sxm
workload:
  requests: 40
  lengths: {kind: uniform, min: 200, max: 600}
  pd_ratio: 1
cluster: {max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 16}
scenarios:
  enough: {}
  few: {kv_cache: {num_blocks: 120}}
  ahead: {policy: {name: vllm, async_scheduling: true}, kv_cache: {prefix_caching: false}}
"""

Write = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("few_trees")


def test_preemption_is_in_tables_figures_and_summary(write_config: Write, tmp_path: Path) -> None:
    out = tmp_path / "result"
    run_experiment(load_experiment(write_config(PAGED)), out)
    summary = json.loads((out / "summary.json").read_text())["scenarios"]
    assert summary["enough"]["preemptions"] == 0 == summary["enough"]["recomputed_share"]
    requests = pd.read_parquet(out / "few" / "requests.parquet")
    assert requests["preemptions"].sum() == summary["few"]["preemptions"] > 0
    iterations = pd.read_parquet(out / "few" / "iterations.parquet")
    computed = (iterations["prefill_tokens"] + iterations["decodes"]).sum()
    once = (requests["prompt_tokens"] + requests["output_tokens"] - 1).sum()
    assert computed == once + requests["recomputed_tokens"].sum()
    assert summary["few"]["recomputed_share"] == requests["recomputed_tokens"].sum() / computed
    assert iterations["kv_tokens"].max() <= 119 * 16
    assert (out / "figures" / "occupancy.png").is_file()
    # A resolved configuration gives the same run again.
    again = tmp_path / "again"
    run_experiment(load_experiment(out / "config.yaml"), again)
    assert (again / "few" / "requests.parquet").read_bytes() == (
        out / "few" / "requests.parquet"
    ).read_bytes()


def test_prefix_cache_hits_are_in_tables_and_summary(write_config: Write, tmp_path: Path) -> None:
    """Of a system prompt of 170 tokens ten blocks are whole; all but the first find them."""
    out = tmp_path / "result"
    assignments = ["workload.system_prompts={all: {share: 1, tokens: 170}}", "scenarios={a: {}}"]
    outcome = run_experiment(load_experiment(write_config(PAGED), assignments), out, figures=False)
    summary = json.loads((out / "summary.json").read_text())["scenarios"]["a"]
    requests = pd.read_parquet(out / "a" / "requests.parquet")
    assert requests["hit_tokens"].tolist() == [0] + 39 * [160]
    assert summary["hit_rate"] == 39 * 160 / requests["prompt_tokens"].sum()
    # What was found in the cache takes no FLOPs.
    model, device = (getattr(outcome.runs["a"].deployment, name) for name in ("model", "device"))
    flops = 0.0
    for _, r in requests.iterrows():
        computed = int(r["prompt_tokens"] + r["output_tokens"] - 1 - r["hit_tokens"])
        flops += computed * model.linear_flops_per_token()
        pairs = computed * r["hit_tokens"] + computed * (computed + 1) / 2
        flops += 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        flops += int(r["output_tokens"]) * model.lm_head_flops_per_token()
    expected = flops / (summary["makespan_s"] * device.peak_flops)
    assert summary["mfu"] == pytest.approx(expected, rel=1e-12)


def test_a_pool_takes_its_depth_and_blocks_from_the_layout(write_config: Write) -> None:
    deployments = deploy_all(load_experiment(write_config(PAGED)))
    batching = {name: each.scenario.batching for name, each in deployments.items()}
    assert [each.max_in_flight for each in batching.values()] == [1, 1, 2]
    assert [each.max_batch for each in batching.values()] == [16, 16, 16], (
        "a scenario keeps the keys it does not change"
    )
    assert deployments["few"].kv_capacity == 119 * 16, "one block is the null block"


def test_blocks_by_the_engines_formula(write_config: Write, tmp_path: Path) -> None:
    """Given shares and parts count; what is assumed is in the notes and in the summary."""
    path = write_config(PAGED)
    found = deploy_all(load_experiment(path))["enough"]
    assert found.memory is not None and found.scenario.kv_cache is not None
    assert found.scenario.kv_cache.num_blocks == found.memory.num_blocks
    note = next(note for note in found.notes if "KV blocks" in note)
    assert "gpu_memory_utilization 0.9 of 84.99 GB" in note and "(assumed)" in note
    less = "scenarios={a: {kv_cache: {gpu_memory_utilization: 0.5, activation_bytes: 0.0}}}"
    smaller = deploy_all(load_experiment(path, [less]))["a"]
    assert smaller.memory is not None and smaller.memory.num_blocks < found.memory.num_blocks
    assert smaller.memory.assumed == ("outside of torch",)
    few = deploy_all(load_experiment(path))["few"]
    assert not [note for note in few.notes if "KV blocks" in note], "those were given"
    out = tmp_path / "result"
    run_experiment(load_experiment(path, ["workload.requests=2"]), out, figures=False)
    summary = json.loads((out / "summary.json").read_text())["scenarios"]
    assert summary["few"]["kv_cache"]["num_blocks"] == 120
    assert summary["few"]["kv_cache"]["formula_blocks"] == found.memory.num_blocks
    assert summary["enough"]["kv_cache"]["assumed"] == ["activations", "outside of torch"]


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        (
            "kv_cache.mem_fraction_static=0.8",
            "kv_cache.mem_fraction_static: value 0.8: must be left out: vllm takes "
            "kv_cache.gpu_memory_utilization",
        ),
        ("kv_cache.gpu_memory_utilization=1.5", "kv_cache.gpu_memory_utilization"),
        ("kv_cache.gpu_memory_utilization=0.15", "kv_cache: llama-3-8b leaves no room"),
        ("kv_cache.activation_bytes=-1", "kv_cache.activation_bytes"),
        ("kv_cache.num_blocks=100000000", "kv_cache.num_blocks: value 100000000: must be at most"),
        ("kv_cache.block_size=0", "kv_cache.block_size"),
        ("batching.max_batch=4", "batching.max_batch: value 4: must be left out: vllm decides"),
        ("batching.formation=lazy", "batching.formation: value 'lazy': must be left out"),
        ("policy.watermark=1.5", "watermark must lie between 0 and 1, not 1.5"),
    ],
)
def test_mistakes(write_config: Write, assignment: str, text: str) -> None:
    assert text in message(write_config(PAGED), assignment)


def test_paged_memory_is_not_for_policies_that_reserve(write_config: Write) -> None:
    with pytest.raises(ConfigError, match="sarathi reserves memory for whole requests"):
        deploy_all(
            load_experiment(
                write_config(PAGED),
                ["scenarios={a: {kv_cache: {block_size: 8}}}", "policy={name: sarathi}"],
            )
        )


TRTLLM = "policy: {name: trtllm, max_batch_size: 8, max_num_tokens: "
REFUSED = {
    "scenarios.few.policy.max_num_tokens: value 100: must be at least 300, the longest prompt, "
    "unless enable_chunked_prefill is true": TRTLLM + "100}",
    "scenarios.few.policy.max_num_tokens: value 8: must be at least 16, kv_cache.block_size": TRTLLM
    + "8, enable_chunked_prefill: true}",
    "policy.max_num_batched_tokens: value 512: must be at least 1024 (cluster.max_length) without "
    "enable_chunked_prefill": "policy: {enable_chunked_prefill: false}",
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_an_engine_refuses_is_refused(write_config: Write, expected: str) -> None:
    """TensorRT-LLM, a prompt that neither fits nor is cut; vLLM, whatever the prompts."""
    text = PAGED.replace("few: {", f"few: {{{REFUSED[expected]}, ")
    experiment = load_experiment(write_config(text))
    with pytest.raises(ConfigError) as error:
        deploy_all(experiment)
    assert expected in str(error.value)
