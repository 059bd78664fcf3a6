"""Where a sweep's runs are simulated: in this process, in processes beside it, or on Dask workers.

A backend turns bundles of jobs into results, in whatever order they come. A bundle whose worker
died comes back as lost; what to do about that is decided elsewhere (``execute.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from experiments.sweeps.work import Job, Result, in_process, work

BUNDLE_S = 0.5
"""Seconds of work that a bundle should hold: sending one costs a few milliseconds."""


@dataclass(frozen=True)
class Lost:
    """Jobs whose worker died before it answered."""

    jobs: list[Job]


Outcomes = Generator["list[Result] | Lost", None, None]


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

    def took(self, results: list[Result]) -> None:
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
            yield in_process(jobs)

    def close(self) -> None:
        """Nothing to let go of."""


class LocalProcesses:
    """A pool of processes on this machine (joblib's loky)."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        from joblib import Parallel, delayed
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        under_way: dict[str, list[Job]] = {}
        left = iter(bundles)

        def tasks() -> Iterator[object]:
            for jobs in left:
                under_way[jobs[0].run.key] = jobs
                yield delayed(work)(jobs)

        while True:
            # Two at least: with one, joblib would run the jobs in this very process.
            pool = Parallel(
                n_jobs=max(2, self.workers),
                backend="loky",
                return_as="generator_unordered",
                pre_dispatch=ahead,
                batch_size=1,
            )
            try:
                with closing(pool(tasks())) as outcomes:  # closed early, joblib kills its workers
                    for results in outcomes:
                        del under_way[results[0].key]
                        yield results
                return
            except TerminatedWorkerError:
                # The pool is broken, and with it all that was under way; the next one is not.
                lost, under_way = list(under_way.values()), {}
                for jobs in lost:
                    yield Lost(jobs)

    def close(self) -> None:
        """Nothing to let go of: an interrupted pool was killed, an idle one ends by itself."""
