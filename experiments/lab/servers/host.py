"""The host's constants fitted to measured servers, and predictions of rows left out of the fit.

A row is simulated with the constants measured elsewhere, with a longer iteration, with a longer
time a sequence, and with two times of launching a call. TTFT and TPOT are linear between and beyond
these, so a fit needs no more simulations. Mixtures of experts have constants of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, load_shipped
from sarathi_sim.profiler.storage.strict import strict_dataclass
from sarathi_sim.simulator.loop.records import Floats, Ints
from ...config.inputs import HostConstants, HostTimes, StackErrors, host_times
from .errors import errors
from .rows import METRICS, Measured, Predictions, ServerTimes
from .runs import Draws, stack_sigma, with_bands
from .scenarios import campaign_of, mean_prompt, measured_cold, server_of, stack_of

PARTS = 5
"""Parts of the servers that are left out in turn."""
FEWEST = 8
"""Rows to which constants are fitted."""
LARGEST_ERROR = float(np.log(2))
"""An error counts as a factor of two at most: requests that wait for memory would rule a fit."""
INSIDE = 0.92
"""The share of the errors that bands of 90 % shall hold: other servers, and loads that are not
fitted to, are further off."""
TPOT_WEIGHT = 2.0
PRIOR_ROWS = 2
"""So many rows weighs what was measured elsewhere, in each fit."""
FRONTEND_S = 0.01
"""What a frontend takes of a request, before any row is seen: assumed."""
MOST_HANDSHAKE_S = 0.5
"""The most that a request takes before its prefill in SGLang's pools, whose workers shake hands
first (docs/model/pools.md); it is fitted as the frontend's time."""
ITERATION, SEQUENCE = "longer iteration", "longer sequence"
LAUNCHES = {"launches": 4e-5, "long launches": 1e-4}
"""Seconds of launching a call that are simulated, beside 0."""
CLIENTS, MOST_TOKENS = (4, 16, 64), 2048
"""Of the mixtures' rows that are fitted to: all would take long to simulate five times. Of rows
with pools those with up to as many clients as the most."""
_FILES = {False: "host_time", True: "host_time_mixtures"}
BASE = "zero_fit"
APART = ", apart"
"""Behind the name of a variant whose clients have drifted apart."""
HALFWAY = 0.5
"""How far apart the clients of an unknown campaign are: from 0, in lock-step, to 1."""
CROSS_VALIDATED, ONE_GPU_OUT = "cross_validated", "leave_one_gpu_out"
ONE_MODEL_OUT, TRIPLE_OUT = "leave_one_model_out", "leave_one_triple_out"
#: What is left out together: the name of the scheme, and how a row says which part it is in.
SCHEMES: Mapping[str, Callable[[Measured], str]] = {
    CROSS_VALIDATED: server_of,
    "leave_one_stack_out": stack_of,
    ONE_GPU_OUT: lambda row: row.system,
    ONE_MODEL_OUT: lambda row: row.model,
    TRIPLE_OUT: lambda row: f"{row.model}, {row.system}, {row.backend}",
}


@strict_dataclass
class Fold:
    """The constants by stack that were fitted without some ``servers``. ``apart`` says how far the
    clients of campaigns are spread (from 0, in lock-step, to 1)."""

    servers: list[str]
    stacks: dict[str, HostConstants]
    errors: dict[str, StackErrors]
    apart: dict[str, float] = field(default_factory=dict)

    def of(self, row: Measured) -> tuple[HostConstants, StackErrors]:
        """The constants and errors of a row's stack; of an unknown one those of its engine."""
        stack = stack_of(row)
        known = stack if stack in self.stacks else stack.partition(" ")[0]
        return self.stacks[known], self.errors[known]


@strict_dataclass
class Folds:
    """``data/lab/host_time*_folds.yaml``: the constants without a part of the servers each."""

    folds: list[Fold]


@cache
def shipped_folds(mixtures: bool = False) -> list[Fold]:
    """Of dense models, or of ``mixtures`` of experts."""
    return load_shipped(Folds, f"lab/{_FILES[mixtures]}_folds.yaml").folds


def fitted_without(row: Measured) -> Fold:
    """The shipped constants that were fitted without the row's server."""
    known, server = host_times(not row.dense), server_of(row)
    whole = Fold([], known.stacks, known.errors, known.apart)
    return next((f for f in shipped_folds(not row.dense) if server in f.servers), whole)


