"""Configurations as Hugging Face has them: modelled wholly (by published counts), or refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_sim.profiler.facts import hf_config
from sarathi_sim.profiler.facts.layer_kinds import Latent, Windows
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.storage.strict import SpecError
from tests.profiler import hf_configs as hf


def _load(folder: Path, config: hf.Config | str) -> ModelSpec:
    path = folder / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_model(path)


LEFT_OUT = object()


def _changed(config: hf.Config, change: hf.Config) -> hf.Config:
    return {key: value for key, value in {**config, **change}.items() if value is not LEFT_OUT}


def _refusal(folder: Path, config: hf.Config | str) -> str:
    with pytest.raises(SpecError) as caught:
        _load(folder, config)
    text = str(caught.value)
    assert all(line.startswith(str(folder / "some-model" / "config.json")) for line in
               text.splitlines())  # fmt: skip
    return text


@pytest.mark.parametrize("name", [*hf.MODELLED, *hf.SHIPPED])
def test_modelled(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Every key is known. What ships has the same fields, in whatever number formats."""
    if name in hf.SHIPPED:
        plain = {"name": name, "dtype": "bf16", "kv_cache_dtype": "bf16", "moe_dtype": None}
        read, shipped = _load(tmp_path, hf.SHIPPED[name]), load_model(name)
        assert replace(read, **plain) == replace(shipped, **plain)
    else:
        config, parameters = hf.MODELLED[name]
        assert _load(tmp_path, config).num_parameters == parameters
    assert not [r for r in caplog.records if "unknown keys" in r.getMessage()]


def test_layers_with_a_state(tmp_path: Path) -> None:
    """By an interval or by name, and states in two bytes."""
    listed = ["linear_attention"] * 47 + ["full_attention"]
    named = _load(
        tmp_path, {**hf.QWEN_3_NEXT, "layer_types": listed, "mamba_ssm_dtype": "bfloat16"}
    )
    assert named.recurrent is not None and named.recurrent.full_layers == (47,)
    assert named.recurrent.number_bytes == 2
    every = _load(tmp_path, {**hf.QWEN_3_NEXT, "full_attention_interval": 16}).recurrent
    assert every is not None and every.full_layers == (15, 31, 47) and every.number_bytes == 4
    assert not _load(tmp_path, {**hf.QWEN_3_NEXT, "attn_output_gate": False}).output_gate
    nano = _load(tmp_path, hf.NEMOTRON_3_NANO)
    assert nano.experts is not None and len(nano.experts.bare_layers) == 6


def test_dense_layers_need_their_width(tmp_path: Path) -> None:
    text = {**hf.QWEN_3_5["text_config"], "mlp_only_layers": [3]}
    refused = _refusal(tmp_path, {**hf.QWEN_3_5, "text_config": text})
    assert "ffn_hidden_size must be positive, got 0" in refused
    model = _load(tmp_path, {**hf.QWEN_3_NEXT, "mlp_only_layers": [3]})
    assert model.experts is not None and model.experts.dense_layers == (3,)
    assert model.ffn_hidden_size == 5120


SAME = [
    # As files of later versions say it.
    (hf.GLM_5, {"index_topk_freq": 1, "indexer_types": ["full"] * 78, "num_experts": 256}),
    # What the type takes where the file says nothing; null is no low rank of queries.
    (
        hf.DEEPSEEK_V3,
        dict.fromkeys(["q_lora_rank", "n_shared_experts", "n_routed_experts"], LEFT_OUT),
    ),
    (hf.DEEPSEEK_V3, {"first_k_dense_replace": LEFT_OUT}),
    (hf.LLAMA_3, {"sliding_window": None}),
    (hf.LLAMA_3, {"sliding_window": 4096, "use_sliding_window": False}),
    (hf.LLAMA_3, {"sliding_window": 131072}),
    (hf.LLAMA_3, {"num_experts": 0, "num_experts_per_tok": 2}),
    (hf.LLAMA_3, {"num_local_experts": None, "layer_types": None, "kv_lora_rank": None}),
    (hf.LLAMA_3, {"quantization_config": None, "head_dim": None, "mlp_bias": None}),
    (hf.LLAMA_3, {"hidden_act": "gelu", "is_encoder_decoder": False, "pruned_heads": {}}),
]


