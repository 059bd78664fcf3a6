"""A Hugging Face ``config.json`` read as the fields of a ModelSpec: modelled completely or refused.

Tables hold the effect of each key on cost (free, refused, or one of few values), and each model
type's keys for its sizes, if they differ from Llama's. A warning names unknown keys. For a model
that reads images only the text part is read. Number formats are in ``formats.py``.

Elementwise parts cost next to nothing and are left out: attention sinks (gpt_oss), soft caps
(gemma2), and the routing of experts (scores, groups, scales, biases). Layers that predict more than
one token (MTP) are no part of the model: they are a drafter (``model.py``).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..storage.files import read_bounded
from ..storage.not_modelled import not_modelled
from ..storage.strict import SpecError, short
from .formats import inactive, read_formats
from .layer_kinds import MOST

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

#: The supported alternative -> the keys that ask for something else unless they are inactive.
#: First the keys of other types of model.
_OF_OTHER_TYPES = {
    "this type of model is modelled with attention over the whole context, so it must be null or "
    "at least max_position_embeddings": "sliding_window",
    "this type of model is modelled with attention over the whole context in every layer": """
        attention_chunk_size sliding_window_pattern attention_window local_attention
        global_attn_every_n_layers no_rope_layer_interval attn_window_size interleaved_attention
        """,
    "this type of model is modelled with dense FFNs (with experts: docs/reference/models.md)": """
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
    "this type of model is modelled with identical layers": "first_k_dense_replace",
    "this type of model is modelled with attention in every layer": """
        full_attention_interval linear_num_value_heads linear_num_key_heads
        hybrid_override_pattern
        """,
    "this type of model is modelled with attention that picks no tokens": "index_topk",
    "this type of model is modelled with attention without a gate": "attn_output_gate",
}
_OF_NO_TYPE = {
    "only attention over all tokens, or over a window of them, is modelled": """
        sparse_attention sparse_attention_config
        """,
    "layers that share an indexer are not modelled": """
        index_topk_freq index_topk_pattern indexer_types
        """,
    "experts of the whole hidden size are modelled": "moe_latent_size",
    "recurrent layers are modelled without biases of their projections": "mamba_proj_bias",
    "only decoders of text are modelled": """
        is_encoder_decoder add_cross_attention cross_attention_hidden_size cross_attention_layers
        text_config vision_config audio_config visual encoder decoder tie_encoder_decoder
        """,
    "only identical layers of attention and FFN are modelled": """
        block_configs layers_block_type ssm_cfg mamba_d_state mamba_expand attn_layer_indices
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

#: Keys that must hold one of few values: these values, and the reason.
_ONE_OF: dict[str, tuple[tuple[object, ...], str]] = {
    "torch_dtype": (
        ("float16", "bfloat16", "float32", "auto"), "the profile's dtype is what counts"
    ),
    "no_bias": ((True,), "only queries, keys and values may have a bias here"),
    "position_embedding_type": (("absolute", "rope", "rotary"), "others cost differently"),
    "hidden_act": (
        ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu",
         "relu"),
        "these are one elementwise pass",
    ),
}  # fmt: skip
_ONE_OF["dtype"] = _ONE_OF["torch_dtype"]
_ONE_OF["activation_function"] = _ONE_OF["hidden_activation"] = _ONE_OF["hidden_act"]


def problems(config: Mapping[str, Any], used: Container[str] = ()) -> list[str]:
    """``key value: what is supported`` for every key that changes cost in a way not modelled.
    ``used`` are keys whose values are modelled, or refused elsewhere."""
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
        line = (
            f"architectures {short(architectures)}: not supported: only models with an LM head, "
            "whose names end in ForCausalLM or LMHeadModel"
        )
        if "Eagle" in str(architectures):
            line += (
                "; an EAGLE-3 drafter is `speculation.method: eagle3` of the model it drafts for"
            )
        found.append(line)
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


Fields = dict[str, Any]
Inside = Callable[[int], bool]
"""Whether the layer sees only a window of the tokens."""

MOST_LAYERS = 4096
"""No model has more layers."""
_WINDOWED = ("sliding_attention", "chunked_attention")


class HfConfig:
    """Typed access to the keys of one config.json; errors name the file and the key. ``used``
    collects the keys that were asked for, and those declared to cost nothing."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = dict(config), where
        self.used: set[str] = set()

    def error(self, text: str) -> SpecError:
        return SpecError(f"{self.where}: {text}")

    def integer(self, key: str, default: int | None = None, most: int = MOST) -> int:
        self.used.add(key)
        value = self.config.get(key, default)
        value = default if value is None else value
        if value is None:
            raise self.error(f"key '{key}' is missing")
        if type(value) is not int or value <= 0:
            raise self.error(f"{key} must be a positive integer, got {short(value)}")
        if value > most:
            raise self.error(f"{key} must be at most {most}, got {short(value)}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Zero or a positive integer; ``default`` also for null."""
        self.used.add(key)
        value = self.config.get(key)
        if value is None or value is False or value == 0:
            return default if value is None else 0
        return self.integer(key)

    def flag(self, key: str, default: bool) -> bool:
        self.used.add(key)
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {short(value)}")
        return default if value is None else value

    def share(self, whole: str, parts: str) -> int:
        """``whole`` over ``parts``. Raises SpecError where that leaves a remainder."""
        size, count = self.integer(whole), self.integer(parts)
        if size % count:
            raise self.error(f"{whole} ({size}) must be a multiple of {parts} ({count})")
        return size // count

    def listed(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list (of that ``length``), or None."""
        self.used.add(key)
        value = self.config.get(key)
        if value is not None and (not isinstance(value, list) or length not in (None, len(value))):
            many = "" if length is None else f" of {length}"
            raise self.error(f"{key} must be a list{many}, got {short(value)}")
        return value

    def layer_types(self, layers: int, *allowed: str) -> list[str] | None:
        """The type of each layer, or None. Raises SpecError for one that is not ``allowed``."""
        types = self.listed("layer_types", layers)
        for name in types or ():
            if name not in allowed:
                listed = ", ".join(allowed)
                raise self.error(f"layer_types {short(name)}: not supported; allowed: {listed}")
        return types

    def free(self, keys: str) -> None:
        """Declare keys to cost nothing in this type of model, whatever their values."""
        self.used |= set(keys.split())


def _everywhere(config: HfConfig) -> Inside:
    return lambda layer: True


def _even(config: HfConfig) -> Inside:
    return lambda layer: layer % 2 == 0


def _gemma3(config: HfConfig) -> Inside:
    every = config.integer("sliding_window_pattern", 6)
    return lambda layer: (layer + 1) % every > 0


def _qwen(config: HfConfig) -> Inside | None:
    """The layers from ``max_window_layers`` on, where it is switched on."""
    first = config.count("max_window_layers", 28)
    return (lambda layer: layer >= first) if config.flag("use_sliding_window", False) else None


def _llama4(config: HfConfig) -> Inside:
    """A token sees the tokens before it in its chunk, half a chunk on average."""
    every = config.integer("no_rope_layer_interval", 4)
    rotary = config.listed("no_rope_layers") or []
    whole = len(rotary) == config.integer("num_hidden_layers")
    return lambda layer: bool(rotary[layer] if whole else (layer + 1) % every)


def _qwen_dense(config: HfConfig, layers: int) -> Iterable[int]:
    step = config.integer("decoder_sparse_step", 1)
    named = config.listed("mlp_only_layers") or []
    return (layer for layer in range(layers) if layer in named or (layer + 1) % step)


def _llama4_dense(config: HfConfig, layers: int) -> Iterable[int]:
    step = config.integer("interleave_moe_layer_step", 1)
    listed = config.listed("moe_layers")
    sparse = range(step - 1, layers, step) if listed is None else listed
    return (layer for layer in range(layers) if layer not in sparse)


def _deepseek_dense(config: HfConfig, layers: int) -> Iterable[int]:
    first, every = config.count("first_k_dense_replace"), config.integer("moe_layer_freq", 1)
    if inactive(config.config.get("n_routed_experts")):
        config.free("n_routed_experts num_experts_per_tok")
        return range(layers)
    return (layer for layer in range(layers) if layer < first or layer % every)


def _qwen1(config: HfConfig, fields: Fields) -> Fields:
    """``intermediate_size`` counts gate and up together."""
    if fields["ffn_hidden_size"] % 2:
        raise config.error("intermediate_size must be even: it counts gate and up")
    return {
        "ffn_hidden_size": fields["ffn_hidden_size"] // 2,
        "head_dim": config.integer("kv_channels", fields["head_dim"]),
        "max_position_embeddings": config.integer("seq_length", 2048),
    }


def _minimax(config: HfConfig, fields: Fields) -> Fields:
    kinds = config.listed("attn_type_list") or []
    if any(kind != 1 for kind in kinds):
        raise config.error(f"attn_type_list {short(kinds)}: not supported; allowed: 1")
    normed = config.flag("use_qk_norm", True)
    return {"qk_norm": normed, "norm_over_heads": normed}


def _latent(config: HfConfig, fields: Fields) -> Fields:
    """The latent attention of DeepSeek V2 and V3 and of Kimi K2. What files say of ``head_dim``
    does not concern it; a ``q_lora_rank`` of null is no low rank of queries."""
    nope, rope = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    latent = {
        "kv_rank": config.integer("kv_lora_rank", 512),
        "query_rank": config.count("q_lora_rank"),
        "rope_dim": rope,
        "nope_dim": nope,
        "value_dim": config.integer("v_head_dim", 128),
    }
    return {"latent": latent, "num_kv_heads": 1, "head_dim": nope + rope}


def _indexed(config: HfConfig, fields: Fields) -> Fields:
    """Latent attention with an indexer of its own in every layer."""
    if config.config.get("index_topk_freq") == 1:
        config.free("index_topk_freq")
    kinds = config.config.get("indexer_types")
    if isinstance(kinds, list) and all(kind == "full" for kind in kinds):
        config.free("indexer_types")
    sizes = {"heads": "index_n_heads", "dim": "index_head_dim", "top_k": "index_topk"}
    indexer = {name: config.integer(key) for name, key in sizes.items()}
    return {**_latent(config, fields), "indexer": indexer}


_STATES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _state_bytes(config: HfConfig, key: str) -> int:
    """Bytes of a state's numbers, by the file's type for them; float32 where it has none."""
    config.free(key)
    kind = config.config.get(key) or "float32"
    if not isinstance(kind, str) or kind not in _STATES:
        raise config.error(f"{key} {short(kind)}: not supported; allowed: {', '.join(_STATES)}")
    return _STATES[kind]


def _delta(config: HfConfig, fields: Fields) -> Fields:
    """The gated delta nets of Qwen3-Next and Qwen3.5, and the gate of the other layers'
    attention."""
    layers, every = fields["num_layers"], config.integer("full_attention_interval", 4)
    types = config.layer_types(layers, "full_attention", "linear_attention")
    if types is None:
        rest = "linear_attention"
        types = ["full_attention" if (n + 1) % every == 0 else rest for n in range(layers)]
    recurrent = {
        "full_layers": [n for n, name in enumerate(types) if name == "full_attention"],
        "key_heads": config.integer("linear_num_key_heads", 16),
        "value_heads": config.integer("linear_num_value_heads", 32),
        "key_dim": config.integer("linear_key_head_dim", 128),
        "value_dim": config.integer("linear_value_head_dim", 128),
        "conv": config.integer("linear_conv_kernel_dim", 4),
        "number_bytes": _state_bytes(config, "mamba_ssm_dtype"),
    }
    return {"recurrent": recurrent, "output_gate": config.flag("attn_output_gate", True)}


def _blocks(config: HfConfig) -> list[str]:
    """The layers of Nemotron 3: each a mixer, M (Mamba 2) or * (attention), and E, the experts
    that follow it, unless another mixer does."""
    key = "hybrid_override_pattern"
    pattern = config.config.get(key)
    config.free(key)
    whole = config.integer("num_hidden_layers", most=MOST_LAYERS)
    if not isinstance(pattern, str) or not re.fullmatch(r"([M*]E?)+", pattern):
        allowed = "M and *, each with or without one E after it"
        raise config.error(f"{key} {short(pattern)}: not supported; allowed: {allowed}")
    if len(pattern) != whole:
        count = len(pattern)
        raise config.error(f"{key} must have num_hidden_layers ({whole}) letters, got {count}")
    return re.findall(r"[M*]E?", pattern)


def _nemotron(config: HfConfig, fields: Fields) -> Fields:
    blocks = _blocks(config)
    recurrent = {
        "full_layers": [n for n, block in enumerate(blocks) if block[0] == "*"],
        "key_heads": config.integer("n_groups"),
        "value_heads": config.integer("mamba_num_heads"),
        "key_dim": config.integer("ssm_state_size"),
        "value_dim": config.integer("mamba_head_dim"),
        "conv": config.integer("conv_kernel", 4),
        "kind": "mamba2",
        "number_bytes": _state_bytes(config, "mamba_ssm_cache_dtype"),
    }
    return {"num_layers": len(blocks), "recurrent": recurrent}


@dataclass(frozen=True)
class HfType:
    """The differences of a ``model_type`` from Llama.

    ``longest``, ``head_dim``, ``tied`` and ``kv_as_heads`` (as many KV heads as heads) are defaults
    for missing keys. ``bias``: the attention bias, whatever the file says. ``window``: its default
    in tokens (None: this type has no windows), and ``inside`` the layers with a window, unless
    ``layer_types`` names them. ``experts``: the keys of their number and of their intermediate
    size, ``dense`` the layers with a dense network instead, ``bare`` those with none, ``shared``
    the size of shared experts, ``shared_gate`` whether their output is weighed. ``free``: keys that
    cost nothing in this type. ``more``: fields that follow from others.
    """

    longest: int = 2048
    bias: str | None = None
    head_dim: int | None = None
    tied: bool = False
    kv_as_heads: bool = False
    window: int | None = None
    window_key: str = "sliding_window"
    inside: Callable[[HfConfig], Inside | None] = _everywhere
    experts: tuple[str, str] | None = None
    dense: Callable[[HfConfig, int], Iterable[int]] = lambda config, layers: ()
    bare: Callable[[HfConfig], Iterable[int]] = lambda config: ()
    shared: Callable[[HfConfig], int] = lambda config: 0
    shared_gate: bool = False
    expert_bias: bool = False
    free: str = ""
    defaults: Mapping[str, int] = field(default_factory=dict)
    has: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[HfConfig, Fields], Fields] = lambda config, fields: {}

    def fields(self, config: HfConfig) -> Fields:
        """The ModelSpec fields that the file describes. Raises SpecError."""
        config.config = {**self.defaults, **config.config}
        config.free(self.free)
        heads = config.integer("num_attention_heads")
        usual = heads if self.kv_as_heads else None
        size = config.count if self.experts else config.integer
        given = "all" if config.flag("attention_bias", False) else "none"
        if self.head_dim is None and config.config.get("head_dim") is None:
            head_dim = config.share("hidden_size", "num_attention_heads")
        else:
            head_dim = config.integer("head_dim", self.head_dim)
        fields = {
            "num_layers": config.integer("num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": config.integer("hidden_size"),
            "num_heads": heads,
            "num_kv_heads": config.integer("num_key_value_heads", usual),
            "head_dim": head_dim,
            "ffn_hidden_size": size("intermediate_size"),
            "gated_ffn": True,
            "ffn_bias": config.flag("mlp_bias", False),
            "vocab_size": config.integer("vocab_size"),
            "tied_embeddings": config.flag("tie_word_embeddings", self.tied),
            "max_position_embeddings": config.integer("max_position_embeddings", self.longest),
            "attention_bias": self.bias or given,
            **self.has,
        }
        fields |= self.more(config, fields)
        return fields | self._windows(config, fields) | self._mixture(config, fields)

    def _windows(self, config: HfConfig, fields: Fields) -> Fields:
        if self.window is None:
            return {}
        window = self.window
        if self.window_key in config.config:
            window = config.count(self.window_key)  # null: no window
        layers, inside = fields["num_layers"], self.inside(config)
        types = config.layer_types(layers, "full_attention", *_WINDOWED)
        if types is None:
            count = sum(inside is not None and inside(layer) for layer in range(layers))
        else:
            count = sum(name in _WINDOWED for name in types)
        if inside is None or not count or not 0 < window < fields["max_position_embeddings"]:
            return {}
        return {"windows": {"tokens": window, "layers": count}}

    def _mixture(self, config: HfConfig, fields: Fields) -> Fields:
        if self.experts is None:
            return {}
        config.free(_OF_ROUTING)
        layers, shared = fields["num_layers"], self.shared(config)
        dense = sorted(layer for layer in self.dense(config, layers) if layer < layers)
        if len(dense) == layers:
            return {}
        number, size = self.experts
        mix = {
            "num_experts": config.integer(number),
            "top_k": config.integer("num_experts_per_tok"),
            "intermediate_size": config.integer(size),
            "shared_intermediate_size": shared,
            "dense_layers": dense,
            "bias": self.expert_bias,
            "bare_layers": list(self.bare(config)),
            "shared_gate": self.shared_gate and shared > 0,
        }
        return {"experts": mix} if dense else {"experts": mix, "ffn_hidden_size": 0}


def _gpt2(config: HfConfig) -> Fields:
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    return {
        "num_layers": config.integer("n_layer"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": config.share("n_embd", "n_head"),
        "ffn_hidden_size": config.integer("n_inner", 4 * hidden),
        "gated_ffn": False,
        "vocab_size": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "max_position_embeddings": config.integer("n_positions", 1024),
        "learned_positions": True,
        "attention_bias": "all",
        "norm_bias": True,
        "ffn_bias": True,
    }


_OF_ROUTING = """
    router_aux_loss_coef router_jitter_noise output_router_logits norm_topk_prob scoring_func
    topk_method topk_group n_group routed_scaling_factor aux_loss_alpha seq_aux use_routing_bias
    ep_size num_nextn_predict_layers use_mtp num_mtp_modules mtp_transformer_layers
    """
_OF_DELTA = "mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers output_gate_type"
_OF_NEMOTRON = """
    chunk_size expand mamba_hidden_act mlp_hidden_act norm_eps num_logits_to_keep
    rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min
    time_step_limit use_conv_bias use_mamba_kernels
    """
_OF_GEMMA = """
    query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping cache_implementation
    sliding_window_size
    """
_NORMED: Fields = {"free": "use_qk_norm", "has": {"qk_norm": True}}
"""These types have norms of queries and keys, whatever the files say."""
_GEMMA: Fields = {"head_dim": 256, "tied": True, "window": 4096, "free": _OF_GEMMA}
_QWEN: Fields = {"longest": 32768, "window": 4096, "inside": _qwen}
_QWEN_MOE = {**_QWEN, "experts": ("num_experts", "moe_intermediate_size"), "dense": _qwen_dense}
_LOCAL = ("num_local_experts", "intermediate_size")
_V3 = {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3}
_DELTA: Fields = {
    "longest": 32768, "head_dim": 256, "free": _OF_DELTA, "has": {"qk_norm": True}, "more": _delta,
}  # fmt: skip
_DELTA_MOE = {
    **_DELTA, "experts": ("num_experts", "moe_intermediate_size"), "dense": _qwen_dense,
    "shared": lambda c: c.count("shared_expert_intermediate_size", 512), "shared_gate": True,
}  # fmt: skip


def _deepseek(
    defaults: Mapping[str, int],
    more: Callable[[HfConfig, Fields], Fields] = _latent,
    free: str = "",
) -> HfType:
    return HfType(
        163840, head_dim=192, kv_as_heads=True, dense=_deepseek_dense, more=more, free=free,
        experts=("n_routed_experts", "moe_intermediate_size"),
        shared=lambda c: c.integer("moe_intermediate_size", 1407) * c.count("n_shared_experts"),
        defaults={"q_lora_rank": 1536, **defaults},
    )  # fmt: skip


TYPES = {
    "llama": HfType(kv_as_heads=True),
    "mistral": HfType(131072, window=4096),
    "phi3": HfType(4096, kv_as_heads=True, window=0),
    "qwen": HfType(bias="qkv", kv_as_heads=True, more=_qwen1),
    "qwen2": HfType(bias="qkv", **_QWEN),
    "qwen3": HfType(head_dim=128, **_QWEN, **_NORMED),
    "gemma2": HfType(8192, inside=_even, has={"norms_per_layer": 4}, **_GEMMA),
    "gemma3_text": HfType(
        131072, inside=_gemma3, has={"norms_per_layer": 4, "qk_norm": True}, **_GEMMA,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    ),
    "mixtral": HfType(131072, window=0, experts=_LOCAL),
    "qwen2_moe": HfType(
        shared=lambda c: c.count("shared_expert_intermediate_size", 5632),
        more=lambda c, _: {"attention_bias": "qkv" if c.flag("qkv_bias", True) else "none"},
        shared_gate=True, **_QWEN_MOE,
    ),
    "qwen3_moe": HfType(**_QWEN_MOE, **_NORMED),
    "qwen3_next": HfType(**_DELTA_MOE),
    "qwen3_5_moe_text": HfType(**_DELTA_MOE),
    "qwen3_5_text": HfType(**_DELTA),
    "gpt_oss": HfType(
        131072, "all", head_dim=64, window=128, inside=_even, experts=_LOCAL, expert_bias=True,
        free="experts_per_token swiglu_limit initial_context_length",
    ),
    "llama4_text": HfType(
        131072, head_dim=128, window=8192, window_key="attention_chunk_size", inside=_llama4,
        experts=_LOCAL, dense=_llama4_dense, shared=lambda c: c.integer("intermediate_size"),
        more=lambda c, _: {"ffn_hidden_size": c.integer("intermediate_size_mlp", 16384)},
        free="attn_temperature_tuning attn_scale floor_scale for_llm_compressor use_qk_norm",
    ),
    "minimax_m2": HfType(
        196608, experts=_LOCAL, shared=lambda c: c.count("shared_intermediate_size"), more=_minimax,
        free="qk_norm_type layernorm_full_attention_beta layernorm_linear_attention_beta"
        " layernorm_mlp_beta mlp_intermediate_size shared_moe_mode",
    ),
    "deepseek_v2": _deepseek({}),
    "deepseek_v3": _deepseek(_V3),
    "kimi_k2": _deepseek(_V3),
    "deepseek_v32": _deepseek(_V3, _indexed),
    "glm_moe_dsa": _deepseek(_V3, _indexed, "qk_head_dim indexer_rope_interleave num_experts"),
    "nemotron_h": HfType(
        4096, experts=("n_routed_experts", "moe_intermediate_size"), more=_nemotron,
        bare=lambda c: (n for n, block in enumerate(_blocks(c)) if block[1:] != "E"),
        shared=lambda c: (
            c.integer("moe_shared_expert_intermediate_size") * c.count("n_shared_experts", 1)
        ),
        has={"gated_ffn": False}, free=_OF_NEMOTRON,
    ),
}  # fmt: skip
READERS: dict[str, Callable[[HfConfig], Fields]] = {
    "gpt2": _gpt2, **{name: each.fields for name, each in TYPES.items()}
}  # fmt: skip


#: Types that read images, too: the type of their text part, which is in ``text_config``.
NESTED = {
    "gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text", "kimi_k25": "kimi_k2",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
#: Files of something else, by a key that they have in place of ``model_type``.
_NO_MODEL = {
    "peft_type": "is of an adapter: give the model that it is for, which costs as much when it is "
    "merged",
    "n_layers": "is of Mistral's own params.json: give the config.json in the form of Hugging Face",
}
#: Keys beside ``text_config`` that concern the text.
_OF_THE_TEXT = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")


def model_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The ModelSpec fields (all but ``name``) that ``config`` describes.

    ``where`` names the file in errors. Raises SpecError for an unsupported ``model_type``, for a
    key that is missing or not a positive integer, and, a line each, for every key that asks for
    something that is not modelled. Unknown keys are logged as a warning.
    """
    config = _with_pattern(_text_part(config, where), where)
    kind = config.get("model_type")
    reader = HfConfig(config, where)
    if not isinstance(kind, str) or kind not in READERS:
        limit = not_modelled(kind, "model") if isinstance(kind, str) else ""
        if limit:
            raise SpecError(f"{where}: model_type {short(kind)}: {limit}")
        for key, what in _NO_MODEL.items():
            if kind is None and key in config:
                raise SpecError(f"{where}: key {key!r}: {what}")
        wrong = [
            f"model_type {short(kind)} is not supported; allowed: "
            f"{', '.join(sorted({*READERS, *NESTED}))}; where the layers are those of one of them, "
            "give a copy of the file with its model_type"
        ]
        wrong += problems(config, {*ELSEWHERE, "layer_types"})
        raise SpecError("\n".join(f"{where}: {line}" for line in wrong))
    found = READERS[kind](reader)
    found |= read_formats(config, found, where)
    mix = found.get("experts", {})
    if "moe_dtype" in found and (mix["shared_intermediate_size"] or mix["dense_layers"]):
        rest = "all else is taken to be bf16, shared experts and dense layers, too"
        _warn(f"note: {where}: experts in {found['moe_dtype']}, {rest}")
    reader.free("quantization_config")
    if wrong := problems(config, reader.used):
        raise SpecError("\n".join(f"{where}: {line}" for line in wrong))
    if names := unknown(config, reader.used):
        shown = ", ".join(short(name) for name in names[:20])
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        _warn(f"note: {where}: unknown keys, assumed to have no cost: {shown}{more}")
    return found


_BLOCK_TYPES = dict(pair.split() for pair in ("mamba M", "attention *", "moe E"))


def _with_pattern(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Nemotron's layers as a pattern of letters, where the file lists them (transformers 5)."""
    key, pattern = "layers_block_type", "hybrid_override_pattern"
    kinds = config.get(key)
    if config.get("model_type") != "nemotron_h" or inactive(kinds) or pattern in config:
        return config
    if not isinstance(kinds, list) or not all(kind in _BLOCK_TYPES for kind in map(str, kinds)):
        allowed = ", ".join(_BLOCK_TYPES)
        found = f"{where}: {key} {short(kinds)}"
        raise SpecError(f"{found}: not supported; allowed: a list of {allowed}")
    letters = "".join(_BLOCK_TYPES[str(kind)] for kind in kinds)
    rest = {name: value for name, value in config.items() if name != key}
    return {"num_hidden_layers": len(letters), **rest, pattern: letters}


def _text_part(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The part of a configuration that describes the text decoder. Of two quantisations the outer
    one counts: NVIDIA's checkpoints of Kimi K2.5 keep the first one inside."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise SpecError(f"{where}: text_config {short(text)}: must hold the sizes of the text part")
    _warn(f"note: {where}: only text_config is modelled, no images and no weights of their encoder")
    above = {key: config[key] for key in _OF_THE_TEXT if key in config}
    named = {"model_type": NESTED[kind]} if "model_type" not in text else {}
    own = {key: value for key, value in text.items() if key != "architectures"}
    if not inactive(above.get("quantization_config")):
        own.pop("quantization_config", None)
    return {**above, **own, **named}


@cache
def _warn(text: str) -> None:
    """Warn once per process: a sweep reads the same file for every run."""
    logging.getLogger(__name__).warning(text)


def read_config(path: Path) -> dict[str, Any]:
    """The object in a ``config.json``, with the quantisation of the ``hf_quant_config.json`` beside
    it, if ModelOpt wrote one. Raises SpecError as :func:`read_json`."""
    config, beside = read_json(path), path.with_name("hf_quant_config.json")
    if path.name == "config.json" and beside.is_file():
        section = read_json(beside).get("quantization")
        if not isinstance(section, dict):
            raise SpecError(f"{beside}: quantization {short(section)}: must be a mapping")
        config["quantization_config"] = {"quant_method": "modelopt", **section}
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises SpecError where there is none, or a key is given twice."""
    content = read_bounded(path)
    try:
        config = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except RecursionError:
        raise SpecError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"{path}: expected a JSON object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {short(twice)} is given twice")
    return found


def plain_name(name: str) -> str:
    """A model's name on the hub in the form of shipped names: no owner, no variant, lower case."""
    own = name.rpartition("/")[2].lower().removeprefix("meta-").replace("_", "-")
    return re.sub(r"-(instruct|chat|it|hf|bf16|fp8|nvfp4|fp4|awq|gptq|int4)\b", "", own)
