"""Ranks with data-parallel attention on schedules worked out by hand: who starts a prompt when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.simulator.loop.group import Ranks
from sarathi_sim.simulator.loop.routers import Balancer
from tests.policies.by_hand import request

Row = tuple[list[int], list[int]]
"""In a step of one rank: whose prompts run, and who decodes."""


def steps(
    policy: PoolPolicy, ranks: int, arrivals: Mapping[int, list[Request]], most: int
) -> list[list[Row | None]]:
    """The first ``most`` steps, one in flight; requests come before a step, to the ranks in
    turn."""
    pools = [Pool(policy, Blocks(101, 4), max_length=100) for _ in range(ranks)]
    group = Ranks(pools, Balancer("round_robin", ranks, np.random.default_rng(0)))
    found: list[list[Row | None]] = []
    for number in range(most):
        for each in arrivals.get(number, []):
            assert group.add(each)[1] is None
        step = group.next_batch()
        assert step is not None
        found.append(
            [
                None
                if batch is None
                else (
                    [sequence.id for sequence, _, _ in batch.chunks],
                    sorted(sequence.id for sequence in batch.members()),
                )
                for batch in step
            ]
        )
        group.complete(step)
    return found


def trtllm(**keys: Any) -> Trtllm:
    return Trtllm(disable_overlap_scheduler=True, enable_balance=True, **keys)


def prompts(
    policy: PoolPolicy, ranks: int, arrivals: Mapping[int, list[Request]], most: int
) -> Any:
    found = steps(policy, ranks, arrivals, most)
    return [[row[0] if row else [] for row in step] for step in found]


def test_trtllms_ranks_wait_until_all_have_a_prompt_or_long_enough() -> None:
    arrivals = {
        0: [request(0, 4, 20), request(1, 4, 20)],  # nobody decodes: at once
        2: [request(2, 4, 20)],
        4: [request(3, 4, 20)],
        5: [request(4, 4, 20)],
    }
    # 1: both decode and no rank has a prompt: the first such step. 2: request 2 waits in the
    # second one, and starts in the third, 3. 4: request 3 waits in the first since then. 5: both
    # ranks have a prompt.
    policy = trtllm(timeout_iters=3)
    found = steps(policy, 2, arrivals, 7)
    assert found[:4] == [
        [([0], []), ([1], [])],
        *[[([], [0]), ([], [1])]] * 2,
        [([2], [0]), ([], [1])],
    ]
    assert found[4:6] == [[([], [0, 2]), ([], [1])], [([4], [0, 2]), ([3], [1])]]
    # Without it a prompt starts at once, whatever other ranks have.
    plain = Trtllm(disable_overlap_scheduler=True)
    assert prompts(plain, 2, arrivals, 6)[2:] == [[[2], []], [[], []], [[], [3]], [[4], []]]


def test_trtllms_ranks_wait_for_more_prompts() -> None:
    """Once all have one, two steps more; not while one of the ranks has nothing to decode."""
    arrivals = {
        0: [request(0, 4, 20), request(1, 4, 20)],
        1: [request(2, 4, 20), request(3, 4, 20)],
        2: [request(4, 4, 20)],
    }
    found = prompts(trtllm(batching_wait_iters=2), 2, arrivals, 5)
    assert found == [[[0], [1]], [[], []], [[], []], [[2, 4], [3]], [[], []]]
    assert prompts(trtllm(), 2, arrivals, 3) == [[[0], [1]], [[2], [3]], [[], []]]


def test_an_idle_rank_of_trtllm_counts_as_one_that_decodes() -> None:
    """Its dummy request decodes. Request 1 is the only one of its rank: nobody decodes there."""
    arrivals = {
        0: [request(0, 4, 20), request(1, 4, 1), request(2, 4, 1)],
        1: [request(3, 4, 20)],  # rank 0 decodes, 1 and 2 are idle: it waits for two steps
        4: [request(4, 4, 20)],  # rank 1 has nothing else: at once
    }
    found = steps(trtllm(timeout_iters=3), 3, arrivals, 5)
    alone = [([], [0]), None, None]
    assert found == [
        [([0], []), ([1], []), ([2], [])],
        alone,
        alone,
        [([3], [0]), None, None],
        [([], [0, 3]), ([4], []), None],
    ]


def test_full_ranks_of_trtllm_hold_prompts_back_on_all() -> None:
    """A rank that decodes as many as it may has no slot for a prompt."""
    arrivals = {0: [request(0, 4, 20), request(1, 4, 3)], 1: [request(2, 4, 2), request(3, 4, 2)]}
    found = prompts(trtllm(max_batch_size=1, timeout_iters=50), 2, arrivals, 5)
    # Request 1 ends with step 2. Then nobody decodes on rank 1, so request 3 need not wait.
    assert found == [[[0], [1]], [[], []], [[], []], [[], [3]], [[], []]]


def test_sglangs_ranks_prefill_and_decode_side_by_side() -> None:
    """A rank with a prompt runs it, and its own decodes wait; another rank decodes meanwhile, and
    one without requests has no batch (engine: ``get_idle_batch``)."""
    arrivals = {0: [request(0, 4, 9), request(1, 4, 9)], 2: [request(2, 4, 1), request(3, 4, 9)]}
    found = steps(Sglang(disable_overlap_schedule=True), 3, arrivals, 4)
    assert found == [
        [([0], []), ([1], []), None],
        [([], [0]), ([], [1]), None],
        [([3], []), ([], [1]), ([2], [])],
        [([], [0, 3]), ([], [1]), None],
    ]


def test_trtllm_chooses_the_rank_with_the_fewest_prompt_tokens_of_those_with_room() -> None:
    """0 is the first of equals. 1 goes to the empty rank. They are even, and rank 1 has 2 prompt
    tokens against 8: 2. Then rank 0 has fewer requests, though more tokens: 3. Of 9 and 5 tokens: 4
    to rank 1. Once 0 has ended, rank 0 has one request, and gets the next, whatever its length."""
    balancer = Balancer("least_prompt_tokens", 2, np.random.default_rng(0))
    sent = [request(id, prompt, 5) for id, prompt in enumerate((8, 2, 3, 1, 1))]
    assert [balancer.send(each) for each in sent] == [0, 1, 1, 0, 1]
    balancer.ended(0, sent[0])
    assert [balancer.send(request(id, 90, 5)) for id in (5, 6, 7)] == [0, 0, 1]


@pytest.mark.parametrize("keys", [{"timeout_iters": 0}, {"timeout_iters": -1}])
def test_a_balance_that_never_starts_a_prompt_is_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="timeout_iters must be at least 1"):
        trtllm(**keys)
