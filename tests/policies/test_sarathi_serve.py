"""Sarathi-Serve's scheduler on schedules worked out by hand from its source."""

from __future__ import annotations

import pytest

from sarathi_sim.policies.sarathi_serve import SarathiServe, chunk_schedule
from tests.policies.by_hand import chunks, decodes, request, schedule


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    """A budget of 8. Two prompts, of 10 and 5 tokens, then one of 4."""
    arrivals = {0: [request(0, 10, 4), request(1, 5, 2)], 1: [request(2, 4, 1)]}
    steps = schedule(SarathiServe(chunk_size=8, max_num_seqs=8), arrivals, blocks=20)
    # 0: 8 of request 0's 10.           nothing is left for request 1.
    # 1: the other 2; 5 of request 1; 1 left for request 2.
    # 2: both decode, 2 tokens; request 2's other 3 fit.
    # 3: 0 decodes (1 has its 2 tokens, 2 its only one). 4: 0's last.
    assert chunks(steps) == [[(0, 8)], [(0, 2), (1, 5), (2, 1)], [(2, 3)], [], []]
    assert decodes(steps) == [[], [], [0, 1], [0], [0]]


def test_admission_takes_the_whole_prompt_s_blocks_and_leaves_the_watermark() -> None:
    """Blocks of 4 tokens: a prompt of 10 takes 3 at once, although only 4 tokens are processed."""
    one = {0: [request(0, 10, 1)]}
    steps = schedule(SarathiServe(chunk_size=4), one, blocks=20)
    assert chunks(steps) == [[(0, 4)], [(0, 4)], [(0, 2)]]
    assert [step.free for step in steps] == [17, 17, 17]
    # Of 200 blocks 2 stay free (1 %): beside 99 (396 tokens) there is room for 99, not for 100.
    for prompt, together in ((396, True), (397, False)):
        pair = {0: [request(0, 396, 1), request(1, prompt, 1)]}
        first = schedule(SarathiServe(chunk_size=1000), pair, blocks=200)[0]
        assert len(first.chunks) == (2 if together else 1)


def test_the_queue_is_not_overtaken() -> None:
    """Request 1 does not fit beside request 0 (4 of 5 blocks); request 2 would, and waits."""
    arrivals = {0: [request(0, 13, 2), request(1, 8, 1), request(2, 2, 1)]}
    steps = schedule(SarathiServe(chunk_size=64), arrivals, blocks=5)
    assert chunks(steps) == [[(0, 13)], [], [(1, 8), (2, 2)]]


def test_a_decode_needs_a_free_block_even_if_it_fills_none() -> None:
    """Blocks of 4, 4 of them. Both prompts are 5 tokens, 2 blocks each: none is left."""
    arrivals = {0: [request(0, 5, 3), request(1, 5, 3)]}
    steps = schedule(SarathiServe(chunk_size=64), arrivals, blocks=4)
    # 1: request 0 (5 tokens in 2 blocks) needs no new block, but none is free: request 1, the
    #    youngest, loses its 2. It has 5 + 1 tokens to compute again: 2 blocks, which are free.
    #    So it comes back in the same call, behind the decode, and yields its second token.
    # 2: again none is free: the same once more, with 7 tokens, and that is its third.
    assert [step.preempted for step in steps] == [[], [1], [1]]
    assert chunks(steps) == [[(0, 5), (1, 5)], [(1, 6)], [(1, 7)]]
    assert decodes(steps) == [[], [0], [0]]


