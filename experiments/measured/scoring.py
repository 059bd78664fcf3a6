"""Measured servers beside predictions: how far off they are by group, and beside another's.

With ``fit`` the host's constants are fitted to other rows, and scored on those left out. A row is
then simulated three times: with the constants measured elsewhere, with a longer iteration, and
with a longer time a sequence. Between and beyond these, TTFT and TPOT are taken as linear in the
constants. So a fit needs no more simulations, however many rows it leaves out. Launching matters
only where it takes longer than the kernels: it is simulated at two values, and TTFT and TPOT are
linear between these. Mixtures of experts have constants of their own, one more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import (
    Fold,
    HostConstants,
    HostTimes,
    StackErrors,
    host_times,
)
from sarathi_sim.experiments.measured.row_runs import (
    DRAWS,
    REDRAWS,
    Draws,
    Variant,
    draws,
    kept_runs,
    plan_rows,
    redrawn,
    simulate_rows,
    stack_sigma,
    times_of,
    with_bands,
)
from sarathi_sim.experiments.measured.row_scenarios import (
    campaign_of,
    mean_prompt,
    measured_cold,
    scenario_of,
    server_of,
    stack_of,
)
from sarathi_sim.experiments.measured.servers import (
    METRICS,
    SCORED,
    Measured,
    ServerTimes,
    read_measured,
)
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.profiler.bundle.csv_cells import as_numbers, read_cells
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.simulator.loop.records import Floats, Ints

T = TypeVar("T")
FOLDS = 5
"""Parts of the servers that are left out in turn."""
FEWEST = 8
"""Rows to which constants are fitted."""
LARGEST_ERROR = float(np.log(2))
"""An error counts as a factor of two at most: requests that wait for memory would rule a fit."""
INSIDE = 0.92
"""The share of the errors that bands of 90 % shall hold: other servers, and loads that are not
fitted to, are further off."""
WIDEST = 0.6
"""The half-width of a band, as a share of the prediction, beyond which nobody can use it."""
TOO_WIDE = f"a band over {100 * WIDEST:.0f} % either way: no answer"
TPOT_WEIGHT = 2.0
PRIOR_ROWS = 2
FRONTEND_S = 0.01
"""What a frontend takes of a request where none was measured: of 10 to 60 ms, the least."""
ITERATION, SEQUENCE = "longer iteration", "longer sequence"
LAUNCHES = {"launches": 4e-5, "long launches": 1e-4}
"""Seconds of launching a call that are simulated, beside 0."""
CLIENTS, MOST_TOKENS = (4, 16, 64), 2048
"""Of the mixtures' rows that are fitted to: all would take long to simulate five times."""
BASE = "zero_fit"
CROSS_VALIDATED, ONE_GPU_OUT = "cross_validated", "leave_one_gpu_out"
FITTED = "fitted"
APART = ", apart"
"""Behind the name of a variant whose clients have drifted apart."""
UNKNOWN = 0.5
"""How far apart the clients of an unknown campaign are: from 0, in lock-step, to 1."""


# Errors by group --------------------------------------------------------------------------------


#: What rows are grouped by: the group's first word, and how a row says which one it is in.
#: Concurrencies go by the power of two up to which they lie.
GROUPS: Mapping[str, Callable[[Measured], str]] = {
    "engine": lambda row: row.backend,
    "gpu": lambda row: row.system,
    "precision": lambda row: row.precision,
    "class": lambda row: "dense" if row.dense else "mixture of experts",
    "mode": lambda row: row.mode,
    "model": lambda row: row.model,
    "concurrency": lambda row: f"<= {2 ** (row.concurrency - 1).bit_length()}",
}

MEMORY = "memory"
COLD = "measured cold"


def grouped(rows: Iterable[Measured], full: Collection[str] = ()) -> dict[str, list[Measured]]:
    """Rows by group. ``all`` holds those without flags, and so do the groups of :data:`GROUPS`;
    those with flags are in ``flagged``, and nowhere else. ``full`` are the ids of those whose KV
    cache was full: where requests wait for memory, TTFT is a matter of its size. Those that were
    ``measured cold`` are such a group, too."""
    found: dict[str, list[Measured]] = {"all": []}
    for row in rows:
        names = ["all", *(f"{word} {of(row)}" for word, of in GROUPS.items())]
        if full:
            names.append(f"{MEMORY} {'full' if row.id in full else 'not full'}")
        if measured_cold(row):
            names.append(COLD)
        for name in ["flagged"] if row.flags else names:
            found.setdefault(name, []).append(row)
    order = ["all", *GROUPS, MEMORY, COLD, "flagged"]

    def place(name: str) -> tuple[int, int, str]:
        word, _, which = (name, "", "") if name in order else name.partition(" ")
        number = int(which.removeprefix("<= ")) if word == "concurrency" else 0
        return order.index(word), number, which

    return {name: found[name] for name in sorted(found, key=place)}


