"""One thread for linear algebra and fits, unless the user has chosen otherwise.

All matrices are small. If another program keeps a processor busy, each call would wait milliseconds
for its second thread (docs/lab/performance.md).
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
    """Give this process and its children one thread per library.

    ``environment`` is that of a process to be started instead. The user's own variables have
    priority, and ``OMP_NUM_THREADS`` holds for every library. A library reads them when it is
    imported; the limit is also set on libraries that are imported already.
    """
    if environment is os.environ and "numpy" in sys.modules:
        _limit(environment)
    if _OPENMP not in environment:
        for variable in (_OPENMP, *_BLAS):
            environment.setdefault(variable, "1")


def one_thread() -> AbstractContextManager[Any]:
    """As :func:`default_to_one_thread`, within this context, for a foreign process."""
    return _limit(os.environ)


def _limit(environment: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Limit the imported libraries until the returned context ends."""
    if _OPENMP in environment:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    kept = any(variable in environment for variable in _BLAS)
    limited: AbstractContextManager[Any] = threadpool_limits(
        {"openmp": 1} if kept else {"openmp": 1, "blas": 1}
    )
    return limited
