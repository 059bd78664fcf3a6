"""Fairness between users: the virtual token counter, on vLLM's continuous batching.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each
user has a counter of the service received, in weighted tokens. The user with the least service is
admitted next. A user who returns after a pause starts no lower than the waiting users, so credit
does not build up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import ClassVar

from sarathi_sim.policies.policy import named
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Sequence
from sarathi_sim.policies.vllm import Vllm


@named("fair")
class Fair(Vllm):
    """As ``vllm``, but the next request is the oldest one of the user with the least service.

    Service counts ``input_weight`` for each prompt token, at admission, and ``output_weight`` for
    each generated token. A request names its user by ``user``. The requests of one user keep their
    order, and a request that does not fit stops all behind it.
    """

    needs: ClassVar = {"input_weight": "users", "output_weight": "users"}

    def __init__(
        self,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        enable_chunked_prefill: bool = True,
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
    ) -> None:
        super().__init__(
            max_num_batched_tokens,
            max_num_seqs,
            enable_chunked_prefill=enable_chunked_prefill,
            watermark=watermark,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
            async_scheduling=False,
        )
        self.input_weight = input_weight
        self.output_weight = output_weight

    def plan(self, pool: Pool) -> bool:
        """Plan as vLLM does, and count the service."""
        state = pool.state
        served: dict[int, float] = state.setdefault("served", {})
        self._lift(pool, served)
        super().plan(pool)
        for sequence in pool.decoding():
            served[sequence.user] += self.output_weight
        state["queued"] = {each.user for each in pool.waiting}
        return False  # every decode counts

    def _lift(self, pool: Pool, served: dict[int, float]) -> None:
        """Raise users who had no waiting request to the least service of those who had one, or to
        that of the last user who had one."""
        queued: set[int] = pool.state.setdefault("queued", set())
        for sequence in pool.waiting:
            user = sequence.user
            if user not in queued:
                others = queued or {pool.state.get("last", user)}
                least = min(served.get(each, 0.0) for each in others)
                served[user] = max(served.get(user, 0.0), least)
                queued.add(user)

    def in_turn(self, pool: Pool) -> Iterator[Sequence]:
        """Always the oldest request of the user with the smallest counter."""
        served = pool.state["served"]
        queues: dict[int, deque[Sequence]] = {}
        for sequence in pool.waiting:
            queues.setdefault(sequence.user, deque()).append(sequence)
        turns = [(served[user], user) for user in queues]
        heapify(turns)
        while turns:
            _, user = turns[0]
            sequence = queues[user].popleft()
            first = sequence.order < 0  # recomputed tokens are not charged again
            if not sequence.stale:
                yield sequence
            if first and sequence in pool.running:
                served[user] += self.input_weight * sequence.prompt_tokens
            if queues[user]:
                heapreplace(turns, (served[user], user))
            else:
                heappop(turns)
                pool.state["last"] = user
