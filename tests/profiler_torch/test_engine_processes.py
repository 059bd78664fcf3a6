"""Engines of real processes: the simulator forms the same batches, shards agree, failures end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.measured.torch_session import (
    first_difference,
    lockstep,
    measured_records,
    replay,
    stage_times,
)
from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.views.metrics import Analysis
from tests.patience import PATIENCE_S
from tests.processes import children, gone

ROOT = Path(__file__).resolve().parents[2]
MODEL = replace(load_model("tiny-llama-40m"), num_layers=4, hidden_size=64, num_heads=4,
                num_kv_heads=2, head_dim=16, ffn_hidden_size=128, vocab_size=96)  # fmt: skip
MAX_LENGTH, MAX_BATCH = 96, 4
POLICIES: dict[str, dict[str, Any]] = {
    "request_level": {"name": "request_level"},
    "orca_best": {"name": "orca", "case": "best"},
    "orca_worst": {"name": "orca", "case": "worst"},
    "orca_unconstrained": {"name": "orca", "case": "unconstrained"},
    "sarathi_fill": {"name": "sarathi", "chunk_size": 32, "tile": 8},
    "sarathi_reserve": {"name": "sarathi", "chunk_size": 16, "tile": 4, "chunk_rule": "reserve"},
    "sarathi_fixed": {"name": "sarathi", "chunk_size": 24, "tile": 8, "chunk_rule": "fixed"},
}


def spec(pp: int, tp: int = 1, **changes: Any) -> EngineSpec:
    made = EngineSpec(MODEL, (4 // pp,) * pp, tp, slots=MAX_BATCH * pp, max_length=MAX_LENGTH,
                      max_tokens=MAX_BATCH * MAX_LENGTH)  # fmt: skip
    return replace(made, **changes)


def settings(pp: int) -> dict[str, Any]:
    return {
        "max_batch": MAX_BATCH,
        "max_in_flight": pp,
        "kv_capacity": MAX_BATCH * pp * MAX_LENGTH,
        "max_length": MAX_LENGTH,
    }


def scheduler(policy: str, pp: int) -> Scheduler:
    return MicroBatches(build(**POLICIES[policy]), **settings(pp))


def requests(rate: float | None, count: int = 24, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    found = []
    for i, when in enumerate(quantize(arrival).tolist()):
        prompt, output = int(rng.integers(3, 70)), int(rng.integers(1, 20))
        found.append(Request(i, when, prompt, output, MAX_LENGTH - prompt))
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["pp1", "pp2"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineProcesses]:
    with EngineProcesses(spec(request.param), PATIENCE_S) as started:
        yield started


#: About as many requests a second as the engine serves, so that queues empty and fill.
@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 120.0], ids=["offline", "online"])
def test_lockstep_forms_the_same_batches(engine: EngineProcesses, rate: float | None) -> None:
    load, pp = requests(rate), engine.spec.pp
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
    load, pp = requests(None), engine.spec.pp
    run = engine.serve(load, POLICIES["sarathi_fill"], settings(pp))
    other = lockstep(run, load, scheduler("sarathi_fixed", pp))
    assert other is not None
    assert other.startswith("batch 0: engine micro-batch 0, chunks ((0, ")
    short = first_difference(run.served.decisions, [])
    assert short == f"engine {len(run.served.decisions)} batches; simulator 0"
    later = [replace(request, arrival_s=0.5) for request in load]
    assert lockstep(run, later, scheduler("sarathi_fill", pp)) is not None


def test_the_replay_takes_no_longer_than_the_measurement(engine: EngineProcesses) -> None:
    """It leaves out what is not a stage's work or a link, and keeps all that is.

    How near it comes is a question of the machine's noise: ``validate`` says it.
    """
    load, pp = requests(None), engine.spec.pp
    run = engine.serve(load, POLICIES["orca_best"], settings(pp))
    replayed = replay(run, load, scheduler("orca_best", pp))
    times = stage_times(run)
    busiest = (times.finish - times.start).sum(axis=0).max()
    assert busiest < replayed.end_s + 1e-6
    assert replayed.replicas[0].num_iterations == len(run.served.decisions)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [2], indirect=True, ids=["pp2"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2)])
def test_tensor_parallel_ranks_yield_the_same_tokens(
    engine: EngineProcesses, pp: int, tp: int
) -> None:
    load = requests(None, count=10)
    expected = engine.serve(load, POLICIES["orca_best"], settings(2)).served.outputs
    with EngineProcesses(spec(pp, tp), PATIENCE_S) as parallel:
        for policy in ("orca_best", "sarathi_fill"):
            run = parallel.serve(load, POLICIES[policy], settings(pp))
            assert run.served.outputs == expected
            assert lockstep(run, load, scheduler(policy, pp)) is None


def test_what_sockets_and_gloo_say_of_a_lost_peer() -> None:
    from sarathi_sim.profiler.engine.rank import lost_a_peer

    closed = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert all(map(lost_a_peer, (EOFError(), BrokenPipeError(), RuntimeError(closed))))
    assert not any(map(lost_a_peer, (RuntimeError("can't allocate memory"), ValueError("x"))))


# What goes wrong -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silence_s", "complaint"),
    [
        (signal.SIGKILL, PATIENCE_S, "rank 1 of 2 was ended by SIGKILL"),
        (signal.SIGSTOP, 3, "no sign of life for 3 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_run(
    number: int, silence_s: float, complaint: str
) -> None:
    with (
        pytest.raises(ProfileError, match=complaint),
        EngineProcesses(spec(2), silence_s) as engine,
    ):
        pids = [process.pid for process in engine._processes.processes]
        threading.Timer(0.3, os.kill, (pids[1], number)).start()
        while True:
            engine.serve(requests(20.0), POLICIES["orca_best"], settings(2))
    assert gone(pids, seconds=0)


@pytest.mark.slow
def test_neither_a_rank_nor_its_scratch_outlives_the_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from tests.profiler_torch.test_engine_processes import EngineProcesses, spec\n"
        "with EngineProcesses(spec(2)) as engine:\n"
        "    print(engine._processes.folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    scratch = parent.stdout.readline().decode().strip()
    pids = children(parent.pid)
    assert len(pids) == 2 and Path(scratch).is_dir()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pids, PATIENCE_S)
    assert not Path(scratch).exists()


@pytest.mark.slow
def test_what_does_not_fit_is_said() -> None:
    with EngineProcesses(spec(2, max_tokens=40), PATIENCE_S) as engine:
        with pytest.raises(ProfileError, match="2 micro-batches of 5 sequences need more KV slots"):
            engine.serve(requests(None), POLICIES["orca_best"], settings(2) | {"max_batch": 5})
        with pytest.raises(ProfileError, match="tokens does not fit: the engine was started with"):
            engine.serve(requests(None), POLICIES["orca_best"], settings(2))
    too_many = spec(1, slots=10**8)
    with pytest.raises(ProfileError, match=r"the engine needs \d+\.\d GB for weights"), \
            EngineProcesses(too_many):  # fmt: skip
        pass
