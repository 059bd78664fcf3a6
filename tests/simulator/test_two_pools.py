"""Prefill and decode workers: schedules by hand, and invariants over both pools.

By hand, times are in units of 2^-10 s: an iteration takes one for each of its tokens (a prefill
token or a decode), a prompt token one on its worker's link, and a transfer two more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.log import LOST
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.trtllm import Trtllm
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.simulator.loop.handover import Handover, simulate_pools
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.loop.simulation import ClosedLoop, Replicas
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator.oracle import assert_equal_log, closed_loop, with_ranks
from tests.simulator.pools import (
    PoolSystem,
    served,
    sglang_policies,
    shared_requests,
    trtllm_policies,
    vllm_policies,
)
from tests.textbook.two_pools import TextbookWorkers, TwoPools

UNIT = 2.0**-10
#: Prompt and output of five requests; the last one arrives at 20, the others at 0.
FIVE = [(8, 3), (12, 4), (8, 3), (4, 1), (6, 2)]
OVER = Handover(first_token_known=False, token_s=UNIT, latency_s=2 * UNIT)


def unit_each(batch: Batch) -> tuple[float, float, float, float]:
    return (batch.prefill_tokens + batch.num_decodes) * UNIT, 0.0, 0.0, 0.0


def workers(
    count: int, blocks: int = 100, seqs: int = 8, size: int = 4, caching: bool = False, **about: Any
) -> Replicas:
    """Replicas of vLLM with blocks of a few tokens, one of which is never used."""
    policy = Vllm(64, seqs, async_scheduling=False)
    kind = policy.cached_blocks if caching else Blocks
    schedulers = [
        Pool(policy, kind(blocks, size), max_in_flight=1, max_length=100) for _ in range(count)
    ]
    return Replicas(schedulers, unit_each, (1,), **about)


def five() -> list[Request]:
    return [Request(i, 20 * UNIT * (i == 4), p, o, o) for i, (p, o) in enumerate(FIVE)]


def run(handover: Handover = OVER, **options: Any) -> Records:
    """Two prefill workers that take a prompt at a time, and a decode worker with room for 24
    tokens."""
    return simulate_pools(five(), workers(2, seqs=1), workers(1, blocks=7), handover, **options)


def handed(records: Records) -> Any:
    assert records.handovers is not None
    return records.handovers


def columns(records: Records, *names: str) -> list[list[float | None]]:
    table = Analysis(records).request_columns
    return [[None if np.isnan(v) else v / UNIT for v in table[name]] for name in names]


def test_prefill_first_by_hand() -> None:
    """In turn 0, 2 and 4 go to one prefill worker, 1 and 3 to the other.

    The decode worker has six blocks. It reserves two for request 0 at 8, three for 1 at 12. Then
    one is left: 2, whose prompt ends at 16, waits until 0 ends at 21, and 4 (prefilled 20 to 26)
    until 1 ends at 30. What was received runs its last prompt token, and then its decodes.
    """
    records = run()
    over = handed(records)
    assert over.prefill_logs == 2
    assert over.prefilled_on.tolist() == [0, 1, 0, 1, 0]
    assert records.replica.tolist() == [2, 2, 2, 1, 2]
    assert (over.prefill_end_s / UNIT).tolist() == [8, 12, 16, 16, 26]
    assert (over.reserved_s[[0, 1, 2, 4]] / UNIT).tolist() == [8, 12, 21, 30]
    # One link sends 0 until 16, 2 from 21 to 29, and 4 from 30 to 36; the other one 1 until 24.
    assert (over.received_s[[0, 1, 2, 4]] / UNIT).tolist() == [18, 26, 31, 38]
    start_s, queueing, ttft, finish, slot, sent = columns(
        records, "arrival_s", "queueing_s", "ttft_s", "finish_s", "slot_s", "transfer_s"
    )
    assert start_s == [0, 0, 0, 0, 20] and queueing == [0, 0, 8, 12, 0]
    assert ttft == [19, 27, 32, 16, 19]
    assert finish == [21, 30, 34, 16, 40]
    assert slot == [0, 0, 5, None, 4]
    assert sent == [10, 14, 10, None, 8]
    prefill, longest, tpot = columns(records, "prefill_s", "tbt_max_s", "tpot_s")
    assert prefill == [8, 12, 8, 4, 6]
    assert longest == [1, 1, 1, None, 1] and tpot == [1, 1, 1, None, 1]


def test_prompts_wait_for_one_anothers_setup_but_not_for_what_is_on_the_way() -> None:
    """Three prompts of 4, computed together until 12, on one link: each takes 3 and 4 there, and
    then 2."""
    requests = [Request(i, 0.0, 4, 3, 3) for i in range(3)]
    over = replace(OVER, setup_s=3 * UNIT)
    found = handed(simulate_pools(requests, workers(1), workers(1), over))
    assert (found.prefill_end_s / UNIT).tolist() == [12, 12, 12]
    assert (found.received_s / UNIT).tolist() == [12 + 7 + 2, 12 + 14 + 2, 12 + 21 + 2]


def test_decode_reserves_first_by_hand() -> None:
    """Blocks of the decode worker are reserved at 0 for 0 and 1, which go to their prefill workers
    then; 3, which needs none, is on its worker before 1. Request 2 waits until 0 ends at 21, and 4
    until 1 ends at 34: only then are they prefilled."""
    records = run(replace(OVER, order="decode_reserves_first"))
    over = handed(records)
    assert (over.reserved_s[[0, 1, 2, 4]] / UNIT).tolist() == [0, 0, 21, 34]
    assert (over.prefill_end_s / UNIT).tolist() == [8, 16, 29, 4, 40]
    assert (over.received_s[[0, 1, 2, 4]] / UNIT).tolist() == [18, 30, 39, 48]
    ttft, finish, slot, sent = columns(records, "ttft_s", "finish_s", "slot_s", "transfer_s")
    assert ttft == [19, 31, 40, 4, 29]
    assert finish == [21, 34, 42, 4, 50]
    assert slot == [0, 0, 21, None, 14]
    assert sent == [10, 14, 10, None, 8]


def test_the_numbers_of_a_run_count_both_pools() -> None:
    records = run()
    analysis = Analysis(records)
    assert analysis.ledger["replica"].tolist() == [0, 1, 2]
    assert (analysis.ledger["busy_s"] / UNIT).tolist() == [22, 16, 4 + 2 + 3 + 2 + 1]
    # Prompt tokens, the last of each but one once more, and all later outputs but the first.
    tokens = sum(p for p, _ in FIVE) + 4 + sum(o - 1 for _, o in FIVE)
    ran = analysis.iterations
    assert int(ran["prefill_tokens"].sum() + ran["decodes"].sum()) == tokens
    # Three tokens after the first of two requests, and so on: all came a unit after the last one.
    assert analysis.tbt_quantiles([0.0, 1.0]) == [UNIT, UNIT]


@pytest.mark.parametrize("order", ["prefill_first", "decode_reserves_first"])
def test_a_hit_is_remote_only_where_a_prefill_worker_had_the_prompt(order: Any) -> None:
    """The second request has the prompt of the first, which the decode worker's prefix cache has by
    then: but for the last token, which is always computed. If the decode worker reserves first, no
    prefill worker sees it, so these seven tokens are a hit; else they were computed once more."""
    prefix = (("same", 8),)
    both = [Request(i, 100 * UNIT * i, 8, 3, 3, 0, prefix) for i in range(2)]
    prefill, decode = (workers(1, blocks=40, size=1, caching=caching) for caching in (False, True))
    records = simulate_pools(both, prefill, decode, replace(OVER, order=order))
    over, first = handed(records), order == "prefill_first"
    assert over.prefilled_on.tolist() == [0, 0 if first else -1]
    assert np.isnan(over.received_s).tolist() == [False, True]
    found = Analysis(records).request_columns
    assert found["hit_tokens"].tolist() == [0, 0 if first else 7]
    for name, absent in (("prefill_s", not first), ("slot_s", True), ("transfer_s", True)):
        assert np.isnan(found[name]).tolist() == [False, absent]
    computed = [log.iterations["prefill_tokens"].sum() for log in records.replicas]
    assert computed == [16 if first else 8, 2]


def test_a_link_sends_one_prompt_after_the_other() -> None:
    """Two prompts of one batch end together; the decode worker has blocks for both at once."""
    both = [Request(i, 0.0, 8, 2, 2) for i in range(2)]
    records = simulate_pools(both, workers(1), workers(1), OVER)
    over = handed(records)
    assert (over.prefill_end_s / UNIT).tolist() == [16, 16]
    assert (over.reserved_s / UNIT).tolist() == [16, 16]
    assert (over.received_s / UNIT).tolist() == [26, 34]


def test_frontends_count_for_themselves() -> None:
    """Two frontends take turns; each sends its first request to the first worker."""
    requests = [Request(i, i * UNIT / 8, 8, 2, 2) for i in range(8)]
    found = []
    for frontends in (1, 2):
        over = replace(OVER, frontends=frontends)
        records = simulate_pools(requests, workers(2), workers(2), over)
        found.append(handed(records).prefilled_on.tolist())
    assert found == [[0, 1] * 4, [0, 0, 1, 1] * 2]


@pytest.mark.parametrize("order", ["prefill_first", "decode_reserves_first"])
def test_one_request_alone_takes_its_prefill_and_its_decodes(order: Any) -> None:
    """With a link that takes no time; the decode worker computes the last prompt token again."""
    over = Handover(order, first_token_known=False)
    records = simulate_pools([Request(5, 0.0, 40, 7, 9)], workers(1), workers(1), over)
    ttft, finish, slot, sent = columns(records, "ttft_s", "finish_s", "slot_s", "transfer_s")
    assert (ttft, finish, slot, sent) == ([41], [47], [0], [0])


def test_a_client_is_answered_when_its_request_ends_on_the_decode_worker() -> None:
    records = run(clients=ClosedLoop(1, np.zeros(5)))
    arrival, finish = columns(records, "arrival_s", "finish_s")
    assert arrival == [0, *finish[:-1]]


def test_what_one_pool_can_never_hold_is_rejected_at_once() -> None:
    """The prefill worker needs blocks for the prompt alone, the decode worker for all tokens."""
    requests = [Request(0, 0.0, 30, 2, 2), Request(1, 0.0, 20, 10, 10), Request(2, 0.0, 8, 4, 4)]
    records = simulate_pools(requests, workers(1, blocks=8), workers(1, blocks=6), OVER)
    assert records.rejections == {
        0: "needs 8 KV blocks, but the replica holds 7",
        1: "needs 8 KV blocks, but the replica holds 5",
    }
    assert records.replica.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("order", ["prefill_first", "decode_reserves_first"])
def test_kv_that_a_decode_worker_has_in_its_cache_is_not_sent(order: Any) -> None:
    """Request 1 has the prompt of 0, whose eight tokens before the last one are two blocks. It
    decodes from 100, or 101 after a prefill of its last token, and its prefill worker is told at
    once: of its four blocks request 2 needs three from 101, long before 1 ends. Nobody is on this
    worker then, so it is chosen again."""

    def cached(count: int, blocks: int) -> Replicas:
        return workers(count, blocks, caching=True, router="least_requests")

    prefix = ((("same", 0), 9),)
    rows = [(0, 9, 3, prefix), (100, 9, 30, prefix), (101, 10, 3, ())]
    requests = [Request(i, at * UNIT, p, d, d, 0, of) for i, (at, p, d, of) in enumerate(rows)]
    records = simulate_pools(requests, cached(2, 5), cached(1, 40), replace(OVER, order=order))
    over, first = handed(records), order == "decode_reserves_first"
    assert over.prefilled_on.tolist() == [0, -first, 0]
    ends = over.prefill_end_s / UNIT
    assert np.array_equal(ends, [9, np.nan if first else 101, 111], equal_nan=True)
    assert np.isnan(over.reserved_s[1]) and np.isnan(over.received_s[1])
    assert columns(records, "ttft_s") == [[21, 1 if first else 2, 24]]
    for log in records.replicas:
        assert (np.diff(log.iterations["ready_s"]) > 0).all()


def step_each(step: Any) -> Any:
    """A rank takes a unit for each of its tokens, and waits for the others."""
    times = [unit_each(batch) if batch else (0.0,) * 4 for batch in step]
    return times, max(times)


def test_a_rank_of_a_prefill_worker_waits_until_kv_is_sent() -> None:
    """Two ranks with blocks for a prompt each: both work until 8, send on a link each until 16, and
    nothing happens on the first until its KV arrived at 18. Both prompts' last tokens end at 20."""
    ranks = replace(workers(2, blocks=4), predict=step_each, ranks=2)
    requests = [Request(i, 0.0, 8, 2, 2) for i in range(3)]
    records = simulate_pools(requests, ranks, workers(1), OVER)
    over = handed(records)
    assert over.prefill_logs == 2
    assert over.prefilled_on.tolist() == [0, 0, 0] and records.replica.tolist() == [2, 2, 2]
    assert (over.prefill_end_s / UNIT).tolist() == [8, 8, 26]
    assert (over.received_s / UNIT).tolist() == [18, 18, 36]
    assert columns(records, "queueing_s", "ttft_s") == [[0, 0, 18], [20, 20, 37]]
    assert [records.called(n) for n in range(3)] == [
        *("prefill 0 rank 0", "prefill 0 rank 1", "decode 0")
    ]


