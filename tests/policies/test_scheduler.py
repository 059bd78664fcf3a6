"""The scheduler's books, step by step, and the plans it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.log import DECODE, PADDING, PREFILL, PolicyError
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.policies.request_level import RequestLevel
from sarathi_sim.policies.sarathi import Sarathi


def scheduler(policy: Policy, **options: object) -> MicroBatches:
    settings = {"max_batch": 2, "max_in_flight": 1, "kv_capacity": 100, "max_length": 20}
    return MicroBatches(policy, **(settings | options))  # type: ignore[arg-type]


def request(id: int, prompt: int, output: int) -> Request:
    return Request(id, 0.0, prompt, output, 20 - prompt)


def shape(batch: Batch | None) -> tuple[list[tuple[int, int, int]], int, int, int]:
    assert batch is not None
    chunks = [(s.id, n, context) for s, n, context in batch.chunks]
    return chunks, batch.num_decodes, batch.decode_context, batch.padding


def drain(books: MicroBatches) -> list[tuple[list[tuple[int, int, int]], int, int, int]]:
    shapes = []
    while (batch := books.next_batch()) is not None:
        shapes.append(shape(batch))
        books.complete(batch)
    return shapes


def spans(books: MicroBatches) -> list[tuple[int, ...]]:
    return [tuple(books.spans[i : i + 5]) for i in range(0, len(books.spans), 5)]


def test_a_request_takes_one_decode_less_than_it_outputs() -> None:
    books = scheduler(Sarathi(chunk_size=4, tile=1))
    books.add(request(0, 6, 3))
    # Chunks of 4 and 2; then two decodes that find 6 and 7 tokens in the cache.
    assert drain(books) == [
        ([(0, 4, 0)], 0, 0, 0),
        ([(0, 2, 4)], 0, 0, 0),
        ([], 1, 6, 0),
        ([], 1, 7, 0),
    ]
    assert spans(books) == [(0, PREFILL, 0, 0, 1), (0, DECODE, 0, 2, 3)]
    assert books.blocks.free == 100
    assert books.num_unfinished == 0


def test_finished_members_stay_as_padding() -> None:
    books = scheduler(RequestLevel())
    for each in (request(0, 4, 1), request(1, 5, 3), request(2, 3, 1)):
        books.add(each)
    assert drain(books) == [
        ([(0, 4, 0), (1, 5, 0)], 0, 0, 0),
        ([], 2, 9, 1),  # 0 is done, but computes on against its 4 tokens
        ([], 2, 10, 1),
        ([(2, 3, 0)], 0, 0, 0),
    ]
    assert spans(books) == [
        (0, PREFILL, 0, 0, 0),
        (1, PREFILL, 0, 0, 0),
        (1, DECODE, 0, 1, 2),
        (0, PADDING, 0, 1, 2),
        (2, PREFILL, 0, 3, 3),
    ]


class Scripted:
    """Plans what the test says."""

    holds_finished = False

    def __init__(self, *plans: Callable[[View], Plan | None]) -> None:
        self.plans = list(plans)

    def plan(self, view: View) -> Plan | None:
        return self.plans.pop(0)(view) if self.plans else None


def test_a_skipped_decode_waits_and_loses_nothing() -> None:
    def both(view: View) -> Plan:
        return Plan(tuple((s, s.prompt_tokens) for s in view.waiting))

    def skip_first(view: View) -> Plan:
        return Plan(skip=(next(iter(view.decoding)),))

    def all_run(view: View) -> Plan:
        return Plan()

    books = scheduler(Scripted(both, skip_first, skip_first, all_run, all_run))
    books.add(request(0, 4, 3))
    books.add(request(1, 5, 4))
    assert drain(books) == [
        ([(0, 4, 0), (1, 5, 0)], 0, 0, 0),
        ([], 1, 5, 0),
        ([], 1, 6, 0),
        ([], 2, 4 + 7, 0),  # request 1 is done after this one
        ([], 1, 5, 0),
    ]
    assert spans(books) == [
        (0, PREFILL, 0, 0, 0),
        (1, PREFILL, 0, 0, 0),
        (1, DECODE, 0, 1, 3),
        (0, DECODE, 0, 3, 4),
    ]


def test_the_free_pool_fills_a_micro_batch_from_others_that_are_back() -> None:
    books = scheduler(Orca(max_prefills=1), max_batch=3, max_in_flight=2, free_pool=True)
    for i in range(2):
        books.add(request(i, 4, 4))
    first, second = books.next_batch(), books.next_batch()
    assert first and second
    books.complete(first)
    books.complete(second)
    # Both are back when the next batch is formed: it takes in the other one's member.
    merged = books.next_batch()
    assert shape(merged) == ([], 2, 8, 0)
    assert books.next_batch() is None
    assert merged
    assert [s.id for s in merged.decodes] == [0, 1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda view: Plan(((view.waiting[0], 5),)), "chunk of 5 tokens does not fit"),
        (lambda view: Plan(((view.waiting[0], 0),)), "chunk of 0 tokens does not fit"),
        (lambda view: Plan(tuple((s, 4) for s in view.waiting)), "without a free slot"),
        (lambda view: Plan(), "the plan is empty"),
        (lambda view: Plan(skip=(view.waiting[0],)), "does not decode"),
        (lambda view: Plan(skip=(view.waiting[0],) * 2), "skips a sequence twice"),
        (lambda view: Plan(((view.waiting[0], 2),) * 2), "two chunks of"),
        (lambda view: Plan(((Sequence(9, 4, 4, 4), 2),)), "neither waiting nor a member"),
    ],
)
def test_impossible_plans_are_refused(plan: Callable[[View], Plan | None], message: str) -> None:
    books = scheduler(Scripted(plan))
    for i in range(3):
        books.add(request(i, 4, 2))
    with pytest.raises(PolicyError, match=message):
        books.next_batch()


def test_requests_that_can_never_fit_are_rejected_with_a_reason() -> None:
    books = scheduler(Orca(), kv_capacity=15, reserve_declared=True)
    assert books.add(Request(0, 0.0, 10, 2, 4)) is None
    reason = books.add(Request(1, 0.0, 10, 2, 8))
    assert reason == "reserves 18 KV tokens, but the replica holds 15"
    reason = books.add(Request(2, 0.0, 15, 2, 8))
    assert reason is not None and "needs 23 tokens" in reason and "max_length is 20" in reason


@pytest.mark.parametrize("name", ["max_batch", "max_in_flight", "kv_capacity", "max_length"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        scheduler(Orca(), **{name: 0})


def test_padding_needs_bound_micro_batches() -> None:
    with pytest.raises(ValueError, match="bound"):
        scheduler(RequestLevel(), free_pool=True)
