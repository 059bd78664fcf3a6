"""The behaviour of the simulated engine apart from its op times, as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True)
class EngineSwitches:
    """The switches that are keys of a configuration's section ``engine``, with names and bounds.

    ``turnaround_s``   from a batch's finish until the scheduler can put its successor on stage 0
    ``jitter``         coefficient of variation of every stage time (0: none)
    """

    turnaround_s: Annotated[
        float,
        Field(ge=0, le=3600, title="scheduler turn-around"),
        Field(json_schema_extra={"short": "turn-around"}),
    ] = 0.0
    jitter: Annotated[
        float,
        Field(ge=0, le=1, title="jitter (coefficient of variation)"),
        Field(json_schema_extra={"short": "jitter"}),
    ] = 0.0


@dataclass(frozen=True)
class Switches(EngineSwitches):
    """The switches of the simulated engine.

    ``lazy``           form a batch when stage 0 is free, not as soon as a micro-batch returned
    ``blocking_send``  a stage is occupied while it sends its result on
    """

    lazy: bool = False
    blocking_send: bool = False


DEFAULT = Switches()
"""The reference system: eager formation, overlapped sends, no turn-around, no jitter."""
