"""The scheduling of vLLM's V0 engine under pipeline parallelism.

Source: vLLM 0.8.3, ``vllm/engine/llm_engine.py`` and ``vllm/core/scheduler.py``. Not compared with
recorded decisions: see docs/model/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from sarathi_sim.policies.policy import named
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Sequence
from sarathi_sim.policies.vllm import Vllm


@named("vllm_v0")
class VllmV0(Vllm):
    """As ``vllm``, but each micro-batch has requests of its own, about as many as the others.

    A V0 engine has one scheduler a pipeline stage, and gives a request to the one with the fewest.
    ``max_num_batched_tokens`` is each scheduler's limit, ``max_num_seqs`` the limit of all.
    """

    def __init__(
        self,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        watermark: float = 0.01,
    ) -> None:
        # The threshold is no bound, but says that several prompts may be unfinished.
        super().__init__(
            max_num_batched_tokens,
            max_num_seqs,
            long_prefill_token_threshold=max_num_batched_tokens,
            watermark=watermark,
            async_scheduling=False,
            version="0.8",
        )

    def plan(self, pool: Pool) -> bool:
        """Plan as vLLM does; the next micro-batch may admit requests that this one does not."""
        super().plan(pool)
        return False

    def elsewhere(self, sequence: Sequence) -> bool:
        """Whether another micro-batch is computing a part of its prompt."""
        return sequence.awaited > 0

    def in_turn(self, pool: Pool) -> Iterator[Sequence]:
        """Waiting requests, until the micro-batch has its share of all unfinished requests."""
        share = -(-(len(pool.running) + len(pool.waiting)) // pool.stages)
        mine, before = pool.num_decodes, len(pool.running)
        for sequence in super().in_turn(pool):
            if mine + len(pool.running) - before >= share:
                return
            yield sequence
