"""What the keys of a Hugging Face ``config.json`` mean for cost: which are free, which refused.

A key in neither table that ``hf_config.py`` does not read is unknown.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

_FREE_STARTS = ("_", "rope_", "summary_", "initializer_", "rotary_", "original_max_position_")
_FREE_ENDS = ("_token_id", "_token", "_dropout", "_pdrop", "_dropout_prob", "_eps", "_epsilon")

# What the file is, and how its weights are stored or trained.
_OF_THE_FILE = """
    architectures auto_map model_type transformers_version torch_dtype dtype initializer_range
    pretraining_tp use_cache use_bfloat16 fp16 bf16 fp32 torchscript tf_legacy_loss onnx_safe
    problem_type finetuning_task id2label label2id tokenizer_class task_specific_params prefix name
    unsloth_version unsloth_fixed max_window_layers use_sliding_window partial_rotary_factor seed
    gradient_checkpointing attention_probs_dropout hidden_dropout is_decoder
    """
# Rotary positions and scales: elementwise, whatever their values.
_ELEMENTWISE = """
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn use_dynamic_ntk
    use_logn_attn softmax_in_fp32 use_flash_attn use_cache_kernel n_ctx use_mrope
    """
_OF_SAMPLING = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    chunk_size_feed_forward output_scores return_dict_in_generate output_attentions
    output_hidden_states return_dict remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens
    """
_FREE = frozenset((_OF_THE_FILE + _ELEMENTWISE + _OF_SAMPLING).split())

#: What is supported instead -> the keys that ask for something else unless they are inactive.
#: First what other types of model have.
_OF_OTHER_TYPES = {
    "this type of model is modelled with attention over the whole context, so it must be null or "
    "at least max_position_embeddings": "sliding_window",
    "this type of model is modelled with attention over the whole context in every layer": """
        attention_chunk_size sliding_window_pattern attention_window local_attention
        global_attn_every_n_layers no_rope_layer_interval attn_window_size interleaved_attention
        """,
    "this type of model is modelled with dense FFNs; docs/models.md lists types with experts": """
        num_local_experts num_experts n_routed_experts moe_num_experts num_moe_experts
        n_shared_experts num_shared_experts moe_intermediate_size ffn_config
        shared_expert_intermediate_size num_experts_per_tok num_experts_per_token moe_top_k
        """,
    "this type of model is modelled with keys and values of whole heads": """
        kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        """,
    "number formats are read from quantization_config": """
        quantization_config quantization compression_config use_cache_quantization
        kv_cache_scheme
        """,
    "this type of model is modelled without norms of queries and keys": """
        use_qk_norm qk_norm qk_layernorm use_qk_layernorm query_key_norm
        """,
    "this type of model is modelled with softmax attention without a cap or sinks": """
        attn_logit_softcapping final_logit_softcapping attn_logit_soft_cap logit_soft_cap
        attention_sinks
        """,
    "this type of model is modelled with layers that are all alike": "first_k_dense_replace",
}
_OF_NO_TYPE = {
    "only attention over all tokens, or over a window of them, is modelled": """
        full_attention_interval index_topk sparse_attention sparse_attention_config
        """,
    "only softmax attention without a gate is modelled": "attn_output_gate",
    "only decoders of text are modelled": """
        is_encoder_decoder add_cross_attention cross_attention_hidden_size cross_attention_layers
        text_config vision_config audio_config visual encoder decoder tie_encoder_decoder
        """,
    "only layers of attention and FFN, all alike, are modelled": """
        block_configs layers_block_type hybrid_override_pattern ssm_cfg mamba_d_state
        mamba_expand linear_num_value_heads linear_num_key_heads attn_layer_indices
        attn_layer_period num_kv_shared_layers pruned_heads altup_num_inputs
        hidden_size_per_layer_input parallel_attn use_parallel_residual
        """,
    "one token an iteration and decode is modelled": "num_nextn_predict_layers medusa_num_heads",
}
_REFUSED = {
    key: why for why, keys in (_OF_OTHER_TYPES | _OF_NO_TYPE).items() for key in keys.split()
}
#: Keys that some type of model has, and is modelled with.
ELSEWHERE = frozenset(key for keys in _OF_OTHER_TYPES.values() for key in keys.split())
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

