"""The backends of a sweep: this process, local worker processes, or the workers of a Dask cluster.
They turn bundles of jobs into results, in any order."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sarathi_sim.profiler.storage.child import Outcome, Workers
from sarathi_sim.profiler.storage.strict import UserError
from .jobs import Job, JobResult, work
from .plan import code_fingerprint

BUNDLE_S = 0.5
"""Seconds of work that a bundle should hold: sending one costs a few milliseconds."""

LOOK_S = 1.0
"""Seconds without any result after which a backend says what is under way."""


Outcomes = Generator[tuple[Outcome, Any, Any], None, None]
"""What comes of bundles: "returned", the jobs and their results; "raised", the jobs and an error;
"lost", the jobs whose worker died, and None; or "waiting" where no result comes, every
:data:`LOOK_S`: the jobs under way by worker, and the seconds since the last one came."""


class Bundles:
    """Jobs to be sent, in bundles of about :data:`BUNDLE_S`: of one job until the time of a run is
    known (``took``), or with ``single``, and smaller towards the end, so that all workers finish
    together. Jobs may be added while others are under way."""

    def __init__(self, jobs: Sequence[Job], workers: int, single: bool = False) -> None:
        self._todo = deque(jobs)
        self._workers = workers
        self._single = single
        self._seconds = self._runs = 0.0

    def took(self, results: list[JobResult]) -> None:
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
        size = 1
        if self._runs and not self._single:
            wanted = math.ceil(BUNDLE_S * self._runs / max(self._seconds, 1e-9))
            size = max(1, min(wanted, len(self._todo) // (4 * self._workers)))
        return [self._todo.popleft() for _ in range(size)]


class Backend(Protocol):
    """Runs bundles, ``workers`` at a time."""

    workers: int

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what comes of each bundle. At most ``ahead`` bundles are under way."""
        ...

    def close(self) -> None:
        """Release the workers: its owner's last call."""
        ...


class InProcess:
    """One after the other, in this process."""

    workers = 1

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        for jobs in bundles:
            yield "returned", jobs, work(jobs)

    def close(self) -> None:
        """Nothing to release."""


class LocalProcesses(Workers):
    """Up to ``workers`` processes on this machine, started when needed."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, work.__module__)
        self.workers = workers

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what comes of each bundle. Raises UserError where workers cannot be started."""
        return self.calls(work, bundles, ahead, LOOK_S)


def processors() -> int:
    """How many processors this process may use."""
    from joblib import cpu_count  # heeds affinity and a container's share

    return int(cpu_count())


CONNECT_S = 10
"""How long a sweep waits for the scheduler's answer, and for the cluster's first worker."""
WITHOUT_WORKERS_S = 60
"""How long it waits for a cluster that has lost its last worker to get another one."""

# Text, because a worker ends, and says nothing to us, if it cannot unpickle a function of ours (or
# its arguments): so Dask reads them within the call. The modules of a run are imported before their
# files are read.
_OURS = "__import__('sarathi_sim.experiments.sweeps.{0}', fromlist=['{1}']).{1}"
_CHECK = f"{_OURS.format('jobs', 'work')} and {_OURS.format('plan', 'code_fingerprint')}()"
_READ = "__import__('distributed.protocol', fromlist=['deserialize']).deserialize(*jobs)"
_WORK = f"{_OURS.format('jobs', 'work')}({_READ})"


