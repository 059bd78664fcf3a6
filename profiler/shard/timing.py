"""Timing one call on a CPU or a GPU: warm, with cold caches, median and spread; what NVML tells of
the GPU meanwhile; and what becomes of a call that fails. Imports torch.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Any

import torch

from ..planning.grid import FlushMode, Timing, relative_iqr

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h); idle and set clocks slow nothing down.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_INTERVAL_S = 0.01


@dataclass(frozen=True)
class GpuState:
    """Medians over a while: SM clock (MHz) and power (W); the highest temperature (Celsius); what
    slowed the clock down meanwhile. 0 or "" for what NVML does not tell."""

    clock_mhz: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    throttle: str = ""


class Sampler:
    """Asks NVML about the GPU in a thread, from :meth:`__enter__` to :meth:`__exit__`. Where NVML
    is missing, or tells something not, states are empty."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._asks: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, str | int | float] = {}
        with contextlib.suppress(Exception):  # no NVML, no driver: a measurement does without
            import pynvml

            self._open(pynvml)

    def _open(self, nvml: Any) -> None:
        nvml.nvmlInit()
        gpu = _handle(nvml)
        reasons = (
            getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )  # before release 12.535

        def power() -> float:
            try:  # not the mean of a second, as nvmlDeviceGetPowerUsage since Ampere
                (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
                if field.nvmlReturn == 0:
                    return float(field.value.uiVal) / 1000
            except Exception:
                pass
            return float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000

        asks: dict[str, Callable[[], float]] = {
            "clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "power_w": power,
            "temperature_c": lambda: float(
                nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "throttle": lambda: float(reasons(gpu)),
        }
        for name, ask in asks.items():
            with contextlib.suppress(Exception):  # a part of a GPU, say, knows no power
                ask()
                self._asks[name] = ask
        once: dict[str, Callable[[], str | int | float]] = {
            "driver": lambda: str(nvml.nvmlSystemGetDriverVersion()),
            "sm_clock_max_mhz": lambda: int(
                nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
            ),
            "memory_clock_mhz": lambda: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            "power_limit_w": lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000, 1),
        }
        for name, tell in once.items():
            with contextlib.suppress(Exception):
                self.facts[name] = tell()

    def __enter__(self) -> Sampler:
        if self._asks:
            self._done.clear()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No thread beside the host's inside."""
        ran = self._thread is not None
        self.__exit__()
        try:
            yield
        finally:
            if ran:
                self.__enter__()

    def _run(self) -> None:
        while True:
            self.sample()
            if self._done.wait(_INTERVAL_S):
                return

    def sample(self) -> None:
        """Ask once, now."""
        values = {}
        for name, ask in self._asks.items():
            with contextlib.suppress(Exception):
                values[name] = ask()
        self._samples.append((time.perf_counter(), values))

    def since(self, began_s: float) -> GpuState:
        """The state from ``began_s`` (of perf_counter) on; the last sample's if there was none."""
        recent = takewhile(lambda sample: sample[0] >= began_s, reversed(self._samples))
        found = [values for _, values in recent]
        if not found and self._samples:
            found = [self._samples[-1][1]]

        def of(name: str) -> list[float]:
            return [values[name] for values in found if name in values]

        bits = 0
        for value in of("throttle"):
            bits |= int(value)
        return GpuState(
            round(median(of("clock_mhz") or [0.0]), 1),
            round(median(of("power_w") or [0.0]), 1),
            max(of("temperature_c"), default=0.0),
            ", ".join(name for bit, name in _REASONS.items() if bits & bit),
        )


def _handle(nvml: Any) -> Any:
    """torch's GPU 0: NVML counts all GPUs, torch only those in CUDA_VISIBLE_DEVICES."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)


def guarded(measure: Callable[[], Timing], device: torch.device) -> Timing:
    """The result of ``measure``, or a Timing without a time, with the reason for its failure.
    ``lost`` is set where the GPU answers nothing after it: an illegal access or a failed assertion
    ends a process's CUDA context for good."""
    try:
        return measure()
    except Exception as error:  # memory, a library, a kernel that refuses: one point, not a profile
        failed = Timing(None, note=reason(error))
    # The exception is gone, and with it the objects of its frames.
    return replace(failed, lost=device.type == "cuda" and not _answers())


def reason(error: BaseException) -> str:
    """The type and first line of an error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _answers() -> bool:
    """Whether the GPU still works for this process; memory that is cached goes back to it."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


#: Written or read before each GPU sample: more than any L2. Many times over, it takes longer (0.9
#: ms at 5 TB/s) than most hosts take to launch a layer's kernels, so that launches do not count. A
#: sample whose GPU was ready before the host is taken again, up to so many times as long after it.
_FLUSH_BYTES = 256 * 2**20
_FLUSHES = 16
_LONGEST_FLUSH = 8
#: Layers launched after each other. Their kernels fit into the GPU's queue, so none waits for it.
_IN_A_ROW = 4
#: Clock cycles that a GPU waits instead, where nothing is flushed: about a millisecond.
_WAIT_CYCLES = 1_500_000
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
        self._longer = 1
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
            self._longer = 1
            count = self._warm_up(call)
            # What the first calls needed is forgotten: those take the host longest.
            self._preempted, self._longer = 0, 1
            samples: list[float] = []
            while not self._enough(samples, time.perf_counter() - began):
                samples.append(self._sample(call, count))
                count += 1
        return self._timing(samples, time.perf_counter() - began, began, self._preempted)

    def _timing(
        self, samples: list[float], seconds: float, from_s: float | None = None, preempted: int = 0
    ) -> Timing:
        """With the GPU's state since ``from_s``."""
        time_us, spread = max(median(samples), 1e-9) * 1e6, round(relative_iqr(samples), 5)
        timing = Timing(time_us, spread, len(samples), preempted, seconds)
        if self._sampler is None or from_s is None:
            return timing
        return replace(timing, **asdict(self._sampler.since(from_s)))

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
        while True:
            start, end = cuda_events()
            self._make_cold(self._buffer)
            start.record()
            call(index)
            end.record()
            waited = bool(start.query())  # the GPU began before the host had enqueued the call
            torch.cuda.synchronize(self.device)
            if not waited or self._longer >= _LONGEST_FLUSH:
                self._preempted += waited
                return float(start.elapsed_time(end)) * 1e-3
            self._longer *= 2

    def _make_cold(self, buffer: torch.Tensor) -> None:
        if self.flush == "rotate":
            cycles = self._longer * _WAIT_CYCLES
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call, unused-ignore]
            return
        for _ in range(self._longer * _FLUSHES):
            if self.flush == "write":
                buffer.zero_()
            else:
                buffer.sum()

    def without_pause(
        self, call: Callable[[int], object], seconds: float, counted_s: float = math.inf
    ) -> Timing:
        """A GPU's time of one call of many in a row, over the last ``counted_s`` of ``seconds``.
        Calls are enqueued in runs that double until they take a twentieth of a second; a sample is
        a run's time over its calls."""
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
        return self._timing(samples, ended - began, from_s)

    def launch(self, call: Callable[[int], object]) -> Timing:
        """The host's time to enqueue a call on a GPU, of some in a row, the first on an idle one:
        an engine launches layer after layer. One run in ten is a warm-up. Nobody asks NVML
        meanwhile, in a thread that could hold the host up."""
        began = time.perf_counter()
        samples = []
        with torch.inference_mode(), self._sampler.paused() if self._sampler else nullcontext():
            for number in range(11 * self.repeats):
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                for _ in range(_IN_A_ROW):
                    call(0)
                if number >= self.repeats:
                    samples.append((time.perf_counter() - start) / _IN_A_ROW)
            torch.cuda.synchronize(self.device)
        return self._timing(samples, time.perf_counter() - began)

    def event_floor(self) -> Timing:
        """The time between two events without work: every GPU time includes it."""
        return self(lambda index: None)

    def _cpu_sample(self, call: Callable[[int], object], index: int) -> float:
        """The wall-clock time; the thread's CPU time if another process had the core meanwhile.
        With several threads it is always the wall-clock time, because they wait for each other."""
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
