"""A score: the rows of measured servers simulated, their errors, and with ``fit`` the host's
constants fitted to other rows (``host_fit.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sarathi_sim.experiments.config.inputs import (
    HostConstants,
    HostTimes,
    StackErrors,
    host_times,
)
from sarathi_sim.experiments.lab.servers.errors import (
    grouped,
    of_group,
    of_groups,
    predictions_table,
    read_peer,
    short_reason,
    too_wide,
)
from sarathi_sim.experiments.lab.servers.host import (
    APART,
    BASE,
    CROSS_VALIDATED,
    SCHEMES,
    UNKNOWN,
    fitting,
    grid,
    host_time_yaml,
    launching,
    left_out,
    slopes,
    to_ship,
    with_times,
)
from sarathi_sim.experiments.lab.servers.rows import (
    Measured,
    ServerTimes,
    read_launches,
    read_measured,
)
from sarathi_sim.experiments.lab.servers.runs import (
    DRAWS,
    REDRAWS,
    Variant,
    draws,
    kept_runs,
    plan_rows,
    redrawn,
    simulate_rows,
    times_of,
    with_bands,
)
from sarathi_sim.experiments.lab.servers.scenarios import (
    campaign_of,
    scenario_of,
    server_of,
    stack_of,
)
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.strict import UserError

T = TypeVar("T")
FITTED = "fitted"
Predictions = dict[str, ServerTimes]


@dataclass(frozen=True)
class ScoredRows:
    """Predictions by id: ``best`` is what is scored, ``zero_fit`` has no constant fitted to such
    rows. ``refused`` says why others have none. ``fits`` are predictions by scheme, and ``shipped``
    the constants, where they were fitted here (``mixtures``: of those). So many rows were
    ``redrawn``: simulated again for their bands. ``peers`` are other predictors' by their files."""

    rows: Sequence[Measured]
    best: Mapping[str, ServerTimes]
    zero_fit: Mapping[str, ServerTimes]
    refused: Mapping[str, str]
    fits: Mapping[str, Mapping[str, ServerTimes]] = field(default_factory=dict)
    shipped: HostTimes | None = None
    redrawn: int = 0
    mixtures: HostTimes | None = None
    peers: Mapping[str, Mapping[str, ServerTimes]] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it; percentages. Of each other predictor the errors, and ours
        on the rows that both answer. Of dense models and mixtures together ``classes`` has the same
        of each."""
        best, known = self.best, {row.id for row in self.rows}
        groups = grouped(self.rows, {id for id, times in best.items() if times.kv_full})
        wide = sum(map(too_wide, best.values()))
        content: dict[str, Any] = {
            "rows": len(self.rows) + sum(name not in known for name in self.refused),
            "answered": len(best) - wide,
            "too_wide": wide,
            "groups": of_groups(groups, best),
            "refused": dict(Counter(map(short_reason, self.refused.values())).most_common()),
        }
        for peer, theirs in self.peers.items():
            shared = {name: best[name] for name in best.keys() & theirs.keys()}
            content.setdefault("peers", {})[peer] = {
                "rows": sum(row.id in theirs for row in self.rows),
                "groups": {
                    name: {
                        "n": sum(row.id in shared for row in group),
                        "ours": of_group(group, shared),
                        "theirs": of_group(group, {n: theirs[n] for n in shared}),
                    }
                    for name, group in groups.items()
                },
            }
        content["constants"] = (self.shipped or host_times()).fitted_to
        content["constants_of_mixtures"] = (self.mixtures or host_times(mixtures=True)).fitted_to
        variants = {BASE: self.zero_fit, **self.fits}
        content["variants"] = {name: of_groups(groups, of) for name, of in variants.items()}
        content["bands"] = {"draws": DRAWS, "redrawn": {"rows": self.redrawn, "draws": REDRAWS}}
        for key, found in (("host_time", self.shipped), ("host_time_of_mixtures", self.mixtures)):
            if found is not None:
                content[key] = {name: asdict(host) for name, host in found.stacks.items()}
        if len({row.dense for row in self.rows}) == 2:
            classes = {"dense": True, "mixtures": False}
            content["classes"] = {n: self._of(dense).content() for n, dense in classes.items()}
        return content

    def _of(self, dense: bool) -> ScoredRows:
        """Of dense models, or of mixtures, alone."""
        rows = [row for row in self.rows if row.dense == dense]

        def own(of: Mapping[str, T]) -> dict[str, T]:
            return {row.id: of[row.id] for row in rows if row.id in of}

        return replace(
            self,
            rows=rows,
            best=own(self.best),
            zero_fit=own(self.zero_fit),
            refused=own(self.refused),
            fits={name: own(of) for name, of in self.fits.items()},
            shipped=self.shipped if dense else None,
            mixtures=None if dense else self.mixtures,
            peers={name: own(of) for name, of in self.peers.items()},
        )

    def write(self, folder: Path) -> None:
        """``predictions.csv``, and the constants that were fitted."""
        table = predictions_table(self.rows, self.best, self.refused)
        table.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")
        for name, found in (("host_time", self.shipped), ("host_time_mixtures", self.mixtures)):
            if found is not None:
                write_whole(folder / f"{name}.yaml", host_time_yaml(found))


def read_rows(
    files: Sequence[Path], launch: Path | None = None
) -> tuple[list[Measured], dict[str, str]]:
    """The rows of files of measured servers, and why others cannot be read. A ``launch`` list says
    how those with pools were started.

    Raises UserError for an id that stands in two of them.
    """
    rows: list[Measured] = []
    refused: dict[str, str] = {}
    for path in files:
        read, unread = read_measured(path)
        known = {row.id for row in rows}
        if again := next((row.id for row in read if row.id in known), None):
            raise UserError(f"{path}: the id {again} is in an earlier file, too")
        rows += read
        refused |= unread
    if launch is not None:
        started = read_launches(launch)
        rows = [row.model_copy(update={"launch": started.get(row.id)}) for row in rows]
    return rows, refused


def score_servers(
    files: Sequence[Path],
    peers: Sequence[Path],
    backend: Backend,
    progress: Progress,
    say: Say,
    *,
    fit: bool = False,
    launch: Path | None = None,
) -> ScoredRows:
    """Simulate the rows of files, with the shipped constants or those that ``fit`` finds for rows
    left out; ``peers`` are other predictors' files, ``launch`` is a launch list
    (:func:`read_launches`). Raises UserError for what cannot be read.

    Rows of servers to which the shipped constants were fitted get those that were fitted without
    them. With ``fit`` the best predictions are the cross-validated ones; rows that are not fitted
    to keep the shipped constants.
    """
    rows, unread = read_rows(files, launch)
    theirs = {str(path): read_peer(path) for path in peers}
    known, file = host_times(), str(files[0])
    origin = " and ".join(path.name for path in files)
    hosts: dict[str, Host] = {}
    if fit:
        every = grid(known.measured) | launching(known.measured)
        hosts = {name: _fitting(host) for name, host in every.items()}
    hosts[BASE] = lambda _: known.measured
    hosts[FITTED] = lambda row: None if fit and fitting(row) else _without(row)[0]
    variants = {name: _variant(host) for name, host in hosts.items()}
    variants |= {name + APART: _variant(host, apart=True) for name, host in hosts.items()}
    with kept_runs() as where:
        plan = plan_rows(file, rows, progress, variants, where[1])
        failed = simulate_rows(plan, where, backend, progress, say)
        answered = plan.known[BASE]
        redrawn_rows = redrawn(file, rows, variants[BASE], answered, where, backend, progress, say)
    simulated = {
        name: {id: times_of(outcome) for id, outcome in of.items()}
        for name, of in plan.known.items()
    }
    off = {id: draws(one.shares) for id, one in answered.items() if one.shares} | redrawn_rows
    error_of = {row.id: asdict(_without(row)[1]) for row in rows if row.id in answered}
    unknown = _between(rows, simulated, BASE, lambda row: UNKNOWN)
    shipped_apart = _between(rows, simulated, FITTED, _shipped_share)
    zero_fit = with_bands(rows, unknown, off, error_of)
    best = with_bands(rows, shipped_apart, off, error_of)
    refused = unread | plan.refused | failed
    scored = ScoredRows(rows, best, zero_fit, refused, redrawn=len(redrawn_rows), peers=theirs)
    if not fit:
        return scored
    found = slopes(rows, simulated, off, known)
    mixed = slopes(rows, simulated, off, host_times(mixtures=True), mixtures=True)
    fits, of_mixtures = dict[str, Predictions](), dict[str, Predictions]()
    for done, scheme in enumerate(SCHEMES):
        progress("fitting", done, len(SCHEMES))
        fits[scheme], of_mixtures[scheme] = left_out(found, scheme), left_out(mixed, scheme)
    progress("fitting", len(SCHEMES), len(SCHEMES))
    shipped = to_ship(found, fits, origin, known) if found.rows else None
    mixtures = to_ship(mixed, of_mixtures, origin, mixed.limits) if mixed.rows else None
    best = best | fits[CROSS_VALIDATED]
    both = {scheme: fits[scheme] | of_mixtures[scheme] for scheme in SCHEMES}
    return replace(scored, best=best, fits=both, shipped=shipped, mixtures=mixtures)


Host = Callable[[Measured], HostConstants | None]
"""The constants that a row is simulated with; None if it is not."""


def _variant(host: Host, apart: bool = False) -> Variant:
    """Rows with these constants; with clients ``apart`` those whose load tool is not recorded."""

    def variant(row: Measured) -> dict[str, Any] | None:
        given = None if apart and not campaign_of(row) else host(row)
        return None if given is None else scenario_of(row, given, apart)

    return variant


def _fitting(host: HostConstants) -> Host:
    """For rows that are fitted to."""
    return lambda row: host if fitting(row, not row.dense) else None


def _shipped_share(row: Measured) -> float:
    """How far apart the row's clients are by the shipped constants, fitted without its server."""
    known = host_times(not row.dense).fitted_without(server_of(row)).apart
    return known.get(campaign_of(row), UNKNOWN)


def _between(
    rows: Iterable[Measured],
    simulated: Mapping[str, Mapping[str, ServerTimes]],
    name: str,
    share_of: Callable[[Measured], float],
) -> dict[str, ServerTimes]:
    """A variant's times, with clients so far apart where that is not recorded."""
    found = dict(simulated[name])
    for row in rows:
        if row.id in found and (far := simulated[name + APART].get(row.id)) is not None:
            near, share = found[row.id], share_of(row)
            ttft, tpot = (
                one + share * (other - one)
                for one, other in ((near.ttft_ms, far.ttft_ms), (near.tpot_ms, far.tpot_ms))
            )
            found[row.id] = with_times(near, row, ttft, tpot)
    return found


def _without(row: Measured) -> tuple[HostConstants, StackErrors]:
    return host_times(not row.dense).without(stack_of(row), server_of(row))
