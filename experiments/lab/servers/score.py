"""A score: the rows of measured servers simulated, their errors, and with ``fit`` the host's
constants fitted to other rows (``host.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sarathi_sim.experiments.config.inputs import HostConstants, host_times
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
    HALFWAY,
    SCHEMES,
    HostFit,
    fitted_without,
    fitting,
    grid,
    host_fit,
    launching,
    left_out,
    slopes,
)
from sarathi_sim.experiments.lab.servers.rows import Measured, ServerTimes, read_servers
from sarathi_sim.experiments.lab.servers.runs import (
    DRAWS,
    REDRAWS,
    Draws,
    Variant,
    bench,
    draws,
    redrawn,
    simulate_rows,
    with_bands,
)
from sarathi_sim.experiments.lab.servers.scenarios import campaign_of, scenario_of
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.profiler.storage.child import Progress, Say

T = TypeVar("T")
FITTED = "fitted"
Predictions = Mapping[str, ServerTimes]
KINDS = {True: "dense", False: "mixtures"}
"""By a row's ``dense``."""
_CONTENT = {True: "", False: "_of_mixtures"}


@dataclass(frozen=True)
class ScoredRows:
    """Predictions by id: ``best`` is what is scored, ``zero_fit`` has no constant fitted to such
    rows. ``refused`` says why others have none. ``fits`` are predictions by scheme, and ``hosts``
    the constants by ``dense``, where they were fitted here. So many rows were ``redrawn``:
    simulated again for their bands. ``peers`` are other predictors' by their files."""

    rows: Sequence[Measured]
    best: Predictions
    zero_fit: Predictions
    refused: Mapping[str, str]
    fits: Mapping[str, Predictions] = field(default_factory=dict)
    hosts: Mapping[bool, HostFit] = field(default_factory=dict)
    redrawn: int = 0
    peers: Mapping[str, Predictions] = field(default_factory=dict)

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
            ours = {name: best[name] for name in best.keys() & theirs.keys()}
            content.setdefault("peers", {})[peer] = {
                "rows": sum(row.id in theirs for row in self.rows),
                "groups": {
                    name: {
                        "n": sum(row.id in ours for row in group),
                        "ours": of_group(group, ours),
                        "theirs": of_group(group, {id: theirs[id] for id in ours}),
                    }
                    for name, group in groups.items()
                },
            }
        for dense, name in _CONTENT.items():
            fit = self.hosts.get(dense)
            times = host_times(not dense) if fit is None else fit.times
            content[f"constants{name}"] = times.fitted_to
        variants = {BASE: self.zero_fit, **self.fits}
        content["variants"] = {name: of_groups(groups, of) for name, of in variants.items()}
        content["bands"] = {"draws": DRAWS, "redrawn": {"rows": self.redrawn, "draws": REDRAWS}}
        for dense, fit in self.hosts.items():
            stacks = fit.times.stacks.items()
            content[f"host_time{_CONTENT[dense]}"] = {name: asdict(host) for name, host in stacks}
        if len({row.dense for row in self.rows}) == 2:
            content["classes"] = {n: self._of(dense).content() for dense, n in KINDS.items()}
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
            hosts={kind: fit for kind, fit in self.hosts.items() if kind == dense},
            peers={name: own(of) for name, of in self.peers.items()},
        )

    def write(self, folder: Path) -> None:
        """``predictions.csv``, and the constants that were fitted."""
        table = predictions_table(self.rows, self.best, self.refused)
        table.to_csv(folder / "predictions.csv", index=False, float_format="%.6g")
        for dense, fit in self.hosts.items():
            fit.write(folder, mixtures=not dense)


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
    (:func:`read_servers`). Raises UserError for what cannot be read.

    Rows of servers to which the shipped constants were fitted get those that were fitted without
    them. With ``fit`` the best predictions of dense models are the cross-validated ones; rows that
    are not fitted to keep the shipped constants, and so do mixtures, of which few loads are.
    """
    rows, unread = read_servers(files, launch)
    theirs = {str(path): read_peer(path) for path in peers}
    variants = _variants(fit)
    with bench(backend, progress, say) as at:
        outcomes, refused = simulate_rows(rows, variants, at)
        answered = outcomes[BASE]
        again = redrawn(rows, variants[BASE], answered, at)
    simulated = {
        name: {id: outcome.times for id, outcome in of.items()} for name, of in outcomes.items()
    }
    off = {id: draws(one.shares) for id, one in answered.items()} | again
    without = {row.id: fitted_without(row) for row in rows if row.id in answered}
    error_of = {row.id: asdict(without[row.id].of(row)[1]) for row in rows if row.id in answered}
    unknown = _between(rows, simulated, BASE, lambda row: HALFWAY)
    shipped = _between(
        rows, simulated, FITTED, lambda row: without[row.id].apart.get(campaign_of(row), HALFWAY)
    )
    zero_fit, best = (with_bands(rows, of, off, error_of) for of in (unknown, shipped))
    scored = ScoredRows(rows, best, zero_fit, unread | refused, redrawn=len(again), peers=theirs)
    name = " and ".join(path.name for path in files)
    return _fitted(scored, simulated, off, name, progress) if fit else scored


def _fitted(
    scored: ScoredRows,
    simulated: Mapping[str, Predictions],
    off: Draws,
    file: str,
    progress: Progress,
) -> ScoredRows:
    """With constants fitted to the rows, and predictions of rows left out of the fit."""
    fits: dict[str, dict[str, ServerTimes]] = {scheme: {} for scheme in SCHEMES}
    hosts: dict[bool, HostFit] = {}
    best = dict(scored.best)
    for number, dense in enumerate(KINDS):
        linear = slopes(scored.rows, simulated, off, host_times(not dense), mixtures=not dense)
        own = {}
        for done, scheme in enumerate(SCHEMES, start=number * len(SCHEMES)):
            progress("fitting", done, 2 * len(SCHEMES))
            own[scheme] = left_out(linear, scheme)
            fits[scheme] |= own[scheme]
        if linear.rows:
            hosts[dense] = host_fit(linear, own, file)
        best |= own[CROSS_VALIDATED] if dense else {}
    progress("fitting", 1, 1)
    return replace(scored, best=best, fits=fits, hosts=hosts)


def _variants(fit: bool) -> dict[str, Variant]:
    """The scenarios that rows are simulated in: with constants measured elsewhere, with those
    shipped, and those that a ``fit`` needs; each also with clients that have drifted apart, of rows
    whose load tool is not recorded."""
    measured = host_times().measured
    hosts: dict[str, Callable[[Measured], HostConstants | None]] = {}

    def of_fit(host: HostConstants) -> Callable[[Measured], HostConstants | None]:
        return lambda row: host if fitting(row, not row.dense) else None

    def variant(host: Callable[[Measured], HostConstants | None], apart: bool) -> Variant:
        def described(row: Measured) -> dict[str, Any] | None:
            given = None if apart and not campaign_of(row) else host(row)
            return None if given is None else scenario_of(row, given, apart)

        return described

    if fit:
        hosts = {n: of_fit(host) for n, host in (grid(measured) | launching(measured)).items()}
    hosts[BASE] = lambda _: measured
    hosts[FITTED] = lambda row: None if fit and fitting(row) else fitted_without(row).of(row)[0]
    return {
        name + APART * apart: variant(host, apart)
        for apart in (False, True)
        for name, host in hosts.items()
    }


def _between(
    rows: Iterable[Measured],
    simulated: Mapping[str, Predictions],
    name: str,
    share_of: Callable[[Measured], float],
) -> dict[str, ServerTimes]:
    """A variant's times, with clients so far apart where that is not recorded."""
    found = dict(simulated[name])
    for row in rows:
        if row.id in found and (far := simulated[name + APART].get(row.id)) is not None:
            near, share = found[row.id], share_of(row)
            ttft = near.ttft_ms + share * (far.ttft_ms - near.ttft_ms)
            found[row.id] = near.at(row, ttft, near.tpot_ms + share * (far.tpot_ms - near.tpot_ms))
    return found
