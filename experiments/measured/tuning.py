"""One server's constants, fitted to few runs of it and shrunk towards what its stack has elsewhere.

The fit minimises the sum of squared residuals: of the logarithms of TTFT and TPOT (means, medians
and 90th percentiles), divided by how far repeated runs differ; and of the logarithms of the
constants, divided by how far servers of one stack differ. Where the sum is least, its curvature
says how far each constant is known (Laplace's approximation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sarathi_sim.experiments.config.calibration import factors
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import DEFAULTS
from sarathi_sim.experiments.config.scenario import Engine
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import LAST

NOISE = {"ttft_s": 0.1, "tpot_s": 0.03}
"""Standard deviations of the logarithm between runs of one server under one load, and of what a
simulation leaves out: twice the noise of the public rows (docs/accuracy.md)."""
STATISTICS = ("mean", "p50", "p90")
STEP = 0.5
"""The step of a slope, in standard deviations: so large that a changed schedule does not matter."""
MOST_STEPS = 8
LONG = 2.5
"""Standard deviations above the usual admission that a second start of the fit takes."""


@dataclass(frozen=True)
class Overheads:
    """What sets a server apart from its op times: the engine's constants of these names, and
    factors on the times of ``kernels`` and of messages over ``links``."""

    host_iteration_s: float = 0.0
    host_sequence_s: float = 0.0
    launch_layer_s: float = 0.0
    frontend_s: float = 0.0
    admission_s: float = 0.0
    kernels: float = 1.0
    links: float = 1.0

    @staticmethod
    def configured(engine: Engine) -> Overheads:
        """Those of a resolved engine."""
        return Overheads(**{key: getattr(engine, key) or 0.0 for key in DEFAULTS})

    def of(self, deployment: Deployment) -> Deployment:
        """A deployment with these, in place of its own constants and on top of its op times."""
        constants = {key: getattr(self, key) for key in DEFAULTS}
        scenario, ops = deployment.scenario.having("engine", **constants), deployment.ops
        if (self.kernels, self.links) != (1.0, 1.0):
            ops = ops.scaled(factors(self.kernels, self.links))
        return replace(deployment, scenario=scenario, ops=ops)


@dataclass(frozen=True)
class Knob:
    """A constant that is fitted: ``sd`` is the standard deviation of its logarithm between servers
    of one stack. One that is shorter than ``least`` moves as if it were that long."""

    name: str
    sd: float
    least: float = 0.0

    def moved(self, start: Overheads, by: float) -> Overheads:
        """With the constant ``by`` standard deviations from ``start``."""
        value = getattr(start, self.name)
        added = max(value, self.least) * math.expm1(by * self.sd)
        return replace(start, **{self.name: max(0.0, value + added)})


#: The host's: as between the stacks of dense models in data/host_time.yaml. The others are assumed:
#: kernels are half of a band of TPOT for a server left out.
KNOBS = (
    Knob("host_iteration_s", 0.6, 5e-4),
    Knob("host_sequence_s", 0.5, 3e-5),
    Knob("frontend_s", 1.0, 5e-3),
    Knob("admission_s", 1.0, 3e-4),
    Knob("kernels", 0.08),
    Knob("links", 0.3),
)


class TunedRun(Protocol):
    """A measured run: its numbers by metric and statistic, and its simulation."""

    @property
    def name(self) -> str: ...
    @property
    def measured(self) -> Mapping[str, Any]: ...
    @property
    def deployment(self) -> Deployment: ...
    def numbers(self, overheads: Overheads) -> Mapping[str, Any]:
        """The simulated numbers, as :attr:`measured` has them."""
        ...


@dataclass(frozen=True, eq=False)
class Tuned:
    """The constants of a server, and how far they are known: the covariance of the ``knobs``, in
    standard deviations of what they were before the runs."""

    overheads: Overheads
    before: Overheads
    knobs: Sequence[Knob]
    covariance: Floats = field(repr=False)

    @property
    def known(self) -> dict[str, float]:
        """By knob: 1 if the runs settle it, 0 if they say nothing of it."""
        sd = np.sqrt(np.diag(self.covariance))
        return {knob.name: float(1 - min(1.0, s)) for knob, s in zip(self.knobs, sd, strict=True)}

    @property
    def mixed_up(self) -> list[tuple[str, str]]:
        """Pairs that the runs cannot tell apart: much correlated, and neither of them settled."""
        sd = np.sqrt(np.diag(self.covariance))
        related = self.covariance / np.outer(sd, sd)
        names = [knob.name for knob in self.knobs]
        return [
            (names[i], names[j])
            for i in range(len(names))
            for j in range(i)
            if abs(related[i, j]) > 0.7 and min(sd[i], sd[j]) > 0.3
        ]

    def gain(self, slopes: Floats) -> float:
        """What a run with these slopes would tell: half the logarithm of the factor by which the
        volume of what is possible shrinks."""
        return 0.5 * float(
            np.linalg.slogdet(np.eye(len(slopes)) + slopes @ self.covariance @ slopes.T)[1]
        )


def reading_s(deployment: Deployment) -> float:
    """What an iteration takes at least, in seconds: a GPU reads its share of the weights of one
    token at 1 / 0.9 of the data sheet's bandwidth (invariant 10)."""
    flops, number = deployment.model.linear_flops_by_kind(), deployment.ops.number_bytes
    plain = (
        flops.plain
        + deployment.scenario.engine.lm_head * deployment.model.lm_head_flops_per_token()
    )
    weights = flops.routed * number.expert_weight + flops.matrices * number.weight + 2 * plain
    cluster = deployment.scenario.cluster
    return 0.9 * weights / 2 / (cluster.tp * cluster.dp * deployment.device.memory_bandwidth)


