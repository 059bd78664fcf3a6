"""The backends of a sweep: this process, local worker processes, or the workers of a Dask cluster.

A backend turns bundles of jobs into results, in any order. A bundle whose worker died comes back as
lost; ``execute.py`` decides what to do with it.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.sweeps.jobs import Job, JobResult, work
from sarathi_sim.experiments.sweeps.plan import code_fingerprint
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


CONNECT_S = 10
WITHOUT_WORKERS_S = 60
"""How long a sweep waits for a cluster that has lost its last worker to get another one."""
_LOOK_S = 1.0
# A Client that refuses an address leaves a thread behind, which complains at length.
_ADDRESS = re.compile(
    r"((?P<scheme>tcp|tls|ws|wss)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>\d{1,5})"
)
RETRIES = 2
"""How often the scheduler itself sends a bundle again whose worker went away."""

# Text, because a worker ends, and says nothing to us, if it cannot unpickle a function of ours (or
# its arguments): so Dask reads them within the call. The modules of a run are imported before their
# files are read.
_OURS = "__import__('sarathi_sim.experiments.sweeps.{0}', fromlist=['{1}']).{1}"
_CHECK = f"{_OURS.format('jobs', 'work')} and {_OURS.format('plan', 'code_fingerprint')}()"
_READ = "__import__('distributed.protocol', fromlist=['deserialize']).deserialize(*jobs)"
_WORK = f"{_OURS.format('jobs', 'work')}({_READ})"


class DaskWorkers:
    """All workers of the cluster at ``address``.

    Raises ConfigError for a wrong address, without a scheduler or a worker, and if a worker lacks
    this package or has another version of it.
    """

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise ConfigError(
                "--backend dask needs dask and distributed: pip install 'sarathi-sim[cluster]'"
            ) from None
        _check_address(address)
        try:
            connect: Any = Client  # distributed is typed in part only
            self._client = connect(address, timeout=CONNECT_S, set_as_default=False)
        except (TimeoutError, OSError, ValueError) as error:
            raise ConfigError(
                f"--address {address}: no Dask scheduler answers there ({error})"
            ) from None
        self._address = address
        self._checked: set[str] = set()
        self._seen = time.monotonic()
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_S)
            self.workers = sum(self._client.nthreads().values())
            self._look()
        except TimeoutError:
            self.close()
            raise self._no_worker(f"the scheduler has no workers after {CONNECT_S} s") from None
        except BaseException:
            self.close()
            raise

    def _no_worker(self, said: str) -> ConfigError:
        start = f"start one with: dask worker {self._address} --nthreads 1"
        return ConfigError(f"--address {self._address}: {said}: {start}")

    def _look(self) -> None:
        """Check the workers that are new. Raises ConfigError for one with other code, and where
        there has been none for WITHOUT_WORKERS_S: runs sent to such a cluster would never end."""
        self._looked = time.monotonic()
        try:
            workers = self._client.sync(self._client.scheduler.ncores, callback_timeout=CONNECT_S)
        except OSError:  # the scheduler does not answer
            workers = {}
        if new := [worker for worker in workers if worker not in self._checked]:
            self._check_package(new)
        if workers:
            self._seen = self._looked
        elif self._looked - self._seen >= WITHOUT_WORKERS_S:
            raise self._no_worker(f"the cluster has had no worker for {WITHOUT_WORKERS_S} s")

    def _check_package(self, workers: list[str]) -> None:
        found = self._client.run(eval, _CHECK, workers=workers, on_error="return")
        here = code_fingerprint()
        for worker, answer in found.items():
            if isinstance(answer, OSError) and self._checked:
                continue  # it has ended as soon as it had come, or is asked again
            said = ""
            if isinstance(answer, ImportError):
                said = f"cannot import this package ({answer}): install it in the Python that the "
                said += "workers run in"
            elif isinstance(answer, BaseException):
                said = f"fails: {answer!r}"
            elif answer != here:
                said = "has another version of this package, or of numpy, scipy, pandas or "
                said += "pyarrow, than this computer: its results would differ: install the same"
            if said:
                raise ConfigError(f"--backend dask: the worker {worker} {said}")
            self._checked.add(worker)

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what came of each bundle; those whose workers kept dying as lost.

        Raises ConfigError if the cluster is lost, has no worker for WITHOUT_WORKERS_S, or gets one
        with other code.
        """
        from distributed.protocol.serialize import serialize

        under_way: dict[Any, list[Job]] = {}
        finished: SimpleQueue[Any] = SimpleQueue()
        began, patience = time.monotonic(), PATIENCE_S
        while True:
            while len(under_way) < ahead and (jobs := next(bundles, None)) is not None:
                sent = {"jobs": serialize(jobs, serializers=("pickle",))}
                future = self._client.submit(eval, _WORK, sent, pure=False, retries=RETRIES)
                under_way[future] = jobs
                future.add_done_callback(finished.put)
            if not under_way:
                return
            future = None
            with suppress(Empty):
                future = finished.get(timeout=_LOOK_S)
            if future is None or time.monotonic() - self._looked >= _LOOK_S:
                self._look()
            if future is not None:
                yield self._taken(future, under_way.pop(future))
                future.release()
                self._seen = began = time.monotonic()
                patience = PATIENCE_S
            elif (waited_s := time.monotonic() - began) >= patience:
                patience *= 2
                left = [job for jobs in under_way.values() for job in jobs]
                yield Waiting({"the cluster": left}, waited_s)

    def _taken(self, future: Any, jobs: list[Job]) -> list[JobResult] | LostJobs:
        """The result of a finished bundle, from the worker that has it; lost jobs, if the workers
        keep dying.

        If this worker has ended, the cluster runs the bundle again, and this waits for it.
        """
        from distributed import KilledWorker

        patience = WITHOUT_WORKERS_S
        while not future.cancelled():
            try:
                results: list[JobResult] = future.result(timeout=patience)
                return results
            except KilledWorker:
                return LostJobs(jobs)
            except TimeoutError:
                self._look()
                patience *= 2  # a large result takes its time on a slow network
            except Exception as error:
                if future.cancelled():
                    break
                # What a run raises comes back as its result: this is a worker that joined later
                # and has other code, or the cluster itself.
                self._look()
                raise ConfigError(
                    f"--backend dask: a worker cannot read what it was sent: {error!r}"
                ) from error
        raise ConfigError("--backend dask: the scheduler was lost, or cancelled the runs")

    def close(self) -> None:
        """Disconnect, and cancel the bundles under way. The cluster stays."""
        self._client.close()


def _check_address(address: str) -> None:
    """Raises ConfigError, in one line, for an address that a Client would refuse."""
    from distributed.security import Security

    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            f"--address {address}: not the address of a Dask scheduler: give one as in "
            "tcp://127.0.0.1:8786, or tls://HOST:PORT"
        )
    of_client: Any = Security  # distributed is typed in part only
    try:
        settings = of_client().get_connection_args("client")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--backend dask: Dask's TLS settings cannot be used: {error}") from None
    encrypted = match["scheme"] in ("tls", "wss")
    if encrypted and settings["ssl_context"] is None:
        raise ConfigError(
            f"--address {address}: Dask's settings name no certificates (docs/sweeps.md shows how)"
        )
    if settings["require_encryption"] and not encrypted:
        raise ConfigError(
            f"--address {address}: Dask's settings require encryption: give a tls:// address"
        )
