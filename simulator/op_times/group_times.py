"""The time of a step of ranks with data-parallel attention.

The ranks meet in every layer: the experts compute the tokens of all ranks, and the exchange takes
as long as that of the rank with most tokens. So one layer takes the longest of the ranks' other
ops, each at its own tokens and contexts, plus the exchange and the experts once. Embedding, host
and LM head take as long as those of the slowest rank. Of DeepEP's two modes the experts take that
of the ranks' mean tokens, and the exchange that of the most: where these lie on either side of the
limit, two modes are charged for one step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from ..loop.clock import quantize
from ..loop.group import Step
from ..loop.replica import Nominal
from .iteration import IterationCost
from .op_times import OpTimes
from .predictor import BundlePredictor, Drafter

ROWS_OF = {MOE: "all_tokens", ALL_TO_ALL: "most_tokens"}
"""The ops that the ranks share, and the column of a rank's log with their token rows."""


@lru_cache(maxsize=16)
def beside_experts(ops: OpTimes) -> OpTimes:
    """The op times of one rank where what the ranks share takes none."""
    return ops.scaled(dict.fromkeys(ROWS_OF, 0.0))


class GroupPredictor:
    """Times a step (a :class:`~sarathi_sim.simulator.loop.group.StepPredictor`).

    ``cost`` is that of an iteration with all its ops; ``alone`` times a rank's batch by
    :func:`beside_experts`, without the host's launches: a layer with chunks takes at least
    ``cost.host.launch_layer_s``, experts included. The passes of a ``drafter`` are each rank's own:
    the ranks wait for each other after the last one.
    """

    def __init__(
        self, cost: IterationCost, alone: BundlePredictor, drafter: Drafter | None = None
    ) -> None:
        self.cost = cost
        self.drafter = drafter
        self._alone = alone.of_each
        self._tables: dict[str, list[float]] = {}
        self._launch_s = float(quantize(cost.host.launch_layer_s))

    def __call__(self, step: Step) -> tuple[list[Nominal], Nominal]:
        """Seconds of each rank, if no other took longer, and of the step."""
        ranks, launch_s = self.of_each(step), self._launch_s
        if launch_s:
            for rank, batch in enumerate(step):
                if batch is not None and batch.chunks:
                    layer, first, last, send = ranks[rank]
                    ranks[rank] = max(layer, launch_s), first, last, send
        if self.drafter is not None:
            for rank, drafts_s in enumerate(self.drafter(step)):
                layer, first, last, send = ranks[rank]
                ranks[rank] = layer, first, last + drafts_s, send
        layer, first, last, send = map(max, zip(*ranks, strict=True))
        return ranks, (layer, first, last, send)

    def of_each(self, step: Step) -> list[Nominal]:
        """Seconds of each rank, if no other took longer, without the drafter."""
        tokens = [0 if batch is None else batch.num_tokens for batch in step]
        shared = self._shared(MOE, sum(tokens)) + self._shared(ALL_TO_ALL, max(tokens))
        alone = self._alone(step)
        return [(layer + shared, first, last, send) for layer, first, last, send in alone]

    def _shared(self, op: str, rows: int) -> float:
        """Seconds of an op that the ranks share, in a mean layer."""
        table = self._tables.get(op, [])
        if rows >= len(table):
            most = max(1024, 1 << (rows - 1).bit_length()) if rows else 1
            self._tables[op] = table = _shared_rows(self.cost, op, most)
        return table[rows]


@lru_cache(maxsize=64)
def _shared_rows(cost: IterationCost, op: str, most: int) -> list[float]:
    """By token rows, up to ``most``; zeros where the model has no such op."""
    if op not in cost.ops.by_rows:
        return [0.0] * (most + 1)
    return [0.0, *quantize(cost.op_s(op, np.arange(1, most + 1))).tolist()]
