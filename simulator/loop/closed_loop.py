"""Arrivals that depend on finished requests: clients that wait for an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from simulator.loop.records import Floats

Arrival = tuple[float, int]
"""When a request arrives, in seconds, and its place in the list of requests."""


class Clients(Protocol):
    """The clients' requests and their times. All times are whole quanta (see ``quantum.py``)."""

    def begin(self) -> Iterable[Arrival]:
        """The requests sent at the begin of a run."""
        ...

    def answered(self, position: int, now: float) -> Iterable[Arrival]:
        """The requests sent because this request was finished, or rejected, at ``now``."""
        ...


class ClosedLoop:
    """``clients`` requests are in flight at any time, until there are no more of them.

    Load generators with a limit of concurrency work like this. They send the first ``clients``
    requests at 0. Whenever a request finishes or is rejected, they send the next one in the order
    of the list, ``think_s[place]`` seconds later. A client learns of a finish when the scheduler
    does.
    """

    def __init__(self, clients: int, think_s: Floats) -> None:
        self.clients = clients
        self.think_s = think_s
        self._next = 0

    def begin(self) -> list[Arrival]:
        """The first requests, one a client."""
        self._next = min(self.clients, len(self.think_s))
        return [(0.0, place) for place in range(self._next)]

    def answered(self, position: int, now: float) -> list[Arrival]:
        """The next request, whichever client had the answer."""
        if self._next == len(self.think_s):
            return []
        place = self._next
        self._next += 1
        return [(now + float(self.think_s[place]), place)]
