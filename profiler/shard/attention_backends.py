"""The two attention backends: torch's SDPA, and xformers. Imports torch.

Both have the methods of :class:`profiler.shard.attention.Attention`, which says what they take and
give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
        positions = torch.arange(max(contexts) + 1, device=self._device)
        mask = torch.zeros(len(contexts), len(positions), device=self._device, dtype=self._dtype)
        return mask.masked_fill_(positions >= tokens, float("-inf"))[:, None, None]

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

    def gappy_bias(self, starts: Sequence[int], contexts: Sequence[int], end: int) -> Any:
        """One query a sequence; sequences lie anywhere in one cache of ``end`` slots, ascending."""
        mask = self._fmha.attn_bias.BlockDiagonalCausalWithOffsetGappyKeysMask
        return mask.from_seqlens(
            q_seqlen=[1] * len(contexts),
            kv_seqstarts=[*starts, end],
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
