"""Memory: the paper's batch sizes, and what does not fit."""

from __future__ import annotations

import dataclasses

import pytest

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import WEIGHT_BYTES, NumberBytes
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.load.engine_memory import (
    CapacityError,
    kv_capacity_tokens,
    max_batch,
    stage_layers,
    stage_weight_bytes,
)

A100, A6000 = load_device("a100-80g-sxm"), load_device("a6000")
GPT3 = load_model("gpt3-175b")


def test_the_papers_batch_sizes_for_gpt3() -> None:
    """Section 5.3: 27 with TP 8 and PP 8, 11 with TP 8 alone, lengths up to 4K."""
    assert max_batch(kv_capacity_tokens(GPT3, A100, 8, stage_layers(96, 8)), 4096, 8) == 27
    assert max_batch(kv_capacity_tokens(GPT3, A100, 8, (96,)), 4096) == 11


def test_capacity_by_hand() -> None:
    """Llama-2-7b on one A40: 0.9 * 48e9 bytes, less 13.48e9 of weights, at 512 KiB a token."""
    model, device = load_model("llama-2-7b"), load_device("a40")
    weights = 2 * (model.num_parameters - model.hidden_size)  # the final norm is not counted
    assert stage_weight_bytes(model, (32,), 0) == weights
    expected = int((0.9 * device.memory_bytes - weights) // (512 * 1024))
    assert kv_capacity_tokens(model, device, 1, (32,)) == expected


def test_replicated_kv_heads_take_their_bytes() -> None:
    model = load_model("llama-2-70b")  # 8 KV heads
    at_8 = kv_capacity_tokens(model, A100, 8, (80,), usable_memory=0.9)
    at_16 = kv_capacity_tokens(model, A100, 16, (80,), usable_memory=0.9)
    weights = {tp: stage_weight_bytes(model, (80,), 0, tp=tp) for tp in (8, 16)}
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
    assert stage_weight_bytes(load_model("deepseek-v3"), (61,), 0, numbers, 8) == int(
        WEIGHT_BYTES["fp8_block"] * fp8 + 2 * (8 * whole + tables)
    )


def test_replicated_kv_heads_take_their_weights() -> None:
    """Qwen3-235B has 4 KV heads: on 8 ranks their projections are there twice."""
    model = load_model("qwen3-235b-a22b")
    more = model.parameters_in(tp=8).matrices - model.parameters_in(tp=4).matrices
    assert more == 94 * 4096 * 2 * 4 * 128


def test_layers_are_spread_evenly() -> None:
    assert stage_layers(96, 8) == (12,) * 8
    assert stage_layers(10, 4) == (3, 3, 2, 2)
    for pp in (0, 11):
        with pytest.raises(CapacityError, match="10 layers"):
            stage_layers(10, pp)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(CapacityError, match=r"gpt3-175b does not fit: stage 0 of 1 .*usable"):
        kv_capacity_tokens(GPT3, A100, 1, (96,))
    with pytest.raises(CapacityError, match="holds 2 sequences of 4096 tokens, too few for 8"):
        max_batch(9000, 4096, 8)


def test_tables_that_a_stage_holds() -> None:
    """Tied tables count once on a single stage and twice on two; positions on the first."""
    tied = dataclasses.replace(
        load_model("llama-2-7b"), tied_embeddings=True, learned_positions=True
    )
    table = tied.vocab_size * tied.hidden_size
    positions = tied.max_position_embeddings * tied.hidden_size
    layer = sum(tied.parameters_in(range(1)))
    assert stage_weight_bytes(tied, (32,), 0) == 2 * (32 * layer + table + positions)
    assert stage_weight_bytes(tied, (16, 16), 0) == 2 * (16 * layer + table + positions)
    assert stage_weight_bytes(tied, (16, 16), 1) == 2 * (16 * layer + table)
    assert stage_weight_bytes(tied, (11, 11, 10), 1) == 2 * 11 * layer
