"""Tuning: one server's constants, fitted to few runs of it and shrunk towards its stack's.

The fit minimises the sum of squared residuals: of the logarithms of TTFT and TPOT over how far
repeated runs differ, and of the logarithms of the constants over how far servers of one stack do.
Its curvature there says how far each constant is known (Laplace's approximation)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.profiler.facts.formats import named_stack
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import LAST
from ..config.base import Source
from ..config.deployment import Deployment, deploy
from ..config.effects import refuse_without_effect
from ..config.inputs import DEFAULTS, ServerCalibration
from ..config.loading import Experiment
from ..config.scenario import Scenario
from .load_tools import Benchmark, read_benchmarks
from .replay import MeasuredRun, Overheads, ServerRun, case_of

NOISE = {"ttft_s": 0.1, "tpot_s": 0.03}
"""Standard deviations of the logarithm between runs of one server under one load, and of what a
simulation leaves out: twice the noise of the public rows (docs/lab/servers_dense.md)."""
STATISTICS = ("mean", "p50", "p90")
STEP = 0.5
"""The step of a slope, in standard deviations: so large that a changed schedule does not matter."""
MOST_STEPS = 8
LONG = 2.5
"""Standard deviations above the usual admission that a second start of the fit takes."""
HELD_BACK = 0.9
"""Clients held the requests back if fewer than this share of the rate was served."""
MOST_REQUESTS = 4000
ALIKE = 0.05
"""The workload of the configuration is that of a run if its mean lengths differ by no more."""


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
        """Pairs that the runs do not separate: much correlated, and neither of them settled."""
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
        shrunk = np.eye(len(slopes)) + slopes @ self.covariance @ slopes.T
        return 0.5 * float(np.linalg.slogdet(shrunk)[1])


def reading_s(deployment: Deployment) -> float:
    """What an iteration takes at least, in seconds: a GPU reads its share of the weights of one
    token at 1 / 0.9 of the data sheet's bandwidth (invariant 10)."""
    flops, number = deployment.model.linear_flops_by_kind(), deployment.ops.number_bytes
    cluster, lm_head = deployment.scenario.cluster, deployment.scenario.engine.lm_head
    plain = flops.plain + lm_head * deployment.model.lm_head_flops_per_token()
    weights = flops.routed * number.expert_weight + flops.matrices * number.weight + 2 * plain
    return 0.9 * weights / 2 / (cluster.tp * cluster.dp * deployment.device.memory_bandwidth)


def least_kernels(deployment: Deployment) -> float:
    """The factor on all kernels at which those of one token take :func:`reading_s`."""
    ops, one = deployment.ops, np.ones(1)
    layer_s = sum(ops.model.share(op) * float(time(one)[0]) for op, time in ops.linear.items())
    last = LAST if deployment.scenario.engine.lm_head else ()
    head_s = sum(float(ops.by_rows[op](one)[0]) for op in last)
    return reading_s(deployment) / (sum(deployment.layers) * layer_s + head_s)


def too_fast(target: MeasuredRun) -> str:
    """Why a run's tokens come faster than the weights can be read; empty if they do not."""
    deployment, spec = target.deployment, target.deployment.scenario.speculation
    least_s = reading_s(deployment) / (1 + (spec.draft_length if spec else 0))
    token_s = target.measured["tpot_s"].get("mean")
    if not token_s or token_s >= least_s:
        return ""
    return (
        f"{target.name}: {1e3 * token_s:.3g} ms a token, but reading the weights of "
        f"{deployment.model.name} takes at least {1e3 * least_s:.3g} ms: it has another number "
        "format, uses speculative decoding, or is not a real server"
    )


