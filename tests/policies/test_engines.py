"""Policies that act on a pool, each by hand from its source. What holds for all of them is in
``tests/simulator``: the textbook's pool beside ours, and the invariants."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest

from sarathi_sim.experiments.config.loading import CONFIGS
from sarathi_sim.policies.catalogue import build, builders_in, is_pooled
from sarathi_sim.policies.fair import Fair
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import LivelockError
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi_serve import SarathiServe, chunk_schedule
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.policies.vllm import Vllm
from tests.policies.by_hand import Step, chunks, decodes, request, schedule

_FILE = CONFIGS / "vllm_v0.py"
VllmV0: Any = builders_in(_FILE.read_text(), str(_FILE))["vllm_v0"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sarathi_serve", "max_num_seqs"),
        ("sglang", "max_running_requests"),
        ("trtllm", "max_batch_size"),
    ],
)
def test_no_more_run_than_may(name: str, key: str) -> None:
    policy = build(name, **{key: 2})
    assert is_pooled(policy)
    steps = schedule(policy, {0: [request(id, 2, 2) for id in range(3)]}, blocks=100)
    assert [found for found in chunks(steps) if found] == [[(0, 2), (1, 2)], [(2, 2)]]


# What vLLM's versions decide otherwise, on schedules worked out by hand


@pytest.mark.parametrize(("version", "served"), [("0.32", [0]), ("0.33", [0, 2])])
def test_a_request_preempts_itself(version: Literal["0.32", "0.33"], served: list[int]) -> None:
    """Five blocks of 4 tokens. Requests 0 and 1 take two each, request 2 the last one.

    In the third decode request 1 opens its third block, with its ninth token. There is none, and
    it has the lowest priority: it preempts itself. 0.32 stops there; 0.33 serves request 2, too.
    """
    rows = [(0, 5, 0), (1, 6, 2), (2, 2, 1)]
    zero, one, two = (Request(id, 0.0, prompt, 6, 6, level) for id, prompt, level in rows)
    policy = Vllm(64, 8, scheduling_policy="priority", version=version, async_scheduling=False)
    steps = schedule(policy, {0: [zero, one], 1: [two]}, blocks=5)
    assert decodes(steps)[:4] == [[], [0, 1], [0, 1, 2], served]
    assert [step.preempted for step in steps[:4]] == [[], [], [], [1]]


def sizes(policy: Vllm, requests: int, iterations: int) -> list[int]:
    """Sequences in each micro-batch of two stages, for requests that arrive at once."""
    pool = Pool(policy, Blocks(1000, 16), max_in_flight=2, max_length=1000, stages=2)
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
    assert sizes(Vllm(2048, 256, async_scheduling=False), 10, 4)[:5] == [10, 0, 10, 0, 10]
    assert sizes(VllmV0(2048, 256), 10, 4) == [5, 5, 5, 5, 5]
    assert sizes(VllmV0(2048, 256), 1, 2)[0] == 1


# Sarathi-Serve's scheduler on schedules worked out by hand from its source


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
    arrivals = {0: [request(1, 4, 4)], 1: [request(0, 12, 1, arrival_s=0.0)]}
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


# SGLang's scheduler on schedules worked out by hand from its source


def sglang(**keys: Any) -> Sglang:
    return Sglang(disable_overlap_schedule=True, **keys)


def test_new_requests_are_looked_for_every_so_many_decodes() -> None:
    """Request 1 comes after the look that follows a prefill batch, and waits for the third decode.
    Request 2 comes during its prefill, after which is a look at once."""
    arrivals = {0: [request(0, 4, 9)], 2: [request(1, 8, 2)], 4: [request(2, 4, 2)]}
    steps = schedule(sglang(scheduler_recv_interval=3), arrivals, blocks=100)
    assert chunks(steps)[:6] == [[(0, 4)], [], [], [], [(1, 8), (2, 4)], []]


def test_mixed_decodes_count_against_the_chunk() -> None:
    """Pages of 1 token: beside one decode a chunk of 8 has room for 7 tokens."""
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 9, 1)]}
    mixed = sglang(enable_mixed_chunk=True, chunked_prefill_size=8)
    steps = schedule(mixed, arrivals, blocks=100, block_size=1)
    assert chunks(steps) == [[(0, 4)], [(1, 7)], [(1, 2)]]


def test_prompts_are_counted_in_pages_and_the_last_one_is_cut() -> None:
    """Chunks of 8 tokens in pages of 4."""
    arrivals = {0: [request(0, 10, 1), request(1, 7, 1), request(2, 3, 1)]}
    steps = schedule(sglang(chunked_prefill_size=8), arrivals, blocks=100)
    # 0: request 0 has 3 pages, 2 fit.
    # 1: its last 2 tokens count as a page; of request 1's two pages one fits.
    # 2: its last 3 tokens, a page; request 2's page fits.
    assert chunks(steps) == [[(0, 8)], [(0, 2), (1, 4)], [(1, 3), (2, 3)]]


def test_without_chunks_the_first_prompt_may_be_of_any_length() -> None:
    """10 tokens: 8 and then 6, in pages of 4: 8 + 8 is too much. 30 is not, alone."""
    whole = sglang(chunked_prefill_size=None, max_prefill_tokens=10)
    arrivals = {0: [request(0, 8, 1), request(1, 6, 1), request(2, 30, 1)]}
    steps = schedule(whole, arrivals, blocks=100)
    assert chunks(steps) == [[(0, 8)], [(1, 6)], [(2, 30)]]


FRESH = {0: [request(0, 20, 50)]}
AGAIN = {0: [request(9, 1, 11)], 11: [request(0, 20, 50)]}


@pytest.mark.parametrize(
    ("keys", "before", "at", "output", "fits", "else_at"),
    [
        # Request 0 holds 20 pages, and is expected to take 0.7 x 49 = 34.3 of the 80 more, which
        # leaves 45.7: 14 + 30 + 1 are less, one more is not.
        ({}, FRESH, 1, 30, 14, 50),
        # After 10 decodes the ratio fell by 10 x (0.7 - 0.098) / 600 to 0.68997, so that request 0,
        # with 11 of its 50 tokens, is expected to take 26.91 of the 70 free pages more: 43.09 are
        # left, and 12 + 30 + 1 is less. (With 0.7, 42.7 would be left.)
        ({}, FRESH, 11, 30, 12, 50),
        # After request 9 has decoded 10 times and left, the ratio is 0.7 again.
        ({}, AGAIN, 12, 30, 14, 61),
        # With 10 x 0.7 > 1 request 0 is expected to take all its 49: 31 are left.
        ({"schedule_conservativeness": 10.0}, FRESH, 1, 15, 14, 50),
        # It takes them for certain.
        ({"ignore_eos": True, "caching": True}, FRESH, 1, 15, 14, 50),
        # And without the radix cache the engine sees that request 1 ends first and gives its memory
        # back, so that only its prompt and a page must be there now.
        ({"ignore_eos": True}, FRESH, 1, 15, 30, 50),
    ],
)
def test_admission_expects_a_share_of_what_may_be_generated(
    keys: dict[str, Any], before: dict[int, Any], at: int, output: int, fits: int, else_at: int
) -> None:
    """100 pages of one token. Request 0: 20 tokens, at most 50 more, of which it has one at first.

    Request 1 may come to its prompt + ``output``, + 1 page, which must be less than what is left.
    Else it is not looked at again until request 0, which needs 50 iterations, has left.
    """
    keys = dict(keys)
    caching = keys.pop("caching", False)
    for prompt, expected in ((fits, at), (fits + 1, else_at)):
        arrivals = {**before, at: [request(1, prompt, output)]}
        steps = schedule(sglang(**keys), arrivals, blocks=100, block_size=1, caching=caching)
        assert [n for n, step in enumerate(steps) if (1, prompt) in step.chunks] == [expected]


def test_who_has_generated_least_is_retracted_and_waits_behind_all_others() -> None:
    """20 pages of one token, and nobody is expected to generate anything (a ratio of 0)."""
    arrivals = {
        0: [request(0, 6, 10)],
        1: [request(1, 3, 6)],
        2: [request(2, 2, 6)],
        5: [request(3, 12, 2)],
    }
    steps = schedule(sglang(schedule_conservativeness=0.0), arrivals, blocks=20, block_size=1)
    # 0 to 2: the prompts, 11 pages. 3, 4, 5: three decodes each, and none is left. (Request 3 may
    #    come to 15 tokens, which is more than the 3 pages free at 5.)
    # 6: they need 3. All have 4 tokens; the longest prompt goes: request 0 frees its 9 pages.
    #    Now the ratio is (4 + 4 + 20 x 2) / (6 + 6 + 1), at most 1.
    # 7: 7 are free, of which the two may take 1 each: request 3 does not fit, nor is request 0
    #    looked at, behind it. The two decode for the last time.
    # 8: request 3; request 0 may come to 17 more, and has to wait. 9: request 3's last decode.
    # 10: request 0 computes 6 + 4 tokens again, which yields its fifth. 11 to 15: the rest.
    assert [step.preempted for step in steps] == [[0] if at == 6 else [] for at in range(16)]
    assert [step.free for step in steps[:8]] == [14, 11, 9, 6, 3, 0, 7, 5]
    assert chunks(steps)[:3] == [[(0, 6)], [(1, 3)], [(2, 2)]]
    assert chunks(steps)[3:] == [[]] * 5 + [[(3, 12)], [], [(0, 10)]] + [[]] * 5
    both = [[0, 1, 2]] * 3 + [[1, 2]] * 2
    assert decodes(steps)[3:] == [*both, [], [3], [], *[[0]] * 5]


def test_the_order_of_the_queue() -> None:
    """Request 2 finds two pages of its prompt cached, and may generate more than request 1."""
    shared = (("system", 8),)
    arrivals = {
        0: [request(0, 9, 1, prefix=shared)],
        1: [request(1, 20, 1), request(2, 9, 1, 2, prefix=shared)],
    }
    for name in ("fcfs", "lpm", "lof"):
        steps = schedule(sglang(schedule_policy=name), arrivals, blocks=100, caching=True)
        second = [(1, 20), (2, 1)]
        assert chunks(steps) == [[(0, 9)], second if name == "fcfs" else second[::-1]]


def test_a_prefix_is_found_when_it_has_been_computed() -> None:
    """Pages of one token. Requests 0 and 1 come together, and both compute the 32 tokens that they
    share: 80 pages. Then request 1 gives its copy back: 48 are taken. Request 2 finds them, and has
    left before the last step: then 48 are held, and two tokens of either of the others."""
    shared = (("system", 32),)
    both = [request(0, 40, 3, prefix=shared), request(1, 40, 3, prefix=shared)]
    arrivals = {0: both, 1: [request(2, 40, 2, prefix=shared)]}
    steps = schedule(sglang(), arrivals, blocks=1000, block_size=1, caching=True)
    assert chunks(steps) == [[(0, 40), (1, 40)], [(2, 8)], [], []]
    assert [step.free for step in steps] == [920, 944, 941, 948]


def test_decodes_wait_although_the_memory_is_used_up() -> None:
    """10 pages of 4 tokens, and nobody is expected to generate anything (a ratio of 0).

    36 tokens are free beside request 0. Request 1 needs fewer, 5 + 25 + a page. Counted in pages it
    leaves none: nobody else is admitted before somebody has left, and this is a prefill batch.
    """
    arrivals = {0: [request(0, 4, 3)], 1: [request(1, 5, 2, 25), request(2, 1, 1)]}
    steps = schedule(sglang(schedule_conservativeness=0.0), arrivals, blocks=10)
    assert chunks(steps) == [[(0, 4)], [(1, 5)], [], [(2, 1)], []]
    assert decodes(steps) == [[], [], [0, 1], [], [0]]


def test_with_overlap_a_retracted_request_loses_the_token_on_its_way() -> None:
    """20 pages of one token, and nobody is expected to generate anything (a ratio of 0).

    The prompts take 7, six decodes 12. For the seventh there is one page: both have 6 tokens (and
    one on its way), the longer prompt goes. Request 0 goes on to its twelfth token. When that is
    booked, request 1 computes its 4 + 6 tokens again.
    """
    arrivals = {0: [request(0, 3, 12)], 1: [request(1, 4, 11)]}
    policy, tokens = Sglang(schedule_conservativeness=0.0), Counter[int]()
    steps = schedule(policy, arrivals, blocks=20, block_size=1, in_flight=2, tokens=tokens)
    assert tokens == {0: 12, 1: 11}
    assert [step.preempted for step in steps[:9]] == [*[[]] * 8, [1]]
    assert chunks(steps)[:15] == [[(0, 3)], [(1, 4)], *[[]] * 12, [(1, 10)]]
    assert decodes(steps)[:15] == [[], [], *[[0, 1]] * 6, *[[0]] * 5, [], []]


# TensorRT-LLM's in-flight batching on schedules worked out by hand from its source


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


def test_who_never_fits_once_it_was_paused_is_an_error_that_says_so() -> None:
    """6 blocks of 4, 8 tokens an iteration: request 1 is paused with 8 + 1 tokens."""
    arrivals = {0: [request(0, 8, 6)], 1: [request(1, 8, 6)], 2: [request(2, 8, 6)]}
    policy = trtllm(capacity_scheduler_policy="max_utilization", max_num_tokens=9)
    with pytest.raises(LivelockError, match="max_num_tokens is 9, but a request has to compute 1"):
        schedule(policy, arrivals, blocks=6)


# The virtual token counter on schedules worked out by hand


def admitted(steps: list[Step]) -> list[tuple[int, int]]:
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
    assert schedule(Fair(**keys), arrivals, blocks=9) == schedule(
        Vllm(**keys, async_scheduling=False), arrivals, blocks=9
    )
