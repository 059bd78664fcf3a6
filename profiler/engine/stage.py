"""One pipeline stage of a transformer on one tensor-parallel rank, executing works. Imports torch.

Its layers are those of :class:`~sarathi_sim.profiler.shard.layer.ShardLayer`. Linear ops are fused
over all rows of a :class:`~sarathi_sim.profiler.engine.spec.Work`. The KV cache is allocated once,
and written in place; a work says which slot each of its sequences has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..facts.ops import OTHERS
from ..shard.attention import Chunk, Decodes, KVCache, Rows, choose_attention
from ..shard.layer import (
    EMBEDDING,
    LM_HEAD,
    LayerState,
    RandomWeights,
    ShardLayer,
)
from ..shard.timing import cuda_events
from .spec import TIMED_OPS, StageShape, Work


class Stopwatch:
    """Splits the work of a stage on ``device`` into laps, by the host's clock or, on a GPU, by
    events in its stream.

    On a GPU the wait for a launch counts for the next lap. The host does not wait for laps, but
    recording one takes about as long as launching a kernel. Events are reused, because making one
    takes as long again.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._names: list[str] = []

    def start(self) -> None:
        """Forget all laps; time runs from here."""
        self._names.clear()
        if self._on_gpu:
            self._stream = torch.cuda.current_stream()  # asking for it takes longer than recording
        self._mark()

    def lap(self, name: str) -> None:
        """All work since the last lap, or the start, was ``name``."""
        self._names.append(name)
        self._mark()

    def _mark(self) -> None:
        at = len(self._names)
        if at == len(self._marks):
            self._marks += cuda_events() if self._on_gpu else (0.0, 0.0)
        if self._on_gpu:
            self._marks[at].record(self._stream)
        else:
            self._marks[at] = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds by name, summed over the laps; on a GPU, waits for the last one."""
        marks = self._marks[: len(self._names) + 1]
        if self._on_gpu:
            marks[-1].synchronize()
        spent: dict[str, float] = {}
        for name, (begin, end) in zip(self._names, pairwise(marks), strict=True):
            seconds = begin.elapsed_time(end) * 1e-3 if self._on_gpu else end - begin
            spent[name] = spent.get(name, 0.0) + seconds
        return spent


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
        tokens = shape.slots * shape.max_length
        self.layers = [
            LayerState(drawn.layer(index), KVCache(tokens, *sizes, device, dtype))
            for index in range(shape.first, shape.last)
        ]
        self.ends = drawn.ends(shape.is_first, shape.is_last)
        self._watch = Stopwatch(device)

    def run(self, work: Work, x: Tensor | None = None) -> Tensor:
        """Activations (tokens, hidden) for the next stage; on the last one logits of the yielding
        rows.

        ``x`` comes from the previous stage, and is left out on the first. Logits are (outputs,
        this rank's part of the vocabulary).
        """
        self._watch.start()
        if not work.num_tokens:  # an empty work only keeps its place in the pipeline
            width = self.ends.columns if self.shape.is_last else self.shape.model.hidden_size
            return torch.empty(0, width, device=self.device, dtype=self.dtype)
        with torch.inference_mode():
            return self.layer.forward(self.layers, self.ends, self._rows(work), x, self._do)

    def _do(self, op: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
        out = call(state, *inputs)
        self._watch.lap(op)
        return out

    def seconds(self) -> list[float]:
        """Seconds of the last work: :data:`TIMED_OPS` over all layers, all layers, the LM head.

        A GPU's times are its own; its wait for a launch counts for the next op.
        """
        spent = self._watch.read()
        spent.pop(EMBEDDING, None)
        head = spent.pop(LM_HEAD, 0.0)
        return [*(spent.get(op, 0.0) for op in TIMED_OPS), sum(spent.values()), head]

    def _rows(self, work: Work) -> Rows:
        """The inputs that all layers share; row indices count as embedding, the rest apart."""
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
                Chunk(self.attention, count, context, slot * shape.max_length)
                for slot, count, context, _ in work.chunks
            ],
            Decodes.in_blocks(
                self.attention, work.decodes, shape.slots, shape.max_length, device
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
