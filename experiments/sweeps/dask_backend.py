"""Runs on the workers of an existing Dask cluster, as futures."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.sweeps.backends import PATIENCE_S, Bundles, LostJobs, Outcomes, Waiting
from sarathi_sim.experiments.sweeps.jobs import Job
from sarathi_sim.experiments.sweeps.plan import code_fingerprint

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
_CHECK = f"{_OURS.format('jobs', 'work')} and {_OURS.format('identity', 'code_fingerprint')}()"
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
        self._looked = time.monotonic()
        try:
            self.workers = self._threads(address)
            self._has_workers()
        except BaseException:
            self.close()
            raise

    def _threads(self, address: str) -> int:
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError:
            raise ConfigError(
                f"--address {address}: the scheduler has no workers after {CONNECT_S} s: start one "
                f"with: dask worker {address} --nthreads 1"
            ) from None
        return sum(self._client.nthreads().values())

    def _check_package(self, workers: list[str]) -> None:
        found = self._client.run(eval, _CHECK, workers=workers, on_error="return")
        here = code_fingerprint()
        for worker, answer in found.items():
            if isinstance(answer, OSError) and self._checked:
                continue  # it has ended as soon as it had come, or is asked again
            if isinstance(answer, ImportError):
                raise ConfigError(
                    f"--backend dask: the worker {worker} cannot import this package ({answer}): "
                    "install it in the Python that the workers run in"
                )
            if isinstance(answer, BaseException):
                raise ConfigError(f"--backend dask: the worker {worker} fails: {answer!r}")
            if answer != here:
                raise ConfigError(
                    f"--backend dask: the worker {worker} has another version of this package, or "
                    "of numpy, scipy, pandas or pyarrow, than this computer: its results would "
                    "differ: install the same"
                )
            self._checked.add(worker)

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what came of each bundle; those whose workers kept dying as lost.

        Raises ConfigError if the cluster is lost, has no worker for WITHOUT_WORKERS_S, or gets one
        with other code.
        """
        from distributed import KilledWorker
        from distributed.protocol.serialize import serialize

        under_way: dict[Any, list[Job]] = {}
        finished: SimpleQueue[Any] = SimpleQueue()
        left = iter(bundles)

        def submit() -> None:
            while len(under_way) < ahead and (jobs := next(left, None)) is not None:
                sent = {"jobs": serialize(jobs, serializers=("pickle",))}
                future = self._client.submit(eval, _WORK, sent, pure=False, retries=RETRIES)
                under_way[future] = jobs
                future.add_done_callback(finished.put)

        submit()
        while under_way:
            future = yield from self._next(finished, under_way)
            jobs = under_way.pop(future)
            try:
                yield self._taken(future)
            except KilledWorker:
                yield LostJobs(jobs)
            future.release()
            submit()

    def _next(
        self, finished: SimpleQueue[Any], under_way: dict[Any, list[Job]]
    ) -> Generator[Waiting, None, Any]:
        """The next future that is done, as long as there are workers to wait for.

        Without this, runs sent to a cluster that lost all of its workers would never end.
        """
        began = worker_seen = time.monotonic()
        patience = PATIENCE_S
        while True:
            with suppress(Empty):
                future = finished.get(timeout=_LOOK_S)
                if time.monotonic() - self._looked >= _LOOK_S:
                    self._has_workers()
                return future
            now = time.monotonic()
            if self._has_workers():
                worker_seen = now
            elif now - worker_seen >= WITHOUT_WORKERS_S:
                raise self._without_workers()
            if now - began >= patience:
                patience *= 2
                jobs = [job for jobs in under_way.values() for job in jobs]
                yield Waiting({"the cluster": jobs}, now - began)

    def _taken(self, future: Any) -> Any:
        """The result of a finished bundle, from the worker that has it.

        If this worker has ended, the cluster runs the bundle again, and this waits for it as
        :meth:`_next` does. Raises KilledWorker if its workers keep dying.
        """
        from distributed import KilledWorker

        patience = WITHOUT_WORKERS_S
        while not future.cancelled():
            try:
                return future.result(timeout=patience)
            except KilledWorker:
                raise
            except TimeoutError:
                if not self._has_workers():
                    raise self._without_workers() from None
                patience *= 2  # a large result takes its time on a slow network
            except Exception as error:
                if future.cancelled():
                    break
                # What a run raises comes back as its result: this is a worker that joined later
                # and has other code, or the cluster itself.
                self._has_workers()
                raise ConfigError(
                    f"--backend dask: a worker cannot read what it was sent: {error!r}"
                ) from error
        raise ConfigError("--backend dask: the scheduler was lost, or cancelled the runs")

    def _without_workers(self) -> ConfigError:
        return ConfigError(
            f"--address {self._address}: the cluster has had no worker for {WITHOUT_WORKERS_S} s: "
            f"start one with: dask worker {self._address} --nthreads 1"
        )

    def _has_workers(self) -> bool:
        """Whether there is a worker. Raises ConfigError for a new one with other code."""
        self._looked = time.monotonic()
        try:
            workers = self._client.sync(self._client.scheduler.ncores, callback_timeout=CONNECT_S)
        except OSError:  # the scheduler does not answer
            return False
        if new := [worker for worker in workers if worker not in self._checked]:
            self._check_package(new)
        return bool(workers)

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
