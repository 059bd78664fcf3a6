"""From a measured row to the scenario that describes its server and its load.

Engine settings that a row lacks are in ``data/serving/launch_scripts.yaml``, each with the document
or the evidence that it comes from. Nothing is fitted to the rows.
"""

from __future__ import annotations

import re
from typing import Any

from sarathi_sim.experiments.capacity.options import router_of_ranks
from sarathi_sim.experiments.config.inputs import HostConstants, calls_of_layer, launch_s_of
from sarathi_sim.experiments.config.scenario import OF_VLLM, Engine
from sarathi_sim.experiments.measured.launch_scripts import (
    DEVICES,
    INFERENCEX,
    launch_scripts,
    of_a_rank,
    origin,
    settings_of,
    sglang_memory,
)
from sarathi_sim.experiments.measured.pool_rows import pools_of
from sarathi_sim.experiments.measured.servers import Measured
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import STACKS
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import SHARES

_IN_BLOCKS = ("fp8_block", "fp8_block")
#: DeepSeek's fp4 checkpoint quantises attention's largest matrix and shared experts, too (the card
#: of nvidia/DeepSeek-R1-0528-FP4-v2).
_DEEPSEEK = {"fp8": _IN_BLOCKS, "fp4": ("nvfp4", "nvfp4")}
#: The shipped model, and the formats of a layer's weights and of its experts by the row's
#: precision. Their fp8 is in blocks; gpt-oss's fp4 is MXFP4. Only routed experts are not bf16 in
#: Kimi K2.5, in Qwen3.5's fp4 (hf_quant_config.json of nvidia/Qwen3.5-397B-A17B-NVFP4), and in
#: GLM-5's but for shared experts and dense layers (of nvidia/GLM-5-NVFP4), 3.5 of 744 billion
#: parameters.
MIXTURES = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {"fp8": _IN_BLOCKS}),
    "MiniMaxAI/MiniMax-M2.5": ("minimax-m2", {"fp8": _IN_BLOCKS, "fp4": ("bf16", "nvfp4")}),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", _DEEPSEEK),
    "deepseek-ai/DeepSeek-R1": ("deepseek-r1", _DEEPSEEK),
    "openai/gpt-oss-120b": ("gpt-oss-120b", {"fp4": ("bf16", "w4a16_mxfp4")}),
    "moonshotai/Kimi-K2.5": (
        "kimi-k2.5",
        {"fp4": ("bf16", "nvfp4"), "int4": ("bf16", "int4_wo")},
    ),
    "Qwen/Qwen3.5-397B-A17B": (
        "qwen3.5-397b-a17b",
        {"bf16": ("bf16", "bf16"), "fp8": _IN_BLOCKS, "fp4": ("bf16", "nvfp4")},
    ),
    "zhipuai/GLM-5": ("glm-5", {"fp8": _IN_BLOCKS, "fp4": ("bf16", "nvfp4")}),
}
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")


#: Hugging Face name -> shipped model. InferenceX serves Llama 3.3 under the name of Llama 3.1.
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.3-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
MODELS |= {name: model for name, (model, _) in MIXTURES.items()}
DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4"}
DTYPES |= {"int4": "int4_wo"}

THINK_S = 0.003
"""Mean seconds until a client's next request reaches the engine: assumed."""

APART = 0.95
"""The shortest length as a share of the longest where clients have drifted apart: assumed. With
equal lengths they go on in lock-step, as they began."""

DYNAMO = "under dynamo"
IN_POOLS = " in pools"


def stack_of(row: Measured) -> str:
    """The name by which host constants are stored: the engine's own server, NVIDIA Dynamo's
    frontend (its images served ``nvidia_gap_sweep``), or pools, of SGLang by release (its images
    of December 2025 and of 2026 differ by half)."""
    if row.mode != "agg":
        release = ".".join(row.backend_version.split(".")[:3]) if row.backend == "sglang" else ""
        return f"{row.backend} {release}".rstrip() + IN_POOLS
    return f"{row.backend} {DYNAMO}" if origin(row).startswith("nvidia_gap") else row.backend


