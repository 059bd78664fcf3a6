"""A real engine in this process: one stage, one rank, to be looked into by tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine.book import Book
from sarathi_sim.profiler.engine.driver import Returned, Served, serve
from sarathi_sim.profiler.engine.rank import greedy
from sarathi_sim.profiler.engine.spec import StageShape, Work
from sarathi_sim.profiler.engine.stage import Stage
from sarathi_sim.profiler.facts.model import ModelSpec


class LocalEngine:
    """Serves requests with a scheduler and policy of ``policies/`` on a model with random weights.

    It is the :class:`~sarathi_sim.profiler.engine.driver.Executor` of a pipeline of one stage. Its
    KV cache has ``blocks`` of ``block_size`` tokens, all of which can be used.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        blocks: int,
        block_size: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        shape = StageShape(model, 0, model.num_layers, 1, 0, blocks, block_size, seed)
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
        self,
        requests: list[Request],
        policy: Policy | PoolPolicy,
        settings: dict[str, Any],
        *,
        poison: bool = False,
        **about: Any,
    ) -> Served:
        """Serve all requests. ``settings`` are the scheduler's; for ``about`` see
        :class:`~sarathi_sim.profiler.engine.book.Book`.

        ``poison`` overwrites blocks that are given out, to show that nobody reads what was there.
        """
        shape = self.shape
        if poison:
            about["on_new"] = partial(poison_block, self.stage)
        book = Book(
            requests, shape.blocks + 1, shape.block_size,
            vocab_size=shape.model.vocab_size, seed=shape.seed, **about,
        )  # fmt: skip
        return serve(requests, book.scheduler(policy, settings), self, book)


def poison_block(stage: Stage, block: int) -> None:
    """Overwrite a block's K and V, to expose a read of values that were not written."""
    size = stage.shape.block_size
    for layer in stage.layers:
        for half in (layer.cache.k, layer.cache.v):
            half[block * size : (block + 1) * size] = 1e4
