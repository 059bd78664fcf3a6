"""Prompts that are computed elsewhere: what holds for all engines, the textbook's pool beside ours,
and each engine by hand from its source."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import LOST, REMOTE, LivelockError
from sarathi_sim.policies.policy import cached_blocks_of
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.radix import RadixBlocks
from sarathi_sim.policies.request import Prefix, Request
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.policies.vllm import Vllm
from tests.simulator.pools import sglang_policies, vllm_policies
from tests.textbook.blocks import TextbookBlocks
from tests.textbook.pool import Row, TextbookPool
from tests.textbook.radix import TextbookRadix

MAX_LENGTH = 160
LONGEST = 20_000  # steps

# Any requests, on both pools ------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """A worker with requests. ``takes`` are the steps from when its memory is reserved until a
    request's KV is there, or from its end until it is sent; who ``fails`` gets none."""

    policy: PoolPolicy
    num_blocks: int
    block_size: int
    caching: bool
    depth: int
    requests: list[Request]
    takes: list[int]
    fails: frozenset[int] = frozenset()

    def pool(self) -> Pool:
        blocks = cached_blocks_of(self.policy) if self.caching else Blocks
        memory = blocks(self.num_blocks, self.block_size)
        return Pool(self.policy, memory, max_in_flight=self.depth, max_length=MAX_LENGTH)

    def textbook(self) -> TextbookPool:
        blocks = TextbookBlocks(self.num_blocks, self.block_size, self.caching)
        if self.caching and cached_blocks_of(self.policy) is RadixBlocks:
            blocks = TextbookRadix(self.num_blocks, self.block_size)
        return TextbookPool(self.policy, blocks, MAX_LENGTH, 1, check=True)


@st.composite
def trtllm_policies(draw: st.DrawFn) -> Trtllm:
    return Trtllm(
        400,
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from(["guaranteed_no_evict", "max_utilization"])),
        disable_overlap_scheduler=draw(st.booleans()),
    )


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    """Any small worker. (A real one has prompts of one kind.)"""
    policy = draw(st.one_of(vllm_policies(), sglang_policies(), trtllm_policies()))
    of_vllm = isinstance(policy, Vllm)
    rows = st.tuples(
        st.integers(1, 60), st.integers(2, 20), st.integers(0, 8), st.integers(0, 60),
        st.integers(0, 2), st.integers(0, 90), st.integers(0, 3),
        st.sampled_from(["remote", "remote", "local", "sends"]),
    )  # fmt: skip
    requests = []
    found = draw(st.lists(rows, min_size=1, max_size=16))
    found.sort(key=lambda row: row[3])
    for id, (prompt, output, slack, at, priority, shared, group, kind) in enumerate(found):
        until = min(shared, prompt + output - 1)
        prefix: Prefix = ((("group", group), until),) if group and until else ()
        remote = prompt - of_vllm if kind == "remote" else 0
        requests.append(
            Request(
                id, float(at), prompt, output, output + slack, priority, prefix,
                remote_tokens=remote, sends_kv=kind == "sends",
            )
        )  # fmt: skip
    count = len(requests)
    fails = draw(st.frozensets(st.integers(0, count - 1), max_size=2)) if of_vllm else frozenset()
    return Worker(
        policy,
        draw(st.sampled_from([26, 40, 200])),
        draw(st.sampled_from([1, 3, 4])),
        draw(st.booleans()),
        1 + policy.ahead,
        requests,
        draw(st.lists(st.integers(0, 15), min_size=count, max_size=count)),
        fails,
    )