def _stack(row: Measured) -> str:
    """The stack with the engine's version, if the row has it: not for a nightly build, nor for an
    image of Dynamo, which names its own version."""
    version = re.fullmatch(r"\d+(\.\w+)*", row.backend_version)
    dynamo = row.backend == "trtllm" and row.backend_version.startswith("0.")
    return f"{row.backend}@{row.backend_version}" if version and not dynamo else row.backend


def _versioned(row: Measured) -> dict[str, str]:
    """The policy's version, if the row has the engine's."""
    _, _, version = _stack(row).partition("@")
    return {"version": version} if version and row.backend in ("vllm", "sglang") else {}


def server_of(row: Measured) -> str:
    """The row's server, without its load. A server's rows are fitted, or left out, together."""
    layout = f"tp{row.tp} pp{row.pp} dp{attention_ranks(row)}"
    if row.launch is not None:
        layout = row.launch.layout or layout
    return f"{stack_of(row)}, {row.model}, {row.system}, {row.precision}, {layout}"


def campaign_of(row: Measured) -> str:
    """The row's measurement campaign, if its load tool is not recorded, so that its clients may
    have drifted apart; else empty. Lengths tell campaigns of one source apart."""
    if origin(row) == INFERENCEX or row.length_range_ratio < 1:
        return ""
    return f"{row.source}, {'multiples of 1,000' if row.isl % 1000 == 0 else 'powers of two'}"


def mean_prompt(row: Measured) -> float:
    """Mean tokens of the row's prompts."""
    return row.isl * (1 + row.length_range_ratio) / 2


def scenario_of(row: Measured, host: HostConstants, apart: bool = False) -> dict[str, Any]:
    """The row's scenario as a configuration would have it, with the ``host``'s constants; its
    clients may be ``apart``, with lengths of the same mean. Raises UserError for what is not
    modelled, with the reason."""
    for name, value, allowed in (
        ("model", row.model, MODELS),
        ("system", row.system, DEVICES),
        ("backend", row.backend, STACKS),
        ("precision", row.precision, DTYPES),
    ):
        if value not in allowed:
            raise UserError(f"{name} {value}: not modelled; modelled: {', '.join(allowed)}")
    if row.mode != "agg":
        experts = load_model(MODELS[row.model]).experts
        return _base(row, apart) | pools_of(
            row, _engine(row, host), experts.num_experts if experts else 0
        )
    if row.tp is None:
        raise UserError("tp: this key is missing")
    if row.model in MIXTURES:
        _check_layout(row)
    dp, known = attention_ranks(row), settings_of(row)
    if reason := known.pop("refused", None):
        raise UserError(reason)
    if row.backend == "sglang":
        # The load tools ask for outputs of a fixed length (ignore-eos).
        device = load_device(DEVICES[row.system])
        known = sglang_memory(device, row.tp, row.pp, dp) | {"ignore_eos": True} | known
        known |= of_a_rank(known, dp)
    known.pop("attention_dp", None)
    own = {key: known.pop(key) for key in OF_VLLM if key in known}
    kernels = {key: known.pop(key) for key in ("moe_dtype",) if key in known}
    return {
        **_base(row, apart),
        **kernels,
        "kv_cache_dtype": known.pop("kv_cache_dtype"),
        "cluster": {
            "tp": row.tp,
            "pp": row.pp,
            **({"dp": dp, "rank_router": router_of_ranks(row.backend)} if dp > 1 else {}),
            "max_length": sum(_lengths(row, apart)[:2]),
            **_spread(row, known.pop("expert_parallel", "as_row")),
        },
        "kv_cache": {
            "prefix_caching": False,
            **{share: known.pop(share) for share in SHARES if share in known},
        },
        "policy": {"name": row.backend, **_versioned(row), **known},
        "engine": _engine(row, host, **own),
    }


def _base(row: Measured, apart: bool) -> dict[str, Any]:
    """Model, device, kernels and load."""
    isl, osl, ratio = _lengths(row, apart)
    return {
        "model": MODELS[row.model],
        "device": DEVICES[row.system],
        "stack": _stack(row),
        **_weights(row),
        "workload": {
            "requests": launch_scripts().load.rounds * row.concurrency,
            "lengths": {
                "kind": "random",
                "prompt": isl,
                "decode": osl,
                "tool": "sglang",
                "range_ratio": ratio,
            },
            "arrivals": {
                "kind": "closed_loop",
                "clients": row.concurrency,
                "think_s": THINK_S,
            },
            "declared": "exact",
        },
    }


