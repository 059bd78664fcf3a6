"""States of recurrent layers in the memory: a pool of them (SGLang), or blocks (vLLM)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import deployed, message

MODEL = Path(__file__).with_name("qwen3_6_27b.json")
"""The layers of Qwen3.6-27B: 48 recurrent ones, whose states are 153.9 MB, and 16 others."""


def tree(engine: str, device: str, policy: str, share: str, more: str = "") -> str:
    return f"""
name: states
model: {MODEL}
device: {device}
stack: {engine}
{more}
workload: {{requests: 300, lengths: {{kind: fixed, prompt: 512, decode: 64}}}}
cluster: {{max_length: 4096}}
policy: {{name: {engine}, {policy}}}
kv_cache: {{{share}}}
"""


def found(text: str, *assignments: str) -> Deployment:
    (one,) = deployed(text, *assignments).values()
    return one


@pytest.mark.parametrize(
    ("assignments", "running"),
    [
        ((), 40),
        (("policy.disable_overlap_schedule=true",), 67),
        (("kv_cache.prefix_caching=false",), 203),
        (("policy.max_running_requests=24",), 24),
        # 0.2 of 1.2 parts of 66.2 GB in place of 0.9 of 1.9: 71 states.
        (("policy.version=0.5.3",), 14),
    ],
)
def test_sglang_runs_as_many_requests_as_its_pool_of_states_allows(
    assignments: tuple[str, ...], running: int
) -> None:
    """By hand: 0.9/1.9 of 0.8 x 150.0 - 53.8 GB hold 203 states; 3 a request, and 2 more with
    overlap. (SGLang 0.5.16 served 6,322 tokens/s so, at 39.3 ms a token.)"""
    text = tree("sglang", "h200-sxm", "chunked_prefill_size: 8192", "mem_fraction_static: 0.8")
    one = found(text, *assignments)
    policy: dict[str, Any] = one.scenario.policy.described()
    assert policy["max_running_requests"] == one.scenario.batching.max_batch == running
    (note,) = (note for note in one.notes if note.startswith("recurrent layers"))
    assert "states take 153.9 MB of a GPU" in note and f"{running} run at once" in note
    assert one.memory is not None and one.memory.states is not None
    parts = {name: size for name, size, _ in one.memory.parts()}
    assert parts["states"] == one.memory.states * one.memory.state_bytes
    rows = Analysis(one.simulate()).records.replicas[0].iterations
    assert (rows["decodes"] + rows["chunks"]).max() <= running


VLLM = tree(
    *("vllm", "h100-80g-sxm", "max_num_batched_tokens: 8192, max_num_seqs: 1024"),
    *("gpu_memory_utilization: 0.95", "dtype: fp8_block"),
)


def test_vllm_does_not_start_with_more_sequences_than_blocks_of_states() -> None:
    """vLLM 0.2x said 856 for the checkpoint with its encoder (vllm-project/recipes, pull 551)."""
    said = re.search(r"max_num_seqs: value 1024: must be at most (\d+): each needs", message(VLLM))
    assert said is not None and int(said[1]) == pytest.approx(856, rel=0.1)
    most = f"policy.max_num_seqs={said[1]}"
    assert found(VLLM, most).scenario.batching.max_batch == int(said[1])
    assert found(VLLM, 'policy.version="0.16"').scenario.batching.max_batch == 1024


def test_states_are_blocks_of_every_running_sequence() -> None:
    """512 + 64 tokens are 36 blocks of 16; the states of a sequence are 147 more: of 1,000 blocks
    five sequences have their own. One of the longest length has room for its states, too."""
    one = found(VLLM, "policy.max_num_seqs=64", "kv_cache.num_blocks=1000")
    assert one.memory is not None and one.memory.state_blocks == 147
    records = one.simulate()
    rows = records.replicas[0].iterations
    assert (rows["decodes"] + rows["chunks"]).max() == 5 == 999 // (147 + 36)
    assert Analysis(records).requests["finish_s"].notna().all()
    whole = found(VLLM, "policy.max_num_seqs=64", "cluster.max_length=262144")
    assert whole.kv_capacity > 262144 + 147 * 16