def test_a_prompt_whose_only_token_the_decode_worker_computes_is_not_sent() -> None:
    """vLLM computes the last prompt token again: of a single one it needs no KV."""
    for order in ("prefill_first", "decode_reserves_first"):
        over = replace(OVER, order=order)
        records = simulate_pools([Request(5, 0.0, 1, 3, 3)], workers(1), workers(1), over)
        assert columns(records, "ttft_s", "finish_s", "slot_s") == [[2], [4], [None]]


def test_no_time_per_token_where_the_second_token_comes_with_the_first() -> None:
    """A prefill worker knows the first token, which goes out with the first decode step's: computed
    until 4, sent until 8, there at 10, and out at 11. Of two tokens none follows; the third of
    three follows a unit later, half of it for each."""
    over = replace(OVER, first_token_known=True)
    requests = [Request(0, 0.0, 4, 2, 2), Request(1, 100 * UNIT, 4, 3, 3)]
    both = [
        replace(
            workers(1),
            schedulers=[Pool(Trtllm(64, 8), Blocks(100, 4), max_in_flight=1, max_length=99)],
        )
        for _ in range(2)
    ]
    records = simulate_pools(requests, *both, over)
    ttft, tpot = columns(records, "ttft_s", "tpot_s")
    assert ttft == [11, 11] and tpot == [None, 0.5]
    summary = Analysis(records).after_warmup()
    assert summary["tpot_s"]["p50"] == summary["tpot_s"]["mean"] == 0.5 * UNIT