def least_kernels(deployment: Deployment) -> float:
    """The factor on all kernels at which those of one token take :func:`reading_s`."""
    ops, one = deployment.ops, np.ones(1)
    layer_s = sum(ops.model.share(op) * float(time(one)[0]) for op, time in ops.linear.items())
    head_s = sum(
        float(ops.by_rows[op](one)[0]) for op in LAST if deployment.scenario.engine.lm_head
    )
    return reading_s(deployment) / (sum(deployment.layers) * layer_s + head_s)


def too_fast(target: TunedRun) -> str:
    """What is wrong with a run whose tokens come faster than the weights can be read; empty if
    nothing is."""
    deployment, spec = target.deployment, target.deployment.scenario.speculation
    least_s = reading_s(deployment) / (1 + (spec.draft_length if spec else 0))
    token_s = target.measured["tpot_s"].get("mean")
    if not token_s or token_s >= least_s:
        return ""
    return (
        f"{target.name}: {1e3 * token_s:.3g} ms a token, but reading the weights of "
        f"{deployment.model.name} takes {1e3 * least_s:.3g} ms at least: it has another number "
        "format, drafts tokens, or is no real server"
    )


def fit(targets: Sequence[TunedRun], before: Overheads, progress: Progress = silent) -> Tuned:
    """The constants fitted to these runs of one server; ``before`` are those of its stack. Without
    any, the fit begins at the usual ones (:attr:`Knob.least`). Kernels get no faster than weights
    can be read (:func:`least_kernels`)."""
    from scipy.optimize import least_squares

    if before == Overheads():
        before = Overheads(**{knob.name: knob.least for knob in KNOBS if knob.least})
    several = any(_sends(target.deployment) for target in targets)
    knobs = [knob for knob in KNOBS if several or knob.name != "links"]
    least = max(least_kernels(target.deployment) for target in targets)
    known: dict[bytes, Floats] = {}  # a slope begins where the step before ended

    def moved(x: Floats) -> Overheads:
        found = before
        for knob, by in zip(knobs, x, strict=True):
            found = knob.moved(found, float(by))
        return replace(found, kernels=max(found.kernels, least))

    def off(x: Floats) -> Floats:
        if x.tobytes() not in known:
            progress("tuning", min(len(known), most - 1), most)
            overheads = moved(x)
            each = [residuals(target, overheads) for target in targets]
            known[x.tobytes()] = np.concatenate(each)
        return known[x.tobytes()]

    most = 2 * MOST_STEPS * (len(knobs) + 1)
    every = np.eye(len(knobs))

    def slopes(x: Floats) -> Floats:
        now = off(x)
        return np.stack([(off(x + STEP * one) - now) / STEP for one in every], axis=1)

    # A short admission hides behind an iteration, and has no slope: a long one is tried, too.
    starts = [np.zeros(len(knobs)), LONG * np.array([k.name == "admission_s" for k in knobs])]
    tried = [
        least_squares(
            lambda x: np.concatenate([off(x), x]),
            start,
            lambda x: np.vstack([slopes(x), every]),
            ftol=1e-3,
            xtol=1e-2,
            max_nfev=MOST_STEPS,
        )
        for start in starts
    ]
    found = min(tried, key=lambda one: float(one.cost))
    progress("tuning", most, most)
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Tuned(moved(found.x), before, knobs, np.asarray(covariance, np.float64))


def residuals(target: TunedRun, overheads: Overheads) -> Floats:
    """Of the run's statistics, in standard deviations. Those of one metric count as one."""
    simulated, found = target.numbers(overheads), []
    for metric, noise in NOISE.items():
        known, ours = target.measured.get(metric) or {}, simulated[metric]
        kept = [s for s in STATISTICS if known.get(s) and ours.get(s)]
        found += [math.log(ours[s] / known[s]) / noise / math.sqrt(len(kept)) for s in kept]
    return np.array(found)


def slopes_at(target: TunedRun, fitted: Tuned) -> Floats:
    """The slopes of a run's residuals, where it was not measured yet: by statistic and knob."""
    now = residuals(target, fitted.overheads)
    each = [residuals(target, knob.moved(fitted.overheads, STEP)) for knob in fitted.knobs]
    return np.stack([(one - now) / STEP for one in each], axis=1)


def _sends(deployment: Deployment) -> bool:
    cluster = deployment.scenario.cluster
    return cluster.tp > 1 or cluster.pp > 1
