"""How measured mixtures of experts were served: what differs from the settings of dense models.

Sources and marks as in ``deployments.py``, which makes the scenarios.
"""

from __future__ import annotations

from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.score.measured import Measured

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
#: From this day on InferenceX warms servers up before it measures.
_WARM = "2026-01-21"
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")


def attention_ranks(row: Measured) -> int:
    """How many ranks have attention of their own. MiniMax's rows have ``tp`` in ``dp`` where its
    experts are spread, but the launch scripts know no data-parallel attention, and 17 loads that
    were measured under both names have the same TPOT within 1 %. In fp4 a second server of that
    name took the loads with more clients: data-parallel (inferred)."""
    if row.model != MINIMAX or row.tp != row.dp or row.moe_ep != row.dp**2:
        return row.dp
    second = row.precision == "fp4" and row.isl == 1024 and row.measured_date >= "2026-04-22"
    return row.dp if second and row.tp == 2 and row.concurrency >= 256 else 1


def measured_cold(row: Measured) -> bool:
    """Whether SGLang compiled kernels of a mixture while the first requests waited: seconds of its
    TTFT, which are not modelled. Its TPOT has no part in them."""
    early = row.source == "inferencex" and row.measured_date < _WARM
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


def refuse(row: Measured) -> None:
    """Raises ConfigError for servers whose rows are known to hold what is not modelled, though no
    column says so."""
    if row.source != "inferencex":
        return
    if _speculates(row):
        raise ConfigError("speculative decoding (MTP): not modelled")
    if row.model == GPT_OSS and row.system == "h100_sxm" and row.concurrency == 512:
        raise ConfigError(
            "all requests were sent at once to a server whose max_num_seqs is not recorded"
        )


def expert_parallel(row: Measured) -> bool:
    """vLLM 0.17's script for MiniMax in fp8 on B200 asked for it whatever the row says."""
    always = (MINIMAX, "b200_sxm", "fp8", "0.17.0")
    found = (row.model, row.system, row.precision, row.backend_version)
    return row.moe_ep > 1 or found == always


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


def policy(row: Measured) -> dict[str, Any]:
    """What differs from the settings of dense models. Under Dynamo, TensorRT-LLM takes a prompt and
    1,500 tokens, as AIConfigurator's generator sets it (inferred: with a prompt alone, many decodes
    would leave short prompts no room)."""
    if row.source != "inferencex":
        return {"max_num_tokens": row.isl + 1500} if row.backend == "trtllm" else {}
    of = {"sglang": _sglang, "trtllm": _trtllm, "vllm": _vllm}
    return of[row.backend](row)


def _sglang(row: Measured) -> dict[str, Any]:
    """New requests are looked for every 10 decodes, mostly every 30 with 16 clients or more."""
    fp4, eight = row.precision == "fp4", row.tp == 8
    tokens, running = (16384, 256) if fp4 else (32768, 128) if eight else (8192, 32)
    return {
        "chunked_prefill_size": tokens,
        "max_prefill_tokens": 16384 if fp4 else tokens,
        "max_running_requests": running,
        "scheduler_recv_interval": 30 if row.concurrency >= 16 and (fp4 or eight) else 10,
    }


def _trtllm(row: Measured) -> dict[str, Any]:
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


def _vllm(row: Measured) -> dict[str, Any]:
    """MiniMax in fp8 keeps vLLM's own limit of sequences on Blackwell."""
    if row.model != MINIMAX or row.precision != "fp8":
        return {}
    return {"max_num_seqs": 1024 if row.system in _BLACKWELL else 256}


def memory(row: Measured) -> dict[str, float]:
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