def grid(measured: HostConstants) -> dict[str, HostConstants]:
    """The constants that each row is simulated with."""
    longer_s, sequence_s = measured.host_iteration_s + 5e-4, measured.host_sequence_s + 3e-5
    return {
        BASE: measured,
        ITERATION: replace(measured, host_iteration_s=longer_s),
        SEQUENCE: replace(measured, host_sequence_s=sequence_s),
        **{name: replace(measured, launch_s=seconds) for name, seconds in LAUNCHES.items()},
    }


def fitting(row: Measured, mixtures: bool = False) -> bool:
    """Whether a row is fitted to, with the dense models or with the ``mixtures``."""
    if row.dense == mixtures or row.flags or row.drafts or measured_cold(row):
        return False
    some = row.concurrency in CLIENTS if row.launch is None else row.concurrency <= max(CLIENTS)
    return row.dense or (some and row.osl <= MOST_TOKENS)


@dataclass(frozen=True, eq=False)
class Slopes:
    """Rows, and their times in ms as linear functions of the constants, shape (metric, row, 1 +
    constants). ``launched`` is what the :data:`LAUNCHES` add, (metric, row, launches). ``apart``
    are both with clients that have drifted apart. ``fits`` are the constants of rows so far:
    several schemes leave out the same ones."""

    rows: Sequence[Measured]
    times: Floats
    launched: Floats
    measured_ms: Floats
    draws: Draws
    base: Sequence[ServerTimes]
    limits: HostTimes
    apart: Sequence[Floats]
    fits: dict[Any, HostConstants] = field(default_factory=dict)

    @property
    def every(self) -> Ints:
        """The numbers of all rows."""
        return np.arange(len(self.rows))

    def predicted(self, which: Ints, host: HostConstants) -> Floats:
        """(metric, row), in ms."""
        linear = self.times[:, which] @ np.array([1.0, *astuple(host)][:-1])
        short, long = LAUNCHES.values()
        share = (host.launch_s - short) / (long - short)  # beyond the last two they go on
        weights = [1 - share, share] if share > 0 else [host.launch_s / short, 0.0]
        return np.asarray(linear + self.launched[:, which] @ np.array(weights))

    def fitted(self, which: Ints) -> HostConstants:
        """The constants with the least absolute errors of the logarithms, within their ranges.
        Those measured elsewhere weigh as much as :data:`PRIOR_ROWS` rows, so that what the rows do
        not tell stays there."""
        from scipy.optimize import minimize

        inputs = (self.times, self.launched, self.measured_ms)
        key = (repr(self.limits.constants), *(each[:, which].tobytes() for each in inputs))
        if key in self.fits:
            return self.fits[key]
        names = [*self.limits.constants]
        bounds = np.array([self.limits.constants[name].range for name in names])
        if all(self.rows[row].launch and self.rows[row].backend == "sglang" for row in which):
            bounds[names.index("frontend_s"), 1] = MOST_HANDSHAKE_S
        unit = bounds[:, 1]
        elsewhere = replace(self.limits.measured, frontend_s=FRONTEND_S)
        prior = np.minimum([getattr(elsewhere, name) for name in names] / unit, 1.0)

        def host_of(values: Floats) -> HostConstants:
            return HostConstants(**dict(zip(names, (values * unit).tolist(), strict=True)))

        def cost(values: Floats) -> float:
            far = PRIOR_ROWS / len(which) * float(np.abs(values - prior).mean())
            return self.loss(which, host_of(values)) + far

        limits = bounds / unit[:, None]
        starts = (prior, np.full(len(names), 0.5))
        tried = [minimize(cost, start, method="Powell", bounds=limits) for start in starts]
        best = host_of(min(tried, key=lambda one: one.fun).x)
        return self.fits.setdefault(key, _rounded(astuple(best)))

    def loss(self, which: Ints, host: HostConstants) -> float:
        """The mean absolute logarithm of TTFT's errors and, with more weight, TPOT's."""
        predicted = np.maximum(self.predicted(which, host), 1e-6)
        off = np.abs(np.log(predicted / self.measured_ms[:, which]))
        ttft, tpot = np.minimum(off, LARGEST_ERROR).mean(axis=1)
        return float(ttft + TPOT_WEIGHT * tpot)

    def drifted(self, shares: Mapping[str, float]) -> Slopes:
        """With the clients of each campaign so far apart."""
        share = np.array([shares.get(campaign_of(row), 0.0) for row in self.rows])[:, None]
        ends = zip((self.times, self.launched), self.apart, strict=True)
        times, launched = (near + share * (far - near) for near, far in ends)
        return replace(self, times=times, launched=launched)

    def shares(self, which: Ints) -> dict[str, float]:
        """How far apart clients are by campaign, for the best predictions of the rows ``which``."""
        found: dict[str, float] = {}
        campaigns = np.array([campaign_of(self.rows[row]) for row in which])
        for campaign in filter(None, np.unique(campaigns)):
            own = which[campaigns == campaign]
            stacks = [rows for rows in self.stacks(own).values() if len(rows) >= FEWEST]
            tried = {share: self.drifted({campaign: share}) for share in (HALFWAY, 0.0, 1.0)}
            losses = {
                share: sum(len(rows) * one.loss(rows, one.fitted(rows)) for rows in stacks)
                for share, one in tried.items()
            }
            found[str(campaign)] = min(losses, key=losses.__getitem__)
        return found

    def settled(self, which: Ints) -> Slopes:
        """With clients as far apart as the rows ``which`` say; halfway where they say nothing."""
        unknown = dict.fromkeys(map(campaign_of, self.rows), HALFWAY)
        return self.drifted(unknown | self.shares(which))

    def stacks(self, which: Ints) -> dict[str, Ints]:
        """The rows ``which``, by stack."""
        names = np.array([stack_of(self.rows[row]) for row in which])
        return {str(name): which[names == name] for name in np.unique(names)}

    def host_of(self, which: Ints, stack: str) -> HostConstants:
        """A stack's constants by the rows ``which``: fitted to its own, where there are enough;
        else the median of those of all stacks there and of those measured elsewhere."""
        least = len(self.limits.constants) // 2  # a server says something of two constants
        own = {
            name: rows
            for name, rows in self.stacks(which).items()
            if len(rows) >= FEWEST and len({server_of(self.rows[row]) for row in rows}) >= least
        }
        if stack in own:
            return self.fitted(own[stack])
        known = [self.limits.measured, *map(self.fitted, own.values())]
        return _rounded(np.median([astuple(host) for host in known], axis=0))

    def errors(self, which: Ints, stack: str, predicted: Floats) -> StackErrors:
        """A stack's own error by metric, of its rows among ``which``, or of all if these are few;
        ``predicted``, (metric, row), was not fitted to them."""
        own = self.stacks(which).get(stack, which)
        which = own if len(own) >= FEWEST else which
        off = np.log(self.measured_ms[:, which] / predicted[:, which])
        known = [self.draws[self.rows[row].id] for row in which]
        errors = zip(off, METRICS, strict=True)
        sigmas = (stack_sigma(of, [one[m] for one in known], INSIDE) for of, m in errors)
        return StackErrors(*(round(sigma, 4) for sigma in sigmas))

    def fold(self, which: Ints, predictions: Predictions, out: Ints) -> Fold:
        """The constants of every stack and engine, fitted to the rows ``which`` without those
        ``out``, and the errors of ``predictions``."""
        rows, settled = self.rows, self.settled(which)
        names = sorted({stack_of(row) for row in rows} | {row.backend for row in rows})
        predicted = _ms([predictions[row.id] for row in rows]).T if predictions else None
        return Fold(
            sorted({server_of(rows[row]) for row in out}),
            {name: settled.host_of(which, name) for name in names},
            {} if predicted is None else {n: self.errors(which, n, predicted) for n in names},
            self.shares(which),
        )


