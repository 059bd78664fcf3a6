"""Readers of Hugging Face mixtures of experts, and of models with latent attention.

What chooses the experts (scores, groups, scales, biases) is elementwise. Layers that predict more
than one token (MTP) are left out: one token an iteration and decode is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sarathi_sim.profiler.facts.hf_families import Fields, llama_like, qwen_windows, windowed
from sarathi_sim.profiler.facts.hf_keys import inactive, short
from sarathi_sim.profiler.facts.hf_reader import HfConfig
from sarathi_sim.profiler.storage.strict import SpecError

#: Of routing and training.
_FREE = """
    router_aux_loss_coef router_jitter_noise output_router_logits norm_topk_prob scoring_func
    topk_method topk_group n_group routed_scaling_factor aux_loss_alpha seq_aux use_routing_bias
    ep_size num_nextn_predict_layers use_mtp num_mtp_modules mtp_transformer_layers
    """


def _mixture(
    config: HfConfig,
    fields: Fields,
    experts: str,
    size: str,
    dense: Iterable[int] = (),
    shared: int = 0,
    bias: bool = False,
) -> Fields:
    """``fields`` with experts: the keys of their number and of their intermediate size."""
    config.free(_FREE)
    layers = sorted(layer for layer in dense if layer < fields["num_layers"])
    if len(layers) == fields["num_layers"]:
        return fields
    if not layers:
        fields = {**fields, "ffn_hidden_size": 0}
    mix = {
        "num_experts": config.integer(experts),
        "top_k": config.integer("num_experts_per_tok"),
        "intermediate_size": config.integer(size),
        "shared_intermediate_size": shared,
        "dense_layers": layers,
        "bias": bias,
    }
    return {**fields, "experts": mix}


def _mixtral(config: HfConfig) -> Fields:
    fields = llama_like(config, longest=131072)
    fields = windowed(config, fields, config.window(0), lambda layer: True)
    return _mixture(config, fields, "num_local_experts", "intermediate_size")


def _qwen_dense(config: HfConfig, layers: int) -> list[int]:
    """The layers without experts."""
    step = config.integer("decoder_sparse_step", 1)
    named = config.listed("mlp_only_layers") or []
    return [layer for layer in range(layers) if layer in named or (layer + 1) % step]


def _qwen2_moe(config: HfConfig) -> Fields:
    bias = "qkv" if config.flag("qkv_bias", True) else "none"
    fields = qwen_windows(config, llama_like(config, bias, 32768))
    shared = config.count("shared_expert_intermediate_size", 5632)
    dense = _qwen_dense(config, fields["num_layers"])
    return _mixture(config, fields, "num_experts", "moe_intermediate_size", dense, shared)


def _qwen3_moe(config: HfConfig) -> Fields:
    head_dim = config.config.get("head_dim")
    config.free("use_qk_norm")  # the type has these norms whatever its files say
    fields = {**llama_like(config, longest=32768), "qk_norm": True}
    if head_dim is None:
        fields["head_dim"] = config.share("hidden_size", "num_attention_heads")
    fields = qwen_windows(config, fields)
    dense = _qwen_dense(config, fields["num_layers"])
    return _mixture(config, fields, "num_experts", "moe_intermediate_size", dense)


def _gpt_oss(config: HfConfig) -> Fields:
    config.free("experts_per_token swiglu_limit initial_context_length")
    fields = {**llama_like(config, "all", 131072), "head_dim": config.integer("head_dim", 64)}
    fields = windowed(config, fields, config.window(128), lambda layer: layer % 2 == 0)
    return _mixture(config, fields, "num_local_experts", "intermediate_size", bias=True)


def _llama4(config: HfConfig) -> Fields:
    """Of the windows: a token sees what is before it in its chunk, half of one on average."""
    config.free("attn_temperature_tuning attn_scale floor_scale for_llm_compressor use_qk_norm")
    layers, step = (
        config.layers(),
        config.integer("interleave_moe_layer_step", 1),
    )
    listed = config.listed("moe_layers")
    sparse = range(step - 1, layers, step) if listed is None else listed
    every = config.integer("no_rope_layer_interval", 4)
    rotary = config.listed("no_rope_layers") or []
    fields = llama_like(config, longest=131072)
    fields["ffn_hidden_size"] = config.integer("intermediate_size_mlp", 16384)
    fields["head_dim"] = config.integer("head_dim", 128)

    def chunked(layer: int) -> bool:
        return bool(rotary[layer] if len(rotary) == layers else (layer + 1) % every)

    fields = windowed(config, fields, config.window(8192, "attention_chunk_size"), chunked)
    dense = [layer for layer in range(layers) if layer not in sparse]
    shared = config.integer("intermediate_size")
    return _mixture(config, fields, "num_local_experts", "intermediate_size", dense, shared)


def _minimax_m2(config: HfConfig) -> Fields:
    kinds = config.listed("attn_type_list") or []
    if any(kind != 1 for kind in kinds):
        raise SpecError(f"{config.where}: attn_type_list {short(kinds)}: not supported; allowed: 1")
    normed = config.flag("use_qk_norm", True)
    config.free("qk_norm_type layernorm_full_attention_beta layernorm_linear_attention_beta"
                " layernorm_mlp_beta mlp_intermediate_size shared_moe_mode")  # fmt: skip
    fields = {**llama_like(config, longest=196608), "qk_norm": normed}
    shared = config.count("shared_intermediate_size")
    return _mixture(config, fields, "num_local_experts", "intermediate_size", shared=shared)


def _deepseek(config: HfConfig) -> Fields:
    """DeepSeek V2 and V3, Kimi K2: latent attention, and experts beside shared ones."""
    if config.config["model_type"] != "deepseek_v2":
        config.default(n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3)
    config.default(q_lora_rank=1536)  # null: queries have no low rank
    nope, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    latent = {
        "kv_rank": config.integer("kv_lora_rank", 512),
        "query_rank": config.count("q_lora_rank"),
        "rope_dim": rope,
        "nope_dim": nope,
        "value_dim": config.integer("v_head_dim", 128),
    }
    config.default(num_key_value_heads=config.integer("num_attention_heads"))
    config.default(head_dim=nope + rope)  # what files say of it does not concern this attention
    fields = llama_like(config, longest=163840)
    fields |= {"latent": latent, "num_kv_heads": 1, "head_dim": nope + rope}
    size, many = config.integer("moe_intermediate_size", 1407), config.count("n_shared_experts")
    first, every = config.count("first_k_dense_replace"), config.integer("moe_layer_freq", 1)
    layers = fields["num_layers"]
    dense = [layer for layer in range(layers) if layer < first or layer % every]
    if inactive(config.config.get("n_routed_experts")):
        config.free("n_routed_experts num_experts_per_tok")
        dense = list(range(layers))
    shared = many * size
    return _mixture(config, fields, "n_routed_experts", "moe_intermediate_size", dense, shared)


READERS: dict[str, Callable[[HfConfig], Fields]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
