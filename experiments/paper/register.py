"""How each claim of the paper is read: the registry of functions that compute our value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.paper.variants import Lab


@dataclass(frozen=True)
class ClaimReading:
    """How a claim is read: the text that says so, and the function that computes our value.

    ``control`` computes it without what the paper says is the reason: a claim that holds then too
    is no evidence of that.
    """

    text: str
    compute: Callable[[Lab], float]
    control: Callable[[Lab], float] | None = None


CLAIM_READINGS: dict[str, ClaimReading] = {}
"""By claim; the modules of the sections fill it when they are imported."""


def reads(
    id: str, text: str, *, control: Callable[[Lab], float] | None = None
) -> Callable[[Callable[[Lab], float]], Callable[[Lab], float]]:
    """Register the function below as what computes our value of claim ``id``."""

    def register(compute: Callable[[Lab], float]) -> Callable[[Lab], float]:
        if id in CLAIM_READINGS:
            raise ValueError(f"claim {id!r} is computed twice")
        CLAIM_READINGS[id] = ClaimReading(text, compute, control)
        return compute

    return register
