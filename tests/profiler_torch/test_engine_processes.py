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

import pytest

from sarathi_sim.profiler.engine.processes import EngineProcesses
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.planning.grid import ProfileError
from tests.patience import PATIENCE_S
from tests.processes import children, gone
from tests.profiler_torch.small import GQA, MAX_LENGTH, requests, settings

ROOT = Path(__file__).resolve().parents[2]
MODEL = replace(GQA, num_layers=4)
MAX_BATCH = 4
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
        (signal.SIGSTOP, 3, "no answer for 3 s"),
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
            engine.serve(requests(24, 1, 20.0), POLICIES["orca_best"], settings(2))
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
            engine.serve(requests(24, 1), POLICIES["orca_best"], settings(2) | {"max_batch": 5})
        with pytest.raises(ProfileError, match="tokens does not fit: the engine was started with"):
            engine.serve(requests(24, 1), POLICIES["orca_best"], settings(2))
    too_many = spec(1, slots=10**8)
    with pytest.raises(ProfileError, match=r"the engine needs \d+\.\d GB for weights"), \
            EngineProcesses(too_many):  # fmt: skip
        pass
