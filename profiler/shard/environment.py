"""The profiled device: whether it can be used, its facts, its copy bandwidth. Imports torch."""

from __future__ import annotations

import math
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..facts.device import product_folder
from ..planning.grid import ProfileError, Timing
from ..storage.child import host_memory
from .timing import Timer, guarded

Facts = dict[str, str | int | float]


def open_device(
    device: str, dtype: str, threads: int, weights: str = "dtype"
) -> tuple[torch.device, torch.dtype]:
    """The torch device and dtype, ready to use; on a CPU torch is set to ``threads`` threads.
    Raises ProfileError for a device that is not there and a dtype it has no fast kernels for."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ProfileError(
                f"device cuda: torch {torch.__version__} sees no CUDA device; use the cpu, "
                "or install a CUDA build of torch and check the driver with nvidia-smi"
            )
        if dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
            raise ProfileError(
                f"dtype bf16: {torch.cuda.get_device_name()} has no bf16 units; use fp16 or fp32"
            )
        if weights == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            raise ProfileError(f"weights fp8: {torch.cuda.get_device_name()} has no fp8 units")
        # fp32 means fp32: TensorFloat-32 would time another dtype.
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        if weights == "fp8":
            raise ProfileError("weights fp8: needs a GPU")
        if dtype == "float16":
            raise ProfileError(
                "dtype fp16: CPUs have no fast fp16 kernels in torch; use fp32 or bf16"
            )
        torch.set_num_threads(threads)
    return torch.device(device), getattr(torch, dtype)


def default_device_name(device: str) -> str:
    """``cpu``, or the GPU's name as a folder name: "NVIDIA H200" becomes "h200"."""
    if device == "cpu":
        return "cpu"
    return product_folder(torch.cuda.get_device_name())


def devices_on_node(device: str, threads: int) -> int:
    """GPUs, or groups of ``threads`` CPU cores, that this node has."""
    if device == "cuda":
        return int(torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // threads)


def memory_bytes(device: str) -> tuple[int, int]:
    """(total, free) bytes of the GPU, or of the machine within this process's limits."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(total), int(free)
    return host_memory()


def processor_name() -> str:
    """The CPU's model name as the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def facts(device: str, threads: int) -> Facts:
    """The environment of a measurement: hardware and library versions, driver, threads."""
    known: Facts = {
        "processor": processor_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "xformers": _version("xformers"),
    }
    if device == "cpu":
        return known | {
            "threads": threads,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
    known["gpu"] = torch.cuda.get_device_name()
    known["cuda"] = str(torch.version.cuda)
    known["gpus"] = torch.cuda.device_count()
    return known


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


#: Points of which a GPU's bandwidth is the best. After a bundle was written, a single one gave 10 %
#: less than on a busy H200, whose other reads were as fast as ever: a clock that had fallen may be
#: why. These take longer than it needs to rise.
_COPIES = {"cpu": 1, "cuda": 40}


def copy_bandwidth(device: torch.device, timer: Timer, free_bytes: float) -> float:
    """Bytes read and written per second by the fastest of some large copies. Raises ProfileError if
    one fails."""
    size = int(min(512 * 2**20, free_bytes / 8))

    def copy() -> Timing:
        source = torch.ones(size, dtype=torch.int8, device=device)
        target = torch.zeros_like(source)
        points = (timer(lambda _: target.copy_(source)) for _ in range(_COPIES[device.type]))
        return min(points, key=lambda point: point.time_us or math.inf)

    timing = guarded(copy, device)
    if timing.time_us is None:
        raise ProfileError(
            f"the memory's bandwidth was not measured: {timing.note}; the same command tries again"
        )
    return 2 * size / (timing.time_us * 1e-6)


def release() -> None:
    """Return freed GPU memory to the driver, so that it counts as free."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def num_sms(device: str, threads: int) -> int:
    """Streaming multiprocessors of the GPU; threads of a CPU."""
    if device == "cpu":
        return threads
    return int(torch.cuda.get_device_properties(0).multi_processor_count)
