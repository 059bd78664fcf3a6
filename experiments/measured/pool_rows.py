"""The pools of a measured server with prefill and decode on separate workers, as a configuration
would have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sarathi_sim.experiments.capacity.options import router_of_ranks
from sarathi_sim.experiments.measured.launch_lists import StartedPool
from sarathi_sim.experiments.measured.launch_scripts import of_a_rank
from sarathi_sim.experiments.measured.servers import Measured
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.acceptance import golden_length
from sarathi_sim.simulator.loop.routers import Router

DRAFTER = ("deepseek-v4-pro", "mtp", "thinking_on")
"""Whose published acceptance stands for DeepSeek-R1's, of which none is: the nearest model."""
_HOPPER = ("h100_sxm", "h200_sxm")
_WITH_DRAFTS = 48
_B200 = {"chunked_prefill_size": 32768, "max_prefill_tokens": 32768}
_B200_PROMPTS, _B200_STATIC = 512, 0.85
"""What the public recipes for SGLang on B200 say, where the launch list knows no limits
(NVIDIA/srt-slurm, recipes/b200-fp4 and b200-fp8). Their largest ones have twice the limits."""
_REDUNDANT = 32
"""Redundant experts of each recipe whose ranks do not divide the experts."""


def pools_of(row: Measured, engine: Mapping[str, float], experts: int) -> dict[str, Any]:
    """A row's pools, and what they have in common; ``experts`` are its model's. Raises UserError
    for what is not known."""
    launch = row.launch
    if launch is None or launch.prefill is None or launch.decode is None:
        raise UserError("separate prefill workers: no launch settings are known")
    pools = {"prefill": launch.prefill, "decode": launch.decode}
    return {
        "kv_cache_dtype": _kv_cache_dtype(row),
        "cluster": {"max_length": row.isl + row.osl},
        "kv_cache": {"prefix_caching": False},
        "policy": {"name": row.backend},
        "engine": dict(engine),
        "disaggregation": {pool: _pool(row, pool, one, experts) for pool, one in pools.items()},
        **_speculation(row.drafts),
    }


def _kv_cache_dtype(row: Measured) -> str:
    """Recipes for SGLang on Blackwell say fp8_e4m3, those for Hopper nothing: bf16 (srt-slurm,
    recipes/; server_args.py, `kv_cache_dtype: auto`)."""
    return "bf16" if row.backend == "sglang" and row.system in _HOPPER else "fp8"


def _speculation(drafts: int) -> dict[str, Any]:
    if not drafts:
        return {}
    mean = golden_length(*DRAFTER, drafts)
    return {"speculation": {"method": "mtp", "draft_length": drafts, "acceptance": mean}}


def _pool(row: Measured, pool: str, one: StartedPool, experts: int) -> dict[str, Any]:
    """What a pool has of its own."""
    cluster: dict[str, Any] = {
        "tp": one.tp // one.ranks,
        "dp": one.ranks,
        "replicas": one.workers,
    }
    if one.ranks > 1:
        cluster["rank_router"] = _rank_router(row, pool)
    if one.ep > 1:
        cluster["expert_parallel"] = True
    if one.a2a:
        cluster["moe_a2a_backend"] = one.a2a
    more = one.redundant or (one.slots or experts) - experts
    if more or experts % one.ep:
        cluster["redundant_experts"] = more or _REDUNDANT
    settings = _trtllm if row.backend == "trtllm" else _sglang
    policy, memory = settings(row, pool, one)
    return {"cluster": cluster, "policy": {"name": row.backend, **policy}, "kv_cache": memory}


def _rank_router(row: Measured, pool: str) -> Router:
    """Prompts go to a rank of SGLang by their bootstrap room, a random number, unless the recipe
    says round_robin: only those for GB200 do (srt-slurm, recipes/; SGLang
    `managers/data_parallel_controller.py`)."""
    drawn = row.backend == "sglang" and pool == "prefill" and row.system != "gb200"
    return "random" if drawn else router_of_ranks(row.backend)


def _trtllm(row: Measured, pool: str, one: StartedPool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Limits are a rank's. Where none is known, no request waits for a slot, and a prefill worker
    takes 16 prompts of 16,384 tokens at a time, or two longer ones: as most known ones do."""
    sharing = one.workers * one.ranks
    decoding = pool == "decode"
    batch = one.max_batch_size or (max(-(-row.concurrency // sharing), 1) if decoding else 16)
    rows = batch * (1 + row.drafts)
    tokens = one.max_num_tokens or (max(rows, 64) if decoding else max(2 * row.isl + 64, 16384))
    policy = {
        "max_batch_size": batch,
        "max_num_tokens": max(tokens, rows) if decoding else max(tokens, row.isl),
    }
    return policy, {"free_gpu_memory_fraction": one.free_share or (0.8 if decoding else 0.6)}


def _sglang(row: Measured, pool: str, one: StartedPool) -> tuple[dict[str, Any], dict[str, Any]]:
    """With drafts the server has no overlap (recipes for B200 switch it on), and 48 requests where
    no limit is given (server_args.py, `_handle_speculative_decoding`)."""
    policy: dict[str, Any] = {"ignore_eos": True}
    drafts = row.drafts and row.system != "b200_sxm"
    most, share = _WITH_DRAFTS if drafts else 2048 * one.ranks, 0.9
    if row.system == "b200_sxm" and one.chunked_prefill_size is None:
        policy |= _B200
        share, most = _B200_STATIC, _B200_PROMPTS if pool == "prefill" else most
    for key in ("chunked_prefill_size", "max_prefill_tokens"):
        if (size := getattr(one, key)) is not None:
            policy[key] = size if size > 0 else None
    policy["max_running_requests"] = one.max_running_requests or most
    policy |= of_a_rank(policy, one.ranks)
    if drafts:
        policy["disable_overlap_schedule"] = True
    if one.recv_interval:
        policy["scheduler_recv_interval"] = one.recv_interval
    return policy, {"mem_fraction_static": one.static_share or share}
