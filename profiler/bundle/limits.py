"""The limits of a device: times that are faster than its data sheet allows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.schema import Bundle
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import SPEEDUP, Kernels
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ATTENTION, OPS
from sarathi_sim.profiler.facts.roofline import HALF, Array

#: Clocks above the data sheet's, and rounding, are forgiven.
_SLACK = 1.05
#: Below this traffic a profiling loop may find its data in L2 (at most 50 MB here) again.
_FROM_MEMORY = 200e6
#: How much faster than HBM L2 may be.
_L2_SPEEDUP = 6.0


def too_fast(bundle: Bundle, device: DeviceSpec) -> Iterator[tuple[str, str]]:
    """(op, message) of every row that is faster than ``device`` can compute or move bytes.

    GEMMs, attention and whole layers: peak FLOP/s, and HBM bandwidth where the traffic exceeds what
    L2 could hold. Messages: the link's bandwidth in one direction. Wrong units show up here.
    """
    model, tp = bundle.meta.model_spec, bundle.meta.tp
    plain = Kernels(
        "vllm", dtype="fp8" if bundle.meta.environment.get("weights") == "fp8" else "bf16"
    )
    kernels = bundle.meta.kernels.used if bundle.meta.kernels else plain
    sizes_of = kernels.number_bytes
    for gemm, shape in model.gemms(tp).items():
        rows = bundle.linear[bundle.linear["op"] == gemm]
        m = rows["num_tokens"].to_numpy(np.float64)
        own = OPS[gemm].part == "layer"
        weight, faster = (sizes_of.weight, SPEEDUP[kernels.dtype]) if own else (HALF, 1.0)
        moved = weight * (shape.n * shape.k + m * shape.k) + HALF * m * shape.n
        flops = 2.0 * m * shape.n * shape.k / faster
        yield from _flops(gemm, rows, "num_tokens", flops, device)
        yield from _memory(gemm, rows, "num_tokens", moved, device)
    tables = [(op, OPS[op]) for op in ATTENTION]
    tables += [(f"{name}_skew", op) for name, op in tables if op.family == "decode"]
    for table, op in tables:
        rows, size = bundle.tables()[table], op.columns[0]
        new = rows[size].to_numpy(np.float64)
        context = rows["context_tokens"].to_numpy(np.float64)
        decoding = op.family == "decode"
        kept = model.kept_tokens(context)
        pairs = new * kept if decoding else model.pairs(new, context, edge=0.0)
        flops = model.attention_flops_per_pair * pairs / tp / (HALF / sizes_of.kv)
        yield from _flops(table, rows, size, flops, device)
        read = new * kept if decoding else new + kept
        moved = sizes_of.kv * model.cached_numbers(tp) * read
        yield from _memory(table, rows, size, moved, device)
    tokens = bundle.mixed["chunk_tokens"] + bundle.mixed["batch_size"]
    flops = 2.0 * model.layer_weights(tp) * tokens.to_numpy(np.float64)
    yield from _flops("mixed", bundle.mixed, "chunk_tokens", flops, device)
    sizes = bundle.all_reduce["num_bytes"].to_numpy(np.float64)
    # Every rank sends and receives 2 (tp - 1) / tp of the tensor in a ring; switches may halve it.
    yield from _link(ALL_REDUCE, bundle.all_reduce, sizes * (tp - 1) / tp, device, "intra_node")
    for scope, rows in bundle.send_recv.groupby("scope"):
        sizes = rows["num_bytes"].to_numpy(np.float64)
        yield from _link(f"send_recv {scope}", rows, sizes, device, str(scope))


def _flops(
    op: str, rows: pd.DataFrame, size: str, flops: Array, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    least = 1e6 * flops / (device.peak_flops * _SLACK)
    yield from _compare(op, rows, size, least, f"{device.peak_flops / 1e12:.0f} TFLOP/s", device)


def _memory(
    op: str, rows: pd.DataFrame, size: str, moved: Array, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    speed = np.where(moved > _FROM_MEMORY, _SLACK, _L2_SPEEDUP) * device.memory_bandwidth
    limit = f"{device.memory_bandwidth / 1e9:.0f} GB/s of memory"
    yield from _compare(op, rows, size, 1e6 * moved / speed, limit, device)


def _link(
    op: str, rows: pd.DataFrame, moved: Array, device: DeviceSpec, scope: str
) -> Iterator[tuple[str, str]]:
    link = device.intra_node if scope == "intra_node" else device.inter_node
    least = 1e6 * moved / (link.bandwidth * _SLACK)
    limit = f"{link.bandwidth / 1e9:.4g} GB/s of {link.kind}"
    yield from _compare(op, rows, "num_bytes", least, limit, device)


def _compare(
    op: str, rows: pd.DataFrame, size: str, least: Array, limit: str, device: DeviceSpec
) -> Iterator[tuple[str, str]]:
    times = rows["time_us"].to_numpy(np.float64)
    wrong = np.flatnonzero(times < least)
    if not len(wrong):
        return
    worst = wrong[np.argmax(least[wrong] / times[wrong])]
    row = rows.iloc[worst]
    at = f"{size}={int(row[size])}"
    if "context_tokens" in rows:
        at += f" context_tokens={int(row['context_tokens'])}"
    yield (
        op,
        f"faster than the device can: {times[worst]:.4g} us at {at}, where {limit} of "
        f"{device.name} need at least {least[worst]:.4g} us ({len(wrong)} of {len(rows)} rows); "
        "wrong unit or shape?",
    )
