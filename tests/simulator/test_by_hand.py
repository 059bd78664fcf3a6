"""Schedules of four requests A to D on two stages, computed by hand (section 3.2 of the paper).

Times are in units of 2**-10 s, which are whole quanta. One layer a stage and no transfer, so a
micro-batch takes the same time on both stages: its prefill tokens plus half the decodes' summed
context, rounded down.
"""

from __future__ import annotations

import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Policy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.views.metrics import Analysis

UNIT = 2.0**-10


def predict(batch: Batch) -> tuple[float, float, float, float]:
    return (batch.prefill_tokens + batch.decode_context // 2) * UNIT, 0.0, 0.0, 0.0


def run(policy: Policy, lengths: list[tuple[int, int]]) -> Records:
    requests = [Request(i, 0.0, prompt, output, 8) for i, (prompt, output) in enumerate(lengths)]
    scheduler = MicroBatches(policy, max_batch=2, max_in_flight=2, kv_capacity=64, max_length=16)
    return simulate(requests, [scheduler], predict, (1, 1))


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
    records = run(Orca(max_prefills=1), [(4, 3), (2, 2), (6, 2), (2, 2)])
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
    assert [q / UNIT for q in Analysis(records).tbt_quantiles((0.2, 0.6, 0.8, 1.0))] == [
        8,
        10,
        16,
        17,
    ]


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

    requests = [Request(i, 0.0, 4, 2, 8) for i in range(4)]
    scheduler = MicroBatches(
        Sarathi(chunk_size=2, tile=2, chunk_rule="fixed"),
        max_batch=2,
        max_in_flight=2,
        kv_capacity=64,
        max_length=16,
    )
    records = simulate(requests, [scheduler], two_units, (1, 1))
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
    scheduler = MicroBatches(
        Orca(), max_batch=1, max_in_flight=stages, kv_capacity=16, max_length=16
    )
    records = simulate([Request(0, 0.0, prompt, output, 8)], [scheduler], predict, (1,) * stages)
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

    requests = [Request(i, 0.0, 2, output, 8) for i in range(stages)]
    scheduler = MicroBatches(
        Orca(), max_batch=1, max_in_flight=stages, kv_capacity=64, max_length=16
    )
    records = simulate(requests, [scheduler], constant, (1,) * stages)
    assert records.end_s == (stages * output + stages - 1) * 3 * UNIT
    rows = Analysis(records).ledger
    assert (rows["busy_s"] == stages * output * 3 * UNIT).all()
    assert rows[["pb1_s", "pb2_s", "pb3_s", "equal_s", "no_work_s"]].to_numpy().sum() == 0
