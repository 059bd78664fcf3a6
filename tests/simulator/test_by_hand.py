"""Schedules, ledgers and summaries worked out by hand: pipelines with reserved memory, and paged
memory, preemption and prefix caching under vLLM's policy.

For the former every decision and every duration can be checked on paper. Times are in units of
2^-10 s, so all are whole quanta. One layer a stage and no transfer, so a micro-batch takes the same
time on both stages: its prefill tokens plus half the decodes' summed context, rounded down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.log import DECODE, HIT, HIT_AGAIN, LOST, PART, PREFILL, RECOMPUTE
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import DEFAULT, Records, ReplicaLog, Switches
from sarathi_sim.simulator.loop.replica import Nominal, Predictor
from sarathi_sim.simulator.views.metric_registry import QUANTILES
from sarathi_sim.simulator.views.metrics import Analysis, Hardware, _useful_s, paging_summary
from tests.simulator import simulate

UNIT = 2.0**-10
BEST = [(4, 3), (2, 2), (6, 2), (2, 2)]
MODEL, TWO_GPUS = load_model("llama-2-7b"), Hardware(load_device("a40"), 2)


def predict(batch: Batch) -> tuple[float, float, float, float]:
    return (batch.prefill_tokens + batch.decode_context // 2) * UNIT, 0.0, 0.0, 0.0


def run(
    policy: Policy,
    lengths: list[tuple[int, int]],
    times: Predictor = predict,
    stages: int = 2,
    max_batch: int = 2,
    switches: Switches = DEFAULT,
) -> Records:
    requests = [Request(i, 0.0, prompt, output, 8) for i, (prompt, output) in enumerate(lengths)]
    scheduler = MicroBatches(
        policy, max_batch=max_batch, max_in_flight=stages, kv_capacity=64, max_length=16
    )
    return simulate(requests, [scheduler], times, (1,) * stages, switches=switches)


def spans(records: Records) -> list[list[tuple[float, float]]]:
    times = stage_times(records.replicas[0])
    return [
        [(s / UNIT, f / UNIT) for s, f in zip(times.start[:, i], times.finish[:, i], strict=True)]
        for i in range(2)
    ]


def accounts(records: Records) -> list[dict[str, float]]:
    rows = Analysis(records).ledger.drop(columns=["replica", "stage"]) / UNIT
    return [
        {name.removesuffix("_s"): value for name, value in row.items() if value}
        for row in rows.to_dict("records")
    ]


def test_orca_best_case() -> None:
    """A and B are prefilled alone, C joins A's decode, D with B's; then decodes only."""
    records = run(Orca(max_prefills=1), BEST)
    # A | B | C+a | D+b | a c | d
    assert spans(records) == [
        [(0, 4), (4, 6), (8, 16), (16, 19), (24, 29), (29, 30)],
        [(4, 8), (8, 10), (16, 24), (24, 27), (29, 34), (34, 35)],
    ]
    assert accounts(records) == [
        # 6-8: B's and C's prompts differ; 19-24: D's prompt against decodes only.
        {"wall": 35, "busy": 23, "pb1": 2, "pb2": 5, "drain": 5},
        {"wall": 35, "busy": 23, "pb1": 6, "pb2": 2, "fill": 4},
    ]
    table = Analysis(records).requests
    assert (table["finish_s"] / UNIT).tolist() == [34, 27, 34, 35]
    assert (table["ttft_s"] / UNIT).tolist() == [8, 10, 24, 27]
    assert (table["queueing_s"] / UNIT).tolist() == [0, 4, 8, 16]
    # A takes part before C's prefill (gaps 2 + 6) and in the decodes after it (5 + 2); so does C.
    assert (table["bubble_s"] / UNIT).tolist() == [15, 0, 15, 0]
    assert (table["tbt_max_s"] / UNIT).tolist() == [16, 17, 10, 8]
    # Gaps between tokens: A 16 and 10, B 17, C 10, D 8.
    quantiles = Analysis(records).tbt_quantiles((0.2, 0.6, 0.8, 1.0))
    assert [q / UNIT for q in quantiles] == [8, 10, 16, 17]


def test_the_summary_of_that_schedule() -> None:
    """It lasts 35 units on two stages."""
    records = run(Orca(max_prefills=1), BEST)
    summary = Analysis(records).summary(MODEL, TWO_GPUS)
    assert summary["makespan_s"] == 35 * UNIT
    assert summary["tokens_per_s"] == pytest.approx((14 + 9) / (35 * UNIT))
    assert summary["output_tokens_per_s"] == pytest.approx(9 / (35 * UNIT))
    assert summary["requests_per_s"] == pytest.approx(4 / (35 * UNIT))
    assert (summary["gpus"], summary["iterations"], summary["stage_executions"]) == (4, 6, 12)
    # A | B | C+a | D+b | a c | d
    assert summary["mean_batch"] == pytest.approx((1 + 1 + 2 + 2 + 2 + 1) / 6)
    # Request bubbles are 15, 0, 15, 0; those of both stages 7 and 8 of 35 each.
    assert summary["bubble_s"]["mean"] == pytest.approx(7.5 * UNIT)
    assert summary["bubble_share"] == pytest.approx((7 + 8) / 70)
    # Request A: first token at 8, last at 34, two tokens after the first.
    assert Analysis(records).requests["tpot_s"][0] == pytest.approx((34 - 8) / 2 * UNIT)
    # A 4, B 2; C+a adds 6 + 1, D+b 2 + 1, and a c 2 more before B leaves with its 3.
    assert summary["kv_peak_share"] == pytest.approx(18 / 64)
    processed = [prompt + output - 1 for prompt, output in BEST]
    # A token attends to those before it and itself: scores and weighted sum, 2 FLOPs each a number.
    attended = sum(sum(range(1, n + 1)) for n in processed)
    flops = (
        sum(processed) * sum(MODEL.linear_flops_by_kind())
        + 4 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim * attended
        + 9 * MODEL.lm_head_flops_per_token()
    )
    assert summary["mfu"] == pytest.approx(flops / (35 * UNIT * 4 * TWO_GPUS.device.peak_flops))
    assert summary["ledger_s"]["wall"] == 70 * UNIT


def test_utilisation_is_of_the_peak_of_each_number_format() -> None:
    """Mixtral with experts in nvfp4, all else of its layers in fp8, and the rest in bf16."""
    model, device = load_model("mixtral-8x7b"), load_device("b200-sxm")
    kernels = Kernels("trtllm", "fp8", "fp8", "nvfp4")
    analysis = Analysis(run(Orca(max_prefills=1), BEST))
    processed = [prompt + output - 1 for prompt, output in BEST]
    attended = sum(n * (n + 1) // 2 for n in processed)
    tokens, layers = sum(processed), 32
    nvfp4 = 2 * tokens * layers * 2 * 3 * 4096 * 14336  # two of eight experts
    fp8 = 2 * tokens * layers * ((32 + 2 * 8) * 128 * 4096 + 4096 * 4096)
    fp8 += 4 * layers * 32 * 128 * attended
    bf16 = 2 * tokens * layers * 8 * 4096 + 2 * 9 * 4096 * 32000  # routers, and the LM head
    seconds = nvfp4 / 9e15 + fp8 / 4.5e15 + bf16 / 2.25e15
    found = analysis.summary(model, Hardware(device, 2, kernels))["mfu"]
    assert found == pytest.approx(seconds / (35 * UNIT * 4), rel=1e-12)
    plain = (nvfp4 + fp8 + bf16) / 2.25e15 / (35 * UNIT * 4)
    for used in (None, Kernels("trtllm"), Kernels("trtllm", "int4_wo")):  # unpacked: bf16's
        found = analysis.summary(model, Hardware(device, 2, used))["mfu"]
        assert found == pytest.approx(plain, rel=1e-12)
    assert load_device("a100-80g-sxm").peak_of("fp8") == 312e12  # it has no units for it


def test_the_flops_of_a_long_trace_are_more_than_64_bits_hold() -> None:
    model, on = load_model("llama-3.1-405b"), Hardware(load_device("h200-sxm"), 1)
    prompt, output = np.full(2_000_000, 9_000), np.full(2_000_000, 685)
    few = _useful_s(model, on, prompt[:1], output[:1], 0 * prompt[:1])
    many = _useful_s(model, on, prompt, output, 0 * prompt)
    assert many == pytest.approx(2e6 * few)


def test_two_ranks_in_lock_step() -> None:
    """A and C go to rank 0, B and D to rank 1. Two layers, each own ops and then experts, which
    take a unit for every three tokens of both ranks. Prompts are processed whole, decodes beside
    them (Orca, unconstrained), two sequences a rank."""

    def own(batch: Batch | None) -> float:
        return 0 if batch is None else batch.prefill_tokens + batch.decode_context // 2

    def times(step: Sequence[Batch | None]) -> tuple[list[Nominal], Nominal]:
        experts = sum(0 if batch is None else batch.num_tokens for batch in step) // 3
        ranks = [((own(b) + experts) * UNIT, 0.0, (b is not None) * UNIT, 0.0) for b in step]
        layer_s, _, last_s, _ = map(max, zip(*ranks, strict=True))
        return ranks, (layer_s, 0.0, last_s, 0.0)

    rows = [(0, 6, 3), (0, 2, 2), (50, 4, 1), (53, 2, 2)]
    requests = [Request(i, at * UNIT, p, d, 8) for i, (at, p, d) in enumerate(rows)]
    schedulers = [
        MicroBatches(Orca(), max_batch=2, max_in_flight=1, kv_capacity=64, max_length=16)
        for _ in range(2)
    ]
    records = simulate(requests, schedulers, times, (2,), ranks=2)
    # Step 1, from 0: A's prompt takes 6 a layer, B's 2, both with 8 // 3 units of experts. They
    # meet in each layer: 2 * (6 + 2) + 1.
    # Step 2, from 17: a (context 6) takes 3, b (2) 1; 2 tokens, no experts: 2 * 3 + 1.
    # Step 3, from 24: a alone (7): 2 * 3 + 1. It ends at 31.
    # Step 4, from 50: C alone: 2 * (4 + 1) + 1. D arrives meanwhile, and waits until 61.
    # Step 5, from 61: D alone: 2 * 2 + 1. Step 6, from 66: d (2): 2 * 1 + 1.
    steps = [[(0, 17), (17, 24), (24, 31), (50, 61)], [(0, 17), (17, 24), (61, 66), (66, 69)]]
    for log, expected in zip(records.replicas, steps, strict=True):
        of = stage_times(log)
        assert [*zip(of.start[:, 0] / UNIT, of.finish[:, 0] / UNIT, strict=True)] == expected
    assert (records.replicas[1].iterations["ready_s"] / UNIT).tolist() == [0, 17, 53, 66]
    assert (records.replicas[1].iterations["all_tokens"]).tolist() == [8, 2, 2, 1]
    assert (records.replicas[1].iterations["most_tokens"]).tolist() == [6, 1, 2, 1]
    assert accounts(records) == [
        {"wall": 69, "busy": 42, "no_work": 27},
        # Own: 9, 3, 5, 3. B waits 2 * 4, b 2 * 2, and D from 53 to 61, for step 4. From 24 to 53
        # rank 1 has nothing to do.
        {"wall": 69, "busy": 20, "slowest_rank": 20, "no_work": 29},
    ]
    table = Analysis(records).requests
    assert table["replica"].tolist() == [0, 1, 0, 1]
    assert (table["finish_s"] / UNIT).tolist() == [31, 24, 61, 69]
    assert (table["queueing_s"] / UNIT).tolist() == [0, 0, 0, 8]
    assert (table["slowest_rank_s"] / UNIT).tolist() == [0, 12, 0, 8]
    assert (table["bubble_s"] / UNIT).tolist() == [0, 12, 0, 8]
    assert Analysis(records).summary(MODEL, TWO_GPUS)["gpus"] == 4
    assert [records.called(n) for n in range(2)] == ["0 rank 0", "0 rank 1"]


def test_a_rank_is_ready_since_its_first_request() -> None:
    """A takes rank 0 from 0 to 20. B and D come to rank 1 meanwhile, at 5 and 7, and C to rank 0:
    all begin at 20. Rank 1 had nothing in flight: it waits from 5 on."""

    def times(step: Sequence[Batch | None]) -> tuple[list[Nominal], Nominal]:
        ranks = [((b.prefill_tokens if b else 0) * UNIT, 0.0, 0.0, 0.0) for b in step]
        return ranks, max(ranks)

    rows = [(0, 20), (5, 3), (6, 4), (7, 3)]
    requests = [Request(i, at * UNIT, p, 1, 1) for i, (at, p) in enumerate(rows)]
    schedulers = [
        MicroBatches(Orca(), max_batch=2, max_in_flight=1, kv_capacity=64, max_length=32)
        for _ in range(2)
    ]
    records = simulate(requests, schedulers, times, (1,), ranks=2)
    ready = [(log.iterations["ready_s"] / UNIT).tolist() for log in records.replicas]
    assert ready == [[0, 20], [5]]
    waited = [(log.iterations["waited_s"] / UNIT).tolist() for log in records.replicas]
    assert waited == [[0, 2], [0]]


def test_orca_unconstrained() -> None:
    """Both prompts of a micro-batch at once; the last micro-batch runs alone."""
    records = run(Orca(), [(3, 3), (1, 2), (4, 3), (2, 3)])
    # AB | CD | ab | cd | a | cd
    assert spans(records) == [
        [(0, 4), (4, 10), (10, 12), (16, 19), (19, 21), (22, 26)],
        [(4, 8), (10, 16), (16, 18), (19, 22), (22, 24), (26, 30)],
    ]
    assert accounts(records) == [
        {"wall": 30, "busy": 21, "pb3": 5, "drain": 4},
        # 24-26: A and B are done, so only one micro-batch is left: no work, not a bubble.
        {"wall": 30, "busy": 21, "pb1": 2, "pb3": 1, "fill": 4, "no_work": 2},
    ]
    table = Analysis(records).requests
    assert (table["finish_s"] / UNIT).tolist() == [24, 18, 30, 30]
    assert (table["bubble_s"] / UNIT).tolist() == [0, 0, 8, 8]


def test_sarathi_has_equal_work_and_no_bubble() -> None:
    """Chunks of two tokens: while prompts last, every micro-batch is alike and none waits."""

    def two_units(batch: Batch) -> tuple[float, float, float, float]:
        return 2 * UNIT * bool(batch.num_tokens), 0.0, 0.0, 0.0

    records = run(Sarathi(2, tile=2, chunk_rule="fixed"), [(4, 2)] * 4, two_units)
    totals = Analysis(records).ledger
    assert totals[["pb1_s", "pb2_s", "pb3_s", "equal_s"]].to_numpy().sum() == 0
    # A A C+a C | c for one micro-batch, the same for the other: 5 iterations of 2 units each.
    assert totals["busy_s"].tolist() == [20 * UNIT, 20 * UNIT]
    assert totals["wall_s"].tolist() == [22 * UNIT, 22 * UNIT]


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_one_request_alone(stages: int) -> None:
    """Closed form: each of the D iterations takes the sum of the stages; all idle time is fill,
    drain or no work, since no second micro-batch exists."""
    prompt, output = 6, 4
    records = run(Orca(), [(prompt, output)], stages=stages, max_batch=1)
    work = prompt + sum((prompt + i) // 2 for i in range(output - 1))
    assert records.end_s == stages * work * UNIT
    rows = Analysis(records).ledger
    assert (rows["busy_s"] == work * UNIT).all()
    idle = rows["fill_s"] + rows["drain_s"] + rows["no_work_s"]
    assert (idle == (stages - 1) * work * UNIT).all()


def test_pipeline_of_equal_batches_has_no_bubbles() -> None:
    """Closed form: with as many equal micro-batches as stages, a stage never waits in between."""
    stages, output = 4, 6

    def constant(batch: Batch) -> tuple[float, float, float, float]:
        return 3 * UNIT, 0.0, 0.0, 0.0

    records = run(Orca(), [(2, output)] * stages, constant, stages, max_batch=1)
    assert records.end_s == (stages * output + stages - 1) * 3 * UNIT
    rows = Analysis(records).ledger
    assert (rows["busy_s"] == stages * output * 3 * UNIT).all()
    assert rows[["pb1_s", "pb2_s", "pb3_s", "equal_s", "no_work_s"]].to_numpy().sum() == 0


def test_bubble_share_leaves_out_what_blocks_the_sender() -> None:
    def sends(batch: Batch) -> tuple[float, float, float, float]:
        return (*predict(batch)[:3], 3 * UNIT)

    blocking = Switches(blocking_send=True)
    found = Analysis(run(Orca(), [(4, 3)] * 4, sends, max_batch=1, switches=blocking))
    summary = found.summary(MODEL, TWO_GPUS)
    assert summary["ledger_s"]["sending"] == 3 * UNIT * 12
    assert summary["bubble_share"] * summary["ledger_s"]["wall"] == pytest.approx(
        found.iterations["bubble_s"].sum()
    )


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 10_007])
def test_spreads_are_to_the_bit_those_of_pandas(count: int) -> None:
    """Of columns that go together and of one that has gaps, hence another length."""
    columns = {name: np.random.default_rng(count + i).exponential(3.0, count)
               for i, name in enumerate("abc")}  # fmt: skip
    columns["b"][::5] = np.nan
    analysis = Analysis(run(Orca(), [(4, 3)]))
    for name, found in analysis._spreads(columns).items():
        series = pd.Series(columns[name], dtype=float)
        expected = [float(series.mean()), *series.quantile(list(QUANTILES)).tolist()]
        assert np.array_equal(list(found.values()), expected, equal_nan=True)


# Paged memory, preemption and prefix caching under vLLM's policy: schedules worked out by hand


def a_second(batch: Batch) -> tuple[float, float, float, float]:
    """Every iteration that does anything takes a second."""
    return (1.0 if batch.num_tokens else 0.0), 0.0, 0.0, 0.0


def pool(policy: Vllm, blocks: Blocks, depth: int = 1) -> Pool:
    return Pool(policy, blocks, max_in_flight=depth, max_length=100)


def served(requests: list[Request], scheduler: Pool, stages: int = 1) -> ReplicaLog:
    """What the one replica did."""
    return simulate(requests, [scheduler], a_second, (1,) * stages).replicas[0]


def events(log: ReplicaLog) -> list[list[int]]:
    assert log.pool is not None
    return log.pool.events.tolist()


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
    scheduler = pool(Vllm(8, 4, async_scheduling=False), Blocks(6, 2))
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
    shorter = Analysis(two_requests_in_five_blocks(output_tokens=2)[0]).requests
    assert shorter["finish_s"].tolist() == [4, 5]
    assert shorter["tbt_max_s"].tolist() == [1, 4], "recomputation that yields the last token"
    gaps, counts = Analysis(records).spans[0].token_gaps()
    assert sorted(gaps.repeat(counts).tolist()) == [1, 1, 1, 1, 4]
    found = paging_summary(records, table)
    # 8 + 3 + 5 + 1 tokens were computed, 4 of them for the second time.
    nothing = dict.fromkeys(("hit_rate", "extra_decodes", "empty_iterations"), 0)
    assert found == nothing | {
        "preemptions": 1, "preemption_rate": 0.5, "recomputed_share": 4 / 17
    }  # fmt: skip


def test_decodes_after_the_end_are_booked_apart() -> None:
    """Of 3 of 9 tokens, with the next iteration formed before the last one is back: a prompt of 4,
    two decodes that yield, and one that was formed before it was known that there is no more. Where
    3 tokens are declared, the end is foreseen."""
    model, on = load_model("llama-3-8b"), Hardware(load_device("a6000"), 1)
    for declared, extra in ((9, 1), (3, 0)):
        requests = [Request(0, 0.0, 4, 3, declared)]
        scheduler = pool(Vllm(async_scheduling=True), Blocks(20, 2), depth=2)
        records = simulate(requests, [scheduler], a_second, (1,))
        assert records.replicas[0].iterations["decodes"].sum() == 2 + extra
        analysis = Analysis(records)
        assert paging_summary(records, analysis.requests)["extra_decodes"] == extra
        assert analysis.requests["finish_s"].tolist() == [3] and scheduler.blocks.free == 19
        if extra:
            assert analysis.summary(model, on)["mean_batch"] == 3 / 4


def test_a_prompt_is_found_in_the_cache_within_the_same_iteration() -> None:
    requests = [Request(i, 0.0, 6, 1, 1, prefix=(("same", 6),)) for i in range(2)]
    scheduler = pool(Vllm(max_num_batched_tokens=16, async_scheduling=False), CachedBlocks(20, 2))
    log = served(requests, scheduler)
    # Of 6 tokens the last must be computed, so at most 5, hence 2 blocks, are found.
    assert log.iterations["prefill_tokens"].tolist() == [6 + 2]
    assert events(log) == [[1, HIT, 4]] and scheduler.blocks.free == 19


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    requests = [Request(0, 0.0, 4, 4, 6), Request(1, 0.0, 4, 3, 6)]
    scheduler = pool(Vllm(8, 4, async_scheduling=False), CachedBlocks(6, 2))
    records = simulate(requests, [scheduler], a_second, (1,))
    # As above, but request 1 frees two known blocks. Request 0 takes the oldest free ones: the
    # fifth block in iteration 1, then in iteration 3 the one that held the end of 1's prompt.
    assert events(records.replicas[0]) == [[1, LOST, 4], [1, HIT_AGAIN, 2]]
    assert records.replicas[0].iterations["prefill_tokens"].tolist() == [8, 0, 0, 0, 3, 0]
    assert Analysis(records).requests["recomputed_tokens"].tolist() == [0, 2]


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline() -> None:
    scheduler = pool(Vllm(max_num_batched_tokens=4, async_scheduling=False), Blocks(20, 2), depth=2)
    log = served([Request(0, 0.0, 10, 2, 2)], scheduler, stages=2)
    columns = log.iterations
    busy = columns["prefill_tokens"] + columns["decodes"] > 0
    # Chunks of 4, 4 and 2 a second apart; then a decode, for which its token must be back.
    assert columns["prefill_tokens"][busy].tolist() == [4, 4, 2, 0]
    assert columns["finish_s"][busy].tolist() == [2, 3, 4, 6]
    assert log.spans[:, 1].tolist() == [PART, PART, PREFILL, DECODE]


@pytest.mark.parametrize(("tokens", "blocks"), [(95, 49), (99, 51)])
def test_what_could_never_be_held_is_rejected(tokens: int, blocks: int) -> None:
    scheduler = pool(Vllm(async_scheduling=False), Blocks(30, 2))
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
    assert served(requests, pool(policy, Blocks(90, 2), depth)).num_iterations >= 50
    assert policy.times <= 6


def test_nobody_waits_longer_because_a_policy_is_not_asked() -> None:
    """The third prompt needs 4 blocks of 4 tokens; the cache has 7. 0 and 1 hold 2 each and grow.
    When 0 ends, in iteration 2, it is admitted in the next one; not before, and not later."""
    requests = [Request(0, 0.0, 5, 3, 9), Request(1, 0.0, 5, 6, 9), Request(2, 0.0, 15, 2, 4)]
    log = served(requests, pool(Vllm(64, 8, async_scheduling=False), Blocks(8, 4)))
    assert log.iterations["prefill_tokens"].tolist() == [10, 0, 0, 15, 0, 0]


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
    policy = Vllm(16, 8, long_prefill_token_threshold=2, async_scheduling=False)
    log = served(requests, pool(policy, CachedBlocks(30, 2)))
    assert log.pool is not None and events(log) == [[1, HIT, 2], [2, HIT, 6]]
    assert log.pool.kv_tokens.tolist() == [4, 8, 10, 14, 12, 10, 10, 12, 12]


class Lazy(Vllm):
    """Never lets anybody run."""

    def plan(self, pool: Pool) -> bool:
        return False


def test_iterations_that_are_withdrawn_leave_nothing_behind() -> None:
    scheduler = pool(Lazy(async_scheduling=True), Blocks(9, 2), 2)
    scheduler.add(Request(0, 0.0, 4, 2, 2))
    assert scheduler.next_batch() is None
    assert not scheduler._formed_as and not scheduler.kv_log and scheduler.idle


def test_what_is_generated_ahead_is_found_as_soon_as_it_is_there() -> None:
    """Blocks of one token; request 0's tokens are looked for. Two iterations are under way.

    By 3 its prompt and two decodes have returned: 3 + 3 tokens are there. The iteration formed then
    schedules its seventh, and enters the sixth before request 1, which came at 2.5, is looked at.
    """
    session = ((("session", 0), 12),)
    requests = [Request(0, 0.0, 3, 9, 9, 0, session), Request(1, 2.5, 9, 1, 1, 0, session)]
    scheduler = pool(Vllm(64, 8, async_scheduling=True), CachedBlocks(60, 1), 2)
    assert events(served(requests, scheduler)) == [[1, HIT, 6]]
