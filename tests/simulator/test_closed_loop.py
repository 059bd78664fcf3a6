"""Clients that wait for an answer before they send the next request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.closed_loop import Arrival, ClosedLoop
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.simulation import SimulationError, simulate
from sarathi_sim.simulator.views.metrics import Analysis

UNIT = 2.0**-10


def predict(batch: Batch) -> tuple[float, float, float, float]:
    """A unit for each token of a prompt."""
    return batch.prefill_tokens * UNIT, 0.0, 0.0, 0.0


def run(prompts: list[int], clients: object) -> Records:
    """One stage; each request is served alone and ends with its prompt."""
    requests = [Request(10 + i, 0.0, prompt, 1, 1) for i, prompt in enumerate(prompts)]
    scheduler = MicroBatches(
        Orca(max_prefills=1), max_batch=2, max_in_flight=1, kv_capacity=64, max_length=16
    )
    return simulate(requests, [scheduler], predict, (1,), clients=clients)  # type: ignore[arg-type]


def units(records: Records, column: str) -> list[float]:
    return (Analysis(records).requests[column] / UNIT).tolist()


def test_two_clients_by_hand() -> None:
    """A is served until 4 and B until 6. A's answer sends C 7 later, B's sends D at once."""
    records = run([4, 2, 3, 5], ClosedLoop(2, np.array([0, 0, 7, 0]) * UNIT))
    assert units(records, "arrival_s") == [0, 0, 11, 6]
    assert units(records, "finish_s") == [4, 6, 14, 11]
    assert units(records, "queueing_s") == [0, 4, 0, 0]


def test_a_rejected_request_counts_as_answered() -> None:
    """B and C are longer than a sequence may be, so D is sent at 0 as well."""
    records = run([4, 20, 20, 5], ClosedLoop(2, np.zeros(4)))
    assert sorted(records.rejections) == [11, 12]
    assert units(records, "arrival_s") == [0, 0, 0, 0]
    assert units(records, "finish_s")[::3] == [4, 9]


def test_more_clients_than_requests() -> None:
    records = run([4, 2], ClosedLoop(9, np.zeros(2)))
    assert units(records, "finish_s") == [4, 6]


def test_never_more_under_way_than_clients() -> None:
    records = run([1 + i % 7 for i in range(60)], ClosedLoop(3, np.zeros(60)))
    table = Analysis(records).requests
    events = sorted([(at, 1) for at in table["arrival_s"]] + [(at, -1) for at in table["finish_s"]])
    under_way = np.cumsum([change for _, change in events])
    assert under_way.max() == 3
    # One is always sent where one finishes, until there are no more.
    assert (under_way[3:-4] >= 2).all()


def test_clients_who_forget_a_request() -> None:
    class Forgetful(ClosedLoop):
        def answered(self, position: int, now: float) -> list[Arrival]:
            return []

    with pytest.raises(SimulationError, match="2 of 3 requests were never sent"):
        run([1, 2, 3], Forgetful(1, np.zeros(3)))


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    """Any dependence may be told: here each request is the next turn of a session of two."""

    class Sessions:
        def begin(self) -> Iterable[Arrival]:
            return [(0.0, 0), (2 * UNIT, 2)]

        def answered(self, position: int, now: float) -> Iterable[Arrival]:
            return [(now + 8 * UNIT, position + 1)] if position % 2 == 0 else []

    records = run([4, 2, 3, 5], Sessions())
    assert units(records, "arrival_s") == [0, 12, 2, 15]
    assert units(records, "finish_s") == [4, 14, 7, 20]