@pytest.mark.parametrize(("base", "change"), SAME)
def test_what_says_the_same(tmp_path: Path, base: hf.Config, change: hf.Config) -> None:
    assert _load(tmp_path, _changed(base, change)) == _load(tmp_path, base)


def test_windows(tmp_path: Path) -> None:
    """Where the type has a default for files that leave the key out, null is none."""
    for base, window in hf.WINDOWED:
        assert _load(tmp_path, base).windows == Windows(*window)
    without = {"sliding_window": LEFT_OUT, "max_window_layers": 0}
    for base, tokens in (
        (hf.GEMMA_2_9B, 4096),
        (hf.GPT_OSS_20B, 128),
        (hf.MISTRAL_3, 4096),
        (hf.QWEN_2, 4096),
    ):
        used = _changed(base, {"use_sliding_window": True})
        found = _load(tmp_path, _changed(used, without)).windows
        assert found is not None and found.tokens == tokens
        assert _load(tmp_path, _changed(used, {"sliding_window": None})).windows is None


@pytest.mark.parametrize("name", hf.QUANTISED)
def test_quantised_checkpoints(tmp_path: Path, name: str) -> None:
    section, formats = hf.QUANTISED[name]
    model = _load(tmp_path, {**hf.LLAMA_3, "quantization_config": section})
    assert (model.dtype, model.kv_cache_dtype) == formats
    assert replace(model, dtype="bf16", kv_cache_dtype="bf16") == _load(tmp_path, hf.LLAMA_3)


def test_experts_alone_are_quantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As DeepSeek's published NVFP4 and Llama 4's FP8: attention is left out layer by layer."""
    hf_config._warn.cache_clear()
    names = [f"model.layers.{layer}.self_attn*" for layer in range(61)]
    section = {**hf.NVFP4, "ignore": [*names, "lm_head", "model.layers.61*"]}
    with caplog.at_level(logging.WARNING):
        model = _load(tmp_path, {**hf.DEEPSEEK_V3, "quantization_config": section})
    assert model.formats == {"moe_dtype": "nvfp4", "kv_cache_dtype": "fp8"}
    assert "experts in nvfp4, all else is taken to be bf16" in caplog.records[0].getMessage()

    layers = range(48)
    names = [f"language_model.model.layers.{i}.self_attn.{op}_proj" for i in layers for op in "qo"]
    names += [f"language_model.model.layers.{i}.feed_forward.shared_expert.up_proj" for i in layers]
    section = {"quant_method": "fp8", "modules_to_not_convert": names}
    model = _load(tmp_path, {**hf.LLAMA_4_SCOUT, "quantization_config": section})
    assert model.formats == {"moe_dtype": "fp8"}

    assert _load(tmp_path, hf.KIMI_K2_5).formats == {"moe_dtype": "int4_wo"}

    layers, layer = range(60), "model.language_model.layers"
    names = [f"{layer}.{i}.{'self' if i % 4 == 3 else 'linear'}_attn*" for i in layers]
    names += [f"{layer}.{i}.mlp.shared_expert{end}" for i in layers for end in ("*", "_gate")]
    names += ["lm_head", "*.mlp.shared_expert.*", "model.visual*", "mtp.layers.0*"]
    section = {**hf.NVFP4, "exclude_modules": names}
    model = _load(tmp_path, {**hf.QWEN_3_5, "quantization_config": section})
    assert model.formats == {"moe_dtype": "nvfp4", "kv_cache_dtype": "fp8"}


def test_parts_of_recurrent_and_sparse_attention_that_stay_in_bf16(tmp_path: Path) -> None:
    """GLM-5-FP8's list; Qwen3.5's and Qwen3-Next's parts, whose columns are no whole blocks."""
    parts = ["indexers_proj", "indexer.k_norm", "indexer.k_norm.bias", "kv_a_layernorm"]
    names = [f"model.layers.0.self_attn.{part}" for part in parts] + ["model.layers.78.eh_proj"]
    section = {**hf.FP8_BLOCKS, "modules_to_not_convert": names}
    assert _load(tmp_path, {**hf.GLM_5, "quantization_config": section}).dtype == "fp8_block"
    for part in ("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "norm"):
        section["modules_to_not_convert"] = [f"model.layers.0.linear_attn.{part}"]
        model = _load(tmp_path, {**hf.QWEN_3_NEXT, "quantization_config": section})
        assert model.formats == {"dtype": "fp8_block"}
    section["modules_to_not_convert"] = ["model.layers.0.linear_attn.in_proj_qkvz"]
    text = _refusal(tmp_path, {**hf.QWEN_3_NEXT, "quantization_config": section})
    assert "in_proj_qkvz of the attention are left out, and its output projection is quan" in text

    latent = ("kv_a_proj_with_mqa", "q_a_proj", "q_b_proj")
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(61) for name in latent]
    text = _refusal(
        tmp_path, {**hf.DEEPSEEK_V3, "quantization_config": {**hf.NVFP4, "exclude_modules": names}}
    )
    assert f"{', '.join(latent)} of the attention are left out, and its output" in text
    names += [f"model.layers.{layer}.self_attn.o_proj" for layer in range(61)]
    model = _load(
        tmp_path, {**hf.DEEPSEEK_V3, "quantization_config": {**hf.NVFP4, "exclude_modules": names}}
    )
    assert model.moe_dtype == "nvfp4"


