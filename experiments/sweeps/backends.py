"""The backends of a sweep: this process, local worker processes, or Dask workers
(``dask_backend.py``).

A backend turns bundles of jobs into results, in any order. A bundle whose worker died comes back as
lost; ``execute.py`` decides what to do with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sarathi_sim.experiments.sweeps.jobs import Job, JobResult, work
from sarathi_sim.profiler.storage.child import Workers

BUNDLE_S = 0.5
"""Seconds of work that a bundle should hold: sending one costs a few milliseconds."""

PATIENCE_S = 60.0
"""Seconds without any result after which a backend says what is under way; then twice as many."""


@dataclass(frozen=True)
class LostJobs:
    """Jobs whose worker died before it answered."""

    jobs: list[Job]


@dataclass(frozen=True)
class Waiting:
    """No result for ``seconds``: the jobs under way, by worker."""

    under_way: dict[str, list[Job]]
    seconds: float


Outcomes = Generator["list[JobResult] | LostJobs | Waiting", None, None]


class Bundles:
    """Jobs to be sent, in bundles of about :data:`BUNDLE_S`.

    It learns the time of a run from results (``took``), so the first bundles hold one job each.
    Towards the end bundles become smaller, so that all workers finish together. With ``single``
    every bundle has one job. Jobs may be added while others are under way.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, single: bool = False) -> None:
        self._todo = deque(jobs)
        self._workers = workers
        self._single = single
        self._seconds = self._runs = 0.0

    def took(self, results: list[JobResult]) -> None:
        """Learn the time of a run from results."""
        self._seconds += sum(result.seconds for result in results)
        self._runs += len(results)

    def add(self, jobs: Iterable[Job]) -> None:
        """More jobs, behind the others."""
        self._todo.extend(jobs)

    def __iter__(self) -> Iterator[list[Job]]:
        return self

    def __next__(self) -> list[Job]:
        if not self._todo:
            raise StopIteration
        return [self._todo.popleft() for _ in range(self._size())]

    def _size(self) -> int:
        if self._single or not self._runs:
            return 1
        wanted = math.ceil(BUNDLE_S * self._runs / max(self._seconds, 1e-9))
        return max(1, min(wanted, len(self._todo) // (4 * self._workers)))


class Backend(Protocol):
    """Runs bundles, ``workers`` at a time."""

    workers: int

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield the result of each bundle. At most ``ahead`` bundles are under way."""
        ...

    def close(self) -> None:
        """Release the workers; always called at the end of a sweep."""
        ...


class InProcess:
    """One after the other, in this process."""

    workers = 1

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        for jobs in bundles:
            yield work(jobs)

    def close(self) -> None:
        """Nothing to release."""


class LocalProcesses(Workers):
    """Up to ``workers`` processes on this machine, started when needed."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, work.__module__)
        self.workers = workers

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield the result of each bundle; or the jobs under way, if no result comes for a while.

        Raises ConfigError where worker processes cannot be started.
        """
        for kind, jobs, value in self.calls(work, bundles, ahead, PATIENCE_S):
            if kind == "waiting":
                yield Waiting(jobs, value)
            elif kind == "lost":
                yield LostJobs(jobs)
            elif kind == "raised":
                raise value
            else:
                yield value


def processors() -> int:
    """How many processors this process may use."""
    from joblib import cpu_count  # heeds affinity and a container's share

    return int(cpu_count())


def local_backend(workers: int | None) -> Backend:
    """So many processes on this machine (None: one for each processor); one is this process."""
    wanted = workers or processors()
    return LocalProcesses(wanted) if wanted > 1 else InProcess()
