"""Routers, arrivals, clients, jitter and theory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.orca import Orca
from sarathi_sim.policies.policy import Plan, Policy, View
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.simulator.loop.clock import HORIZON_S, QUANTUM_S, quantize
from sarathi_sim.simulator.loop.pipeline import Jitter
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.replica import Replica
from sarathi_sim.simulator.loop.routers import Router
from sarathi_sim.simulator.loop.simulation import Arrival, ClosedLoop, SimulationError
from sarathi_sim.simulator.views.metrics import Analysis, Hardware
from tests.simulator import simulate
from tests.simulator.oracle import System, make_requests

SERVICE_S = 2.0**-7


def constant(batch: Batch) -> tuple[float, float, float, float]:
    return SERVICE_S, 0.0, 0.0, 0.0


def scheduler(*, policy: Policy | None = None, max_batch: int = 1, max_length: int = 100) -> Any:
    return MicroBatches(
        policy or Orca(), max_batch=max_batch, kv_capacity=10_000, max_length=max_length
    )


def serve(
    requests: list[Request],
    replicas: int = 1,
    router: Router = "round_robin",
    max_batch: int = 1,
    seed: int = 0,
) -> Records:
    schedulers = [scheduler(max_batch=max_batch) for _ in range(replicas)]
    return simulate(requests, schedulers, constant, (1,), router=router, seed=seed)


@pytest.mark.slow
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


#: Tokens and arrival of A to G: each is served alone, a unit a token.
SEVEN = [(3, 0), (1, 0), (1, 0), (9, 0), (1, 1), (1, 1), (1, 1)]


def seven(router: Router, seed: int = 0) -> tuple[list[int], list[float]]:
    """The replicas of three to which A to G go, and when they finish."""
    requests = [Request(i, at * SERVICE_S, 1, n, n) for i, (n, at) in enumerate(SEVEN)]
    records = serve(requests, 3, router, seed=seed)
    finish_s = Analysis(records).requests["finish_s"]
    return records.replica.tolist(), (finish_s / SERVICE_S).tolist()


def test_least_requests_by_hand() -> None:
    """A, B and C go to 0, 1 and 2, and D to 0, the first of three with one each. At 1 B and C have
    ended: E finds 2 | 0 | 0 and goes to 1, F to 2, and G to 1, the first of those with one."""
    assert seven("least_requests") == ([0, 1, 2, 0, 1, 2, 1], [3, 1, 1, 12, 2, 2, 3])
    # By tokens, D goes to 1, which holds the fewest.
    assert seven("least_tokens")[0][:4] == [0, 1, 2, 1]


def test_power_of_two_by_hand() -> None:
    """Seed 1 draws the replicas 01, 12, 21, 20, 02, 02, 21. A and B take the first of two empty
    ones, C the empty 2, D the first of equals, 2. At 1 B and C have ended, 1 | 0 | 1 are left: E
    takes the first of equals, 0, F finds 2 | 0 | 1 and goes to 2, G finds 2 | 0 | 2 and goes to
    1."""
    assert seven("power_of_two", seed=1) == ([0, 1, 2, 2, 0, 2, 1], [3, 1, 1, 10, 4, 11, 2])
    for router in ("power_of_two", "random"):
        alone = serve([Request(i, 0.0, 1, 1, 9) for i in range(9)], 1, router)
        assert alone.replica.tolist() == [0] * 9


def test_random_sends_each_replica_its_share() -> None:
    """Of 900 requests each of three replicas gets 300, give or take four standard deviations of
    14; and the next one does not depend on the last."""
    sent = serve([Request(i, 0.0, 1, 1, 1) for i in range(900)], 3, "random").replica
    assert max(abs(np.bincount(sent) - 300)) < 57
    assert abs((sent[1:] == sent[:-1]).sum() - 300) < 57


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


class Idle:
    holds_finished = False

    def plan(self, view: View) -> Plan | None:
        return None


def test_simulations_that_cannot_be() -> None:
    def slow(batch: Batch) -> tuple[float, float, float, float]:
        return 3000.0, 0.0, 0.0, 0.0

    one = [Request(0, 0.0, 4, 2, 9)]
    with pytest.raises(SimulationError, match="1 of 1 requests were never finished"):
        simulate(one, [scheduler(policy=Idle())], constant, (1,))
    for late in (-1.0, HORIZON_S):
        with pytest.raises(SimulationError, match="arrivals must lie between"):
            serve([Request(0, late, 4, 2, 9)])
    with pytest.raises(SimulationError, match="24 days"):
        simulate([Request(0, 0.0, 4, 1000, 8000)], [scheduler(max_length=9000)], slow, (1,))
    with pytest.raises(ValueError, match="two requests have the same id"):
        serve(one * 2)
    used = scheduler()
    simulate(one, [used], constant, (1,))
    with pytest.raises(ValueError, match="has served before"):
        simulate(one, [used], constant, (1,))


def test_no_requests_at_all() -> None:
    summary = Analysis(serve([])).summary(load_model("llama-2-7b"), Hardware(load_device("a40"), 1))
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


# Clients that wait for an answer before they send the next request


UNIT = 2.0**-10


def predict(batch: Batch) -> tuple[float, float, float, float]:
    """A unit for each token of a prompt."""
    return batch.prefill_tokens * UNIT, 0.0, 0.0, 0.0


def run(prompts: list[int], clients: object, admission_s: float = 0.0) -> Records:
    """One stage; each request is served alone and ends with its prompt."""
    requests = [Request(10 + i, 0.0, prompt, 1, 1) for i, prompt in enumerate(prompts)]
    scheduler = MicroBatches(
        Orca(max_prefills=1), max_batch=2, max_in_flight=1, kv_capacity=64, max_length=16
    )
    around: dict[str, Any] = {"clients": clients, "admission_s": admission_s}
    return simulate(requests, [scheduler], predict, (1,), **around)


def units(records: Records, column: str) -> list[float]:
    return (Analysis(records).requests[column] / UNIT).tolist()


def test_two_clients_by_hand() -> None:
    """A is served until 4 and B until 6. A's answer sends C 7 later, B's sends D at once."""
    records = run([4, 2, 3, 5], ClosedLoop(2, np.array([0, 0, 7, 0]) * UNIT))
    assert units(records, "arrival_s") == [0, 0, 11, 6]
    assert units(records, "finish_s") == [4, 6, 14, 11]
    assert units(records, "queueing_s") == [0, 4, 0, 0]


def test_a_front_end_admits_one_after_the_other_by_hand() -> None:
    """Each admission takes 3: A is in at 3 and served until 7, B in at 6. A's answer sends C, in at
    10; B is served until 9, and sends D, which waits for C: it is in at 13."""
    records = run([4, 2, 3, 5], ClosedLoop(2, np.zeros(4)), 3 * UNIT)
    assert units(records, "arrival_s") == [0, 0, 7, 9]
    assert units(records, "finish_s") == [7, 9, 13, 18]
    assert units(records, "queueing_s") == [3, 7, 3, 4]


def test_clients_who_forget_a_request() -> None:
    class Forgetful(ClosedLoop):
        def answered(self, position: int, now: float) -> list[Arrival]:
            return []

    with pytest.raises(SimulationError, match="2 of 3 requests were never sent"):
        run([1, 2, 3], Forgetful(1, np.zeros(3)))
