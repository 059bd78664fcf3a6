"""One pipeline stage of a transformer on one tensor-parallel rank, executing works. Imports torch.

Linear ops are fused over all rows of a :class:`~sarathi_sim.profiler.engine.work.Work`; attention
is apart for each chunk and one call for all decodes. The KV cache is allocated once, as blocks, and
written in place; a work says which blocks each of its sequences has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_sim.profiler.engine.stopwatch import stopwatch
from sarathi_sim.profiler.engine.work import TIMED_OPS, Work
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.shard.attention import KVCache, choose_attention, prefill_step
from sarathi_sim.profiler.shard.layer import ShardLayer
from sarathi_sim.profiler.shard.ragged import RaggedDecode, places_of
from sarathi_sim.profiler.shard.weights import RandomWeights

_EPSILON = 1e-5
#: Laps beside TIMED_OPS.
_OTHERS, _LM_HEAD = "others", "lm_head"


@dataclass(frozen=True)
class StageShape:
    """What one rank holds: layers ``first`` to ``last - 1`` of the model, and a KV cache of
    ``blocks`` of ``block_size`` tokens for each."""

    model: ModelSpec
    first: int
    last: int
    tp: int
    rank: int
    blocks: int
    block_size: int
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
    """Executes works. ``reduce`` sums a tensor over the stage's TP ranks, in place."""

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
        chosen = choose_attention(device, dtype, heads, kv_heads, model.head_dim)
        self.attention, self.no_xformers = chosen
        self.caches = [
            KVCache(shape.blocks * shape.block_size, kv_heads, model.head_dim, device, dtype)
            for _ in sets
        ]
        self._decode = RaggedDecode(self.attention, shape.blocks, shape.block_size, device)
        if shape.is_first:
            self._table, self._positions = drawn.embedding(), drawn.positions()
        if shape.is_last:
            self._head, self._vocabulary = drawn.head()
            self._norm = drawn.final_norm()
        self._watch = stopwatch(device)

    def run(self, work: Work, x: Tensor | None = None) -> Tensor:
        """Activations (tokens, hidden) for the next stage; on the last one logits of the yielding
        rows.

        ``x`` comes from the previous stage, and is left out on the first. Logits are (outputs,
        this rank's part of the vocabulary).
        """
        with torch.inference_mode():
            return self._run(work, x)

    def _run(self, work: Work, x: Tensor | None) -> Tensor:
        self._watch.start()
        if not work.num_tokens:  # it only takes its place in the pipeline
            width = self._vocabulary if self.shape.is_last else self.shape.model.hidden_size
            return torch.empty(0, width, device=self.device, dtype=self.dtype)
        positions = self._positions_of(work)
        if x is None:
            x = self._embed(work, positions)
        outputs = self._outputs_of(work) if self.shape.is_last else None
        self._watch.start()
        x = self._layers(work, x, positions)
        if outputs is not None:
            x = self._logits(x.index_select(0, outputs))
            self._watch.lap(_LM_HEAD)
        return x

    def seconds(self) -> list[float]:
        """Of the last work: :data:`TIMED_OPS` over all layers, the layers in all, the LM head.

        A GPU's times are its own; its wait for a launch counts for the next op.
        """
        spent = self._watch.read()
        head = spent.pop(_LM_HEAD, 0.0)
        return [*(spent.get(op, 0.0) for op in TIMED_OPS), sum(spent.values()), head]

    def poison(self, block: int) -> None:
        """Overwrite a block's K and V, to expose a read of values that were not written."""
        size = self.shape.block_size
        for cache in self.caches:
            for half in (cache.k, cache.v):
                half[block * size : (block + 1) * size] = 1e4

    def _positions_of(self, work: Work) -> Tensor:
        parts = [torch.arange(context, context + count) for _, count, context, _ in work.chunks]
        if work.decodes:
            parts.append(torch.tensor([context for _, context in work.decodes]))
        return torch.cat(parts).to(self.device)

    def _outputs_of(self, work: Work) -> Tensor:
        """The rows that yield a token."""
        rows = []
        first = 0
        for _, count, _, yields in work.chunks:
            first += count
            rows += [first - 1] * yields
        rows += range(first, first + len(work.decodes))
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    def _embed(self, work: Work, positions: Tensor) -> Tensor:
        x = F.embedding(torch.from_numpy(work.tokens).to(self.device), self._table)
        return x if self._positions is None else x + F.embedding(positions, self._positions)

    def _layers(self, work: Work, x: Tensor, positions: Tensor) -> Tensor:
        layer = self.layer
        angles = layer.angles(positions)
        biases = [
            self.attention.prefill_bias(count, context) for _, count, context, _ in work.chunks
        ]
        size = self.shape.block_size
        places = [
            places_of(table, size, context + count, self.device)
            for table, count, context, _ in work.chunks
        ]
        ragged = self._decode.plan(work.decodes) if work.decodes else None
        lap = self._watch.lap
        lap(_OTHERS)
        for index, cache in enumerate(self.caches):
            normed = layer.norm(0, x, index)
            lap(_OTHERS)
            fused = layer.gemm("preproj", normed, index)
            lap("preproj")
            q, k, v = layer.split(fused)
            q, k = layer.rotate(q, angles), layer.rotate(k, angles)
            attended = []
            first = 0
            lap(_OTHERS)
            if ragged is not None:  # before the chunks, which may share a block that this fills
                self._decode.write(cache, k[-len(work.decodes) :], v[-len(work.decodes) :], ragged)
                lap("attn_decode")
            for (_, count, context, _), place, bias in zip(
                work.chunks, places, biases, strict=True
            ):
                rows = slice(first, first + count)
                new = (q[rows], k[rows], v[rows])
                attended.append(prefill_step(self.attention, cache, place, context, new, bias))
                first += count
            if work.chunks:
                lap("attn_prefill")
            if ragged is not None:
                attended.append(self._decode.attend(cache, q[first:], ragged))
                lap("attn_decode")
            flat = torch.cat(attended).reshape(x.shape[0], -1)
            lap(_OTHERS)
            x = x + self._row_parallel("postproj", flat, index)
            normed = layer.norm(1, x, index)
            lap(_OTHERS)
            fused = layer.gemm("ffn_ln1", normed, index)
            lap("ffn_ln1")
            active = layer.activation(fused)
            lap(_OTHERS)
            x = x + self._row_parallel("ffn_ln2", active, index)
        lap(_OTHERS)
        return x

    def _row_parallel(self, op: str, x: Tensor, index: int) -> Tensor:
        """A GEMM whose result is the sum over the TP ranks."""
        out = self.layer.gemm(op, x, index)
        self._watch.lap(op)
        if self._reduce is not None:
            self._reduce(out)
            self._watch.lap("all_reduce")
        return out

    def _logits(self, last: Tensor) -> Tensor:
        gain, shift = self._norm
        hidden = [self.shape.model.hidden_size]
        if shift is not None:
            normed = F.layer_norm(last, hidden, gain, shift, _EPSILON)
        else:
            normed = F.rms_norm(last, hidden, gain, _EPSILON)
        return F.linear(normed, self._head)[:, : self._vocabulary]
