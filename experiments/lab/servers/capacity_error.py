"""How far predicted capacities are from measured ones: ``data/capacity_error.yaml``.

Fitted to MLPerf's runs that stopped at a limit, and scored on cells (GPU, number of GPUs, model)
left out. A table of them has the columns ``id``, ``cell``, ``measured_per_s``, ``predicted_per_s``.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.simulator.confidence.bands import UNKNOWN, covering_width
from sarathi_sim.simulator.loop.records import Floats
from ...run.uncertainty import CapacityDiscrepancy

ROWS = "mlperf_capacities.csv"
MIXTURES = ("mixtral-8x7b", "deepseek-r1")
"""MLPerf's models that are mixtures of experts."""


def is_mixture(cell: str) -> bool:
    """Whether a cell's model is a mixture of experts."""
    return cell.rpartition(", ")[2] in MIXTURES


def recorded() -> pd.DataFrame:
    """The table that the shipped constants were fitted to."""
    return pd.read_csv(data_dir() / "lab" / ROWS)


def half_widths(rows: pd.DataFrame) -> dict[str, float]:
    """The half-widths that cover 90 % of further runs (:func:`covering_width`): for dense models
    from their rows; for mixtures of experts, of which there are too few, from all."""
    errors = np.abs(_errors(rows))
    dense = np.array([not is_mixture(cell) for cell in rows["cell"]], bool)
    return {
        "dense": covering_width(errors[dense], UNKNOWN),
        "mixture": covering_width(errors, UNKNOWN),
    }


def inside(rows: pd.DataFrame) -> list[bool]:
    """Whether each row lies within the half-width that is fitted without its cell."""
    found = []
    for cell, error in zip(rows["cell"], np.abs(_errors(rows)), strict=True):
        others = half_widths(rows[rows["cell"] != cell])
        found.append(bool(error <= others["mixture" if is_mixture(cell) else "dense"]))
    return found


def fitted(rows: pd.DataFrame) -> CapacityDiscrepancy:
    """What the table says, today."""
    dense = sum(not is_mixture(cell) for cell in rows["cell"])
    return CapacityDiscrepancy(
        f"{len(rows)} runs of MLPerf Inference that stopped at a limit, {dense} of dense models",
        datetime.now(UTC).date().isoformat(),
        half_widths(rows),
        sum(inside(rows)),
    )


def _errors(rows: pd.DataFrame) -> Floats:
    measured, predicted = (
        rows[f"{name}_per_s"].to_numpy(float) for name in ("measured", "predicted")
    )
    return np.asarray(np.log(measured / predicted))
