"""No op is faster than memory delivers its weights and cache, or than matrix units multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import (
    KV_DTYPES,
    MOE_SPEEDUP,
    SPEEDUP,
    WEIGHT_DTYPES,
    Kernels,
    exponent_of,
)
from sarathi_sim.profiler.facts.layer_kinds import busiest
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, MOE, OPS
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels.stack_file import load_stack, stacks_on
from sarathi_sim.profiler.kernels.stack_times import StackTimes

#: Clocks above the data sheet's, and what of the activations a kernel finds in L2.
LEAST = 0.9
MODELS = ("llama-3-8b", "gemma-3-12b", "qwen3-30b-a3b", "gpt-oss-120b", "qwen3-next-80b-a3b")
TOKENS = np.unique(np.round(2 ** np.arange(0, 13.1, 0.5)))
CONTEXTS = np.round(2 ** np.arange(0, 17.1, 1.0))


def floors(times: StackTimes) -> Iterator[tuple[str, Array, Array]]:
    """(op, times, what they are at least) of every op that reads weights or a cache, or sends."""
    kernels, device, model, tp = times.kernels, times.device, times.model, times.tp
    number, us = kernels.number_bytes, 1e6 / device.memory_bandwidth
    for op, shape in model.gemms(tp).items():
        own = OPS[op].split
        weight, speed = (number.weight, SPEEDUP[kernels.dtype]) if own else (2.0, 1.0)
        rows = TOKENS * (weight * shape.k + 2.0 * shape.n)
        read = us * (weight * shape.n * shape.k + rows)
        product = 2e6 * TOKENS * shape.n * shape.k / (device.peak_flops * speed)
        yield op, times.by_rows(op, TOKENS), np.maximum(read, product)
    mix = model.experts
    if mix is not None:
        at, ranks = tuple(TOKENS.tolist()), tp if kernels.expert_parallel else 1
        spread = exponent_of(kernels.expert_distribution)
        rows, touched, _ = busiest(mix.num_experts, mix.top_k, ranks, at, spread)
        numbers = 3.0 * model.hidden_size * mix.intermediate_size * ranks / tp
        read = us * number.expert_weight * touched * numbers
        product = 2e6 * rows * numbers / (device.peak_flops * MOE_SPEEDUP[kernels.experts_in])
        yield MOE, times.by_rows(MOE, TOKENS), np.maximum(read, product)
    cached, sparse, recurrent = model.cached_bytes(tp, number.kv), model.indexer, model.recurrent

    def read_bytes(context: Array) -> Array:
        """What a decode of a sequence reads in a mean layer; a state is written, too."""
        if sparse is not None:
            near = np.minimum(context, sparse.top_k)
            return sparse.key_bytes * context + (cached - sparse.key_bytes) * near
        state = 2 * recurrent.state_bytes(tp) / cached if recurrent is not None else 0.0
        return cached * model.kept_tokens(context, state)

    batch, context = (each.ravel() for each in np.meshgrid(TOKENS[:17], CONTEXTS))
    yield "decode", times.decode(batch, context), us * batch * read_bytes(context)
    chunk, context = (each.ravel() for each in np.meshgrid(TOKENS, np.append(0, CONTEXTS[4::2])))
    flops = model.attention_flops_per_pair * model.pairs(chunk, context, edge=0.0) / tp
    product = 1e6 * flops / (device.peak_flops * (1.0 if number.kv == 2 else 2.1))
    read = us * (read_bytes(context) if sparse is None else sparse.key_bytes * context)
    yield "prefill", times.prefill(chunk, context), np.maximum(product, read)
    if tp > 1:
        sizes = 2.0 ** np.arange(8, 30)
        link = 1e6 * sizes * (tp - 1) / tp / device.intra_node.bandwidth
        yield ALL_REDUCE, times.all_reduce(sizes), link


def combinations(models: tuple[str, ...], degrees: tuple[int, ...]) -> Iterator[StackTimes]:
    """Every device, stack and number format, measured or borrowed, with each of ``models`` and
    ``degrees`` that runs."""
    for device in list_devices():
        for stack in stacks_on(device) if not load_device(device).same_chip else ():
            spec = load_stack(device, stack)[0]
            measured = spec.having("gemm")
            formats = measured + [name for name in WEIGHT_DTYPES if name not in measured]
            for number, dtype in enumerate(formats):
                for name in models:
                    for tp in degrees:
                        kv = KV_DTYPES[number % 2]
                        model = load_model(name)
                        try:
                            yield StackTimes(
                                device, Kernels(stack, dtype, kv, model.moe_dtype), model, tp
                            )
                        except ValueError:
                            continue


def slowest_share(models: tuple[str, ...], degrees: tuple[int, ...]) -> tuple[float, int, str]:
    """The least share of a floor that any op takes, of how many points, and where."""
    least, points, where = np.inf, 0, ""
    for times in combinations(models, degrees):
        for op, us, floor in floors(times):
            share = us / np.maximum(floor, 1e-12)
            points += share.size
            if share.min() < least:
                least = float(share.min())
                where = f"{times.device.name} {times.kernels.name} {times.model.name} {op}"
    return least, points, where


SLOW = pytest.mark.slow
CASES = [
    (("qwen3-32b",), (4,), 40_000),
    pytest.param(MODELS, (1, 2, 8), 300_000, marks=SLOW),
    pytest.param(("qwen3-next-80b-a3b", "glm-5"), (8,), 30_000, marks=SLOW),
]


@pytest.mark.parametrize(("models", "degrees", "most"), CASES)
def test_no_op_is_faster_than_memory_and_matrix_units(models: Any, degrees: Any, most: int) -> None:
    least, points, where = slowest_share(models, degrees)
    assert least > LEAST - 1e-3 and points > most, (least, points, where)
