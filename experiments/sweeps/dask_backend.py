"""Runs on the workers of a Dask cluster that is there already, as futures."""

from __future__ import annotations

from typing import Any

from experiments.errors import ConfigError
from experiments.sweeps.backends import Bundles, Lost, Outcomes
from experiments.sweeps.identity import code_fingerprint
from experiments.sweeps.work import Job, work

CONNECT_S = 10
RETRIES = 2
"""How often the scheduler itself sends a bundle again whose worker went away."""

# Run by the workers' own Python, of which nothing is known yet: a function of ours could not even
# be unpickled where the package is missing, and the sweep would hang.
_CHECK = "__import__('experiments.sweeps.identity', fromlist=['x']).code_fingerprint()"


class DaskWorkers:
    """All workers of the cluster at ``address``.

    Raises ConfigError where there is no scheduler or no worker, and where a worker lacks this
    package or has another version of it.
    """

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise ConfigError(
                "--backend dask needs dask and distributed: pip install 'sarathi-sim[cluster]'"
            ) from None
        try:
            connect: Any = Client  # distributed is typed in part only
            self._client = connect(address, timeout=CONNECT_S, set_as_default=False)
        except (TimeoutError, OSError, ValueError) as error:
            raise ConfigError(
                f"--address {address}: no Dask scheduler answers there ({error})"
            ) from None
        try:
            self.workers = self._threads(address)
            self._check_package()
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

    def _check_package(self) -> None:
        found = self._client.run(eval, _CHECK, on_error="return")
        here = code_fingerprint()
        for worker, answer in found.items():
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

    def run(self, bundles: Bundles, *, ahead: int) -> Outcomes:
        """Yield what came of each bundle; those whose workers kept dying as lost."""
        from distributed import KilledWorker
        from distributed import as_completed as as_completed_untyped

        as_completed: Any = as_completed_untyped
        handed_out: dict[Any, list[Job]] = {}
        left = iter(bundles)

        def submit() -> Any:
            jobs = next(left, None)
            if jobs is None:
                return None
            future = self._client.submit(work, jobs, pure=False, retries=RETRIES)
            handed_out[future] = jobs
            return future

        first = [future for _ in range(ahead) if (future := submit()) is not None]
        finished = as_completed(first, loop=self._client.loop)
        for future in finished:
            jobs = handed_out.pop(future)
            if future.cancelled():
                raise ConfigError("--backend dask: the scheduler went away, or gave the runs up")
            error = future.exception()
            if isinstance(error, KilledWorker):
                yield Lost(jobs)
            elif error is not None:
                # What a run raises comes back as its result: this is a worker that joined later
                # and lacks the package, or the cluster itself.
                raise ConfigError(
                    f"--backend dask: a worker cannot take in what it was sent: {error!r}"
                ) from error
            else:
                yield future.result()
            future.release()
            following = submit()
            if following is not None:
                finished.add(following)

    def close(self) -> None:
        """Disconnect; what was handed out is cancelled. The cluster stays."""
        self._client.close()
