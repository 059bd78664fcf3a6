"""Attention of decodes whose sequences have any slots and any lengths. Imports torch.

On a CPU sequences of similar length are one call: their K and V are gathered, padded to the longest
and masked. With xformers all are one call, and are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from profiler.shard.attention import Attention, KVCache
from profiler.shard.attention_backends import XformersAttention

#: A sequence joins a call if it is at least this share as long as the longest one in it: at most a
#: fifth of what is read is padding.
_ALIKE = 0.8


@dataclass(frozen=True)
class DecodeCall:
    """One call: which rows of the decodes, their slots, the longest length, the mask.

    ``rows`` is None where it is all of them, in order.
    """

    rows: Tensor | None
    slots: Tensor
    longest: int
    bias: Any


@dataclass(frozen=True)
class Ragged:
    """One iteration's decodes, made once for all layers; ``at`` is where the new tokens go in a
    layer's flat cache."""

    at: Tensor
    parts: list[DecodeCall]


class RaggedDecode:
    """Decode attention over caches of ``slots`` times ``stride`` tokens."""

    def __init__(self, attention: Attention, slots: int, stride: int, device: torch.device) -> None:
        self._xformers = attention if isinstance(attention, XformersAttention) else None
        self._end = slots * stride
        self._stride = stride
        self._device = device

    def plan(self, decodes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Ragged:
        """For ``(slot, context)`` of every decode."""
        at = torch.tensor([slot * self._stride + context for slot, context in decodes])
        if self._xformers is not None:
            order = sorted(range(len(decodes)), key=lambda row: decodes[row])
            return Ragged(at.to(self._device), [self._in_place(order, decodes)])
        order = sorted(range(len(decodes)), key=lambda row: -decodes[row][1])
        calls: list[list[int]] = []
        for row in order:
            if calls and decodes[row][1] + 1 >= _ALIKE * (decodes[calls[-1][0]][1] + 1):
                calls[-1].append(row)
            else:
                calls.append([row])
        if len(calls) == 1:
            return Ragged(at.to(self._device), [self._padded(None, decodes, dtype)])
        parts = [self._padded(rows, [decodes[row] for row in rows], dtype) for rows in calls]
        return Ragged(at.to(self._device), parts)

    def _padded(
        self, rows: list[int] | None, decodes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> DecodeCall:
        contexts = torch.tensor([context for _, context in decodes])
        slots = torch.tensor([slot for slot, _ in decodes])
        longest = int(contexts.max()) + 1
        bias = torch.zeros(len(decodes), 1, 1, longest, dtype=dtype)
        bias.masked_fill_(torch.arange(longest) > contexts[:, None, None, None], float("-inf"))
        device = self._device
        where = None if rows is None else torch.tensor(rows).to(device)
        return DecodeCall(where, slots.to(device), longest, bias.to(device))

    def _in_place(self, order: list[int], decodes: Sequence[tuple[int, int]]) -> DecodeCall:
        assert self._xformers is not None
        slots = [decodes[row][0] for row in order]
        starts = [slot * self._stride for slot in slots]
        bias = self._xformers.gappy_bias(starts, [decodes[row][1] for row in order], self._end)
        return DecodeCall(torch.tensor(order).to(self._device), torch.tensor(slots), 0, bias)

    def __call__(self, cache: KVCache, new: tuple[Tensor, Tensor, Tensor], plan: Ragged) -> Tensor:
        """Write one token's k and v for each sequence, and attend; like ``new``'s q.

        ``new`` is q (batch, heads, dim), and k and v (batch, kv_heads, dim).
        """
        q, k, v = new
        cache.k.index_copy_(0, plan.at, k)
        cache.v.index_copy_(0, plan.at, v)
        if plan.parts[0].rows is None:
            return self._attend(q, cache, plan.parts[0])
        out = torch.empty_like(q)
        for part in plan.parts:
            assert part.rows is not None
            out.index_copy_(0, part.rows, self._attend(q.index_select(0, part.rows), cache, part))
        return out

    def _attend(self, q: Tensor, cache: KVCache, part: DecodeCall) -> Tensor:
        if self._xformers is not None:
            return self._xformers.prefill(q, cache.k, cache.v, part.bias)
        batch, heads, dim = q.shape
        kv_heads = cache.k.shape[1]
        keys, values = self._gather(cache.k, part), self._gather(cache.v, part)
        # The query heads that share a KV head are the rows of one small matrix.
        attended = F.scaled_dot_product_attention(
            q.reshape(batch, kv_heads, heads // kv_heads, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=part.bias,
        )
        return attended.reshape(batch, heads, dim)

    def _gather(self, flat: Tensor, part: DecodeCall) -> Tensor:
        """(batch, longest, kv_heads, dim): the first tokens of the slots."""
        runs = flat.view(-1, self._stride, *flat.shape[1:])
        return runs[:, : part.longest].index_select(0, part.slots)
