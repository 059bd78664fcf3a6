"""Splits what a stage does into the times of its ops. Imports torch."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from sarathi_sim.profiler.shard.timing import cuda_events


class Stopwatch(Protocol):
    """``start``, then a ``lap`` after each piece of work, then ``read``."""

    def start(self) -> None:
        """Forget all laps; time runs from here."""

    def lap(self, name: str) -> None:
        """All work since the last lap, or the start, was ``name``."""

    def read(self) -> dict[str, float]:
        """Seconds by name, summed over the laps; on a GPU, waits for the last one."""


class HostStopwatch:
    """By the host's clock: for ops that are done when their call returns."""

    def start(self) -> None:
        """See :class:`Stopwatch`."""
        self._spent: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """See :class:`Stopwatch`."""
        now = time.perf_counter()
        self._spent[name] = self._spent.get(name, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """See :class:`Stopwatch`."""
        return dict(self._spent)


class CudaStopwatch:
    """By events in the GPU's stream: the GPU's wait for a launch counts for the next lap.

    The host does not wait for laps, but recording one takes about as long as launching a kernel.
    Events are reused, because making one takes as long again.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._names: list[str] = []

    def start(self) -> None:
        """See :class:`Stopwatch`."""
        self._names.clear()
        self._stream = torch.cuda.current_stream()  # asking for it takes longer than recording
        self._record()

    def lap(self, name: str) -> None:
        """See :class:`Stopwatch`."""
        self._names.append(name)
        self._record()

    def _record(self) -> None:
        if len(self._names) == len(self._events):
            self._events += cuda_events()
        self._events[len(self._names)].record(self._stream)

    def read(self) -> dict[str, float]:
        """See :class:`Stopwatch`."""
        self._events[len(self._names)].synchronize()
        spent: dict[str, float] = {}
        for index, name in enumerate(self._names):
            milliseconds = self._events[index].elapsed_time(self._events[index + 1])
            spent[name] = spent.get(name, 0.0) + milliseconds * 1e-3
        return spent


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for work on ``device``."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
