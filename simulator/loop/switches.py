"""The behaviour of the simulated engine apart from its op times, as one object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switches:
    """The switches of the simulated engine (ARCHITECTURE.md has the table).

    ``lazy``           form a batch when stage 0 is free, not as soon as a micro-batch returned
    ``blocking_send``  a stage is occupied while it sends its result on
    ``turnaround_s``   from a batch's finish until the scheduler can put its successor on stage 0
    ``jitter``         coefficient of variation of every stage time (0: none)
    """

    lazy: bool = False
    blocking_send: bool = False
    turnaround_s: float = 0.0
    jitter: float = 0.0


DEFAULT = Switches()
"""The reference system: eager formation, overlapped sends, no turn-around, no jitter."""
