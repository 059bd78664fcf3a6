"""Number formats of weights and KV cache, and the serving stacks that compute with them.

A checkpoint's ``quantization_config`` is read as these formats, or refused. One format is modelled
for all matrices of the layers. Embedding, LM head, norms and the router stay bf16, as published
checkpoints leave them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..storage.strict import SpecError, did_you_mean, short, strict_dataclass

Stack = Literal["vllm", "sglang", "trtllm"]
WeightDtype = Literal["bf16", "fp8", "fp8_block", "nvfp4", "int4_wo"]
#: Formats of routed experts: those of any weight, and 4-bit floats in blocks of 32 (MXFP4),
#: computed in bf16 or, with activations in fp8 blocks, in fp8.
MoeDtype = Literal[
    "bf16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"
]
#: Distributions of tokens over experts: even, or a power law with this exponent.
Distribution = Literal["balanced", "power_law_1.01", "power_law_1.2"]
#: How tokens reach the experts of other ranks and come back: NCCL's all-to-all, DeepEP (low latency
#: for few tokens, else normal), or TensorRT-LLM's two kernels over NVLink.
A2aBackend = Literal["none", "nccl", "deepep", "nvlink_one_sided", "nvlink_two_sided"]
KvDtype = Literal["bf16", "fp8"]
STACKS: tuple[Stack, ...] = get_args(Stack)
WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
MOE_DTYPES: tuple[MoeDtype, ...] = get_args(MoeDtype)
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)

#: Bytes of a weight, with its share of the scales: one float32 a block of 128 x 128
#: (fp8_block), one fp8 number for 16 (nvfp4), one fp16 number for 128 (int4_wo).
WEIGHT_BYTES: dict[WeightDtype, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
    "int4_wo": 0.5 + 2 / 128,
}
MOE_BYTES: dict[MoeDtype, float] = {
    **{dtype: WEIGHT_BYTES[dtype] for dtype in WEIGHT_DTYPES},
    "w4a16_mxfp4": 0.5 + 1 / 32,
    "w4a8_mxfp4_mxfp8": 0.5 + 1 / 32,
}
#: In memory, where experts alone are in int4_wo: their groups are of 32 (Kimi K2.5), not 128.
_FINE_INT4 = 0.5 + 2 / 32
KV_BYTES: dict[KvDtype, int] = {"bf16": 2, "fp8": 1}
#: At most so many times bf16's FLOP/s: data sheets' ratios on any device, and 5 % of room.
SPEEDUP: dict[WeightDtype, float] = {
    "bf16": 1.0, "fp8": 2.1, "fp8_block": 2.1, "nvfp4": 6.3, "int4_wo": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class NumberBytes:
    """Bytes of a number: of an activation or embedding, a layer's weight, the KV cache, and an
    expert's weight (None: as a layer's).

    The experts' weights, and the copies of ``redundant_experts``, are shared by ``dp`` groups of
    ranks, each of which has all other weights.
    """

    activation: int = 2
    weight: float = 2.0
    kv: int = 2
    expert: float | None = None
    dp: int = 1
    redundant_experts: int = 0

    @property
    def expert_weight(self) -> float:
        """Bytes of a weight of a routed expert."""
        return self.weight if self.expert is None else self.expert

    def held_experts(self, num_experts: int) -> float:
        """The share of a layer's experts that one group of ranks holds."""
        return (1 + self.redundant_experts / num_experts) / self.dp


#: All of them bf16 or fp16.
TWO_BYTES = NumberBytes()


MOE_SPEEDUP: dict[MoeDtype, float] = {
    **{dtype: SPEEDUP[dtype] for dtype in WEIGHT_DTYPES},
    "w4a16_mxfp4": 1.0,
    "w4a8_mxfp4_mxfp8": 2.1,
}


def exponent_of(distribution: str) -> float:
    """The exponent of a distribution's power law; 0 for an even one."""
    return 0.0 if distribution == "balanced" else float(distribution.removeprefix("power_law_"))


