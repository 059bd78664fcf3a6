"""Whether probes keep an SLO, and by how much: one of them, or several pooled as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.experiments.capacity.capacity_section import Objective
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.views.metrics import weighted_quantiles

OVERLOAD = "overload"
"""What binds where the queue grows without bound although every clause still holds."""
REJECTED = "rejected requests"
"""What binds where more requests are rejected than may be."""
TREND = 27
"""Kendall's S of ten blocks from which on latencies are said to rise (one-sided 1 %)."""
UNSERVED = 0.01
"""The share of arrivals that is left over, at least, in an overload."""


@dataclass(frozen=True)
class Verdict:
    """Probes against an SLO.

    ``values`` has, by the text of each clause, its value (seconds; of an attainment the share) and
    ``stresses`` what part of the limit that is: more than 1 breaks it (of an attainment: the share
    that missed over the share that may). ``rejected`` is the share of requests that were rejected,
    and ``rejects`` whether it is more than may be.
    """

    values: dict[str, float]
    stresses: dict[str, float]
    overloaded: bool
    rejected: float = 0.0
    rejects: bool = False

    @property
    def stress(self) -> float:
        """The largest part of any limit."""
        return max(self.stresses.values())

    @property
    def holds(self) -> bool:
        """Whether the SLO is kept."""
        return self.stress <= 1 and not self.overloaded and not self.rejects

    @property
    def worst(self) -> str:
        """What breaks: the rejections, the clause with the largest stress, or the overload of a run
        that keeps all clauses."""
        if self.rejects:
            return REJECTED
        if self.overloaded and self.stress <= 1:
            return OVERLOAD
        return max(self.stresses, key=lambda text: self.stresses[text])


@dataclass(frozen=True)
class RunTables:
    """The tables of a finished run, read when they are asked for."""

    folder: Path

    def requests(self) -> pd.DataFrame:
        """A row a request."""
        return pd.read_parquet(self.folder / "requests.parquet")

    def gaps(self) -> pd.DataFrame:
        """Times between tokens after the warm-up, ``tbt_s``, and how many ``tokens`` have each."""
        return pd.read_parquet(self.folder / GAPS)


GAPS = "token_gaps.parquet"
"""The file of :meth:`sarathi_sim.simulator.views.metrics.Analysis.gaps_after_warmup`."""


def judge(
    objectives: Sequence[Objective],
    runs: Sequence[tuple[Mapping[str, Any], RunTables | None]],
    open_loop: bool,
    may_reject: float = 0.0,
) -> Verdict:
    """Judge runs, pooled as one: their summaries and tables.

    A run's warm-up is left out. Of several runs, and for an attainment, the tables are read. Only
    where requests arrive by themselves can a run be overloaded; of several, when half of them are.
    A metric that no request has (the time per output token of single tokens) keeps its limit.
    """
    values, stresses = {}, {}
    for one in objectives:
        if one.share:
            kept = float(np.mean(np.concatenate([_attained(one, *run) for run in runs])))
            values[one.text] = kept
            stresses[one.text] = (1 - kept) / (1 - one.share)
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
    """Whether more requests arrive than are served: fewer leave than come, and queueing delays rise
    over the run (:mod:`sarathi_sim.simulator.views.steady`), or as long as a batch fills up,
    latencies.

    Both happen by chance, too, where a queue comes and goes. So more requests must be left over
    than are under way in the mean (by Little's law, their latency's share of the arrivals' time).
    """
    after = summary["after_warmup"]
    usual = float(after["latency_s"]["mean"] or 0.0) / max(float(after["arrivals_s"]), 1e-9)
    fewer = after["served_per_s"] < (1 - max(UNSERVED, usual)) * after["offered_per_s"]
    rising = summary["steady"]["state"] == "overloaded" or after["latency_trend"] >= TREND
    return bool(fewer and rising)


def attainment(objective: Objective, requests: pd.DataFrame, warmup: int) -> float:
    """The share of the served requests after the warm-up that kept every limit."""
    kept = _kept(objective, _after(requests, warmup))
    return float(kept.mean()) if len(kept) else float("nan")


def _attained(objective: Objective, summary: Mapping[str, Any], tables: RunTables | None) -> Any:
    assert tables is not None
    return _kept(objective, _after(tables.requests(), summary["after_warmup"]["warmup_requests"]))


def _kept(objective: Objective, served: pd.DataFrame) -> Any:
    kept = np.ones(len(served), bool)
    for metric, limit in objective.limits.items():
        kept &= ~(served[metric].to_numpy(np.float64) > limit)  # NaN: has no such time
    return kept


def _after(requests: pd.DataFrame, warmup: int) -> pd.DataFrame:
    return requests.dropna(subset="latency_s").sort_values("arrival_s", kind="stable")[warmup:]


def _statistic(
    metric: str, statistic: str, runs: Sequence[tuple[Mapping[str, Any], RunTables | None]]
) -> float | None:
    """A statistic over all runs; None where no request has the metric."""
    if len(runs) == 1:
        found = runs[0][0]["after_warmup"][metric][statistic]
        return None if found is None or np.isnan(found) else float(found)
    if metric == "tbt_s":
        gaps = pd.concat([tables.gaps() for _, tables in runs if tables is not None])
        values, weights = gaps["tbt_s"].to_numpy(), gaps["tokens"].to_numpy()
    else:
        columns = [_column(metric, *run) for run in runs]
        values = np.concatenate(columns)
        weights = np.ones(len(values))
    if not len(values):
        return None
    if statistic == "mean":
        return float(np.average(values, weights=weights))
    if metric != "tbt_s":
        return float(np.percentile(values, float(statistic[1:])))
    return weighted_quantiles(values, weights, [float(statistic[1:]) / 100])[0]


def _column(metric: str, summary: Mapping[str, Any], tables: RunTables | None) -> Floats:
    assert tables is not None
    served = _after(tables.requests(), summary["after_warmup"]["warmup_requests"])
    values = served[metric].to_numpy(np.float64)
    return np.asarray(values[~np.isnan(values)], np.float64)
