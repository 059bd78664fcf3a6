"""The engine's own command line for a deployment."""

from __future__ import annotations

import shlex
from typing import Any

from experiments.config.key_paths import get
from experiments.config.scenario import Scenario

_HUB = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
}
"""Models on the Hugging Face Hub; others by the name that the configuration has."""
_QUANTIZATION = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "modelopt_fp4", "int4_wo": "awq"}


_SERVERS: dict[str, tuple[str, dict[str, str]]] = {
    "vllm": (
        "vllm serve {model}",
        {
            "--tensor-parallel-size": "cluster.tp",
            "--pipeline-parallel-size": "cluster.pp",
            "--max-model-len": "cluster.max_length",
            "--max-num-batched-tokens": "policy.max_num_batched_tokens",
            "--max-num-seqs": "policy.max_num_seqs",
            "--gpu-memory-utilization": "kv_cache.gpu_memory_utilization",
            "--block-size": "kv_cache.block_size",
            "--quantization": "quantization",
            "--kv-cache-dtype": "kv_cache_dtype",
        },
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {model}",
        {
            "--tp-size": "cluster.tp",
            "--pp-size": "cluster.pp",
            "--context-length": "cluster.max_length",
            "--chunked-prefill-size": "policy.chunked_prefill_size",
            "--max-running-requests": "policy.max_running_requests",
            "--mem-fraction-static": "kv_cache.mem_fraction_static",
            "--page-size": "kv_cache.block_size",
            "--quantization": "quantization",
            "--kv-cache-dtype": "kv_cache_dtype",
        },
    ),
    "trtllm": (
        "trtllm-serve {model} --backend pytorch",
        {
            "--tp_size": "cluster.tp",
            "--pp_size": "cluster.pp",
            "--max_seq_len": "cluster.max_length",
            "--max_num_tokens": "policy.max_num_tokens",
            "--max_batch_size": "policy.max_batch_size",
            "--kv_cache_free_gpu_memory_fraction": "kv_cache.free_gpu_memory_fraction",
        },
    ),
}
"""By policy: what starts a server, and which of the scenario's settings each option takes."""


def launch_command(scenario: Scenario) -> str:
    """What starts one replica, with every setting of the engine that the simulation has.

    Raises KeyError for a policy that is no engine's.
    """
    program, options = _SERVERS[scenario.policy.name]
    settings: dict[str, Any] = {
        "cluster": scenario.cluster.model_dump(),
        "policy": scenario.policy.described(),
        "kv_cache": scenario.kv_cache.model_dump() if scenario.kv_cache else {},
        "quantization": _QUANTIZATION.get(scenario.dtype or "bf16"),
        "kv_cache_dtype": None if scenario.kv_cache_dtype == "bf16" else scenario.kv_cache_dtype,
    }
    words = [program.format(model=shlex.quote(_HUB.get(scenario.model, scenario.model)))]
    for option, path in options.items():
        value = get(settings, tuple(path.split(".")))
        if value is None and path.startswith("kv_cache."):  # the engine's share of the memory
            value = scenario.cluster.usable_memory
        if value is not None:
            words.append(f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}")
    return " ".join(words)
