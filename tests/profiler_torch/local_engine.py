"""A real engine in this process: one stage, one rank, to be looked into by tests."""

from __future__ import annotations

from typing import Any

import torch

from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.profiler.engine.driver import Book, Returned, Served, serve
from sarathi_sim.profiler.engine.rank import Stage, greedy
from sarathi_sim.profiler.engine.spec import StageShape, Work
from sarathi_sim.profiler.facts.model import ModelSpec


class LocalEngine:
    """Serves requests with a policy of ``policies/`` on a model with random weights.

    It is the :class:`~sarathi_sim.profiler.engine.driver.Executor` of a pipeline of one stage. Its
    KV cache has ``slots`` of ``max_length`` tokens.
    """

    def __init__(self, model: ModelSpec, *, slots: int, max_length: int) -> None:
        self.shape = StageShape(model, 0, model.num_layers, 1, 0, slots, max_length)
        self.stage = Stage(self.shape, torch.device("cpu"), torch.float32)
        self._back: list[Returned] = []

    def submit(self, work: Work) -> None:
        tokens, margin = greedy(self.stage.run(work))
        self._back.append(Returned(work.index, tokens, margin))

    def returned(self, until: float | None = 0.0) -> Returned | None:
        return self._back.pop(0) if self._back else None

    def serve(self, requests: list[Request], policy: Policy, settings: dict[str, Any]) -> Served:
        """Serve all requests. ``settings`` are the scheduler's. A slot that is given out is
        overwritten, to show that nobody reads what was there."""
        stage, shape = self.stage, self.shape

        class Poisoned(Book):
            def slot_of(self, sequence: Sequence) -> int:
                fresh = sequence not in self._slots
                slot = super().slot_of(sequence)
                if fresh:
                    poison(stage, slot)
                return slot

        book = Poisoned(requests, shape.slots, shape.model.vocab_size, shape.seed)
        return serve(requests, MicroBatches(policy, endings=book, **settings), self, book)


def poison(stage: Stage, slot: int) -> None:
    """Overwrite a slot's K and V, to expose a read of values that were not written."""
    size = stage.shape.max_length
    for layer in stage.layers:
        for half in (layer.cache.k, layer.cache.v):
            half[slot * size : (slot + 1) * size] = 1e4
