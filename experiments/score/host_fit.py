"""The host's constants fitted to measured rows, and scored on rows left out of the fit.

A row is simulated three times: with the constants measured elsewhere, with a longer iteration, and
with a longer time a sequence. Between and beyond these, TTFT and TPOT are taken as linear in the
constants. So a fit needs no more simulations, however many rows it leaves out. Mixtures of experts
have two constants more. One of them, launching, matters only where it takes longer than the
kernels: it is simulated at two values, and TTFT and TPOT are linear between these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from sarathi_sim.experiments.config.inputs import HostConstants, HostTimes, StackErrors
from sarathi_sim.experiments.score.deployments import mean_prompt, server_of, stack_of
from sarathi_sim.experiments.score.errors import ServerTimes
from sarathi_sim.experiments.score.measured import METRICS, Measured
from sarathi_sim.experiments.score.mixtures import measured_cold
from sarathi_sim.experiments.score.server_bands import Draws, stack_sigma, with_bands
from sarathi_sim.simulator.loop.records import Floats, Ints

FOLDS = 5
"""Parts of the servers that are left out in turn."""
FEWEST = 8
"""Rows to which constants are fitted."""
LARGEST_ERROR = float(np.log(2))
"""An error counts as a factor of two at most: requests that wait for memory would rule a fit."""
INSIDE, INSIDE_OF_MIXTURES = 0.9, 0.94
"""Shares of the errors that the bands shall hold: more of the mixtures', since loads that are not
fitted to are further off."""
TPOT_WEIGHT = 2.0
ITERATION, SEQUENCE = "longer iteration", "longer sequence"
LAUNCHES = {"launches": 4e-5, "long launches": 1e-4}
"""Seconds of launching a call that are simulated, beside 0."""
CLIENTS, MOST_TOKENS = (4, 16, 64), 2048
"""Of the mixtures' rows that are fitted to: all would take long to simulate five times."""
BASE = "zero_fit"
CROSS_VALIDATED, ONE_GPU_OUT = "cross_validated", "leave_one_gpu_out"


def grid(measured: HostConstants) -> dict[str, HostConstants]:
    """The constants that each row is simulated with."""
    return {
        BASE: measured,
        ITERATION: replace(measured, host_iteration_s=measured.host_iteration_s + 5e-4),
        SEQUENCE: replace(measured, host_sequence_s=measured.host_sequence_s + 3e-5),
    }


def launching(measured: HostConstants) -> dict[str, HostConstants]:
    """Those that a row of a mixture is simulated with on top."""
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
    launches), without any 0."""

    rows: Sequence[Measured]
    times: Floats
    launched: Floats
    measured_ms: Floats
    draws: Draws
    base: Sequence[ServerTimes]
    limits: HostTimes

    @property
    def names(self) -> list[str]:
        """The constants that are fitted."""
        return [one.name for one in fields(HostConstants) if one.name in self.limits.constants]

    def predicted(self, which: Ints, host: HostConstants) -> Floats:
        """(metric, row), in ms."""
        linear = self.times[:, which] @ np.array([1.0, *asdict(host).values()][:-1])
        return np.asarray(linear + self.launched[:, which] @ _between_launches(host.launch_s))

    def fitted(self, which: Ints) -> HostConstants:
        """The constants with the least absolute errors of the logarithms, within their ranges."""
        from scipy.optimize import minimize

        measured, names = self.measured_ms[:, which], self.names
        bounds = np.array([self.limits.constants[name].range for name in names])
        unit = bounds[:, 1]

        def host_of(values: Floats) -> HostConstants:
            return HostConstants(**dict(zip(names, (values * unit).tolist(), strict=True)))

        def loss(values: Floats) -> float:
            found = self.predicted(which, host_of(values))
            off = np.abs(np.log(np.maximum(found, 1e-6) / measured))
            ttft, tpot = np.minimum(off, LARGEST_ERROR).mean(axis=1)
            return float(ttft + TPOT_WEIGHT * tpot)

        starts = (
            np.array([0.2, 0.3, 0.2, 0.3, 0.3][: len(names)]),
            np.array([0.6, 0.6, 0.5, 0.6, 0.6][: len(names)]),
        )
        tried = [
            minimize(loss, start, method="Nelder-Mead", bounds=bounds / unit[:, None])
            for start in starts
        ]
        best = min(tried, key=lambda one: one.fun).x
        return _rounded(np.array([*asdict(host_of(best)).values()]))

    def host_of(self, which: Ints, stack: str) -> HostConstants:
        """A stack's constants by the rows ``which``: fitted to its own, where there are enough. Of
        any other stack they are the median of those of all stacks there and of those measured
        elsewhere."""
        names = np.array([stack_of(self.rows[row]) for row in which])
        enough = [name for name in np.unique(names) if self._enough(which[names == name])]
        if stack in enough:
            return self.fitted(which[names == stack])
        known = [self.limits.measured, *(self.fitted(which[names == name]) for name in enough)]
        values = np.median([[*asdict(host).values()] for host in known], axis=0)
        return _rounded(values)

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
            share = INSIDE if self.rows[0].dense else INSIDE_OF_MIXTURES
            found.append(round(stack_sigma(off, known, share), 4))
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
) -> Slopes:
    """From the simulations with :func:`grid` (and :func:`launching`, where there are such), of the
    rows that are answered and :func:`fitting`."""
    launches = [name for name in LAUNCHES if name in simulated]
    mixtures = bool(launches)
    rows = [row for row in rows if row.id in simulated[BASE] and fitting(row, mixtures)]
    hosts = grid(limits.measured)
    base = limits.measured
    table = {
        name: np.array([_ms(simulated[name][row.id]) for row in rows]).reshape(-1, 2)
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
    measured = np.array([[row.ttft_ms, row.tpot_ms] for row in rows]).reshape(-1, 2).T
    return Slopes(
        rows,
        times,
        np.stack(launched, axis=-1).transpose(1, 0, 2),
        measured,
        draws,
        [simulated[BASE][row.id] for row in rows],
        limits,
    )


def _ms(times: ServerTimes) -> tuple[float, float]:
    return times.ttft_ms, times.tpot_ms


def alike(rows: Sequence[Measured], which: Ints, stack: str) -> Ints:
    """Of the rows ``which``, those that say most of a stack's errors: its own, or all."""
    own = np.array([stack_of(rows[row]) == stack for row in which], bool)
    return np.asarray(which[own]) if own.sum() >= FEWEST else which


#: What is left out together: the name of the scheme, and how a row says which part it is in.
SCHEMES: Mapping[str, Callable[[Measured], str]] = {
    CROSS_VALIDATED: server_of,
    "leave_one_stack_out": stack_of,
    ONE_GPU_OUT: lambda row: row.system,
    "leave_one_model_out": lambda row: row.model,
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
        for stack, which in _by_stack(found.rows, out):
            predicted[:, which] = found.predicted(which, found.host_of(fit_to, stack))
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
    return {name: found.host_of(which, name) for name in names(found.rows)}
