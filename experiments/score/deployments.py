"""From a measured row to the scenario that describes its server and its load.

What a row does not say about its engine is stated here, each setting with its source. Nothing is
fitted to the rows, but the settings marked as inferred were found by looking at such rows.

Source: the launch scripts of SemiAnalysis InferenceX (``benchmarks/single_node`` and its older
versions) and its ``perf-changelog.yaml``. What is inferred about rows ``nvidia_gap_*`` is in
docs/accuracy.md.
"""

from __future__ import annotations

import re
from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import HostConstants, calls_of_layer
from sarathi_sim.experiments.score import mixtures
from sarathi_sim.experiments.score.measured import Measured
from sarathi_sim.profiler.facts.model import load_model

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

ROUNDS = 10
"""Requests a client sends; both sources' tools (of ``nvidia_gap_*`` inferred)."""
THINK_S = 0.003
"""Seconds in the mean until a client's next request reaches the engine: assumed."""

SGLANG_MEMORY = 0.8
"""SGLang's share of the memory under Dynamo: inferred from one GPU of 80 GB that holds 66 GB of
weights. Its own default would leave room for twice as many requests."""
TRTLLM_MEMORY = 0.75
"""TensorRT-LLM's share of what the weights leave, under Dynamo: inferred from one GPU that serves
Qwen3 32B in fp8, where requests begin to wait between 278 and 295 thousand tokens."""

DYNAMO = "under dynamo"
_MEMORY = {
    f"sglang {DYNAMO}": {"mem_fraction_static": SGLANG_MEMORY},
    f"trtllm {DYNAMO}": {"free_gpu_memory_fraction": TRTLLM_MEMORY},
}


def stack_of(row: Measured) -> str:
    """Which host runs the row's engine: the engine's own server, or NVIDIA Dynamo's frontend (its
    images served ``nvidia_gap_*``). Constants of the host are by this name."""
    return f"{row.backend} {DYNAMO}" if row.source.startswith("nvidia_gap") else row.backend


def _stack(row: Measured) -> str:
    """With the version of the engine, where the row says it: not of a nightly build, nor of an
    image of Dynamo, which names its own."""
    version = re.fullmatch(r"\d+(\.\w+)*", row.backend_version)
    dynamo = row.backend == "trtllm" and row.backend_version.startswith("0.")
    return f"{row.backend}@{row.backend_version}" if version and not dynamo else row.backend


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
    mixture = row.model in mixtures.MIXTURES
    if mixture:
        mixtures.refuse(row)
    return {
        "model": MODELS[row.model],
        "device": DEVICES[row.system],
        "stack": _stack(row),
        **_weights(row),
        "kv_cache_dtype": _kv_cache_dtype(row),
        "cluster": _cluster(row),
        "workload": {
            "requests": ROUNDS * row.concurrency,
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
        "policy": _policy(row) | (mixtures.policy(row) if mixture else {}),
        "engine": _engine(row, host),
        "kv_cache": {
            "prefix_caching": False,
            **_MEMORY.get(stack_of(row), {}),
            **(mixtures.memory(row) if mixture else {}),
        },
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


def _cluster(row: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {"tp": row.tp, "pp": row.pp, "max_length": row.isl + row.osl}
    if row.model in mixtures.MIXTURES:
        found["expert_parallel"] = mixtures.expert_parallel(row)
    return found


def _kv_cache_dtype(row: Measured) -> str:
    """bf16 for unquantised models. For others the launch scripts say fp8; vLLM 0.10 on H100 behaves
    as with bf16 (inferred)."""
    if DTYPES[row.precision] == "bf16" or (row.backend == "vllm" and row.system == "h100_sxm"):
        return "bf16"
    return "fp8"


def _policy(row: Measured) -> dict[str, Any]:
    """The engine's settings: of InferenceX its launch scripts'. For ``nvidia_gap_*`` they are not
    recorded; about one new prompt an iteration is inferred for vLLM and TensorRT-LLM, where the
    end of a prompt that decodes push out runs in the next."""
    dynamo = stack_of(row).endswith(DYNAMO)
    if row.backend == "vllm":
        return {
            "name": "vllm",
            "max_num_batched_tokens": row.isl + row.concurrency if dynamo else 8192,
            "max_num_seqs": max(row.concurrency, 16),
            "async_scheduling": True,
        }
    if row.backend == "sglang":
        # The load tools ask for outputs of a fixed length (ignore-eos).
        return {"name": "sglang", "chunked_prefill_size": 8192, "ignore_eos": True}
    waits = not dynamo and row.isl == row.osl == 1024 and (row.tp or 0) < 8
    wait = {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    return {
        "name": "trtllm",
        "max_num_tokens": row.isl if dynamo else max(16384, row.isl),
        "enable_chunked_prefill": dynamo,
        "max_batch_size": max(row.concurrency, 16),
        **(wait if waits else {}),
    }
