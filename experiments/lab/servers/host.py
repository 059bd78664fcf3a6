"""The host's constants fitted to measured servers, and predictions of rows left out of the fit.

A row is simulated with the constants measured elsewhere, with a longer iteration, and with a longer
time a sequence. Between and beyond these, TTFT and TPOT are taken as linear in the constants. So a
fit needs no more simulations, however many rows it leaves out. Launching matters only if it takes
longer than the kernels: it is simulated at two values, and TTFT and TPOT are linear between these.
Mixtures of experts have constants of their own, one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from sarathi_sim.experiments.config.inputs import Fold, HostConstants, HostTimes, StackErrors
from sarathi_sim.experiments.lab.servers.errors import errors
from sarathi_sim.experiments.lab.servers.rows import METRICS, Measured, ServerTimes
from sarathi_sim.experiments.lab.servers.runs import Draws, stack_sigma, with_bands
from sarathi_sim.experiments.lab.servers.scenarios import (
    campaign_of,
    mean_prompt,
    measured_cold,
    server_of,
    stack_of,
)
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.simulator.loop.records import Floats, Ints

FOLDS = 5
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
first (docs/pools.md); it is fitted as the frontend's time."""
ITERATION, SEQUENCE = "longer iteration", "longer sequence"
LAUNCHES = {"launches": 4e-5, "long launches": 1e-4}
"""Seconds of launching a call that are simulated, beside 0."""
CLIENTS, MOST_TOKENS = (4, 16, 64), 2048
"""Of the mixtures' rows that are fitted to: all would take long to simulate five times. Of rows
with pools those with up to as many clients as the most."""
BASE = "zero_fit"
CROSS_VALIDATED, ONE_GPU_OUT = "cross_validated", "leave_one_gpu_out"
ONE_MODEL_OUT = "leave_one_model_out"
APART = ", apart"
"""Behind the name of a variant whose clients have drifted apart."""
UNKNOWN = 0.5
"""How far apart the clients of an unknown campaign are: from 0, in lock-step, to 1."""


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
    flags, none that was measured cold, none with drafted tokens."""
    some = row.concurrency in CLIENTS if row.launch is None else row.concurrency <= max(CLIENTS)
    short = some and row.osl <= MOST_TOKENS
    kept = not row.flags and not row.drafts and not measured_cold(row)
    return row.dense != mixtures and kept and (row.dense or short)


@dataclass(frozen=True, eq=False)
class Slopes:
    """Rows, and their times in ms as linear functions of the constants; ``times`` has shape
    (metric, row, 1 + constants). ``launched`` is what the :data:`LAUNCHES` add, (metric, row,
    launches), without any 0. ``apart`` are these with clients that have drifted apart. ``fits`` are
    the constants found so far, by their rows: several schemes leave out the same ones."""

    rows: Sequence[Measured]
    times: Floats
    launched: Floats
    measured_ms: Floats
    draws: Draws
    base: Sequence[ServerTimes]
    limits: HostTimes
    apart: Slopes | None = None
    fits: dict[Any, HostConstants] = field(default_factory=dict)

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
        given = (self.times, self.launched, self.measured_ms)
        key = (repr(self.limits.constants), *(each[:, which].tobytes() for each in given))
        if key not in self.fits:
            self.fits[key] = self._fit(which)
        return self.fits[key]

    def _fit(self, which: Ints) -> HostConstants:
        from scipy.optimize import minimize

        names = self.names
        bounds = np.array([self.limits.constants[name].range for name in names])
        if all(self.rows[row].launch and self.rows[row].backend == "sglang" for row in which):
            bounds[names.index("frontend_s"), 1] = MOST_HANDSHAKE_S
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
    ONE_MODEL_OUT: lambda row: row.model,
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
        row.id: with_times(base, row, float(ttft), float(tpot))
        for row, ttft, tpot, base in zip(found.rows, *predicted, found.base, strict=True)
        if row.id in sigma
    }
    return with_bands(found.rows, times, found.draws, sigma)


def with_times(base: ServerTimes, row: Measured, ttft_ms: float, tpot_ms: float) -> ServerTimes:
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
    found: Slopes, predictions: Mapping[str, ServerTimes], which: Ints
) -> dict[str, StackErrors]:
    predicted = _ms([predictions[row.id] for row in found.rows]).T
    near = {name: alike(found.rows, which, name) for name in names(found.rows)}
    return {name: found.sigmas(rows, predicted[:, rows]) for name, rows in near.items()}


def host_time_yaml(shipped: HostTimes) -> str:
    """The text of ``data/host_time.yaml``."""
    return dump_yaml(asdict(shipped), width=96)