# Against the textbook -------------------------------------------------------------------------


def about(half: PoolSystem) -> tuple[Any, ...]:
    around = (half.switches, half.router, half.admission_s, half.ranks, half.rank_router)
    return (half.times, half.layers, *around)


def fast_workers(half: PoolSystem) -> Replicas:
    return Replicas(half.pools(), *about(half))


@dataclass(frozen=True)
class TwoPoolSystem:
    """Two pools, what goes between them, and their requests."""

    prefill: PoolSystem
    decode: PoolSystem
    handover: Handover
    requests: list[Request]
    clients: int

    @property
    def loop(self) -> ClosedLoop | None:
        return closed_loop(self.clients, 0.02, len(self.requests))

    def fast(self, *halves: Replicas) -> Records:
        both = halves or map(fast_workers, (self.prefill, self.decode))
        return served(
            simulate_pools, self.requests, *both, self.handover, seed=7, clients=self.loop
        )

    def textbook(self) -> TwoPools:
        halves = [
            TextbookWorkers(half.replicas, half.policy, *about(half), options=half.options)
            for half in (self.prefill, self.decode)
        ]
        return TwoPools(self.requests, *halves, self.handover, 7, self.loop)


@st.composite
def half_systems(draw: st.DrawFn, policy: PoolPolicy, size: int) -> PoolSystem:
    return PoolSystem(
        policy,
        layers=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        num_blocks=draw(st.sampled_from([90, 140, 400])) // size,
        block_size=size,
        caching=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
        turnaround_s=draw(st.sampled_from([0.0, 1e-3])),
        jitter=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lazy=draw(st.booleans()),
        router=draw(st.sampled_from(get_args(Router))),
        admission_s=draw(st.sampled_from([0.0, 0.0, 2.0**-8])),
    )


