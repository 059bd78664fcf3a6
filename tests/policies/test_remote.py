"""Prompts that are computed elsewhere, by hand from each engine's source. Any requests are in
``tests/simulator/test_two_pools.py``, with the textbook's pools beside ours."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import ACCEPTED, DRAFTED, HIT_AGAIN, LOST, REMOTE
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import OutputLengths
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.policies.vllm import Vllm


def asked(id: int, prompt: int, output: int, *, computed: int = 0, sends: bool = False) -> Request:
    return Request(
        id, float(id), prompt, output, output, remote_tokens=computed, sends_kv=sends
    )  # fmt: skip


class Hand:
    """A pool whose driver is the test."""

    def __init__(
        self, policy: PoolPolicy, blocks: int, block_size: int, requests: list[Request]
    ) -> None:
        self.pool = Pool(policy, Blocks(blocks + 1, block_size), max_length=10_000)
        for request in requests:
            assert self.pool.add(request) is None

    def step(self) -> tuple[list[tuple[int, int, int]], list[int]] | None:
        """An iteration, if there is one: its chunks (id, tokens, context), and who decodes."""
        batch = self.pool.next_batch()
        if batch is None:
            return None
        chunks = [(sequence.id, tokens, context) for sequence, tokens, context in batch.chunks]
        decodes = sorted(sequence.id for sequence in batch.decodes)
        self.pool.complete(batch)
        return chunks, decodes

    def steps(self, count: int) -> list[list[int]]:
        """Who decodes in so many iterations, which hold no prompts."""
        found = []
        for _ in range(count):
            step = self.step()
            assert step is not None and not step[0]
            found.append(step[1])
        return found

    def reserved(self) -> list[int]:
        ids = [sequence.id for sequence in self.pool.reserved]
        self.pool.reserved.clear()
        return ids

    @property
    def free(self) -> int:
        return self.pool.blocks.free


def test_vllm_promises_blocks_to_requests_whose_kv_is_on_its_way() -> None:
    """``Scheduler.schedule``: ``reserved_blocks`` are what loads and prompts under way still need.
    Of six blocks the first two requests hold four, and need one more each for their last token."""
    requests = [asked(i, prompt, 3, computed=prompt - 1) for i, prompt in enumerate([9, 9, 5])]
    hand = Hand(Vllm(async_scheduling=False), 6, 4, requests)
    assert hand.step() is None
    assert (hand.reserved(), hand.free, len(hand.pool.loading)) == ([0, 1], 2, 2)
    assert hand.step() is None, "nothing has arrived"
    assert hand.reserved() == []
    hand.pool.received([1])
    assert hand.step() == ([(1, 1, 8)], [])  # its last prompt token yields the first one
    assert (hand.free, len(hand.pool.loading)) == (1, 1)
    assert hand.reserved() == [], "one block is left, and promised"
    hand.pool.received([0])
    assert hand.step() == ([(0, 1, 8)], [1])
    assert hand.reserved() == []
    assert hand.step() == ([], [0, 1])  # the second ends
    assert hand.step() == ([], [0])
    assert (hand.reserved(), hand.free) == ([2], 5)


def test_vllm_serves_arrived_requests_first_but_only_so_many() -> None:
    """``kv_holding_waiting`` is drained before ``waiting``, and counts for no slot."""
    requests = [asked(0, 6, 2, computed=5), asked(1, 6, 2, computed=5), asked(2, 3, 1)]
    hand = Hand(Vllm(max_num_seqs=1, async_scheduling=False), 20, 4, requests)
    assert hand.step() == ([(2, 3, 0)], [])  # it overtakes those whose KV is on its way
    assert hand.reserved() == [0, 1]
    hand.pool.received([1, 0])
    assert hand.step() == ([(0, 1, 5)], [])
    assert hand.step() == ([], [0])
    assert hand.step() == ([(1, 1, 5)], [])
    with pytest.raises(KeyError):
        hand.pool.received([1])


@pytest.mark.parametrize(
    "policy",
    [
        Vllm(async_scheduling=False),
        Trtllm(disable_overlap_scheduler=True),
        Sglang(disable_overlap_schedule=True),
    ],
)
def test_a_prefill_worker_holds_what_it_sends(policy: PoolPolicy) -> None:
    """vLLM: ``request_finished`` returns True, and the blocks are freed on ``finished_sending``.
    TensorRT-LLM: DISAGG_CONTEXT_TRANS_IN_PROGRESS. SGLang: ``disagg_prefill_inflight_queue``."""
    requests = [asked(i, 8, 50, sends=True) for i in range(2)]
    hand = Hand(policy, 3, 4, requests)
    assert hand.step() == ([(0, 8, 0)], [])
    assert (hand.free, hand.pool.num_unfinished) == (1, 1), "it ended with its first token"
    assert hand.step() is None
    hand.pool.sent(0)
    assert hand.step() == ([(1, 8, 0)], [])
    hand.pool.sent(1)
    assert hand.free == 3


def test_what_a_prefill_worker_of_sglang_sends_counts_as_running() -> None:
    """``get_num_allocatable_reqs``: a request holds its row of ``req_to_token_pool`` until its KV
    was sent. Of 100 blocks 98 are free, but there is one row."""
    policy = Sglang(max_running_requests=1, disable_overlap_schedule=True)
    hand = Hand(policy, 100, 4, [asked(i, 8, 50, sends=True) for i in range(2)])
    assert hand.step() == ([(0, 8, 0)], [])
    assert (hand.step(), hand.free) == (None, 98)
    hand.pool.sent(0)
    assert hand.step() == ([(1, 8, 0)], [])


def trtllm(slots: int, capacity: Any) -> Trtllm:
    return Trtllm(64, slots, capacity, disable_overlap_scheduler=True)


def test_trtllm_waits_for_a_slot() -> None:
    """``_fetch_new_requests``: requests in DISAGG_GENERATION_TRANS_IN_PROGRESS are active ones, of
    which there are at most ``max_batch_size``."""
    requests = [asked(0, 4, 3, computed=4), asked(1, 8, 3, computed=8)]
    hand = Hand(trtllm(1, "guaranteed_no_evict"), 8, 4, requests)
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([0], 7)
    hand.pool.received([0])
    assert hand.steps(2) == [[0], [0]]  # its second and its third token
    assert hand.reserved() == []
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([1], 6)


def test_trtllm_reserves_what_its_capacity_policy_says() -> None:
    """``capacityScheduler.cpp``: GuaranteedNoEvict counts all tokens that each may still have
    (two and three of four blocks), MaxUtilization the prompt's (one and two)."""
    requests = [asked(0, 4, 3, computed=4), asked(1, 8, 3, computed=8)]
    hand = Hand(trtllm(2, "guaranteed_no_evict"), 4, 4, requests)
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([0], 3)
    hand = Hand(trtllm(2, "max_utilization"), 4, 4, requests)
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([0, 1], 1)
    hand.pool.received([0, 1])
    # Both need a block, and one is free: the later one is paused, and computes all of it again.
    assert hand.steps(2) == [[0], [0]]
    assert hand.step() == ([(1, 9, 0)], [])


