"""vLLM's V0 engine under pipeline parallelism: a share of the requests for each micro-batch."""

from __future__ import annotations

from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.policies.vllm_v0 import VllmV0


def sizes(policy: Vllm, requests: int, iterations: int) -> list[int]:
    """Sequences in each micro-batch of two stages, for requests that arrive at once."""
    pool = Pool(
        policy,
        Blocks(1000, 16),
        max_in_flight=2,
        max_length=1000,
        stages=2,
    )
    for number in range(requests):
        pool.add(Request(number, 0.0, 10, 50, 50))
    found, flying = [], []
    for _ in range(iterations):
        while (batch := pool.next_batch()) is not None:
            flying.append(batch)
            found.append(batch.num_decodes + len(batch.chunks))
        pool.complete(flying.pop(0))
    return found


def test_micro_batches_share_the_requests() -> None:
    """V1 takes all at once, and its second micro-batch stays empty; V0 has five in each."""
    assert sizes(Vllm(2048, 256), 10, 4)[:5] == [10, 0, 10, 0, 10]
    assert sizes(VllmV0(2048, 256), 10, 4) == [5, 5, 5, 5, 5]
    assert sizes(VllmV0(2048, 256), 1, 2)[0] == 1


def test_the_budget_is_each_schedulers() -> None:
    """Of 20 requests with 10 tokens each scheduler has 10, and takes 3 of them at first."""
    assert sizes(VllmV0(30, 256), 20, 3)[:4] == [3, 3, 6, 6]
