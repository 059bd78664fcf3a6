"""A checkpoint's ``quantization_config``: the number formats of weights and KV cache, or refused.

One format is modelled for all matrices of the layers. Embedding, LM head, norms and the router stay
bf16, as published checkpoints leave them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sarathi_sim.profiler.storage.strict import SpecError, short

_KEY = "quantization_config"
#: Modules that a checkpoint may leave in bf16: they are modelled so, or are no part of the text.
_LEFT_OUT = re.compile(
    r"lm_head|embed|norm|router|(mlp|moe|feed_forward)\.gate([^_\w]|$)|(^|\.)gate$|shared_expert_gate"
    r"|e_score_correction_bias|vision|visual|vit|multi_modal|projector|mtp|eh_proj|kv_b_proj"
    r"|conv1d|linear_attn\.(in_proj_(a|b|ba)\b|A_log|dt_bias)|indexers_proj|indexer\.weights_proj"
)
#: Further modules that a mixture may leave in bf16: everything beside its routed experts.
_BESIDE_EXPERTS = re.compile(
    r"(self|linear)_attn|shared_expert|(mlp|feed_forward)\.\(?(gate|up|down)[_|]"
)
_PROJECTION = re.compile(r"(self|linear)_attn\.(\w+)")
_ALL_ATTENTION = re.compile(r"(self|linear)_attn(\.o(ut)?_proj|\W*$)")
#: A whole layer, or its FFN: they may be left out of a mixture's dense layers.
_WHOLE_LAYER = re.compile(r"layers\.(\d+)(\.mlp)?\W*$")
_ONE_FORMAT = (
    "all matrices of the layers have one format, or a mixture's experts alone have it; besides, "
    "only LM head, embedding, norms and routers may be left out"
)
_KINDS = {dict: "mapping", list: "list"}
#: What a method adds to a format with four times the usual scales, which experts alone may have.
_FINE = " in groups of 32"
#: GPTQ's rules by pattern: "-:" leaves modules out, others change their format.
_RULES = "dynamic"
_LISTS = (
    *("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude"),
    _RULES,
)


def inactive(value: object) -> bool:
    """Whether a value switches its feature off: null, false, zero or nothing."""
    return value is None or value is False or value in (0, "", [], {})


class _Unsupported(Exception):
    """A part of the section is not supported; the message names it."""


def formats(config: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, str]:
    """``dtype``, ``moe_dtype`` and ``kv_cache_dtype`` of the checkpoint, unless they are bf16.

    ``fields`` are the model's sizes. MXFP4 leaves activations open: they are taken to be bf16.

    Raises SpecError for a format that is not modelled; the line names the key.
    """
    section = config.get(_KEY)
    if inactive(section):
        return {}
    try:
        if not isinstance(section, Mapping):
            raise SpecError(f"{where}: {_KEY} {short(section)}: must be a mapping")
        method = section.get("quant_method")
        if not isinstance(method, str) or method not in (*_METHODS, "mxfp4"):
            allowed = ", ".join(sorted({*_METHODS, "mxfp4"}))
            raise _Unsupported(f"quant_method {short(method)}: not supported; allowed: {allowed}")
        if method == "mxfp4":  # of experts only
            if "experts" not in fields:
                raise _Unsupported("quant_method 'mxfp4': not supported: this model has no experts")
            return {"moe_dtype": "w4a16_mxfp4"}
        # A layer here may be two of the file's, which number its modules (Nemotron 3).
        count = config.get("num_hidden_layers")
        named = max(fields["num_layers"], count if type(count) is int else 0)
        found, alone = _METHODS[method](section), _experts_alone(section, fields, named)
        if found.endswith(_FINE) and not alone:
            raise _Unsupported("group_size 32: not supported; allowed: 128, or 32 of experts alone")
        key = "moe_dtype" if alone else "dtype"
        return {key: found.removesuffix(_FINE), **_cache(section)}
    except _Unsupported as error:
        cure = f"; a copy without {_KEY} is read as bf16, and `dtype` says the nearest format"
        raise SpecError(f"{where}: {_KEY}.{error}{cure * ('supported' in str(error))}") from None


def _need(section: Mapping[str, Any], key: str, *allowed: object, path: str = "") -> Any:
    value = section.get(key)
    if value not in allowed:
        listed = ", ".join(str(one) for one in allowed)
        raise _Unsupported(f"{path}{key} {short(value)}: not supported; allowed: {listed}")
    return value


def _fp8(section: Mapping[str, Any]) -> str:
    block = section.get("weight_block_size")
    if block is None:
        return "fp8"
    if block != [128, 128]:
        raise _Unsupported(f"weight_block_size {short(block)}: not supported; allowed: [128, 128]")
    return "fp8_block"


def _int4(section: Mapping[str, Any]) -> str:
    _need(section, "bits", 4)
    _need(section, "modules_in_block_to_quantize", None)
    return _int4_groups(section)


def _int4_groups(weights: Mapping[str, Any], path: str = "") -> str:
    return "int4_wo" + (_FINE if _need(weights, "group_size", 128, 32, path=path) == 32 else "")


def _modelopt(section: Mapping[str, Any]) -> str:
    algorithm = _need(section, "quant_algo", "FP8", "NVFP4")
    return {"FP8": "fp8", "NVFP4": "nvfp4"}[algorithm]


def _compressed(section: Mapping[str, Any]) -> str:
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _Unsupported("config_groups: is missing")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and not inactive(sparsity):
        _need(sparsity, "format", "dense", path="sparsity_config.")
    found = {_group(name, group) for name, group in groups.items()}
    if len(found) > 1:
        raise _Unsupported(
            f"config_groups: several formats ({', '.join(sorted(found))}); allowed: one"
        )
    return found.pop()


def _group(name: str, group: Any) -> str:
    path = f"config_groups.{short(name)}.weights."
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _Unsupported(f"{path.removesuffix('.')}: is missing")
    of_group = path.removesuffix("weights.")
    _need(group, "targets", None, ["Linear"], path=of_group)
    kind, inputs = _numbers(weights), group.get("input_activations")
    if kind[0] == "float" and _numbers(inputs) != kind:
        raise _Unsupported(
            f"{of_group}input_activations {short(inputs)}: not supported; allowed: {kind[0]} "
            f"{short(kind[1])}, as the weights"
        )
    if kind == ("float", 8):
        if weights.get("strategy") == "block":
            return _fp8({"weight_block_size": weights.get("block_structure")})
        _need(weights, "strategy", "tensor", "channel", path=path)
        return "fp8"
    if kind == ("float", 4):
        _need(weights, "group_size", 16, path=path)
        return "nvfp4"
    if kind == ("int", 4) and inactive(inputs):
        return _int4_groups(weights, path)
    raise _Unsupported(
        f"{path}type {short(kind[0])}, num_bits {short(kind[1])}: not supported; allowed: float 8, "
        "float 4, and int 4 of the weights alone"
    )


def _numbers(part: Any) -> tuple[Any, Any]:
    """Type and bits of weights, activations or cache."""
    return (part.get("type"), part.get("num_bits")) if isinstance(part, Mapping) else (None, None)


_METHODS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda section: "fp8",
    "compressed-tensors": _compressed,
    "gptq": _int4,
    "awq": _int4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}


def _experts_alone(section: Mapping[str, Any], fields: Mapping[str, Any], named: int) -> bool:
    """Whether the checkpoint leaves all attention in bf16, so that only experts have its format.

    Layers from ``named`` on are those of MTP. Raises _Unsupported for lists of modules left out
    that are not modelled.
    """
    whole: set[int] = set()
    partly, left_out = "", set[str]()
    for key in _LISTS:
        for name in _names(section, key):
            plain = name.replace("\\", "")
            layer = re.search(r"layers\.(\d+)", plain)
            if key == _RULES and not plain.startswith("-:"):
                raise _Unsupported(f"{key} {short(name)}: not supported: {_ONE_FORMAT}")
            if _LEFT_OUT.search(plain) or (layer and int(layer[1]) >= named):
                continue
            mixture = fields.get("experts")
            unit = _WHOLE_LAYER.search(plain)
            dense = mixture and unit and int(unit[1]) in mixture["dense_layers"]
            if not mixture or not (dense or _BESIDE_EXPERTS.search(plain)):
                raise _Unsupported(f"{key} {short(name)}: not supported: {_ONE_FORMAT}")
            partly = key
            left_out |= {found[2] for found in [_PROJECTION.search(plain)] if found}
            if _ALL_ATTENTION.search(plain) or (unit and not unit[2]):
                whole |= {int(layer[1])} if layer else set(range(fields["num_layers"]))
    if left_out and not whole:
        raise _Unsupported(
            f"{partly}: not supported: {', '.join(sorted(left_out))} of the attention are left "
            "out, and its output projection is quantised; allowed: all of the attention, or none "
            "of it. A copy of the file that leaves out o_proj, too, stands for experts alone in "
            "this format"
        )
    if partly and len(whole) < fields["num_layers"]:
        raise _Unsupported(
            f"{partly}: not supported: the whole attention in {len(whole)} of "
            f"{fields['num_layers']} layers; allowed: in all, or no part of a layer"
        )
    return bool(partly)


def _names(section: Mapping[str, Any], key: str) -> list[str]:
    names = section.get(key)
    if inactive(names):
        return []
    kind = dict if key == _RULES else list
    if not isinstance(names, kind):
        raise _Unsupported(f"{key} {short(names)}: must be a {_KINDS[kind]}")
    for name in names:
        if not isinstance(name, str):
            raise _Unsupported(f"{key} {short(name)}: must be the name of a module")
    return list(names)


def _cache(section: Mapping[str, Any]) -> dict[str, str]:
    scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
    if not inactive(scheme):
        if _numbers(scheme) != ("float", 8):
            raise _Unsupported(f"kv_cache_scheme {short(scheme)}: not supported; allowed: float, 8")
        return {"kv_cache_dtype": "fp8"}
    if not inactive(algorithm):
        _need(section, "kv_cache_quant_algo", "FP8")
        return {"kv_cache_dtype": "fp8"}
    return {}
