"""Times over one size: piecewise linear through the points, and extrapolated beyond the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from sarathi_sim.profiler.facts.ops import GemmShape
from sarathi_sim.profiler.facts.roofline import Size, gemm_time_us
from sarathi_sim.profiler.physics.fit import fit_constants
from sarathi_sim.simulator.loop.records import Floats

Curve = Callable[[Floats], Floats]


class PiecewiseLinear:
    """Time in seconds through points ``(size, time)``; sizes ascending.

    Below the first point it is constant. Beyond the last one it is ``beyond(size)``, but never
    less than at the last; without it, proportional to the size.
    """

    def __init__(
        self, size: npt.ArrayLike, time_s: npt.ArrayLike, beyond: Curve | None = None
    ) -> None:
        self.size = np.asarray(size, np.float64)
        self.time_s = np.asarray(time_s, np.float64)
        self._beyond = beyond

    def __call__(self, size: npt.ArrayLike) -> Floats:
        """Times in seconds, of the shape of ``size``."""
        wanted = np.asarray(size, np.float64)
        last, last_s = self.size[-1], self.time_s[-1]
        inside = np.interp(wanted, self.size, self.time_s)
        outside = wanted > last
        if self._beyond is None or not outside.any():
            return np.asarray(inside * np.maximum(wanted / last, 1.0))
        further = np.maximum(self._beyond(np.maximum(wanted, last)), last_s)
        return np.asarray(np.where(outside, further, inside))


class PooledRoofline:
    """A soft-max roofline with one set of constants for all GEMMs of a bundle.

    ``t = overhead + (compute^p + memory^p)^(1/p)``, where compute counts the rows, partly rounded
    up to a tile, and memory the numbers in weights and activations. It is fitted to all shapes
    together (robustly, to relative errors), because the points of one shape may not separate
    compute from memory.
    """

    TILE = 128.0
    _SPAN = ((0.1, 100.0), (1e3, 1e11), (1e2, 1e9), (1.05, 20.0), (1e-3, 1.0))
    """Bounds of overhead (us), rates (FLOP and numbers a us), p, and the share of a tile paid."""

    def __init__(self, points: Mapping[GemmShape, tuple[Floats, Floats]]) -> None:
        """``points`` are (tokens, seconds) of each shape."""
        tokens = np.concatenate([m for m, _ in points.values()])
        time = 1e6 * np.concatenate([t for _, t in points.values()])
        sizes = [len(m) for m, _ in points.values()]
        n = np.repeat([float(shape.n) for shape in points], sizes)
        k = np.repeat([float(shape.k) for shape in points], sizes)
        low, high = np.log(self._SPAN).T
        flops, traffic = 2 * tokens * n * k, n * k
        start = np.log([5.0, (flops / time).max(), (traffic / time).max(), 2.0, 0.5])

        start = np.clip(start, low + 1e-6, high - 1e-6)
        physics = partial(self._time_us, m=tokens, n=n, k=k)
        self.constants: Floats = fit_constants(physics, time, start, low, high)[0]

    def _time_us(self, constants: Floats, m: Floats, n: Size, k: Size) -> Floats:
        overhead, flop_rate, number_rate, p, paid = constants
        kernel = {"overhead_us": overhead, "p": p, "tile_m": self.TILE, "tile_share": paid}
        return gemm_time_us(m, n, k, kernel, flop_rate, number_rate)

    def time_s(self, shape: GemmShape, tokens: Floats) -> Floats:
        """Seconds of one shape."""
        return 1e-6 * self._time_us(self.constants, tokens, shape.n, shape.k)

    def beyond(self, shape: GemmShape, tokens: Floats, time_s: Floats) -> Curve:
        """The op's times beyond its last point.

        This is the roofline, corrected by half (in logarithms) of its error in the last third of an
        octave: kernels differ in efficiency, but not all of a difference persists. On public GEMMs
        up to 1024 tokens, predicted to 4096, half is better than no correction and than the full
        one.
        """
        late = tokens >= 0.75 * tokens[-1]
        missed = np.log(time_s[late] / self.time_s(shape, tokens[late]))
        factor = float(np.exp(np.median(missed) / 2))
        return lambda wanted: factor * self.time_s(shape, wanted)
