"""Where a sweep's runs are simulated: in this process, in processes beside it
(``local_processes.py``), or on Dask workers (``dask_backend.py``).

A backend turns bundles of jobs into results, in whatever order they come. A bundle whose worker
died comes back as lost; what to do about that is decided elsewhere (``execute.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments.sweeps.jobs import Job, JobResult, work

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
    """Nothing has come back for ``seconds``: what is under way, by who has it."""

    under_way: dict[str, list[Job]]
    seconds: float


Outcomes = Generator["list[JobResult] | LostJobs | Waiting", None, None]


class Bundles:
    """Jobs still to be handed out, in bundles of about :data:`BUNDLE_S`.

    How long a run takes is learnt on the way (``took``), so the first bundles hold one job each;
    and towards the end they get smaller, so that all workers finish together. ``single`` keeps
    every bundle to one job.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, single: bool = False) -> None:
        self._todo = deque(jobs)
        self._workers = workers
        self._single = single
        self._seconds = self._runs = 0.0

    def took(self, results: list[JobResult]) -> None:
        """Learn from what came back."""
        self._seconds += sum(result.seconds for result in results)
        self._runs += len(results)

    def __iter__(self) -> Iterator[list[Job]]:
        while self._todo:
            yield [self._todo.popleft() for _ in range(self._size())]

    def _size(self) -> int:
        if self._single or not self._runs:
            return 1
        wanted = math.ceil(BUNDLE_S * self._runs / max(self._seconds, 1e-9))
        return max(1, min(wanted, len(self._todo) // (4 * self._workers)))


class Backend(Protocol):
    """Runs bundles. ``workers`` is how many at a time."""

    workers: int

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what came of each bundle. ``ahead`` is how many may be under way at a time."""
        ...

    def close(self) -> None:
        """Let go of the workers; called however the sweep ended."""
        ...


class InProcess:
    """One after the other, in this process."""

    workers = 1

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        for jobs in bundles:
            yield work(jobs)

    def close(self) -> None:
        """Nothing to let go of."""
