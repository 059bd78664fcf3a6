"""The ``capacity`` section (SLO, kind of load, precision, space of deployments), and the verdict
whether one probe, or several pooled as one, keep the SLO."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import AfterValidator, Field

from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metric_registry import STATISTICS, percentile
from sarathi_sim.simulator.views.metrics import weighted_quantiles
from ..config.base import Count, Strict, Text
from ..results import REQUESTS, TOKEN_GAPS

LATENCIES = {
    **{"ttft": "ttft_s", "tbt": "tbt_s", "itl": "tbt_s", "tbt_max": "tbt_max_s"},
    **{"tpot": "tpot_s", "latency": "latency_s", "e2e": "latency_s"},
}
"""The words of an SLO, and the metric that each one means."""
UNITS = {"rate": "requests/s", "clients": "clients"}
"""The unit of each kind of load."""
PER_REQUEST = ("ttft_s", "tbt_max_s", "tpot_s", "latency_s")
BEYOND = 10
"""Requests that must lie beyond a percentile, or it is not known: P99 takes 1,000."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LIMIT = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|ms|us)")
_GRAMMAR = (
    "expected clauses such as 'p99 ttft 1s, p99 tbt 50ms' or 'attainment 95% ttft 1s tpot 50ms': "
    f"mean or p1 to p99.9, one of {', '.join(LATENCIES)}, and a time in s, ms or us"
)


@dataclass(frozen=True)
class Objective:
    """One clause of an SLO: ``limits`` in seconds by metric. ``statistic`` of the metric must not
    exceed its limit; or at least a ``share`` of the requests must keep all limits."""

    text: str
    limits: dict[str, float]
    statistic: str = ""
    share: float = 0.0

    @property
    def kept_share(self) -> float:
        """The share of the requests that keeps it where it just holds; of a mean, half."""
        return self.share or percentile(self.statistic) or 0.5

    @property
    def fewest(self) -> int:
        """The requests that a run needs to judge it."""
        beyond = 1 - self.kept_share
        return round(BEYOND / beyond) if beyond > 1e-9 else 10_000


def parse_slo(text: str) -> tuple[Objective, ...]:
    """The clauses of an SLO, such as ``p99 ttft 1s, p99 tbt 50ms``. Raises ValueError."""
    found = tuple(_clause(" ".join(clause.lower().split())) for clause in text.split(","))
    seen = [(one.statistic, *one.limits) for one in found]
    for number, key in enumerate(seen):
        if key in seen[:number]:
            raise ValueError(f"{found[number].text!r}: is limited twice")
    return found


def limit_of(text: str, statistic: str, metric: str) -> float:
    """The limit in seconds of an SLO of one clause. Raises UserError for any other SLO."""
    try:
        (clause,) = parse_slo(text)
        if clause.statistic == statistic:
            return clause.limits[metric]
    except (KeyError, ValueError):
        pass
    word = next(word for word, key in LATENCIES.items() if key == metric)
    raise UserError(f"--slo {text}: must be one clause, as '{statistic} {word} 100ms'")


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
        if words[:1] and words[0] in LATENCIES:  # ttft p95 1s
            words[:2] = reversed(words[:2])
        statistic, pairs = (words[0] if words else ""), words[1:]
    known = share or ((statistic == "mean" or percentile(statistic)) and len(pairs) == 2)
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
    """Runs with seeds of their own: ``least``, and more, up to ``most``, until the capacity's
    interval is within the tolerance. The share ``keep`` of them keeps the SLO at the capacity."""

    least: Annotated[int, Field(ge=2, le=100)] = 5
    most: Annotated[int, Field(ge=2, le=100)] = 10
    keep: Annotated[float, Field(ge=0.01, le=0.99)] = 0.9


class CapacitySection(Strict):
    """What ``sarathi-sim capacity`` looks for: the highest ``load`` under which the ``slo`` holds.

    ``load``: arrivals a second (``rate``), or ``clients`` of a closed loop. ``tolerance``: the
    width of the capacity's 95 % interval, relative to it. ``requests`` of a run (default: so many
    that its own capacity scatters by half the tolerance), and more until an overload shows; a
    search that needs over ``most_requests`` (default: 100,000 a replica) is not settled.
    ``rejected``: the share of requests that may be. ``space``: keys and values as in a ``sweep``
    section (``grid``, ``zip``, ``cases``); every scenario and point is a deployment."""

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
        return parse_slo(self.slo)

    @property
    def fewest(self) -> int:
        """The requests that a run needs to judge every clause."""
        return max(objective.fewest for objective in self.objectives)


OVERLOAD = "overload"
"""The bound if the queue grows without end although every clause still holds."""
REJECTED = "rejected requests"
"""The bound if more requests are rejected than the section allows."""
TREND = 27
"""Kendall's S of ten blocks from which on latencies are said to rise (one-sided 1 %)."""
UNSERVED = 0.01
"""The least share of arrivals that an overload leaves unserved."""


@dataclass(frozen=True)
class Verdict:
    """Probes against an SLO. By the text of each clause, ``values`` has its value (seconds; for an
    attainment the share) and ``stresses`` the value over the limit: more than 1 breaks the clause
    (for an attainment: the share of misses over the allowed share). ``rejected``: the share of
    rejected requests; ``rejects``: whether it is more than allowed."""

    values: dict[str, float]
    stresses: dict[str, float]
    overloaded: bool
    rejected: float = 0.0
    rejects: bool = False

    @property
    def stress(self) -> float:
        """The largest stress of any clause."""
        return max(self.stresses.values())

    @property
    def holds(self) -> bool:
        """Whether the SLO is kept."""
        return self.stress <= 1 and not self.overloaded and not self.rejects

    @property
    def worst(self) -> str:
        """The bound that breaks: the rejections, the clause with the largest stress, or the
        overload of a run that keeps all clauses."""
        if self.rejects:
            return REJECTED
        if self.overloaded and self.stress <= 1:
            return OVERLOAD
        return max(self.stresses, key=lambda text: self.stresses[text])


