"""How each type of Hugging Face model says its sizes: a table of what differs from Llama's keys.

Elementwise parts cost next to nothing and are left out: attention sinks (gpt_oss), soft caps
(gemma2), and what chooses the experts of a mixture (scores, groups, scales, biases). So are layers
that predict more than one token (MTP): one token an iteration and decode is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sarathi_sim.profiler.facts.hf_keys import inactive, short
from sarathi_sim.profiler.storage.strict import SpecError

Fields = dict[str, Any]
Inside = Callable[[int], bool]
"""Whether the layer sees only a window of the tokens."""

MOST_LAYERS = 4096
"""No model has more layers."""
_MOST = 2**24
"""No size of a model is larger; ModelSpec's own bounds are narrower."""
_WINDOWED = ("sliding_attention", "chunked_attention")


class HfConfig:
    """Typed access to the keys of one config.json; errors name the file and the key.

    ``used`` collects the keys that were asked for, and those declared to cost nothing.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = dict(config), where
        self.used: set[str] = set()

    def error(self, text: str) -> SpecError:
        return SpecError(f"{self.where}: {text}")

    def integer(self, key: str, default: int | None = None, most: int = _MOST) -> int:
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
    """A token sees what is before it in its chunk, half of one on average."""
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
    return {"qk_norm": config.flag("use_qk_norm", True)}


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


@dataclass(frozen=True)
class HfType:
    """What a ``model_type`` has that Llama has not.

    ``longest``, ``head_dim``, ``tied`` and ``kv_as_heads`` (as many as heads) are for files that
    say nothing. ``bias``: where attention has one whatever the file says. ``window``: its tokens,
    where the file says nothing (None: this type has no windows), and ``inside`` the layers that
    have it, where ``layer_types`` does not name them. ``experts``: the keys of their number and of
    their intermediate size, ``dense`` the layers without them, ``shared`` the size of the shared
    ones. ``free``: keys that cost nothing in this type. ``more``: fields that follow from others.
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
    shared: Callable[[HfConfig], int] = lambda config: 0
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
        given = "all" if config.flag("attention_bias", False) else "none"
        if self.head_dim is None and config.config.get("head_dim") is None:
            head_dim = config.share("hidden_size", "num_attention_heads")
        else:
            head_dim = config.integer("head_dim", self.head_dim)
        fields = {
            "num_layers": config.integer("num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": config.integer("hidden_size"),
            "num_heads": heads,
            "num_kv_heads": config.integer(
                "num_key_value_heads", heads if self.kv_as_heads else None
            ),
            "head_dim": head_dim,
            "ffn_hidden_size": config.integer("intermediate_size"),
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
        """The layers that see only the last tokens."""
        if self.window is None:
            return {}
        window = self.window
        if self.window_key in config.config:
            window = config.count(self.window_key)  # null: no window
        layers, inside = fields["num_layers"], self.inside(config)
        types = config.listed("layer_types", layers)
        if types is None:
            seen = [inside is not None and inside(layer) for layer in range(layers)]
            types = [_WINDOWED[0] if each else "full_attention" for each in seen]
        for name in types:
            if name not in ("full_attention", *_WINDOWED):
                allowed = ", ".join(("full_attention", *_WINDOWED))
                raise config.error(f"layer_types {short(name)}: not supported; allowed: {allowed}")
        count = sum(name in _WINDOWED for name in types)
        if inside is None or not count or not 0 < window < fields["max_position_embeddings"]:
            return {}
        return {"windows": {"tokens": window, "layers": count}}

    def _mixture(self, config: HfConfig, fields: Fields) -> Fields:
        """The experts, unless every layer is dense."""
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
_OF_GEMMA = """
    query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping cache_implementation
    sliding_window_size
    """
_NORMED: Fields = {"free": "use_qk_norm", "has": {"qk_norm": True}}
"""These norms are there whatever the files say."""
_GEMMA: Fields = {"head_dim": 256, "tied": True, "window": 4096, "free": _OF_GEMMA}
_QWEN: Fields = {"longest": 32768, "window": 4096, "inside": _qwen}
_QWEN_MOE = {**_QWEN, "experts": ("num_experts", "moe_intermediate_size"), "dense": _qwen_dense}
_LOCAL = ("num_local_experts", "intermediate_size")
_V3 = {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3}


def _deepseek(**defaults: int) -> HfType:
    return HfType(
        163840, head_dim=192, kv_as_heads=True, dense=_deepseek_dense, more=_latent,
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
        **_QWEN_MOE,
    ),
    "qwen3_moe": HfType(**_QWEN_MOE, **_NORMED),
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
    "deepseek_v2": _deepseek(),
    "deepseek_v3": _deepseek(**_V3),
    "kimi_k2": _deepseek(**_V3),
}  # fmt: skip
READERS: dict[str, Callable[[HfConfig], Fields]] = {
    "gpt2": _gpt2, **{name: each.fields for name, each in TYPES.items()}
}  # fmt: skip
