"""One thread for linear algebra and fits, unless the user has chosen otherwise.

All matrices here are small. Where another program keeps a processor busy, each call would wait
milliseconds for its second thread (docs/performance.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_OPENMP = "OMP_NUM_THREADS"
_BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def default_to_one_thread(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give this process, and those that it starts, one thread a library.

    ``environment`` is that of a process to be started instead. A variable of the user's own counts,
    and ``OMP_NUM_THREADS`` for every library. The libraries read them when they are imported; one
    that is in already is told.
    """
    if environment is os.environ and "numpy" in sys.modules:
        _limit(environment)
    if _OPENMP not in environment:
        for variable in (_OPENMP, *_BLAS):
            environment.setdefault(variable, "1")


def one_thread() -> AbstractContextManager[Any]:
    """The same while this context lasts, for use in a process that is not ours."""
    return _limit(os.environ)


def _limit(environment: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Limit the libraries that are in, from now on, until the context that it returns ends."""
    if _OPENMP in environment:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    kept = any(variable in environment for variable in _BLAS)
    limited: AbstractContextManager[Any] = threadpool_limits(
        {"openmp": 1} if kept else {"openmp": 1, "blas": 1}
    )
    return limited
