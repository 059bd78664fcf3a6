"""The metrics of a run, each declared once: name, unit, statistics, which value is better.

Summaries, printed tables, axes, Pareto fronts, sweeps' tables and docs/reference/metrics.md come of
:data:`METRICS`. A new metric is an entry here, and its computation in ``metrics.py``. A *path* is a
metric's key with a statistic, as in ``ttft_s.p99``: its place in ``summary.json``, its name in a
``compare`` section, and a column of a sweep's table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .ledger import ACCOUNTS

QUANTILES = (0.5, 0.9, 0.95, 0.99)
"""Those of every run; a file may ask for others (:func:`percentile`)."""
_QUANTILES = tuple(f"p{round(100 * quantile)}" for quantile in QUANTILES)
STATISTICS = ("mean", *_QUANTILES)
_STEADY = "steady."
_WORDS = {"p50": "median", "pb1": "PB1", "pb2": "PB2", "pb3": "PB3"}


def percentile(word: str) -> float | None:
    """The share of ``p95`` or ``p99.9``, from 1 to 99.9 percent; None for another word."""
    match = re.fullmatch(r"p(\d{1,2}(\.\d+)?)", word)
    return float(match[1]) / 100 if match and 1 <= float(match[1]) <= 99.9 else None


def asked_quantiles(paths: Iterable[str]) -> tuple[float, ...]:
    """:data:`QUANTILES`, and those of these paths."""
    named = filter(None, map(quantity, paths))
    asked = (percentile(one.statistic) for one in named)
    return tuple(sorted({*QUANTILES, *(share for share in asked if share is not None)}))


class Better(StrEnum):
    """Which of two values is better."""

    LESS = "less"
    MORE = "more"
    NEITHER = "neither"


@dataclass(frozen=True)
class Metric:
    """One metric. ``key`` is its place in ``summary.json``, ``unit`` what it is printed in.

    A distribution has ``statistics`` (``ttft_s.p99``), a number has none. ``scale`` is the printed
    value of a stored 1: 100 for a share, printed in percent. ``grows``: in an overloaded run it
    depends on the length of the run. ``in_summary`` is false for a metric of the requests' table
    only, ``paged`` is true for one of runs with paged memory only, ``pools`` for one of runs with
    two pools only.
    """

    key: str
    name: str
    unit: str
    better: Better
    statistics: tuple[str, ...] = ()
    scale: float = 1.0
    whole: bool = False
    grows: bool = False
    in_summary: bool = True
    paged: bool = False
    pools: bool = False

    def has(self, statistic: str) -> bool:
        """Whether it has a statistic: one of its own, or any percentile of a distribution."""
        quantiles = "p50" in self.statistics and percentile(statistic) is not None
        return quantiles or statistic in self.statistics


def _latency(key: str, name: str) -> Metric:
    return Metric(key, name, "s", Better.LESS, STATISTICS, grows=True)


def _count(key: str, name: str, better: Better = Better.NEITHER, paged: bool = False) -> Metric:
    return Metric(key, name, "", better, whole=True, paged=paged)


def _share(key: str, name: str, better: Better, paged: bool = False) -> Metric:
    return Metric(key, name, "%", better, scale=100.0, paged=paged)


_ALL = (
    _count("requests", "requests"),
    _count("finished", "finished requests", Better.MORE),
    _count("rejected", "rejected requests", Better.LESS),
    Metric("makespan_s", "makespan", "s", Better.LESS),
    Metric("requests_per_s", "request throughput", "requests/s", Better.MORE),
    Metric("tokens_per_s", "token throughput", "tokens/s", Better.MORE),
    Metric("output_tokens_per_s", "output token throughput", "tokens/s", Better.MORE),
    _share("mfu", "model FLOPs utilisation", Better.MORE),
    _count("gpus", "GPUs", Better.LESS),
    _count("iterations", "iterations"),
    _count("stage_executions", "stage executions"),
    Metric("mean_batch", "mean batch", "sequences", Better.NEITHER),
    _share("kv_peak_share", "peak KV occupancy", Better.NEITHER),
    _count("preemptions", "preemptions", Better.LESS, paged=True),
    Metric("preemption_rate", "preemptions per request", "", Better.LESS, paged=True),
    _share("hit_rate", "prompt tokens found in the prefix cache", Better.MORE, paged=True),
    _share("recomputed_share", "recomputed tokens, of all computed", Better.LESS, paged=True),
    _count("extra_decodes", "decodes after a request's end", Better.LESS, paged=True),
    _count("empty_iterations", "empty iterations", paged=True),
    _count("drafted_tokens", "draft tokens", paged=True),
    _count("refused_tokens", "rejected draft tokens", Better.LESS, paged=True),
    Metric("accepted_per_step", "acceptance length", "tokens", Better.MORE, paged=True),
    Metric("tbt_s", "time between tokens", "s", Better.LESS, _QUANTILES),
    _latency("queueing_s", "queueing delay"),
    _latency("ttft_s", "time to first token"),
    _latency("tpot_s", "time per output token"),
    _latency("latency_s", "latency"),
    Metric("prefill_s", "time in prefill", "s", Better.LESS, STATISTICS, pools=True),
    Metric("slot_s", "wait for a decode slot", "s", Better.LESS, STATISTICS, pools=True),
    Metric("transfer_s", "transfer of the KV cache", "s", Better.LESS, STATISTICS, pools=True),
    Metric("bubble_s", "bubble time per request", "s", Better.LESS, STATISTICS),
    _share("bubble_share", "bubbles, share of the stages' time", Better.LESS),
    Metric("ledger_s", "stages' time", "s", Better.NEITHER, ("wall", *ACCOUNTS)),
    _count("steady.kendall_s", "trend of the waiting requests (Kendall's S)"),
    _count("steady.warmup_requests", "warm-up requests"),
    Metric("tbt_max_s", "longest time between tokens", "s", Better.LESS, in_summary=False),
)

METRICS = {metric.key: metric for metric in _ALL}
"""By key."""

STEADY = tuple(key for key, metric in METRICS.items() if metric.grows)
"""Metrics whose quantiles have a meaning in a steady run only."""


@dataclass(frozen=True)
class Quantity:
    """One number of a run: a metric and, for a distribution, one of its statistics."""

    metric: Metric
    statistic: str = ""
    of_steady_part: bool = False

    @property
    def path(self) -> str:
        """The place in the summary, as in ``ttft_s.p99``."""
        path = ".".join(filter(None, (self.metric.key, self.statistic)))
        return _STEADY + path if self.of_steady_part else path

    @property
    def label(self) -> str:
        """The heading of a table's row: ``time to first token, p99``."""
        statistic = _WORDS.get(self.statistic, self.statistic.replace("_", " "))
        part = "steady part" if self.of_steady_part else ""
        return ", ".join(filter(None, (self.metric.name, statistic, part)))

    @property
    def axis(self) -> str:
        """The label of an axis: ``time to first token, p99 (s)``."""
        return with_unit(self.label, self.metric.unit)

    @property
    def spoken(self) -> str:
        """Within a sentence: ``p99 time to first token``."""
        return " ".join(filter(None, (self.statistic, self.metric.name)))

    def text(self, value: float) -> str:
        """The stored value as it is printed, without its unit."""
        return number_text(value if self.metric.whole else self.metric.scale * value)

    def texts(self, values: Sequence[float | None]) -> list[str]:
        """Stored values as a table has them: :func:`number_texts`, without their unit."""
        scale = 1 if self.metric.whole else self.metric.scale
        return number_texts([None if value is None else scale * value for value in values])


