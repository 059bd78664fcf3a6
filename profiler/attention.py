"""Attention on a pre-allocated KV cache, through xformers or torch's SDPA. Imports torch.

Both calls write the new tokens' K and V into the cache and attend to it in place. xformers is used
on CUDA where a trial call works; the reason for falling back is kept, for the bundle's meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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

    name: str

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """What masks a chunk's later tokens, after ``context`` cached ones."""

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """What says how long each of ``batch`` cached sequences is."""

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """The same, where each sequence holds another number of cached tokens."""

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """q (chunk, heads, dim) on keys and values (context + chunk, kv_heads, dim)."""

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """q (batch, heads, dim) on the first ``length`` of (batch, stride, kv_heads, dim)."""


class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._lower_right: Any = None
        if device.type == "cuda":
            self._lower_right = _lower_right_works(device, dtype)
        self.name = "torch SDPA" + (", causal_lower_right" if self._lower_right else ", mask")

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """None (causal), torch's lower-right causal bias, or an additive mask (chunk, total)."""
        if context == 0:
            return None
        if self._lower_right:
            return self._lower_right(chunk, context + chunk)
        mask = torch.zeros(chunk, context + chunk, device=self._device, dtype=self._dtype)
        hidden = torch.ones_like(mask, dtype=torch.bool).triu(context + 1)
        return mask.masked_fill_(hidden, float("-inf"))

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """None: all sequences are equally long."""
        return None

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """An additive mask (batch, 1, 1, longest): shorter sequences are padded to the longest."""
        tokens = torch.tensor(contexts, device=self._device)[:, None] + 1
        places = torch.arange(max(contexts) + 1, device=self._device)
        mask = torch.zeros(len(contexts), len(places), device=self._device, dtype=self._dtype)
        return mask.masked_fill_(places >= tokens, float("-inf"))[:, None, None]

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """One sequence; see :class:`Attention`."""
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return out[0].transpose(0, 1)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """The query heads that share a KV head are the rows of one small matrix."""
        batch, heads, dim = q.shape
        kv_heads = keys.shape[2]
        out = F.scaled_dot_product_attention(
            q.view(batch, kv_heads, heads // kv_heads, dim),
            keys[:, :length].transpose(1, 2),
            values[:, :length].transpose(1, 2),
            attn_mask=bias,
        )
        return out.reshape(batch, heads, dim)


def _lower_right_works(device: torch.device, dtype: torch.dtype) -> Any:
    """torch's bias for a causal chunk after cached tokens, if a trial call with GQA succeeds."""
    try:
        from torch.nn.attention.bias import causal_lower_right

        q = torch.zeros(1, 4, 8, 64, device=device, dtype=dtype)
        keys = torch.zeros(1, 2, 24, 64, device=device, dtype=dtype)
        F.scaled_dot_product_attention(
            q, keys, keys, attn_mask=causal_lower_right(8, 24), enable_gqa=True
        )
        torch.cuda.synchronize()
    except Exception:
        return None
    return causal_lower_right


class XformersAttention:
    """xformers.ops.memory_efficient_attention. Raises ImportError where xformers is missing."""

    def __init__(self) -> None:
        import xformers
        from xformers.ops import fmha

        self._fmha = fmha
        self.name = f"xformers {xformers.__version__} memory_efficient_attention"

    def prefill_bias(self, chunk: int, context: int) -> Any:
        """Causal, aligned to the last token."""
        return self._fmha.attn_bias.LowerTriangularFromBottomRightMask()

    def decode_bias(self, batch: int, context: int, stride: int) -> Any:
        """One query a sequence, on padded caches of ``stride`` slots, ``context`` + 1 in use."""
        return self.skewed_bias([context] * batch, stride)

    def skewed_bias(self, contexts: Sequence[int], stride: int) -> Any:
        """One query a sequence, on padded caches of ``stride`` slots; nothing is padded in it."""
        mask = self._fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
        return mask.from_seqlens(
            q_seqlen=[1] * len(contexts),
            kv_padding=stride,
            kv_seqlen=[context + 1 for context in contexts],
        )

    def prefill(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """One sequence; see :class:`Attention`."""
        return self._attend(q, keys, values, bias)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, length: int, bias: Any) -> Tensor:
        """The caches in place, packed along the tokens."""
        return self._attend(q, keys.flatten(0, 1), values.flatten(0, 1), bias)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        tokens, heads, dim = q.shape
        groups = keys.shape[1]
        share = heads // groups
        q, keys, values = q[None], keys[None], values[None]
        if share > 1:  # GQA: (1, tokens, groups, share, dim); K and V are expanded, never copied
            q = q.view(1, tokens, groups, share, dim)
            keys = keys[:, :, :, None].expand(-1, -1, -1, share, -1)
            values = values[:, :, :, None].expand(-1, -1, -1, share, -1)
        out: Tensor = self._fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=bias)
        return out.reshape(tokens, heads, dim)


