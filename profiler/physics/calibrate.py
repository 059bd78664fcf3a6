"""Fit a device's op times to the public measurements, and report their errors.

Final constants and residuals come from all rows. Every reported error comes from models that saw no
row of the scored group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.device import (
    ErrorStats,
    FittedOp,
    list_devices,
    load_device,
)
from sarathi_sim.profiler.physics.fit import OpModel, columns_of, errors, fit_op, held_out
from sarathi_sim.profiler.physics.residual import Arrays
from sarathi_sim.profiler.physics.studies import BINS, STUDIES, Study
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.strict import SpecError

#: The device file is written by hand above this line, and by :meth:`CalibrationResult.write` below.
MARKER = "# --- below: written by `sarathi-sim calibrate --write` ---\n"

_STATS = ("median_pct", "p95_pct", "worst_pct")


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """The fitted ops of one device, with their held-out errors, and the residuals' arrays."""

    device: str
    fitted: dict[str, FittedOp]
    residuals: Arrays

    def write(self, folder: Path | None = None) -> list[Path]:
        """Write ``<device>.yaml`` (below its marker) and ``<device>.npz``; returns both paths.

        ``folder`` defaults to the shipped devices. The same result gives the same bytes.
        """
        target = folder or data_dir() / "devices"
        shipped = data_dir() / "devices" / f"{self.device}.yaml"
        head = shipped.read_text(encoding="utf-8").partition(MARKER)[0]
        fitted = {op: dataclasses.asdict(fit) for op, fit in self.fitted.items()}
        body = dump_yaml({"fitted": fitted}, width=96)
        spec, arrays = target / f"{self.device}.yaml", target / f"{self.device}.npz"
        content = BytesIO()
        np.savez_compressed(content, allow_pickle=False, **self.residuals)
        write_whole(arrays, content.getvalue())
        write_whole(spec, head + MARKER + body)
        return [spec, arrays]


def calibrate(
    device: str,
    datasets: Path,
    progress: Callable[[str], None] | None = None,
    date: str | None = None,
) -> CalibrationResult:
    """Fit every op of ``device`` to the files under ``datasets``; deterministic but for ``date``.

    ``progress`` is called with the name of each op before its fit; ``date`` (ISO, default today)
    is recorded. Raises SpecError for a device without public measurements, FileNotFoundError for a
    missing file.
    """
    if device not in STUDIES:
        raise SpecError(
            f"device {device!r} has no public measurements to fit; allowed: {', '.join(STUDIES)}"
        )
    today = date or datetime.now(UTC).date().isoformat()
    fitted: dict[str, FittedOp] = {}
    residuals: Arrays = {}
    for study in STUDIES[device](datasets):
        if progress is not None:
            progress(f"{device}: {study.op} ({len(study.rows)} rows)")
        scores = held_out(study.form, study.rows, study.hold_out.splits(study.rows))
        model = fit_op(study.form, study.rows)
        fitted[study.op] = _record(study, model, scores, today)
        if model.residual is not None:
            stored = model.residual.arrays()
            residuals.update({f"{study.op}.{name}": array for name, array in stored.items()})
    return CalibrationResult(device, fitted, residuals)


def _record(study: Study, model: OpModel, scores: pd.DataFrame, date: str) -> FittedOp:
    checks = {}
    for name, rows in study.checks.items():
        predicted = rows.assign(predicted_us=model.predict(columns_of(rows)))
        checks[name] = errors(predicted)
    return FittedOp(
        source=study.source,
        origin=study.origin.repository,
        licence=study.origin.licence,
        rows=len(study.rows),
        hold_out=study.hold_out.name,
        held_out=errors(scores),
        roofline_only=errors(scores, "roofline_us"),
        date=date,
        constants=model.constants,
        residual=model.residual is not None,
        structure={**_bins(study, scores), **_again(study)},
        checks=checks,
        notes=study.notes,
        stack_pct=study.stack_pct,
    )


def _bins(study: Study, scores: pd.DataFrame) -> dict[str, ErrorStats]:
    by, found = study.bin_by, {}
    for low, high in pairwise(BINS[by]):
        part = scores[(scores[by] > low) & (scores[by] <= high)]
        if len(part):
            found[f"{low} < {by} <= {high}"] = errors(part)
    if by == "m":
        large = scores["m"] >= 128
        for label, rest in (("m = 128 j (end of a tile)", 0), ("m = 128 j + 1 (new tile)", 1)):
            part = scores[large & (scores["m"] % 128 == rest)]
            if len(part):
                found[label] = errors(part)
    return found


def _again(study: Study) -> dict[str, ErrorStats]:
    if study.again is None:
        return {}
    scores = held_out(study.form, study.rows, study.again.splits(study.rows))
    return {study.again.name: errors(scores)}


def fitted_devices(device: str | None) -> dict[str, dict[str, FittedOp]]:
    """The stored fits of one device, or of all fitted devices; needs no datasets."""
    if device is not None:
        load_device(device).op("gemm")  # raises, saying which devices are fitted
    specs = map(load_device, [device] if device else list_devices())
    return {spec.name: spec.fitted for spec in specs if spec.fitted is not None}


def report(device: str, fitted: dict[str, FittedOp]) -> pd.DataFrame:
    """One row an op: rows, held-out median, p95, worst, and the same for the roofline alone."""
    rows = []
    for op, fit in fitted.items():
        row: dict[str, object] = {"device": device, "op": op, "rows": fit.rows}
        row.update({name: getattr(fit.held_out, name) for name in _STATS})
        row.update({f"roofline_{name}": getattr(fit.roofline_only, name) for name in _STATS})
        rows.append({**row, "hold_out": fit.hold_out, "source": fit.source})
    return pd.DataFrame(rows)


def structure(device: str, fitted: dict[str, FittedOp]) -> pd.DataFrame:
    """Held-out errors by ranges of the inputs, tile edges, and rows of other sources."""
    rows = []
    for op, fit in fitted.items():
        for kind, table in (("held out", fit.structure), ("other source", fit.checks)):
            for where, stats in table.items():
                named = {"device": device, "op": op, "kind": kind, "where": where}
                rows.append({**named, **dataclasses.asdict(stats)})
    return pd.DataFrame(rows)
