"""The rows of an iteration as a rank's layers need them, made once for all. Imports torch.

Attention is a call for each chunk. Decodes of similar length are one call: their K and V are
gathered, padded to the longest and masked. With xformers, or if they lie in a row, they are read
where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import Attention, KVCache, XformersAttention

#: A sequence joins a call if it is at least this share as long as the longest one in it: at most a
#: fifth of what is read is padding.
_ALIKE = 0.8

Decode = tuple[int, int]
"""The block of a sequence, and how many tokens it has cached."""
Routing = tuple[Tensor, Tensor]
"""The numbers of each token's experts, (tokens, top_k), and the weights of their outputs."""


class Chunk:
    """``tokens`` of a prompt after ``context`` cached ones; its first token is at ``first``."""

    def __init__(self, attention: Attention, tokens: int, context: int, first: int = 0) -> None:
        self.tokens = tokens
        self._attention, self._context, self._first = attention, context, first
        self._bias = attention.prefill_bias(tokens, context)

    def run(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v (tokens, kv_heads, dim) and attend; like q (tokens, heads, dim)."""
        first, new = self._first, self._first + self._context
        end = new + self.tokens
        cache.k[new:end] = k
        cache.v[new:end] = v
        return self._attention.prefill(q, cache.k[first:end], cache.v[first:end], self._bias)


@dataclass(frozen=True)
class _Call:
    """One call: which rows of the decodes, where their K and V are, the longest length, the mask.

    ``rows`` is None where it is all of them, in order. ``held`` is the block of each, the run of
    slots of all of them, or None for the whole cache.
    """

    rows: Tensor | None
    held: Tensor | slice | None
    longest: int
    bias: Any


class Decodes:
    """One new token for each of several sequences; ``at`` are their places in a flat cache."""

    def __init__(
        self, attention: Attention, at: Tensor, calls: list[_Call], block_size: int
    ) -> None:
        self._attention, self._at, self._calls = attention, at, calls
        self._block_size = block_size

    @staticmethod
    def in_a_row(
        attention: Attention, contexts: Sequence[int], device: torch.device, first: int = 0
    ) -> Decodes:
        """Sequences of so many cached tokens, with slots for the longest each, from ``first`` on:
        as a kernel likes them best."""
        batch, stride = len(contexts), max(contexts) + 1
        if len(set(contexts)) == 1:
            bias = attention.decode_bias(batch, contexts[0], stride)
        else:
            bias = attention.skewed_bias(contexts, stride)
        at = [first + row * stride + context for row, context in enumerate(contexts)]
        held = slice(first, first + batch * stride)
        calls = [_Call(None, held, stride, bias)]
        return Decodes(attention, torch.tensor(at).to(device), calls, stride)

    @staticmethod
    def in_blocks(
        attention: Attention, decodes: Sequence[Decode], blocks: int, block_size: int,
        device: torch.device,
    ) -> Decodes:  # fmt: skip
        """Sequences that have one each of a cache's ``blocks`` of ``block_size`` tokens."""
        at = torch.tensor([block * block_size + n for block, n in decodes]).to(device)

        def padded(rows: list[int] | None, some: Sequence[Decode]) -> _Call:
            contexts = [context for _, context in some]
            longest = max(contexts) + 1
            bias = attention.skewed_bias(contexts, longest)
            where = None if rows is None else torch.tensor(rows).to(device)
            return _Call(where, torch.tensor([b for b, _ in some]).to(device), longest, bias)

        if isinstance(attention, XformersAttention):
            order = sorted(range(len(decodes)), key=lambda row: decodes[row])
            starts = [decodes[row][0] * block_size for row in order]
            contexts = [decodes[row][1] for row in order]
            bias = attention.gappy_bias(starts, contexts, blocks * block_size)
            calls = [_Call(torch.tensor(order).to(device), None, 0, bias)]
            return Decodes(attention, at, calls, block_size)
        alike: list[list[int]] = []
        for row in sorted(range(len(decodes)), key=lambda row: -decodes[row][1]):
            if alike and decodes[row][1] + 1 >= _ALIKE * (decodes[alike[-1][0]][1] + 1):
                alike[-1].append(row)
            else:
                alike.append([row])
        if len(alike) == 1:
            return Decodes(attention, at, [padded(None, decodes)], block_size)
        calls = [padded(rows, [decodes[row] for row in rows]) for rows in alike]
        return Decodes(attention, at, calls, block_size)

    def run(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v (batch, kv_heads, dim) and attend; like q (batch, heads, dim)."""
        cache.k.index_copy_(0, self._at, k)
        cache.v.index_copy_(0, self._at, v)
        if self._calls[0].rows is None:
            return self._attend(cache, q, self._calls[0])
        out = torch.empty_like(q)
        for call in self._calls:
            assert call.rows is not None
            out.index_copy_(0, call.rows, self._attend(cache, q.index_select(0, call.rows), call))
        return out

    def _attend(self, cache: KVCache, q: Tensor, call: _Call) -> Tensor:
        if call.held is None:
            return self._attention.prefill(q, cache.k, cache.v, call.bias)
        keys, values = (self._held(flat, call) for flat in (cache.k, cache.v))
        return self._attention.decode(q, keys, values, call.longest, call.bias)

    def _held(self, flat: Tensor, call: _Call) -> Tensor:
        """(batch, at least longest, kv_heads, dim)."""
        if isinstance(call.held, slice):
            return flat[call.held].view(-1, self._block_size, *flat.shape[1:])
        assert call.held is not None
        blocks = flat.view(-1, self._block_size, *flat.shape[1:])[:, : call.longest]
        return blocks.index_select(0, call.held)


@dataclass(frozen=True)
class Rows:
    """What all layers share: of the chunks' tokens, then of one for each decode.

    ``angles``   of the rows' ``positions``, by :meth:`ShardLayer.angles`
    ``tokens``   the ids of all rows, where they are embedded
    ``outputs``  the rows that yield a token, where there is an LM head
    ``routing``  the experts of every row, in a mixture
    """

    angles: tuple[Tensor, Tensor]
    chunks: Sequence[Chunk] = ()
    decodes: Decodes | None = None
    positions: Tensor | None = None
    tokens: Tensor | None = None
    outputs: Tensor | None = None
    routing: Routing | None = None
