"""Attention of decodes whose sequences have any blocks and any lengths. Imports torch.

Sequences of similar length are one call: their K and V are gathered from their blocks, padded to
the longest and masked. With xformers, where each has a single block, all are one call, and are read
where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sarathi_sim.profiler.shard.attention import Attention, KVCache
from sarathi_sim.profiler.shard.attention_backends import XformersAttention

#: A sequence joins a call if it is at least this share as long as the longest one in it: at most a
#: fifth of what is read is padding.
_ALIKE = 0.8

Decode = tuple[tuple[int, ...], int]
"""The blocks of a sequence, and how many tokens it has cached."""


def places_of(
    table: tuple[int, ...], block_size: int, tokens: int, device: torch.device
) -> int | Tensor:
    """Where a sequence's first ``tokens`` tokens are in a flat cache: from there on if they lie in
    one block, else one by one."""
    if len(table) == 1:
        return table[0] * block_size
    index = torch.arange(tokens)
    blocks = torch.tensor(table)[index // block_size]
    return (blocks * block_size + index % block_size).to(device)


@dataclass(frozen=True)
class DecodeCall:
    """One call: which rows of the decodes, their blocks, the longest length, the mask.

    ``rows`` is None where it is all of them, in order; ``blocks`` (batch, most of one sequence)
    where they are read in place.
    """

    rows: Tensor | None
    blocks: Tensor | None
    longest: int
    bias: Any


@dataclass(frozen=True)
class Ragged:
    """One iteration's decodes, made once for all layers; ``at`` is where the new tokens go in a
    layer's flat cache."""

    at: Tensor
    parts: list[DecodeCall]


class RaggedDecode:
    """Decode attention over caches of ``blocks`` times ``block_size`` tokens."""

    def __init__(
        self, attention: Attention, blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._attention = attention
        self._end = blocks * block_size
        self._block_size = block_size
        self._device = device

    def plan(self, decodes: Sequence[Decode]) -> Ragged:
        """For the blocks and the context of every decode."""
        size = self._block_size
        at = torch.tensor([table[n // size] * size + n % size for table, n in decodes])
        at = at.to(self._device)
        attention = self._attention
        in_one_piece = all(len(table) == 1 for table, _ in decodes)
        if isinstance(attention, XformersAttention) and in_one_piece:
            order = sorted(range(len(decodes)), key=lambda row: decodes[row])
            return Ragged(at, [self._in_place(attention, order, decodes)])
        order = sorted(range(len(decodes)), key=lambda row: -decodes[row][1])
        calls: list[list[int]] = []
        for row in order:
            if calls and decodes[row][1] + 1 >= _ALIKE * (decodes[calls[-1][0]][1] + 1):
                calls[-1].append(row)
            else:
                calls.append([row])
        if len(calls) == 1:
            return Ragged(at, [self._padded(None, decodes)])
        parts = [self._padded(rows, [decodes[row] for row in rows]) for rows in calls]
        return Ragged(at, parts)

    def _padded(self, rows: list[int] | None, decodes: Sequence[Decode]) -> DecodeCall:
        contexts = [context for _, context in decodes]
        longest = max(contexts) + 1
        most = -(-longest // self._block_size)
        # Whatever block stands for those that a shorter sequence lacks is masked.
        blocks = [[*table[:most], *(most - len(table)) * (0,)] for table, _ in decodes]
        width = longest if most == 1 else most * self._block_size
        bias = self._attention.skewed_bias(contexts, width)
        where = None if rows is None else torch.tensor(rows).to(self._device)
        return DecodeCall(where, torch.tensor(blocks).to(self._device), longest, bias)

    def _in_place(
        self, attention: XformersAttention, order: list[int], decodes: Sequence[Decode]
    ) -> DecodeCall:
        starts = [decodes[row][0][0] * self._block_size for row in order]
        bias = attention.gappy_bias(starts, [decodes[row][1] for row in order], self._end)
        return DecodeCall(torch.tensor(order).to(self._device), None, 0, bias)

    def write(self, cache: KVCache, k: Tensor, v: Tensor, plan: Ragged) -> None:
        """Write one token's k and v (batch, kv_heads, dim) for each sequence."""
        cache.k.index_copy_(0, plan.at, k)
        cache.v.index_copy_(0, plan.at, v)

    def attend(self, cache: KVCache, q: Tensor, plan: Ragged) -> Tensor:
        """Attention of the tokens just written; like q (batch, heads, dim)."""
        if plan.parts[0].rows is None:
            return self._attend(q, cache, plan.parts[0])
        out = torch.empty_like(q)
        for part in plan.parts:
            assert part.rows is not None
            out.index_copy_(0, part.rows, self._attend(q.index_select(0, part.rows), cache, part))
        return out

    def _attend(self, q: Tensor, cache: KVCache, part: DecodeCall) -> Tensor:
        if part.blocks is None:
            return self._attention.prefill(q, cache.k, cache.v, part.bias)
        keys, values = (
            self._gather(flat, part.blocks, part.longest) for flat in (cache.k, cache.v)
        )
        return self._attention.decode(q, keys, values, part.longest, part.bias)

    def _gather(self, flat: Tensor, blocks: Tensor, longest: int) -> Tensor:
        """(batch, at least longest, kv_heads, dim): what the blocks hold, of a single one only its
        first tokens."""
        held = flat.view(-1, self._block_size, *flat.shape[1:])[:, :longest]
        found = held.index_select(0, blocks.flatten())
        return found.view(len(blocks), -1, *flat.shape[1:])
