"""A sweep on a Dask cluster: scheduler and two workers on loopback, one killed half-way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.plan import SweepPlan, plan_sweep
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called
from tests.experiments.small_sweep import RUNS, SWEEP, swept, tree
from tests.experiments.test_sweep_trust import ROOT, finished, wait_for_runs
from tests.patience import PATIENCE_S

pytest.importorskip("distributed")

from sarathi_sim.experiments.sweeps.backends import DaskWorkers

DASK = Path(sys.executable).with_name("dask")


class Cluster:
    """A scheduler and workers to add; `tests.docs` starts those of docs/research/fair.md."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.address = folder, f"tcp://127.0.0.1:{port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        quiet = ("--dashboard-address", "127.0.0.1:0")
        words = ("scheduler", "--host", "127.0.0.1", "--port", str(port), *quiet)
        self._start(*words, path=without_package(folder / "scheduler"))  # needs none of ours

    def worker(self, path: Path = ROOT) -> int:
        """Start one, without the nanny that takes as long to start; returns its process group."""
        quiet = ("--nthreads", "1", "--no-dashboard", "--no-nanny")
        return self._start("worker", self.address, *quiet, path=path)

    def _start(self, *words: str, path: Path = ROOT) -> int:
        process = subprocess.Popen(
            [DASK, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes.append(process)
        return process.pid

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def without_package(folder: Path) -> Path:
    """A folder for PYTHONPATH that hides ours."""
    blocked = folder / "sarathi_sim"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('no such package here')")
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.stop()


@pytest.mark.slow
def test_one_of_two_workers_is_killed_half_way(
    cluster: Cluster, tiny_config: Path, tmp_path: Path
) -> None:
    plan = plan_sweep(tiny_config, ["workload.requests=400"])
    swept(plan, tmp_path / "here", InProcess())
    doomed = cluster.worker()
    cluster.worker()
    killed = []

    def kill() -> None:
        wait_for_runs(tmp_path / "there", len(plan.runs) // 3)
        os.killpg(doomed, signal.SIGKILL)
        killed.append(doomed)

    backend = DaskWorkers(cluster.address)
    backend._client.wait_for_workers(2, timeout=PATIENCE_S)
    killer = threading.Thread(target=kill)
    killer.start()
    report = swept(plan, tmp_path / "there", backend)
    killer.join()
    assert killed
    assert (report.finished, report.failures) == (len(plan.runs), {})
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "by", "says"),
    [
        (1, signal.SIGKILL, "has not answered, or had no worker, for 2 s: start one with: dask"),
        (0, signal.SIGKILL, "--workers: the scheduler was lost"),
        (0, signal.SIGSTOP, "has not answered, or had no worker, for 2 s"),
    ],
)
def test_a_cluster_that_loses_its_last_worker_or_its_scheduler_is_not_waited_for_without_end(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, by: int, says: str
) -> None:
    monkeypatch.setattr("sarathi_sim.experiments.sweeps.backends.WITHOUT_WORKERS_S", 2)
    config = tmp_path / "tiny.yaml"
    config.write_text(SWEEP.replace("requests: 40", "requests: 400"), encoding="utf-8")
    cluster.worker()
    doomed, out = cluster.processes[lost].pid, tmp_path / "out"

    def kill() -> None:
        wait_for_runs(out, 3)
        os.killpg(doomed, by)

    words = ("sweep", config, "--out", out, "--quiet")
    killer = threading.Thread(target=kill)
    killer.start()
    stopped = called(*words, "--workers", cluster.address, code=2)
    killer.join()
    assert says in stopped.stderr
    kept = finished(out)
    assert 3 <= len(kept) < RUNS
    assert f"stopped: {len(kept)} of {RUNS} runs are finished" in stopped.stderr
    assert len(pd.read_parquet(out / "results.parquet")) == len(kept)

    called(*words, "--resume", "--workers", 1)
    assert len(finished(out)) == RUNS


@pytest.mark.slow
def test_a_worker_without_the_package_is_named_and_ends_the_sweep(
    cluster: Cluster, tiny_plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that joins while runs are under way: a task must not end it without a word."""
    monkeypatch.setattr("sarathi_sim.experiments.sweeps.backends.LOOK_S", 0.01)
    cluster.worker()
    backend = DaskWorkers(cluster.address)
    cluster.worker(without_package(tmp_path / "blocked"))
    backend._client.wait_for_workers(2, timeout=PATIENCE_S)
    named = pytest.raises(UserError, match=r"the worker tcp://127\.0\.0\.1:\d+ cannot import this")
    with named:
        DaskWorkers(cluster.address)
    with named:
        swept(tiny_plan, tmp_path / "there", backend)


@pytest.mark.slow
def test_a_worker_with_other_code_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.worker()
    monkeypatch.setattr("sarathi_sim.experiments.sweeps.backends.code_fingerprint", lambda: "other")
    with pytest.raises(UserError, match="has another version of this package"):
        DaskWorkers(cluster.address)


@pytest.mark.slow
def test_no_worker_and_no_scheduler(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sarathi_sim.experiments.sweeps.backends.CONNECT_S", 5)
    with pytest.raises(UserError, match="or had no worker, for 5 s: start one with: dask worker"):
        DaskWorkers(cluster.address)
    cluster.stop()
    with pytest.raises(UserError, match="no Dask scheduler answers there"):
        DaskWorkers(cluster.address)
