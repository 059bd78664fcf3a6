"""Shipped models against what others publish: parameters, weights of a GPU, KV cache of a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
    "llama-3.2-1b": Published(1_235_814_400, kv=32_768),
    "llama-3.2-3b": Published(3_212_749_824, weights=6_425_499_648, kv=114_688),
    "llama-3.3-70b": Published(70_553_706_496, weights=32.89 * GIB, tp=4, kv=327_680),
    "qwen2.5-7b": Published(7_615_616_512, kv=57_344),
    "qwen2.5-72b": Published(72_706_203_648, weights=145_412_407_296, kv=327_680),
    "qwen3-0.6b": Published(596_049_920, kv=114_688),
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
    "kimi-k2.5": Published(1_026_408_209_408, 32e9, weights=600e9, kv=70_272),
    "llama-4-scout": Published(107_769_861_120, 17e9, kv=196_608),
    # Without its encoder, which is Scout's.
    "llama-4-maverick": Published(401_583_781_376 - 871_932_416, 17e9, kv=196_608),
    # Its card rounds to 10 billion active ones, without the tables.
    "minimax-m2": Published(228_689_320_448, 10e9 + 2 * 200_064 * 3072, 0.1, kv=253_952),
    # Recurrent layers have no KV cache. Qwen3-Next's active ones are published without tables and
    # norms. Cards round the others: GLM-5's leaves out the embedding, DeepSeek V3.2's its indexers.
    "qwen3.5-397b-a17b": Published(396_346_350_336, 17e9, kv=15 * 2 * 2 * 256 * 2),
    "qwen3-next-80b-a3b": Published(
        79_674_391_296, 3_252_400_896 + 2 * 151_936 * 2048, 1e-4, kv=12 * 2 * 2 * 256 * 2
    ),
    "glm-5": Published(743_911_218_432 - 75 * 256, 40e9 + 154_880 * 6144, kv=78 * (576 * 2 + 132)),
    "deepseek-v3.2": Published(671_877_929_216, 37e9 + 61 * 13_959_424, kv=61 * (576 * 2 + 132)),
    "nemotron-3-nano": Published(31_577_937_344, 3.6e9, 0.01, kv=6 * 2 * 2 * 128 * 2),
}
# Bytes of a sequence's states in all layers, by hand: each head's state, and the last three inputs
# of the convolution in bf16.
STATES = {
    ("qwen3.5-397b-a17b", 1, 4): 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2),
    ("qwen3.5-397b-a17b", 8, 4): 24_007_680,
    ("qwen3.5-397b-a17b", 1, 2): 97_689_600,
    ("qwen3-next-80b-a3b", 1, 4): 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    ("qwen3-next-80b-a3b", 1, 2): 39_518_208,
    ("nemotron-3-nano", 1, 4): 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2),
}
# Parameters of single layers, counted from the sizes in their files: a layer, and how many more it
# has than another.
LAYERS = {
    "a gated delta net, attention": ("qwen3.5-397b-a17b", 0, 3, 118_014_208 - 104_858_112),
    "qwen3-next's": ("qwen3-next-80b-a3b", 0, 3, 33_718_464 - 27_263_488),
    "mamba 2, attention": ("nemotron-3-nano", 0, 3, 38_744_896 - 23_399_040),
    "experts": (
        "nemotron-3-nano", 0, 2, 128 * (2 * 2688 * 1856 + 2688) + 2 * 2688 * 3712 + 2688
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "number_bytes"), STATES)
def test_states_of_a_sequence(name: str, tp: int, number_bytes: Literal[2, 4]) -> None:
    model = load_model(name)
    assert model.recurrent is not None
    state = replace(model.recurrent, number_bytes=number_bytes).state_bytes(tp)
    assert len(model.kinds["recurrent"]) * state == STATES[name, tp, number_bytes]


@pytest.mark.parametrize("what", LAYERS)
def test_parameters_of_a_layer(what: str) -> None:
    name, one, other, more = LAYERS[what]
    first, second = (sum(load_model(name).parameters_in(range(n, n + 1))) for n in (one, other))
    assert first - second == more


def test_parameters_of_latent_attention_with_an_indexer() -> None:
    """GLM-5's first layer: attention, indexer, a dense network and two norms."""
    dense = 3 * 6144 * 12288 + 2 * 6144
    assert sum(load_model("glm-5").parameters_in(range(1))) == 165_022_208 + 9_371_904 + dense


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
