"""Timing one call on a CPU or a GPU: warm, with cold caches, median and spread. Imports torch."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from sarathi_sim.profiler.planning.journal import Timing, relative_iqr
from sarathi_sim.profiler.planning.settings import FlushMode
from sarathi_sim.profiler.shard.nvml import Sampler

#: Written or read before each GPU sample: more than any L2. Many times over, it takes longer (0.9
#: ms at 5 TB/s) than launching a whole layer's kernels, so the host is ahead and launches do not
#: count.
_FLUSH_BYTES = 256 * 2**20
_FLUSHES = 16
#: Clock cycles that a GPU waits instead, where nothing is flushed: about a millisecond.
_WAIT_CYCLES = 1_500_000
#: Above the copy bandwidth by more than this, what was read came from the L2.
_FROM_L2 = 1.02
_MOST_WARM_UPS = 12
#: An idle GPU's clock takes many samples to rise: at the idle clock two in a row are alike, too.
_WAKING_S = 0.3


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

    ``flush`` says how a GPU's L2 is made cold: by writing a large buffer (whose dirty lines go to
    memory during the timed call), by reading one, or not at all ("rotate": the calls rotate over
    copies of their weights). ``sampler`` tells the GPU's state of each point.
    """

    def __init__(
        self,
        device: torch.device,
        repeats: int = 5,
        steady: float = 0.05,
        patience_s: float = 0.2,
        flush: FlushMode = "read",
        sampler: Sampler | None = None,
    ) -> None:
        self.device = device
        self.repeats = repeats
        self._steady = steady
        self._patience_s = patience_s
        self._preempted = 0
        self.flush: FlushMode = flush
        self._sampler = sampler
        self._buffer: torch.Tensor | None = None
        self.flush_s = 0.0
        """Seconds that a sample takes beside the call."""
        if device.type == "cuda":
            self._buffer = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
            rounds, woken_s = 0, time.perf_counter() + _WAKING_S
            while rounds < 2 or time.perf_counter() < woken_s:
                rounds += 1
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                self._make_cold(self._buffer)
                torch.cuda.synchronize(device)
                self.flush_s = time.perf_counter() - began

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
        median = max(statistics.median(samples), 1e-9)
        spread = round(relative_iqr(samples), 5)
        timing = Timing(median * 1e6, spread, len(samples), self._preempted, seconds)
        if self._sampler is None:
            return timing
        return replace(timing, **asdict(self._sampler.since(began)))

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
        if self._buffer is None:
            return self._cpu_sample(call, index)
        start, end = cuda_events()
        self._make_cold(self._buffer)
        start.record()
        call(index)
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) * 1e-3

    def _make_cold(self, buffer: torch.Tensor) -> None:
        if self.flush == "rotate":
            torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
            return
        for _ in range(_FLUSHES):
            if self.flush == "write":
                buffer.zero_()
            else:
                buffer.sum()

    def without_pause(
        self, call: Callable[[int], object], seconds: float, counted_s: float = math.inf
    ) -> Timing:
        """A GPU's time of one call of many in a row, over the last ``counted_s`` of ``seconds``.

        Calls are enqueued in runs that double until they take a twentieth of a second; a sample is
        a run's time over its calls.
        """
        began = time.perf_counter()
        runs: list[tuple[float, int, float]] = []
        count, calls = 1, 0
        with torch.inference_mode():
            while (now := time.perf_counter()) - began < seconds or len(runs) < 2:
                start, end = cuda_events()
                start.record()
                for _ in range(count):
                    call(calls)
                    calls += 1
                end.record()
                torch.cuda.synchronize(self.device)
                runs.append((now, count, max(1e-9, float(start.elapsed_time(end)) * 1e-3 / count)))
                if time.perf_counter() - now < 0.05:
                    count *= 2
        ended = time.perf_counter()
        from_s = min(max(began, ended - counted_s), runs[-1][0])
        samples = [one for at, calls, one in runs if at >= from_s and 2 * calls >= runs[-1][1]]
        spread = round(relative_iqr(samples), 5)
        timing = Timing(
            statistics.median(samples) * 1e6, spread, len(samples), seconds=ended - began
        )
        if self._sampler is None:
            return timing
        return replace(timing, **asdict(self._sampler.since(from_s)))

    def event_floor(self) -> Timing:
        """What an empty pair of events tells: it is in every time of a GPU, and not taken off."""
        return self(lambda index: None)

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


def cuda_events() -> tuple[Any, Any]:
    """Two events to record before and after; ``start.elapsed_time(end)`` gives milliseconds."""
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)


def best_flush(rates: Mapping[FlushMode, float], ceiling: float) -> FlushMode:
    """The mode to take, from the bytes per second at which each read the same cold weights.

    A rate above ``ceiling``, that of a large copy, was read from the L2; of the others the highest
    was disturbed least. "read" where none is left.
    """
    honest = {mode: rate for mode, rate in rates.items() if rate <= _FROM_L2 * ceiling}
    return max(honest, key=lambda mode: honest[mode]) if honest else "read"