def fit(targets: Sequence[MeasuredRun], before: Overheads, progress: Progress = silent) -> Tuned:
    """The constants fitted to these runs of one server; ``before`` are those of its stack. Without
    any, it begins at the usual ones (:attr:`Knob.least`). Kernels stay above
    :func:`least_kernels`."""
    from scipy.optimize import least_squares

    if before == Overheads():
        before = Overheads(**{knob.name: knob.least for knob in KNOBS if knob.least})
    clusters = [target.deployment.scenario.cluster for target in targets]
    several = any(cluster.tp > 1 or cluster.pp > 1 for cluster in clusters)
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
            known[x.tobytes()] = np.concatenate([residuals(one, overheads) for one in targets])
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


def residuals(target: MeasuredRun, overheads: Overheads) -> Floats:
    """Of the run's statistics, in standard deviations. Those of one metric count as one."""
    simulated, found = target.numbers(overheads), []
    for metric, noise in NOISE.items():
        known, ours = target.measured.get(metric) or {}, simulated[metric]
        kept = [s for s in STATISTICS if known.get(s) and ours.get(s)]
        found += [math.log(ours[s] / known[s]) / noise / math.sqrt(len(kept)) for s in kept]
    return np.array(found)


def slopes_at(target: MeasuredRun, fitted: Tuned) -> Floats:
    """The slopes of a run's residuals, where it was not measured yet: by statistic and knob."""
    now = residuals(target, fitted.overheads)
    each = [residuals(target, knob.moved(fitted.overheads, STEP)) for knob in fitted.knobs]
    return np.stack([(one - now) / STEP for one in each], axis=1)


@dataclass(frozen=True, eq=False)
class TunedServer:
    """A server's constants and the runs that they were fitted to, each with its numbers before and
    after; ``next_runs`` is what a further run under each load would tell, in nats."""

    fitted: Tuned
    targets: Sequence[MeasuredRun]
    next_runs: Mapping[str, float]
    notes: Sequence[str] = ()

    @property
    def calibration(self) -> ServerCalibration:
        """What the file holds."""
        scenario, found = self.targets[0].deployment.scenario, self.fitted.overheads
        engine = {key: float(f"{getattr(found, key):.3g}") for key in DEFAULTS}
        return ServerCalibration(
            stack=named_stack(scenario.stack or "")[0],
            model=self.targets[0].deployment.model.name,
            device=scenario.device,
            runs=[target.name for target in self.targets],
            engine=engine,  # type: ignore[arg-type]  # all of its keys
            kernels=min(max(round(found.kernels, 4), 0.1), 10.0),
            links=min(max(round(found.links, 4), 0.1), 10.0),
            known={name: round(value, 3) for name, value in self.fitted.known.items()},
        )

    def content(self) -> dict[str, Any]:
        """As ``tune --json`` prints it; errors of means in percent."""
        runs: dict[str, dict[str, Any]] = {target.name: {} for target in self.targets}
        for target in self.targets:
            before, after = map(target.numbers, (self.fitted.before, self.fitted.overheads))
            for metric in NOISE:
                if measured_s := target.measured[metric].get("mean"):
                    runs[target.name][metric] = {
                        "measured_s": measured_s,
                        "before_pct": 100 * (before[metric]["mean"] / measured_s - 1),
                        "after_pct": 100 * (after[metric]["mean"] / measured_s - 1),
                    }
        return {
            "runs": runs,
            "before": asdict(self.fitted.before),
            "tuned": asdict(self.fitted.overheads),
            "known": self.fitted.known,
            "mixed_up": [list(pair) for pair in self.fitted.mixed_up],
            "next_runs": dict(self.next_runs),
            "notes": list(self.notes),
            "too_fast": list(filter(None, map(too_fast, self.targets))),
        }


