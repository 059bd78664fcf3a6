"""From a measured row to the scenario that describes its server and its load.

What a row does not say about its engine is in ``data/serving/launch_scripts.yaml``, with the
document that says it, or with what it was inferred from. Nothing is fitted to the rows.
"""

from __future__ import annotations

from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import HostConstants, calls_of_layer
from sarathi_sim.experiments.score import mixtures
from sarathi_sim.experiments.score.launch_scripts import (
    launch_scripts,
    origin,
    settings_of,
    sglang_memory,
)
from sarathi_sim.experiments.score.measured import Measured
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.load.engine_memory import SHARES

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
MODELS |= {name: model for name, (model, _) in mixtures.MIXTURES.items()}
#: AIConfigurator's system -> shipped device.
DEVICES = {
    "a100_sxm": "a100-80g-sxm",
    "h100_sxm": "h100-80g-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
STACKS = ("vllm", "sglang", "trtllm")
DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp4": "nvfp4", "nvfp4": "nvfp4"}
DTYPES |= {"int4": "int4_wo"}

THINK_S = 0.003
"""Seconds in the mean until a client's next request reaches the engine: assumed."""

DYNAMO = "under dynamo"


def stack_of(row: Measured) -> str:
    """Which host runs the row's engine: the engine's own server, or NVIDIA Dynamo's frontend (its
    images served ``nvidia_gap_sweep``). Constants of the host are by this name."""
    return f"{row.backend} {DYNAMO}" if origin(row).startswith("nvidia_gap") else row.backend


def server_of(row: Measured) -> str:
    """The row's server without its load. Rows of one are fitted to, or left out, together."""
    layout = f"tp{row.tp} pp{row.pp} dp{mixtures.attention_ranks(row)}"
    return f"{stack_of(row)}, {row.model}, {row.system}, {row.precision}, {layout}"


def mean_prompt(row: Measured) -> float:
    """Tokens."""
    return row.isl * (1 + row.length_range_ratio) / 2


def scenario_of(row: Measured, host: HostConstants) -> dict[str, Any]:
    """The row's scenario as a configuration would have it, with the ``host``'s constants. Raises
    ConfigError for what is not modelled, with the reason."""
    for name, value, allowed in (
        ("model", row.model, MODELS),
        ("system", row.system, DEVICES),
        ("backend", row.backend, STACKS),
        ("precision", row.precision, DTYPES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} {value}: not modelled; modelled: {', '.join(allowed)}")
    if row.mode != "agg":
        raise ConfigError(f"prefill and decode on GPUs of their own: not modelled; mode {row.mode}")
    if row.tp is None:
        raise ConfigError("tp: this key is missing")
    if (dp := mixtures.attention_ranks(row)) > 1:
        raise ConfigError(f"data-parallel attention: not modelled; dp {dp}")
    if row.model in mixtures.MIXTURES:
        mixtures.check_layout(row)
    known = settings_of(row)
    if reason := known.pop("refused", None):
        raise ConfigError(reason)
    if row.backend == "sglang":
        # The load tools ask for outputs of a fixed length (ignore-eos).
        device = load_device(DEVICES[row.system])
        known = sglang_memory(device, row.tp, row.pp) | {"ignore_eos": True} | known
    known.pop("attention_dp", None)
    return {
        "model": MODELS[row.model],
        "device": DEVICES[row.system],
        "stack": row.backend,
        **_weights(row),
        "kv_cache_dtype": known.pop("kv_cache_dtype"),
        "cluster": _cluster(row, known.pop("expert_parallel", "as_row")),
        "workload": {
            "requests": launch_scripts().load.rounds * row.concurrency,
            "lengths": {
                "kind": "random",
                "prompt": row.isl,
                "decode": row.osl,
                "tool": "sglang",
                "range_ratio": row.length_range_ratio,
            },
            "arrivals": {
                "kind": "closed_loop",
                "clients": row.concurrency,
                "think_s": THINK_S,
            },
            "declared": "exact",
        },
        "kv_cache": {
            "prefix_caching": False,
            **{share: known.pop(share) for share in SHARES if share in known},
        },
        "policy": {"name": row.backend, **known},
        "engine": _engine(row, host),
    }


def _engine(row: Measured, host: HostConstants) -> dict[str, float]:
    found = {
        "host_iteration_s": host.host_iteration_s,
        "host_sequence_s": host.host_sequence_s,
        "frontend_s": host.frontend_s + mean_prompt(row) * host.frontend_token_s,
    }
    if row.model in mixtures.MIXTURES:
        found["launch_layer_s"] = 0.0
    if host.launch_s:
        calls = calls_of_layer(load_model(MODELS[row.model]), _weights(row)["dtype"])
        found["launch_layer_s"] = host.launch_s * calls
    return found


def _weights(row: Measured) -> dict[str, str]:
    """Qwen3's published fp8 checkpoints (``Qwen/Qwen3-32B-FP8``) are quantised in blocks."""
    if row.model in mixtures.MIXTURES:
        return mixtures.formats(row)
    dtype = DTYPES[row.precision]
    in_blocks = dtype == "fp8" and row.model.startswith("Qwen/Qwen3-")
    return {"dtype": "fp8_block" if in_blocks else dtype}


def _cluster(row: Measured, spread: bool | str) -> dict[str, Any]:
    found: dict[str, Any] = {"tp": row.tp, "pp": row.pp, "max_length": row.isl + row.osl}
    if row.model in mixtures.MIXTURES:
        found["expert_parallel"] = row.moe_ep > 1 if spread == "as_row" else spread
    return found