Errors = dict[str, float | None]


def errors(
    rows: Iterable[Measured], predictions: Mapping[str, ServerTimes], metric: str
) -> Errors | None:
    """Of the rows where one of :data:`SCORED` was measured and predicted, in percent of what was
    measured; None where there is no such row.

    ``mape``, ``median`` and ``p90`` are of absolute errors; ``bias`` is the mean signed one, so
    positive where predictions are too slow. ``coverage`` is the share of measured values inside the
    predicted bands, in percent, and ``interval_score`` the mean width of these plus 20 times what
    they miss by (for bands of 90 %); None where no prediction has one. ``coverage_pm`` is the half
    width of the coverage's 95 % interval, with servers (not their rows) as independent; None for
    fewer than two.
    """
    pairs = [
        (value, given, times.bands.get(metric), server_of(row))
        for row, times in ((row, predictions[row.id]) for row in rows if row.id in predictions)
        if (value := row.of(metric)) is not None and (given := times.of(row, metric)) is not None
    ]
    if not pairs:
        return None
    off = np.array([100 * (predicted / measured - 1) for measured, predicted, *_ in pairs])
    ends = np.array([[measured, *band] for measured, _, band, _ in pairs if band is not None])
    measured, low, high = ends.reshape(-1, 3).T
    missed = np.maximum(np.maximum(low - measured, measured - high), 0)
    inside = pd.Series((missed == 0) - np.mean(missed == 0) if len(ends) else [], dtype=float)
    by_server = inside.groupby([server for *_, band, server in pairs if band is not None]).sum()
    return {
        "mape": float(np.abs(off).mean()),
        "median": float(np.median(np.abs(off))),
        "p90": float(np.quantile(np.abs(off), 0.9)),
        "bias": float(off.mean()),
        "coverage": 100 * float(np.mean(missed == 0)) if len(ends) else None,
        "coverage_pm": 196 * float(np.sqrt((by_server**2).sum())) / len(ends)
        if len(by_server) > 1
        else None,
        "interval_score": 100 * float(np.mean((high - low + 20 * missed) / measured))
        if len(ends)
        else None,
    }


def too_wide(times: ServerTimes) -> bool:
    """Whether the band of TTFT or TPOT is wider than :data:`WIDEST` either way: this is no answer,
    but counts in errors and coverage."""
    bands = ((times.bands.get(name, _NO_BAND), getattr(times, SCORED[name])) for name in METRICS)
    return any(high - low > 2 * WIDEST * value for (low, high), value in bands)


_NO_BAND = (np.nan, np.nan)
_PREDICTED = [*SCORED.values(), *(f"{n}_{end}" for n in SCORED.values() for end in ("low", "high"))]
_OF_KEY = {
    "cluster.tp": "tp that the model, or a node, cannot have",
    "kv_cache": "no room for a KV cache beside the weights",
    "stack": "kernels that were not measured",
}
"""Why a configuration is refused, by the key that its message begins with."""
_VALUE = re.compile(r"value ('[^']*'|\"[^\"]*\"|[^:]*): ")
"""What rows that are refused for one reason differ in."""
_PEER_COLUMNS = (("ttft_ms", "tpot_ms"), ("predicted_ttft_ms", "predicted_tpot_ms"))


def read_peer(path: Path) -> dict[str, ServerTimes]:
    """Another predictor's file: ``id``, and ``ttft_ms, tpot_ms`` (as this program's
    ``predictions.csv`` has them) or the same with ``predicted_`` before. Rows without both numbers
    are left out. Raises ConfigError for a file that is no such table.
    """
    cells = read_cells(path)
    for both in _PEER_COLUMNS:
        if {"id", *both} <= set(cells.columns):
            columns = (as_numbers(cells[name]).tolist() for name in both)
            found = zip(cells["id"].astype(str), zip(*columns, strict=True), strict=True)
            return {
                name: ServerTimes(*pair)
                for name, pair in found
                if all(0 < x < math.inf for x in pair)
            }
    raise ConfigError(f"{path}: needs the columns id, ttft_ms and tpot_ms")


