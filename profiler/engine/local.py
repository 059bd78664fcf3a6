"""A real engine in this process: one stage, one rank. Imports torch.

With more stages or ranks see :mod:`profiler.engine.processes`. Start with ``driver.py`` (the loop),
``stage.py`` (what executes) and ``work.py`` (what goes between them).
"""

from __future__ import annotations

import torch

from policies.request import Request
from policies.scheduler import Scheduler
from profiler.engine.driver import Returned, Served, serve
from profiler.engine.stage import Stage, StageShape
from profiler.engine.work import SlotBook, Work
from profiler.facts.model import ModelSpec


def greedy(logits: torch.Tensor) -> tuple[list[int], float]:
    """The token of every row, and the smallest lead over the second best."""
    if not len(logits):
        return [], float("inf")
    best = logits.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0].tolist(), float(lead.min())


class LocalEngine:
    """Serves requests with a scheduler and policy of ``policies/`` on a model with random weights.

    It is the :class:`~profiler.engine.driver.Executor` of a pipeline of one stage.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        slots: int,
        max_length: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        shape = StageShape(model, 0, model.num_layers, 1, 0, slots, max_length, seed)
        self.stage = Stage(shape, device or torch.device("cpu"), dtype)
        self.shape = shape
        self._back: list[Returned] = []

    def submit(self, work: Work) -> None:
        """Execute a work."""
        tokens, margin = greedy(self.stage.run(work))
        self._back.append(Returned(work.index, tokens, margin))

    def returned(self, until: float | None = 0.0) -> Returned | None:
        """What was executed last, once."""
        return self._back.pop(0) if self._back else None

    def serve(
        self, requests: list[Request], scheduler: Scheduler, *, poison: bool = False
    ) -> Served:
        """Serve all requests. ``poison`` overwrites freed slots, to show that they are not read."""
        shape = self.shape
        book = SlotBook(requests, shape.slots, shape.model.vocab_size, shape.seed)
        release = self.stage.poison if poison else None
        return serve(requests, scheduler, self, book, on_release=release)