def quantity(path: str) -> Quantity | None:
    """The metric of a path such as ``ttft_s.p99`` or ``steady.ttft_s.p99``; None if there is none.
    A distribution's key alone names it as a whole."""
    if path in METRICS:
        return Quantity(METRICS[path])
    steady = path.startswith(_STEADY)
    key, _, statistic = path.removeprefix(_STEADY if steady else "").partition(".")
    metric = METRICS.get(key)
    if metric is None or not metric.has(statistic) or (steady and not metric.grows):
        return None
    return Quantity(metric, statistic, steady)


def known(path: str) -> Quantity:
    """:func:`quantity` of a path that the program itself names. Raises KeyError for no metric."""
    found = quantity(path)
    if found is None:
        raise KeyError(path)
    return found


def with_unit(name: str, unit: str) -> str:
    """``latency (s)``; the name alone without a unit."""
    return f"{name} ({unit})" if unit else name


def number_text(value: float) -> str:
    """A number for readers: whole from 1,000 on, with three digits below 1."""
    if isinstance(value, int) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:.{1 if abs(value) >= 99.5 else 2}f}"


def number_texts(values: Sequence[float | None]) -> list[str]:
    """Numbers of one metric, each with as many decimals: those that :func:`number_text` has for the
    smallest, but at most five digits of the largest. ``-`` for None and NaN."""
    sizes = [abs(v) for v in values if v and math.isfinite(v) and not isinstance(v, int)]
    decimals = 0
    if sizes:
        small, large = (math.floor(math.log10(size)) for size in (min(sizes), max(sizes)))
        usual = 0 if min(sizes) >= 999.5 else 1 if min(sizes) >= 99.5 else 2 - min(small, 0)
        decimals = max(0, min(usual, 4 - large))
    return [
        "-" if value is None or math.isnan(value) else f"{value:,.{decimals}f}" for value in values
    ]
