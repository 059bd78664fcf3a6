"""The ``capacity`` section: an SLO, which load is searched, how exactly, and over which space."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sarathi_sim.experiments.config.base import Count, Strict, Text

STATISTICS = {"mean": 0.5, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""What an SLO may bound, and the quantile that decides how many requests it needs."""
LATENCIES = {
    **{"ttft": "ttft_s", "tbt": "tbt_s", "itl": "tbt_s", "tbt_max": "tbt_max_s"},
    **{"tpot": "tpot_s", "latency": "latency_s", "e2e": "latency_s"},
}
"""The words of an SLO, and the metric that each one means."""
PER_REQUEST = ("ttft_s", "tbt_max_s", "tpot_s", "latency_s")
BEYOND = 10
"""Requests that must lie beyond a percentile, or it is not known: P99 takes 1,000."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LIMIT = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|ms|us)")
_GRAMMAR = (
    "expected clauses such as 'p99 ttft 1s, p99 tbt 50ms' or 'attainment 95% ttft 1s tpot 50ms': "
    f"one of {', '.join(STATISTICS)}, one of {', '.join(LATENCIES)}, and a time in s, ms or us"
)


@dataclass(frozen=True)
class Objective:
    """One clause of an SLO: ``limits`` in seconds by metric.

    ``statistic`` of the metric must not exceed its limit; or, with ``share``, at least that share
    of the requests must keep all limits.
    """

    text: str
    limits: dict[str, float]
    statistic: str = ""
    share: float = 0.0

    @property
    def fewest(self) -> int:
        """The requests that a run needs to judge it."""
        beyond = 1 - (self.share or STATISTICS[self.statistic])
        return round(BEYOND / beyond) if beyond > 1e-9 else 10_000


def parse_slo(text: str) -> tuple[Objective, ...]:
    """The clauses of an SLO, such as ``p99 ttft 1s, p99 tbt 50ms``. Raises ValueError."""
    found = tuple(_clause(" ".join(clause.lower().split())) for clause in text.split(","))
    seen = [(one.statistic, *one.limits) for one in found]
    for number, key in enumerate(seen):
        if key in seen[:number]:
            raise ValueError(f"{found[number].text!r}: is bounded twice")
    return found


def _clause(clause: str) -> Objective:
    words = _LIMIT.sub(r"\1\2", clause.replace("<=", " ").replace("<", " ")).split()
    share = 0.0
    if words[:1] == ["attainment"]:
        try:
            share = float(words[1].removesuffix("%")) / 100
        except (IndexError, ValueError):
            raise ValueError(f"{clause!r}: {_GRAMMAR}") from None
        if not 0 < share < 1:
            raise ValueError(f"{clause!r}: an attainment lies between 0 and 100 %")
        pairs, statistic = words[2:], ""
    else:
        statistic, pairs = (words[0] if words else ""), words[1:]
    known = share or (statistic in STATISTICS and len(pairs) == 2)
    if not known or not pairs or len(pairs) % 2:
        raise ValueError(f"{clause!r}: {_GRAMMAR}")
    limits: dict[str, float] = {}
    for name, limit in zip(pairs[::2], pairs[1::2], strict=True):
        match, metric = _LIMIT.fullmatch(limit), LATENCIES.get(name)
        if match is None or metric is None or (share and metric not in PER_REQUEST):
            raise ValueError(f"{clause!r}: {_GRAMMAR}")
        if not (seconds := float(match[1]) * _UNITS[match[2]]) > 0:
            raise ValueError(f"{clause!r}: a limit must be more than 0")
        limits[metric] = seconds
    return Objective(" ".join(words), limits, statistic, share)


def _is_slo(text: str) -> str:
    parse_slo(text)
    return text


SloText = Annotated[Text, AfterValidator(_is_slo)]


class Replications(Strict):
    """How many runs with seeds of their own: ``least``, and more, up to ``most``, until the
    capacity's interval is narrower than the tolerance. The share ``keep`` of all such runs keeps
    the SLO at the capacity."""

    least: Annotated[int, Field(ge=2, le=100)] = 5
    most: Annotated[int, Field(ge=2, le=100)] = 10
    keep: Annotated[float, Field(ge=0.01, le=0.99)] = 0.9


class CapacitySection(Strict):
    """What ``sarathi-sim capacity`` looks for: the highest ``load`` under which the ``slo`` holds.

    ``load``: arrivals a second (``rate``), or ``clients`` of a closed loop. ``tolerance`` is the
    width of the capacity's 95 % interval, relative to it. ``requests`` of a run (default: so many
    that one run's own capacity scatters by half the tolerance), and more where it takes more until
    an overload shows; a search that needs over ``most_requests`` (default: 100,000 a replica) is
    not settled. ``rejected`` is the share of requests that may be rejected. ``space``: keys and
    values as in a ``sweep`` section (``grid``, ``zip``, ``cases``); every scenario and every point
    is a deployment.
    """

    slo: SloText
    load: Literal["rate", "clients"] = "rate"
    tolerance: Annotated[float, Field(ge=0.002, le=0.5)] = 0.03
    replications: Replications = Replications()
    requests: Count | None = None
    most_requests: Count | None = None
    rejected: Annotated[float, Field(ge=0, lt=1)] = 0.0
    space: dict[Text, Any] = Field(default_factory=dict)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The clauses of the SLO."""
        return parse_slo(self.slo)

    @property
    def fewest(self) -> int:
        """The requests that a run needs to judge every clause."""
        return max(objective.fewest for objective in self.objectives)