def choose_attention(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> tuple[Attention, str]:
    """The attention to time, and why xformers is not used ("" where it is)."""
    fallback = SdpaAttention(device, dtype)
    if device.type != "cuda":
        return fallback, "xformers' attention needs CUDA"
    try:
        attention = XformersAttention()
        cache = KVCache(64, kv_heads, head_dim, device, dtype)
        q = torch.zeros(16, heads, head_dim, device=device, dtype=dtype)
        attention.prefill(q, cache.k[:32], cache.v[:32], attention.prefill_bias(16, 16))
        shape = (2, 32, kv_heads, head_dim)
        attention.decode(
            q[:2], cache.k.view(shape), cache.v.view(shape), 9, attention.decode_bias(2, 8, 32)
        )
        torch.cuda.synchronize()
    except Exception as error:  # a missing library, an operator that refuses the shape, ...
        return fallback, _refusal(error)
    return attention, ""


def _refusal(error: Exception) -> str:
    """One line: what failed, and the first of the reasons that xformers lists per operator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"xformers failed: {type(error).__name__}: {lines[0][:200]}"
    for before, line in pairwise(lines):
        if before.endswith("because:"):
            text += f" {before} {line[:200]}"
            if "CUDA support" in line:
                text += " (does its extension find the libcudart of its own CUDA version?)"
            break
    return text


def prefill_step(
    attention: Attention, cache: KVCache, start: int, context: int, new: tuple[Tensor, ...],
    bias: Any,
) -> Tensor:  # fmt: skip
    """Write a chunk's k and v after ``context`` cached tokens, and attend.

    ``new`` is q, k, v of the chunk; the sequence's slots begin at ``start``.
    """
    q, k, v = new
    first, end = start + context, start + context + q.shape[0]
    cache.k[first:end] = k
    cache.v[first:end] = v
    return attention.prefill(q, cache.k[start:end], cache.v[start:end], bias)


def decode_step(
    attention: Attention, cache: KVCache, start: int, stride: int, context: int,
    new: tuple[Tensor, ...], bias: Any,
) -> Tensor:  # fmt: skip
    """Write one token's k and v for each sequence after ``context`` cached ones, and attend.

    ``new`` is q, k, v with a row a sequence; sequence i's slots begin at ``start + i * stride``.
    """
    q, k, v = new
    shape = (q.shape[0], stride, *k.shape[1:])
    slots = slice(start, start + q.shape[0] * stride)
    keys, values = cache.k[slots].view(shape), cache.v[slots].view(shape)
    keys[:, context] = k
    values[:, context] = v
    return attention.decode(q, keys, values, context + 1, bias)


def skewed_decode_step(
    attention: Attention, cache: KVCache, start: int, contexts: Tensor, longest: int,
    new: tuple[Tensor, ...], bias: Any,
) -> Tensor:  # fmt: skip
    """As :func:`decode_step`, where sequence i holds ``contexts[i]`` <= ``longest`` tokens.

    The slots of a sequence are those of the longest: caches are allocated alike.
    """
    q, k, v = new
    stride = longest + 1
    shape = (q.shape[0], stride, *k.shape[1:])
    slots = slice(start, start + q.shape[0] * stride)
    keys, values = cache.k[slots].view(shape), cache.v[slots].view(shape)
    rows = torch.arange(q.shape[0], device=q.device)
    keys[rows, contexts] = k
    values[rows, contexts] = v
    return attention.decode(q, keys, values, stride, bias)
