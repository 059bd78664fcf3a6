"""Number formats of weights and KV cache, and the serving stacks that compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from profiler.storage.strict import STRICT

Stack = Literal["vllm", "sglang", "trtllm"]
WeightDtype = Literal["bf16", "fp8", "fp8_block", "nvfp4", "int4_wo"]
KvDtype = Literal["bf16", "fp8"]
STACKS: tuple[Stack, ...] = get_args(Stack)
WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)

#: Bytes that a weight takes, its share of the scales included: one float32 a block of 128 x 128
#: (fp8_block), one fp8 number for 16 (nvfp4), one fp16 number for 128 (int4_wo).
WEIGHT_BYTES: dict[WeightDtype, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
    "int4_wo": 0.5 + 2 / 128,
}
KV_BYTES: dict[KvDtype, int] = {"bf16": 2, "fp8": 1}
#: FLOP/s of a format's matrix units over those of bf16, at most (data sheets).
SPEEDUP: dict[WeightDtype, float] = {
    "bf16": 1.0, "fp8": 2.1, "fp8_block": 2.1, "nvfp4": 6.3, "int4_wo": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class NumberBytes:
    """Bytes of a number: of an activation or embedding, a layer's weight, the KV cache, and an
    expert's weight (None: as a layer's)."""

    activation: int = 2
    weight: float = 2.0
    kv: int = 2
    expert: float | None = None

    @property
    def expert_weight(self) -> float:
        """Bytes of a weight of a routed expert."""
        return self.weight if self.expert is None else self.expert


#: All of them bf16 or fp16.
TWO_BYTES = NumberBytes()


@dataclass(frozen=True)
class Kernels:
    """Whose kernels run: a stack's, with weights of a layer in ``dtype``.

    Embedding, LM head and activations between ops are bf16 whatever ``dtype`` is.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    stack: Stack
    dtype: WeightDtype = "bf16"
    kv_cache_dtype: KvDtype = "bf16"

    @property
    def number_bytes(self) -> NumberBytes:
        """What its numbers take."""
        return NumberBytes(2, WEIGHT_BYTES[self.dtype], KV_BYTES[self.kv_cache_dtype])

    @property
    def name(self) -> str:
        """As folders and messages call it: ``vllm-fp8``, ``vllm-fp8-kv-fp8``."""
        cache = "" if self.kv_cache_dtype == "bf16" else f"-kv-{self.kv_cache_dtype}"
        return f"{self.stack}-{self.dtype}{cache}"
