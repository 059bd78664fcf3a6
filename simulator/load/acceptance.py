"""How many drafts of a decode hold: the probabilities of a draft's positions, and the draw.

``data/acceptance.yaml`` holds what was measured: the mean length of a decode by model and drafter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from sarathi_sim.profiler.storage.plain_yaml import load_shipped
from sarathi_sim.profiler.storage.strict import UserError, strict_dataclass

_BITS = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class AcceptanceError(UserError):
    """No acceptance is known for a model and a drafter."""


@strict_dataclass
class Golden:
    """The file: the mean accepted length by model, drafter, thinking, and draft length from 1 on;
    and who measured them."""

    origin: str
    golden: dict[str, dict[str, dict[str, list[float]]]]


@lru_cache(maxsize=1)
def golden() -> Golden:
    """The measured means."""
    return load_shipped(Golden, "acceptance.yaml")


def golden_length(model: str, method: str, thinking: str, draft_length: int) -> float:
    """The measured mean tokens of a decode that drafts ``draft_length`` tokens. Raises
    AcceptanceError, naming what was measured, where this was not."""
    known = golden().golden
    means = known.get(model, {}).get(method, {}).get(thinking, [])
    if draft_length <= len(means):
        return means[draft_length - 1]
    there = ", ".join(f"{name} ({'/'.join(by_method)})" for name, by_method in known.items())
    what = f"{method} of {model} with {thinking} and {draft_length} drafts"
    raise AcceptanceError(f"no acceptance of {what} was measured: give a number; measured: {there}")


def held_by_mean(mean: float, draft_length: int) -> tuple[float, ...]:
    """For each position, the probability that the drafts up to it hold, if each holds with the same
    probability given those before and a decode yields ``mean`` tokens: 1 + p + p^2 + ... Raises
    ValueError for a mean that is not between 1 and ``draft_length`` + 1."""
    if not 1 <= mean <= draft_length + 1:
        raise ValueError(f"must lie between 1 and {draft_length + 1}, its own token included")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if sum(p**n for n in range(draft_length + 1)) < mean:
            low = p
        else:
            high = p
    return tuple(high**n for n in range(1, draft_length + 1))


def held_by_position(given: Sequence[float]) -> tuple[float, ...]:
    """The same from each position's probability given the ones before."""
    return tuple(accumulate(given, mul))


@dataclass(frozen=True)
class DrawnAcceptance:
    """Draws how many drafts of a decode hold. ``held`` are the probabilities that the drafts up to
    each position hold, descending. A draw is a function of ``seed``, request and the tokens it has
    so far: the same wherever it is served."""

    held: tuple[float, ...]
    seed: int

    @property
    def mean(self) -> float:
        """Mean tokens of a decode, its own token included."""
        return 1 + sum(self.held)

    def __call__(self, id: int, known: int, drafts: int) -> int:
        """The drafts that hold, of ``drafts``."""
        x = self.seed
        for number in (id, known):
            x = _mixed(x ^ (number & _BITS))
        # The drafts up to a position hold if a uniform draw is below its probability.
        u = (x >> 11) * 2.0**-53
        return min(bisect_left(self.held, -u, key=float.__neg__), drafts)


def _mixed(x: int) -> int:
    """SplitMix64 (Steele, Lea and Flood 2014): 64 bits that no longer show the pattern of ``x``."""
    x = (x + _STEP) & _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)
