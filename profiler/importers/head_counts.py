"""Attention measured at one head count, scaled to another one, and extended to cached context."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.profiler.facts.roofline import HALF, Array
from sarathi_sim.profiler.importers.assemble import Part
from sarathi_sim.profiler.physics.shard_times import DeviceModel


def head_counts(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """The (query heads, KV heads) that were measured, sorted."""
    pairs = rows[["heads", "kv_heads"]].drop_duplicates()
    return sorted((int(heads), int(kv)) for heads, kv in pairs.itertuples(index=False))


def attention_part(
    op: str, rows: pd.DataFrame, model: ModelSpec, tp: int, device: DeviceModel, source: str
) -> Part | None:
    """``attn_prefill`` or ``attn_decode`` of one rank, from rows of some head counts.

    ``rows``: chunk or batch, context, heads, kv_heads, head_dim, time_us. Where the rank's head
    count was not measured, the nearest one's times are multiplied by the ratio of the calibrated
    device model's predictions for the two. Decode is not scaled between MHA and GQA: these are
    different kernels, and the result would be faster than the memory; single rows that are too fast
    are left out.
    None where there are no rows, or no such kernel.
    """
    rows = rows[rows["head_dim"] == model.head_dim]
    if rows.empty:
        return None
    wanted = model.heads_per_rank(tp)
    nearest = min(head_counts(rows), key=lambda have: _distance(wanted, have))
    decoding = OPS[op].family == "decode"
    if decoding and _distance(wanted, nearest)[0]:
        return None
    rows = rows[(rows["heads"] == nearest[0]) & (rows["kv_heads"] == nearest[1])]
    # Measurements have columns by the sizes' names.
    first, second = (size.name for size in OPS[op].sizes)
    first_out, second_out = OPS[op].columns
    size, context = (rows[c].to_numpy(np.float64) for c in (first, second))
    time = rows["time_us"].to_numpy(np.float64)
    heads = f"{nearest[0]} query and {nearest[1]} KV heads"
    if nearest != wanted:
        mine, theirs = (_predict(op, device, size, context, model, h) for h in (wanted, nearest))
        time = time * mine / theirs
    frame = pd.DataFrame(
        {first_out: rows[first].to_numpy(), second_out: rows[second].to_numpy(), "time_us": time}
    )
    if nearest == wanted:
        return Part(frame, "measured", f"{source}, {heads}")
    if decoding:
        kv_bytes = 2 * HALF * model.head_dim * wanted[1] * size * context
        frame = frame[1e6 * kv_bytes / time <= device.spec.memory_bandwidth]
    less = len(time) - len(frame)
    dropped = f"; {less} rows that this made faster than the memory left out" if less else ""
    origin = (
        f"from {heads} to {wanted[0]} and {wanted[1]} by the calibrated device model's ratio, "
        f"{source}{dropped}"
    )
    return Part(frame, "scaled", origin)


def with_context(part: Part, model: ModelSpec, tp: int, device: DeviceModel, most: int) -> Part:
    """A prefill part without cached context, extended by rows for contexts up to ``most``.

    What cached tokens add is the calibrated device model's difference.
    """
    steps = (1, 128, 256, 512, 1024, 2048, 3072, 4096, 6144)
    contexts = [c for c in steps if c < most] + [most]
    chunk = part.rows["chunk_tokens"].to_numpy(np.float64)
    parts = [part.rows]
    heads = (*model.heads_per_rank(tp), model.head_dim)
    fresh = device.attn_prefill(chunk, np.zeros_like(chunk), *heads)
    for context in contexts:
        cached = device.attn_prefill(chunk, np.full_like(chunk, context), *heads)
        time = part.rows["time_us"] + np.maximum(cached - fresh, 0.0)
        parts.append(part.rows.assign(context_tokens=context, time_us=time))
    origin = f"{part.origin}; rows with cached context: plus the calibrated device model's increase"
    return Part(pd.concat(parts, ignore_index=True), part.kind, origin)


def _predict(
    op: str, device: DeviceModel, size: Array, context: Array, model: ModelSpec, h: tuple[int, int]
) -> Array:
    call = device.attn_decode if OPS[op].family == "decode" else device.attn_prefill
    return call(size, context, *h, model.head_dim)


def _distance(wanted: tuple[int, int], have: tuple[int, int]) -> tuple[bool, float]:
    """MHA and GQA are different kernels; then the closer in KV heads and query heads."""
    kernels = (wanted[0] == wanted[1]) != (have[0] == have[1])
    apart = abs(np.log(have[1] / wanted[1])) + abs(np.log(have[0] / wanted[0]))
    return kernels, float(apart)
