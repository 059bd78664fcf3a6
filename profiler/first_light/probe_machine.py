"""The first step: what this machine is, and which attention kernels run on it. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.settings import AttentionChoice
from sarathi_sim.profiler.shard import environment as machine
from sarathi_sim.profiler.shard.attention import Attention, choose_attention
from sarathi_sim.profiler.shard.nvml import Sampler

#: Query heads, KV heads and head dimension of Llama 13B and Llama 3 8B.
SHAPES = {"MHA": (40, 40, 128), "GQA": (32, 8, 128)}


def open_machine(task: Task) -> tuple[torch.device, torch.dtype]:
    """The GPU in bf16; in a rehearsal without one the CPU in fp32. Raises ProfileError."""
    if task.rehearsal and not torch.cuda.is_available():
        return machine.open_device("cpu", "float32", 1)
    return machine.open_device("cuda", "bfloat16", 1)


def usable_attention(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Attention | str]]:
    """Each attention on each of SHAPES: its choice, the shape, and the attention or why it does not
    run. FlashAttention 3 comes last: it stays in SDPA once it is loaded."""
    for wanted in get_args(AttentionChoice)[1:]:
        for what, shape in SHAPES.items():
            try:
                yield wanted, what, choose_attention(device, dtype, *shape, wanted)[0]
            except ValueError as error:
                yield wanted, what, str(error)


def probe(task: Task) -> Found:
    """Versions, memory, clocks; the kernels of SDPA and the attentions that run.

    Raises ProfileError where torch sees no GPU.
    """
    device, dtype = open_machine(task)
    kind = device.type
    known: dict[str, Any] = dict(machine.facts(kind, 1)) | Sampler().facts
    known["gpu"] = known.get("gpu", known["processor"])
    known["memory_bytes"], known["free_bytes"] = machine.memory_bytes(kind)
    known["num_sms"] = machine.num_sms(kind, 1)
    known["sdpa_kernels"] = {
        backend.name.lower(): _sdpa_refusal(backend, device, dtype)
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        )
    }
    refused: dict[str, str] = {}
    names: set[str] = set()
    for wanted, what, attention in usable_attention(device, dtype):
        if isinstance(attention, str):
            refused[f"{wanted}, {what}"] = attention
        else:
            names.add(f"{attention.name}, {what}")
    known["attention"], known["no_attention"] = sorted(names), refused
    for why in refused.values():
        print(f"not usable: {why}")  # noqa: T201
    headline = f"{known['gpu']}, torch {known['torch']}"
    headline += "" if "driver" in known else "; no NVML"
    headline += f"; no {', no '.join(refused)}" if refused else ""
    return Found(headline, known)


def _sdpa_refusal(backend: SDPBackend, device: torch.device, dtype: torch.dtype) -> str:
    """Why SDPA does not take this kernel for a causal prompt with GQA; empty where it does."""
    heads, kv_heads, dim = SHAPES["GQA"]
    q = torch.zeros(1, heads, 64, dim, device=device, dtype=dtype)
    k = torch.zeros(1, kv_heads, 64, dim, device=device, dtype=dtype)
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        return " ".join(str(error).split())[:200]
    return ""
