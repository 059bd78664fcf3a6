"""How each type of Hugging Face model says its sizes: one reader a ``model_type``.

Attention sinks (gpt_oss) and soft caps (gemma2) are elementwise parts of the attention kernel, and
cost next to nothing: they are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sarathi_sim.profiler.facts.hf_keys import short
from sarathi_sim.profiler.facts.hf_reader import HfConfig
from sarathi_sim.profiler.storage.strict import SpecError

Fields = dict[str, Any]

_WINDOWED = ("sliding_attention", "chunked_attention")


def llama_like(config: HfConfig, bias: str | None = None, longest: int = 2048) -> Fields:
    """``bias``: where attention has one whatever the file says; ``longest``: the type's default."""
    heads = config.integer("num_attention_heads")
    given = "all" if config.flag("attention_bias", False) else "none"
    kind = config.config["model_type"]
    # Other types do not default to as many KV heads as heads.
    kv_heads = heads if kind in ("llama", "phi3", "qwen") else None
    head_dim = config.config.get("head_dim")
    return {
        "num_layers": config.layers(),
        "hidden_size": config.integer("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", kv_heads),
        "head_dim": config.share("hidden_size", "num_attention_heads")
        if head_dim is None
        else config.integer("head_dim"),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "gated_ffn": True,
        "ffn_bias": config.flag("mlp_bias", False),
        "vocab_size": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "max_position_embeddings": config.integer("max_position_embeddings", longest),
        "attention_bias": bias or given,
    }


def windowed(
    config: HfConfig, fields: Fields, window: int, inside: Callable[[int], bool]
) -> Fields:
    """``fields`` with the layers that see only the last ``window`` tokens: those that the file's
    ``layer_types`` name, else those ``inside``."""
    layers = fields["num_layers"]
    types = config.listed("layer_types", layers)
    if types is None:
        types = [_WINDOWED[0] if inside(layer) else "full_attention" for layer in range(layers)]
    for name in types:
        if name not in ("full_attention", *_WINDOWED):
            allowed = ", ".join(("full_attention", *_WINDOWED))
            raise SpecError(
                f"{config.where}: layer_types {short(name)}: not supported; allowed: {allowed}"
            )
    count = sum(name in _WINDOWED for name in types)
    if not count or not 0 < window < fields["max_position_embeddings"]:
        return fields
    return {**fields, "windows": {"tokens": window, "layers": count}}


def _everywhere(layer: int) -> bool:
    return True


def _mistral(config: HfConfig) -> Fields:
    fields = llama_like(config, longest=131072)
    return windowed(config, fields, config.window(4096), _everywhere)


def qwen_windows(config: HfConfig, fields: Fields) -> Fields:
    """Qwen 2 and 3: the layers from ``max_window_layers`` on, where it is switched on."""
    on = config.flag("use_sliding_window", False)
    window, first = config.window(4096), config.count("max_window_layers", 28)
    return windowed(config, fields, window if on else 0, lambda layer: layer >= first)


def _qwen2(config: HfConfig) -> Fields:
    return qwen_windows(config, llama_like(config, "qkv", 32768))


def _qwen3(config: HfConfig) -> Fields:
    head_dim = config.integer("head_dim", 128)
    config.free("use_qk_norm")  # the type has these norms whatever its files say
    fields = llama_like(config, longest=32768)
    return qwen_windows(config, {**fields, "head_dim": head_dim, "qk_norm": True})


def _phi3(config: HfConfig) -> Fields:
    return windowed(config, llama_like(config, longest=4096), config.window(0), _everywhere)


def _qwen(config: HfConfig) -> Fields:
    """Qwen 1: ``intermediate_size`` counts gate and up together."""
    fields = llama_like(config, "qkv")
    if fields["ffn_hidden_size"] % 2:
        raise SpecError(f"{config.where}: intermediate_size must be even: it counts gate and up")
    fields["ffn_hidden_size"] //= 2
    fields["head_dim"] = config.integer("kv_channels", fields["head_dim"])
    fields["max_position_embeddings"] = config.integer("seq_length", 2048)
    return fields


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


def _gemma(config: HfConfig, longest: int) -> Fields:
    """Gemma 2 and 3: four norms a layer, tied embeddings, 256 numbers a head."""
    head_dim = config.integer("head_dim", 256)
    config.free(
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
        " cache_implementation sliding_window_size"
    )
    fields = llama_like(config, longest=longest)
    tied = config.flag("tie_word_embeddings", True)
    return {**fields, "head_dim": head_dim, "tied_embeddings": tied, "norms_per_layer": 4}


def _gemma2(config: HfConfig) -> Fields:
    fields = _gemma(config, 8192)
    return windowed(config, fields, config.window(4096), lambda layer: layer % 2 == 0)


def _gemma3(config: HfConfig) -> Fields:
    config.default(num_attention_heads=8, num_key_value_heads=4, vocab_size=262208)
    fields = {**_gemma(config, 131072), "qk_norm": True}
    every = config.integer("sliding_window_pattern", 6)
    return windowed(config, fields, config.window(4096), lambda layer: (layer + 1) % every > 0)


READERS: dict[str, Callable[[HfConfig], Fields]] = {
    "llama": llama_like,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen": _qwen,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