def _rounded(values: Iterable[float]) -> HostConstants:
    return HostConstants(*np.round([*values], 7).tolist())


def slopes(
    rows: Sequence[Measured],
    simulated: Mapping[str, Predictions],
    draws: Draws,
    limits: HostTimes,
    mixtures: bool = False,
) -> Slopes:
    """Of the rows that are answered and :func:`fitting`, from simulations with :func:`grid`."""
    rows = [row for row in rows if row.id in simulated[BASE] and fitting(row, mixtures)]
    base, hosts = limits.measured, grid(limits.measured)
    frontend = np.broadcast_to([1000.0, 0.0], (len(rows), 2))
    prompt = np.array([mean_prompt(row) for row in rows]).reshape(-1, 1)
    longer = {ITERATION: "host_iteration_s", SEQUENCE: "host_sequence_s"}
    ends = []
    for far in ("", APART):
        found = {name: {**simulated[name], **simulated.get(name + far, {})} for name in hosts}
        table = {name: _ms([found[name][row.id] for row in rows]) for name in hosts}
        terms = [
            (table[name] - table[BASE]) / (getattr(hosts[name], of) - getattr(base, of))
            for name, of in longer.items()
        ]
        terms += [frontend, prompt * frontend]
        known = zip(terms, astuple(base), strict=False)
        start = table[BASE] - sum(slope * value for slope, value in known)
        launched = [table[name] - table[BASE] for name in LAUNCHES]
        ends.append([np.stack(x, -1).transpose(1, 0, 2) for x in ([start, *terms], launched)])
    (times, added), apart = ends
    outcomes = [simulated[BASE][row.id] for row in rows]
    return Slopes(rows, times, added, _ms(rows).T, draws, outcomes, limits, apart)


