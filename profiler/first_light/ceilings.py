"""What this GPU gives at most: copies, and a large matrix product. Imports torch."""

from __future__ import annotations

import torch

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.roofline import HBM_SHARE
from sarathi_sim.profiler.first_light.devices import data_sheet
from sarathi_sim.profiler.first_light.probe_machine import open_machine
from sarathi_sim.profiler.first_light.steps import Found, Task
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.shard import environment as machine
from sarathi_sim.profiler.shard.timing import Timer, no_garbage_collection

_SIDE, _TINY_SIDE = 8192, 64
_OFF = 0.1


def ceilings(task: Task) -> Found:
    """Bytes a second of one copy, and FLOP/s of a product of 8192 x 8192 matrices (random, bf16).

    Beside the data sheet. Usual is HBM_SHARE of its bandwidth, and the rate of this product in the
    kernel tables of this GPU. Raises ProfileError for less than 0.9 of that, and for more than the
    data sheet's number, which no GPU can give.
    """
    device, dtype = open_machine(task)
    timer = Timer(device)
    side = _TINY_SIDE if task.rehearsal else _SIDE
    with no_garbage_collection():
        free = 64 * 2**20 if task.rehearsal else machine.memory_bytes(device.type)[1]
        copied = machine.copy_bandwidth(device, timer, free)
        flops = 2 * side**3 / _product_s(timer, side, device, dtype)
    facts: dict[str, object] = {"copy_bytes_per_s": copied, "product_flops": flops, "side": side}
    headline = f"copy {copied / 1e12:.3g} TB/s, product {flops / 1e12:.3g} TFLOP/s"
    spec = data_sheet(device.type)
    if spec is None:
        return Found(f"{headline}; no data sheet of this GPU here, so nothing to hold it to", facts)
    usual = {"copy": HBM_SHARE * spec.memory_bandwidth, "product": usual_product(spec)}
    shares = {"copy": copied / spec.memory_bandwidth, "product": flops / spec.peak_flops}
    facts |= {"device": spec.name, "usual": usual, "share_of_data_sheet": shares}
    headline += f": {shares['copy']:.0%} and {shares['product']:.0%} of the data sheet"
    found = {"copy": copied, "product": flops}
    if not task.rehearsal:
        most = {"copy": spec.memory_bandwidth, "product": spec.peak_flops}
        if wrong := off_ceiling(found, usual, most):
            raise ProfileError(f"{headline}; {wrong}")
    return Found(headline, facts)


def off_ceiling(found: dict[str, float], usual: dict[str, float], most: dict[str, float]) -> str:
    """What is wrong with these rates; empty where nothing is."""
    wrong = []
    for what, rate in found.items():
        if rate < (1 - _OFF) * usual[what]:
            wrong.append(
                f"the {what} is {1 - rate / usual[what]:.0%} below what this GPU usually gives: is "
                "it shared, hot or held back (nvidia-smi -q -d PERFORMANCE)?"
            )
        if rate > most[what]:
            wrong.append(f"the {what} is above the data sheet: the timing is wrong")
    return "; ".join(wrong)


def usual_product(spec: DeviceSpec) -> float:
    """FLOP/s of the product by the kernel tables of the device: the median of its stacks."""
    import numpy as np

    from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
    from sarathi_sim.profiler.kernels.stack_file import load_stack, stacks_on, stored

    tables = (
        stored(load_stack(spec.name, stack)[1], "gemm.bf16") for stack in stacks_on(spec.name)
    )
    times = [
        GemmLattice.from_arrays(table).time_us(np.array([float(_SIDE)]), _SIDE, _SIDE)[0]
        for table in tables
    ]
    return float(2e6 * _SIDE**3 / np.median(times)) if times else 0.0


def _product_s(timer: Timer, side: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.empty(side, side, device=device, dtype=dtype).normal_() for _ in range(2))
    timing = timer(lambda _: a @ b)
    assert timing.time_us is not None
    return timing.time_us * 1e-6