def short_reason(message: str) -> str:
    """A refusal in a few words, the same for rows alike; ``message`` is all of it."""
    text = message.partition("\n")[0]
    key = text.partition(": ")[0]
    if key in _OF_KEY:
        return _OF_KEY[key]
    return _VALUE.sub("", text, count=1).partition(";")[0]


def of_groups(
    groups: Mapping[str, Sequence[Measured]], predictions: Mapping[str, ServerTimes]
) -> dict[str, Any]:
    """Answered rows and errors of each group."""
    return {
        name: {"n": sum(row.id in predictions for row in group), **of_group(group, predictions)}
        for name, group in groups.items()
    }


def of_group(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes]
) -> dict[str, Errors | None]:
    """Errors by metric; None where no row has a prediction, or was measured for it."""
    return {metric: errors(rows, predictions, metric) for metric in SCORED}


def predictions_table(
    rows: Sequence[Measured], predictions: Mapping[str, ServerTimes], refused: Mapping[str, str]
) -> pd.DataFrame:
    """A row for each measured one, in their order: id, all that is predicted, the ends of its
    bands, reason and detail. Rows that could not be read come last."""
    by_id = {row.id: row for row in rows}
    table: list[dict[str, Any]] = []
    for id in dict.fromkeys([*by_id, *refused]):
        line: dict[str, Any] = dict.fromkeys(_PREDICTED, np.nan)
        line |= {"id": id, "reason": "", "detail": ""}
        if (times := predictions.get(id)) is not None:
            for metric, name in SCORED.items():
                line[name] = times.of(by_id[id], metric)
                line[f"{name}_low"], line[f"{name}_high"] = times.bands.get(metric, _NO_BAND)
            if too_wide(times):
                line |= {"reason": TOO_WIDE, "detail": TOO_WIDE}
        elif id in refused:
            line |= {"reason": short_reason(refused[id]), "detail": " ".join(refused[id].split())}
        table.append(line)
    return pd.DataFrame(table, columns=["id", *_PREDICTED, "reason", "detail"])


# Fits of the host's constants --------------------------------------------------------------------


def grid(measured: HostConstants) -> dict[str, HostConstants]:
    """The constants that each row is simulated with."""
    return {
        BASE: measured,
        ITERATION: replace(measured, host_iteration_s=measured.host_iteration_s + 5e-4),
        SEQUENCE: replace(measured, host_sequence_s=measured.host_sequence_s + 3e-5),
    }


def launching(measured: HostConstants) -> dict[str, HostConstants]:
    """Those that it is simulated with on top."""
    return {name: replace(measured, launch_s=seconds) for name, seconds in LAUNCHES.items()}


def fitting(row: Measured, mixtures: bool = False) -> bool:
    """Whether a row is fitted to, with the dense models or with the ``mixtures``; none with
    flags, none that was measured cold."""
    short = row.concurrency in CLIENTS and row.osl <= MOST_TOKENS
    kept = not row.flags and not measured_cold(row)
    return row.dense != mixtures and kept and (row.dense or short)


