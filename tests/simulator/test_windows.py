"""Sliding windows and latent attention: pairs, KV cache, capacity, and the simulator's surfaces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.layer_kinds import Latent, Windows
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.facts.roofline import attended, attended_within
from sarathi_sim.simulator.load.engine_memory import (
    Step,
    engine_memory,
    kept_share,
    kv_capacity_tokens,
    stage_weight_bytes,
)
from tests.sampled import device_bundle

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
    assert kept_share(LLAMA, np.array([100.0]), np.array([50.0])) == 1
    assert kept_share(WINDOWED, np.array([100.0]), np.array([50.0])) == 1
    # A context that grows from 4,096 to 4,098: three of four layers keep 512 tokens of it.
    share = kept_share(WINDOWED, np.array([4096.0]), np.array([2.0]))
    assert share == pytest.approx(0.25 + 0.75 * 512 / 4097, rel=1e-6)
    # Many steps weigh more than few: contexts from 1,000 to 3,000 against one step of 10.
    both = kept_share(WINDOWED, np.array([1000.0, 10.0]), np.array([2000.0, 1.0]))
    alone = kept_share(WINDOWED, np.array([1000.0]), np.array([2000.0]))
    assert both == pytest.approx(alone, rel=1e-3)


def test_capacity_counts_what_is_kept() -> None:
    device = load_device("a100-80g-sxm")
    plain = kv_capacity_tokens(LLAMA, device, 1, (32,))
    assert kv_capacity_tokens(WINDOWED, device, 1, (32,), kept=0.5) == pytest.approx(
        2 * plain, abs=2
    )
    step = Step(2048, 256)
    blocks = [
        engine_memory(
            LLAMA, device, 1, (32,), 16, "gpu_memory_utilization", 0.9, step, kept=kept
        ).num_blocks
        for kept in (1.0, 0.5)
    ]
    assert blocks[1] == pytest.approx(2 * blocks[0], abs=2)


def test_latent_attention_is_cached_whole_on_every_rank() -> None:
    model, device = load_model("deepseek-v3"), load_device("h200-sxm")
    assert [model.cached_numbers(tp) for tp in (1, 8)] == [576, 576]
    one, eight = (stage_weight_bytes(model, (61,), 0, tp=tp) for tp in (1, 8))
    # On each rank: what it projects for itself, four norms a layer, and the routers of 58 layers.
    whole = 61 * 7168 * (1536 + 576) + 61 * (2 * 7168 + 1536 + 512) + 58 * 256 * 7168
    assert eight - one == 2 * 7 * whole
    # Fewer layers, so that it fits: each of eight GPUs holds every token.
    small = replace(model, num_layers=2, experts=None)
    tokens = [kv_capacity_tokens(small, device, tp, (2,)) for tp in (1, 8)]
    free = [0.9 * 141e9 * tp - stage_weight_bytes(small, (2,), 0, tp=tp) for tp in (1, 8)]
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": Windows(512, 33)}, "windows.layers must be at most num_layers"),
        ({"latent": Latent(512, 64, 128, 128)}, "num_kv_heads must be 1 and head_dim 192"),
    ],
)
def test_what_does_not_fit_the_model(change: dict[str, object], message: str) -> None:
    fields = {**LLAMA.__dict__, **change}
    with pytest.raises(ValueError, match=message):
        ModelSpec(**{k: v for k, v in fields.items() if k in ModelSpec.__dataclass_fields__})


def test_a_window_of_nothing() -> None:
    with pytest.raises(ValueError, match="tokens must be positive"):
        Windows(0, 3)


def test_plain_sources_refuse_them() -> None:
    for model in (WINDOWED, load_model("deepseek-v3")):
        with pytest.raises(ValueError, match="the profiler knows no"):
            model.check_plain("the profiler")
    LLAMA.check_plain("the profiler")
