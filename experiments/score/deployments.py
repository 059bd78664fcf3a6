"""From a measured row to the scenario that describes its server and its load.

What a row does not say about its engine is stated here, each setting with its source. Nothing is
fitted to the rows, but the settings marked as inferred were found by looking at such rows.

Source: the launch scripts of SemiAnalysis InferenceX (``benchmarks/single_node`` and its older
versions) and its ``perf-changelog.yaml``. What is inferred about rows ``nvidia_gap_*`` is in
docs/accuracy.md.
"""

from __future__ import annotations

from typing import Any

from experiments.config.errors import ConfigError
from experiments.config.host_time import HostConstants
from experiments.score.measured import Measured
from profiler.facts.model import load_model
from profiler.facts.ops import MOE, OPS
from profiler.facts.rank_shapes import elementwise

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
DEEPSEEK = ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1")
GPT_OSS, MINIMAX = "openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5"
_IN_BLOCKS = {"fp8": ("fp8_block", "fp8_block"), "fp4": ("nvfp4", "nvfp4")}
#: The shipped model, and the formats of a layer's weights and of its experts by the row's
#: precision. Their fp8 is in blocks; gpt-oss's fp4 is MXFP4.
MIXTURES = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {"fp8": ("fp8_block", "fp8_block")}),
    MINIMAX: ("minimax-m2", _IN_BLOCKS),
    DEEPSEEK[0]: ("deepseek-v3", _IN_BLOCKS),
    DEEPSEEK[1]: ("deepseek-r1", _IN_BLOCKS),
    GPT_OSS: ("gpt-oss-120b", {"fp4": ("bf16", "w4a16_mxfp4")}),
}
#: Calls of a layer beside its GEMMs, norms and activations (additions are fused with norms, rotary
#: with attention): routing, permutation and the experts; attention and what writes the cache; two
#: all-reduces. Assumed.
_EXPERT_CALLS, _OTHER_CALLS = 3, 4
_FUSED = ("add", "rope")
#: From this day on InferenceX warms servers up before it measures.
_WARM = "2026-01-21"
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")
MODELS |= {name: model for name, (model, _) in MIXTURES.items()}
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


def server_of(row: Measured) -> str:
    """The row's server without its load. Rows of one are fitted to, or left out, together."""
    layout = f"tp{row.tp} pp{row.pp} dp{row.dp}"
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
    if row.dp > 1:
        raise ConfigError(f"data-parallel attention: not modelled; dp {row.dp}")
    mixture = row.model in MIXTURES
    if mixture:
        _refuse_mixture(row)
    return {
        "model": MODELS[row.model],
        "device": DEVICES[row.system],
        "stack": row.backend,
        **_weights(row),
        "kv_cache_dtype": _kv_cache_dtype(row),
        "cluster": _cluster(row),
        "workload": {
            "requests": ROUNDS * row.concurrency,
            "lengths": {
                "kind": "random",
                "prompt": row.isl,
                "decode": row.osl,
                "range_ratio": row.length_range_ratio,
            },
            "arrivals": {
                "kind": "closed_loop",
                "clients": row.concurrency,
                "think_s": THINK_S,
            },
            "declared": "exact",
        },
        "policy": _policy(row) | (_mixture_policy(row) if mixture else {}),
        "engine": _engine(row, host),
        "kv_cache": {
            "prefix_caching": False,
            **_MEMORY.get(stack_of(row), {}),
            **(_mixture_memory(row) if mixture else {}),
        },
    }


def _engine(row: Measured, host: HostConstants) -> dict[str, float]:
    found = {
        "host_iteration_s": host.host_iteration_s,
        "host_sequence_s": host.host_sequence_s,
        "frontend_s": host.frontend_s + mean_prompt(row) * host.frontend_token_s,
    }
    if host.launch_s:
        found["launch_layer_s"] = host.launch_s * calls_of_layer(row)
    return found


def _weights(row: Measured) -> dict[str, str]:
    """Qwen3's published fp8 checkpoints (``Qwen/Qwen3-32B-FP8``) are quantised in blocks."""
    if row.model in MIXTURES:
        return _mixture_formats(row)
    dtype = DTYPES[row.precision]
    in_blocks = dtype == "fp8" and row.model.startswith("Qwen/Qwen3-")
    return {"dtype": "fp8_block" if in_blocks else dtype}


