"""Paged memory, preemption and prefix caching under vLLM's policy: schedules worked out by hand."""

from __future__ import annotations

import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.log import DECODE, HIT, HIT_AGAIN, LOST, PART, PREFILL, RECOMPUTE
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.views.metrics import Analysis, paging_summary


def a_second(batch: Batch) -> tuple[float, float, float, float]:
    """Every iteration that does anything takes a second."""
    return (1.0 if batch.num_tokens else 0.0), 0.0, 0.0, 0.0


def pool(requests: list[Request], policy: Vllm, blocks: Blocks, depth: int = 1) -> Pool:
    return Pool(policy, blocks, max_in_flight=depth, max_length=100)


def two_requests_in_five_blocks(output_tokens: int = 3) -> tuple[Records, Pool]:
    """Blocks of 2 tokens, 5 of them; both prompts fill two.

    it 0  both prompts                      4 blocks in use
       1  each needs a block, 1 is free: request 1 is preempted; request 0 decodes on 4 tokens
       2  request 0 (5 tokens); request 1 would need 3 blocks for its 5 tokens, 2 are free
       3  request 0 (6 tokens) takes a fourth block, and is done
       4  request 1 computes its 4 prompt tokens and the one it had generated: its second token
       5  request 1 decodes on 5 tokens: its third
    """
    requests = [Request(0, 0.0, 4, 4, 6), Request(1, 0.0, 4, output_tokens, 6)]
    scheduler = pool(requests, Vllm(max_num_batched_tokens=8, max_num_seqs=4), Blocks(6, 2))
    return simulate(requests, [scheduler], a_second, (1,)), scheduler


def test_a_preempted_request_computes_its_tokens_again() -> None:
    records, scheduler = two_requests_in_five_blocks()
    columns = records.replicas[0].iterations
    assert columns["prefill_tokens"].tolist() == [8, 0, 0, 0, 5, 0]
    assert columns["decodes"].tolist() == [0, 1, 1, 1, 0, 1]
    assert columns["decode_context"].tolist() == [0, 4, 5, 6, 0, 5]
    paged = records.replicas[0].pool
    assert paged is not None
    assert paged.kv_tokens.tolist() == [8, 6, 6, 8, 6, 6]
    assert paged.events.tolist() == [[1, LOST, 4]]
    assert sorted(records.replicas[0].spans.tolist()) == [
        [0, PREFILL, 0, 0, 0],
        [0, DECODE, 0, 1, 3],
        [1, PREFILL, 0, 0, 0],
        [1, DECODE, 0, 5, 5],
        [1, RECOMPUTE, 0, 4, 4],
    ]
    assert scheduler.blocks.free == 5 and scheduler.num_unfinished == 0


def test_what_preemption_does_to_a_request_is_measured() -> None:
    records, _ = two_requests_in_five_blocks()
    table = Analysis(records).requests
    assert table["ttft_s"].tolist() == [1, 1], "the first token is that of the first prefill"
    assert table["finish_s"].tolist() == [4, 6]
    assert table["tbt_max_s"].tolist() == [1, 4], "request 1: tokens at 1, 5 and 6 s"
    assert table["preemptions"].tolist() == [0, 1]
    assert table["recomputed_tokens"].tolist() == [0, 4]
    assert table["hit_tokens"].tolist() == [0, 0]
    gaps, counts = Analysis(records).spans[0].token_gaps()
    assert sorted(gaps.repeat(counts).tolist()) == [1, 1, 1, 1, 4]
    found = paging_summary(records, table)
    # 8 + 3 + 5 + 1 tokens were computed, 4 of them for the second time.
    assert found == {
        "preemptions": 1,
        "preemption_rate": 0.5,
        "hit_rate": 0.0,
        "recomputed_share": 4 / 17,
        "extra_decodes": 0,
        "empty_iterations": 0,
    }


def test_decodes_after_the_end_are_booked_apart() -> None:
    """Of 3 of 9 tokens, with the next iteration formed before the last one is back: a prompt of 4,
    two decodes that yield, and one that was formed before it was known that there is no more."""
    requests = [Request(0, 0.0, 4, 3, 9)]
    scheduler = pool(requests, Vllm(async_scheduling=True), Blocks(20, 2), depth=2)
    records = simulate(requests, [scheduler], a_second, (1,))
    assert records.replicas[0].iterations["decodes"].tolist() == [0, 1, 1, 1]
    analysis = Analysis(records)
    assert paging_summary(records, analysis.requests)["extra_decodes"] == 1
    model, device = load_model("llama-3-8b"), load_device("a6000")
    assert analysis.summary(model, device, tp=1)["mean_batch"] == 3 / 4


