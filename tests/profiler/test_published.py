"""Shipped models against what others publish: parameters, weights of a GPU, KV cache of a token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.simulator.load.engine_memory import stage_weight_bytes

GIB = 2**30
GPT_3 = 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288


@dataclass(frozen=True)
class Published:
    """``total`` and ``active`` parameters; ``weights`` in bytes over ``tp`` GPUs, with the error
    that their rounding allows; ``kv`` bytes a token in bf16."""

    total: float
    active: float | None = None
    active_within: float = 0.03
    weights: float | None = None
    tp: int = 1
    weights_within: float = 0.01
    kv: int | None = None


# Totals: safetensors of the model cards (of images without their encoder, and without rotary
# buffers), of LLaMA 13B and 33B the converted checkpoints, of GPT-3 its sizes; the reports and
# cards of mixtures for the active ones. KV bytes: "Insights into DeepSeek-V3" (ISCA 2025), table 1
# (405B and 72B of that table have 516,096 and 327,680 bytes), or 2 x layers x KV heads x head_dim x
# 2 of the cards. Weights: index files of the checkpoints (total_size), gpt-oss' card, vLLM's start-
# up logs.
MODELS = {
    "llama-2-7b": Published(6_738_415_616, kv=524_288),
    "llama-2-70b": Published(68_976_648_192, kv=327_680),
    "llama-13b": Published(13_015_864_320, kv=819_200),
    "llama-33b": Published(32_528_943_616, kv=1_597_440),
    "llama-3-8b": Published(8_030_261_248, kv=131_072),
    "llama-3-70b": Published(70_553_706_496, kv=327_680),
    "mistral-7b": Published(7_241_732_096, kv=131_072),
    "qwen-72b": Published(72_287_920_128, kv=2_621_440),
    "gpt3-175b": Published(GPT_3, kv=2 * 96 * 12288 * 2),
    "llama-3.1-8b": Published(8_030_261_248, weights=16_060_522_496, kv=131_072),
    "llama-3.1-70b": Published(70_553_706_496, kv=327_680),
    "llama-3.1-405b": Published(405_853_388_800, kv=516_096),
    "llama-3.2-3b": Published(3_212_749_824, weights=6_425_499_648, kv=114_688),
    "llama-3.3-70b": Published(70_553_706_496, weights=32.89 * GIB, tp=4, kv=327_680),
    "qwen2.5-7b": Published(7_615_616_512, kv=57_344),
    "qwen2.5-72b": Published(72_706_203_648, weights=145_412_407_296, kv=327_680),
    "qwen3-8b": Published(8_190_735_360, kv=147_456),
    "qwen3-14b": Published(14_768_307_200, weights=29_536_614_400, kv=163_840),
    "qwen3-32b": Published(32_762_123_264, weights=65_524_246_528, kv=262_144),
    "mistral-small-24b": Published(23_572_403_200, kv=163_840),
    "phi-4": Published(14_659_507_200, kv=204_800),
    "gemma-2-9b": Published(9_241_705_984, kv=344_064),
    "gemma-3-12b": Published(11_766_034_176, kv=393_216),
    "gemma-3-27b": Published(27_009_346_304, kv=507_904),
    "mixtral-8x7b": Published(46_702_792_704, 12.9e9, kv=131_072),
    "qwen3-30b-a3b": Published(30_532_122_624, 3.3e9, kv=98_304),
    "qwen3-235b-a22b": Published(235_093_634_560, 22e9, kv=192_512),
    "qwen3-coder-480b-a35b": Published(480_154_875_392, 35e9, kv=253_952),
    # Without attention sinks: one number a head and layer. The card's active ones leave out the
    # embedding: 201,088 x 2,880.
    "gpt-oss-20b": Published(
        20_914_757_184 - 24 * 64, 3.61e9 + 579e6, 0.001, weights=12.8 * GIB, kv=49_152
    ),
    "gpt-oss-120b": Published(
        116_829_156_672 - 36 * 64, 5.13e9 + 579e6, 0.001, weights=60.8 * GIB, kv=73_728
    ),
    # The biases that correct the routing, one an expert, are left out.
    "deepseek-v3": Published(671_026_419_200 - 58 * 256, 37e9, kv=70_272),
    "deepseek-r1": Published(671_026_419_200 - 58 * 256, 37e9, kv=70_272),
    "kimi-k2": Published(1.03e12, 32e9, kv=70_272),
    # 600 GB (Unsloth's page on running it) with the encoder; groups of 128 would be 547 GB.
    "kimi-k2.5": Published(1.03e12, 32e9, weights=600e9, kv=70_272),
    "llama-4-scout": Published(107_769_861_120, 17e9, kv=196_608),
    # Without its encoder, which is Scout's.
    "llama-4-maverick": Published(401_583_781_376 - 871_932_416, 17e9, kv=196_608),
    # Its card rounds to 10 billion active ones, without the tables.
    "minimax-m2": Published(229e9, 10e9 + 2 * 200_064 * 3072, 0.1, kv=253_952),
}


@pytest.mark.parametrize("name", MODELS)
def test_against_published_numbers(name: str) -> None:
    model, expected = load_model(name), MODELS[name]
    digits = 0 if isinstance(expected.total, int) else 5e-3
    assert model.num_parameters == pytest.approx(expected.total, rel=digits, abs=0)
    if expected.active is not None:
        assert model.active_parameters == pytest.approx(expected.active, rel=expected.active_within)
    if expected.weights is not None:
        numbers = Kernels("vllm", model.dtype, moe_dtype=model.moe_dtype).number_bytes
        weights = stage_weight_bytes(model, (model.num_layers,), 0, numbers, expected.tp)
        assert weights / expected.tp == pytest.approx(expected.weights, rel=expected.weights_within)
    assert model.kv_bytes_per_token() == expected.kv


def test_many_models_ship() -> None:
    assert len(list_models()) >= 25 and set(MODELS) <= set(list_models())
