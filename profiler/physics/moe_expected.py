"""What a mixture's experts should take on one rank: a roofline, and a trend fitted to a table.

The roofline is one formula for every device. The trend is a sum of what takes time, each part with
a factor fitted to the table (non-negative least squares of the relative errors): a launch; weights
read from HBM and from L2; FLOPs of whole tiles of rows; rows in and out; a part for every expert.
The rows are those of the busiest rank. Some kernels also carry the rows of all ranks, or compute
them, which are parts of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.expert_loads import busiest
from sarathi_sim.profiler.facts.formats import MOE_BYTES, MOE_SPEEDUP, MoeDtype, exponent_of
from sarathi_sim.profiler.facts.roofline import HALF, HBM_SHARE, Array
from sarathi_sim.profiler.public.kernel_tables import SYSTEMS

#: The columns of a shape: a model's sizes, and how its experts are divided among ranks.
SHAPE = ("hidden", "inter", "top_k", "experts", "tp", "ep")
#: Of the expected time: a launch of both GEMMs and the routing, and the share of the peak FLOP/s.
_LAUNCH_US, _FLOP_SHARE = 20.0, 0.6
#: Factors of the trend's parts, to which a table's lean that it does not determine (few models, or
#: ranks of one kind); how much that counts beside the mean of the squared errors.
_USUAL = (20.0, 1.25, 0.5, 1.7, 0.1, 4.0, 4.0, 2.0, 1.0, 1.0, 0.05)
_LEAN = 1e-4
#: Weights up to the first share of L2 are found there, from the second on none is.
_FITS, _OUTGROWS = 0.8, 1.2


@dataclass(frozen=True)
class Rates:
    """What bounds the experts: FLOP/s and bytes/s at peak, bytes of a weight; L2, bytes.

    ``exponent`` is that of the power law by which tokens spread, 0 for evenly.
    """

    flops: float
    bandwidth: float
    weight_bytes: float
    cache: float = 0.0
    exponent: float = 0.0


def rates_of(device: str, dtype: MoeDtype, distribution: str) -> Rates:
    """Those of a shipped device for experts in ``dtype``."""
    spec = load_device(device)
    return Rates(
        spec.peak_flops * MOE_SPEEDUP[dtype], spec.memory_bandwidth, MOE_BYTES[dtype],
        2.0**20 * SYSTEMS.get(device, ("", 0))[1], exponent_of(distribution),
    )  # fmt: skip


def moved_bytes(shapes: Array, tokens: Array, weight_bytes: float) -> Array:
    """Weights of the experts that some token chose, and rows in and out of them and the layer.

    One row a shape (:data:`SHAPE`), one column a number of tokens.
    """
    hidden, inter, top_k, experts, tp, ep = shapes.T[:, :, None]
    chosen = experts / ep * (1.0 - (1.0 - top_k / experts) ** tokens)
    rows, width = tokens * top_k / ep, inter / tp
    numbers = rows * (2 * hidden + 3 * width) + 2 * tokens * hidden
    found: Array = weight_bytes * chosen * 3 * hidden * width + HALF * numbers
    return found


def expected_us(shapes: Array, tokens: Array, rates: Rates) -> Array:
    """One row a shape (:data:`SHAPE`), one column a number of tokens."""
    hidden, inter, top_k, _, tp, ep = shapes.T[:, :, None]
    moved = moved_bytes(shapes, tokens, rates.weight_bytes)
    memory = 1e6 * moved / (HBM_SHARE * rates.bandwidth)
    compute = 6e6 * tokens * top_k / ep * hidden * inter / tp / (_FLOP_SHARE * rates.flops)
    found: Array = _LAUNCH_US + np.hypot(memory, compute)
    return found


def parts_us(shapes: npt.NDArray[np.int64], tokens: Array, rates: Rates) -> Array:
    """The parts of the trend at peak rates: [shape, tokens, part]."""
    at = tuple(tokens.tolist())
    loads = [busiest(*shape, at, rates.exponent) for shape in shapes[:, [3, 2, 5]].tolist()]
    rows, touched, padded = np.array(loads).transpose(1, 0, 2)
    hidden, inter, top_k, experts, tp, ep = shapes.astype(np.float64).T[:, :, None]
    width, byte_us = inter / tp, 1e6 / rates.bandwidth
    expert = 3 * hidden * width
    weights = rates.weight_bytes * expert * touched
    over = weights / rates.cache if rates.cache else np.inf
    missed = np.clip((over - _FITS) / (_OUTGROWS - _FITS), 0.0, 1.0)
    parts = (
        np.ones_like(rows),
        byte_us * weights * missed,
        byte_us * weights * (1.0 - missed),
        2e6 * expert * padded / rates.flops,
        2e6 * expert * tokens * top_k / rates.flops,
        byte_us * HALF * rows * hidden,
        byte_us * HALF * rows * width,
        byte_us * HALF * tokens * hidden,
        byte_us * HALF * tokens * top_k * hidden,
        byte_us * HALF * tokens * top_k * width,
        np.broadcast_to(experts / ep, rows.shape),
    )
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def factors(parts: Array, time_us: Array) -> Array:
    """Of each part, so that their sum is near the times, relatively."""
    from scipy.optimize import nnls

    usual = np.array(_USUAL)
    share = (parts / time_us[..., None]).reshape(-1, len(usual)) * usual
    basis, triangle = np.linalg.qr(share)  # the same minimum, of fewer rows
    lean = np.sqrt(_LEAN * len(share))
    rows = np.concatenate([triangle, lean * np.eye(len(usual))])
    found, _ = nnls(rows, np.concatenate([basis.sum(axis=0), np.full(len(usual), lean)]))
    return np.asarray(found * usual)