def test_recomputation_that_yields_the_last_token_is_a_gap() -> None:
    records, _ = two_requests_in_five_blocks(output_tokens=2)
    table = Analysis(records).requests
    assert table["finish_s"].tolist() == [4, 5]
    assert table["tbt_max_s"].tolist() == [1, 4]


def test_a_prompt_is_found_in_the_cache_within_the_same_iteration() -> None:
    shared = (("same", 6),)
    requests = [Request(i, 0.0, 6, 1, 1, prefix=shared) for i in range(2)]
    scheduler = pool(requests, Vllm(max_num_batched_tokens=16), CachedBlocks(20, 2))
    records = simulate(requests, [scheduler], a_second, (1,))
    # Of 6 tokens the last must be computed, so at most 5, hence 2 blocks, are found.
    assert records.replicas[0].iterations["prefill_tokens"].tolist() == [6 + 2]
    assert records.replicas[0].pool is not None
    assert records.replicas[0].pool.events.tolist() == [[1, HIT, 4]]
    assert scheduler.blocks.free == 19


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    requests = [Request(0, 0.0, 4, 4, 6), Request(1, 0.0, 4, 3, 6)]
    scheduler = pool(requests, Vllm(max_num_batched_tokens=8, max_num_seqs=4), CachedBlocks(6, 2))
    records = simulate(requests, [scheduler], a_second, (1,))
    # As above, but request 1 frees two known blocks. Request 0 takes the oldest free ones: the
    # fifth block in iteration 1, then in iteration 3 the one that held the end of 1's prompt.
    assert records.replicas[0].pool is not None
    assert records.replicas[0].pool.events.tolist() == [[1, LOST, 4], [1, HIT_AGAIN, 2]]
    assert records.replicas[0].iterations["prefill_tokens"].tolist() == [8, 0, 0, 0, 3, 0]
    assert Analysis(records).requests["recomputed_tokens"].tolist() == [0, 2]


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline() -> None:
    requests = [Request(0, 0.0, 10, 2, 2)]
    scheduler = pool(requests, Vllm(max_num_batched_tokens=4), Blocks(20, 2), depth=2)
    records = simulate(requests, [scheduler], a_second, (1, 1))
    columns = records.replicas[0].iterations
    busy = columns["prefill_tokens"] + columns["decodes"] > 0
    # Chunks of 4, 4 and 2 a second apart; then a decode, for which its token must be back.
    assert columns["prefill_tokens"][busy].tolist() == [4, 4, 2, 0]
    assert columns["finish_s"][busy].tolist() == [2, 3, 4, 6]
    spans = records.replicas[0].spans
    assert spans[:, 1].tolist() == [PART, PART, PREFILL, DECODE]
    assert Analysis(records).requests["ttft_s"].tolist() == [4]


def test_an_iteration_formed_ahead_of_an_end_of_sequence_is_in_vain() -> None:
    requests = [Request(0, 0.0, 4, 2, 20)]
    policy = Vllm(max_num_batched_tokens=8, async_scheduling=True)
    scheduler = pool(requests, policy, Blocks(20, 2), depth=2)
    records = simulate(requests, [scheduler], a_second, (1,))
    # Its second token ends it, by when a third iteration is formed.
    assert records.replicas[0].iterations["decodes"].tolist() == [0, 1, 1]
    assert Analysis(records).requests["finish_s"].tolist() == [2]
    assert scheduler.blocks.free == 19


def test_a_declared_end_is_foreseen() -> None:
    requests = [Request(0, 0.0, 4, 2, 2)]
    policy = Vllm(max_num_batched_tokens=8, async_scheduling=True)
    records = simulate(requests, [pool(requests, policy, Blocks(20, 2), 2)], a_second, (1,))
    assert records.replicas[0].iterations["decodes"].sum() == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(95, 49), (99, 51)])
def test_what_could_never_be_held_is_rejected(tokens: int, blocks: int) -> None:
    scheduler = pool([], Vllm(), Blocks(30, 2))
    reason = scheduler.add(Request(0, 0.0, tokens - 3, 1, 4))
    if tokens + 1 > 100:
        assert reason is not None and "max_length is 100" in reason
    else:
        assert reason == f"needs {(tokens + 1) // 2} KV blocks, but the replica holds 29"


