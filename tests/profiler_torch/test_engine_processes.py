"""Engines of real processes: what goes wrong ends them, and is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.planning.journal import ProfileError
from sarathi_sim.simulator.loop.clock import quantize
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


def requests(rate: float | None, count: int = 24, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    found = []
    for i, when in enumerate(quantize(arrival).tolist()):
        prompt, output = int(rng.integers(3, 70)), int(rng.integers(1, 20))
        found.append(Request(i, when, prompt, output, MAX_LENGTH - prompt))
    return found


def test_what_sockets_and_gloo_say_of_a_lost_peer() -> None:
    from sarathi_sim.profiler.engine.rank import lost_a_peer

    closed = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert all(map(lost_a_peer, (EOFError(), BrokenPipeError(), RuntimeError(closed))))
    assert not any(map(lost_a_peer, (RuntimeError("can't allocate memory"), ValueError("x"))))


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
