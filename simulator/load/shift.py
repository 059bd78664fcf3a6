"""What if prompts or outputs were longer, or arrivals burstier? The same requests, shifted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sarathi_sim.policies.request import Prefix
from sarathi_sim.simulator.loop.records import Floats, Ints

_STEEPEST = 256.0
"""Of the power that gaps are raised to."""


def longer(tokens: Ints, factor: float) -> Ints:
    """So many times as many tokens, rounded; at least one."""
    return np.asarray(np.maximum(1, np.rint(factor * tokens)), np.int64)


def longer_requests(
    prompt: Ints, output: Ints, factors: tuple[float, float], max_length: int
) -> tuple[Ints, Ints]:
    """Prompts and outputs so many times as long. A request that fitted ``max_length`` still fits:
    first its output is cut to it, then its prompt."""
    fitted = prompt + output <= max_length
    longer_output = longer(output, factors[1])
    longer_output = np.where(fitted, np.minimum(longer_output, max_length - 1), longer_output)
    longer_prompt = longer(prompt, factors[0])
    most = np.where(fitted, max_length - longer_output, longer_prompt)
    return np.minimum(longer_prompt, most), longer_output


def longer_prefixes(prefixes: Iterable[Prefix], factor: float, ends: Ints) -> list[Prefix]:
    """What longer prompts share: so many times as many tokens, up to each one's ``ends``."""
    return [
        tuple((name, min(max(1, round(factor * until)), end)) for name, until in prefix)
        for prefix, end in zip(prefixes, ends.tolist(), strict=True)
    ]


def burstier(arrival_s: Floats, factor: float) -> Floats:
    """Arrivals in the same order and time, whose gaps' coefficient of variation is ``factor`` times
    what it was.

    Each gap is raised to one power, so long ones grow and short ones shrink (of exponential gaps
    this makes Weibull's). Equal gaps, and none, stay as they are.
    """
    gaps = np.diff(arrival_s)
    if factor == 1 or len(gaps) < 2 or not gaps.std():
        return arrival_s
    wanted, scaled = factor * _variation(gaps), gaps / gaps.max()
    low, high = 0.0, 1.0
    while _variation(scaled**high) < wanted and high < _STEEPEST:
        low, high = high, 2 * high
    for _ in range(60):  # bisection: the variation grows with the power
        middle = (low + high) / 2
        low, high = (middle, high) if _variation(scaled**middle) < wanted else (low, middle)
    raised = scaled**high
    after = np.cumsum(raised * (gaps.sum() / raised.sum()))
    shifted: Floats = np.concatenate([arrival_s[:1], arrival_s[0] + after])
    return shifted


def _variation(gaps: Floats) -> float:
    return float(gaps.std() / gaps.mean())
