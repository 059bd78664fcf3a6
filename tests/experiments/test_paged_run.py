"""A run with paged memory, from its configuration to its result."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import run_experiment
from tests.experiments.small_config import deployed, message

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

pytestmark = pytest.mark.usefixtures("few_trees")


def test_preemption_is_in_tables_figures_and_summary(tmp_path: Path) -> None:
    out = tmp_path / "result"
    run_experiment(load_experiment(yaml.safe_load(PAGED)), out)
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


def test_prefix_cache_hits_are_in_tables_and_summary(tmp_path: Path) -> None:
    """Of a system prompt of 170 tokens ten blocks are whole; all but the first find them."""
    out = tmp_path / "result"
    assignments = ["workload.system_prompts={all: {share: 1, tokens: 170}}", "scenarios={a: {}}"]
    outcome = run_experiment(
        load_experiment(yaml.safe_load(PAGED), assignments), out, figures=False
    )
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


def test_a_pool_takes_its_depth_and_blocks_from_the_layout() -> None:
    deployments = deployed(PAGED)
    batching = {name: each.scenario.batching for name, each in deployments.items()}
    assert [each.max_in_flight for each in batching.values()] == [1, 1, 2]
    kept = [each.max_batch for each in batching.values()]
    assert kept == [16, 16, 16], "a scenario keeps the keys it does not change"
    assert deployments["few"].kv_capacity == 119 * 16, "one block is the null block"


def test_blocks_by_the_engines_formula(tmp_path: Path) -> None:
    """Given shares and parts count; what is assumed is in the notes and in the summary."""
    runs = deployed(PAGED)
    found = runs["enough"]
    assert found.memory is not None and found.scenario.kv_cache is not None
    assert found.scenario.kv_cache.num_blocks == found.memory.num_blocks
    note = next(note for note in found.notes if "KV blocks" in note)
    assert "gpu_memory_utilization 0.9 of 84.99 GB" in note and "(assumed)" in note
    less = "scenarios={a: {kv_cache: {gpu_memory_utilization: 0.5, activation_bytes: 0.0}}}"
    smaller = deployed(PAGED, less)["a"]
    assert smaller.memory is not None and smaller.memory.num_blocks < found.memory.num_blocks
    assert smaller.memory.assumed == ("outside of torch",)
    assert not [note for note in runs["few"].notes if "KV blocks" in note], "those were given"
    short = load_experiment(yaml.safe_load(PAGED), ["workload.requests=2"])
    run_experiment(short, tmp_path / "result", figures=False)
    summary = json.loads((tmp_path / "result" / "summary.json").read_text())["scenarios"]
    assert summary["few"]["kv_cache"]["num_blocks"] == 120
    assert summary["few"]["kv_cache"]["formula_blocks"] == found.memory.num_blocks
    assert summary["enough"]["kv_cache"]["assumed"] == ["activations", "outside of torch"]


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("kv_cache.mem_fraction_static=0.8", "kv_cache.mem_fraction_static: value 0.8: must be le"),
        ("kv_cache.mem_fraction_static=0.8", "vllm takes kv_cache.gpu_memory_utilization"),
        ("kv_cache.gpu_memory_utilization=1.5", "kv_cache.gpu_memory_utilization"),
        ("kv_cache.gpu_memory_utilization=0.15", "kv_cache: llama-3-8b leaves no room"),
        ("kv_cache.activation_bytes=-1", "kv_cache.activation_bytes"),
        ("kv_cache.num_blocks=100000000", "kv_cache.num_blocks: value 100000000: must be at most"),
        ("kv_cache.block_size=0", "kv_cache.block_size"),
        ("batching.max_batch=4", "batching.max_batch: value 4: must be left out: vllm decides"),
        ("batching.formation=lazy", "batching.formation: value 'lazy': must be left out"),
        ("policy.watermark=1.5", "watermark must lie between 0 and 1, not 1.5"),
        ("policy={name: sarathi}", "sarathi reserves memory for whole requests"),
        # What an engine refuses: TensorRT-LLM, a prompt that neither fits nor is cut ...
        (
            "scenarios.few.policy={name: trtllm, max_batch_size: 8, max_num_tokens: 100}",
            "scenarios.few.policy.max_num_tokens: value 100: must be at least 300, the longest "
            "prompt, unless enable_chunked_prefill is true",
        ),
        (
            "scenarios.few.policy={name: trtllm, max_batch_size: 8, max_num_tokens: 8, "
            "enable_chunked_prefill: true}",
            "scenarios.few.policy.max_num_tokens: value 8: must be at least 16, kv_cache.block_siz",
        ),
        (  # ... and vLLM, whatever the prompts.
            "scenarios.few.policy={enable_chunked_prefill: false}",
            "policy.max_num_batched_tokens: value 512: must be at least 1024 (cluster.max_length) "
            "without enable_chunked_prefill",
        ),
    ],
)
def test_mistakes(assignment: str, text: str) -> None:
    assert text in message(PAGED, assignment)
