"""One pipeline stage of a transformer on one tensor-parallel rank, executing works. Imports torch.

Its layers are those of :class:`~sarathi_sim.profiler.shard.layer.ShardLayer`. Linear ops are fused
over all rows of a :class:`~sarathi_sim.profiler.engine.work.Work`. The KV cache is allocated once,
as blocks, and written in place; a work says which blocks each of its sequences has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sarathi_sim.profiler.engine.work import TIMED_OPS, Work
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OTHERS
from sarathi_sim.profiler.shard.attention import KVCache, choose_attention
from sarathi_sim.profiler.shard.layer import (
    EMBEDDING,
    LM_HEAD,
    LayerState,
    RandomWeights,
    ShardLayer,
)
from sarathi_sim.profiler.shard.rows import Chunk, Decodes, Rows, places_of
from sarathi_sim.profiler.shard.timing import cuda_events


class Stopwatch(Protocol):
    """``start``, then a ``lap`` after each piece of work, then ``read``."""

    def start(self) -> None:
        """Forget all laps; time runs from here."""

    def lap(self, name: str) -> None:
        """All work since the last lap, or the start, was ``name``."""

    def read(self) -> dict[str, float]:
        """Seconds by name, summed over the laps; on a GPU, waits for the last one."""


class HostStopwatch:
    """By the host's clock: for ops that are done when their call returns."""

    def start(self) -> None:
        """See :class:`Stopwatch`."""
        self._spent: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """See :class:`Stopwatch`."""
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """See :class:`Stopwatch`."""
        return dict(self._spent)


class CudaStopwatch:
    """By events in the GPU's stream: the GPU's wait for a launch counts for the next lap.

    The host does not wait for laps, but recording one takes about as long as launching a kernel.
    Events are reused, because making one takes as long again.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._names: list[str] = []

    def start(self) -> None:
        """See :class:`Stopwatch`."""
        self._names.clear()
        self._stream = torch.cuda.current_stream()  # asking for it takes longer than recording
        self._record()

    def lap(self, name: str) -> None:
        """See :class:`Stopwatch`."""
        self._names.append(name)
        self._record()

    def _record(self) -> None:
        if len(self._names) == len(self._events):
            self._events += cuda_events()
        self._events[len(self._names)].record(self._stream)

    def read(self) -> dict[str, float]:
        """See :class:`Stopwatch`."""
        self._events[len(self._names)].synchronize()
        spent: dict[str, float] = {}
        for index, name in enumerate(self._names):
            milliseconds = self._events[index].elapsed_time(self._events[index + 1])
            spent[name] = spent.get(name, 0.0) + milliseconds * 1e-3
        return spent


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for work on ``device``."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()


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
