"""Simulated time, a whole number of quanta, so that sums are exact; the one kind of SimPy event.

Every duration and every arrival is rounded once to a multiple of 2**-30 s (0.93 ns). A double
holds such a multiple exactly up to 2**23 s (97 days), hence sums and differences of times have no
rounding error: the bubble ledger closes to the bit, results do not depend on the order of
summation, and a pipeline can be re-timed with vectorised prefix sums that agree bitwise with an
event-by-event run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import simpy

QUANTUM_S = 2.0**-30
HORIZON_S = 2.0**21
"""Largest magnitude that :func:`quantize` rounds correctly: 24 days."""

# Adding 1.5 * 2**52 quanta leaves no bits below one quantum; subtracting it again gives back the
# rounded value. Two additions, against a multiplication, a call and a division for round().
ROUNDER = 1.5 * 2.0**52 * QUANTUM_S

T = TypeVar("T", float, npt.NDArray[np.float64])


def quantize(seconds: T) -> T:
    """The nearest multiple of the quantum, for magnitudes below :data:`HORIZON_S`."""
    return (seconds + ROUNDER) - ROUNDER


# Within one instant, in this order: batches return, transfers end, front ends admit or reject,
# prefilled requests are handed over, requests arrive, batches are formed, and reservations of KV
# blocks take effect. A batch formed at an instant thus follows all other events of this instant,
# unless one of its reservations leads to more of them.
RETURN, RECEIVED, ADMISSION, HANDOVER, ARRIVAL, DISPATCH, RESERVED = range(1, 8)


class Moment(simpy.Event):
    """Calls ``callback`` with itself ``delay`` seconds from now, ranked within its instant.
    ``delay`` is a difference of whole quanta, so the moment is hit exactly."""

    def __init__(
        self,
        env: simpy.Environment,
        delay: float,
        rank: int,
        callback: Callable[[Any], None],
        value: object = None,
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = value
        self._ok = True
        env.schedule(self, rank, delay)  # type: ignore[arg-type]
