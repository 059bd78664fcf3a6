"""How far predictions are off what was measured: by group, and beside another predictor's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.score.measured import SCORED, Measured
from sarathi_sim.experiments.score.mixtures import measured_cold
from sarathi_sim.profiler.bundle.csv_cells import as_numbers, read_cells


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


_NO_BAND = (np.nan, np.nan)
_PREDICTED = [*SCORED.values(), *(f"{n}_{end}" for n in SCORED.values() for end in ("low", "high"))]
_OF_KEY = {
    "cluster.tp": "tp that the model, or a node, cannot have",
    "kv_cache": "no room for a KV cache beside the weights",
    "stack": "kernels that were not measured",
}
"""Why a configuration is refused, by the key that its message begins with."""
_VALUE = re.compile(r"value ('[^']*'|\"[^\"]*\"|[^:]*): ")
"""What rows that are refused for one reason differ in."""
_PEER_COLUMNS = (("ttft_ms", "tpot_ms"), ("predicted_ttft_ms", "predicted_tpot_ms"))


def read_peer(path: Path) -> dict[str, ServerTimes]:
    """Another predictor's file: ``id``, and ``ttft_ms, tpot_ms`` (as this program's
    ``predictions.csv`` has them) or the same with ``predicted_`` before. Rows without both numbers
    are left out. Raises ConfigError for a file that is no such table.
    """
    cells = read_cells(path)
    for names in _PEER_COLUMNS:
        if {"id", *names} <= set(cells.columns):
            columns = (as_numbers(cells[name]).tolist() for name in names)
            found = zip(cells["id"].astype(str), zip(*columns, strict=True), strict=True)
            return {
                name: ServerTimes(*pair)
                for name, pair in found
                if all(0 < x < math.inf for x in pair)
            }
    raise ConfigError(f"{path}: needs the columns id, ttft_ms and tpot_ms")


def short_reason(message: str) -> str:
    """A refusal in a few words, the same for rows alike; ``message`` is all of it."""
    text = message.partition("\n")[0]
    key = text.partition(": ")[0]
    if key in _OF_KEY:
        return _OF_KEY[key]
    return _VALUE.sub("", text, count=1).partition(";")[0]


def league(
    rows: Sequence[Measured],
    predictions: Mapping[str, ServerTimes],
    refused: Mapping[str, str],
    peers: Mapping[str, Mapping[str, ServerTimes]],
) -> dict[str, Any]:
    """Numbers as ``score --json`` prints them; percentages. ``rows`` are those that were read,
    ``refused`` says of which there is no prediction, and why.

    ``peers`` holds for each other predictor its errors and ours on the rows that both answer.
    """
    full = {name for name, times in predictions.items() if times.kv_full}
    groups, known = grouped(rows, full), {row.id for row in rows}
    content: dict[str, Any] = {
        "rows": len(rows) + sum(name not in known for name in refused),
        "answered": len(predictions),
        "groups": of_groups(groups, predictions),
        "refused": dict(Counter(map(short_reason, refused.values())).most_common()),
    }
    for peer, theirs in peers.items():
        shared = {name: predictions[name] for name in predictions.keys() & theirs.keys()}
        content.setdefault("peers", {})[peer] = {
            "rows": sum(row.id in theirs for row in rows),
            "groups": {
                name: {
                    "n": sum(row.id in shared for row in group),
                    "ours": of_group(group, shared),
                    "theirs": of_group(group, {n: theirs[n] for n in shared}),
                }
                for name, group in groups.items()
            },
        }
    return content


def of_groups(
    groups: Mapping[str, Sequence[Measured]], predictions: Mapping[str, ServerTimes]
) -> dict[str, Any]:
    """Answered rows and errors of each group."""
    return {
        name: {"n": sum(row.id in predictions for row in group), **of_group(group, predictions)}
        for name, group in groups.items()
    }


def of_group(rows: Sequence[Measured], predictions: Mapping[str, ServerTimes]) -> dict[str, Any]:
    """Errors by metric; None where no row has a prediction, or was measured for it."""
    found = {metric: errors(rows, predictions, metric) for metric in SCORED}
    return {metric: None if one is None else asdict(one) for metric, one in found.items()}


def predictions_table(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes], refused: Mapping[str, str]
) -> pd.DataFrame:
    """A row for each measured one, in their order: id, all that is predicted, the ends of its
    bands, reason and detail. Rows that could not be read come last."""
    by_id = {row.id: row for row in rows}
    table: list[dict[str, Any]] = []
    for id in dict.fromkeys([*by_id, *refused]):
        line: dict[str, Any] = dict.fromkeys(_PREDICTED, np.nan)
        line |= {"id": id, "reason": "", "detail": ""}
        if (times := predictions.get(id)) is not None:
            for metric, name in SCORED.items():
                line[name] = times.of(by_id[id], metric)
                line[f"{name}_low"], line[f"{name}_high"] = times.bands.get(metric, _NO_BAND)
        elif id in refused:
            line |= {"reason": short_reason(refused[id]), "detail": " ".join(refused[id].split())}
        table.append(line)
    return pd.DataFrame(table, columns=["id", *_PREDICTED, "reason", "detail"])
