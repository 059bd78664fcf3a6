"""The fast path against the textbook oracle: every number bitwise equal."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.simulator.oracle import POLICIES, System, assert_bitwise_equal, make_requests, systems

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
