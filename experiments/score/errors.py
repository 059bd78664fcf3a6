"""How far predictions are off what was measured: by group, and beside another predictor's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sarathi_sim.experiments.score.measured import SCORED, Measured
from sarathi_sim.experiments.score.mixtures import measured_cold


@dataclass(frozen=True)
class ServerTimes:
    """Predicted means of TTFT and TPOT in milliseconds, output tokens per second, and ``bands`` of
    90 % by metric: (low, high), in the metric's unit. ``kv_full`` says whether the KV cache was
    full at a time."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float | None = None
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kv_full: bool = False

    def of(self, row: Measured, metric: str) -> float | None:
        """One of :data:`SCORED` for that row; None where it is not predicted."""
        if metric == "latency":
            return row.latency_of(self.ttft_ms, self.tpot_ms)
        found: float | None = getattr(self, SCORED[metric])
        return found


@dataclass(frozen=True)
class Errors:
    """Of one metric over a group of rows, in percent of what was measured.

    ``mape``, ``median`` and ``p90`` are of absolute errors; ``bias`` is the mean signed one, so
    positive where predictions are too slow. ``coverage`` is the share of measured values inside the
    predicted bands, in percent; None where no prediction has one.
    """

    mape: float
    median: float
    p90: float
    bias: float
    coverage: float | None


#: What rows are grouped by: the group's first word, and how a row says which one it is in.
GROUPS: Mapping[str, Callable[[Measured], str]] = {
    "engine": lambda row: row.backend,
    "gpu": lambda row: row.system,
    "precision": lambda row: row.precision,
    "class": lambda row: "dense" if row.dense else "mixture of experts",
    "mode": lambda row: row.mode,
    "model": lambda row: row.model,
    "concurrency": lambda row: row.concurrency_class,
}

MEMORY = "memory"
COLD = "measured cold"


def grouped(rows: Iterable[Measured], full: Collection[str] = ()) -> dict[str, list[Measured]]:
    """Rows by group. ``all`` holds those without flags, and so do the groups of :data:`GROUPS`;
    those with flags are in ``flagged``, and nowhere else. ``full`` are the ids of those whose KV
    cache was full: where requests wait for memory, TTFT is a matter of its size. Those that were
    ``measured cold`` are such a group, too."""
    found: dict[str, list[Measured]] = {"all": []}
    for row in rows:
        names = ["all", *(f"{word} {of(row)}" for word, of in GROUPS.items())]
        if full:
            names.append(f"{MEMORY} {'full' if row.id in full else 'not full'}")
        if measured_cold(row):
            names.append(COLD)
        for name in ["flagged"] if row.flags else names:
            found.setdefault(name, []).append(row)
    order = ["all", *GROUPS, MEMORY, COLD, "flagged"]

    def place(name: str) -> tuple[int, int, str]:
        word, _, which = (name, "", "") if name in order else name.partition(" ")
        number = int(which.removeprefix("<= ")) if word == "concurrency" else 0
        return order.index(word), number, which

    return {name: found[name] for name in sorted(found, key=place)}


def errors(
    rows: Iterable[Measured], predictions: Mapping[str, ServerTimes], metric: str
) -> Errors | None:
    """Of the rows where one of :data:`SCORED` was measured and predicted; None where there is no
    such row."""
    pairs = [
        (value, given, times.bands.get(metric))
        for row, times in ((row, predictions[row.id]) for row in rows if row.id in predictions)
        if (value := row.of(metric)) is not None and (given := times.of(row, metric)) is not None
    ]
    if not pairs:
        return None
    off = np.array([100 * (predicted / measured - 1) for measured, predicted, _ in pairs])
    inside = [band[0] <= measured <= band[1] for measured, _, band in pairs if band is not None]
    return Errors(
        mape=float(np.abs(off).mean()),
        median=float(np.median(np.abs(off))),
        p90=float(np.quantile(np.abs(off), 0.9)),
        bias=float(off.mean()),
        coverage=100 * float(np.mean(inside)) if inside else None,
    )
