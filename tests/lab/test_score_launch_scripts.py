"""How measured servers were started: what the documents say, looked up for rows of each kind."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sarathi_sim.experiments.config.inputs import NONE
from sarathi_sim.experiments.lab.servers.rows import Measured
from sarathi_sim.experiments.lab.servers.scenarios import (
    campaign_of,
    launch_scripts,
    scenario_of,
    server_of,
    settings_of,
    sglang_memory,
)
from sarathi_sim.profiler.facts.device import engine_facts, load_device
from sarathi_sim.profiler.storage.strict import UserError

pytestmark = pytest.mark.lab

NAMES = {
    "llama": ("meta-llama/Llama-3.1-70B", "fp8"),
    "qwen": ("Qwen/Qwen3-32B", "fp8"),
    "qwen-235b": ("Qwen/Qwen3-235B-A22B-FP8", "fp8"),
    "gpt-oss": ("openai/gpt-oss-120b", "fp4"),
    "r1-fp8": ("deepseek-ai/DeepSeek-R1", "fp8"),
    "r1": ("deepseek-ai/DeepSeek-R1", "fp4"),
    "minimax": ("MiniMaxAI/MiniMax-M2.5", "fp8"),
    "minimax-fp4": ("MiniMaxAI/MiniMax-M2.5", "fp4"),
    "kimi": ("moonshotai/Kimi-K2.5", "fp4"),
    "qwen3.5-fp8": ("Qwen/Qwen3.5-397B-A17B", "fp8"),
    "glm-5-fp4": ("zhipuai/GLM-5", "fp4"),
}


def row(name: str, backend: str, system: str = "h100_sxm", **given: object) -> Measured:
    model, precision = NAMES[name]
    usual = {"id": "a", "backend": backend, "system": system, "model": model, "isl": 1024,
             "precision": precision, "source": "inferencex", "osl": 1024, "concurrency": 16,
             "tp": 8, "length_range_ratio": 0.8, "dense": name in ("llama", "qwen"),
             "ttft_ms": 1.0, "tpot_ms": 1.0, "measured_date": "2026-03-25"}  # fmt: skip
    return Measured.model_validate(usual | given)


def started(one: Measured) -> dict[str, Any]:
    """The row's settings as one mapping: of the policy, the memory, the layout and the KV cache."""
    found = scenario_of(one, NONE)
    number = {"kv": found["kv_cache_dtype"]}
    return found["policy"] | found["kv_cache"] | found["cluster"] | number


VLLM = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "async_scheduling": True,
        "gpu_memory_utilization": 0.92, "kv": "bf16"}  # fmt: skip
MTP = "speculative decoding"
GAP: dict[str, Any] = {"source": "nvidia_gap_sweep"}
POST2: dict[str, Any] = {"backend_version": "1.2.0rc6.post2"}
RANKS: dict[str, Any] = {"tp": 1, "dp": 8, "moe_ep": 8}
NO_WAIT = {"batch_wait_timeout_iters": None}


