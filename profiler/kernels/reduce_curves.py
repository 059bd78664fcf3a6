"""Times by bytes: messages of a stack's, by ranks; elementwise kernels where measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from sarathi_sim.profiler.facts.device import Link
from sarathi_sim.profiler.facts.ops import OPS, Shard
from sarathi_sim.profiler.facts.roofline import HALF, Array
from sarathi_sim.profiler.kernels.gemm_lattice import Stored, packed, unpacked

#: Tokens of the largest batch that a stack captures as a CUDA graph; beyond it runs its eager
#: kernel (assumed: vLLM's and SGLang's defaults on these GPUs).
CAPTURED_TOKENS = 512
#: Until a message of one byte arrives: AIConfigurator's assumption for all systems.
SEND_LATENCY_US = 10.0


def sent_us(num_bytes: Array, link: Link) -> Array:
    """One message where nothing was measured: latency and the link's bandwidth."""
    return SEND_LATENCY_US + 1e6 * num_bytes / link.bandwidth


@dataclass(frozen=True, eq=False)
class ReduceCurve:
    """Microseconds by bytes a rank; in proportion beyond the largest.

    Between sizes the share that is reached of a law (the latency of the smallest, the bandwidth of
    the largest) is linear in the logarithm of the bytes; no less time than the next smaller takes.
    """

    num_bytes: Array
    log_us: Array

    def time_us(self, num_bytes: Array) -> Array:
        """One call."""
        sizes, known = self.num_bytes, np.exp(self.log_us)
        rate = known[-1] / sizes[-1]
        inside = np.clip(num_bytes, sizes[0], sizes[-1])
        reached = np.interp(np.log(inside), np.log(sizes), (known[0] + rate * sizes) / known)
        least = known[np.searchsorted(sizes, inside, side="right") - 1]
        time = np.maximum((known[0] + rate * inside) / reached, least)
        return np.asarray(time * np.maximum(num_bytes / sizes[-1], 1.0))

    def arrays(self) -> dict[str, npt.NDArray[np.int16] | npt.NDArray[np.int32]]:
        """As plain integers; sizes in kinds of 128 bytes."""
        return {
            "size": (self.num_bytes / 128).astype(np.int32),
            "log_us": packed(self.log_us),
        }

    @classmethod
    def from_arrays(cls, arrays: Stored) -> ReduceCurve:
        """From what :meth:`arrays` gave."""
        sizes = 128.0 * arrays["size"].astype(np.float64)
        return cls(sizes, unpacked(np.asarray(arrays["log_us"], np.int16)))


def stream_bytes(op: str, shard: Shard) -> float:
    """The bytes that an op's elementwise kernels move for a token."""
    streams = OPS[op].streams
    assert streams is not None
    return sum(HALF * s.times * s.numbers for s in streams(shard))


def fit_reduce(rows: pd.DataFrame) -> ReduceCurve:
    """From rows (num_bytes, time_us) of one kernel and number of ranks."""
    ordered = rows.sort_values("num_bytes")
    return reduce_curve(*(ordered[c].to_numpy(np.float64) for c in ("num_bytes", "time_us")))


def reduce_curve(num_bytes: Array, time_us: Array) -> ReduceCurve:
    """The curve of these times by rising sizes.

    A larger message takes no less time: a running minimum from the largest on.
    """
    return ReduceCurve(num_bytes, np.log(cleaned_messages(time_us)))


def cleaned_messages(time_us: Array) -> Array:
    """The running minimum from the largest message on."""
    return np.minimum.accumulate(time_us[::-1])[::-1]