class DaskWorkers:
    """All workers of the cluster at ``address``. Raises UserError where no scheduler answers there,
    where it has no worker, and if a worker lacks this package or has another version of it."""

    def __init__(self, address: str) -> None:
        try:
            self._dask: Any = import_module("distributed")
        except ImportError:
            raise UserError(
                "a Dask scheduler needs dask and distributed: pip install 'sarathi-sim[cluster]'"
            ) from None
        for name in ("distributed", "distributed.client"):  # 30 lines for a lost scheduler
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._address, self._checked = address, set[str]()

        async def knock() -> None:
            settings = self._dask.Security().get_connection_args("client")
            await (await self._dask.comm.connect(address, CONNECT_S, **settings)).close()

        try:
            # A Client that is refused leaves a thread behind, which complains at length.
            asyncio.run(asyncio.wait_for(knock(), 2 * CONNECT_S))
            self._client = self._dask.Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"--workers {address}: no Dask scheduler answers there "
                f"({str(error) or 'no answer'}): give one as in tcp://127.0.0.1:8786, or "
                "tls://HOST:PORT (docs/research/fair.md has the settings for TLS)"
            ) from None
        try:
            self.workers = sum(self._look(CONNECT_S).values())
        except BaseException:
            self.close()
            raise

    def _look(self, patience_s: float) -> dict[str, int]:
        """The threads of each worker; waits for a first one, and checks the code of new ones.
        Raises UserError for other code, for a lost scheduler, and where there is no worker, or no
        answer, for ``patience_s``: runs sent to such a cluster would never end."""
        ask = self._client.scheduler.ncores
        try:
            while not (threads := self._client.sync(ask, callback_timeout=patience_s)):
                self._client.wait_for_workers(1, timeout=patience_s)
        except TimeoutError:
            raise UserError(
                f"--workers {self._address}: the scheduler has not answered, or had no worker, for "
                f"{patience_s} s: start one with: dask worker {self._address} --nthreads 1"
            ) from None
        except OSError as error:
            raise UserError(f"--workers: the scheduler was lost: {error}") from None
        new = [worker for worker in threads if worker not in self._checked]
        found = self._client.run(eval, _CHECK, workers=new, on_error="return") if new else {}
        for worker, answer in found.items():
            if answer == code_fingerprint():
                self._checked.add(worker)
            elif not isinstance(answer, OSError):  # it has ended again, or will be asked again
                said = "has another version of this package, or of numpy, scipy, pandas or "
                said += "pyarrow, than this computer: its results would differ: install the same"
                if isinstance(answer, Exception):
                    said = f"cannot import this package ({answer!r}): install it in the Python "
                    said += "that the workers run in"
                raise UserError(f"--workers: the worker {worker} {said}")
        return dict(threads)

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what comes of each bundle; those whose workers kept dying as lost. Raises UserError
        if the scheduler or all workers are lost, or a worker has other code."""
        under_way: dict[Any, list[Job]] = {}
        finished: SimpleQueue[Any] = SimpleQueue()
        last = looked = time.monotonic()
        while True:
            while len(under_way) < ahead and (jobs := next(bundles, None)) is not None:
                sent = self._dask.protocol.serialize(jobs, serializers=("pickle",))
                future = self._client.submit(eval, _WORK, {"jobs": sent}, pure=False)
                under_way[future] = jobs
                future.add_done_callback(finished.put)
            if not under_way:
                return
            future = None
            with suppress(Empty):
                future = finished.get(timeout=LOOK_S)
            if time.monotonic() - looked >= LOOK_S:
                self._look(WITHOUT_WORKERS_S)
                looked = time.monotonic()
            if future is not None:
                yield self._outcome(future, under_way.pop(future))
                last = time.monotonic()
            else:
                listed = {"the cluster": list(chain(*under_way.values()))}
                yield "waiting", listed, time.monotonic() - last

    def _outcome(self, future: Any, jobs: list[Job]) -> tuple[Outcome, Any, Any]:
        """What came of a finished bundle. If the worker that has the result has ended, the cluster
        runs the bundle again, and this waits for it."""
        patience = WITHOUT_WORKERS_S
        while True:
            try:
                return "returned", jobs, future.result(timeout=patience)
            except TimeoutError:
                patience *= 2  # a large result takes its time on a slow network
                self._look(WITHOUT_WORKERS_S)
            except self._dask.KilledWorker:
                return "lost", jobs, None
            except self._dask.CancelledError:
                said = "--workers: the scheduler was lost, or cancelled the runs"
                raise UserError(said) from None
            except Exception as error:  # not of a run: what a run raises is its result
                self._look(WITHOUT_WORKERS_S)  # names a worker that has joined with other code
                said = f"--workers: a worker cannot read what it was sent: {error!r}"
                raise UserError(said) from error

    def close(self) -> None:
        """Disconnect, and cancel the bundles under way. The cluster stays."""
        self._client.close()
