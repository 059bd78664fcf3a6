"""A score, from rows to what is printed: predictions, fits, and errors beside another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import (
    Fold,
    HostConstants,
    HostTimes,
    StackErrors,
    host_times,
)
from sarathi_sim.experiments.score.deployments import scenario_of, server_of, stack_of
from sarathi_sim.experiments.score.errors import ServerTimes, errors, grouped, league, of_groups
from sarathi_sim.experiments.score.host_fit import (
    BASE,
    CROSS_VALIDATED,
    LAUNCHES,
    ONE_GPU_OUT,
    SCHEMES,
    Slopes,
    alike,
    constants,
    fitting,
    grid,
    launching,
    left_out,
    names,
    parts,
    slopes,
)
from sarathi_sim.experiments.score.measured import METRICS, Measured, read_measured
from sarathi_sim.experiments.score.server_bands import DRAWS, draws, with_bands
from sarathi_sim.experiments.score.simulated import (
    REDRAWS,
    Variant,
    kept_runs,
    plan_rows,
    redrawn,
    simulate_rows,
    times_of,
)
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml

FITTED = "fitted"


@dataclass(frozen=True)
class ScoredRows:
    """Predictions by id: ``best`` is what is scored, ``zero_fit`` has no constant fitted to such
    rows. ``refused`` says why others have none. ``fits`` are predictions by scheme, and
    ``shipped`` the constants, where they were fitted here (``mixtures``: of those). So many rows
    were ``redrawn``: simulated again for their bands."""

    rows: Sequence[Measured]
    best: Mapping[str, ServerTimes]
    zero_fit: Mapping[str, ServerTimes]
    refused: Mapping[str, str]
    fits: Mapping[str, Mapping[str, ServerTimes]] = field(default_factory=dict)
    shipped: HostTimes | None = None
    redrawn: int = 0
    mixtures: HostTimes | None = None

    def content(self, peers: Mapping[str, Mapping[str, ServerTimes]]) -> dict[str, Any]:
        """As ``score --json`` prints it; percentages."""
        found = league(self.rows, self.best, self.refused, peers)
        known = host_times()
        found["constants"] = (self.shipped or known).fitted_to
        found["constants_of_mixtures"] = (self.mixtures or host_times(mixtures=True)).fitted_to
        groups = grouped(self.rows, {id for id, times in self.best.items() if times.kv_full})
        for name, predictions in {BASE: self.zero_fit, **self.fits}.items():
            found.setdefault("variants", {})[name] = of_groups(groups, predictions)
        found["bands"] = {"draws": DRAWS, "redrawn": {"rows": self.redrawn, "draws": REDRAWS}}
        if self.shipped is not None:
            found["host_time"] = {n: asdict(host) for n, host in self.shipped.stacks.items()}
        if self.mixtures is not None:
            of_mixtures = {n: asdict(host) for n, host in self.mixtures.stacks.items()}
            found["host_time_of_mixtures"] = of_mixtures
        return found


def read_rows(files: Sequence[Path]) -> tuple[list[Measured], dict[str, str]]:
    """The rows of files of measured servers, and why others cannot be read.

    Raises ConfigError for an id that stands in two of them.
    """
    rows: list[Measured] = []
    refused: dict[str, str] = {}
    for path in files:
        read, unread = read_measured(path)
        known = {row.id for row in rows}
        if again := next((row.id for row in read if row.id in known), None):
            raise ConfigError(f"{path}: the id {again} is in an earlier file, too")
        rows += read
        refused |= unread
    return rows, refused


def score_rows(
    file: str,
    rows: Sequence[Measured],
    backend: Backend,
    progress: Progress,
    say: Say,
    *,
    fit: bool = False,
) -> ScoredRows:
    """Simulate rows, with the shipped constants or with those that ``fit`` finds for rows left out.

    Rows of servers to which the shipped constants were fitted get those that were fitted without
    them. With ``fit`` the best predictions are the cross-validated ones; rows that are not fitted
    to keep the shipped constants.
    """
    known = host_times()
    hosts: dict[str, Host] = {}
    if fit:
        hosts = {name: _fitting(host) for name, host in grid(known.measured).items()}
        hosts |= {n: _fitting(host, False) for n, host in launching(known.measured).items()}
    hosts[BASE] = lambda _: known.measured
    hosts[FITTED] = lambda row: None if fit and fitting(row) else _without(row)[0]
    variants = {name: _described(host) for name, host in hosts.items()}
    with kept_runs() as where:
        plan = plan_rows(file, rows, progress, variants, where[1])
        failed = simulate_rows(plan, where[0], backend, progress, say)
        answered = plan.known[BASE]
        redrawn_rows = redrawn(file, rows, variants[BASE], answered, where, backend, progress, say)
    simulated = {
        name: {id: times_of(outcome) for id, outcome in of.items()}
        for name, of in plan.known.items()
    }
    off = {id: draws(one.shares) for id, one in answered.items() if one.shares} | redrawn_rows
    error_of = {row.id: asdict(_without(row)[1]) for row in rows if row.id in answered}
    zero_fit = with_bands(rows, simulated[BASE], off, error_of)
    best = with_bands(rows, simulated[FITTED], off, error_of)
    scored = ScoredRows(rows, best, zero_fit, plan.refused | failed, redrawn=len(redrawn_rows))
    if not fit:
        return scored
    dense = {name: times for name, times in simulated.items() if name not in LAUNCHES}
    found = slopes(rows, dense, off, known)
    fits = {scheme: left_out(found, scheme) for scheme in SCHEMES}
    shipped = to_ship(found, fits, file, known) if found.rows else None
    mixed = slopes(rows, simulated, off, host_times(mixtures=True))
    of_mixtures = {scheme: left_out(mixed, scheme) for scheme in SCHEMES}
    mixtures = to_ship(mixed, of_mixtures, file, mixed.limits) if mixed.rows else None
    best = best | fits[CROSS_VALIDATED]
    both = {scheme: fits[scheme] | of_mixtures[scheme] for scheme in SCHEMES}
    return replace(scored, best=best, fits=both, shipped=shipped, mixtures=mixtures)


Host = Callable[[Measured], HostConstants | None]
"""The constants that a row is simulated with; None if it is not."""


def _described(host: Host) -> Variant:
    def variant(row: Measured) -> dict[str, Any] | None:
        given = host(row)
        return None if given is None else scenario_of(row, given)

    return variant


def _fitting(host: HostConstants, dense: bool = True) -> Host:
    """For rows that are fitted to: mixtures, and dense models or not."""
    return lambda row: host if (dense and fitting(row)) or fitting(row, mixtures=True) else None


def _without(row: Measured) -> tuple[HostConstants, StackErrors]:
    return host_times(not row.dense).without(stack_of(row), server_of(row))


def to_ship(
    found: Slopes, fits: Mapping[str, Mapping[str, ServerTimes]], file: str, known: HostTimes
) -> HostTimes:
    """What ``data/host_time.yaml`` would hold after this fit. The errors of a server that was among
    those fitted to are cross-validated ones; any other server's are those of GPUs left out."""
    count = len({server_of(row) for row in found.rows})
    kind = "dense" if found.rows and found.rows[0].dense else "mixtures'"
    ttft, tpot = (errors(found.rows, fits[CROSS_VALIDATED], metric) for metric in METRICS)
    note = f"fitted to {len(found.rows)} {kind} rows of {count} servers of {Path(file).name}"
    if ttft is not None and tpot is not None:
        note += (
            f"; on servers left out mean TTFT is off by {ttft.mape:.1f} % and TPOT by "
            f"{tpot.mape:.1f} %"
        )
    folds = [
        Fold(
            sorted({server_of(found.rows[row]) for row in out}),
            constants(found, fit_to),
            _errors(found, fits[CROSS_VALIDATED], fit_to),
        )
        for fit_to, out in parts(found.rows, CROSS_VALIDATED)
    ]
    every = np.arange(len(found.rows))
    elsewhere = fits[ONE_GPU_OUT] or fits[CROSS_VALIDATED]
    apart = _errors(found, elsewhere, every) if elsewhere else {}
    return replace(known, fitted_to=note, stacks=constants(found, every), errors=apart, folds=folds)


def _errors(
    found: Slopes, predictions: Mapping[str, ServerTimes], which: Any
) -> dict[str, StackErrors]:
    times = [predictions[row.id] for row in found.rows]
    predicted = np.array([[each.ttft_ms, each.tpot_ms] for each in times]).T
    near = {name: alike(found.rows, which, name) for name in names(found.rows)}
    return {name: found.sigmas(rows, predicted[:, rows]) for name, rows in near.items()}


def host_time_yaml(shipped: HostTimes) -> str:
    """The text of ``data/host_time.yaml``."""
    return dump_yaml(asdict(shipped), width=96)
