"""Times by bytes: a stack's messages, by ranks; and measured elementwise kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..facts.device import Link
from ..facts.ops import OPS, Shard
from ..facts.roofline import HALF, Array
from .gemm_lattice import rising
from .stack_file import StoredSurface

#: Tokens of the largest batch that a stack captures as a CUDA graph; beyond it runs its eager
#: kernel (assumed: vLLM's and SGLang's defaults on these GPUs).
CAPTURED_TOKENS = 512
#: Latency of a message of one byte: AIConfigurator's assumption for all systems.
SEND_LATENCY_US = 10.0


def sent_us(num_bytes: Array, link: Link) -> Array:
    """One message where nothing was measured: latency and the link's bandwidth."""
    return SEND_LATENCY_US + 1e6 * num_bytes / link.bandwidth


@dataclass(frozen=True, eq=False)
class ReduceCurve(StoredSurface):
    """Microseconds by bytes a rank; in proportion beyond the largest. Between sizes the ratio to a
    law (latency of the smallest, bandwidth of the largest) is linear in the logarithm of the bytes;
    no message takes less time than the next smaller size."""

    size: Array
    log_us: Array

    @property
    def num_bytes(self) -> Array:
        """Sizes are stored in kinds of 128 bytes."""
        return 128.0 * self.size

    def time_us(self, num_bytes: Array) -> Array:
        """One call."""
        sizes, known = self.num_bytes, np.exp(self.log_us)
        rate = known[-1] / sizes[-1]
        inside = np.clip(num_bytes, sizes[0], sizes[-1])
        reached = np.interp(
            np.log(inside),
            np.log(sizes),
            (known[0] + rate * sizes) / known,
        )
        least = known[np.searchsorted(sizes, inside, side="right") - 1]
        time = np.maximum((known[0] + rate * inside) / reached, least)
        return np.asarray(time * np.maximum(num_bytes / sizes[-1], 1.0))


def stream_bytes(op: str, shard: Shard) -> float:
    """The bytes that an op's elementwise kernels move for a token."""
    streams = OPS[op].streams
    assert streams is not None
    return sum(HALF * s.times * s.numbers for s in streams(shard))


def fit_reduce(rows: pd.DataFrame) -> ReduceCurve:
    """From rows (num_bytes, time_us) of one kernel and number of ranks. A larger message takes no
    less time."""
    ordered = rows.sort_values("num_bytes")
    size, time = (ordered[c].to_numpy(np.float64) for c in ("num_bytes", "time_us"))
    return ReduceCurve(size / 128, np.log(rising(time, 0)))
