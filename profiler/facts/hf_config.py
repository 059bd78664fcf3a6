"""A Hugging Face ``config.json`` read as the fields of a ModelSpec: modelled completely or refused.

Every key that changes the cost is used here or refused by name (``hf_keys.py``). A warning names
unknown keys.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from profiler.facts.hf_keys import NOT_MODELLED, problems, short, unknown
from profiler.storage.plain_yaml import read_bounded
from profiler.storage.strict import SpecError

Fields = dict[str, Any]

_MOST = 2**24
"""No size of a model is larger; ModelSpec's own bounds are narrower."""


class _Config:
    """Typed access to the keys of one config.json; errors name the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.used: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"{self.where}: key '{key}' is missing")
            return default
        if type(value) is not int or not 0 < value <= _MOST:
            raise SpecError(
                f"{self.where}: {key} must be a positive integer, got {short(value)}"
                if type(value) is not int or value <= 0
                else f"{self.where}: {key} must be at most {_MOST}, got {short(value)}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.where}: {key} must be true or false, got {short(value)}")
        return value

    def share(self, whole: str, parts: str) -> int:
        """``whole`` over ``parts``. Raises SpecError where that leaves a remainder."""
        size, count = self.integer(whole), self.integer(parts)
        if size % count:
            raise SpecError(
                f"{self.where}: {whole} ({size}) must be a multiple of {parts} ({count})"
            )
        return size // count


def _llama_like(config: _Config, bias: str | None = None, longest: int = 2048) -> Fields:
    """``bias``: where attention has one whatever the file says; ``longest``: the type's default."""
    heads = config.integer("num_attention_heads")
    given = "all" if config.flag("attention_bias", False) else "none"
    kind = config.config["model_type"]
    # Other types do not default to as many KV heads as heads.
    kv_heads = heads if kind in ("llama", "phi3", "qwen") else None
    head_dim = config.config.get("head_dim")
    return {
        "num_layers": config.integer("num_hidden_layers"),
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


def _mistral(config: _Config) -> Fields:
    if "sliding_window" not in config.config:
        raise SpecError(
            f"{config.where}: key 'sliding_window' is missing, which for this model_type means a "
            "window of 4096; attention is modelled over the whole context: set it to null"
        )
    return _llama_like(config, longest=131072)


def _qwen2(config: _Config) -> Fields:
    return _llama_like(config, "qkv", 32768)


def _qwen3(config: _Config) -> Fields:
    head_dim = config.integer("head_dim", 128)
    fields = _llama_like(config, longest=32768)
    return {**fields, "head_dim": head_dim, "qk_norm": True}


def _phi3(config: _Config) -> Fields:
    return _llama_like(config, longest=4096)


def _qwen(config: _Config) -> Fields:
    """Qwen 1: ``intermediate_size`` counts gate and up together."""
    fields = _llama_like(config, "qkv")
    if fields["ffn_hidden_size"] % 2:
        raise SpecError(f"{config.where}: intermediate_size must be even: it counts gate and up")
    fields["ffn_hidden_size"] //= 2
    fields["head_dim"] = config.integer("kv_channels", fields["head_dim"])
    fields["max_position_embeddings"] = config.integer("seq_length", 2048)
    return fields


def _gpt2(config: _Config) -> Fields:
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


_READERS: dict[str, Callable[[_Config], Fields]] = {
    "llama": _llama_like,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen": _qwen,
    "gpt2": _gpt2,
}


def model_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The ModelSpec fields (all but ``name``) that ``config`` describes.

    ``where`` names the file in errors. Raises SpecError for an unsupported ``model_type``, for a
    key that is missing or not a positive integer, and, a line each, for every key that asks for
    something that is not modelled. Unknown keys are logged as a warning.
    """
    kind = config.get("model_type")
    found = [f"{where}: {line}" for line in problems(config)]
    if not isinstance(kind, str) or kind not in _READERS:
        why = f": {NOT_MODELLED[kind]}" if isinstance(kind, str) and kind in NOT_MODELLED else ""
        allowed = ", ".join(sorted(_READERS))
        found.insert(
            0, f"{where}: model_type {short(kind)} is not supported{why}; allowed: {allowed}"
        )
    if found:
        raise SpecError("\n".join(found))
    reader = _Config(config, where)
    fields = _READERS[str(kind)](reader)
    if names := unknown(config, reader.used):
        shown = ", ".join(short(name) for name in names[:20])
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        _warn(f"note: {where}: unknown keys, assumed to have no cost: {shown}{more}")
    return fields


@cache
def _warn(text: str) -> None:
    """Warn once per process: a sweep reads the same file for every run."""
    logging.getLogger(__name__).warning(text)


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
