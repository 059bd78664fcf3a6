"""Arrivals that depend on finished requests: clients that wait for an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sarathi_sim.simulator.loop.records import Floats, Ints

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


@dataclass(eq=False)
class ClosedLoop:
    """``clients`` requests are in flight at any time, until there are no more of them.

    Load generators with a limit of concurrency work like this. They send the first ``clients``
    requests at 0. Whenever a request finishes or is rejected, they send the next one in the order
    of the list, ``think_s[place]`` seconds later. A client learns of a finish when the scheduler
    does.
    """

    clients: int
    think_s: Floats
    _next: int = 0

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


@dataclass(eq=False)
class Conversations:
    """Clients who hold conversations, and wait for each answer before they go on.

    ``session[place]`` is the conversation of a request. Its turns follow each other in the list.
    The first is sent at its ``arrival_s``. Each other one is sent ``think_s[place]`` seconds after
    the turn before it was finished, or rejected.
    """

    session: Ints
    arrival_s: Floats
    think_s: Floats

    def begin(self) -> list[Arrival]:
        """The first turn of every conversation."""
        first = np.flatnonzero(np.diff(self.session, prepend=-1))
        return list(zip(self.arrival_s[first].tolist(), first.tolist(), strict=True))

    def answered(self, position: int, now: float) -> list[Arrival]:
        """The conversation's next turn, if there is one."""
        place = position + 1
        if place == len(self.session) or self.session[place] != self.session[position]:
            return []
        return [(now + float(self.think_s[place]), place)]
