"""Whatever happens to a worker is noticed, and workers end with their parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from sarathi_sim.experiments.sweeps.backends import LocalProcesses
from sarathi_sim.experiments.sweeps.execute import execute
from sarathi_sim.experiments.sweeps.plan import SweepPlan
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.storage import child
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.odd_worker import VARIABLE, never_ends
from tests.experiments.small_sweep import RUNS, Files, swept, tree
from tests.experiments.test_sweep_trust import ROOT, start, wait_for_runs
from tests.patience import PATIENCE_S
from tests.processes import children, gone, state

ODD = "tests.experiments.odd_worker"


@pytest.mark.slow
def test_a_worker_killed_within_its_answer_costs_nothing(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one pipe for all workers, the reader would wait for the other half for ever."""
    mark = tmp_path / "mark"
    monkeypatch.setattr(child, "MODULE", ODD)
    monkeypatch.setenv(VARIABLE, f"kill:{mark}")
    report = swept(tiny_plan, tmp_path / "sweep", LocalProcesses(2))
    assert mark.exists()
    assert (report.finished, report.lost_workers) == (RUNS, 1)
    assert tree(tmp_path / "sweep") == tiny_files


@pytest.mark.slow
def test_a_worker_that_stops_within_its_answer_is_named(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MODULE", ODD)
    monkeypatch.setenv(VARIABLE, f"stop:{tmp_path / 'mark'}")
    monkeypatch.setattr("sarathi_sim.experiments.sweeps.execute.PATIENCE_S", 0.5)
    backend = LocalProcesses(2)
    said: list[str] = []

    def hear(text: str) -> None:
        alone = ";" not in text.partition(";")[2]  # all others have answered
        if alone and (tmp_path / "mark").exists():
            stopped = int((tmp_path / "mark").read_text())
            if state(stopped) == "T":
                assert f"with process {stopped} " in text
                said.append(text)
                os.kill(stopped, signal.SIGKILL)

    report = swept(tiny_plan, tmp_path / "sweep", backend, say=hear)
    assert report.finished == RUNS
    assert tree(tmp_path / "sweep") == tiny_files
    found = re.fullmatch(
        r"no result for [\d.]+ s; waiting for run (\w{16}) \((.+)\) "
        r"with process \d+ for \d+ s",
        said[0],
    )
    assert found and found[1] in {run.key for run in tiny_plan.runs}


def test_workers_that_cannot_start(
    tiny_plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MODULE", "no.such.module")
    with pytest.raises(
        UserError, match=rf"cannot be started: {child.STARTS} in a row ended .*code 1"
    ):
        swept(tiny_plan, tmp_path / "sweep", LocalProcesses(2))


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tiny_config: Path, tmp_path: Path) -> None:
    process = start(tiny_config, tmp_path / "sweep", "--set", "workload.requests=2000")
    wait_for_runs(tmp_path / "sweep", 1)
    workers = children(process.pid)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert len(workers) == 2
    assert gone(workers, seconds=PATIENCE_S)


def worker(module: str, **environment: str) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=theirs.fileno(),
            cwd=ROOT,
            env=os.environ | environment,
        )
    assert ours.recv() == child.READY
    return process, ours


def test_a_worker_ends_with_its_channel() -> None:
    """Where the system does not end it with its parent, this does; also in the middle of a run."""
    idle, channel = worker(child.MODULE)
    channel.close()
    assert idle.wait(timeout=PATIENCE_S) == 0
    busy, channel = worker(child.MODULE)
    channel.send((never_ends, ()))
    channel.close()
    assert busy.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_two_processes_give_the_same_bytes_and_leave_neither_process_nor_thread(
    tiny_plan: SweepPlan, tiny_files: Files, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    backend = LocalProcesses(2)
    pids: list[int] = []
    store = Store(tmp_path / "sweep")
    store.open(False)
    with closing(backend):
        for _ in execute(tiny_plan, store, backend):
            pids += backend.processes
    assert tree(tmp_path / "sweep") == tiny_files
    assert pids and backend.processes == []
    assert gone(pids, seconds=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before
