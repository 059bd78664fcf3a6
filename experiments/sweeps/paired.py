"""Differences between two ways of serving the same requests, with confidence intervals.

All runs of one seed serve the same requests, whatever the policy (common random numbers). For two
policies the logarithm of a metric's ratio is taken seed by seed, where common effects cancel. Its
mean over the seeds gets a Student-t interval.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.simulator.views.metric_registry import STEADY

METRICS = (
    "makespan_s",
    "output_tokens_per_s",
    "ttft_s.p50",
    "ttft_s.p99",
    "tbt_s.p50",
    "tbt_s.p99",
    "latency_s.p50",
    "bubble_s.p50",
)
CONFIDENCE = 0.95


def paired_differences(
    table: pd.DataFrame, contrast: str | None, axes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The ratio of each metric between every value of ``contrast`` and its first one.

    One entry per point of the other axes but the seed: ``point``, ``value``, ``against``, ``seeds``
    and ``ratios``: metric -> ``ratio`` (geometric mean over the seeds), ``low`` and ``high`` (95 %
    interval, None with a single seed) and ``unpaired`` (how many times as wide the interval would
    be if the seeds were not paired). A metric that is 0 or missing somewhere is left out, as are
    latencies where a run is overloaded.
    """
    if contrast is None or table.empty:
        return []
    # As text, because a value may be missing (null), and a missing one does not equal itself.
    level_of = table[contrast].map(str)
    levels = list(dict.fromkeys(level_of))
    others = [axis for axis in axes if axis not in (contrast, "seed")]
    found = []
    groups = table.assign(_point=table[others].map(str).agg("|".join, axis=1) if others else "")
    for _, group in groups.groupby("_point", sort=False):
        base = _by_seed(group[level_of[group.index] == levels[0]])
        for level in levels[1:]:
            other = _by_seed(group[level_of[group.index] == level])
            seeds = [seed for seed in base.index if seed in other.index]
            if not seeds:
                continue
            runs = pd.concat([base.loc[seeds], other.loc[seeds]])
            growing = "steady.state" in runs and (runs["steady.state"] == "overloaded").any()
            ratios = {
                metric: entry
                for metric in METRICS
                if not (growing and metric.startswith(STEADY))
                and (entry := _ratio(base.loc[seeds, metric], other.loc[seeds, metric])) is not None
            }
            point = {axis: _plain(other[axis].iloc[0]) for axis in others}
            found.append(
                {
                    "point": point,
                    "value": _plain(other[contrast].iloc[0]),
                    "against": _plain(base[contrast].iloc[0]),
                    "seeds": len(seeds),
                    "ratios": ratios,
                }
            )
    return found


def _by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.set_index(pd.Index(rows["seed"] if "seed" in rows else [0] * len(rows)))


def _plain(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _ratio(base: pd.Series[float], other: pd.Series[float]) -> dict[str, Any] | None:
    below, above = base.to_numpy(np.float64), other.to_numpy(np.float64)
    if not ((below > 0).all() and (above > 0).all()):  # NaN is not above 0 either
        return None
    logs = np.log(above) - np.log(below)
    mean, count = float(logs.mean()), len(logs)
    entry: dict[str, Any] = {"ratio": math.exp(mean), "low": None, "high": None, "unpaired": None}
    if count > 1:
        half = _half_width(float(logs.std(ddof=1)), count, count - 1)
        entry |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
        # Two samples have more degrees of freedom than their differences, which narrows it.
        apart = math.hypot(float(np.log(below).std(ddof=1)), float(np.log(above).std(ddof=1)))
        entry["unpaired"] = _half_width(apart, count, 2 * (count - 1)) / half if half else None
    return entry


def _half_width(spread: float, count: int, freedom: int) -> float:
    """The half-width of a Student-t interval."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * spread / math.sqrt(count)