@pytest.mark.parametrize(
    ("server", "settings"),
    [
        # Engines' defaults.
        (row("qwen", "vllm", source=""), VLLM),
        (row("qwen", "vllm", "l40s", source=""),
         VLLM | {"max_num_batched_tokens": 2048, "max_num_seqs": 256}),
        (row("qwen", "vllm", "b200_sxm", source="", backend_version="0.28.1"),
         VLLM | {"max_num_batched_tokens": 16384}),
        (row("qwen", "vllm", source="", backend_version="0.13.0rc2"),
         VLLM | {"async_scheduling": False, "gpu_memory_utilization": 0.9}),
        (row("qwen", "sglang", source=""),
         {"max_prefill_tokens": 16384, "max_running_requests": 2048, "kv": "bf16",
          "chunked_prefill_size": 8192, "mem_fraction_static": 0.817}),
        (row("qwen", "trtllm", source=""),
         {"max_num_tokens": 8192, "max_batch_size": 2048, "enable_chunked_prefill": False,
          "free_gpu_memory_fraction": 0.9, "kv": "bf16"}),
        # nvidia_gap: SGLang as it comes, a share of the memory by TensorRT-LLM's version.
        (row("qwen", "trtllm", **GAP, backend_version="1.0.0rc3"),
         {"free_gpu_memory_fraction": 0.8, "max_num_tokens": 1024, "kv": "fp8"}),
        (row("qwen-235b", "trtllm", **GAP, isl=128, concurrency=128,
             backend_version="1.2.0rc6"),
         {"free_gpu_memory_fraction": 0.9, "max_num_tokens": 1628, "max_batch_size": 128}),
        (row("qwen", "vllm", **GAP, backend_version="0.12.0"),
         {"async_scheduling": False, "max_num_batched_tokens": 1040, "max_num_seqs": 16}),
        # InferenceX.
        (row("llama", "vllm"),
         {"max_num_seqs": 16, "async_scheduling": False, "kv": "bf16"}),
        (row("llama", "trtllm", source="nvidia_gap_csv", tp=4),
         {"max_num_tokens": 16384, "batch_wait_timeout_iters": 20, "kv": "fp8"}),
        (row("gpt-oss", "vllm", "b200_sxm", measured_date="2025-11-02"), {"kv": "bf16"}),
        (row("gpt-oss", "trtllm", "b200_sxm"),
         {"kv": "fp8", "max_num_tokens": 20000, "max_batch_size": 512,
          "free_gpu_memory_fraction": 0.85}),
        (row("r1-fp8", "sglang", "h200_sxm"),
         {"kv": "bf16", "mem_fraction_static": 0.82, "chunked_prefill_size": 32768,
          "max_prefill_tokens": 32768, "max_running_requests": 512}),
        (row("r1", "sglang", "b200_sxm", concurrency=8),
         {"kv": "fp8", "scheduler_recv_interval": 10, "mem_fraction_static": 0.85}),
        (row("r1-fp8", "sglang", "b200_sxm", tp=4),
         {"scheduler_recv_interval": 10, "max_running_requests": 32,
          "mem_fraction_static": 0.95}),
        (row("r1", "trtllm", "b200_sxm", **POST2, concurrency=100),
         {"max_num_tokens": 8192, "free_gpu_memory_fraction": 0.8, "max_batch_size": 2048}),
        (row("r1-fp8", "trtllm", "b200_sxm", **POST2, concurrency=64),
         {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8}),
        (row("minimax", "vllm", "b200_sxm", backend_version="0.17.0", tp=4, dp=4, moe_ep=16),
         {"gpu_memory_utilization": 0.95, "kv": "bf16", "expert_parallel": True,
          "max_num_batched_tokens": 8192}),
        (row("minimax", "vllm", "b200_sxm", backend_version="0.19.0"),
         {"gpu_memory_utilization": 0.9, "kv": "fp8", "expert_parallel": False,
          "max_num_batched_tokens": 2048, "max_num_seqs": 1024}),
        (row("minimax-fp4", "vllm", "b200_sxm", backend_version="nightly-1"),
         {"max_num_seqs": 16, "kv": "fp8", "gpu_memory_utilization": 0.9}),
        (row("kimi", "vllm", "b200_sxm", dp=4, moe_ep=4, measured_date="2026-04-17"),
         {"kv": "fp8", "expert_parallel": False, "max_num_batched_tokens": 2048}),
        (row("qwen3.5-fp8", "sglang", "b200_sxm", tp=4, moe_ep=4, concurrency=128),
         {"kv": "fp8", "scheduler_recv_interval": 30, "chunked_prefill_size": 32768,
          "max_prefill_tokens": 32768, "expert_parallel": True}),
        (row("glm-5-fp4", "sglang", "b200_sxm"),
         {"kv": "fp8", "mem_fraction_static": 0.8, "max_running_requests": 16,
          "chunked_prefill_size": 131072, "max_prefill_tokens": 16384}),
        # Only some servers wait to fill their batches, and none with several ranks.
        (row("r1-fp8", "trtllm", "b200_sxm", **POST2, concurrency=32), NO_WAIT),
        (row("r1-fp8", "trtllm", "b200_sxm", **POST2, concurrency=64, osl=8192), NO_WAIT),
        (row("r1", "trtllm", "b200_sxm", **POST2, concurrency=64), NO_WAIT),
        (row("llama", "trtllm", "b200_sxm"), NO_WAIT),
        (row("r1-fp8", "trtllm", "b200_sxm", **POST2, **RANKS, concurrency=64),
         NO_WAIT | {"enable_balance": True}),
        # Ranks of data-parallel attention; InferenceX's rows repeat TP in ``moe_tp``. R1's prompts
        # wait 60 steps for each other, gpt-oss' as the engine's defaults say. Limits are a rank's.
        (row("r1", "sglang", "b200_sxm", tp=4, moe_tp=4, moe_ep=4), {"tp": 4, "dp": None}),
        (row("minimax-fp4", "vllm", "b200_sxm", backend_version="0.19.0", tp=2, dp=2, moe_ep=4,
             concurrency=512),
         {"tp": 2, "pp": 1, "dp": 2, "rank_router": "least_requests", "expert_parallel": True}),
        (row("r1", "trtllm", "b200_sxm", **POST2, **RANKS, concurrency=256),
         {"dp": 8, "rank_router": "least_prompt_tokens", "expert_parallel": True,
          "enable_balance": True, "timeout_iters": 60, "batching_wait_iters": None,
          "max_num_tokens": 8192}),
        (row("gpt-oss", "trtllm", "b200_sxm", tp=1, dp=4, moe_tp=4),
         {"timeout_iters": 50, "batching_wait_iters": 10, "max_batch_size": 512,
          "expert_parallel": False}),
        (row("gpt-oss", "trtllm", "b200_sxm", tp=4), {"enable_balance": None}),
        (row("qwen-235b", "sglang", "h200_sxm", **GAP, tp=2, dp=4, moe_ep=8),
         {"rank_router": "round_robin", "chunked_prefill_size": 2048,
          "max_running_requests": 2048}),
    ],
)  # fmt: skip
def test_settings_of_a_server(server: Measured, settings: dict[str, Any]) -> None:
    found = started(server)
    assert {key: found.get(key) for key in settings} == settings
    assert found["prefix_caching"] is False


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (row("r1", "trtllm", "b200_sxm", backend_version="1.2.0rc6.post3"), MTP),
        (row("r1", "trtllm", "b200_sxm", backend_version="1.1.0rc2.post2"), MTP),
        (row("r1-fp8", "sglang", "b200_sxm"), MTP),
        (row("qwen3.5-fp8", "sglang", "b200_sxm", tp=4), MTP),
        (row("gpt-oss", "vllm", concurrency=512), "sent at once"),
        (row("r1", "trtllm", "gb200"), "prefill and decode on GPUs of their own"),
        (row("qwen-235b", "vllm", "h200_sxm", **GAP, tp=2, moe_tp=2, moe_ep=2),
         "degree is not told; moe_tp x moe_ep is 4, tp x dp 2"),
        (row("qwen-235b", "vllm", "h200_sxm", **GAP, tp=4, moe_tp=6),
         "degree is not told; moe_tp x moe_ep is 6, tp x dp 4"),
    ],
)  # fmt: skip
def test_servers_that_did_what_is_not_modelled(server: Measured, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        scenario_of(server, NONE)
    plain = {"source": "elsewhere", "dp": 1, "moe_tp": 0}
    assert scenario_of(server.model_copy(update=plain), NONE)["policy"]


def test_experts_on_more_gpus_than_attention_tell_its_ranks() -> None:
    """All GPUs hold experts, so attention on fewer of them is on as many ranks as are missing."""
    layouts = [(1, 4, 1, 4), (2, 4, 1, 2), (1, 1, 1, 1), (2, 1, 8, 4), (4, 1, 4, 1)]
    for tp, moe_tp, moe_ep, dp in layouts:
        server = row("qwen-235b", "vllm", "h200_sxm", **GAP, tp=tp, moe_tp=moe_tp, moe_ep=moe_ep)
        cluster = scenario_of(server, NONE)["cluster"]
        assert (cluster["tp"], cluster.get("dp", 1)) == (tp, dp)
        assert cluster["expert_parallel"] == (moe_ep > 1)
        assert f"dp{dp}" in server_of(server)


@pytest.mark.parametrize(
    ("device", "tp", "ranks", "chunk", "reserved_mib"),
    [
        ("l40s", 1, 1, 4096, 512 + 1.5 * 4096 + 2 * 32 + 128),
        ("l40s", 4, 1, 4096, 512 + 1.5 * 4096 + 2 * 160 + 4 * 128),
        ("h100-80g-sxm", 1, 1, 8192, 512 + 1.5 * 8192 + 2 * 256 + 128),
        ("h200-sxm", 8, 1, 8192, 512 + 1.5 * 8192 + 2 * 512 + 8 * 128),
        ("b200-sxm", 2, 1, 16384, 512 + 1.5 * 16384 + 2 * 512 + 2 * 128),
        # Two ranks: 4.5 MiB more for each of a graph's 512 sequences and rank, or 3 of 256.
        ("h200-sxm", 2, 2, 8192, 512 + 1.5 * 8192 + 2 * 512 + 4 * 128 + 512 * 2 * 4.5),
        ("h200-sxm", 1, 2, 8192, 512 + 1.5 * 8192 + 2 * 256 + 2 * 128 + 256 * 2 * 3),
    ],
)
def test_sglangs_memory_by_hand(
    device: str, tp: int, ranks: int, chunk: int, reserved_mib: float
) -> None:
    gpu = load_device(device)
    total = (gpu.reported_bytes or gpu.memory_bytes) / 2**20
    assert sglang_memory(gpu, tp, ranks=ranks) == {
        "chunked_prefill_size": chunk,
        "mem_fraction_static": pytest.approx(1 - reserved_mib / total, abs=6e-4),
    }


def test_the_file_names_what_rows_and_policies_have() -> None:
    """Every entry has a document, or says what it rests on; a file's version is a commit."""
    known = launch_scripts()
    columns, models = set(Measured.model_fields), set()
    for entry in known.entries:
        assert entry.documents or entry.inferred, entry.of
        assert columns >= set(entry.of).union(*(case.when for case in entry.cases))
        given = entry.of.get("model", [])
        models |= {given} if isinstance(given, str) else set(given)
        for revision in re.findall(r" @ (\w+)", " ".join(entry.documents)):
            assert len(revision) == 40, revision
    assert models <= set(known.models)
    assert settings_of(row("llama", "another")) == {}


def test_clients_apart_have_lengths_of_the_same_mean() -> None:
    """95 to 100 % of 1,050: 1,024 on average. Not where the tool is recorded."""
    gap = row("qwen", "sglang", **GAP, tp=2, length_range_ratio=1.0)
    lengths = scenario_of(gap, NONE, apart=True)["workload"]["lengths"]
    assert (lengths["prompt"], lengths["decode"], lengths["range_ratio"]) == (1050, 1050, 0.95)
    assert scenario_of(gap, NONE)["workload"]["lengths"]["range_ratio"] == 1.0
    assert campaign_of(gap) == "nvidia_gap_sweep, powers of two"
    assert campaign_of(row("qwen", "sglang")) == ""


def test_graphs_fusions_and_kernels_as_the_script_has_them() -> None:
    """And vLLM's version from the benchmark's repository, where the table has none."""
    of = {"engine_version_from_inferencemax_repo": "0.10.2", "backend_version": ""}
    for tp, largest in ((4, 8), (8, 1)):
        found = scenario_of(row("llama", "vllm", "b200_sxm", tp=tp, **of), NONE)
        assert found["stack"] == "vllm@0.10.2" and found["policy"]["version"] == "0.10.2"
        engine = found["engine"]
        assert (engine["cudagraph_mode"], engine["splitting_ops"]) == ("FULL_DECODE_ONLY", [])
        assert engine["fi_allreduce_fusion_max_size_mb"] == largest
        assert engine["launch_layer_s"] == pytest.approx(15 * engine_facts("vllm").at("launch_s"))
    hopper = scenario_of(row("llama", "vllm", **of), NONE)
    assert hopper["stack"] == "vllm@0.10.2" and "cudagraph_mode" not in hopper["engine"]
    assert hopper["engine"]["launch_layer_s"] == 0
    other = scenario_of(row("llama", "trtllm", "b200_sxm", **of), NONE)
    assert other["stack"] == "trtllm"
    marlin = scenario_of(row("gpt-oss", "vllm", backend_version="0.18.0"), NONE)
    assert (marlin["dtype"], marlin["moe_dtype"]) == ("bf16", "int4_wo")