#: Keys that must hold one of few values: what those are, and why.
_ONE_OF: dict[str, tuple[tuple[object, ...], str]] = {
    "torch_dtype": (
        ("float16", "bfloat16", "float32", "auto"),
        "the profile's dtype is what counts",
    ),
    "no_bias": ((True,), "only queries, keys and values may have a bias here"),
    "position_embedding_type": (("absolute", "rope", "rotary"), "others cost differently"),
    # One elementwise pass each.
    "hidden_act": (
        ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu",
         "relu"),
        "these are one elementwise pass",
    ),
}  # fmt: skip
_ONE_OF["dtype"] = _ONE_OF["torch_dtype"]
_ONE_OF["activation_function"] = _ONE_OF["hidden_activation"] = _ONE_OF["hidden_act"]


def inactive(value: object) -> bool:
    """Whether a value switches its feature off: null, false, zero or nothing."""
    return value is None or value is False or value in (0, "", [], {})


def short(value: object) -> str:
    """A value for a message, cut off where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or lists in lists
        return "a value too long to show"
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


def problems(config: Mapping[str, Any], used: Container[str] = ()) -> list[str]:
    """``key value: what is supported`` for every key that changes cost in a way not modelled.

    ``used`` are keys whose values are modelled, or refused elsewhere.
    """
    found = []
    for key, value in config.items():
        if key in used:
            continue
        why = _REFUSED.get(key)
        if why is not None and not (inactive(value) or _switched_off(key, config)):
            found.append(f"{key} {short(value)}: not supported: {why}")
        if key in _ONE_OF and value is not None:
            allowed, reason = _ONE_OF[key]
            if not any(value is one or value == one for one in allowed):
                listed = ", ".join(str(one) for one in allowed)
                found.append(f"{key} {short(value)}: not supported ({reason}); allowed: {listed}")
    return found + _of_lists(config, used)


def _switched_off(key: str, config: Mapping[str, Any]) -> bool:
    """Whether another key says that this one has no effect."""
    if key == "sliding_window":
        if not config.get("use_sliding_window", True):
            return True
        window, longest = config[key], config.get("max_position_embeddings")
        return isinstance(window, int) and isinstance(longest, int) and window >= longest > 0
    if key in ("num_experts_per_tok", "num_experts_per_token", "moe_intermediate_size"):
        given = [config[name] for name in _EXPERTS if name in config]
        return bool(given) and all(map(inactive, given))
    return False


def _of_lists(config: Mapping[str, Any], used: Container[str]) -> list[str]:
    found = []
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    whole = ["full_attention"] * (layers if type(layers) is int else 0)
    if types is not None and types != whole and "layer_types" not in used:
        found.append(
            f"layer_types {short(types)}: not supported; allowed: null, or full_attention for each "
            "of num_hidden_layers"
        )
    heads = ("ForCausalLM", "LMHeadModel")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) and name.endswith(heads) for name in architectures
    ):
        found.append(
            f"architectures {short(architectures)}: not supported: only models with an LM head, "
            "whose names end in ForCausalLM or LMHeadModel"
        )
    return found


def unknown(config: Mapping[str, Any], used: set[str]) -> list[str]:
    """Keys that are neither ``used`` nor known, and are not inactive."""
    known = used | _FREE | _REFUSED.keys() | _ONE_OF.keys() | {"layer_types"}
    return [
        key
        for key, value in config.items()
        if key not in known
        and not key.startswith(_FREE_STARTS)
        and not key.endswith(_FREE_ENDS)
        and not inactive(value)
    ]
