"""Attention of decodes whose sequences have any slots and any lengths. Imports torch.

All in one call: on a CPU the sequences' K and V are gathered, padded to the longest and masked; with
xformers they are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profiler.attention import Attention, KVCache, XformersAttention


@dataclass(frozen=True)
class Ragged:
    """One iteration's decodes, made once for all layers.

    ``at`` is where the new tokens go in a layer's flat cache; ``order`` sorts them by slot where
    that is needed (xformers), else it is None.
    """

    slots: Tensor
    at: Tensor
    longest: int
    bias: Any
    order: Tensor | None = None


class RaggedDecode:
    """Decode attention over caches of ``slots`` times ``stride`` tokens."""

    def __init__(
        self, attention: Attention, slots: int, stride: int, device: torch.device
    ) -> None:
        self._xformers = attention if isinstance(attention, XformersAttention) else None
        self._end = slots * stride
        self._stride = stride
        self._device = device

    def plan(self, decodes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Ragged:
        """For ``(slot, context)`` of every decode."""
        pairs = torch.tensor(decodes, dtype=torch.int64)
        slots, contexts = pairs[:, 0], pairs[:, 1]
        at = slots * self._stride + contexts
        longest = int(contexts.max()) + 1
        if self._xformers is not None:
            return self._plan_in_place(slots, contexts, at)
        bias = torch.zeros(len(decodes), 1, 1, longest, dtype=dtype)
        bias.masked_fill_(torch.arange(longest) > contexts[:, None, None, None], float("-inf"))
        device = self._device
        return Ragged(slots.to(device), at.to(device), longest, bias.to(device))

    def _plan_in_place(self, slots: Tensor, contexts: Tensor, at: Tensor) -> Ragged:
        assert self._xformers is not None
        order = torch.argsort(slots)
        mask = self._xformers.gappy_mask()
        bias = mask.from_seqlens(
            q_seqlen=[1] * len(slots),
            kv_seqstarts=[*(slots[order] * self._stride).tolist(), self._end],
            kv_seqlen=(contexts[order] + 1).tolist(),
        )
        longest = int(contexts.max()) + 1
        return Ragged(slots, at.to(self._device), longest, bias, order.to(self._device))

    def __call__(self, cache: KVCache, new: tuple[Tensor, Tensor, Tensor], plan: Ragged) -> Tensor:
        """Write one token's k and v for each sequence, and attend; like ``new``'s q.

        ``new`` is q (batch, heads, dim), and k and v (batch, kv_heads, dim).
        """
        q, k, v = new
        cache.k.index_copy_(0, plan.at, k)
        cache.v.index_copy_(0, plan.at, v)
        if self._xformers is not None:
            assert plan.order is not None
            out = torch.empty_like(q)
            out[plan.order] = self._xformers.prefill(q[plan.order], cache.k, cache.v, plan.bias)
            return out
        batch, heads, dim = q.shape
        kv_heads = k.shape[1]
        keys, values = self._gather(cache.k, plan), self._gather(cache.v, plan)
        # The query heads that share a KV head are the rows of one small matrix.
        attended = F.scaled_dot_product_attention(
            q.view(batch, kv_heads, heads // kv_heads, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=plan.bias,
        )
        return attended.reshape(batch, heads, dim)

    def _gather(self, flat: Tensor, plan: Ragged) -> Tensor:
        """(batch, longest, kv_heads, dim): the first tokens of the slots."""
        runs = flat.view(-1, self._stride, *flat.shape[1:])
        return runs[:, : plan.longest].index_select(0, plan.slots)