@st.composite
def two_pools(
    draw: st.DrawFn, policies: Callable[[], st.SearchStrategy[Any]], known: bool
) -> TwoPoolSystem:
    """Any two small pools with policies of one engine, most of whose times fall together."""
    order = draw(st.sampled_from(["prefill_first", "decode_reserves_first"]))
    decode = draw(half_systems(draw(policies()), draw(st.sampled_from([1, 3, 4]))))
    prefill = draw(half_systems(draw(policies()), draw(st.sampled_from([1, 4]))))
    mixes = getattr(decode.policy, "enable_mixed_chunk", False)
    if not mixes and (drafts := draw(st.sampled_from([0, 1, 4]))):
        decode = decode.with_drafts(drafts)
    halves = [
        draw(with_ranks(st.just(half))) if draw(st.booleans()) else half
        for half in (prefill, decode)
    ]
    return TwoPoolSystem(
        *halves,
        Handover(
            order,
            draw(st.sampled_from(["decode_step", "on_transfer"])) if known else "decode_step",
            known,
            draw(st.sampled_from([0.0, 1e-5, 1e-3])),
            draw(st.sampled_from([0.0, 2.0**-9, 0.05])),
            draw(st.sampled_from([0.0, 2.0**-9, 0.05])),
            draw(st.integers(1, 3)),
        ),
        draw(shared_requests(20)),
        draw(st.sampled_from([0, 0, 1, 4])),
    )


