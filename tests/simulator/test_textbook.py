"""The fast path against the textbook oracle: every number bitwise equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sarathi_sim.simulator.loop.pipeline import stage_times
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator.oracle import POLICIES, System, make_requests, start_finish, systems
from tests.textbook.replicas import TextbookReplica


def assert_bitwise_equal(records: Records, oracle: list[TextbookReplica]) -> None:
    table = Analysis(records).requests.set_index("request")
    for log, replica in zip(records.replicas, oracle, strict=True):
        micros = replica.micros
        assert [table.loc[i, "rejected"] is not None for i in replica.rejected] == [True] * len(
            replica.rejected
        )
        assert log.num_iterations == len(micros)
        columns = log.iterations
        for name, of in {
            "group": lambda m: m.slot,
            "ready_s": lambda m: m.ready_s,
            "finish_s": lambda m: m.returned_s,
            "prefill_tokens": lambda m: sum(n for _, n in m.chunks),
            "decodes": lambda m: len(m.decodes),
            "decode_context": lambda m: m.batch.decode_context,
            "padding": lambda m: len(m.padding),
        }.items():
            assert columns[name].tolist() == [of(m) for m in micros], name
        if micros:
            start, finish = start_finish(micros)
            times = stage_times(log)
            assert np.array_equal(times.start, start)
            assert np.array_equal(times.finish, finish)
        for member in replica.members.values():
            row = table.loc[member.request.id]
            assert row["finish_s"] == member.finish_s
            assert row["ttft_s"] == member.first_token_s - row["arrival_s"]
            first = micros[member.iterations[0]].stages[0]
            assert row["queueing_s"] == first - row["arrival_s"]


PADDED = ("request_level", True)
# Padding needs bound micro-batches: request-level batching has no free pool.
POOLS = [(p, free) for p in sorted(POLICIES) for free in (False, True) if (p, free) != PADDED]


# Rate, jitter of op times, sends that block: every pair of values, in half of the eight triples.
# test_any_system draws any.
TIMES = [(None, False, False), (None, True, True), (40.0, True, False), (40.0, False, True)]


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(("policy", "free_pool"), POOLS)
def test_every_policy(policy: str, stages: int, free_pool: bool) -> None:
    for rate, lazy, blocking in TIMES:
        system = System(
            policy=policy,
            layers=(2,) * stages,
            max_batch=5,
            max_in_flight=stages,
            free_pool=free_pool,
            lazy=lazy,
            blocking_send=blocking,
            requests=make_requests(40, seed=stages, rate=rate),
        )
        assert_bitwise_equal(system.fast(), system.textbook())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(systems())
def test_any_system(system: System) -> None:
    assert_bitwise_equal(system.fast(), system.textbook())