def tune(experiment: Experiment, files: Sequence[Path], progress: Progress) -> TunedServer:
    """The constants of the server that an experiment describes in its only scenario. Raises
    UserError as :func:`deploy` does, for files of no load tool, and for a scenario without a stack
    or with a calibration."""
    if len(experiment.scenarios) > 1:
        names = ", ".join(experiment.scenarios)
        raise UserError(f"{experiment.file}: has the scenarios {names}: tune needs exactly one")
    ((name, scenario),) = experiment.scenarios.items()
    source = experiment.sources[name]
    if scenario.stack is None:
        raise source.error("stack", None, "is needed: the fit starts from the constants of a stack")
    if scenario.calibration is not None:
        raise source.error("calibration", scenario.calibration, "must be left out: tune makes it")
    read = [run for file in files for run in read_benchmarks(file)]
    called = [run.name for run in read]
    if twice := next((one for one in called if called.count(one) > 1), None):
        raise UserError(f"two runs are called {twice}: give the files other names")
    targets: list[MeasuredRun] = []
    for run in read:
        if run.requests is not None:
            targets.append(case_of(experiment, name, ServerRun.of(run), run.name))
        else:
            means = {"ttft_s": run.ttft_s, "tpot_s": run.tpot_s}
            known = {key: {} if math.isnan(one) else {"mean": one} for key, one in means.items()}
            targets.append(MeasuredRun(run.name, known, under_load(scenario, source, run)))
    refuse_without_effect((source, target.deployment) for target in targets)
    fitted = fit(targets, targets[0].configured, progress)
    nothing, gains = {key: {"mean": 1.0} for key in NOISE}, dict[str, float]()
    for text, one in other_loads(read[0]).items():
        with suppress(UserError):  # longer than the server allows
            thought = MeasuredRun(text, nothing, under_load(scenario, source, one))
            gains[text] = fitted.gain(slopes_at(thought, fitted))
    notes = [
        f"{run.name}: has only means, which determine less: {run.command}"
        for run in read
        if run.requests is None
    ]
    notes += [f"{run.name}: {run.note}" for run in read if run.note]
    return TunedServer(fitted, targets, gains, notes)


def under_load(scenario: Scenario, source: Source, run: Benchmark) -> Deployment:
    """The scenario deployed under a run's load: its number of requests (at most
    :data:`MOST_REQUESTS`), and how they were sent. Lengths are the configuration's where their
    means are the run's; else all are the means."""
    reached = run.requests_count / run.duration_s
    arrivals: dict[str, Any] = {"kind": "at_once"}
    if run.rate is not None and (run.concurrency is None or reached > HELD_BACK * run.rate):
        cv = min(max(run.burstiness**-0.5, 0.001), 10.0)
        arrivals = {"kind": "gamma", "rate": min(run.rate, 1e6), "cv": cv}
    elif run.concurrency is not None:
        arrivals = {"kind": "closed_loop", "clients": run.concurrency}
    offered = {"arrivals": arrivals, "requests": min(run.requests_count, MOST_REQUESTS)}
    means = {"prompt": max(1, round(run.mean_prompt)), "decode": max(1, round(run.mean_output))}

    def served(workload: Mapping[str, Any]) -> Deployment:
        checked = source.checked(type(scenario.workload), workload, "workload")
        return deploy(scenario.model_copy(update={"workload": checked}), source)

    with suppress(UserError):  # the configuration's requests cannot be sent like that
        found = served(scenario.workload.model_dump() | offered)
        columns = np.array([(one.prompt_tokens, one.output_tokens) for one in found.requests])
        off = columns.mean(axis=0) / (run.mean_prompt, run.mean_output) - 1
        if np.abs(off).max() <= ALIKE:
            return found
    return served({"lengths": {"kind": "fixed", **means}, **offered})


def other_loads(base: Benchmark) -> dict[str, Benchmark]:
    """Other loads of the same server that take a few minutes, in words."""
    alone = replace(base, rate=None, requests=None)
    long = replace(alone, mean_prompt=4 * base.mean_prompt, mean_output=16)
    many = max(64, 2 * (base.concurrency or 32))
    longer = "prompts four times as long, answers of 16 tokens, 4 clients"
    return {
        "one client": replace(alone, concurrency=1, requests_count=20),
        f"{many} clients": replace(alone, concurrency=many, requests_count=4 * many),
        "200 requests at once": replace(alone, concurrency=None, requests_count=200),
        longer: replace(long, concurrency=4, requests_count=80),
    }