@dataclass(frozen=True, eq=False)
class Slopes:
    """Rows, and their times in ms as linear functions of the constants; ``times`` has shape
    (metric, row, 1 + constants). ``launched`` is what the :data:`LAUNCHES` add, (metric, row,
    launches), without any 0. ``apart`` are these with clients that have drifted apart."""

    rows: Sequence[Measured]
    times: Floats
    launched: Floats
    measured_ms: Floats
    draws: Draws
    base: Sequence[ServerTimes]
    limits: HostTimes
    apart: Slopes | None = None

    @property
    def names(self) -> list[str]:
        """The constants that are fitted."""
        return [one.name for one in fields(HostConstants) if one.name in self.limits.constants]

    def predicted(self, which: Ints, host: HostConstants) -> Floats:
        """(metric, row), in ms."""
        linear = self.times[:, which] @ np.array([1.0, *asdict(host).values()][:-1])
        return np.asarray(linear + self.launched[:, which] @ _between_launches(host.launch_s))

    def fitted(self, which: Ints) -> HostConstants:
        """The constants with the least absolute errors of the logarithms, within their ranges.
        Those measured elsewhere weigh as much as :data:`PRIOR_ROWS` rows, so that what the rows do
        not tell stays there."""
        from scipy.optimize import minimize

        names = self.names
        bounds = np.array([self.limits.constants[name].range for name in names])
        unit = bounds[:, 1]
        elsewhere = replace(self.limits.measured, frontend_s=FRONTEND_S)
        prior = np.minimum([getattr(elsewhere, name) for name in names] / unit, 1.0)

        def host_of(values: Floats) -> HostConstants:
            return HostConstants(**dict(zip(names, (values * unit).tolist(), strict=True)))

        tried = [
            minimize(
                lambda values: (
                    self.loss(which, host_of(values))
                    + PRIOR_ROWS / len(which) * float(np.abs(values - prior).mean())
                ),
                start,
                method="Powell",
                bounds=bounds / unit[:, None],
            )
            for start in (prior, np.full(len(names), 0.5))
        ]
        best = min(tried, key=lambda one: one.fun).x
        return _rounded(np.array([*asdict(host_of(best)).values()]))

    def loss(self, which: Ints, host: HostConstants) -> float:
        """The mean absolute logarithm of TTFT's errors and, with more weight, TPOT's."""
        found = np.maximum(self.predicted(which, host), 1e-6)
        off = np.abs(np.log(found / self.measured_ms[:, which]))
        ttft, tpot = np.minimum(off, LARGEST_ERROR).mean(axis=1)
        return float(ttft + TPOT_WEIGHT * tpot)

    def mixed(self, shares: Mapping[str, float]) -> Slopes:
        """With the clients of each campaign so far apart."""
        if self.apart is None:
            return self
        share = np.array([shares.get(campaign_of(row), 0.0) for row in self.rows])[:, None]
        times = self.times + share * (self.apart.times - self.times)
        launched = self.launched + share * (self.apart.launched - self.launched)
        return replace(self, times=times, launched=launched)

    def shares(self, which: Ints) -> dict[str, float]:
        """How far apart the clients of each campaign are, so that the rows ``which`` are predicted
        best with constants of their own."""
        found: dict[str, float] = {}
        if self.apart is None:
            return found
        campaigns = np.array([campaign_of(self.rows[row]) for row in which])
        for campaign in filter(None, np.unique(campaigns)):
            own = which[campaigns == campaign]
            stacks = [rows for _, rows in _by_stack(self.rows, own) if len(rows) >= FEWEST]
            tried = {share: self.mixed({campaign: share}) for share in (UNKNOWN, 0.0, 1.0)}
            losses = {
                share: sum(len(rows) * one.loss(rows, one.fitted(rows)) for rows in stacks)
                for share, one in tried.items()
            }
            found[str(campaign)] = min(losses, key=losses.__getitem__)
        return found

    def settled(self, which: Ints) -> Slopes:
        """With clients as far apart as the rows ``which`` say; halfway where they say nothing."""
        unknown = dict.fromkeys(map(campaign_of, self.rows), UNKNOWN)
        return self.mixed(unknown | self.shares(which))

    def host_of(self, which: Ints, stack: str) -> HostConstants:
        """A stack's constants by the rows ``which``: fitted to its own, where there are enough. Of
        any other stack they are the median of those of all stacks there and of those measured
        elsewhere."""
        own = {name: rows for name, rows in _by_stack(self.rows, which) if self._enough(rows)}
        if stack in own:
            return self.fitted(own[stack])
        known = [self.limits.measured, *map(self.fitted, own.values())]
        return _rounded(np.median([[*asdict(host).values()] for host in known], axis=0))

    def _enough(self, which: Ints) -> bool:
        """A server says something of two constants."""
        servers = {server_of(self.rows[row]) for row in which}
        return len(which) >= FEWEST and len(servers) >= len(self.names) // 2

    def sigmas(self, which: Ints, predicted: Floats) -> StackErrors:
        """The stack's own error by metric, from rows predicted without being fitted to."""
        found = []
        for number, metric in enumerate(METRICS):
            off = np.log(self.measured_ms[number, which] / predicted[number])
            known = [self.draws[self.rows[row].id][metric] for row in which]
            found.append(round(stack_sigma(off, known, INSIDE), 4))
        return StackErrors(*found)


def _rounded(values: Floats) -> HostConstants:
    return HostConstants(*values.round(7).tolist())


