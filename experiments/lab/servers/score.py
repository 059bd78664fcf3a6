"""A score: the rows of measured servers simulated, their errors, and with ``fit`` the host's
constants fitted to other rows (``host.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.storage.child import Progress, Say
from ...config.inputs import HostConstants, host_times
from ...sweeps.backends import Backend
from . import errors, host, runs
from .host import APART, BASE, SCHEMES, TRIPLE_OUT, HostFit, fitting
from .rows import Measured, Predictions, ServerTimes, read_servers
from .runs import Variant, with_bands
from .scenarios import Settings, campaign_of, scenario_of

FITTED = "fitted"
KINDS = {True: "dense", False: "mixtures"}
"""By a row's ``dense``."""
_CONTENT = {True: "", False: "_of_mixtures"}


@dataclass(frozen=True)
class ScoredRows:
    """Predictions by id: ``best`` is what is scored, ``zero_fit`` has no constant fitted to such
    rows; ``refused`` says why others have none. ``fits`` are those by scheme and ``hosts`` the
    constants by ``dense``, fitted here; ``peers`` are other predictors'. So many rows were
    simulated again for their bands (``redrawn``)."""

    rows: Sequence[Measured]
    best: Predictions
    zero_fit: Predictions
    refused: Mapping[str, str]
    fits: Mapping[str, Predictions] = field(default_factory=dict)
    hosts: Mapping[bool, HostFit] = field(default_factory=dict)
    redrawn: int = 0
    peers: Mapping[str, Predictions] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it; percentages. Beside other predictors those of rows that
        both answer; ``classes`` has the same of dense models and of mixtures."""
        best, known = self.best, {row.id: row for row in self.rows}
        answered = {id: best[id] for id in known if id in best}
        wide = sum(map(errors.too_wide, answered.values()))
        groups = errors.grouped(self.rows, {id for id, times in answered.items() if times.kv_full})
        content: dict[str, Any] = {
            "rows": len(self.rows) + sum(name not in known for name in self.refused),
            "answered": len(answered) - wide,
            "too_wide": wide,
            "groups": errors.of_groups(groups, best),
            "refused": dict(Counter(map(errors.short_reason, self.refused.values())).most_common()),
        }
        for peer, theirs in self.peers.items():
            both = best.keys() & theirs.keys()
            sides = {"ours": best, "theirs": theirs, TRIPLE_OUT: self.fits.get(TRIPLE_OUT, {})}
            found = {
                side: errors.of_groups(groups, {id: of[id] for id in both & of.keys()})
                for side, of in sides.items()
            }
            beside = {
                name: {"n": one["n"], **{side: of[name] for side, of in found.items()}}
                for name, one in found["theirs"].items()
            }
            content.setdefault("peers", {})[peer] = {"groups": beside}
        classes = {row.dense for row in self.rows}
        hosts = {dense: fit for dense, fit in self.hosts.items() if dense in classes}
        for dense, name in _CONTENT.items():
            times = hosts[dense].times if dense in hosts else host_times(not dense)
            content[f"constants{name}"] = times.fitted_to
        variants = {BASE: self.zero_fit, **self.fits}
        content["variants"] = {name: errors.of_groups(groups, of) for name, of in variants.items()}
        redrawn = {"rows": self.redrawn, "draws": runs.REDRAWS}
        content["bands"] = {"draws": runs.DRAWS, "redrawn": redrawn}
        for dense, fit in hosts.items():
            content[f"host_time{_CONTENT[dense]}"] = asdict(fit.times)["stacks"]
        for dense, kind in KINDS.items() if len(classes) == 2 else ():
            own = [row for row in self.rows if row.dense == dense]
            refused = {row.id: self.refused[row.id] for row in own if row.id in self.refused}
            part = replace(self, rows=own, refused=refused)
            content.setdefault("classes", {})[kind] = part.content()
        return content

    def write(self, folder: Path) -> None:
        """``predictions.csv``, and the constants that were fitted."""
        table = errors.predictions_table(self.rows, self.best, self.refused)
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
    """Simulate the rows of files with the shipped constants that were fitted without their server;
    ``peers`` are other predictors' files, ``launch`` is a launch list (:func:`read_servers`).
    Raises UserError for what cannot be read.

    With ``fit`` the best predictions of dense models are cross-validated; rows that are not fitted
    to keep the shipped constants, and so do mixtures, of which few loads are.
    """
    rows, unread = read_servers(files, launch)
    theirs = {str(path): errors.read_peer(path) for path in peers}
    variants = _variants(fit)
    with runs.bench(backend, progress, say) as at:
        outcomes, refused = runs.simulate_rows(rows, variants, at)
        answered = outcomes[BASE]
        again = runs.redrawn(rows, variants[BASE], answered, at)
    simulated = {name: {id: one.times for id, one in of.items()} for name, of in outcomes.items()}
    off = {id: runs.draws(one.shares) for id, one in answered.items()} | again
    folds = {row.id: (row, host.fitted_without(row)) for row in rows if row.id in answered}
    error_of = {id: asdict(fold.of(row)[1]) for id, (row, fold) in folds.items()}
    halfway = host.HALFWAY
    known = {id: fold.apart.get(campaign_of(row), halfway) for id, (row, fold) in folds.items()}
    unknown = dict.fromkeys(known, halfway)
    zero_fit, best = (
        with_bands(rows, _between(rows, simulated, name, shares), off, error_of)
        for name, shares in ((BASE, unknown), (FITTED, known))
    )
    scored = ScoredRows(rows, best, zero_fit, unread | refused, redrawn=len(again), peers=theirs)
    if not fit:
        return scored
    name = " and ".join(path.name for path in files)
    fits: dict[str, dict[str, ServerTimes]] = {scheme: {} for scheme in SCHEMES}
    hosts: dict[bool, HostFit] = {}
    for number, dense in enumerate(KINDS):
        linear = host.slopes(rows, simulated, off, host_times(not dense), mixtures=not dense)
        own = {}
        for done, scheme in enumerate(SCHEMES, start=number * len(SCHEMES)):
            progress("fitting", done, 2 * len(SCHEMES))
            own[scheme] = host.left_out(linear, scheme)
            fits[scheme] |= own[scheme]
        if linear.rows:
            hosts[dense] = host.host_fit(linear, own, name)
        best |= own[host.CROSS_VALIDATED] if dense else {}
    progress("fitting", 1, 1)
    return replace(scored, best=best, fits=fits, hosts=hosts)


def _variants(fit: bool) -> dict[str, Variant]:
    """The scenarios of rows: with constants measured elsewhere, those shipped, and those that a
    ``fit`` needs; each also with clients apart, where the load tool is not recorded."""
    measured = host_times().measured
    fixed = host.grid(measured) if fit else {BASE: measured}

    def constants(name: str, row: Measured) -> HostConstants | None:
        if name == FITTED:
            shipped = not (fit and fitting(row))
            return host.fitted_without(row).of(row)[0] if shipped else None
        return fixed[name] if name == BASE or fitting(row, not row.dense) else None

    def described(name: str, apart: bool, row: Measured) -> Settings | None:
        known = None if apart and not campaign_of(row) else constants(name, row)
        return None if known is None else scenario_of(row, known, apart)

    return {
        name + APART * apart: partial(described, name, apart)
        for apart in (False, True)
        for name in (*fixed, FITTED)
    }


def _between(
    rows: Iterable[Measured],
    simulated: Mapping[str, Predictions],
    name: str,
    shares: Mapping[str, float],
) -> dict[str, ServerTimes]:
    """A variant's times, with clients so far apart where that is not recorded."""
    found = dict(simulated[name])
    for row in rows:
        if row.id in found and (far := simulated[name + APART].get(row.id)) is not None:
            near, share = found[row.id], shares[row.id]
            ttft = near.ttft_ms + share * (far.ttft_ms - near.ttft_ms)
            found[row.id] = near.at(
                row,
                ttft,
                near.tpot_ms + share * (far.tpot_ms - near.tpot_ms),
            )
    return found
