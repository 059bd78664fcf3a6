"""Attention on a pre-allocated KV cache, through xformers or torch's SDPA. Imports torch.

Every call writes the new tokens' K and V into the cache and attends to it in place. xformers is
used on CUDA where trial calls work; the reason for falling back is kept, for the bundle's meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from sarathi_sim.profiler.planning.settings import AttentionChoice
from sarathi_sim.profiler.shard.attention_backends import SdpaAttention, XformersAttention


class KVCache:
    """A pool of ``tokens`` slots: K and V of (tokens, kv_heads, head_dim), filled with noise.

    A prefill sees a run of slots as its sequence; a decode batch sees ``batch`` runs of ``stride``.
    """

    def __init__(
        self, tokens: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (tokens, kv_heads, head_dim)
        self.tokens = tokens
        self.k = torch.empty(shape, device=device, dtype=dtype).normal_()
        self.v = torch.empty(shape, device=device, dtype=dtype).normal_()


class Attention(Protocol):
    """One way to compute attention. q is (tokens, heads, dim); k and v (tokens, kv_heads, dim).

    ``bias`` comes from ``prefill_bias`` or ``decode_bias``: an engine makes it once an iteration,
    not once a layer, so it is not timed.
    """

    library: str
    kernel: str | None
    """What computed the last call; None makes the next one find out."""

    @property
    def name(self) -> str:
        """The library, and the kernels it took."""

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """The bias that masks a chunk's later tokens, after ``context`` cached ones."""

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """The bias with the length of each of ``batch`` cached sequences."""

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """The same, where each sequence holds another number of cached tokens."""

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """q (chunk, heads, dim) on keys and values (context + chunk, kv_heads, dim)."""

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """q (batch, heads, dim) on the first ``length`` of (batch, stride, kv_heads, dim)."""


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


def prefill_step(
    attention: Attention, cache: KVCache, places: int | Tensor, context: int,
    new: tuple[Tensor, ...], bias: Any,
) -> Tensor:  # fmt: skip
    """Write a chunk's k and v after ``context`` cached tokens, and attend.

    ``new`` is q, k, v of the chunk. The sequence's slots begin at ``places``, or are those, one a
    token; then its K and V are gathered.
    """
    q, k, v = new
    if not isinstance(places, int):
        cache.k.index_copy_(0, places[context:], k)
        cache.v.index_copy_(0, places[context:], v)
        keys, values = cache.k.index_select(0, places), cache.v.index_select(0, places)
        return attention.prefill(q, keys, values, bias)
    first, end = places + context, places + context + q.shape[0]
    cache.k[first:end] = k
    cache.v[first:end] = v
    return attention.prefill(q, cache.k[places:end], cache.v[places:end], bias)


def decode_step(
    attention: Attention, cache: KVCache, start: int, stride: int, contexts: int | Tensor,
    new: tuple[Tensor, ...], bias: Any,
) -> Tensor:  # fmt: skip
    """Write one token's k and v for each sequence after its cached ones, and attend.

    ``new`` is q, k, v with a row a sequence; sequence i's slots begin at ``start + i * stride``.
    ``contexts`` are the cached tokens of every sequence, or of each (then at most ``stride`` - 1).
    """
    q, k, v = new
    shape = (q.shape[0], stride, *k.shape[1:])
    slots = slice(start, start + q.shape[0] * stride)
    keys, values = cache.k[slots].view(shape), cache.v[slots].view(shape)
    if isinstance(contexts, int):
        keys[:, contexts], values[:, contexts] = k, v
        return attention.decode(q, keys, values, contexts + 1, bias)
    rows = torch.arange(q.shape[0], device=q.device)
    keys[rows, contexts], values[rows, contexts] = k, v
    return attention.decode(q, keys, values, stride, bias)