def test_the_layers_of_nemotron_as_a_list(tmp_path: Path) -> None:
    """transformers 5 writes a list in place of the pattern, and may leave out its length."""
    words = {"M": "mamba", "*": "attention", "E": "moe"}
    kinds = [words[letter] for letter in hf.NEMOTRON_3_NANO["hybrid_override_pattern"]]
    listed = {**hf.NEMOTRON_3_NANO, "layers_block_type": kinds}
    del listed["hybrid_override_pattern"]
    whole = _load(tmp_path, hf.NEMOTRON_3_NANO)
    assert _load(tmp_path, listed) == whole
    del listed["num_hidden_layers"]
    assert _load(tmp_path, listed) == whole
    text = _refusal(tmp_path, {**listed, "layers_block_type": [*kinds, "mlp"]})
    assert "allowed: a list of mamba, attention, moe" in text


@pytest.mark.parametrize("dense", ["0*", "0.mlp*", "0.mlp.gate_proj"])
def test_the_formats_of_modelopt_count(tmp_path: Path, dense: str) -> None:
    """NVIDIA's Kimi K2.5 in NVFP4: its config.json keeps the int4 of the checkpoint it is from, its
    own format is in a file beside it, or outside of ``text_config``."""
    names = [f"language_model.layers.{layer}.self_attn*" for layer in range(61)]
    names = [name for name in names if not dense.startswith("0*") or ".0." not in name]
    names += ["language_model.layers.1.mlp.shared_experts*", f"language_model.layers.{dense}"]
    section = {**hf.NVFP4, "exclude_modules": [*names, "lm_head", "vision_tower*"]}
    nvfp4 = {"moe_dtype": "nvfp4", "kv_cache_dtype": "fp8"}
    assert _load(tmp_path, {**hf.KIMI_K2_5, "quantization_config": section}).formats == nvfp4
    beside = tmp_path / "some-model" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    assert _load(tmp_path, hf.KIMI_K2_5).formats == nvfp4
    beside.write_text('{"quantization": "NVFP4"}')
    with pytest.raises(SpecError, match=r"hf_quant_config\.json: quantization 'NVFP4': must be a"):
        _load(tmp_path, hf.KIMI_K2_5)


