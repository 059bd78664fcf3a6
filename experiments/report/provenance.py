"""Where the op times of deployments come from, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.config.deployment import Deployment
from experiments.report.content import SortableTable
from simulator.confidence.op_errors import NORMAL_90, OpError, op_errors


def op_times_grid(deployments: Sequence[Deployment]) -> SortableTable | None:
    """A row for each op of each profile bundle: its origin, and its error. None without any."""
    bundles = {deployment.bundle_name: deployment.ops for deployment in deployments}
    rows = []
    for name, ops in bundles.items():
        meta = ops.bundle.meta
        for op, error in op_errors(ops).items():
            origin = str(meta.environment.get(op, meta.source))
            rows.append([name, op, origin, f"{_percent(error):.1f}"])
    if not rows:
        return None
    note = (
        "The error is half of the 90 % band, the median over the op's measured sizes: of the "
        "regression, and of the device model where the times are modelled."
    )
    headings = ["profile bundle", "op", "origin", "error (± %)"]
    return SortableTable("Op times: origin and error", headings, rows, note, text=3)


def _percent(error: OpError) -> float:
    local = float(np.median(error.sigmas(error.table.points)))
    return float(100 * np.expm1(NORMAL_90 * np.hypot(error.common, local)))
