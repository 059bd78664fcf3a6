"""Each op family's form: its physics, the constants to fit, and the residual's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..facts.roofline import (
    GEMM_TILES,
    Array,
    Columns,
    Constants,
    attended,
    attn_context_us,
    attn_decode_us,
    attn_prefill_us,
    gemm_us,
    link_us,
    stream_us,
    wave_fill,
)

#: Start, lower and upper bound of a fitted constant.
Range = tuple[float, float, float]


@dataclass(frozen=True)
class Form:
    """One op family. ``fitted`` constants are found by least squares on the log ratio for each of
    ``choices`` (sets of fixed constants), and the best choice is kept. ``features`` gives rows x
    features."""

    inputs: tuple[str, ...]
    physics: Callable[[Columns, Constants], Array]
    fitted: dict[str, Range]
    features: Callable[[Columns], Array]
    residual: Literal["trees", "curve", "none"]
    choices: Sequence[dict[str, float]] = field(default_factory=lambda: [{}])
    iterations: int = 200
    leaves: int = 31


def _stack(*columns: Array) -> Array:
    return np.column_stack(columns).astype(np.float64)


def _gemm_features(c: Columns) -> Array:
    m, n, k, sms = c["m"], c["n"], c["k"], c["num_sms"]
    features = [
        np.log2(m),
        np.log2(n),
        np.log2(k),
        np.log2(n * k),
        np.log2(n / k),
    ]
    features += [np.log2(c["peak_flops"] / c["bandwidth"])]
    features += [
        m % 128,
        m % 8,
        np.log2(1 / (1 / m + 1 / n + 1 / k)),
    ]
    features += [np.ceil(m / t) * t / m for t in (16, 32, 64, 128, 256)]
    features += [np.minimum(np.ceil(m / t), 64) for t in (16, 32, 64, 128)]
    for tile_m, tile_n in GEMM_TILES:
        blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n)
        features += [np.log2(blocks / sms), wave_fill(blocks, sms)]
    return _stack(*features)


def _prefill_features(c: Columns) -> Array:
    chunk, context, heads, batch = c["chunk"], c["context"], c["heads"], c["batch"]
    features = [
        np.log2(chunk),
        np.log2(heads * batch),
        np.log2(heads / c["kv_heads"]),
    ]
    keys, pairs = attended(chunk, context, edge=0.0)
    features += [np.log2(keys), context / keys, np.log2(heads * batch * pairs)]
    features += [np.log2(batch * c["kv_heads"] * keys)]
    for tile in (64, 128):
        blocks = batch * heads * np.ceil(chunk / tile)
        features += [np.log2(blocks / c["num_sms"]), wave_fill(blocks, c["num_sms"])]
        features += [np.ceil(chunk / tile) * tile / chunk]
    return _stack(*features)


def _decode_features(c: Columns) -> Array:
    """By units of work (batch x KV heads): 8 sequences of 12 heads look like 96 of one head."""
    units, group, sms = c["batch"] * c["kv_heads"], c["heads"] / c["kv_heads"], c["num_sms"]
    features = [
        np.log2(units),
        np.log2(group),
        np.log2(c["context"]),
        np.log2(c["batch"]),
    ]
    features += [np.log2(units * c["context"]), np.log2(units * group * c["context"])]
    for blocks in (units, units * group):
        features += [
            wave_fill(blocks, sms),
            wave_fill(blocks, 2 * sms),
            np.ceil(blocks / sms),
        ]
    return _stack(*features)


def _bytes_feature(c: Columns) -> Array:
    return np.log2(np.maximum(c["num_bytes"], 1.0)).reshape(-1, 1)


_ATTENTION = ("batch", "heads", "kv_heads", "head_dim")

GEMM = Form(
    inputs=("m", "n", "k"),
    physics=gemm_us,
    fitted={
        "overhead_us": (5.0, 0.5, 20.0),
        "compute": (0.75, 0.3, 1.0),
        "memory": (0.85, 0.4, 1.0),
        "p": (2.0, 1.1, 20.0),
        "wave_share": (0.1, 1e-3, 1.0),
        "tile_share": (0.6, 1e-3, 1.0),
    },
    choices=[{"tile_m": float(a), "tile_n": float(b)} for a, b in GEMM_TILES],
    features=_gemm_features,
    residual="trees",
    iterations=300,
)

ATTN_PREFILL = Form(
    inputs=("chunk", "context", *_ATTENTION),
    physics=attn_prefill_us,
    fitted={
        "overhead_us": (8.0, 0.5, 30.0),
        "compute": (0.5, 0.1, 1.0),
        "memory": (0.7, 0.2, 1.0),
        "p": (2.0, 1.1, 20.0),
        "causal": (0.5, 0.45, 1.0),
        "token_us": (0.02, 1e-3, 0.3),
        "wave_share": (0.3, 1e-3, 1.0),
    },
    choices=[{"tile_m": 64.0}, {"tile_m": 128.0}],
    features=_prefill_features,
    residual="trees",
    leaves=15,
)

#: Physics alone: a residual learned at one head count would not carry over to another.
ATTN_CONTEXT = Form(
    inputs=("chunk", "context", "base_us", *_ATTENTION),
    physics=attn_context_us,
    fitted={
        "compute": (0.4, 0.1, 1.0),
        "step_us": (3.0, 0.1, 20.0),
        "wave_share": (0.5, 1e-3, 1.0),
    },
    choices=[{"tile_m": 64.0}, {"tile_m": 128.0}],
    features=_prefill_features,
    residual="none",
)


def decode_form(splits: bool, packed: bool, hbm: float | None = None) -> Form:
    """Decode attention; see :func:`~sarathi_sim.profiler.facts.roofline.attn_decode_us` for the two
    switches. ``hbm`` sets the HBM efficiency where the measurements do not show it; None fits
    it."""
    fitted: dict[str, Range] = {
        "overhead_us": (5.0, 0.5, 30.0),
        "block_us": (1.0, 1e-2, 10.0),
        "token_us": (0.02, 1e-4, 0.3),
        "p": (2.0, 1.1, 20.0),
        "wave_share": (0.3, 1e-3, 1.0),
    }
    fixed = {"splits": float(splits), "packed": float(packed)}
    if hbm is None:
        fitted["hbm"] = (0.8, 0.3, 1.0)
    else:
        fixed["hbm"] = hbm
    return Form(
        inputs=("context", *_ATTENTION),
        physics=attn_decode_us,
        fitted=fitted,
        choices=[fixed],
        features=_decode_features,
        residual="trees",
        iterations=200,
        leaves=15,
    )


STREAM = Form(
    inputs=("num_bytes",),
    physics=stream_us,
    fitted={
        "overhead_us": (3.0, 0.2, 50.0),
        "memory": (0.6, 0.02, 1.2),
        "p": (2.0, 1.1, 20.0),
    },
    features=_bytes_feature,
    residual="curve",
)

LINK = Form(
    inputs=("num_bytes",),
    physics=link_us,
    fitted={
        "overhead_us": (20.0, 1.0, 200.0),
        "us_per_mb": (10.0, 1.0, 10000.0),
        "ramp_us": (5.0, 1e-3, 5000.0),
    },
    features=_bytes_feature,
    residual="curve",
)
