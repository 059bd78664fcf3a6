"""Parameters, shapes and KV sizes against published counts and hand computation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_sim.profiler.facts.model import list_models, load_model
from sarathi_sim.profiler.facts.ops import OPS, GemmShape, Stream
from sarathi_sim.profiler.storage.strict import SpecError

# Hugging Face model cards (safetensors totals without rotary buffers), and for LLaMA 13B and 33B
# the counts of the converted checkpoints. GPT-3: 12 h^2 + 13 h a layer, tables and final norm.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen-72b": 72_287_920_128,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-small-24b": 23_572_403_200,
    "gpt3-175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288,
}


@pytest.mark.parametrize(
    ("hub", "shipped"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("someone/Meta-Llama-3-8B-it", "llama-3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("unsloth/gemma-3-27b-it", "gemma-3-27b"),
    ],
)
def test_a_name_of_the_hub_that_is_not_listed_leads_to_the_shipped_model(
    hub: str, shipped: str
) -> None:
    with pytest.raises(SpecError, match=rf"did you mean {re.escape(shipped)}\?"):
        load_model(hub)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert load_model(name).num_parameters == PUBLISHED[name]


def test_every_shipped_model_loads() -> None:
    assert set(PUBLISHED) < set(list_models())
    assert {load_model(name).name for name in list_models()} == set(list_models())


def test_normed_queries_and_keys_are_one_more_elementwise_kernel() -> None:
    """Qwen3 8B on 4 ranks: 8 heads and 2 KV heads of 128 numbers are read and written."""
    streams = OPS["others"].streams
    assert streams is not None
    shard = load_model("qwen3-8b").shard(4)
    extra = set(streams(shard)) - set(streams(replace(shard, qk_norm=False)))
    assert extra == {Stream("norm", 2 * (8 + 2) * 128)}


def test_kv_bytes_per_token() -> None:
    assert load_model("gpt3-175b").kv_bytes_per_token() == 2 * 96 * 12288 * 2
    assert load_model("llama-2-70b").kv_bytes_per_token() == 2 * 80 * 8 * 128 * 2
    assert load_model("llama-13b").kv_bytes_per_token(dtype_bytes=4) == 2 * 40 * 5120 * 4


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        # GPT-3, 8 ranks: 12 heads each, 3 x 12 x 128 = 4608; FFN 49152 / 8 = 6144, not gated.
        ("gpt3-175b", 8, ((4608, 12288), (12288, 1536), (6144, 12288), (12288, 6144))),
        # LLaMA-13B: gate and up fused, 2 x 13824 = 27648.
        ("llama-13b", 1, ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824))),
        # Llama-2-70B, 4 ranks: 16 query heads and 2 KV heads, (16 + 2 x 2) x 128 = 2560.
        ("llama-2-70b", 4, ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168))),
        # 16 ranks of 8 KV heads: each KV head lies on two ranks, (4 + 2) x 128 = 768.
        ("llama-2-70b", 16, ((768, 8192), (8192, 512), (3584, 8192), (8192, 1792))),
    ],
)
def test_gemm_shapes(name: str, tp: int, expected: tuple[tuple[int, int], ...]) -> None:
    gemms = load_model(name).gemms(tp)
    assert tuple(gemms)[:4] == ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    assert tuple(gemms.values())[:4] == tuple(GemmShape(n, k) for n, k in expected)


def test_lm_head_is_padded_to_64_columns_a_rank() -> None:
    assert load_model("gpt3-175b").gemms(8)["lm_head"] == GemmShape(6336, 12288)
    assert load_model("llama-13b").gemms(1)["lm_head"] == GemmShape(32000, 5120)


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("llama-13b", 3, r"tp 3 does not divide num_heads \(40\)"),
        ("llama-33b", 8, r"tp 8 does not divide num_heads \(52\)"),
        ("llama-13b", 0, "at least 1"),
    ],
)
def test_tp_that_does_not_fit(name: str, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(name).gemms(tp)


def test_flops() -> None:
    model = load_model("gpt3-175b")
    assert model.linear_flops_per_token() == 2 * 96 * 12 * 12288**2
    assert model.lm_head_flops_per_token() == 2 * 12288 * 50257


def test_maximum_batch_of_the_paper_needs_decimal_memory() -> None:
    """B = floor((M_G - M_S) / (L m_kv)) with 90 % of 80e9 B: 11 on TP8, 27 on TP8 x PP8."""
    model = load_model("gpt3-175b")
    usable = 0.9 * 80e9 * 8
    weights, request = 2 * model.num_parameters, 4096 * model.kv_bytes_per_token()
    assert int((usable - weights) / request) == 11
    assert int((usable - weights / 8) / (request / 8) / 8) == 27


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "my-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def test_hugging_face_configs(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, LLAMA))
    assert model.name == "my-model" and model.num_parameters == PUBLISHED["llama-2-7b"]
    assert load_model(tmp_path / "my-model") == model
    mistral = {
        **LLAMA,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "sliding_window": None,
    }
    assert load_model(write(tmp_path, mistral)).num_parameters == PUBLISHED["mistral-7b"]
    # GPT-2 small: 124,439,808 parameters on its model card.
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    assert load_model(write(tmp_path, gpt2)).num_parameters == 124_439_808
    # Qwen2-7B: 7,615,616,512 parameters on its model card.
    qwen2 = {
        **LLAMA,
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
    assert load_model(write(tmp_path, qwen2)).num_parameters == 7_615_616_512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported; allowed: deepseek_v2, "),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"hidden_size": "big"}, "hidden_size must be a positive integer, got 'big'"),
        ({"num_key_value_heads": 5}, "must be a multiple of num_kv_heads"),
    ],
)
def test_bad_hugging_face_config(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, {**LLAMA, **change})
    with pytest.raises(SpecError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_unknown_names_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"did you mean llama-13b\?\); shipped: deepseek-r1"):
        load_model("llama13b")
    with pytest.raises(SpecError, match="No such file"):
        load_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_model(tmp_path)


def test_a_wrong_value_is_repeated_in_part(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(f"name: long\nnum_layers: {'x' * 5000}\n")
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert max(map(len, str(caught.value).splitlines())) < 500
