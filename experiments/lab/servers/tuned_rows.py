"""How well does one load of a server predict its others? Of the public rows:

    python -m sarathi_sim.experiments.lab.servers.tuned_rows SCORE EVERY PAGE FILE...

SCORE is the result of ``sarathi-sim lab score FILE...``. Of each server and pair of lengths the
middle load is tuned to as ``sarathi-sim tune`` does (50 simulations: every EVERYth group is taken),
and the others are predicted with these constants, and with the factor by which that load is off.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats
from ...config.base import Source
from ...config.deployment import deploy
from ...config.loading import check_scenario
from ...measured.replay import MeasuredRun, Overheads, numbers_of, simulated
from ...measured.tune import fit
from ..pages import markdown
from .errors import read_peer
from .host import fitted_without
from .page import put
from .rows import METRICS, Measured, ServerTimes, read_servers
from .scenarios import campaign_of, scenario_of, server_of

NAMES = ("ttft_s", "tpot_s")


@dataclass(frozen=True, eq=False)
class GivenLoad(MeasuredRun):
    """A target of a fit. Simulations count relative to the score's prediction (TTFT and TPOT in
    ms), which knows how far apart the clients are."""

    predicted: Floats

    @cached_property
    def before(self) -> Floats:
        """Simulated with the constants of the deployment."""
        return _means(numbers_of(simulated(self.deployment).requests))

    def numbers(self, overheads: Overheads) -> dict[str, Any]:
        """Simulated with others: the score's prediction, times what these change."""
        change = _means(super().numbers(overheads)) / self.before
        return _numbers(self.predicted * change)


def _means(numbers: Mapping[str, Any]) -> Floats:
    return np.array([numbers[name]["mean"] for name in NAMES])


def _numbers(times_ms: Floats) -> dict[str, Any]:
    return {name: {"mean": t} for name, t in zip(NAMES, (times_ms / 1e3).tolist(), strict=True)}


def load_of(row: Measured, predicted: ServerTimes) -> GivenLoad:
    """A row with the constants that were fitted without its server."""
    fold, source = fitted_without(row), Source("row", "row", {}, ())
    apart = fold.apart.get(campaign_of(row), 0.0) > 0.5
    described = check_scenario(scenario_of(row, fold.of(row)[0], apart), source)
    means = _numbers(_times(row))
    return GivenLoad(row.id, means, deploy(described, source), _times(predicted))


def _times(of: Measured | ServerTimes) -> Floats:
    return np.array([of.ttft_ms, of.tpot_ms])


def groups(rows: Sequence[Measured], predicted: Mapping[str, ServerTimes]) -> list[list[Measured]]:
    """The loads of each server and pair of lengths, the middle one first; rows without flags."""
    found: dict[tuple[Any, ...], list[Measured]] = {}
    for row in rows:
        if not row.flags and row.id in predicted:
            found.setdefault((server_of(row), row.isl, row.osl), []).append(row)
    ordered = [sorted(of, key=lambda row: row.concurrency) for of in found.values() if len(of) > 1]
    return [[of.pop(len(of) // 2), *of] for of in ordered]


def of_group(
    rows: Sequence[Measured], predicted: Mapping[str, ServerTimes]
) -> list[dict[str, Any]]:
    """Signed errors of loads in percent: as they are, with the first's factor, and tuned to it."""
    try:
        given, *loads = (load_of(row, predicted[row.id]) for row in rows)
        tuned = fit([given], given.configured).overheads
        ours = [1e3 * _means(load.numbers(tuned)) for load in loads]
    except UserError as error:
        logging.warning("%s: %s", rows[0].id, error)
        return []
    off, found = _times(rows[0]) / given.predicted, []
    for row, load, after in zip(rows[1:], loads, ours, strict=True):
        line: dict[str, Any] = {"dense": row.dense, "server": server_of(row)}
        values = {"plain": load.predicted, "naive": load.predicted * off, "tuned": after}
        for how, times in values.items():
            errors = 100 * (times / _times(row) - 1)
            line |= {f"{metric} {how}": e for metric, e in zip(METRICS, errors, strict=True)}
        found.append(line)
    return found


def table(found: pd.DataFrame) -> str:
    """Mean / median absolute errors by class; the 90 % quantile of other servers' errors as the
    half-width of a band, with the share inside."""
    cells = []
    for dense, rows in found.groupby("dense", sort=False):
        for name in ("plain", "naive", "tuned"):
            line = ["dense" if dense else "mixtures", f"{len(rows)}", name]
            for metric in METRICS:
                off = rows[f"{metric} {name}"].abs()
                others = {s: off[rows["server"] != s].quantile(0.9) for s in set(rows["server"])}
                band = rows["server"].map(others)
                line.append(f"{off.mean():.1f} / {off.median():.1f}")
                line.append(f"± {band.median():.0f} %, {100 * (off <= band).mean():.0f} % inside")
            cells.append(line)
    of = [f"{metric.upper()}{what}" for metric in METRICS for what in ("", ", band")]
    return markdown("One load given", ["class", "rows", "", *of], cells)


if __name__ == "__main__":
    from joblib import Parallel, delayed

    folder, step, page, *files = sys.argv[1:]
    rows = read_servers([*map(Path, files)])[0]
    known = read_peer(Path(folder) / "predictions.csv")
    lists = Parallel(n_jobs=-1, backend="multiprocessing")(
        delayed(of_group)(group, known) for group in groups(rows, known)[:: int(step)]
    )
    put(Path(page), table(pd.DataFrame([line for lines in lists for line in lines])))
