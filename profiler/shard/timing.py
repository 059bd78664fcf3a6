"""Timing one call on a CPU or a GPU: warm, with cold caches, median and spread. Imports torch."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from profiler.planning.journal import Timing

#: Zeroed before each GPU sample: more than any L2. Many times over, it takes longer (0.9 ms at
#: 5 TB/s) than launching a whole layer's kernels, so the host is ahead and launches do not count.
_FLUSH_BYTES = 256 * 2**20
_FLUSHES = 16
_MOST_WARM_UPS = 12


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector is off inside, and run once before (which takes tens of milliseconds)."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Timer:
    """Times calls; use it within :func:`no_garbage_collection`.

    ``repeats`` is the fewest samples of a point.
    A point with a relative interquartile range above ``steady`` gets up to four times as many, for
    as long as ``patience_s`` lasts. On a GPU the times are CUDA events', and exclude the launch;
    on a CPU they are wall-clock times, and include torch's dispatch of the op.
    """

    def __init__(
        self,
        device: torch.device,
        repeats: int = 5,
        steady: float = 0.05,
        patience_s: float = 0.2,
    ) -> None:
        self.device = device
        self.repeats = repeats
        self._steady = steady
        self._patience_s = patience_s
        self._preempted = 0
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self, call: Callable[[int], object]) -> Timing:
        """Time ``call(i)``, i counting the calls so that it can rotate its buffers."""
        began = time.perf_counter()
        with torch.inference_mode():
            count = self._warm_up(call)
            self._preempted = 0
            samples: list[float] = []
            while not self._enough(samples, time.perf_counter() - began):
                samples.append(self._sample(call, count))
                count += 1
        seconds = time.perf_counter() - began
        median = statistics.median(samples)
        spread = round(relative_iqr(samples), 5)
        return Timing(median * 1e6, spread, len(samples), self._preempted, seconds)

    def _warm_up(self, call: Callable[[int], object]) -> int:
        """Call until two calls in a row take the same time within a tenth; returns how many."""
        before = self._sample(call, 0)
        for count in range(1, _MOST_WARM_UPS):
            now = self._sample(call, count)
            if abs(now - before) <= 0.1 * before:
                return count + 1
            before = now
        return _MOST_WARM_UPS

    def _enough(self, samples: list[float], elapsed_s: float) -> bool:
        if len(samples) < self.repeats:
            return False
        if len(samples) >= 4 * self.repeats or elapsed_s > self._patience_s:
            return True
        return relative_iqr(samples) <= self._steady

    def _sample(self, call: Callable[[int], object], index: int) -> float:
        if self._flush is None:
            return self._cpu_sample(call, index)
        start, end = cuda_events()
        for _ in range(_FLUSHES):
            self._flush.zero_()
        start.record()
        call(index)
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) * 1e-3

    def _cpu_sample(self, call: Callable[[int], object], index: int) -> float:
        """The wall-clock time; the thread's CPU time if another process had the core meanwhile.

        With several threads it is always the wall-clock time, because they wait for each other.
        """
        cpu, began = time.thread_time(), time.perf_counter()
        call(index)
        wall, busy = time.perf_counter() - began, time.thread_time() - cpu
        if torch.get_num_threads() > 1 or wall <= 1.03 * busy + 10e-6:
            return wall
        self._preempted += 1
        return busy


def relative_iqr(samples: list[float]) -> float:
    """Interquartile range over the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def cuda_events() -> tuple[Any, Any]:
    """Two events to record before and after; ``start.elapsed_time(end)`` gives milliseconds."""
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
