"""Engines of real processes beside the simulator: it forms the same batches, and shards agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.experiments.lab.engines.session import first_difference, lockstep, measured_records
from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine import processes as engine_processes
from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.shard.rank_processes import RankProcesses
from sarathi_sim.simulator.views.metrics import Analysis
from tests.patience import PATIENCE_S
from tests.profiler_torch.device_ranks_main import WAIT_S
from tests.profiler_torch.small import requests, settings
from tests.profiler_torch.test_engine_processes import POLICIES, spec

pytestmark = pytest.mark.lab


def scheduler(policy: str, pp: int) -> Scheduler:
    return MicroBatches(build(**POLICIES[policy]), **settings(pp))


@pytest.fixture(scope="module", params=[1, 2], ids=["pp1", "pp2"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineProcesses]:
    with EngineProcesses(spec(request.param), PATIENCE_S) as started:
        yield started


#: About as many requests a second as the engine serves, so that queues empty and fill.
@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 120.0], ids=["offline", "online"])
def test_it_forms_the_same_batches(engine: EngineProcesses, rate: float | None) -> None:
    load, pp = requests(24, 1, rate), engine.spec.pp
    outputs = []
    for policy, named in POLICIES.items():
        run = engine.serve(load, named, settings(pp))
        assert lockstep(run, load, scheduler(policy, pp)) is None, policy
        assert len(run.served.decisions) > 10
        assert run.served.margin > 4e-5  # the logits' rounding could change no token
        outputs.append(run.served.outputs)
        _check_books(run.served.outputs, load)
        _check_metrics(Analysis(measured_records(run, load, scheduler(policy, pp))), load)
    assert all(output == outputs[0] for output in outputs)


def _check_books(outputs: dict[int, list[int]], load: list[Request]) -> None:
    assert {i: len(tokens) for i, tokens in outputs.items()} == {
        r.id: r.output_tokens for r in load
    }


def _check_metrics(measured: Analysis, load: list[Request]) -> None:
    """The measured run satisfies what every simulated one does."""
    table, times = measured.requests, measured.gaps[0].times
    assert (table["latency_s"] >= table["ttft_s"]).all()
    assert (table["queueing_s"] >= 0).all()
    assert (times.start[1:] >= times.finish[:-1]).all()  # a stage runs one batch at a time
    assert (times.start[:, 1:] >= times.start[:, :-1]).all()
    accounts = measured.ledger.drop(columns=["replica", "stage", "wall_s"])
    assert np.allclose(accounts.sum(axis=1), measured.ledger["wall_s"])


def test_a_difference_is_found_and_said(engine: EngineProcesses) -> None:
    """Without the recorded clocks' arrivals, or with another policy, sequences are not the same."""
    load, pp = requests(24, 1), engine.spec.pp
    run = engine.serve(load, POLICIES["sarathi_fill"], settings(pp))
    other = lockstep(run, load, scheduler("sarathi_fixed", pp))
    assert other is not None and other.startswith("batch 0: engine Decision(group=0, ")
    short = first_difference(run.served.decisions, [])
    assert short == f"engine {len(run.served.decisions)} batches; simulator 0"
    later = [replace(request, arrival_s=0.5) for request in load]
    assert lockstep(run, later, scheduler("sarathi_fill", pp)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("engine", [2], indirect=True, ids=["pp2"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2)])
def test_ranks_yield_the_same_tokens(engine: EngineProcesses, pp: int, tp: int) -> None:
    load = requests(10, 1)
    expected = engine.serve(load, POLICIES["orca_best"], settings(2)).served.outputs
    with EngineProcesses(spec(pp, tp), PATIENCE_S) as parallel:
        for policy in ("orca_best", "sarathi_fill"):
            run = parallel.serve(load, POLICIES[policy], settings(pp))
            assert run.served.outputs == expected
            assert lockstep(run, load, scheduler(policy, pp)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2)])
def test_activations_that_travel_apart(monkeypatch: pytest.MonkeyPatch, pp: int, tp: int) -> None:
    load = requests(10, 1)
    with EngineProcesses(spec(1), PATIENCE_S) as engine:
        expected = engine.serve(load, POLICIES["orca_best"], settings(1)).served.outputs

    def start(module: str, *more: Any) -> RankProcesses:
        assert module == "sarathi_sim.profiler.engine.rank"
        return RankProcesses("tests.profiler_torch.device_ranks_main", *more)

    monkeypatch.setattr(engine_processes, "RankProcesses", start)
    with EngineProcesses(spec(pp, tp, device="cuda"), PATIENCE_S) as engine:
        assert engine.environment["gpu"] == "stand-in for cuda"
        for policy in ("orca_best", "sarathi_fill"):
            run = engine.serve(load, POLICIES[policy], settings(pp))
            assert run.served.outputs == expected
            assert lockstep(run, load, scheduler(policy, pp)) is None
            log = run.stages
            assert ((log.finish - log.start) > WAIT_S).all(), "a stage's time ends with its work"
            # Both stages' devices are waited for before the second one's input is there. (The first
            # may note its finish late, when the message has long arrived.)
            assert ((log.arrived[:, 1] - log.start[:, 0]) > 2 * WAIT_S).all()
