"""What NVML tells of the GPU while it is timed: clock, power, temperature, throttling. No torch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any

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
    """Asks NVML about the GPU in a thread, from :meth:`__enter__` to :meth:`__exit__`.

    Where NVML is missing, or tells something not, states are empty.
    """

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
    """The GPU that torch calls 0: NVML counts all, torch those that CUDA_VISIBLE_DEVICES names."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
