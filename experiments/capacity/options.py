"""The deployments to choose from: every scenario of a file at every point of its space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from pydantic import ValidationError

from sarathi_sim.experiments.capacity.capacity_section import CapacitySection
from sarathi_sim.experiments.capacity.judgement import Verdict, judge
from sarathi_sim.experiments.capacity.search import AT_ONCE, Probe, Probed, SearchPlan
from sarathi_sim.experiments.config.deployment import Deployment, Requests, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import KeyPath, assign, merge
from sarathi_sim.experiments.config.loading import Draft, check_scenario
from sarathi_sim.experiments.config.parameter_names import parameter
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.config.workload import (
    Arrivals,
    AtOnce,
    Closed,
    Gamma,
    Poisson,
    TraceArrivals,
    TraceLengths,
    Varying,
)
from sarathi_sim.experiments.sweeps.plan import SharedRequests, describe
from sarathi_sim.experiments.sweeps.points import Point, expand
from sarathi_sim.experiments.sweeps.section import SweepSpec
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.profiler.storage.strict import mistakes

PILOT_REQUESTS = 1000
LEAST_REQUESTS = 2500
"""Of a run on one replica, times the variance of its gaps and lengths."""
FINEST_REQUESTS = 20_000
"""Of a run whose length follows from the tolerance."""
MOST_REQUESTS = 100_000
"""Of a run on one replica that must last longer."""
BLOCKS = 20
"""A trace is resampled in so many blocks."""


@dataclass(frozen=True, eq=False)
class Option:
    """A deployment to choose: its name, its place in the space, and the resolved deployment."""

    name: str
    point: Point
    deployment: Deployment

    @property
    def scenario(self) -> Scenario:
        """Its resolved scenario."""
        return self.deployment.scenario

    @cached_property
    def natural_rate(self) -> float:
        """Its requests a second, as the configuration has them arrive; of a rate that varies and
        repeats, the mean over a period."""
        arrivals = self.scenario.workload.arrivals
        if isinstance(arrivals, Varying) and arrivals.repeat:
            at_s, rate = np.array([(each.at_s, each.rate) for each in arrivals.rates]).T
            return float(arrivals.scale * np.trapezoid(rate, at_s) / (at_s[-1] - at_s[0]))
        arrival_s = [request.arrival_s for request in self.deployment.requests]
        span_s = max(arrival_s, default=0.0) - min(arrival_s, default=0.0)
        return (len(arrival_s) - 1) / span_s if span_s else 1.0

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        cluster = self.scenario.cluster
        return cluster.tp * cluster.pp * cluster.replicas

    @property
    def alike(self) -> int:
        """How many replicas are simulated as one: all, or 1.

        A router that takes turns hands every n-th request to one of n replicas, so all of them see
        the same traffic, and if it arrives by itself none sees what the others do: one then stands
        for all.
        """
        scenario, workload = self.scenario, self.scenario.workload
        turns = scenario.cluster.router == "round_robin"
        alone = workload.sessions is None and not isinstance(workload.arrivals, Closed)
        return scenario.cluster.replicas if turns and alone else 1

    def at(self, probe: Probe, load: str) -> Deployment:
        """The deployment under a probe's load, or one of its replicas with its share of the load
        (:attr:`alike`)."""
        scenario, alike = self.under(probe.load, load), self.alike if load == "rate" else 1
        given = {"requests": probe.requests, "every": alike}
        update: dict[str, Any] = {"seed": probe.seed}
        update["workload"] = scenario.workload.model_copy(update=given)
        if alike > 1:
            update["cluster"] = scenario.cluster.model_copy(update={"replicas": 1})
        if probe.slower != 1:
            scale = scenario.engine.op_scale
            scaled = {op: probe.slower * scale.get(op, 1.0) for op in OPS}
            update["engine"] = scenario.engine.model_copy(update={"op_scale": scaled})
        return replace(self.deployment, scenario=scenario.model_copy(update=update))

    def under(self, load: float, kind: str) -> Scenario:
        """The scenario of all replicas at a load. A trace is resampled, so that a run may be
        longer than it."""
        workload = self.scenario.workload
        update: dict[str, Any] = {}
        update["arrivals"] = arrivals_at(self.scenario, load, kind, self.natural_rate)
        if isinstance(workload.lengths, TraceLengths) and workload.lengths.resample is None:
            block = {"resample": math.ceil(len(self.deployment.requests) / BLOCKS)}
            update["lengths"] = workload.lengths.model_copy(update=block)
        workload = workload.model_copy(update=update)
        return self.scenario.model_copy(update={"workload": workload})


def arrivals_at(scenario: Scenario, load: float, kind: str, natural: float) -> Any:
    """The arrivals of a scenario at another load; ``natural`` is the mean rate it has by itself."""
    given = scenario.workload.arrivals
    if kind == "clients":
        think_s = given.think_s if isinstance(given, Closed) else 0.0
        return Closed(kind="closed_loop", clients=round(load), think_s=think_s)
    if load == AT_ONCE:
        return AtOnce(kind="at_once")
    if isinstance(given, Gamma):
        return given.model_copy(update={"rate": load})
    if isinstance(given, TraceArrivals | Varying):
        return given.model_copy(update={"scale": given.scale * load / natural})
    return Poisson(kind="poisson", rate=load)


def options_of(draft: Draft, section: CapacitySection) -> list[Option]:
    """The deployments that a file describes. Raises ConfigError, a line per mistake."""
    points, requests_of = _points(draft, section), SharedRequests()
    options, found = [], dict[str, None]()
    for name in draft.overrides:
        for point in points:
            try:
                options.append(option_at(draft, section, name, point, requests_of))
            except ConfigError as error:
                found |= dict.fromkeys(str(error).splitlines())
    if found:
        raise ConfigError("\n".join(found))
    return options


def option_at(
    draft: Draft,
    section: CapacitySection,
    scenario: str,
    point: Point,
    requests_of: Requests = build_requests,
) -> Option:
    """The deployment that a scenario is at a point of the space. Raises ConfigError."""
    override = draft.overrides[scenario]
    tree = merge(draft.raw, override)
    for key, value in point.items():
        tree = assign(tree, tuple(key.split(".")), value)
    source = replace(draft.source, scenario=scenario, override=override)
    called = point_name(point)
    several = len(draft.overrides) > 1 or not called
    called = ", ".join(filter(None, (scenario if several else "", called)))
    checked = _pilot_of(check_scenario(tree, source), section)
    deployment = deploy(checked, source, requests_of)
    return Option(called, {"scenario": scenario, **point}, deployment)


def point_name(point: Mapping[str, Any]) -> str:
    """A point in words: ``TP 4, PP 2, vllm``."""
    return ", ".join(parameter(key).value(describe(value)) for key, value in point.items())


def _pilot_of(scenario: Scenario, section: CapacitySection) -> Scenario:
    """The scenario with the requests of a pilot, so that checking it takes no time."""
    workload = scenario.workload
    whole = isinstance(workload.lengths, TraceLengths) or isinstance(workload.arrivals, Varying)
    if whole:  # its mean rate and lengths are those of all requests
        return scenario
    count = min(pilot_requests(section), workload.requests or MOST_REQUESTS)
    return scenario.model_copy(update={"workload": workload.model_copy(update={"requests": count})})


def _points(draft: Draft, section: CapacitySection) -> list[Point]:
    where = f"{draft.source.file}: capacity.space"
    if not section.space:
        return [{}]
    try:
        spec = SweepSpec.model_validate(section.space)
    except ValidationError as error:

        def origin(path: KeyPath) -> str:
            return draft.source.name(("capacity", "space", *path))

        raise ConfigError("\n".join(mistakes(error, SweepSpec, section.space, origin))) from None
    if spec.seeds is not None or spec.contrast is not None:
        raise ConfigError(f"{where}: takes grid, zip, cases and sample only")
    points = expand(spec, None, where)
    for key in dict.fromkeys(key for point in points for key in point):
        if key.partition(".")[0] in ("workload", "seed", "scenarios", "capacity"):
            raise ConfigError(f"{where}: {key}: is no part of a deployment")
    return points


def pilot_requests(section: CapacitySection) -> int:
    """Requests of a pilot's runs."""
    most = section.requests or MOST_REQUESTS
    return min(most, max(PILOT_REQUESTS, section.fewest, (section.requests or 0) // 10))


def plan_of(option: Option, section: CapacitySection, where: str) -> SearchPlan:
    """How to search for an option's capacity. Raises ConfigError for runs too short for the SLO,
    or longer than a search may be."""
    given = section.replications
    if given.least > given.most:
        raise ConfigError(
            f"{where}: capacity.replications.least: value {given.least}: must be at "
            f"most replications.most, which is {given.most}"
        )
    workload = option.scenario.workload
    scale = option.alike if section.load == "rate" else 1
    simulated = option.scenario.cluster.replicas // scale
    variance = _variance(option, section, scale)
    budget = section.most_requests or simulated * MOST_REQUESTS
    if (section.requests or 0) > budget:
        raise ConfigError(
            f"{where}: capacity.requests: value {section.requests}: must be at most {budget}, "
            "capacity.most_requests (default: 100,000 a replica): give that, too"
        )
    requests = section.requests or simulated * _long_enough(variance, section)
    if (requests := min(requests, budget)) < section.fewest:
        raise ConfigError(
            f"{where}: capacity.requests: {requests} requests a run are too few for the SLO "
            f"{section.slo!r}: at least {section.fewest}, so that {BEYOND_TEXT}"
        )
    return SearchPlan(
        section.tolerance,
        given.least,
        given.most,
        requests,
        min(requests, pilot_requests(section)),
        option.scenario.seed,
        partial(_pooled, section),
        whole=section.load == "clients",
        keep=given.keep,
        limit_s=max(max(objective.limits.values()) for objective in section.objectives),
        pattern_s=_pattern_s(workload.arrivals),
        budget=budget,
        scale=scale,
        variance=simulated * variance,
    )


BEYOND_TEXT = "ten of them lie beyond the percentile"


def _pattern_s(arrivals: Arrivals) -> float:
    """How long arrivals must last to show how their rate varies: all of it, or three periods."""
    if not isinstance(arrivals, Varying):
        return 0.0
    last_s = arrivals.rates[-1].at_s
    return 3 * (last_s - arrivals.rates[0].at_s) if arrivals.repeat else last_s


def _pooled(section: CapacitySection, probes: Sequence[Probed]) -> Verdict:
    runs = [(probed.summary, probed.tables) for probed in probes]
    return judge(section.objectives, runs, section.load == "rate", section.rejected)


def _variance(option: Option, section: CapacitySection, scale: int) -> float:
    """The variance of the gap before a request and of its tokens, both relative to their means, of
    one of ``scale`` replicas that take turns."""
    requests = option.deployment.requests
    refused = option.deployment.refused[0]  # they are no work
    tokens = np.array(
        [0 if r.id in refused else r.prompt_tokens + r.output_tokens for r in requests], np.float64
    )
    variance = float(np.var(tokens) / np.mean(tokens) ** 2)
    if section.load == "clients":
        return variance
    gaps = np.diff(np.sort([r.arrival_s for r in requests]))
    of_gaps = float(np.var(gaps) / gaps.mean() ** 2) if gaps.any() else 1.0
    return variance + of_gaps / scale


def _long_enough(variance: float, section: CapacitySection) -> int:
    """Requests of a run on one replica, before its latencies are known.

    The load that a run happens to offer scatters with the square root of variance over requests.
    That is at most half the tolerance, up to :data:`FINEST_REQUESTS`, and at most that of
    :data:`LEAST_REQUESTS` Poisson arrivals.
    """
    fine = min(variance / (section.tolerance / 2) ** 2, FINEST_REQUESTS)
    wanted = 100 * math.ceil(max(fine, LEAST_REQUESTS * variance) / 100)
    return min(max(wanted, section.fewest, LEAST_REQUESTS), MOST_REQUESTS)
