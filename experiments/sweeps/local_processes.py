"""Runs in processes on this machine, each with a channel of its own to this process.

In the common executors (joblib, loky, ``concurrent.futures``) all workers answer through one pipe,
and the executor keeps its writing end open. If a worker is killed while it answers, the reader
waits for ever. Here only the worker holds the other end, so its end closes the channel at any time.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.sweeps.backends import (
    PATIENCE_S,
    Backend,
    Bundles,
    InProcess,
    LostJobs,
    Outcomes,
    Waiting,
)
from sarathi_sim.experiments.sweeps.jobs import Job, JobResult
from sarathi_sim.profiler.storage.child import start_child

STARTS = 3
"""Workers that may die one after the other before they are ready."""
_MODULE = "sarathi_sim.experiments.sweeps.worker"


def processors() -> int:
    """How many processors this process may use."""
    from joblib import cpu_count  # heeds affinity and a container's share

    return int(cpu_count())


def local_backend(workers: int | None) -> Backend:
    """So many processes on this machine (None: one for each processor); one is this process."""
    wanted = workers or processors()
    return LocalProcesses(wanted) if wanted > 1 else InProcess()


class LocalProcesses:
    """Up to ``workers`` processes that run ``module``, started when needed."""

    def __init__(self, workers: int, module: str = _MODULE) -> None:
        self.workers = workers
        self._module = module
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, list[Job]] = {}
        self._answers: SimpleQueue[tuple[_Worker, list[JobResult] | None]] = SimpleQueue()
        self._dead_at_start = 0

    @property
    def processes(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in (*self._busy, *self._idle)]

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield the result of each bundle; or the jobs under way, if no result comes for a while.

        Raises ConfigError where worker processes cannot be started.
        """
        left = iter(bundles)
        at_once = min(ahead, self.workers)
        patience, last = PATIENCE_S, time.monotonic()
        while True:
            while len(self._busy) < at_once and (jobs := next(left, None)) is not None:
                worker = self._idle.pop() if self._idle else _Worker(self._module, self._answers)
                self._busy[worker] = jobs
                worker.begin(jobs)
            if not self._busy:
                return
            try:
                worker, results = self._answers.get(timeout=patience)
            except Empty:
                now = time.monotonic()
                yield Waiting(
                    {
                        f"process {worker.process.pid} for {now - worker.since:.0f} s": jobs
                        for worker, jobs in self._busy.items()
                    },
                    now - last,
                )
                patience *= 2
                continue
            jobs = self._busy.pop(worker, [])
            if not jobs:
                continue  # it was ended earlier
            patience, last = PATIENCE_S, time.monotonic()
            if results is not None:
                self._idle.append(worker)
                self._dead_at_start = 0
                yield results
            else:
                self._check_start(worker)
                yield LostJobs(jobs)

    def _check_start(self, worker: _Worker) -> None:
        code = worker.end()
        self._dead_at_start = 0 if worker.ready else self._dead_at_start + 1
        if self._dead_at_start == STARTS:
            raise ConfigError(
                f"worker processes cannot be started: {STARTS} in a row ended (the last with code "
                f"{code}) before they could begin"
            )

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._busy, *self._idle):
            worker.end()
        self._busy.clear()
        self._idle.clear()


class _Worker:
    """One process, and the thread that talks with it.

    If a process stops in the middle of an answer, the thread waits, not the sweep. ``since`` is
    when it got its jobs, ``ready`` whether it has shown that it can work.
    """

    def __init__(
        self, module: str, answers: SimpleQueue[tuple[_Worker, list[JobResult] | None]]
    ) -> None:
        self.ready = False
        self.since = time.monotonic()
        self._answers = answers
        self._bundles: SimpleQueue[list[Job] | None] = SimpleQueue()
        self.process, self._channel = start_child(module)
        threading.Thread(target=self._talk, daemon=True).start()

    def begin(self, jobs: list[Job]) -> None:
        """Send a bundle."""
        self.since = time.monotonic()
        self._bundles.put(jobs)

    def _talk(self) -> None:
        # Whatever goes wrong here, also in reading an answer, the worker is of no further use.
        with suppress(Exception):
            self._channel.recv()
            self.ready = True
            while jobs := self._bundles.get():
                self._channel.send(jobs)
                self._answers.put((self, self._channel.recv()))
        self._answers.put((self, None))
        self._channel.close()

    def end(self) -> int:
        """Kill the process; returns its exit code."""
        self.process.kill()
        self._bundles.put(None)
        return self.process.wait()
