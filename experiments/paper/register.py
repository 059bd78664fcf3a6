"""The readings of the paper's claims: the registry of functions that compute our values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sarathi_sim.experiments.paper.variants import Lab


@dataclass(frozen=True)
class ClaimReading:
    """The reading of a claim: its text, and the function that computes our value.

    ``control`` computes it without the reason that the paper gives: a claim that still holds is no
    evidence for this reason.
    """

    text: str
    compute: Callable[[Lab], float]
    control: Callable[[Lab], float] | None = None


CLAIM_READINGS: dict[str, ClaimReading] = {}
"""By claim; the modules of the sections fill it when they are imported."""


def reads(
    id: str, text: str, *, control: Callable[[Lab], float] | None = None
) -> Callable[[Callable[[Lab], float]], Callable[[Lab], float]]:
    """Register the function below for our value of claim ``id``."""

    def register(compute: Callable[[Lab], float]) -> Callable[[Lab], float]:
        if id in CLAIM_READINGS:
            raise ValueError(f"claim {id!r} is computed twice")
        CLAIM_READINGS[id] = ClaimReading(text, compute, control)
        return compute

    return register
