"""One pipeline stage of a transformer on one tensor-parallel rank, executing works. Imports torch.

Linear ops are fused over all rows of a :class:`~profiler.work.Work`; attention is apart for each
chunk and one call for all decodes. The KV cache is allocated once and written in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from profiler.attention import KVCache, choose_attention, prefill_step
from profiler.layer import ShardLayer
from profiler.model import ModelSpec
from profiler.ragged import RaggedDecode
from profiler.weights import RandomWeights
from profiler.work import TIMED_OPS, Work

_EPSILON = 1e-5


@dataclass(frozen=True)
class StageShape:
    """What one rank holds: layers ``first`` to ``last - 1`` of the model, and the KV cache."""

    model: ModelSpec
    first: int
    last: int
    tp: int
    rank: int
    slots: int
    max_length: int
    seed: int = 0

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it yields tokens."""
        return self.last == self.model.num_layers


class Stage:
    """Executes works. ``reduce`` sums a tensor over the stage's TP ranks, in place.

    ``seconds`` are the host's times of the last work's :data:`TIMED_OPS`, of its layers in all, and
    of the LM head (on a GPU: what launching took).
    """

    def __init__(
        self,
        shape: StageShape,
        device: torch.device,
        dtype: torch.dtype,
        reduce: Callable[[Tensor], object] | None = None,
    ) -> None:
        model = shape.model
        self.shape, self.device, self.dtype = shape, device, dtype
        self._reduce = reduce
        drawn = RandomWeights(model, shape.tp, shape.rank, device, dtype, shape.seed)
        sets = [drawn.layer(index) for index in range(shape.first, shape.last)]
        self.layer = ShardLayer(model, shape.tp, device, dtype, sets=sets)
        heads, kv_heads = model.heads_per_rank(shape.tp)
        self.attention, _ = choose_attention(device, dtype, heads, kv_heads, model.head_dim)
        self.caches = [
            KVCache(shape.slots * shape.max_length, kv_heads, model.head_dim, device, dtype)
            for _ in sets
        ]
        self._decode = RaggedDecode(self.attention, shape.slots, shape.max_length, device)
        if shape.is_first:
            self._table, self._positions = drawn.embedding(), drawn.positions()
        if shape.is_last:
            self._head, self._vocabulary = drawn.head()
            self._norm = drawn.final_norm()
        self.seconds: list[float] = []

    def run(self, work: Work, x: Tensor | None = None) -> Tensor:
        """Activations (tokens, hidden) to hand on; on the last stage logits of the yielding rows.

        ``x`` comes from the previous stage, and is left out on the first. Logits are (outputs,
        this rank's part of the vocabulary).
        """
        with torch.inference_mode():
            return self._run(work, x)

    def _run(self, work: Work, x: Tensor | None) -> Tensor:
        positions = self._positions_of(work)
        if x is None:
            x = self._embed(work, positions)
        began = time.perf_counter()
        self._spent = dict.fromkeys(TIMED_OPS, 0.0)
        x = self._layers(work, x, positions)
        layered = time.perf_counter()
        out = self._logits(work, x) if self.shape.is_last else x
        ended = time.perf_counter()
        self.seconds = [*self._spent.values(), layered - began, ended - layered]
        return out

    def poison(self, slot: int, value: float = 1e4) -> None:
        """Overwrite a slot's K and V: whoever reads what it did not write gives itself away."""
        stride = self.shape.max_length
        for cache in self.caches:
            cache.k[slot * stride : (slot + 1) * stride] = value
            cache.v[slot * stride : (slot + 1) * stride] = value

    def _positions_of(self, work: Work) -> Tensor:
        parts = [torch.arange(context, context + count) for _, count, context, _ in work.chunks]
        if work.decodes:
            parts.append(torch.tensor([context for _, context in work.decodes]))
        return torch.cat(parts).to(self.device)

    def _embed(self, work: Work, positions: Tensor) -> Tensor:
        x = F.embedding(torch.from_numpy(work.tokens).to(self.device), self._table)
        return x if self._positions is None else x + F.embedding(positions, self._positions)

    def _layers(self, work: Work, x: Tensor, positions: Tensor) -> Tensor:
        layer = self.layer
        angles = layer.angles(positions)
        biases = [
            self.attention.prefill_bias(count, context) for _, count, context, _ in work.chunks
        ]
        ragged = self._decode.plan(work.decodes, self.dtype) if work.decodes else None
        clock, spent = time.perf_counter, self._spent
        for index, cache in enumerate(self.caches):
            normed = layer.norm(0, x, index)
            t0 = clock()
            fused = layer.gemm("preproj", normed, index)
            spent["preproj"] += clock() - t0
            q, k, v = layer.split(fused)
            q, k = layer.rotate(q, angles), layer.rotate(k, angles)
            attended = []
            first = 0
            t0 = clock()
            for (slot, count, context, _), bias in zip(work.chunks, biases, strict=True):
                rows = slice(first, first + count)
                start = slot * self.shape.max_length
                new = (q[rows], k[rows], v[rows])
                attended.append(prefill_step(self.attention, cache, start, context, new, bias))
                first += count
            t1 = clock()
            spent["attn_prefill"] += t1 - t0
            if ragged is not None:
                attended.append(self._decode(cache, (q[first:], k[first:], v[first:]), ragged))
                spent["attn_decode"] += clock() - t1
            flat = torch.cat(attended).reshape(x.shape[0], -1)
            x = x + self._row_parallel("postproj", flat, index)
            normed = layer.norm(1, x, index)
            t0 = clock()
            fused = layer.gemm("ffn_ln1", normed, index)
            spent["ffn_ln1"] += clock() - t0
            x = x + self._row_parallel("ffn_ln2", layer.activation(fused), index)
        return x

    def _row_parallel(self, op: str, x: Tensor, index: int) -> Tensor:
        """A GEMM whose result is the sum over the TP ranks."""
        t0 = time.perf_counter()
        out = self.layer.gemm(op, x, index)
        t1 = time.perf_counter()
        self._spent[op] += t1 - t0
        if self._reduce is not None:
            self._reduce(out)
            self._spent["all_reduce"] += time.perf_counter() - t1
        return out

    def _logits(self, work: Work, x: Tensor) -> Tensor:
        rows = []
        first = 0
        for _, count, _, yields in work.chunks:
            first += count
            rows += [first - 1] * yields
        rows += range(first, first + len(work.decodes))
        gain, shift = self._norm
        hidden = [self.shape.model.hidden_size]
        last = x[rows]
        if shift is not None:
            normed = F.layer_norm(last, hidden, gain, shift, _EPSILON)
        else:
            normed = F.rms_norm(last, hidden, gain, _EPSILON)
        return F.linear(normed, self._head)[:, : self._vocabulary]
