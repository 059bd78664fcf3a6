"""How far predictions are off what was measured: by group, and beside another predictor's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.score.measured import Measured

METRICS = ("ttft", "tpot")


@dataclass(frozen=True)
class ServerTimes:
    """Predicted means in milliseconds, and 90 % bands where there are any: (low, high). ``kv_full``
    says whether the KV cache was full at a time."""

    ttft_ms: float
    tpot_ms: float
    ttft_band_ms: tuple[float, float] | None = None
    tpot_band_ms: tuple[float, float] | None = None
    kv_full: bool = False


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


def grouped(rows: Iterable[Measured], full: Collection[str] = ()) -> dict[str, list[Measured]]:
    """Rows by group. ``all`` holds those without flags, and so do the groups of :data:`GROUPS`;
    those with flags are in ``flagged``, and nowhere else. ``full`` are the ids of those whose KV
    cache was full: where requests wait for memory, TTFT is a matter of its size."""
    found: dict[str, list[Measured]] = {"all": []}
    for row in rows:
        names = ["all", *(f"{word} {of(row)}" for word, of in GROUPS.items())]
        if full:
            names.append(f"{MEMORY} {'full' if row.id in full else 'not full'}")
        for name in ["flagged"] if row.flags else names:
            found.setdefault(name, []).append(row)
    order = ["all", *GROUPS, MEMORY, "flagged"]

    def place(name: str) -> tuple[int, int, str]:
        word, _, which = name.partition(" ")
        number = which.removeprefix("<= ")
        return order.index(word), int(number) if number.isdecimal() else 0, which

    return {name: found[name] for name in sorted(found, key=place)}


def errors(
    rows: Iterable[Measured], predictions: Mapping[str, ServerTimes], metric: str
) -> Errors | None:
    """Of the rows that have a prediction; None where none has.

    ``metric`` is one of :data:`METRICS`.
    """
    pairs = [(row, predictions[row.id]) for row in rows if row.id in predictions]
    if not pairs:
        return None
    measured = np.array([getattr(row, f"{metric}_ms") for row, _ in pairs])
    predicted = np.array([getattr(found, f"{metric}_ms") for _, found in pairs])
    off = 100 * (predicted / measured - 1)
    bands = [getattr(found, f"{metric}_band_ms") for _, found in pairs]
    inside = [
        band[0] <= value <= band[1]
        for band, value in zip(bands, measured, strict=True)
        if band is not None
    ]
    return Errors(
        mape=float(np.abs(off).mean()),
        median=float(np.median(np.abs(off))),
        p90=float(np.quantile(np.abs(off), 0.9)),
        bias=float(off.mean()),
        coverage=100 * float(np.mean(inside)) if inside else None,
    )
