"""Whether a probe keeps an SLO, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.capacity.capacity_section import Objective

OVERLOAD = "overload"
"""What binds where the queue grows without bound although every clause still holds."""


@dataclass(frozen=True)
class Verdict:
    """A probe against an SLO.

    ``values`` has, by the text of each clause, its value (seconds; of an attainment the share) and
    ``stresses`` what part of the limit that is: more than 1 breaks it (of an attainment: the share
    that missed over the share that may).
    """

    values: dict[str, float]
    stresses: dict[str, float]
    overloaded: bool

    @property
    def stress(self) -> float:
        """The largest part of any limit."""
        return max(self.stresses.values())

    @property
    def holds(self) -> bool:
        """Whether the SLO is kept."""
        return self.stress <= 1 and not self.overloaded

    @property
    def worst(self) -> str:
        """The clause with the largest stress; of an overloaded run that keeps all: overload."""
        if self.overloaded and self.stress <= 1:
            return OVERLOAD
        return max(self.stresses, key=lambda text: self.stresses[text])


def judge(
    objectives: Sequence[Objective],
    summary: Mapping[str, Any],
    requests: pd.DataFrame | None,
    open_loop: bool,
) -> Verdict:
    """Judge a run's summary; ``requests`` is its table, which an attainment needs.

    The warm-up is left out. Only where requests arrive by themselves can a run be overloaded. A
    metric that no request has (the time per output token of single tokens) keeps its limit.
    """
    after = summary["after_warmup"]
    values, stresses = {}, {}
    for one in objectives:
        if one.share:
            assert requests is not None
            kept = attainment(one, requests, after["warmup_requests"])
            values[one.text] = kept
            stresses[one.text] = (1 - kept) / (1 - one.share)
        else:
            ((metric, limit),) = one.limits.items()
            value = after[metric][one.statistic]
            values[one.text] = float("nan") if value is None else value
            stresses[one.text] = 0.0 if value is None else value / limit
    overloaded = open_loop and summary["steady"]["state"] == "overloaded"
    return Verdict(values, stresses, overloaded)


def attainment(objective: Objective, requests: pd.DataFrame, warmup: int) -> float:
    """The share of the served requests after the warm-up that kept every limit."""
    served = requests.dropna(subset="latency_s").sort_values("arrival_s", kind="stable")[warmup:]
    kept = np.ones(len(served), bool)
    for metric, limit in objective.limits.items():
        kept &= ~(served[metric].to_numpy(np.float64) > limit)  # NaN: has no such time
    return float(kept.mean()) if len(served) else float("nan")
