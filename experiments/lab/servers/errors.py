"""Errors of predictions of measured servers, by group, beside another predictor's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.bundle.tables import as_numbers, read_cells
from sarathi_sim.profiler.storage.strict import UserError
from .rows import METRICS, SCORED, Measured, Predictions, ServerTimes
from .scenarios import measured_cold, server_of

WIDEST = 0.6
"""The half-width of a band, as a share of the prediction, beyond which nobody can use it."""
TOO_WIDE = f"a band over {100 * WIDEST:.0f} % either way: no answer"

DRAFTED, FLAGGED = "with drafts", "flagged"
#: What rows are grouped by: the group's first word, and how a row says which one it is in (None:
#: in none). Concurrencies go by the power of two up to which they lie.
GROUPS: Mapping[str, Callable[[Measured], str | None]] = {
    "all": lambda row: "",
    "engine": lambda row: row.backend,
    "gpu": lambda row: row.system,
    "precision": lambda row: row.precision,
    "class": lambda row: "dense" if row.dense else "mixture of experts",
    "mode": lambda row: row.mode,
    "model": lambda row: row.model,
    "concurrency": lambda row: f"<= {2 ** (row.concurrency - 1).bit_length()}",
    "memory": lambda row: None,
    "measured cold": lambda row: "" if measured_cold(row) else None,
}


def grouped(rows: Iterable[Measured], full: Collection[str] = ()) -> dict[str, list[Measured]]:
    """Rows by group: those without flags and drafts by :data:`GROUPS`, and by memory if any is of
    the ids whose KV cache was ``full`` (where requests wait for memory, TTFT is a matter of its
    size); the others are ``flagged`` or ``with drafts``, and nowhere else."""
    found: dict[tuple[int, int, str], list[Measured]] = {(0, 0, "all"): []}
    order = [*GROUPS, DRAFTED, FLAGGED]
    for row in rows:
        names = [(word, which) for word, of in GROUPS.items() if (which := of(row)) is not None]
        names += [("memory", "full" if row.id in full else "not full")] if full else []
        if row.flags or row.drafts:
            names = [(FLAGGED if row.flags else DRAFTED, "")]
        for word, which in names:
            place = order.index(word), len(which) * (word == "concurrency")
            found.setdefault((*place, f"{word} {which}".rstrip()), []).append(row)
    return {place[-1]: found[place] for place in sorted(found)}


Errors = dict[str, float | None]


def errors(rows: Iterable[Measured], predictions: Predictions, metric: str) -> Errors | None:
    """Of the rows where one of :data:`SCORED` was measured and predicted, in percent of what was
    measured; None where there is no such row.

    ``mape``, ``median`` and ``p90`` are of absolute errors, ``bias`` is the mean signed one.
    ``coverage`` is the share of measured values inside the predicted bands, ``interval_score`` the
    mean width of these plus 20 times what they miss by (for bands of 90 %), ``coverage_pm`` the
    half-width of the coverage's 95 % interval, with servers as independent; None without any.
    """
    off, ends, servers = [], [], []
    for row in rows:
        times, measured = predictions.get(row.id), row.of(metric)
        if times is None or measured is None or (predicted := times.of(row, metric)) is None:
            continue
        off.append(100 * (predicted / measured - 1))
        if (band := times.bands.get(metric)) is not None:
            ends.append((measured, *band))
            servers.append(server_of(row))
    if not off:
        return None
    size = np.abs(off)
    found: Errors = {"mape": float(size.mean()), "median": float(np.median(size))}
    found |= {"p90": float(np.quantile(size, 0.9)), "bias": float(np.mean(off))}
    found |= dict.fromkeys(("coverage", "coverage_pm", "interval_score"))
    if ends:
        value, low, high = np.array(ends).T
        missed = np.maximum(np.maximum(low - value, value - high), 0)
        found["coverage"] = 100 * float(np.mean(missed == 0))
        found["interval_score"] = 100 * float(np.mean((high - low + 20 * missed) / value))
        inside = pd.Series((missed == 0) - np.mean(missed == 0)).groupby(servers).sum()
        if len(inside) > 1:
            found["coverage_pm"] = 196 * float(np.sqrt((inside**2).sum())) / len(ends)
    return found


def too_wide(times: ServerTimes) -> bool:
    """Whether the band of TTFT or TPOT is no answer, though it counts in errors and coverage."""
    bands = ((times.bands.get(name, _NO_BAND), getattr(times, SCORED[name])) for name in METRICS)
    return any(high - low > 2 * WIDEST * value for (low, high), value in bands)


_NO_BAND = (np.nan, np.nan)
_PREDICTED = [*SCORED.values(), *(f"{n}_{end}" for n in SCORED.values() for end in ("low", "high"))]
_OF_KEY = {
    "cluster.tp": "tp that the model, or a node, cannot have",
    "cluster.dp": "data-parallel attention of a model without experts",
    "kv_cache": "no room for a KV cache beside the weights",
    "stack": "kernels that were not measured",
}
"""Why a configuration is refused, by the key that its message begins with."""
_VALUE = re.compile(r"value ('[^']*'|\"[^\"]*\"|[^:]*): ")
"""What rows that are refused for one reason differ in."""
_PEER_COLUMNS = (("ttft_ms", "tpot_ms"), ("predicted_ttft_ms", "predicted_tpot_ms"))


def read_peer(path: Path) -> dict[str, ServerTimes]:
    """Another predictor's file: ``id``, and ``ttft_ms, tpot_ms`` (as our ``predictions.csv``), or
    the same with ``predicted_`` before; without rows that lack one. Raises UserError for others."""
    cells = read_cells(path)
    for both in _PEER_COLUMNS:
        if {"id", *both} <= set(cells.columns):
            pairs = np.stack([as_numbers(cells[name]) for name in both], axis=1)
            found = zip(cells["id"].astype(str), pairs.tolist(), strict=True)
            usable = ((id, pair) for id, pair in found if all(0 < x < math.inf for x in pair))
            return {id: ServerTimes(*pair) for id, pair in usable}
    raise UserError(f"{path}: needs the columns id, ttft_ms and tpot_ms")


def short_reason(message: str) -> str:
    """A refusal in a few words, the same for rows alike; ``message`` is all of it."""
    text = message.partition("\n")[0]
    key = text.partition(": ")[0]
    if key in _OF_KEY:
        return _OF_KEY[key]
    return _VALUE.sub("", text, count=1).partition(";")[0]


def of_groups(groups: Mapping[str, Sequence[Measured]], predictions: Predictions) -> dict[str, Any]:
    """Answered rows and errors of each group."""
    return {
        name: {"n": sum(row.id in predictions for row in group), **of_group(group, predictions)}
        for name, group in groups.items()
    }


def of_group(rows: Sequence[Measured], predictions: Predictions) -> dict[str, Errors | None]:
    """Errors by metric; None where no row has a prediction, or was measured for it."""
    return {metric: errors(rows, predictions, metric) for metric in SCORED}


def predictions_table(
    rows: Sequence[Measured], predictions: Predictions, refused: Mapping[str, str]
) -> pd.DataFrame:
    """A row for each measured one, in their order; those that could not be read come last."""
    by_id, table = {row.id: row for row in rows}, []
    for id in dict.fromkeys([*by_id, *refused]):
        why = refused.get(id, "")
        line: dict[str, Any] = {"reason": short_reason(why), "detail": " ".join(why.split())}
        if (times := predictions.get(id)) is not None:
            line = dict.fromkeys(line, TOO_WIDE if too_wide(times) else "")
            for metric, name in SCORED.items():
                line[name] = times.of(by_id[id], metric)
                line[f"{name}_low"], line[f"{name}_high"] = times.bands.get(metric, _NO_BAND)
        table.append({"id": id, **line})
    return pd.DataFrame(table, columns=["id", *_PREDICTED, "reason", "detail"])
