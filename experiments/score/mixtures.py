"""What is particular to measured servers of mixtures of experts: formats, layouts, and what is not
modelled though no column says so."""

from __future__ import annotations

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.score.launch_scripts import (
    INFERENCEX,
    launch_scripts,
    origin,
    settings_of,
)
from sarathi_sim.experiments.score.measured import Measured

_IN_BLOCKS = ("fp8_block", "fp8_block")
#: DeepSeek's fp4 checkpoint quantises attention's largest matrix and shared experts, too (the card
#: of nvidia/DeepSeek-R1-0528-FP4-v2).
_DEEPSEEK = {"fp8": _IN_BLOCKS, "fp4": ("nvfp4", "nvfp4")}
#: The shipped model, and the formats of a layer's weights and of its experts by the row's
#: precision. Their fp8 is in blocks; gpt-oss's fp4 is MXFP4. Kimi K2.5's text model has the shape
#: of Kimi K2 (config.json in ai-dynamo/aiconfigurator at 202f06a); all but routed experts are bf16.
MIXTURES = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {"fp8": _IN_BLOCKS}),
    "MiniMaxAI/MiniMax-M2.5": ("minimax-m2", {"fp8": _IN_BLOCKS, "fp4": ("bf16", "nvfp4")}),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", _DEEPSEEK),
    "deepseek-ai/DeepSeek-R1": ("deepseek-r1", _DEEPSEEK),
    "openai/gpt-oss-120b": ("gpt-oss-120b", {"fp4": ("bf16", "w4a16_mxfp4")}),
    "moonshotai/Kimi-K2.5": (
        "kimi-k2",
        {"fp4": ("bf16", "nvfp4"), "int4": ("bf16", "int4_wo")},
    ),
}
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")


def attention_ranks(row: Measured) -> int:
    """How many ranks have attention of their own: one where the launch script cannot ask for more.
    (Rows have ``tp`` in ``dp``, too, where vLLM spreads experts; 17 loads of MiniMax that were
    measured under both names have the same TPOT within 1 %.)"""
    return row.dp if settings_of(row).get("attention_dp", True) else 1


def measured_cold(row: Measured) -> bool:
    """Whether SGLang compiled kernels of a mixture while the first requests waited: seconds of its
    TTFT, which are not modelled. Its TPOT has no part in them."""
    early = origin(row) == INFERENCEX and row.measured_date < launch_scripts().load.warm_since
    return early and row.backend == "sglang" and row.model in MIXTURES


def formats(row: Measured) -> dict[str, str]:
    """``dtype`` and ``moe_dtype``. gpt-oss computes with fp8 activations on Blackwell."""
    known = MIXTURES[row.model][1]
    if row.precision not in known:
        raise ConfigError(
            f"precision {row.precision} of {row.model}: not modelled; modelled: {', '.join(known)}"
        )
    dtype, experts = known[row.precision]
    if experts == "w4a16_mxfp4" and row.system in _BLACKWELL:
        experts = "w4a8_mxfp4_mxfp8"
    return {"dtype": dtype, "moe_dtype": experts}


def check_layout(row: Measured) -> None:
    """Raises ConfigError where the experts are on other GPUs than the columns of attention have:
    hidden data-parallel attention. InferenceX's rows have theirs in ``dp``, and TP in ``moe_tp``
    (.github/configs/nvidia-master.yaml in InferenceMAX/InferenceMAX at 525079a)."""
    ranks, experts = (row.tp or 1) * row.dp, row.moe_tp * row.moe_ep
    if origin(row) != INFERENCEX and experts not in (0, ranks):
        raise ConfigError(
            f"data-parallel attention: not modelled; moe_tp x moe_ep is {experts}, tp x dp {ranks}"
        )
