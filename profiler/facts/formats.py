"""Number formats of weights and KV cache, and the serving stacks that compute with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from sarathi_sim.profiler.storage.strict import did_you_mean, strict_dataclass

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
    """The engine and the version (empty: the newest) that ``vllm`` or ``vllm@0.24`` names.

    Raises ValueError for an unknown engine, and for a version without a number.
    """
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