def test_a_prompt_that_was_visited_is_no_victim() -> None:
    """Request 0 is still in its prompt, older than 1, which decodes and finds no free block."""
    arrivals = {
        0: [request(1, 4, 4)],
        1: [request(0, 12, 1, arrival_s=0.0)],
    }
    steps = schedule(SarathiServe(chunk_size=5), arrivals, blocks=4)
    # 0: prompt of 1: 1 block. 1: it decodes, 1 more block; request 0 needs 3 of the 2 left: waits.
    # 2, 3: 1 decodes on (contexts 5, 6) with 2 free, and has its 4 tokens. 4: request 0 begins.
    assert chunks(steps) == [[(1, 4)], [], [], [], [(0, 5)], [(0, 5)], [(0, 2)]]
    # With one more block request 0 is let in at once, and takes all 3 that are left.
    steps = schedule(SarathiServe(chunk_size=5), arrivals, blocks=5)
    # 2: request 0 (older) is visited first and passes; then 1 finds no free block and nobody
    #    behind it, so it gives up its own 2. Request 0 runs 5 tokens; 1 needs 2 blocks for its 6
    #    tokens, but the budget is spent.
    # 3: the last 3 of request 0 leave 2 of the budget for 1.
    assert [step.preempted for step in steps] == [[], [], [1], [], [], []]
    assert chunks(steps)[1:] == [[(0, 4)], [(0, 5)], [(0, 3), (1, 2)], [(1, 4)], []]
    assert decodes(steps)[1:] == [[1], [], [], [], [1]]


def test_max_num_seqs_bounds_who_runs() -> None:
    arrivals = {0: [request(id, 2, 2) for id in range(3)]}
    steps = schedule(SarathiServe(chunk_size=64, max_num_seqs=2), arrivals, blocks=20)
    assert chunks(steps) == [[(0, 2), (1, 2)], [], [(2, 2)], []]


def test_decodes_run_even_beyond_the_chunk_size() -> None:
    """Three decodes under a budget of 2: all run, and no prompt joins."""
    arrivals = {0: [request(0, 2, 9)], 1: [request(1, 1, 8)], 2: [request(2, 1, 8)]}
    steps = schedule(SarathiServe(chunk_size=2), arrivals, blocks=40, steps=4)
    # 1: 0 decodes, 1 joins with 1 token. 2: both decode, nothing is left. So 2 waits.
    assert decodes(steps) == [[], [0], [0, 1], [0, 1]]
    assert chunks(steps) == [[(0, 2)], [(1, 1)], [], []]


def test_dynamic_chunks_shrink_with_what_is_processed() -> None:
    """From 128 to 32 in 4 stages over 256 tokens: 128, 96, 64, 32, each for 64 tokens processed."""
    assert chunk_schedule(32, 128, 4) == (128, 96, 64, 32)
    # Spaced by 512 / 3: 32, 202, 373, 544, in multiples of 32: 1, 6.3, 11.7, 17.
    assert chunk_schedule(32, 544, 4) == (544, 384, 192, 32)
    assert chunk_schedule(64, 64, 1) == (64,)
    policy = SarathiServe(
        enable_dynamic_chunking_schedule=True,
        low_chunk_size=32,
        high_chunk_size=128,
        chunk_schedule_max_tokens=256,
        chunk_schedule_stages=4,
    )
    steps = schedule(policy, {0: [request(0, 300, 1)]}, blocks=100)
    # After 128 tokens: stage 2, 64. After 192: stage 3, 32. After 224: 32. After 256 the engine
    # has no stage left; here the last one goes on.
    assert chunks(steps) == [[(0, n)] for n in (128, 64, 32, 32, 32, 12)]


def test_chunks_of_one_prompt_do_not_overlap_under_pipeline_parallelism() -> None:
    arrivals = {0: [request(0, 12, 1), request(1, 4, 1)]}
    steps = schedule(SarathiServe(chunk_size=4), arrivals, blocks=20, in_flight=2)
    # While request 0's first chunk is out, only request 1 can be served.
    assert chunks(steps)[:3] == [[(0, 4)], [(1, 4)], [(0, 4)]]


@pytest.mark.parametrize(
    "keys",
    [
        {"chunk_size": 0},
        {"max_num_seqs": 0},
        {"enable_dynamic_chunking_schedule": True, "low_chunk_size": 40},
        {"enable_dynamic_chunking_schedule": True, "low_chunk_size": 64, "high_chunk_size": 32},
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SarathiServe(**keys)  # type: ignore[arg-type]
