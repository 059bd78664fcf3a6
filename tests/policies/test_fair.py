"""The virtual token counter on schedules worked out by hand."""

from __future__ import annotations

import pytest

from sarathi_sim.policies.fair import Fair
from tests.policies.by_hand import Step, request, schedule


def admitted(steps: list[Step]) -> list[tuple[int, int]]:
    """Who started in which iteration."""
    found: dict[int, int] = {}
    for number, step in enumerate(steps):
        for id, _ in step.chunks:
            found.setdefault(id, number)
    return list(found.items())


def test_the_user_who_was_served_least_is_next() -> None:
    """User 0 sends four requests, user 1 then two; one sequence at a time, 10 prompt tokens each.

    Each takes two iterations: its prompt (10), and one decode (2).
    """
    arrivals = {
        0: [request(id, 10, 2, user=0) for id in range(4)]
        + [request(id, 10, 2, user=1) for id in (4, 5)]
    }
    steps = schedule(Fair(max_num_seqs=1), arrivals, blocks=100)
    # Counters (user 0, user 1) before each admission: (0, 0): user 0, by its number; (12, 0): user
    # 1; (12, 12): user 0; (24, 12): user 1; then user 0 alone. First come, first served would be
    # 0, 1, 2, 3, 4, 5.
    assert admitted(steps) == [(0, 0), (4, 2), (1, 4), (5, 6), (2, 8), (3, 10)]


def test_generated_tokens_count_twice_as_much_as_prompt_tokens() -> None:
    """User 0: 2 + 2 x 5 = 12 a request. User 1: 6 + 2 x 1 = 8 a request."""
    users = {0: [request(id, 2, 6, user=0) for id in range(3)]}
    users[0] += [request(id, 6, 2, user=1) for id in range(3, 6)]
    steps = schedule(Fair(max_num_seqs=1), users, blocks=100)
    # (0, 0): 0. (12, 0): 1. (12, 8): 1. (12, 16): 0. (24, 16): 1. Then 0.
    assert [id for id, _ in admitted(steps)] == [0, 3, 4, 1, 5, 2]
    # With generated tokens for nothing: 2 and 6 a request. (0, 0), (2, 0), (2, 6), (4, 6), ...
    free = Fair(max_num_seqs=1, output_weight=0.0)
    assert [id for id, _ in admitted(schedule(free, users, blocks=100))] == [0, 3, 1, 2, 4, 5]


def test_who_was_away_saves_up_no_credit() -> None:
    """User 0 has been served 36 when user 1 comes for the first time. It starts at the counter of
    those who wait (user 0: 36), so they alternate; from 0 it would come first three times."""
    arrivals = {
        0: [request(id, 10, 2, user=0) for id in range(6)],
        6: [request(id, 10, 2, user=1) for id in range(6, 9)],
    }
    steps = schedule(Fair(max_num_seqs=1), arrivals, blocks=100)
    # At 6 both stand at 36: user 0, by its number; then user 1, and so on.
    assert [id for id, _ in admitted(steps)] == [0, 1, 2, 3, 6, 4, 7, 5, 8]


def test_when_nobody_waited_the_last_one_s_counter_counts() -> None:
    """User 1 comes when the queue is empty, and starts where user 0 stands, at 24, not at 0; so
    does user 2, at iteration 4."""
    arrivals = {
        0: [request(0, 10, 2, user=0)],
        2: [request(1, 10, 2, user=0)],
        4: [
            *(request(id, 10, 2, user=2) for id in (2, 3)),
            *(request(id, 10, 2, user=0) for id in (4, 5)),
        ],
    }
    steps = schedule(Fair(max_num_seqs=1), arrivals, blocks=100)
    # (24, 24): user 0. (36, 24): user 2. (36, 36): user 0. From 0 user 2 would come first, twice.
    assert [id for id, _ in admitted(steps)] == [0, 1, 4, 2, 5, 3]


def test_recomputation_is_not_charged() -> None:
    """Requests 0 and 1 run out of memory (4 blocks of 4); 1 is preempted and comes again."""
    arrivals = {
        0: [request(0, 8, 6, user=0), request(1, 8, 2, user=1)],
        1: [request(2, 4, 1, user=2)],
    }
    steps = schedule(Fair(max_num_seqs=2), arrivals, blocks=4)
    # 1: request 0 needs a block: request 1 is preempted. User 2 starts at the least of those who
    #    wait: user 1, who comes again, stands at 8, as user 0 does.
    # 2: user 1 stands at 8 and is next (by its number): 9 tokens need 3 blocks, 1 is free. Who
    #    does not fit stops all behind it, until request 0 has left at 6.
    # 6: request 1 computes 9 tokens again and is not charged; request 2 needs the fourth block.
    assert steps[1].preempted == [1]
    assert admitted(steps) == [(0, 0), (1, 0), (2, 6)]
    assert steps[6].chunks == [(1, 9), (2, 4)]


def test_it_is_vllm_for_a_single_user() -> None:
    from sarathi_sim.policies.vllm import Vllm

    arrivals = {at: [request(at, 5 + at, 7, 9)] for at in range(0, 12, 2)}
    keys = {"max_num_batched_tokens": 12, "max_num_seqs": 3}
    assert schedule(Fair(**keys), arrivals, blocks=9) == schedule(Vllm(**keys), arrivals, blocks=9)


def test_a_budget_is_needed() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Fair(max_num_batched_tokens=0)
