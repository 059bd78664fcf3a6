"""Memory, windows and what-if workloads, by hand and against two real servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import WEIGHT_BYTES, Kernels, NumberBytes
from sarathi_sim.profiler.facts.layer_kinds import Latent, Windows
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE
from sarathi_sim.profiler.facts.roofline import attended, attended_within
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load import engine_memory as em
from sarathi_sim.simulator.load.requests import burstier, longer_prefixes, longer_requests
from sarathi_sim.simulator.op_times.op_times import Reduce, Route
from tests.experiments.small_config import deployed
from tests.sampled import device_bundle

LLAMA_8B, LLAMA_70B = load_model("llama-3-8b"), load_model("llama-3-70b")
RTX_4090, A100_40G = load_device("rtx-4090"), load_device("a100-40g-sxm")
A100, GPT3 = load_device("a100-80g-sxm"), load_model("gpt3-175b")
VLLM = "gpu_memory_utilization"
ITERATION = em.Step(tokens=2048, sequences=256)


def memory(setting: str = VLLM, share: float = 0.9, step: em.Step = ITERATION) -> em.EngineMemory:
    return em.engine_memory(LLAMA_8B, RTX_4090, 1, (32,), 16, setting, share, step)


@pytest.mark.parametrize(
    ("model", "device", "tp", "share", "step", "gib"),
    [
        ("qwen3-14b", "h100-80g-sxm", 1, 0.95, em.Step(8192, 1024, version="0.15.0"), 41.94),
        ("qwen3-14b", "h100-80g-sxm", 1, 0.95, em.Step(8192, 1024, version="0.17.0"), 45.34),
        ("llama-3.1-8b", "h100-80g-sxm", 1, 0.95, em.Step(8192, 1024, version="0.19.0"), 58.11),
        ("llama-3.1-8b", "h100-80g-sxm", 2, 0.95, em.Step(8192, 1024, version="0.19.0"), 63.76),
        ("qwen2.5-72b", "h100-80g-sxm", 2, 0.95, em.Step(8192, 1024, version="0.19.0"), 3.1),
        ("llama-3.3-70b", "h100-80g-sxm", 4, 0.9, em.Step(8192, 128, version="0.15.1"), 37.14),
        (
            *("qwen2.5-7b", "a100-80g-sxm", 2, 0.25),
            *(em.Step(2048, 256, version="0.10.1.1", sampler="flashinfer"), 12.02),
        ),
    ],
)
def test_real_servers(
    model: str, device: str, tp: int, share: float, step: em.Step, gib: float
) -> None:
    """GiB for the KV cache in vLLM's start-up lines (llm-d-planner, inference-sim,
    dennislee22/vLLM-benchmarking)."""
    spec = load_model(model)
    found = em.engine_memory(
        spec, load_device(device), tp, (spec.num_layers,), 16, VLLM, share, step
    )
    assert found.kv_bytes / 2**30 == pytest.approx(gib, rel=0.02)


def test_two_nodes() -> None:
    """Llama-3.3-70B, TP 4 and PP 2 on A100s of 40 GB, vLLM 0.8.3 (surajssd/llm-k8s): 25,588."""
    old = replace(ITERATION, version="0.8.3")
    sharded = em.engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, old)
    assert sharded.num_blocks == pytest.approx(25588, rel=0.05)
    assert sharded.assumed == ("activations", "outside of torch")


def test_ranks_hold_what_collectives_hold() -> None:
    """Eight ranks of one GPU gather tokens for their experts, as eight GPUs of one rank reduce."""
    model, device, step = load_model("deepseek-v3"), load_device("h200-sxm"), em.Step(2048, 64)
    layers, ranks = (model.num_layers,), NumberBytes(2, 1.0, 2, dp=8)
    found = em.engine_memory(model, device, 1, layers, 16, VLLM, 0.9, step, ranks)
    whole = em.engine_memory(model, device, 8, layers, 16, VLLM, 0.9, step, NumberBytes(2, 1.0, 2))
    assert found.non_torch_bytes == whole.non_torch_bytes > 2 * 2**30


def test_states_of_recurrent_layers() -> None:
    """By hand: a state of Qwen3-Next's 36 recurrent layers is 32 heads x 128 x 128 numbers of 4
    bytes and 8,192 x 3 of 2; vLLM's block holds one in 12 layers, as 1,056 tokens of 2,048 bytes;
    SGLang keeps 0.9 of 1.9 for states."""
    model, device = load_model("qwen3-next-80b-a3b"), load_device("h200-sxm")
    state = 4 * 32 * 128 * 128 + 2 * 8192 * 3
    step, numbers, layers = em.Step(8192, 256), NumberBytes(2, 1.0, 2), (48,)
    of_vllm = em.engine_memory(model, device, 1, layers, 16, VLLM, 0.9, step, numbers)
    assert of_vllm.block_bytes == 16 * 12 * 2048 and of_vllm.state_bytes == 36 * state
    assert of_vllm.state_blocks == -(-36 * state // (16 * 12 * 2048)) and of_vllm.states is None
    tokens = -(-state // 2048 // 16) * 16 if state % 2048 == 0 else (state // 2048 // 16 + 1) * 16
    assert of_vllm.most_states == of_vllm.kv_bytes // (12 * tokens * 2048)
    apart = em.engine_memory(
        model, device, 1, layers, 16, "mem_fraction_static", 0.9, step, numbers
    )
    assert apart.states == int(0.9 / 1.9 * apart.cache_bytes // (36 * state))
    assert apart.kv_bytes == pytest.approx(apart.cache_bytes / 1.9) and apart.state_blocks == 0


def test_what_the_engine_printed_leaves_nothing_to_assume() -> None:
    given = memory(step=replace(ITERATION, activation_bytes=1e9, non_torch_bytes=2e8))
    weights = em.stage_weight_bytes(LLAMA_8B, (32,), 0)
    assert given.kv_bytes == pytest.approx(0.9 * 25_250_627_584 - weights - 1.2e9)
    assert given.block_bytes == 16 * LLAMA_8B.kv_bytes_per_token()
    assert given.num_blocks == given.kv_bytes // given.block_bytes
    assert given.assumed == () and "assumed" not in given.text()
    assert "activations 0.51 GB (assumed)" in memory().text()


def test_every_part_of_the_memory_says_where_it_comes_from() -> None:
    """The parts fill the GPU, and CUDA graphs count where an engine measures them beforehand."""
    sharded = em.engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, ITERATION)
    alone, graphs = memory(), memory(step=replace(ITERATION, cuda_graph_bytes=4e8))
    for found in (alone, sharded, graphs, memory("mem_fraction_static", 0.85)):
        (whole, total, _), *parts = found.parts()
        assert whole == "memory" and sum(size for _, size, _ in parts) == pytest.approx(total)
        hows = {name: how.split(":")[0].split()[0] for name, _, how in found.parts()}
        assert (hows["weights"], hows["KV cache"]) == ("computed", "computed")
        assert (hows["memory"], hows["CUDA context"]) == ("measured", "assumed")
        assert ("NCCL buffers" in hows) == (found is sharded)
    nccl = {name: size for name, size, _ in sharded.parts()}["NCCL buffers"]
    assert nccl == pytest.approx(1.84 * 2**30)
    assert alone.num_blocks - graphs.num_blocks in (190, 191), "0.4 GB less"
    assert "CUDA graphs 0.40 GB (given)" in graphs.text() and "GB left over" in alone.text()


def test_each_engine_takes_its_share_of_something_else() -> None:
    step = replace(ITERATION, activation_bytes=1e9, non_torch_bytes=2e8)
    total, weights = 25_250_627_584, em.stage_weight_bytes(LLAMA_8B, (32,), 0)
    sglang = memory("mem_fraction_static", 0.85, step)
    assert sglang.kv_bytes == pytest.approx(0.85 * (total - 2e8) - weights)
    trtllm = memory("free_gpu_memory_fraction", 0.9, step)
    assert trtllm.kv_bytes == pytest.approx(0.9 * (total - weights - 1.2e9))


def test_the_fullest_stage_counts() -> None:
    """The last one has the LM head and samples; a longer one holds more of every block."""
    even = em.engine_memory(LLAMA_70B, A100_40G, 4, (40, 40), 16, VLLM, 0.9, ITERATION)
    uneven = em.engine_memory(LLAMA_70B, A100_40G, 4, (42, 38), 16, VLLM, 0.9, ITERATION)
    assert even.activation_bytes > 256 * LLAMA_70B.vocab_size * 15
    assert uneven.block_bytes == 2 * 16 * 42 * 2 * 128 * 2 > even.block_bytes
    assert uneven.activation_bytes < even.activation_bytes, "its first stage does not sample"
    assert uneven.num_blocks < even.num_blocks


def test_memory_that_no_driver_reported_is_assumed() -> None:
    plain = replace(RTX_4090, reported_bytes=None)
    found = em.engine_memory(LLAMA_8B, plain, 1, (32,), 16, VLLM, 0.9, ITERATION)
    assert found.total_bytes == 24e9 and "memory" in found.assumed
    assert "24.00 GB (assumed: the data sheet)" in found.text()


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(em.CapacityError, match=r"gpt3-175b does not fit: stage 0 of 1 .*usable"):
        em.kv_capacity_tokens(GPT3, A100, 1, (96,))
    few = "holds 9000 tokens, too few for 8 micro-batches of 4096: lower max_length to at most 1125"
    with pytest.raises(em.CapacityError, match=few):
        em.max_batch(9000, 4096, 8)
    with pytest.raises(
        em.CapacityError, match=r"llama-3-70b leaves no room.* weights 141.* another"
    ):
        em.engine_memory(LLAMA_70B, RTX_4090, 1, (80,), 16, VLLM, 0.9, ITERATION)


def test_the_papers_batch_sizes_for_gpt3() -> None:
    """Section 5.3: 27 with TP 8 and PP 8, 11 with TP 8 alone, lengths up to 4K."""
    assert em.max_batch(em.kv_capacity_tokens(GPT3, A100, 8, em.stage_layers(96, 8)), 4096, 8) == 27
    assert em.max_batch(em.kv_capacity_tokens(GPT3, A100, 8, (96,)), 4096) == 11


def test_capacity_by_hand() -> None:
    """Llama-2-7b on one A40: 0.9 * 48e9 bytes, less 13.48e9 of weights, at 512 KiB a token."""
    model, device = load_model("llama-2-7b"), load_device("a40")
    weights = 2 * (model.num_parameters - model.hidden_size)  # the final norm is not counted
    assert em.stage_weight_bytes(model, (32,), 0) == weights
    expected = int((0.9 * device.memory_bytes - weights) // (512 * 1024))
    assert em.kv_capacity_tokens(model, device, 1, (32,)) == expected


def test_replicated_kv_heads_take_their_bytes() -> None:
    model = load_model("llama-2-70b")  # 8 KV heads
    at_8 = em.kv_capacity_tokens(model, A100, 8, (80,), usable_memory=0.9)
    at_16 = em.kv_capacity_tokens(model, A100, 16, (80,), usable_memory=0.9)
    weights = {tp: em.stage_weight_bytes(model, (80,), 0, tp=tp) for tp in (8, 16)}
    per_token = model.kv_bytes_per_token()
    assert at_8 == int((0.9 * 8 * 80e9 - weights[8]) // per_token)
    assert at_16 == int((0.9 * 16 * 80e9 - weights[16]) // (2 * per_token))


def test_every_rank_has_routers_and_norms_whole_and_in_two_bytes() -> None:
    """DeepSeek-V3 in blocks of fp8, TP 8, layer by layer from its published sizes: 61 layers of
    7,168, the last 58 with 256 experts; attention of ranks 1,536 and 512, with 64."""
    heads, hidden, width = 128, 7168, 2048
    own = hidden * (1536 + 512 + 64)
    divided = heads * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * hidden)
    shared, dense, routed = (3 * hidden * each for each in (width, 18432, 256 * width))
    fp8 = 61 * (divided + 8 * own) + 58 * (shared + routed) + 3 * dense
    whole = 58 * 256 * hidden + 61 * (2 * hidden + 1536 + 512)
    tables = 2 * 129280 * hidden
    numbers = NumberBytes(2, WEIGHT_BYTES["fp8_block"], 2)
    assert em.stage_weight_bytes(load_model("deepseek-v3"), (61,), 0, numbers, 8) == int(
        WEIGHT_BYTES["fp8_block"] * fp8 + 2 * (8 * whole + tables)
    )


@pytest.mark.parametrize(
    ("kernels", "layer", "expert", "billions"),
    [
        (Kernels("sglang", "fp8_block", "fp8"), 1 + 4 / 128**2, 1 + 4 / 128**2, 42.1),
        (Kernels("trtllm", "bf16", "fp8", "nvfp4"), 2.0, 0.5 + 1 / 16, 47.2),
        (Kernels("trtllm", "nvfp4", "fp8"), 0.5 + 1 / 16, 0.5 + 1 / 16, 25.4),
    ],
)
def test_weights_of_a_rank(kernels: Kernels, layer: float, expert: float, billions: float) -> None:
    """DeepSeek-R1 on 32 ranks, each with whole attention, layer by layer from its published sizes:
    256 experts and 32 copies, nine on each."""
    heads, hidden, width = 128, 7168, 2048
    attention = hidden * (1536 + 512 + 64)
    attention += heads * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * hidden)
    shared, dense = 58 * 3 * hidden * width, 3 * 3 * hidden * 18432
    routed = 58 * 9 * 3 * hidden * width
    whole = 58 * 256 * hidden + 61 * (2 * hidden + 1536 + 512)
    tables = 2 * 129280 * hidden
    numbers = replace(kernels, dp=32, redundant_experts=32).number_bytes
    found = em.stage_weight_bytes(load_model("deepseek-r1"), (61,), 0, numbers)
    by_hand = layer * (61 * attention + shared + dense) + expert * routed + 2 * (whole + tables)
    assert found == int(by_hand) and found / 1e9 == pytest.approx(billions, abs=0.05)
    # Sixteen groups of two: what a group holds beside its experts is divided, or there twice.
    numbers = replace(kernels, dp=16, redundant_experts=32).number_bytes
    twice = 2 * whole + tables
    own = 2 * hidden * (1536 + 512 + 64) - hidden * (1536 + 512 + 64)
    by_hand = layer * (61 * (attention + own) + shared + dense) + 2 * expert * routed + 2 * twice
    assert em.stage_weight_bytes(load_model("deepseek-r1"), (61,), 0, numbers, 2) == int(by_hand)


def test_replicated_kv_heads_take_their_weights() -> None:
    """Qwen3-235B has 4 KV heads: on 8 ranks their projections are there twice."""
    model = load_model("qwen3-235b-a22b")
    more = model.parameters_in(tp=8).matrices - model.parameters_in(tp=4).matrices
    assert more == 94 * 4096 * 2 * 4 * 128


def test_layers_are_spread_evenly() -> None:
    assert em.stage_layers(96, 8) == (12,) * 8
    assert em.stage_layers(10, 4) == (3, 3, 2, 2)
    for pp in (0, 11):
        with pytest.raises(em.CapacityError, match="10, the layers"):
            em.stage_layers(10, pp)


def test_tables_that_a_stage_holds() -> None:
    """Tied tables count once on a single stage and twice on two; positions on the first."""
    tied = replace(load_model("llama-2-7b"), tied_embeddings=True, learned_positions=True)
    table = tied.vocab_size * tied.hidden_size
    positions = tied.max_position_embeddings * tied.hidden_size
    layer = sum(tied.parameters_in(range(1)))
    assert em.stage_weight_bytes(tied, (32,), 0) == 2 * (32 * layer + table + positions)
    assert em.stage_weight_bytes(tied, (16, 16), 0) == 2 * (16 * layer + table + positions)
    assert em.stage_weight_bytes(tied, (16, 16), 1) == 2 * (16 * layer + table)
    assert em.stage_weight_bytes(tied, (11, 11, 10), 1) == 2 * 11 * layer


# Sliding windows and latent attention: pairs, KV cache, capacity, and the simulator's surfaces


LLAMA = load_model("llama-3-8b")
WINDOWED = replace(LLAMA, windows=Windows(512, 24))  # of 32 layers


@pytest.mark.parametrize(("chunk", "context"), [(1, 0), (5, 3), (40, 0), (40, 90), (7, 14), (8, 8)])
def test_pairs_are_counted_one_by_one(chunk: int, context: int) -> None:
    window = 16
    by_hand = sum(min(context + i, window) for i in range(1, chunk + 1))
    one = np.ones(1)
    assert attended_within(chunk * one, context * one, window)[0] == by_hand
    wide = attended_within(chunk * one, context * one, 1000)
    assert wide == attended(chunk * one, context * one)[1]


def test_attention_of_a_mean_layer() -> None:
    """A quarter of the layers sees everything; the others cost what the window leaves."""
    bundles = {m: device_bundle("a100-80g-sxm", m, 1) for m in (LLAMA, WINDOWED)}
    whole, some = (bundles[m].attn_decode for m in (LLAMA, WINDOWED))
    near = whole.context_tokens <= 512
    assert np.allclose(some.time_us[near], whole.time_us[near], rtol=1e-4)
    long = (whole.batch_size == 64) & (whole.context_tokens == 8192)
    at_window = (whole.batch_size == 64) & (whole.context_tokens == 512)
    expected = 0.25 * whole.time_us[long].item() + 0.75 * whole.time_us[at_window].item()
    assert some.time_us[long].item() == pytest.approx(expected, rel=1e-4)
    prompts = [bundles[m].attn_prefill.query("chunk_tokens == 6144 and context_tokens == 0")
               for m in (LLAMA, WINDOWED)]  # fmt: skip
    ratio = prompts[1]["time_us"].item() / prompts[0]["time_us"].item()
    assert 0.25 + 0.75 * 512 / 3072 < ratio < 0.75  # pairs alone, and no less


def test_what_the_cache_keeps() -> None:
    assert em.kept_share(LLAMA, np.array([100.0]), np.array([50.0])) == 1
    assert em.kept_share(WINDOWED, np.array([100.0]), np.array([50.0])) == 1
    # A context that grows from 4,096 to 4,098: three of four layers keep 512 tokens of it.
    share = em.kept_share(WINDOWED, np.array([4096.0]), np.array([2.0]))
    assert share == pytest.approx(0.25 + 0.75 * 512 / 4097, rel=1e-6)
    # Many steps weigh more than few: contexts from 1,000 to 3,000 against one step of 10.
    both = em.kept_share(WINDOWED, np.array([1000.0, 10.0]), np.array([2000.0, 1.0]))
    alone = em.kept_share(WINDOWED, np.array([1000.0]), np.array([2000.0]))
    assert both == pytest.approx(alone, rel=1e-3)


def test_a_state_takes_the_memory_of_so_many_tokens() -> None:
    """Qwen3.5: a state of 4 x 64 x 128 x 128 + 2 x 3 x 12,288 bytes, tokens of 2,048; on 4 ranks a
    quarter of the one, half of the other, and with an fp8 cache a quarter."""
    model, fp8 = load_model("qwen3.5-397b-a17b"), NumberBytes(kv=1)
    prompt, output = np.array([4096.0]), np.array([2.0])
    tokens = (4 * 64 * 128 * 128 + 2 * 3 * 12288) / 2048
    expected = (15 * 4097 + 45 * tokens) / 60 / 4097
    assert em.kept_share(model, prompt, output) == pytest.approx(expected, rel=1e-9)
    ranks = em.kept_share(model, prompt, output, 4)
    assert ranks == pytest.approx((15 * 4097 + 45 * tokens / 2) / 60 / 4097, rel=1e-9)
    assert em.kept_share(model, prompt, output, 4, fp8) == pytest.approx(expected, rel=1e-9)
    # Short sequences take more than their tokens.
    assert em.kept_share(model, np.array([64.0]), output) > 10


def test_capacity_counts_what_is_kept() -> None:
    device = load_device("a100-80g-sxm")
    plain = em.kv_capacity_tokens(LLAMA, device, 1, (32,))
    half = em.kv_capacity_tokens(WINDOWED, device, 1, (32,), kept=0.5)
    assert half == pytest.approx(2 * plain, abs=2)
    whole, part = (
        em.engine_memory(LLAMA, device, 1, (32,), 16, VLLM, 0.9, ITERATION, kept=kept)
        for kept in (1.0, 0.5)
    )
    assert part.num_blocks == pytest.approx(2 * whole.num_blocks, abs=2)


def test_latent_attention_is_cached_whole_on_every_rank() -> None:
    model, device = load_model("deepseek-v3"), load_device("h200-sxm")
    assert [model.cached_bytes(tp, 2) for tp in (1, 8)] == [1152, 1152]
    one, eight = (em.stage_weight_bytes(model, (61,), 0, tp=tp) for tp in (1, 8))
    # On each rank: what it projects for itself, four norms a layer, and the routers of 58 layers.
    whole = 61 * 7168 * (1536 + 576) + 61 * (2 * 7168 + 1536 + 512) + 58 * 256 * 7168
    assert eight - one == 2 * 7 * whole
    # Fewer layers, so that it fits: each of eight GPUs holds every token.
    small = replace(model, num_layers=2, experts=None)
    tokens = [em.kv_capacity_tokens(small, device, tp, (2,)) for tp in (1, 8)]
    free = [0.9 * 141e9 * tp - em.stage_weight_bytes(small, (2,), 0, tp=tp) for tp in (1, 8)]
    assert tokens == [
        int(left // (2 * 576 * 2 * tp)) for left, tp in zip(free, (1, 8), strict=True)
    ]


def test_ops_of_latent_attention() -> None:
    model = load_model("deepseek-v3")
    gemms = model.gemms(8)
    assert {op: (gemms[op].n, gemms[op].k) for op in ("preproj", "q_up", "kv_up", "postproj")} == {
        "preproj": (1536 + 576, 7168),
        "q_up": (16 * 192, 1536),
        "kv_up": (16 * 256, 512),
        "postproj": (7168, 16 * 128),
    }
    assert {"q_up", "kv_up"}.isdisjoint(LLAMA.row_ops)
    direct = replace(model, latent=Latent(512, 64, 128, 128))
    assert "q_up" not in direct.row_ops
    assert direct.gemms(1)["preproj"].n == 128 * 192 + 576


def test_plain_sources_refuse_them() -> None:
    for model in (WINDOWED, load_model("deepseek-v3")):
        with pytest.raises(ValueError, match="not supported by the profiler"):
            model.check_plain("the profiler")
    LLAMA.check_plain("the profiler")


# What-if workloads: longer prompts and outputs, burstier arrivals


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 3.0])
def test_gaps_vary_as_much_more_as_asked(factor: float) -> None:
    arrival_s = np.cumsum(np.random.default_rng(1).exponential(0.5, 5000))
    shifted = burstier(arrival_s, factor)
    before, after = np.diff(arrival_s), np.diff(shifted)
    assert after.std() / after.mean() == pytest.approx(factor * before.std() / before.mean())
    assert shifted[[0, -1]] == pytest.approx(arrival_s[[0, -1]])
    assert (np.argsort(after) == np.argsort(before)).all()


def test_what_has_no_gaps_stays() -> None:
    for arrival_s in (np.zeros(5), np.arange(5.0), np.array([1.0]), np.array([])):
        assert burstier(arrival_s, 2.0) is arrival_s
    assert np.isfinite(burstier(np.array([0.0, 0, 0, 1]), 100.0)).all()  # as far as it goes


def test_longer_requests_still_fit() -> None:
    prompt, output = np.array([1, 100, 900, 900]), np.array([1, 10, 100, 200])
    longer = longer_requests(prompt, output, (1.2, 1.1), 1000)
    assert longer[0].tolist() == [1, 120, 890, 1080]  # the last was too long before, too
    assert longer[1].tolist() == [1, 11, 110, 220]
    prefixes = longer_prefixes([(("a", 50), ("b", 900))], 1.2, np.array([890]))
    assert prefixes == [(("a", 60), ("b", 890))]


def requests(**workload: object) -> list[Request]:
    lengths = {"kind": "random", "prompt": 200, "decode": 40, "tool": "sglang", "range_ratio": 0.5}
    arrivals = {"kind": "poisson", "rate": 2.0}
    given = {"lengths": lengths, "arrivals": arrivals, "requests": 400, **workload}
    tree = {"model": "llama-13b", "device": "a6000", "workload": given, "policy": {"name": "orca"}}
    return build_requests(
        check_scenario(tree, Source("", "x", {}, ())), 1024, Source("", "x", {}, ())
    )


def test_a_shifted_workload_has_the_same_requests() -> None:
    base, shifted = requests(), requests(shift={"prompt": 1.5, "burstiness": 2.0})
    assert [round(1.5 * one.prompt_tokens) for one in base] == [
        pytest.approx(one.prompt_tokens, abs=1) for one in shifted
    ]
    assert [one.output_tokens for one in base] == [one.output_tokens for one in shifted]
    gaps = [np.diff([one.arrival_s for one in each]) for each in (base, shifted)]
    assert gaps[1].std() == pytest.approx(2 * gaps[0].std(), rel=1e-3)


def test_turns_grow_with_the_turns_before_them() -> None:
    sessions = {"min_turns": 2, "max_turns": 3, "think_s": 1.0}
    base, longer = requests(sessions=sessions), requests(sessions=sessions, shift={"output": 2.0})
    assert longer[1].prompt_tokens == base[1].prompt_tokens + base[0].output_tokens


# Links other than the measured ones: rings by hand, and deployments that differ in a link

SLOW = Route("pcie", 10e9, 5e-6)
NET = Route("tcp", 1e9, 100e-6)


def measured(num_bytes: Any) -> Any:
    """8 us, and 100 GB/s."""
    return 8e-6 + np.asarray(num_bytes) / 100e9


def test_a_ring_by_hand() -> None:
    # Four ranks: six messages of 250 kB, each 5 us + 25 us.
    assert SLOW.ring_s(np.array(1e6), 4) == pytest.approx(6 * 30e-6)
    assert SLOW.ring_s(np.array(1e6), 1) == 0


def test_an_all_reduce_over_a_slower_link_and_between_nodes_by_hand() -> None:
    size = np.array([1e6])
    alone = Reduce(measured, 1, 1, None, True, NET)
    assert alone(size) == pytest.approx(18e-6)
    # Two ranks, each way 5 us + 50 us, after the 8 us of a small one.
    over = Reduce(measured, 2, 1, SLOW, True, NET)
    assert over(size) == pytest.approx(8e-6 + 2 * 55e-6, rel=1e-5)
    # Two nodes of four: each GPU sends its quarter, 250 kB, in two halves to its peer.
    assert Reduce(measured, 4, 2, None, True, NET)(size) == pytest.approx(18e-6 + 2 * 225e-6)


def test_a_slower_link_is_never_faster_than_measured_and_a_faster_one_may_be() -> None:
    fast = Route("nvlink", 1e12, 0.0)
    size = np.array([1e9])
    assert Reduce(measured, 2, 1, fast, True, NET)(size) == measured(size)
    assert Reduce(measured, 2, 1, fast, False, NET)(size) == pytest.approx(8e-6 + 1e-3, rel=1e-4)


FILE = """
name: one
model: llama-3-8b
device: {device}
stack: vllm
workload: {{requests: 1, lengths: {{kind: fixed, prompt: 100, decode: 10}}}}
policy: {{name: vllm, max_num_batched_tokens: 512, max_num_seqs: 8}}
kv_cache: {{}}
cluster: {{max_length: 1024, {cluster}}}
engine: {{fi_allreduce_fusion_max_size_mb: 0}} # all-reduces of all links are the same kernel
"""


def deployment(cluster: str, device: str = "h100-80g-sxm") -> Deployment:
    (found,) = deployed(FILE.format(device=device, cluster=cluster)).values()
    return found


def reduce_s(found: Deployment, num_bytes: float = 1e6) -> float:
    assert found.ops.all_reduce is not None
    return float(found.ops.all_reduce(np.array([num_bytes]))[0])


def test_without_keys_the_measured_link_is_meant() -> None:
    plain = deployment("tp: 4")
    named = deployment("tp: 4, intra_node: {kind: nvlink}")
    assert plain.ops is named.ops
    assert plain.ops.meta.environment[ALL_REDUCE].startswith("measured")


def test_pcie_is_slower_and_without_peer_access_slower_still() -> None:
    plain, peers, host = (
        deployment(f"tp: 4, intra_node: {{{link}}}")
        for link in ("kind: nvlink", "kind: pcie_peer", "kind: pcie")
    )
    assert reduce_s(plain) < reduce_s(peers) < reduce_s(host)
    assert "16 GB/s" in host.ops.meta.environment[ALL_REDUCE]
    kernels = host.ops.meta.kernels
    assert kernels is not None and kernels.half_width_pct[ALL_REDUCE] == 50


def test_a_device_without_peer_access_says_so_and_a_user_may_know_better() -> None:
    device = "rtx-pro-6000"
    assumed, peers = (
        deployment(f"tp: 2, {key}", device) for key in ("pp: 1", "intra_node: {kind: pcie_peer}")
    )
    assert peers.ops.meta.environment[ALL_REDUCE].startswith("measured")
    assert reduce_s(assumed) > 2 * reduce_s(peers)


def test_tensor_parallelism_between_nodes_costs_its_network() -> None:
    inside = deployment("tp: 4")  # what the GPUs of one node take
    fast, slow = (
        deployment(f"tp: 8, gpus_per_node: 4, inter_node: {{kind: {kind}}}")
        for kind in ("infiniband", "tcp")
    )
    # Two nodes of four: two messages of 125 kB; TCP's 5 GB/s are shared by four.
    of_fast = 2 * (10e-6 + 125e3 / 50e9)
    assert reduce_s(fast) == pytest.approx(reduce_s(inside) + of_fast)
    assert reduce_s(slow) == pytest.approx(reduce_s(inside) + 2 * (60e-6 + 125e3 / 1.25e9))
    beyond = deployment("tp: 8, gpus_per_node: 2")
    assert reduce_s(beyond) > reduce_s(fast)
    pair, alone = (deployment(f"tp: {tp}, gpus_per_node: {tp // 2}") for tp in (4, 2))
    in_pair = reduce_s(deployment("tp: 2"))
    # Two messages of 250 kB; one GPU a node has nothing to add up there, and sends 500 kB.
    assert reduce_s(pair) == pytest.approx(in_pair + 2 * (10e-6 + 250e3 / 50e9))
    assert reduce_s(alone) == pytest.approx(2 * (10e-6 + 500e3 / 50e9))


def test_trays_of_one_rack_are_joined_by_nvlink() -> None:
    """GB200's trays of four: two messages of 125 kB over NVLink, without a network's latency."""
    tray, two = (deployment(f"tp: {tp}", "gb200") for tp in (4, 8))
    assert reduce_s(two) == pytest.approx(reduce_s(tray) + 2 * (2e-6 + 125e3 / 900e9))
    assert "nvlink" in two.ops.meta.environment[ALL_REDUCE]
    named = deployment("tp: 8, inter_node: {kind: infiniband}", "gb200")
    assert reduce_s(named) == pytest.approx(reduce_s(two) + 2 * 8e-6)


def test_sends_take_the_link_that_is_named() -> None:
    found = deployment("tp: 2, pp: 2, gpus_per_node: 2, inter_node: {kind: tcp, bandwidth: 2.0e+9}")
    assert found.scope == "inter_node"
    # Hidden states and residual: 2 MB at 1 GB/s for each of two GPUs.
    assert found.ops.send["inter_node"](np.array(1e6)) == pytest.approx(60e-6 + 2e-3)
    assert "tcp" in found.ops.meta.environment["send_recv_inter_node"]


def test_the_devices_own_link_by_its_numbers() -> None:
    own = deployment("tp: 4")
    named = deployment("tp: 4, intra_node: {bandwidth: 450.0e+9}")
    assert reduce_s(named, 16e3) == pytest.approx(reduce_s(own, 16e3), rel=0.05)


@pytest.mark.parametrize(
    ("cluster", "device", "message"),
    [
        ("tp: 8, gpus_per_node: 3", "h100-80g-sxm", "at most 3, the GPUs of a node, or a multiple"),
        ("tp: 2, intra_node: {kind: nvlink}", "rtx-pro-6000", "bandwidth: is needed for NVLink on"),
        ("tp: 16, gpus_per_node: 16", "h100-80g-sxm", "gpus_per_node: value 16: must be at most 8"),
    ],
)
def test_links_that_cannot_be(cluster: str, device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        deployment(cluster, device)