def _between_launches(launch_s: float) -> Floats:
    """The weights of :data:`LAUNCHES` between which ``launch_s`` lies; beyond them the last two
    go on."""
    short, long = LAUNCHES.values()
    if launch_s <= short:
        return np.array([launch_s / short, 0.0])
    share = (launch_s - short) / (long - short)
    return np.array([1 - share, share])


def slopes(
    rows: Sequence[Measured],
    simulated: Mapping[str, Mapping[str, ServerTimes]],
    draws: Draws,
    limits: HostTimes,
    mixtures: bool = False,
) -> Slopes:
    """From the simulations with :func:`grid` (and :func:`launching`, where there are such), of the
    rows that are answered and :func:`fitting`; also with clients that have drifted apart."""
    if BASE + APART in simulated:
        near = {name: of for name, of in simulated.items() if not name.endswith(APART)}
        far = {name: {**of, **simulated.get(name + APART, {})} for name, of in near.items()}
        found = slopes(rows, near, draws, limits, mixtures)
        return replace(found, apart=slopes(rows, far, draws, limits, mixtures))
    launches = [name for name in LAUNCHES if name in simulated]
    rows = [row for row in rows if row.id in simulated[BASE] and fitting(row, mixtures)]
    hosts = grid(limits.measured)
    base = limits.measured
    table = {
        name: _ms([simulated[name][row.id] for row in rows])
        for name in (BASE, ITERATION, SEQUENCE, *launches)
    }
    iteration, sequence = (
        (table[name] - table[BASE]) / (getattr(hosts[name], of) - getattr(base, of))
        for name, of in ((ITERATION, "host_iteration_s"), (SEQUENCE, "host_sequence_s"))
    )
    frontend = np.broadcast_to([1000.0, 0.0], table[BASE].shape)
    prompt = np.array([mean_prompt(row) for row in rows]).reshape(-1, 1)
    parts = (iteration, sequence, frontend, prompt * frontend)
    start = table[BASE] - sum(
        slope * value for slope, value in zip(parts, asdict(base).values(), strict=False)
    )
    times = np.stack([start, *parts], axis=-1).transpose(1, 0, 2)
    none = np.zeros_like(table[BASE])
    launched = [table[n] - table[BASE] if n in table else none for n in LAUNCHES]
    extra = np.stack(launched, axis=-1).transpose(1, 0, 2)
    zero_fit = [simulated[BASE][row.id] for row in rows]
    return Slopes(rows, times, extra, _ms(rows).T, draws, zero_fit, limits)


def _ms(times: Iterable[ServerTimes | Measured]) -> Floats:
    """TTFT and TPOT, shape (rows, 2)."""
    return np.array([[one.ttft_ms, one.tpot_ms] for one in times]).reshape(-1, 2)


def alike(rows: Sequence[Measured], which: Ints, stack: str) -> Ints:
    """Of the rows ``which``, those that say most of a stack's errors: its own, or all."""
    own = dict(_by_stack(rows, which)).get(stack, which)
    return own if len(own) >= FEWEST else which


#: What is left out together: the name of the scheme, and how a row says which part it is in.
SCHEMES: Mapping[str, Callable[[Measured], str]] = {
    CROSS_VALIDATED: server_of,
    "leave_one_stack_out": stack_of,
    ONE_GPU_OUT: lambda row: row.system,
    "leave_one_model_out": lambda row: row.model,
    "leave_one_triple_out": lambda row: f"{row.model}, {row.system}, {row.backend}",
}


def parts(rows: Sequence[Measured], scheme: str) -> list[tuple[Ints, Ints]]:
    """(fitted to, left out) of each part. Of servers a fifth at a time are left out, of all else
    one. Nothing is left out where there is but one group."""
    from sklearn.model_selection import GroupKFold  # takes a second to import

    groups = [SCHEMES[scheme](row) for row in rows]
    count = len(set(groups))
    if count < 2:
        return []
    splits = GroupKFold(min(FOLDS, count) if SCHEMES[scheme] is server_of else count)
    return list(splits.split(np.zeros(len(rows)), groups=groups))


