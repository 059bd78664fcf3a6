"""Routers, arrivals, jitter and theory."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Plan, View
from sarathi_sim.policies.request import Request
from sarathi_sim.simulator.loop.jitter import Jitter
from sarathi_sim.simulator.loop.quantum import HORIZON_S, QUANTUM_S, quantize
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.replica import Replica
from sarathi_sim.simulator.loop.simulation import Router, SimulationError, simulate
from sarathi_sim.simulator.views.metrics import Analysis
from tests.simulator.oracle import System, make_requests

SERVICE_S = 2.0**-7


def constant(batch: Batch) -> tuple[float, float, float, float]:
    return SERVICE_S, 0.0, 0.0, 0.0


def serve(
    requests: list[Request], replicas: int = 1, router: Router = "round_robin", max_batch: int = 1
) -> Records:
    schedulers = [
        MicroBatches(Orca(), max_batch=max_batch, kv_capacity=10_000, max_length=100)
        for _ in range(replicas)
    ]
    return simulate(requests, schedulers, constant, (1,), router=router)


def test_single_server_queue_agrees_with_lindley_and_with_m_d_1() -> None:
    """Batch 1, one iteration a request: waiting times follow Lindley's recursion exactly, and
    their mean is rho * s / (2 (1 - rho))."""
    load = 0.6
    arrivals = np.cumsum(np.random.default_rng(5).exponential(SERVICE_S / load, 40_000))
    records = serve([Request(i, float(t), 1, 1, 9) for i, t in enumerate(arrivals)])
    table = Analysis(records).requests
    wait, waits = 0.0, []
    at = quantize(arrivals)
    for i in range(len(at)):
        waits.append(wait)
        if i + 1 < len(at):
            wait = max(0.0, wait + SERVICE_S - (at[i + 1] - at[i]))
    assert table["queueing_s"].tolist() == waits
    # Waits are correlated over some 1 / (1 - rho)^2 requests: the standard error is about 3 %.
    assert np.mean(waits) == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.09)


def test_round_robin_takes_turns() -> None:
    records = serve([Request(i, i * 1.0, 4, 2, 9) for i in range(7)], replicas=3)
    assert records.replica.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_least_tokens_avoids_the_loaded_replica() -> None:
    lengths = [50, 5, 5, 5, 5, 50]
    requests = [Request(i, 0.0, p, 2, 10) for i, p in enumerate(lengths)]
    # 60 | 15 | 15; then 30, 30, and the tie between the two goes to the first of them.
    records = serve(requests, replicas=3, router="least_tokens")
    assert records.replica.tolist() == [0, 1, 2, 1, 2, 1]


def test_least_tokens_sees_what_has_finished_by_the_instant_of_arrival() -> None:
    # Request 0, the larger by declaration, finishes exactly when request 2 arrives.
    requests = [Request(0, 0.0, 4, 1, 20), Request(1, 0.0, 4, 9, 9)]
    requests.append(Request(2, SERVICE_S, 4, 1, 9))
    assert serve(requests, replicas=2, router="least_tokens").replica.tolist() == [0, 1, 0]


def test_arrivals_at_the_instant_of_a_return_are_in_the_next_batch() -> None:
    requests = [Request(0, 0.0, 4, 3, 9), Request(1, SERVICE_S, 4, 1, 9)]
    table = Analysis(serve(requests, max_batch=2)).requests
    assert table["queueing_s"].tolist() == [0.0, 0.0]


def test_jitter_does_not_depend_on_how_it_is_drawn() -> None:
    seed = np.random.SeedSequence(3)
    drawn = np.array([Jitter(0.1, 2, seed).factors() for _ in range(1)])
    source = Jitter(0.1, 2, seed)
    factors = np.array([source.factors() for _ in range(5000)])
    assert (factors[0] == drawn[0]).all()
    assert factors.mean() == pytest.approx(1.0, abs=0.005)
    assert factors.std() == pytest.approx(0.1, rel=0.03)
    with pytest.raises(ValueError, match="between 0 and 10"):
        Jitter(-1, 2, seed)


def test_every_replica_has_its_own_jitter() -> None:
    """Twice the same requests on two replicas: alike without jitter, not with it."""
    requests = [Request(i, 0.0, 20, 10, 20) for i in range(8)]
    for jitter in (0.0, 0.2):
        system = System(replicas=2, jitter=jitter, requests=requests)
        one, other = (log.iterations["finish_s"].tolist() for log in system.fast().replicas)
        assert (one == other) == (jitter == 0.0)
        assert [one, other] == [[m.returned_s for m in r.micros] for r in system.textbook()]


def test_a_rejected_request_is_no_load() -> None:
    """60 tokens that can never fit do not keep the next request from the first replica."""
    requests = [Request(0, 0.0, 50, 2, 60), Request(1, 1.0, 4, 2, 9)]
    records = serve(requests, replicas=2, router="least_tokens")
    assert records.replica.tolist() == [-1, 0]


def test_a_policy_that_stops_planning_is_an_error() -> None:
    class Idle:
        holds_finished = False

        def plan(self, view: View) -> Plan | None:
            return None

    scheduler = MicroBatches(Idle(), max_batch=1, kv_capacity=100, max_length=100)
    with pytest.raises(SimulationError, match="1 of 1 requests were never finished"):
        simulate([Request(0, 0.0, 4, 2, 9)], [scheduler], constant, (1,))


def test_arrivals_must_lie_within_the_horizon() -> None:
    for late in (-1.0, HORIZON_S):
        with pytest.raises(SimulationError, match="arrivals must lie between"):
            serve([Request(0, late, 4, 2, 9)])


def test_no_requests_at_all() -> None:
    from sarathi_sim.profiler.facts.device import load_device
    from sarathi_sim.profiler.facts.model import load_model

    summary = Analysis(serve([])).summary(load_model("llama-2-7b"), load_device("a40"), 1)
    assert summary["requests"] == 0 and summary["makespan_s"] == 0.0


def test_quanta() -> None:
    assert quantize(QUANTUM_S * 0.4) == 0.0
    assert quantize(QUANTUM_S * 0.6) == QUANTUM_S
    times = np.random.default_rng(0).uniform(0, 1e5, 1000)
    whole = quantize(times) / QUANTUM_S
    assert (whole == np.round(times / QUANTUM_S)).all()
    assert np.abs(quantize(times) - times).max() <= QUANTUM_S / 2


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("rate", [None, 30.0, 60.0])
@pytest.mark.parametrize(("layers", "in_flight"), [((2,), 2), ((2,), 4), ((2, 2), 1), ((2, 2), 7)])
def test_few_dispatches_per_iteration(
    monkeypatch: pytest.MonkeyPatch,
    lazy: bool,
    layers: tuple[int, ...],
    in_flight: int,
    rate: float | None,
) -> None:
    """A wake-up that multiplied would change no result, only the time a run takes."""
    dispatches = 0
    dispatch = Replica._dispatch

    def counted(self: Replica, now: float) -> None:
        nonlocal dispatches
        dispatches += 1
        dispatch(self, now)

    monkeypatch.setattr(Replica, "_dispatch", counted)
    system = System(
        layers=layers, max_in_flight=in_flight, lazy=lazy, requests=make_requests(200, rate=rate)
    )
    records = system.fast()
    # One when a batch returns, one when stage 0 is free, and some for arrivals.
    assert dispatches <= 3 * records.replicas[0].num_iterations


@pytest.mark.parametrize("lazy", [False, True])
def test_a_free_pool_keeps_its_members_together(lazy: bool) -> None:
    """As many requests as one micro-batch holds: they stay together, and are not moved about."""
    system = System(
        policy="orca_unconstrained",
        layers=(1,) * 4,
        max_batch=16,
        max_in_flight=4,
        free_pool=True,
        lazy=lazy,
        requests=[Request(i, 0.0, 8, 40, 100) for i in range(16)],
    )
    assert len(system.fast().replicas[0].spans) == 2 * 16


def test_ids_and_schedulers_are_used_once() -> None:
    with pytest.raises(ValueError, match="two requests have the same id"):
        serve([Request(0, 0.0, 4, 2, 9)] * 2)
    scheduler = MicroBatches(Orca(), max_batch=1, kv_capacity=100, max_length=100)
    simulate([Request(0, 0.0, 4, 2, 9)], [scheduler], constant, (1,))
    with pytest.raises(ValueError, match="has served before"):
        simulate([Request(0, 0.0, 4, 2, 9)], [scheduler], constant, (1,))


def test_no_simulation_beyond_the_exact_range() -> None:
    def slow(batch: Batch) -> tuple[float, float, float, float]:
        return 3000.0, 0.0, 0.0, 0.0

    scheduler = MicroBatches(Orca(), max_batch=1, kv_capacity=9000, max_length=9000)
    with pytest.raises(SimulationError, match="24 days"):
        simulate([Request(0, 0.0, 4, 1000, 8000)], [scheduler], slow, (1,))
