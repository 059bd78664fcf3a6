"""The host's constants fitted to measured rows, and scored on rows left out of the fit.

A row is simulated three times: with the constants measured elsewhere, with a longer iteration, and
with a longer time a sequence. Between and beyond these, TTFT and TPOT are taken as linear in the
constants. So a fit needs no more simulations, however many rows it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from experiments.config.host_time import HostConstants, HostTimes, StackErrors
from experiments.score.deployments import server_of, stack_of
from experiments.score.errors import ServerTimes
from experiments.score.measured import METRICS, Measured
from experiments.score.server_bands import Draws, stack_sigma, with_bands
from simulator.loop.records import Floats, Ints

FOLDS = 5
"""Parts of the servers that are left out in turn."""
FEWEST = 8
"""Rows to which constants are fitted."""
LARGEST_ERROR = float(np.log(2))
"""An error counts as a factor of two at most: requests that wait for memory would rule a fit."""
TPOT_WEIGHT = 2.0
ITERATION, SEQUENCE = "longer iteration", "longer sequence"
BASE = "zero_fit"
CROSS_VALIDATED, ONE_GPU_OUT = "cross_validated", "leave_one_gpu_out"


def grid(measured: HostConstants) -> dict[str, HostConstants]:
    """The constants that each row is simulated with."""
    return {
        BASE: measured,
        ITERATION: replace(measured, host_iteration_s=measured.host_iteration_s + 5e-4),
        SEQUENCE: replace(measured, host_sequence_s=measured.host_sequence_s + 3e-5),
    }


def fitting(row: Measured) -> bool:
    """Whether a row is fitted to: dense models, whose op times are surest, without flags."""
    return row.dense and not row.flags


@dataclass(frozen=True, eq=False)
class Slopes:
    """Rows, and their times in ms as linear functions of the constants; ``times`` has shape
    (metric, row, 1 + constants)."""

    rows: Sequence[Measured]
    times: Floats
    measured_ms: Floats
    draws: Draws
    base: Sequence[ServerTimes]
    limits: HostTimes

    def predicted(self, which: Ints, host: HostConstants) -> Floats:
        """(metric, row), in ms."""
        return np.asarray(self.times[:, which] @ np.array([1.0, *asdict(host).values()]))

    def fitted(self, which: Ints) -> HostConstants:
        """The constants with the least absolute errors of the logarithms, within their ranges."""
        from scipy.optimize import minimize

        times, measured = self.times[:, which], self.measured_ms[:, which]
        bounds = np.array([self.limits.constants[name].range for name in _NAMES])
        unit = bounds[:, 1]

        def loss(values: Floats) -> float:
            found = times @ np.concatenate([[1.0], values * unit])
            off = np.abs(np.log(np.maximum(found, 1e-6) / measured))
            ttft, tpot = np.minimum(off, LARGEST_ERROR).mean(axis=1)
            return float(ttft + TPOT_WEIGHT * tpot)

        starts = (np.array([0.2, 0.3, 0.2]), np.array([0.6, 0.6, 0.5]))
        tried = [
            minimize(loss, start, method="Nelder-Mead", bounds=bounds / unit[:, None])
            for start in starts
        ]
        return HostConstants(*(min(tried, key=lambda one: one.fun).x * unit).round(7).tolist())

    def host_of(self, which: Ints, stack: str) -> HostConstants:
        """A stack's constants by the rows ``which``: fitted to its own, where there are enough. Of
        any other stack they are the median of those of all stacks there and of those measured
        elsewhere."""
        names = np.array([stack_of(self.rows[row]) for row in which])
        enough = [name for name in np.unique(names) if (names == name).sum() >= FEWEST]
        if stack in enough:
            return self.fitted(which[names == stack])
        known = [self.limits.measured, *(self.fitted(which[names == name]) for name in enough)]
        values = np.median([[*asdict(host).values()] for host in known], axis=0)
        return HostConstants(*values.round(7).tolist())

    def sigmas(self, which: Ints, predicted: Floats) -> StackErrors:
        """The stack's own error by metric, from rows predicted without being fitted to."""
        found = []
        for number, metric in enumerate(METRICS):
            off = np.log(self.measured_ms[number, which] / predicted[number])
            known = [self.draws[self.rows[row].id][metric] for row in which]
            found.append(round(stack_sigma(off, known), 4))
        return StackErrors(*found)


_NAMES = tuple(one.name for one in fields(HostConstants))


def slopes(
    rows: Sequence[Measured],
    simulated: Mapping[str, Mapping[str, ServerTimes]],
    draws: Draws,
    limits: HostTimes,
) -> Slopes:
    """From the simulations with :func:`grid`, of the rows that are answered and :func:`fitting`."""
    rows = [row for row in rows if row.id in simulated[BASE] and fitting(row)]
    hosts = grid(limits.measured)
    base = limits.measured
    table = np.array(
        [[_ms(simulated[name][row.id]) for row in rows] for name in (BASE, ITERATION, SEQUENCE)]
    ).reshape(3, len(rows), 2)
    iteration = (table[1] - table[0]) / (hosts[ITERATION].host_iteration_s - base.host_iteration_s)
    sequence = (table[2] - table[0]) / (hosts[SEQUENCE].host_sequence_s - base.host_sequence_s)
    frontend = np.broadcast_to([1000.0, 0.0], table[0].shape)
    start = table[0] - sum(
        slope * value
        for slope, value in zip((iteration, sequence, frontend), asdict(base).values(), strict=True)
    )
    times = np.stack([start, iteration, sequence, frontend], axis=-1).transpose(1, 0, 2)
    measured = np.array([[row.ttft_ms, row.tpot_ms] for row in rows]).reshape(-1, 2).T
    return Slopes(rows, times, measured, draws, [simulated[BASE][r.id] for r in rows], limits)


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