def named_stack(text: str) -> tuple[Stack, str]:
    """The engine and the version (empty: the newest) that ``vllm`` or ``vllm@0.24`` names. Raises
    ValueError for an unknown engine, and for a version without a number."""
    engine, at, version = text.partition("@")
    if engine not in STACKS or bool(at) != bool(re.fullmatch(r"\d+(\.\w+)*", version)):
        allowed = f"one of {', '.join(STACKS)}, with a version or without (vllm@0.24)"
        raise ValueError(f"must be {allowed}{did_you_mean(engine, STACKS)}")
    return engine, version


def release(version: str) -> float:
    """A version as a number: the distance of two releases is the difference of their numbers."""
    parts = re.findall(r"\d+", version.partition(" ")[0])[:4]
    return float(sum(int(part) * 100.0**-place for place, part in enumerate(parts)))


@strict_dataclass
class Kernels:
    """The kernels of a stack, with weights of a layer in ``dtype``; each table is of the version
    nearest to ``version`` (empty: the newest).

    Embedding, LM head and activations between ops are bf16 whatever ``dtype`` is. A mixture's
    experts are in ``moe_dtype`` (None: in ``dtype``), and tokens spread over them by
    ``expert_distribution``. The tensor-parallel ranks divide each expert or, with
    ``expert_parallel``, their number. Their outputs are added up by the layer's all-reduce
    or, with ``moe_a2a_backend``, tokens are sent to the experts and back.

    With ``dp`` > 1 attention is data-parallel: ``dp`` groups of tensor-parallel ranks have their
    own sequences, and divide the experts among all of their ranks. Without ``moe_a2a_backend``
    tokens are gathered from all ranks, and outputs scattered. ``redundant_experts`` are copies,
    placed so that the load is even.

    All-reduces of up to ``fused_all_reduce_mb`` MiB are one kernel with what follows (vLLM's
    ``fuse_allreduce_rms``): the addition has none of its own.
    """

    stack: Stack
    dtype: WeightDtype = "bf16"
    kv_cache_dtype: KvDtype = "bf16"
    moe_dtype: MoeDtype | None = None
    expert_distribution: Distribution = "power_law_1.2"
    expert_parallel: bool = False
    moe_a2a_backend: A2aBackend = "none"
    version: str = ""
    dp: int = 1
    redundant_experts: int = 0
    fused_all_reduce_mb: float = 0.0

    @property
    def named(self) -> str:
        """The stack as a configuration names it."""
        return f"{self.stack}@{self.version}" if self.version else self.stack

    @property
    def experts_in(self) -> MoeDtype:
        """The number format of a mixture's experts."""
        return self.moe_dtype or self.dtype

    @property
    def number_bytes(self) -> NumberBytes:
        """The bytes of its numbers."""
        kv, expert = KV_BYTES[self.kv_cache_dtype], MOE_BYTES[self.experts_in]
        if self.moe_dtype == "int4_wo" != self.dtype:
            expert = _FINE_INT4
        weight = WEIGHT_BYTES[self.dtype]
        return NumberBytes(2, weight, kv, expert, self.dp, self.redundant_experts)

    @property
    def name(self) -> str:
        """The name in folders and messages: ``vllm-fp8``, ``vllm-fp8-kv-fp8``."""
        found = f"{self.named}-{self.dtype}"
        found += "" if self.kv_cache_dtype == "bf16" else f"-kv-{self.kv_cache_dtype}"
        found += f"-moe-{self.moe_dtype}" if self.moe_dtype else ""
        found += "-ep" if self.expert_parallel else ""
        found += "" if self.moe_a2a_backend == "none" else f"-a2a-{self.moe_a2a_backend}"
        found += "" if self.dp == 1 else f"-dp{self.dp}"
        found += f"-redundant{self.redundant_experts}" if self.redundant_experts else ""
        usual = self.expert_distribution == Kernels.expert_distribution
        return found if usual else f"{found}-{self.expert_distribution}"


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


def read_formats(
    config: Mapping[str, Any], fields: Mapping[str, Any], where: str
) -> dict[str, str]:
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
    that are not modelled."""
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
