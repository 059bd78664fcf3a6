"""Attention on a pre-allocated KV cache, through xformers or torch's SDPA. Imports torch.

xformers is used on CUDA where trial calls work; the reason for falling back is kept, for the
bundle's meta.
"""

from __future__ import annotations

from copy import copy
from itertools import pairwise

import torch

from sarathi_sim.profiler.planning.settings import AttentionChoice
from sarathi_sim.profiler.shard.attention_backends import SdpaAttention, XformersAttention


class KVCache:
    """A pool of ``tokens`` slots: K and V of (tokens, kv_heads, head_dim), filled with noise."""

    def __init__(
        self, tokens: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (tokens, kv_heads, head_dim)
        self.tokens = tokens
        self.k = torch.empty(shape, device=device, dtype=dtype).normal_()
        self.v = torch.empty(shape, device=device, dtype=dtype).normal_()

    def part(self, first: int, tokens: int) -> KVCache:
        """The cache that these slots are."""
        part = copy(self)
        part.tokens, part.k, part.v = tokens, self.k[first:][:tokens], self.v[first:][:tokens]
        return part


Attention = SdpaAttention | XformersAttention
"""One way to compute attention. q is (tokens, heads, dim); k and v (tokens, kv_heads, dim).

A bias says who sees whom: an engine makes it once an iteration, not once a layer, so it is not
timed. ``kernel`` is what computed the last call; None makes the next one find out.
"""


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    wanted: AttentionChoice = "auto",
) -> tuple[Attention, str]:
    """The attention to time, and why it is not xformers ("" where it is).

    On CUDA each of its calls was tried with these sizes. Raises ValueError with the reason where
    what is ``wanted`` does not work, or with "auto" neither xformers nor SDPA.
    """
    if device.type != "cuda":
        if wanted not in ("auto", "sdpa"):
            raise ValueError(f"--attention {wanted}: needs CUDA")
        return SdpaAttention(device, dtype), "xformers' attention needs CUDA"
    why: list[str] = []
    for choice in ("xformers", "sdpa") if wanted == "auto" else (wanted,):
        try:
            attention: Attention = (
                XformersAttention()
                if choice == "xformers"
                else SdpaAttention(device, dtype, choice)
            )
            _try_all(attention, device, dtype, (heads, kv_heads, head_dim))
        except Exception as error:  # a missing library, an operator that refuses the shape, ...
            why.append(f"{choice} failed: {_refusal(error)}")
        else:
            if choice != "xformers" and not why:
                why.append(f"{choice} was asked for")
            return attention, "; ".join(why)
    raise ValueError(f"--attention {wanted}: {'; '.join(why)}")


def _try_all(
    attention: Attention,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> None:
    """Try each call of a profile or the engine, so that none fails later: operators differ in the
    biases that they accept. ``sizes`` are heads, KV heads, head dimension."""
    heads, kv_heads, dim = sizes
    cache = KVCache(64, kv_heads, dim, device, dtype)
    q = torch.zeros(16, heads, dim, device=device, dtype=dtype)
    for context in (0, 16):
        keys, values = cache.k[: context + 16], cache.v[: context + 16]
        attention.kernel = None
        attention.prefill(q, keys, values, attention.prefill_bias(16, context))
    padded = (2, 32, kv_heads, dim)
    for bias in (attention.decode_bias(2, 8, 32), attention.skewed_bias([8, 3], 32)):
        attention.kernel = None
        attention.decode(q[:2], cache.k.view(padded), cache.v.view(padded), 9, bias)
    if isinstance(attention, XformersAttention):
        attention.kernel = None
        attention.prefill(q[:2], cache.k, cache.v, attention.gappy_bias([4, 40], [8, 3], 64))
    torch.cuda.synchronize()


def _refusal(error: Exception) -> str:
    """One line: what failed, and the first of the reasons that xformers lists per operator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}"
    for before, line in pairwise(lines):
        if before.endswith("because:"):
            text += f" {before} {line[:200]}"
            if "CUDA support" in line:
                text += " (its extension needs libcudart.so.12: install nvidia-cuda-runtime-cu12)"
            break
    return text
