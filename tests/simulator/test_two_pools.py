"""Prefill and decode workers: schedules by hand, and invariants over both pools.

By hand, times are in units of 2^-10 s: an iteration takes one for each of its tokens (a prefill
token or a decode), a prompt token one on its worker's link, and a transfer two more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.simulator.loop.closed_loop import ClosedLoop
from sarathi_sim.simulator.loop.fleet import Workers
from sarathi_sim.simulator.loop.handover import Handover, simulate_pools
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.views.metrics import Analysis

UNIT = 2.0**-10
#: Prompt and output of five requests; the last one arrives at 20, the others at 0.
FIVE = [(8, 3), (12, 4), (8, 3), (4, 1), (6, 2)]
OVER = Handover(first_token_known=False, token_s=UNIT, latency_s=2 * UNIT)


def unit_each(batch: Batch) -> tuple[float, float, float, float]:
    return (batch.prefill_tokens + batch.num_decodes) * UNIT, 0.0, 0.0, 0.0


def workers(count: int, blocks: int = 100, seqs: int = 8, **about: Any) -> Workers:
    """Workers of vLLM with blocks of four tokens, one of which is never used."""
    schedulers = [
        Pool(Vllm(64, seqs), Blocks(blocks, 4), max_in_flight=1, max_length=100)
        for _ in range(count)
    ]
    return Workers(schedulers, unit_each, (1,), **about)


def five() -> list[Request]:
    return [Request(i, 20 * UNIT * (i == 4), p, o, o) for i, (p, o) in enumerate(FIVE)]


def run(handover: Handover = OVER, **options: Any) -> Records:
    """Two prefill workers that take a prompt at a time, and a decode worker with room for 24
    tokens."""
    return simulate_pools(five(), workers(2, seqs=1), workers(1, blocks=7), handover, **options)


def columns(records: Records, *names: str) -> list[list[float | None]]:
    """Columns of the requests, in units."""
    table = Analysis(records).request_columns
    return [[None if np.isnan(v) else v / UNIT for v in table[name]] for name in names]


def test_prefill_first_by_hand() -> None:
    """In turn 0, 2 and 4 go to one prefill worker, 1 and 3 to the other.

    The decode worker has six blocks. It reserves two for request 0 at 8, three for 1 at 12. Then
    one is left: 2, whose prompt ends at 16, waits until 0 ends at 21, and 4 (prefilled 20 to 26)
    until 1 ends at 30. What was received runs its last prompt token, and then its decodes.
    """
    records = run()
    over = records.handovers
    assert over is not None and over.prefill_workers == 2
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


def test_decode_reserves_first_by_hand() -> None:
    """Blocks of the decode worker are reserved at 0 for 0 and 1, which go to their prefill workers
    then; 3, which needs none, is on its worker before 1. Request 2 waits until 0 ends at 21, and 4
    until 1 ends at 34: only then are they prefilled."""
    records = run(replace(OVER, order="decode_reserves_first"))
    over = records.handovers
    assert over is not None
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


def test_a_link_sends_one_prompt_after_the_other() -> None:
    """Two prompts of one batch end together; the decode worker has blocks for both at once."""
    both = [Request(i, 0.0, 8, 2, 2) for i in range(2)]
    records = simulate_pools(both, workers(1), workers(1), OVER)
    over = records.handovers
    assert over is not None
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
        assert records.handovers is not None
        found.append(records.handovers.prefilled_on.tolist())
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