def _cluster(row: Measured) -> dict[str, Any]:
    spread = {"expert_parallel": row.moe_ep > 1} if row.model in MIXTURES else {}
    return {"tp": row.tp, "pp": row.pp, "max_length": row.isl + row.osl, **spread}


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
        return {"name": "sglang", "chunked_prefill_size": 8192}
    waits = not dynamo and row.isl == row.osl == 1024 and (row.tp or 0) < 8
    wait = {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    return {
        "name": "trtllm",
        "max_num_tokens": row.isl if dynamo else max(16384, row.isl),
        "enable_chunked_prefill": dynamo,
        "max_batch_size": max(row.concurrency, 16),
        **(wait if waits else {}),
    }


# Mixtures of experts


def _mixture_formats(row: Measured) -> dict[str, str]:
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


def _refuse_mixture(row: Measured) -> None:
    """Raises ConfigError for servers whose rows are known to hold what is not modelled, though no
    column says so."""
    if row.source != "inferencex":
        return
    if row.backend == "sglang" and row.measured_date < _WARM:
        raise ConfigError("measured cold: kernels were compiled while the first requests waited")
    if _speculates(row):
        raise ConfigError("speculative decoding (MTP): not modelled")
    if row.model == GPT_OSS and row.system == "h100_sxm" and row.concurrency == 512:
        raise ConfigError(
            "all requests were sent at once to a server whose max_num_seqs is not recorded"
        )


def _speculates(row: Measured) -> bool:
    """DeepSeek R1 with multi-token prediction has launch scripts of its own: TensorRT-LLM's image
    1.2.0rc6.post3 and, from 2026 on, 1.1.0rc2.post2 served nothing else. Under SGLang they served
    fp8 on eight B200 (inferred: more than the plain script's 128 requests run at a time)."""
    if row.model != DEEPSEEK[1]:
        return False
    if row.backend == "sglang":
        return (row.system, row.precision, row.tp) == ("b200_sxm", "fp8", 8)
    if row.backend_version == "1.1.0rc2.post2":
        return row.measured_date >= "2026"
    return row.backend_version == "1.2.0rc6.post3"


def _mixture_policy(row: Measured) -> dict[str, Any]:
    """What differs from the settings of dense models. Under Dynamo, TensorRT-LLM takes a prompt and
    1,500 tokens, as AIConfigurator's generator sets it (inferred: with a prompt alone, many decodes
    would leave short prompts no room)."""
    if row.source != "inferencex":
        return {"max_num_tokens": row.isl + 1500} if row.backend == "trtllm" else {}
    of = {"sglang": _mixture_sglang, "trtllm": _mixture_trtllm, "vllm": _mixture_vllm}
    return of[row.backend](row)


def _mixture_sglang(row: Measured) -> dict[str, Any]:
    """New requests are looked for every 10 decodes, mostly every 30 with 16 clients or more."""
    fp4, eight = row.precision == "fp4", row.tp == 8
    tokens, running = (16384, 256) if fp4 else (32768, 128) if eight else (8192, 32)
    return {
        "chunked_prefill_size": tokens,
        "max_prefill_tokens": 16384 if fp4 else tokens,
        "max_running_requests": running,
        "scheduler_recv_interval": 30 if row.concurrency >= 16 and (fp4 or eight) else 10,
    }


def _mixture_trtllm(row: Measured) -> dict[str, Any]:
    """DeepSeek: one prompt beside the decodes, from 1.2 on at least 8,192 tokens. Only its fp8
    waits to fill batches, with many short requests."""
    no_wait = {"batch_wait_timeout_iters": None, "batch_wait_max_tokens_ratio": 0.0}
    if row.model == GPT_OSS:
        return {"max_num_tokens": 20000, "max_batch_size": 512, **no_wait}
    if row.model not in DEEPSEEK:
        return no_wait
    one = -(-(row.concurrency + row.isl + 64) // 64) * 64
    later = row.backend_version.startswith("1.2")
    found = {"max_num_tokens": max(one, 8192) if later else one, **no_wait}
    if later and row.precision == "fp8" and row.isl == row.osl == 1024 and row.concurrency >= 64:
        found |= {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8}
    return found


def _mixture_vllm(row: Measured) -> dict[str, Any]:
    """MiniMax in fp8 keeps vLLM's own limit of sequences on Blackwell."""
    if row.model != MINIMAX or row.precision != "fp8":
        return {}
    return {"max_num_seqs": 1024 if row.system in _BLACKWELL else 256}


def _mixture_memory(row: Measured) -> dict[str, float]:
    """The engine's share of the memory."""
    if row.source != "inferencex":
        return {}
    if row.backend == "sglang" and row.model in DEEPSEEK:
        fp8 = 0.82 if row.tp == 8 else 0.95
        return {"mem_fraction_static": 0.85 if row.precision == "fp4" else fp8}
    if row.backend == "trtllm":
        return {"free_gpu_memory_fraction": 0.85 if row.model == GPT_OSS else 0.8}
    if row.backend == "vllm" and row.model == MINIMAX and row.system in _BLACKWELL:
        return {"gpu_memory_utilization": 0.95}
    return {}


def calls_of_layer(row: Measured) -> float:
    """How many calls a layer of prompts launches, about: a quantised GEMM quantises its input
    first."""
    model = load_model(MIXTURES[row.model][0])
    quantised = _mixture_formats(row)["dtype"] != "bf16"
    gemms = sum(
        model.share(op) * (2 if quantised and OPS[op].split else 1)
        for op in model.row_ops
        if OPS[op].shape is not None and OPS[op].part == "layer"
    )
    streams = [one for one in elementwise(model.shard(1)) if one.kernel not in _FUSED]
    beside = sum(one.times for one in streams) + model.share(MOE) * _EXPERT_CALLS
    return gemms + beside + _OTHER_CALLS