def sglang(running: int = 8) -> Sglang:
    return Sglang(max_running_requests=running, disable_overlap_schedule=True)


@pytest.mark.parametrize("policy", [trtllm(2, "guaranteed_no_evict"), sglang()])
def test_drafts_begin_with_the_first_decode(policy: PoolPolicy) -> None:
    """The first token is known, so the second is verified with drafts. With two that hold of three,
    decodes yield tokens 2 to 4, 5 to 7 and the last one, after which none may hold."""
    pool = Pool(policy, Blocks(4097, 1), max_length=10_000, draft_length=3)
    pool.endings = OutputLengths(lambda id, known, drafts: 2)
    assert pool.add(asked(0, 8, 8, computed=8)) is None
    assert pool.next_batch() is None
    pool.received([0])
    for known in (9, 12, 15):
        batch = pool.next_batch()
        assert batch is not None and not batch.chunks and pool.repeats(batch) == 0
        ((sequence, tokens, context),) = batch.verified
        assert (tokens, context, sequence.target) == (4, known - 1, known)
        ended = pool.complete(batch)
    assert ended == [sequence]
    assert pool.events[-6:].tolist() == [0, DRAFTED, 9, 0, ACCEPTED, 4]
    assert pool.blocks.free == pool.blocks.capacity


def test_sglang_keeps_memory_beside_each_request() -> None:
    """``pop_preallocated``: of 1,280 tokens the first request takes a page of 64; the second needs
    192 + 512, and 1,216 - 512 are left; the third needs 64 + 512, and 1,024 - 2 x 512 are not."""
    requests = [asked(i, prompt, 3, computed=prompt) for i, prompt in enumerate([64, 140, 20])]
    hand = Hand(sglang(), 20, 64, requests)
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([0, 1], 16)
    hand.pool.received([0])
    assert hand.steps(2) == [[0], [0]]
    assert (hand.reserved(), hand.free) == ([], 17)
    assert hand.step() is None
    assert (hand.reserved(), hand.free) == ([2], 16)  # 1,088 - 512 tokens are left for it


def test_sglang_has_slots_for_waiting_requests_on_small_workers() -> None:
    """``disaggregation_decode_extra_slots``: twice as many beside up to 32 running ones."""
    requests = [asked(i, 4, 3, computed=4) for i in range(4)]
    hand = Hand(sglang(1), 8192, 4, requests)
    assert hand.step() is None
    assert hand.reserved() == [0, 1, 2]
    hand.pool.received([0, 1, 2])
    assert hand.steps(3) == [[0], [0], [1]]  # one at a time (``get_new_prebuilt_batch``)
    assert hand.reserved() == [3]
    hand = Hand(sglang(33), 100_000, 4, [asked(i, 4, 3, computed=4) for i in range(40)])
    assert hand.step() is None
    assert hand.reserved() == list(range(33))


def test_sglang_keeps_the_kv_of_retracted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """``process_decode_queue``: they get memory before new ones, and go on where they were
    (``restore_kv_cache``). Twenty tokens hold two prompts of four and six tokens more of each."""
    monkeypatch.setattr("sarathi_sim.policies.sglang.RESERVED_DECODE_TOKENS", 0)
    requests = [asked(i, 4, 12, computed=4) for i in range(2)]
    hand = Hand(sglang(), 20, 1, requests)
    assert hand.step() is None
    assert hand.reserved() == [0, 1]
    hand.pool.received([0, 1])
    assert hand.steps(6) == [[0, 1]] * 6
    assert hand.free == 0
    assert hand.pool.add(asked(2, 2, 2, computed=2)) is None
    assert hand.steps(5) == [[0]] * 5  # 11 tokens of the retracted one are known, 10 had KV
    assert hand.reserved() == [], "the one that was retracted waits for ten tokens"
    assert hand.steps(1) == [[1]]
    assert hand.reserved() == [2]
    hand.pool.received([2])
    assert hand.steps(4) == [[1, 2], [1], [1], [1]]
    assert hand.step() is None
    events = list(hand.pool.events)
    rows = [tuple(events[i : i + 3]) for i in range(0, len(events), 3)]
    assert rows == [
        (0, REMOTE, 4),
        (1, REMOTE, 4),
        (1, LOST, 10),
        (1, HIT_AGAIN, 10),
        (2, REMOTE, 2),
    ]