class Twins:
    """Our pool and the textbook's, step by step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pool, self.book = worker.pool(), worker.textbook()
        self.flight: deque[tuple[Batch, list[Row]]] = deque()
        self.due: list[tuple[int, int]] = []  # when what is sent to or from whom is there
        self.ended: set[int] = set()
        self.rejected: set[int] = set()
        self.processed = 0
        self.step = 0

    def run(self) -> None:
        coming = deque(self.worker.requests)
        while coming or self.pool.num_unfinished or self.due:
            while coming and coming[0].arrival_s <= self.step:
                request = coming.popleft()
                accepted = self.pool.add(request) is None
                assert self.book.add(request) == accepted
                if not accepted:
                    self.rejected.add(request.id)
            self.form()
            if len(self.flight) == self.worker.depth:
                self.book_oldest()
            self.step += 1
            self.send()
            assert self.step < LONGEST, "it goes round for ever"
        while self.flight:
            self.book_oldest()

    def form(self) -> None:
        """Both decide the same."""
        pool, book = self.pool, self.book
        batch = pool.form()
        theirs, rows = book.form()
        assert sorted((s.id, n, c) for s, n, c in batch.chunks) == sorted(
            (s.id, n, c) for s, n, c in theirs.chunks
        )
        decodes = list(batch.decodes)
        assert sorted(s.id for s in decodes) == sorted(s.id for s in theirs.members())
        assert batch.decode_context == theirs.decode_context
        for name in ("waiting", "loading", "running", "reserved"):
            ours, others = getattr(pool, name), getattr(book, name)
            assert [s.id for s in ours] == [s.id for s in others], name
        assert pool.blocks.free == book.blocks.free
        assert list(pool.events) == [number for event in book.events for number in event]
        assert pool.holding == book.holding == len(pool.loading)
        self.processed += batch.num_tokens
        self.flight.append((batch, rows))
        for sequence in pool.reserved:
            self.wait_for(sequence.id)
        pool.reserved.clear()
        book.reserved.clear()

    def wait_for(self, id: int) -> None:
        self.due.append((self.step + self.worker.takes[id], id))

    def book_oldest(self) -> None:
        batch, rows = self.flight.popleft()
        ended = [s.id for s in self.pool.complete(batch)]
        before = {m.request.id for m in self.book.members.values() if m.finish_s >= 0}
        self.book.returned(rows, float(self.step))
        after = {m.request.id for m in self.book.members.values() if m.finish_s >= 0}
        assert sorted(ended) == sorted(after - before)
        assert not self.ended & set(ended)
        self.ended |= set(ended)
        assert self.pool.sending.keys() == self.book.sending.keys()
        for id in ended:
            if id in self.pool.sending:
                self.wait_for(id)

    def send(self) -> None:
        there = [id for at, id in self.due if at < self.step]
        self.due = [each for each in self.due if each[0] >= self.step]
        sent = [id for id in there if id in self.pool.sending]
        failed = [id for id in there if id not in sent and id in self.worker.fails]
        received = [id for id in there if id not in sent and id not in failed]
        for pool in (self.pool, self.book):
            pool.received(received)
            pool.failed(failed)
            for id in sent:
                pool.sent(id)


@settings(max_examples=300, deadline=None)
@given(workers())
def test_any_worker_is_the_textbooks(worker: Worker) -> None:
    """Invariants 1 and 2, and every decision."""
    twins = Twins(worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sarathi_sim.policies.sglang.RESERVED_DECODE_TOKENS", 12)
        try:
            twins.run()
        except LivelockError:
            reject()
    pool = twins.pool
    assert twins.ended | twins.rejected == {request.id for request in worker.requests}
    assert pool.blocks.free == pool.blocks.capacity
    assert not (pool.running or pool.waiting or pool.loading or pool.sending)
    served = [request for request in worker.requests if request.id in twins.ended]
    due = sum(r.prompt_tokens + (0 if r.sends_kv else r.output_tokens - 1) for r in served)
    events = [pool.events[place : place + 3] for place in range(0, len(pool.events), 3)]
    lost = sum(tokens for _, what, tokens in events if what == LOST)
    had = sum(tokens for _, what, tokens in events if what != LOST)
    if not worker.policy.ahead:  # (which computes tokens in vain)
        assert due <= twins.processed + had <= due + lost
    sent = {id: tokens for id, what, tokens in events if what == REMOTE}
    assert len(sent) == sum(what == REMOTE for _, what, _ in events), "something was sent twice"
    assert all(tokens <= worker.requests[id].remote_tokens for id, tokens in sent.items())