def test_latent_attention(tmp_path: Path) -> None:
    model = _load(tmp_path, hf.DEEPSEEK_V3)
    assert model.latent == Latent(512, 64, 128, 128, query_rank=1536)
    assert (model.num_kv_heads, model.head_dim, model.dtype) == (1, 192, "fp8_block")
    assert model.experts is not None and model.experts.dense_layers == (0, 1, 2)
    small = _load(tmp_path, hf.DEEPSEEK_V2_LITE)
    assert small.latent == Latent(512, 64, 128, 128)
    assert small.experts is not None and small.experts.shared_intermediate_size == 2 * 1408


def test_dense_layers_between_mixtures(tmp_path: Path) -> None:
    text = {**hf.LLAMA_4_SCOUT["text_config"], "interleave_moe_layer_step": 2}
    model = _load(tmp_path, {**hf.LLAMA_4_SCOUT, "text_config": text})
    assert model.experts is not None and model.experts.dense_layers == tuple(range(0, 48, 2))
    assert (model.ffn_hidden_size, model.experts.intermediate_size) == (16384, 8192)


def test_of_images_only_the_text_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf_config._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, hf.LLAMA_4_SCOUT)
    assert "only text_config is modelled, no images" in caplog.records[0].getMessage()


def test_biases_and_head_dim_are_used(tmp_path: Path) -> None:
    plain = _load(tmp_path, hf.LLAMA_3).num_parameters
    qkvo = 32 * ((32 + 2 * 8) * 128 + 4096)
    assert _load(tmp_path, {**hf.LLAMA_3, "attention_bias": True}).num_parameters == plain + qkvo
    ffn = 32 * (2 * 14336 + 4096)
    assert _load(tmp_path, {**hf.LLAMA_3, "mlp_bias": True}).num_parameters == plain + ffn
    wide = _load(tmp_path, {**hf.LLAMA_3, "head_dim": 256})
    assert wide.num_parameters == plain + 32 * 4096 * 128 * (32 + 2 * 8 + 32)
    assert _load(tmp_path, hf.QWEN_15_MOE).attention_bias == "qkv"
    assert _load(tmp_path, {**hf.QWEN_15_MOE, "qkv_bias": False}).attention_bias == "none"


def test_a_key_that_nobody_knows_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf_config._warn.cache_clear()
    changed = {**hf.LLAMA_3, "use_flux_gate": True, "hyper_rank": 7, "old_switch": False}
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, changed)
        _load(tmp_path, changed)
    (record,) = caplog.records  # once, however often the file is read
    assert record.getMessage().endswith(
        "config.json: unknown keys, assumed to have no cost: 'use_flux_gate', 'hyper_rank'"
    )


@pytest.mark.parametrize(("config", "message"), [*hf.REFUSED, *hf.NO_CONFIGURATION])
def test_what_is_refused_in_a_line(tmp_path: Path, config: hf.Config | str, message: str) -> None:
    (line, *more) = _refusal(tmp_path, config).splitlines()
    assert f"config.json: {message}" in line and not more and len(line) < 600


def test_a_type_that_nobody_knows(tmp_path: Path) -> None:
    """It is not refused for what others are modelled with."""
    of_others = {"num_local_experts": 8, "use_qk_norm": True, "kv_lora_rank": 512}
    config = {**hf.LLAMA_3, **of_others, "model_type": "new_moe", "layer_types": ["full_attention"]}
    (line,) = _refusal(tmp_path, config).splitlines()
    assert "model_type 'new_moe' is not supported; allowed: deepseek_v2, " in line
    assert "where the layers are those of one of them, give a copy of the file" in line
    text = _refusal(tmp_path, {**config, "ssm_cfg": {"d_state": 16}})
    assert "ssm_cfg {'d_state': 16}: not supported: only identical layers of attention" in text


@pytest.mark.parametrize(
    ("target", "message"),
    [("config.json", "Too many levels of symbolic links"), ("/dev/zero", "not a regular file")],
)
def test_links_that_lead_to_no_file(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "config.json").symlink_to(target)
    with pytest.raises(SpecError, match=rf"config\.json: {message}"):
        load_model(tmp_path / "config.json")