def _ms(times: Iterable[ServerTimes | Measured]) -> Floats:
    """TTFT and TPOT, shape (rows, 2)."""
    return np.array([[one.ttft_ms, one.tpot_ms] for one in times]).reshape(-1, 2)


def parts(rows: Sequence[Measured], scheme: str) -> list[tuple[Ints, Ints]]:
    """(fitted to, left out) of each part: of servers a fifth at a time are left out, of all else
    one; nothing where there is but one group."""
    from sklearn.model_selection import GroupKFold  # takes a second to import

    groups = [SCHEMES[scheme](row) for row in rows]
    count = len(set(groups))
    if count < 2:
        return []
    splits = GroupKFold(min(PARTS, count) if SCHEMES[scheme] is server_of else count)
    return list(splits.split(np.zeros(len(rows)), groups=groups))


def left_out(linear: Slopes, scheme: str) -> dict[str, ServerTimes]:
    """Predictions with bands of every row, by constants and stack errors from other rows alone."""
    predicted = np.full(linear.measured_ms.shape, np.nan)
    split = [
        (np.setdiff1d(linear.every, out), stack, which)
        for _, out in parts(linear.rows, scheme)
        for stack, which in linear.stacks(out).items()
    ]
    for fit_to, stack, which in split:
        settled = linear.settled(fit_to)
        predicted[:, which] = settled.predicted(which, settled.host_of(fit_to, stack))
    sigma: dict[str, dict[str, float]] = {}
    times: dict[str, ServerTimes] = {}
    for fit_to, stack, which in split:
        own = asdict(linear.errors(fit_to, stack, predicted))
        for number in which:
            row, (ttft, tpot) = linear.rows[number], predicted[:, number].tolist()
            sigma[row.id], times[row.id] = own, linear.base[number].at(row, ttft, tpot)
    return with_bands(linear.rows, times, linear.draws, sigma)


@dataclass(frozen=True)
class HostFit:
    """What ``data/`` would hold after a fit."""

    times: HostTimes
    folds: list[Fold]

    def write(self, folder: Path, mixtures: bool) -> None:
        """Its two files."""
        for end, content in (("", self.times), ("_folds", Folds(self.folds))):
            path = folder / f"{_FILES[mixtures]}{end}.yaml"
            write_whole(path, dump_yaml(asdict(content), width=96))


def host_fit(linear: Slopes, fits: Mapping[str, Predictions], file: str) -> HostFit:
    """The constants to ship. Errors of servers among those fitted to are cross-validated ones, any
    other's those of GPUs left out."""
    rows, crossed = linear.rows, fits[CROSS_VALIDATED]
    count = len({server_of(row) for row in rows})
    kind = "dense" if rows[0].dense else "mixtures'"
    note = f"fitted to {len(rows)} {kind} rows of {count} servers of {file}"
    ttft, tpot = (errors(rows, crossed, metric) for metric in METRICS)
    if ttft is not None and tpot is not None:
        off = f"TTFT is off by {ttft['mape']:.1f} % and TPOT by {tpot['mape']:.1f} %"
        note += f"; on servers left out mean {off}"
    whole = linear.fold(linear.every, fits[ONE_GPU_OUT] or crossed, linear.every[:0])
    known: dict[str, Any] = {key: getattr(whole, key) for key in ("stacks", "errors", "apart")}
    times = replace(linear.limits, fitted_to=note, **known)
    split = parts(rows, CROSS_VALIDATED)
    return HostFit(times, [linear.fold(fit_to, crossed, out) for fit_to, out in split])