def _lengths(row: Measured, apart: bool) -> tuple[int, int, float]:
    """The longest prompt and output, and the shortest ones' share of them."""
    if not apart:
        return row.isl, row.osl, row.length_range_ratio
    longest = 2 / (1 + APART)
    return round(row.isl * longest), round(row.osl * longest), APART


def _engine(row: Measured, host: HostConstants, **own: Any) -> dict[str, Any]:
    found = {
        **own,
        "host_iteration_s": host.host_iteration_s,
        "host_sequence_s": host.host_sequence_s,
        "frontend_s": host.frontend_s + mean_prompt(row) * host.frontend_token_s,
        "launch_layer_s": 0.0,
    }
    if launch_s := launch_s_of(host, Engine(**own)):
        calls = calls_of_layer(load_model(MODELS[row.model]), _weights(row)["dtype"])
        found["launch_layer_s"] = launch_s * calls
    return found


def _weights(row: Measured) -> dict[str, str]:
    """Qwen3's published fp8 checkpoints (``Qwen/Qwen3-32B-FP8``) are quantised in blocks."""
    if row.model in MIXTURES:
        return _formats(row)
    dtype = DTYPES[row.precision]
    in_blocks = dtype == "fp8" and row.model.startswith("Qwen/Qwen3-")
    return {"dtype": "fp8_block" if in_blocks else dtype}


def _spread(row: Measured, spread: bool | str) -> dict[str, Any]:
    if row.model not in MIXTURES:
        return {}
    return {"expert_parallel": row.moe_ep > 1 if spread == "as_row" else spread}


def attention_ranks(row: Measured) -> int:
    """Ranks of data-parallel attention: one if the launch script cannot ask for more, and as many
    as the experts have GPUs for each of ``tp``, if a row has these alone.
    (Rows have ``tp`` in ``dp``, too, where vLLM spreads experts; 17 loads of MiniMax that were
    measured under both names have the same TPOT within 1 %.)"""
    if not settings_of(row).get("attention_dp", True):
        return 1
    hidden = row.model in MIXTURES and origin(row) != INFERENCEX
    return max(row.dp, row.moe_tp * row.moe_ep // (row.tp or 1)) if hidden else row.dp


def measured_cold(row: Measured) -> bool:
    """Whether SGLang compiled kernels of a mixture while the first requests waited. This adds
    seconds to the TTFT, which are not modelled, and nothing to the TPOT. (Rows without a date are
    copies of later ones.)"""
    early = origin(row) == INFERENCEX and "" < row.measured_date < launch_scripts().load.warm_since
    return early and row.backend == "sglang" and row.model in MIXTURES


def _formats(row: Measured) -> dict[str, str]:
    """``dtype`` and ``moe_dtype``. gpt-oss computes with fp8 activations on Blackwell."""
    known = MIXTURES[row.model][1]
    if row.precision not in known:
        raise UserError(
            f"precision {row.precision} of {row.model}: not modelled; modelled: {', '.join(known)}"
        )
    dtype, experts = known[row.precision]
    if experts == "w4a16_mxfp4" and row.system in _BLACKWELL:
        experts = "w4a8_mxfp4_mxfp8"
    return {"dtype": dtype, "moe_dtype": experts}


def _check_layout(row: Measured) -> None:
    """Raises UserError if the GPUs of the experts do not tell the ranks of attention: they are no
    multiple of its own, or ``moe_tp`` is TP and ``moe_ep`` GPUs of the same, as in tables that
    multiply both. InferenceX's rows have the ranks in ``dp``, and TP in ``moe_tp``
    (.github/configs/nvidia-master.yaml in InferenceMAX/InferenceMAX at 525079a)."""
    gpus, experts = (row.tp or 1) * row.dp, row.moe_tp * row.moe_ep
    if origin(row) == INFERENCEX or experts in (0, gpus):
        return
    if experts % gpus or (row.moe_ep > 1 and row.moe_tp == row.tp):
        raise UserError(
            "data-parallel attention: its degree is not told; "
            f"moe_tp x moe_ep is {experts}, tp x dp {gpus}"
        )
