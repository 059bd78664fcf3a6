"""TensorRT-LLM's in-flight batching on schedules worked out by hand from its source."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.trtllm import Trtllm
from tests.policies.by_hand import chunks, decodes, request, schedule


def trtllm(**keys: Any) -> Trtllm:
    return Trtllm(disable_overlap_scheduler=True, **keys)


def test_nobody_is_evicted_because_declared_lengths_are_guaranteed() -> None:
    """10 blocks of 4. Each request may come to 8 + 12 tokens, 5 blocks: two fit, a third waits,
    although the first two hold only 4 blocks at first and end after 3 tokens."""
    arrivals = {0: [request(id, 8, 3, 12) for id in range(3)]}
    steps = schedule(trtllm(), arrivals, blocks=10)
    assert chunks(steps) == [[(0, 8), (1, 8)], [], [], [(2, 8)], [], []]
    assert [step.free for step in steps[:3]] == [6, 4, 4]
    assert not any(step.preempted for step in steps)


def test_max_utilization_admits_on_the_prompt_and_pauses_who_came_last() -> None:
    """6 blocks of 4. Three prompts of 8 take them all."""
    arrivals = {0: [request(id, 8, 6) for id in range(3)]}
    steps = schedule(trtllm(capacity_scheduler_policy="max_utilization"), arrivals, blocks=6)
    # 1: each of the three needs a block: request 2 is paused, which frees 2, for the other two.
    #    Nobody is admitted in the same call.
    # 2: request 2 needs 3 blocks for its 9 tokens, none is free, nor at 3 and 4 (contexts to 12).
    # 5: the two decode for the fifth time, and each needs a block: request 1 is paused, which
    #    frees 3. It has 8 + 5 tokens, 4 blocks: request 0 leaves with this decode.
    # 6: 6 are free: request 1 takes 4, request 2 needs 3 for its 9. Request 1's sixth token.
    # 7: request 2 goes on, and has 4 more decodes to do.
    assert [step.preempted for step in steps] == [[], [2], [], [], [], [1], [], [], *[[]] * 4]
    assert chunks(steps)[:2] == [[(0, 8), (1, 8), (2, 8)], []]
    assert chunks(steps)[5:8] == [[], [(1, 13)], [(2, 9)]]
    assert decodes(steps) == [[], *[[0, 1]] * 4, [0], [], [], *[[2]] * 4]


def test_who_is_paused_is_who_arrived_last_not_who_was_admitted_last() -> None:
    """7 blocks of 4 and 8 tokens an iteration. Request 2 overtakes request 1 at first: request 0
    leaves 2 tokens, less than a block of request 1, and all of request 2."""
    arrivals = {0: [request(0, 6, 6), request(1, 8, 4), request(2, 2, 5)]}
    keys = {"max_num_tokens": 8, "enable_chunked_prefill": True}
    policy = trtllm(capacity_scheduler_policy="max_utilization", **keys)
    steps = schedule(policy, arrivals, blocks=7)
    # 4: contexts 8, 8 and 4: each of the three needs a block, 2 are free. Request 2 is paused:
    #    3 are free for two.
    # 7: the two have ended. Request 2 computes its 2 + 3 tokens again.
    assert [step.preempted for step in steps] == [[], [], [], [2], [], [], [], []]
    assert chunks(steps) == [[(0, 6), (2, 2)], [(1, 4)], [(1, 4)], [], [], [], [(2, 5)], []]
    assert decodes(steps) == [[], [0, 2], [0, 2], [0, 1], [0, 1], [0, 1], [], [2]]
    assert [step.free for step in steps] == [4, 2, 2, 1, 1, 1, 5, 5]


def test_decodes_come_first_and_prompts_are_cut_to_whole_blocks() -> None:
    """12 tokens in blocks of 4."""
    arrivals = {0: [request(0, 3, 4)], 1: [request(1, 20, 1), request(2, 3, 1)]}
    steps = schedule(trtllm(max_num_tokens=12, enable_chunked_prefill=True), arrivals, blocks=100)
    # 1: a decode, 11 left: 8 for request 1 (2 blocks), and the 3 that are left are all of
    #    request 2. 2: 11 left again: 8. 3: the last 4.
    assert chunks(steps) == [[(0, 3)], [(1, 8), (2, 3)], [(1, 8)], [(1, 4)]]
    assert decodes(steps) == [[], [0], [0], [0]]


def test_the_first_chunk_takes_the_whole_prompt_s_blocks() -> None:
    chunked = trtllm(max_num_tokens=8, enable_chunked_prefill=True)
    steps = schedule(chunked, {0: [request(0, 20, 1)]}, blocks=100)
    assert chunks(steps) == [[(0, 8)], [(0, 8)], [(0, 4)]]
    assert [step.free for step in steps] == [95, 95, 95]


def test_without_chunks_a_prompt_that_does_not_fit_waits() -> None:
    arrivals = {0: [request(0, 7, 2), request(1, 6, 1), request(2, 1, 1)]}
    steps = schedule(trtllm(max_num_tokens=12), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 7)], [(1, 6), (2, 1)]]


def test_max_batch_size_bounds_who_runs() -> None:
    arrivals = {0: [request(id, 2, 2) for id in range(3)]}
    steps = schedule(trtllm(max_batch_size=2), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 2), (1, 2)], [], [(2, 2)], []]


def test_prompts_wait_for_enough_tokens_or_long_enough() -> None:
    """They go once half of 16 tokens are there, decodes included, or after 3 iterations."""
    waits = {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.5}
    policy = trtllm(max_num_tokens=16, **waits)
    arrivals = {
        0: [request(0, 2, 12)],  # nobody decodes, so it does not wait
        1: [request(1, 3, 1)],  # 1 + 3 tokens: waits
        2: [request(2, 4, 1)],  # 1 + 3 + 4: enough
        3: [request(3, 2, 1)],  # 1 + 2: waits at 3, 4 and 5
    }
    steps = schedule(policy, arrivals, blocks=100)
    assert chunks(steps)[:7] == [[(0, 2)], [], [(1, 3), (2, 4)], [], [], [], [(3, 2)]]
    # With one of the two only, nobody ever waits.
    for key, value in waits.items():
        steps = schedule(trtllm(max_num_tokens=16, **{key: value}), arrivals, blocks=100)
        assert chunks(steps)[:4] == [[(0, 2)], [(1, 3)], [(2, 4)], [(3, 2)]]


def test_decodes_beyond_max_num_tokens_are_left_out() -> None:
    arrivals = {0: [request(0, 1, 3), request(1, 1, 3)], 1: [request(2, 1, 1)]}
    steps = schedule(trtllm(max_num_tokens=2), arrivals, blocks=100)
    assert chunks(steps) == [[(0, 1), (1, 1)], [], [], [(2, 1)]]
    alone = schedule(trtllm(max_num_tokens=1), arrivals, blocks=100)
    assert decodes(alone)[:3] == [[], [0], [0]]
    assert chunks(alone)[:3] == [[(0, 1)], [], []]


def test_cached_prompts_cost_no_tokens() -> None:
    """Two of the three blocks are found: 1 token, beside one of 11, under a limit of 12."""
    shared = (("system", 8),)
    arrivals = {
        0: [request(0, 9, 1, prefix=shared)],
        1: [request(1, 9, 1, prefix=shared), request(2, 11, 1)],
    }
    steps = schedule(trtllm(max_num_tokens=12), arrivals, blocks=100, caching=True)
    assert chunks(steps) == [[(0, 9)], [(1, 1), (2, 11)]]


@pytest.mark.parametrize(
    "keys",
    [{"max_num_tokens": 0}, {"max_batch_size": 0}, {"batch_wait_max_tokens_ratio": 1.5}],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Trtllm(**keys)


def test_who_never_fits_once_it_was_paused_is_an_error_that_says_so() -> None:
    """6 blocks of 4, 8 tokens an iteration: request 1 is paused with 8 + 1 tokens."""
    arrivals = {0: [request(0, 8, 6)], 1: [request(1, 8, 6)], 2: [request(2, 8, 6)]}
    policy = trtllm(capacity_scheduler_policy="max_utilization", max_num_tokens=9)
    with pytest.raises(LivelockError, match="max_num_tokens is 9, but a request has to compute 1"):
        schedule(policy, arrivals, blocks=6)
