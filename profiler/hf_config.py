"""A Hugging Face ``config.json`` read as the fields of a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from profiler.strict import SpecError

Fields = dict[str, Any]


class _Config:
    """Typed access to the keys of one config.json; errors name the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"{self.where}: key '{key}' is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise SpecError(f"{self.where}: {key} must be a positive integer, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value


def _llama_like(config: _Config, attention_bias: str = "none") -> Fields:
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    if attention_bias == "none" and config.flag("attention_bias", False):
        attention_bias = "all"
    return {
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", hidden // heads),
        "ffn_hidden_size": config.integer("intermediate_size"),
        "gated_ffn": True,
        "vocab_size": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "max_position_embeddings": config.integer("max_position_embeddings", 2048),
        "attention_bias": attention_bias,
    }


def _qwen2(config: _Config) -> Fields:
    return _llama_like(config, attention_bias="qkv")


def _qwen(config: _Config) -> Fields:
    """Qwen 1: ``intermediate_size`` counts gate and up together."""
    fields = _llama_like(config, attention_bias="qkv")
    fields["ffn_hidden_size"] //= 2
    fields["max_position_embeddings"] = config.integer("seq_length", 2048)
    return fields


def _gpt2(config: _Config) -> Fields:
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    return {
        "num_layers": config.integer("n_layer"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
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


_READERS: dict[str, Callable[[_Config], Fields]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": _qwen2,
    "qwen": _qwen,
    "gpt2": _gpt2,
}


def model_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The ModelSpec fields (all but ``name``) that ``config`` describes.

    ``where`` names the file in errors. Raises SpecError for an unsupported ``model_type``, and for
    a key that is missing or is not a positive integer.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        allowed = ", ".join(sorted(_READERS))
        raise SpecError(f"{where}: model_type {kind!r} is not supported; allowed: {allowed}")
    return _READERS[kind](_Config(config, where))
