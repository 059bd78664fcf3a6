"""A workload in one word: the length of requests, and its division into prompt and output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.config.errors import ConfigError
from simulator.loop.records import Ints


@dataclass(frozen=True)
class Demand:
    """Requests of ``length`` tokens each, with P:D from ``low`` to ``high``.

    P:D is spread evenly over its logarithm.
    """

    length: int
    low: float
    high: float

    def ratios(self, count: int) -> list[float]:
        """P:D at the middles of ``count`` equally likely parts."""
        share = (np.arange(count) + 0.5) / count
        return [float(r) for r in self.low * (self.high / self.low) ** share]

    def requests(self, count: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of a sample, shuffled but always the same."""
        ratios = np.random.default_rng(0).permutation(self.ratios(count))
        output = np.clip(np.ceil(self.length / (1 + ratios)), 1, self.length - 1)
        return self.length - output.astype(np.int64), output.astype(np.int64)


def parse_demand(text: str) -> Demand:
    """``LENGTH:PD``, ``LENGTH:LOW..HIGH`` or ``LENGTH:?``, such as ``1K:14``.

    Raises ConfigError saying what was wrong and what is allowed.
    """
    length, colon, ratio = text.replace(" ", "").partition(":")
    thousand = length[-1:] in ("K", "k")
    try:
        tokens = float(length[:-1]) * 1024 if thousand else float(length)
        low, dots, high = ("1", "..", "200") if ratio == "?" else ratio.partition("..")
        least, most = float(low), float(high if dots else low)
        good = colon and tokens.is_integer() and 2 <= tokens <= 8192 and 0 < least <= most < 1e6
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"--workload {text}: expected LENGTH:PD, where LENGTH is prompt + output tokens (2 to "
            "8192, or as in 1K) and PD is their ratio: a number, a range as in 5..50, or ? for "
            "unknown (1..200)"
        )
    return Demand(int(tokens), least, most)
