"""The one kind of SimPy event that the simulator uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

# Within one instant, in this order: batches return, transfers end, front ends admit or reject,
# prefilled requests are handed over, requests arrive, batches are formed, and reservations of KV
# blocks take effect. A batch formed at an instant thus follows all other events of this instant,
# unless one of its reservations leads to more of them.
RETURN, RECEIVED, ADMISSION, HANDOVER, ARRIVAL, DISPATCH, RESERVED = range(1, 8)


class Moment(simpy.Event):
    """Calls ``callback`` with itself ``delay`` seconds from now, ranked within its instant.

    ``delay`` is a difference of whole quanta, so the moment is hit exactly (see ``quantum.py``).
    """

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
