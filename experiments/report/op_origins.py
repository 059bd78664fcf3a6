"""Where the op times of results come from, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.ops import SENDS, op_label
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.confidence.op_errors import NORMAL_90, OpError, op_errors
from ..capacity.probing import PROBES
from ..config.deployment import Deployment, deploy
from ..config.loading import load_experiment
from ..sweeps.sweep import read_table
from .section import Table

_MOST_BUNDLES = 8
_BUNDLE_KEYS = ("model", "device", "stack", "dtype", "cluster.tp", "cluster", "scenario")


def op_times_grid(deployments: Sequence[Deployment]) -> Table | None:
    """A row for each op of each profile bundle: its origin, and its error. None without any."""
    bundles = {deployment.bundle_name: deployment.ops for deployment in deployments}
    rows = []
    for name, ops in bundles.items():
        meta = ops.meta
        for op, error in op_errors(ops).items():
            origin = str(meta.environment.get(op, meta.source))
            called = f"{op_label(op)} {SENDS.get(op, '').replace('_', ' ')}".strip()
            rows.append([name, called, origin, f"{_percent(error):.1f}"])
    if not rows:
        return None
    note = (
        "The error is half of the 90 % band, the median between the op's measured sizes: of the "
        "regression, and of the device model where the times are modelled."
    )
    headings = ["profile bundle", "op", "origin", "error (± %)"]
    return Table("Op times: origin and error", headings, rows, note, text=3)


def _percent(error: OpError) -> float:
    points = error.table.points
    local = float(np.median(error.sigmas((points[1:] + points[:-1]) / 2)))
    return float(100 * np.expm1(NORMAL_90 * np.hypot(error.common, local)))


def first_deployments(folder: Path, table: pd.DataFrame) -> tuple[list[Deployment], list[str]]:
    """The deployments of a sweep's first run of each model, device and layout, for their op times;
    and the reasons why others fail."""
    by = [key for key in _BUNDLE_KEYS if key in table] or ["name"]
    found, problems = [], []
    for _, rows in list(table.groupby(by, dropna=False, sort=False))[:_MOST_BUNDLES]:
        run, name = str(rows["run"].iloc[0]), str(rows["name"].iloc[0])
        try:
            experiment = load_experiment(folder / "runs" / run / "config.yaml")
            found.append(deploy(experiment.scenarios[name], experiment.sources[name]))
        except (UserError, KeyError) as error:
            problems.append(f"no errors of op times of run {run}: {error}")
    return found, problems


def op_times_of_probes(folder: Path) -> tuple[list[Table], list[str]]:
    """Origin and error of the op times of the first probes, which are the runs of a sweep; or why
    there are none."""
    probes = folder / PROBES
    try:
        deployments, problems = first_deployments(probes, read_table(probes))
    except UserError as error:
        return [], [f"no errors of op times: {error}"]
    found = op_times_grid(deployments)
    return [found] if found else [], problems