def assert_equal(system: TwoPoolSystem) -> None:
    """Every batch of every worker and every instant of every request is the textbook's."""
    records, oracle = system.fast(), system.textbook()
    over = handed(records)
    assert over.prefill_logs == system.prefill.replicas * system.prefill.ranks
    assert set(records.rejections) == oracle.rejected
    for log, replica in zip(records.replicas, oracle.replicas, strict=True):
        assert_equal_log(log, replica)
    table = Analysis(records).requests.set_index("request")
    for place, request in enumerate(records.request_id.tolist()):
        if request in records.rejections:
            continue
        for found, theirs in (
            (over.prefill_end_s, oracle.prefill_end_s),
            (over.reserved_s, oracle.reserved_s),
            (over.received_s, oracle.received_s),
        ):
            assert np.array_equal([found[place]], [theirs.get(request, np.nan)], equal_nan=True)
        assert over.prefilled_on[place] == oracle.prefilled_on[request]
        member, replica = oracle.member(request)
        row = table.loc[request]
        assert records.replicas[row["replica"]].num_iterations == len(replica.micros)
        assert row["finish_s"] == member.finish_s
        tokens_s, received_s = [*member.token_s], oracle.received_s.get(request)
        if system.handover.first_token == "on_transfer" and received_s is not None:
            tokens_s.insert(0, received_s)
        elif system.handover.first_token_known and received_s is not None:
            tokens_s.insert(0, tokens_s[0])  # the first two come together
        assert row["ttft_s"] == tokens_s[0] - row["arrival_s"]
        given = len(tokens_s) + member.held  # (a decode's accepted drafts come with its own token)
        assert given == member.request.output_tokens
        if len(tokens_s) > 1:
            assert row["tbt_max_s"] == np.diff(tokens_s).max()


ANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@ANY
@given(two_pools(vllm_policies, known=False))
def test_any_two_pools_of_vllm(system: TwoPoolSystem) -> None:
    assert_equal(system)


@pytest.mark.slow
@settings(ANY, max_examples=60)
@given(two_pools(vllm_policies, known=False))
def test_every_request_is_computed_once_and_all_memory_freed(system: TwoPoolSystem) -> None:
    """Invariants 1, 2 and 4 over both pools: each prompt is computed on one prefill worker, and all
    that follows on one decode worker; blocks are never more than there are."""
    halves = fast_workers(system.prefill), fast_workers(system.decode)
    records = system.fast(*halves)
    for one, other in zip(records.replicas, system.fast().replicas, strict=True):
        assert np.array_equal(one.spans, other.spans)
        for name, column in one.iterations.items():
            assert np.array_equal(column, other.iterations[name])
    first = len(halves[0].schedulers)
    for pool in (*halves[0].schedulers, *halves[1].schedulers):
        assert pool.blocks.free == pool.blocks.capacity and not pool.num_unfinished
        assert max(pool.kv_log, default=0) <= pool.blocks.capacity
    table = Analysis(records).requests
    served = table[table["rejected"].isna()]
    went = [(log, number) for number, log in enumerate(records.replicas)]
    for worker in range(system.prefill.replicas):
        ranks = [log for log, number in went[:first] if number // system.prefill.ranks == worker]
        there = [request for log in ranks for request in set(log.spans[:, 0])]
        assert sorted(there) == served["request"][served["prefilled_on"] == worker].tolist()
    for log, number in went[first:]:
        assert set(log.spans[:, 0]) == set(served["request"][served["replica"] == number])
    prefill = records.replicas[:first]
    computed = sum(log.iterations["prefill_tokens"].sum() for log in prefill)
    lost = any((log.pool.events[:, 1] == LOST).any() for log in prefill if log.pool)
    there = served[served["prefilled_on"] >= 0]
    needed = there["prompt_tokens"].sum() - there["hit_tokens"].sum()
    assert computed == needed or (lost and computed > needed)


@pytest.mark.slow
@ANY
@given(two_pools(trtllm_policies, known=True))
def test_any_two_pools_of_trtllm(system: TwoPoolSystem) -> None:
    assert_equal(system)


@pytest.mark.slow
@ANY
@given(two_pools(sglang_policies, known=True))
def test_any_two_pools_of_sglang(system: TwoPoolSystem) -> None:
    """(With fewer tokens beside each request: there are no 512.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sarathi_sim.policies.sglang.RESERVED_DECODE_TOKENS", 12)
        assert_equal(system)
