"""KV blocks by the engines' own formulas: against two real servers, and each rule by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.load.engine_memory import (
    CapacityError,
    EngineMemory,
    Step,
    engine_memory,
    stage_weight_bytes,
)

LLAMA_8B, LLAMA_70B = load_model("llama-3-8b"), load_model("llama-3-70b")
RTX_4090, A100_40G = load_device("rtx-4090"), load_device("a100-40g-sxm")
VLLM = "gpu_memory_utilization"
ITERATION = Step(tokens=2048, sequences=256)


def memory(setting: str = VLLM, share: float = 0.9, step: Step = ITERATION) -> EngineMemory:
    return engine_memory(LLAMA_8B, RTX_4090, 1, (32,), 16, setting, share, step)


def test_two_real_servers() -> None:
    """Llama-3.1-8B on an RTX 4090, vLLM 0.19 (LLMServingSim's run): 2,588 blocks of 16.
    Llama-3.3-70B, TP 4 and PP 2 on A100s of 40 GB, vLLM 0.8.3 (surajssd/llm-k8s): 25,588."""
    assert memory().num_blocks == pytest.approx(2588, rel=0.05)
    sharded = engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, ITERATION)
    assert sharded.num_blocks == pytest.approx(25588, rel=0.05)
    assert sharded.assumed == ("activations", "outside of torch")


def test_what_the_engine_printed_leaves_nothing_to_assume() -> None:
    given = memory(step=replace(ITERATION, activation_bytes=1e9, non_torch_bytes=2e8))
    weights = stage_weight_bytes(LLAMA_8B, (32,), 0)
    assert given.kv_bytes == pytest.approx(0.9 * 25_250_627_584 - weights - 1.2e9)
    assert given.block_bytes == 16 * LLAMA_8B.kv_bytes_per_token()
    assert given.num_blocks == given.kv_bytes // given.block_bytes
    assert given.assumed == () and "assumed" not in given.text()
    assert "activations 1.26 GB (assumed)" in memory().text()


def test_every_part_of_the_memory_says_where_it_comes_from() -> None:
    """The parts fill the GPU, and CUDA graphs count where an engine measures them beforehand."""
    sharded = engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, ITERATION)
    alone, graphs = memory(), memory(step=replace(ITERATION, cuda_graph_bytes=4e8))
    for found in (alone, sharded, graphs, memory("mem_fraction_static", 0.85)):
        (whole, total, _), *parts = found.parts()
        assert whole == "memory" and sum(size for _, size, _ in parts) == pytest.approx(total)
        hows = {name: how.split(":")[0].split()[0] for name, _, how in found.parts()}
        assert (hows["weights"], hows["KV cache"]) == ("computed", "computed")
        assert (hows["memory"], hows["CUDA context"]) == ("measured", "assumed")
        assert ("NCCL buffers" in hows) == (found is sharded)
    nccl = {name: size for name, size, _ in sharded.parts()}["NCCL buffers"]
    assert nccl == pytest.approx((2.10 - 0.14) * 2**30)
    assert alone.num_blocks - graphs.num_blocks in (190, 191), "0.4 GB less"
    assert "CUDA graphs 0.40 GB (given)" in graphs.text() and "GB left over" in alone.text()


def test_each_engine_takes_its_share_of_something_else() -> None:
    step = replace(ITERATION, activation_bytes=1e9, non_torch_bytes=2e8)
    total, weights = 25_250_627_584, stage_weight_bytes(LLAMA_8B, (32,), 0)
    sglang = memory("mem_fraction_static", 0.85, step)
    assert sglang.kv_bytes == pytest.approx(0.85 * (total - 2e8) - weights)
    trtllm = memory("free_gpu_memory_fraction", 0.9, step)
    assert trtllm.kv_bytes == pytest.approx(0.9 * (total - weights - 1.2e9))


def test_the_fullest_stage_counts() -> None:
    """The last one has the LM head and samples; a longer one holds more of every block."""
    even = engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, ITERATION)
    uneven = engine_memory(LLAMA_70B, A100_40G, 4, (42, 38), 16, VLLM, 0.9, ITERATION)
    assert even.activation_bytes > 256 * LLAMA_70B.vocab_size * 38
    assert uneven.block_bytes == 2 * 16 * 42 * 2 * 128 * 2 > even.block_bytes
    assert uneven.activation_bytes < even.activation_bytes, "its first stage does not sample"
    assert uneven.num_blocks < even.num_blocks


def test_more_tokens_a_step_leave_fewer_blocks() -> None:
    blocks = [memory(step=Step(tokens, 256)).num_blocks for tokens in (2048, 8192, 32768)]
    assert blocks == sorted(blocks, reverse=True) and len(set(blocks)) == 3


def test_memory_that_no_driver_reported_is_assumed() -> None:
    plain = replace(RTX_4090, reported_bytes=None)
    found = engine_memory(LLAMA_8B, plain, 1, (32,), 16, VLLM, 0.9, ITERATION)
    assert found.total_bytes == 24e9 and "memory" in found.assumed
    assert "24.00 GB (assumed: the data sheet's)" in found.text()


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(CapacityError, match=r"llama-3-70b leaves no room.* weights 141.* another"):
        engine_memory(LLAMA_70B, RTX_4090, 1, (80,), 16, VLLM, 0.9, ITERATION)
