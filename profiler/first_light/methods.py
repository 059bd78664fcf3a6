"""Ways to make the L2 cold before an op is timed, and which to take. Imports torch."""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F

from sarathi_sim.profiler.first_light.probe_machine import open_machine
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.settings import FlushMode
from sarathi_sim.profiler.shard.timing import Timer, best_flush, no_garbage_collection

_COPIES, _CHOSEN_AT = 4, 16


def methods(task: Task) -> Found:
    """Microseconds of a product of m x n x n by each way and m, and of an empty pair of events.

    The weights rotate over four copies. The bytes of the weights over the time are a way's
    bandwidth: ``flush``, the way that the profiles take, is chosen by that at m of 16 and the copy
    bandwidth of the step before (:func:`sarathi_sim.profiler.shard.timing.best_flush`).
    """
    device, dtype = open_machine(task)
    n = 64 if task.rehearsal else 5120
    weights = [torch.empty(n, n, device=device, dtype=dtype).normal_() for _ in range(_COPIES)]
    moved = n * n * weights[0].element_size()
    times: dict[str, dict[int, float]] = {}
    floors: dict[str, float] = {}
    rates: dict[FlushMode, float] = {}
    for mode in get_args(FlushMode):
        timer = Timer(device, repeats=2 if task.rehearsal else 20, flush=mode)
        times[mode] = {}
        with no_garbage_collection():
            floors[mode] = timer.event_floor().time_us or 0.0
            for m in (1, _CHOSEN_AT, 512):
                x = torch.empty(m, n, device=device, dtype=dtype).normal_()
                timing = timer(lambda i, x=x: F.linear(x, weights[i % _COPIES]))  # type: ignore[misc]
                times[mode][m] = timing.time_us or 0.0
        rates[mode] = moved / (1e-6 * times[mode][_CHOSEN_AT])
    ceiling = task.facts("ceilings").get("copy_bytes_per_s", float("inf"))
    chosen = best_flush(rates, ceiling)
    text = ", ".join(f"{mode} {each[_CHOSEN_AT]:.3g} us" for mode, each in times.items())
    facts = {"flush": chosen, "time_us": times, "event_floor_us": floors, "bytes_per_s": rates}
    return Found(f"{_CHOSEN_AT} tokens: {text}; taken: {chosen}", facts)