@dataclass(frozen=True)
class RunTables:
    """The tables of a finished run, read at their first use."""

    folder: Path

    def requests(self) -> pd.DataFrame:
        """A row a request."""
        return pd.read_parquet(self.folder / REQUESTS)

    def gaps(self) -> pd.DataFrame:
        """Times between tokens after the warm-up, ``tbt_s``, and the ``tokens`` that have each."""
        return pd.read_parquet(self.folder / TOKEN_GAPS)


def tables_read(objectives: Sequence[Objective], pooled: bool) -> tuple[str, ...]:
    """The files of a run that :func:`judge` reads, of several runs ``pooled``, or of one."""
    read = set()
    for one in objectives:
        if one.share:
            read.add(REQUESTS)
        elif pooled or one.statistic not in STATISTICS:
            read.add(TOKEN_GAPS if "tbt_s" in one.limits else REQUESTS)
    return tuple(sorted(read))


def judge(
    objectives: Sequence[Objective],
    runs: Sequence[tuple[Mapping[str, Any], RunTables | None]],
    open_loop: bool,
    may_reject: float = 0.0,
) -> Verdict:
    """Judge runs, pooled as one, without their warm-up. For several runs, an attainment and
    percentiles that no summary has, the tables are read. Only an open loop can be overloaded;
    several runs are if over half of them are. A metric that no request has keeps its limit."""
    values, stresses = {}, {}
    for one in objectives:
        if one.share:
            kept = _share(np.concatenate([_kept(one, _served(*run)) for run in runs]))
            values[one.text] = kept
            stresses[one.text] = 0.0 if np.isnan(kept) else (1 - kept) / (1 - one.share)
        else:
            ((metric, limit),) = one.limits.items()
            value = _statistic(metric, one.statistic, runs)
            values[one.text] = float("nan") if value is None else value
            stresses[one.text] = 0.0 if value is None else value / limit
    growing = [open_loop and overloaded(summary) for summary, _ in runs]
    rejected = float(np.mean([summary["rejected"] / summary["requests"] for summary, _ in runs]))
    most = 2 * sum(growing) > len(runs)
    return Verdict(values, stresses, most, rejected, rejected > may_reject + 1e-9)


def overloaded(summary: Mapping[str, Any]) -> bool:
    """Whether arrivals exceed the service: waiting requests (or latencies, while a batch fills up)
    rise over the run (:mod:`sarathi_sim.simulator.views.metrics`), and fewer requests finish than
    arrive: by more than the mean number in flight (by Little's law, the latency's share of the
    arrivals' time), as a queue may grow for a while by chance."""
    after = summary["after_warmup"]
    usual = float(after["latency_s"]["mean"] or 0.0) / max(float(after["arrivals_s"]), 1e-9)
    fewer = after["served_per_s"] < (1 - max(UNSERVED, usual)) * after["offered_per_s"]
    rising = summary["steady"]["state"] == "overloaded" or after["latency_trend"] >= TREND
    return bool(fewer and rising)


def _share(kept: Floats) -> float:
    judged = kept[~np.isnan(kept)]
    return float(judged.mean()) if len(judged) else float("nan")


def _kept(objective: Objective, served: pd.DataFrame) -> Floats:
    """1 where a request kept all limits, 0 where it broke one, else NaN: it has no such time."""
    values = {key: served[key].to_numpy(np.float64) for key in objective.limits}
    broken = np.any([values[key] > limit for key, limit in objective.limits.items()], axis=0)
    return np.where(
        broken,
        0.0,
        np.where(np.isnan(sum(values.values())), np.nan, 1.0),
    )


def _after(requests: pd.DataFrame, warmup: int) -> pd.DataFrame:
    return requests.dropna(subset="latency_s").sort_values("arrival_s", kind="stable")[warmup:]


def _statistic(
    metric: str, statistic: str, runs: Sequence[tuple[Mapping[str, Any], RunTables | None]]
) -> float | None:
    """A statistic over all runs; None where no request has the metric."""
    if len(runs) == 1 and statistic in runs[0][0]["after_warmup"][metric]:
        found = runs[0][0]["after_warmup"][metric][statistic]
        return None if found is None or np.isnan(found) else float(found)
    if metric == "tbt_s":
        gaps = pd.concat([tables.gaps() for _, tables in runs if tables is not None])
        values, weights = gaps["tbt_s"].to_numpy(), gaps["tokens"].to_numpy()
    else:
        values = np.concatenate([_served(*run)[metric].dropna().to_numpy(float) for run in runs])
        weights = np.ones(len(values))
    if not len(values):
        return None
    if statistic == "mean":
        return float(np.average(values, weights=weights))
    if metric != "tbt_s":
        return float(np.percentile(values, float(statistic[1:])))
    return weighted_quantiles(values, weights, [float(statistic[1:]) / 100])[0]


def _served(summary: Mapping[str, Any], tables: RunTables | None) -> pd.DataFrame:
    """A run's served requests after its warm-up."""
    assert tables is not None
    return _after(tables.requests(), summary["after_warmup"]["warmup_requests"])
