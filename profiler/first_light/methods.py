"""Ways to time an op, side by side: which leaves the L2 cold and nothing of itself in the time.

A flush by writing leaves dirty lines, which are written back while the op runs; one by reading does
not; rotating over several copies of the weights needs none. Imports torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from profiler.first_light.probe_machine import open_machine
from profiler.first_light.steps import Found, Task
from profiler.shard.timing import cuda_events, no_garbage_collection, relative_iqr

_FLUSH_BYTES, _COPIES, _SAMPLES, _AHEAD = 256 * 2**20, 4, 40, 8
Call = Callable[[int], object]


def methods(task: Task) -> Found:
    """Microseconds of a product of m x n x n by each method and m, and of an empty pair of events.

    ``n`` is so large that one copy of the weights does not fit into the L2 beside others. The
    bytes that the product must read over the time are its bandwidth: a method that gives more than
    a copy's bandwidth left the weights in the L2.
    """
    device, dtype = open_machine(task)
    n, samples = (64, 3) if task.rehearsal else (5120, _SAMPLES)
    weights = [torch.empty(n, n, device=device, dtype=dtype).normal_() for _ in range(_COPIES)]
    flush = torch.zeros(2**16 if task.rehearsal else _FLUSH_BYTES, dtype=torch.int8, device=device)
    words, kept = flush.view(torch.int32), torch.empty(1, dtype=torch.int32, device=device)
    ways: dict[str, tuple[Call, int]] = {
        "nothing": (lambda _: None, 1),
        "writing": (lambda _: flush.zero_(), 1),
        "reading": (lambda _: torch.amax(words, dim=0, keepdim=True, out=kept), 1),
        "rotating": (lambda _: None, _COPIES),
        "reading and rotating": (
            lambda _: torch.amax(words, dim=0, keepdim=True, out=kept),
            _COPIES,
        ),
    }
    facts: dict[str, dict[str, dict[str, float]]] = {}
    with no_garbage_collection(), torch.inference_mode():
        floor = _timed(device, lambda _: None, lambda _: None, samples)
        for m in (1, 16, 512):
            x = torch.empty(m, n, device=device, dtype=dtype).normal_()
            facts[f"m{m}"] = {
                way: _timed(device, before, _product(x, weights[:copies]), samples)
                | {"copies": copies}
                for way, (before, copies) in ways.items()
            }
    for size, each in facts.items():
        for found in each.values():
            moved = n * n * weights[0].element_size()
            found["bytes_per_s"] = moved / (found["time_us"] * 1e-6)
            found["less_floor_us"] = found["time_us"] - floor["time_us"]
        print(size, each)  # noqa: T201
    one = facts["m16"]
    times = ", ".join(f"{way} {found['time_us']:.3g}" for way, found in one.items())
    return Found(f"16 tokens, us: {times}; events {floor['time_us']:.2g}", {"floor": floor} | facts)


def _product(x: torch.Tensor, weights: list[torch.Tensor]) -> Call:
    return lambda index: F.linear(x, weights[index % len(weights)])


def _timed(device: torch.device, before: Call, call: Call, samples: int) -> dict[str, float]:
    """Median and relative interquartile range of ``call`` after ``before``; three are warm-ups."""
    taken = [_sample(device, before, call, index) for index in range(3 + samples)][3:]
    return {"time_us": statistics.median(taken), "spread": round(relative_iqr(taken), 4)}


def _sample(device: torch.device, before: Call, call: Call, index: int) -> float:
    """Microseconds; on a GPU the host runs ahead of it, so that launches do not count."""
    if device.type != "cuda":
        before(index)
        began = time.perf_counter()
        call(index)
        return max(1e-3, (time.perf_counter() - began) * 1e6)
    start, end = cuda_events()
    cuda: Any = torch.cuda
    cuda._sleep(200_000)  # cycles, about 0.1 ms
    for _ in range(_AHEAD):
        before(index)
    start.record()
    call(index)
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e3