def left_out(found: Slopes, scheme: str) -> dict[str, ServerTimes]:
    """Predictions with bands of every row, by constants and stack errors from other rows alone."""
    predicted = np.full(found.measured_ms.shape, np.nan)
    split = parts(found.rows, scheme)
    for _, out in split:
        fit_to = np.setdiff1d(np.arange(len(found.rows)), out)
        settled = found.settled(fit_to)
        for stack, which in _by_stack(found.rows, out):
            predicted[:, which] = settled.predicted(which, settled.host_of(fit_to, stack))
    sigma: dict[str, dict[str, float]] = {}
    for fit_to, out in split:
        for stack, which in _by_stack(found.rows, out):
            near = alike(found.rows, fit_to, stack)
            errors = asdict(found.sigmas(near, predicted[:, near]))
            sigma |= {found.rows[row].id: errors for row in which}
    times = {
        row.id: _instead(base, row, float(ttft), float(tpot))
        for row, ttft, tpot, base in zip(found.rows, *predicted, found.base, strict=True)
        if row.id in sigma
    }
    return with_bands(found.rows, times, found.draws, sigma)


def _instead(base: ServerTimes, row: Measured, ttft_ms: float, tpot_ms: float) -> ServerTimes:
    """With other times; in a closed loop throughput goes as one over the latency."""
    rate = base.output_tokens_per_s
    if rate is not None:
        was, now = row.latency_of(base.ttft_ms, base.tpot_ms), row.latency_of(ttft_ms, tpot_ms)
        rate *= was / now
    return replace(base, ttft_ms=ttft_ms, tpot_ms=tpot_ms, output_tokens_per_s=rate)


def _by_stack(rows: Sequence[Measured], which: Ints) -> Iterable[tuple[str, Ints]]:
    names = np.array([stack_of(rows[row]) for row in which])
    return ((str(name), which[names == name]) for name in np.unique(names))


def names(rows: Sequence[Measured]) -> list[str]:
    """The stacks and engines among the rows."""
    return sorted({stack_of(row) for row in rows} | {row.backend for row in rows})


def constants(found: Slopes, which: Ints) -> dict[str, HostConstants]:
    """Of every stack and engine among the rows, fitted to ``which`` of them."""
    settled = found.settled(which)
    return {name: settled.host_of(which, name) for name in names(found.rows)}


# A score ----------------------------------------------------------------------------------------


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


def score_servers(
    files: Sequence[Path],
    peers: Sequence[Path],
    backend: Backend,
    progress: Progress,
    say: Say,
    *,
    fit: bool = False,
) -> ScoredRows:
    """Simulate the rows of files, with the shipped constants or those that ``fit`` finds for rows
    left out; ``peers`` are other predictors' files. Raises ConfigError for what cannot be read.

    Rows of servers to which the shipped constants were fitted get those that were fitted without
    them. With ``fit`` the best predictions are the cross-validated ones; rows that are not fitted
    to keep the shipped constants.
    """
    rows, unread = read_rows(files)
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
    fits = {scheme: left_out(found, scheme) for scheme in SCHEMES}
    of_mixtures = {scheme: left_out(mixed, scheme) for scheme in SCHEMES}
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
            found[row.id] = _instead(near, row, ttft, tpot)
    return found


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
    note = f"fitted to {len(found.rows)} {kind} rows of {count} servers of {file}"
    if ttft is not None and tpot is not None:
        off = f"TTFT is off by {ttft['mape']:.1f} % and TPOT by {tpot['mape']:.1f} %"
        note += f"; on servers left out mean {off}"
    folds = [
        Fold(
            sorted({server_of(found.rows[row]) for row in out}),
            constants(found, fit_to),
            _errors(found, fits[CROSS_VALIDATED], fit_to),
            found.shares(fit_to),
        )
        for fit_to, out in parts(found.rows, CROSS_VALIDATED)
    ]
    every = np.arange(len(found.rows))
    elsewhere = fits[ONE_GPU_OUT] or fits[CROSS_VALIDATED]
    errors_apart = _errors(found, elsewhere, every) if elsewhere else {}
    stacks, shares = constants(found, every), found.shares(every)
    return replace(
        known, fitted_to=note, stacks=stacks, errors=errors_apart, folds=folds, apart=shares
    )


def _errors(
    found: Slopes, predictions: Mapping[str, ServerTimes], which: Any
) -> dict[str, StackErrors]:
    predicted = _ms([predictions[row.id] for row in found.rows]).T
    near = {name: alike(found.rows, which, name) for name in names(found.rows)}
    return {name: found.sigmas(rows, predicted[:, rows]) for name, rows in near.items()}


def host_time_yaml(shipped: HostTimes) -> str:
    """The text of ``data/host_time.yaml``."""
    return dump_yaml(asdict(shipped), width=96)
