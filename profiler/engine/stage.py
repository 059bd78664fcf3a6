"""One pipeline stage of a transformer on one tensor-parallel rank, executing works. Imports torch.

Its layers are those of :class:`~sarathi_sim.profiler.shard.layer.ShardLayer`. Linear ops are fused
over all rows of a :class:`~sarathi_sim.profiler.engine.work.Work`. The KV cache is allocated once,
as blocks, and written in place; a work says which blocks each of its sequences has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sarathi_sim.profiler.engine.stopwatch import stopwatch
from sarathi_sim.profiler.engine.work import TIMED_OPS, Work
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OTHERS
from sarathi_sim.profiler.shard.attention import KVCache, choose_attention
from sarathi_sim.profiler.shard.layer import EMBEDDING, LM_HEAD, LayerState, ShardLayer
from sarathi_sim.profiler.shard.rows import Chunk, Decodes, Rows, places_of
from sarathi_sim.profiler.shard.weights import RandomWeights


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
        drawn = RandomWeights(model, shape.tp, shape.rank, device, dtype, shape.seed)
        self.layer = layer = ShardLayer(model, shape.tp, device, dtype, reduce)
        sizes = (layer.kv_heads, model.head_dim)
        self.attention, self.no_xformers = choose_attention(device, dtype, layer.heads, *sizes)
        slots = shape.blocks * shape.block_size
        self.layers = [
            LayerState(drawn.layer(index), KVCache(slots, *sizes, device, dtype))
            for index in range(shape.first, shape.last)
        ]
        self.ends = drawn.ends(shape.is_first, shape.is_last)
        self._watch = stopwatch(device)

    def run(self, work: Work, x: Tensor | None = None) -> Tensor:
        """Activations (tokens, hidden) for the next stage; on the last one logits of the yielding
        rows.

        ``x`` comes from the previous stage, and is left out on the first. Logits are (outputs,
        this rank's part of the vocabulary).
        """
        self._watch.start()
        if not work.num_tokens:  # it only takes its place in the pipeline
            width = self.ends.columns if self.shape.is_last else self.shape.model.hidden_size
            return torch.empty(0, width, device=self.device, dtype=self.dtype)
        with torch.inference_mode():
            return self.layer.forward(self.layers, self.ends, self._rows(work), x, self._do)

    def _do(self, op: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
        out = call(state, *inputs)
        self._watch.lap(op)
        return out

    def seconds(self) -> list[float]:
        """Of the last work: :data:`TIMED_OPS` over all layers, the layers in all, the LM head.

        A GPU's times are its own; its wait for a launch counts for the next op.
        """
        spent = self._watch.read()
        spent.pop(EMBEDDING, None)
        head = spent.pop(LM_HEAD, 0.0)
        return [*(spent.get(op, 0.0) for op in TIMED_OPS), sum(spent.values()), head]

    def _rows(self, work: Work) -> Rows:
        """What the layers share; what the rows are counts as embedding, the rest as the layers'."""
        shape, device = self.shape, self.device
        parts = [torch.arange(context, context + count) for _, count, context, _ in work.chunks]
        if work.decodes:
            parts.append(torch.tensor([context for _, context in work.decodes]))
        positions = torch.cat(parts).to(device)
        tokens = torch.from_numpy(work.tokens).to(device) if shape.is_first else None
        outputs = self._outputs_of(work) if shape.is_last else None
        self._watch.lap(EMBEDDING)
        rows = Rows(
            self.layer.angles(positions),
            [
                Chunk(
                    self.attention, count, context,
                    places_of(table, shape.block_size, context + count, device),
                )
                for table, count, context, _ in work.chunks
            ],
            Decodes.in_blocks(
                self.attention, work.decodes, shape.blocks, shape.block_size, device
            )
            if work.decodes
            else None,
            positions, tokens, outputs,
        )  # fmt: skip
        self._watch.lap(OTHERS)
        return rows

    def _outputs_of(self, work: Work) -> Tensor:
        """The rows that yield a token."""
        rows = []
        first = 0
        for _, count, _, yields in work.chunks:
            first += count
            rows += [first - 1] * yields
        rows += range(first, first + len(work.decodes))
        return torch.tensor(rows, dtype=torch.int64).to(self.device)