class Asked(Vllm):
    """Counts how often it is asked to plan."""

    times = 0

    def plan(self, pool: Pool) -> bool:
        self.times += 1
        return super().plan(pool)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seqs", [2, 9])
def test_a_policy_is_asked_again_only_when_something_has_happened(depth: int, seqs: int) -> None:
    """At 0 the first two are admitted. What changes then: the third arrives (once there is room for
    it it is admitted); two end. With two slots it waits, and is admitted at the first end."""
    requests = [Request(i, 10.5 * (i == 2), 4, output, 60) for i, output in enumerate((30, 50, 20))]
    policy = Asked(8, seqs, async_scheduling=depth == 2)
    records = simulate(requests, [pool(requests, policy, Blocks(90, 2), depth)], a_second, (1,))
    assert records.replicas[0].num_iterations >= 50
    assert policy.times <= 6


def test_nobody_waits_longer_because_a_policy_is_not_asked() -> None:
    """The third prompt needs 4 blocks of 4 tokens; the cache has 7. 0 and 1 hold 2 each and grow.
    When 0 ends, in iteration 2, it is admitted in the next one; not before, and not later."""
    requests = [Request(0, 0.0, 5, 3, 9), Request(1, 0.0, 5, 6, 9), Request(2, 0.0, 15, 2, 4)]
    scheduler = pool(requests, Vllm(64, 8), Blocks(8, 4))
    records = simulate(requests, [scheduler], a_second, (1,))
    prefills = records.replicas[0].iterations["prefill_tokens"].tolist()
    assert prefills == [10, 0, 0, 15, 0, 0]


def test_running_requests_enter_their_blocks_in_the_order_of_admission() -> None:
    """Blocks of two tokens, at most two tokens of a prompt an iteration; all share 8 tokens.

    Iteration 2 processes the tokens 4 and 5 of request 0, a piece of its prompt, and of request 1,
    a decode: two blocks of the same content, and that of 0, admitted first, is the one found. It is
    free again when request 2 comes, at 4, while that of 1 is in use. So request 2 takes a block for
    it, and one of its own; request 1 has four.
    """
    session = ((("session", 0), 8),)
    rows = ((0.0, 8, 1), (0.0, 4, 9), (4.0, 8, 1))
    requests = [Request(i, at, p, n, n, 0, session) for i, (at, p, n) in enumerate(rows)]
    policy = Vllm(16, 8, long_prefill_token_threshold=2)
    records = simulate(requests, [pool(requests, policy, CachedBlocks(30, 2))], a_second, (1,))
    paged = records.replicas[0].pool
    assert paged is not None and paged.events.tolist() == [[1, HIT, 2], [2, HIT, 6]]
    assert paged.kv_tokens.tolist() == [4, 8, 10, 14, 12, 10, 10, 12, 12]


class Lazy(Vllm):
    """Never lets anybody run."""

    def plan(self, pool: Pool) -> bool:
        return False


def test_iterations_that_are_withdrawn_leave_nothing_behind() -> None:
    requests = [Request(0, 0.0, 4, 2, 2)]
    scheduler = pool(requests, Lazy(async_scheduling=True), Blocks(9, 2), 2)
    scheduler.add(requests[0])
    assert scheduler.next_batch() is None
    assert not scheduler._formed_as and not scheduler.kv_log and scheduler.idle


def test_what_is_generated_ahead_is_found_as_soon_as_it_is_there() -> None:
    """Blocks of one token; request 0's tokens are looked for. Two iterations are under way.

    By 3 its prompt and two decodes have returned: 3 + 3 tokens are there. The iteration formed then
    schedules its seventh, and enters the sixth before request 1, which came at 2.5, is looked at.
    """
    session = ((("session", 0), 12),)
    requests = [Request(0, 0.0, 3, 9, 9, 0, session), Request(1, 2.5, 9, 1, 1, 0, session)]
    scheduler = pool(requests, Vllm(64, 8, async_scheduling=True), CachedBlocks(60, 1), 2)
    records = simulate(requests, [scheduler], a_second, (1,))
    paged = records.replicas[0].pool
    assert paged is not None and paged.events.tolist() == [[1, HIT, 6]]
