"""The deployments to choose from: every scenario of a file at every point of its space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import ValidationError

from experiments.capacity.capacity_section import CapacitySection
from experiments.capacity.search import AT_ONCE, Probe, SearchPlan
from experiments.config.deployment import Deployment, deploy
from experiments.config.errors import ConfigError
from experiments.config.key_paths import KeyPath, assign, merge
from experiments.config.loading import Draft, Source, check_scenario
from experiments.config.parameter_names import parameter
from experiments.config.scenario import Scenario
from experiments.config.workload import (
    AtOnce,
    Closed,
    Gamma,
    Poisson,
    TraceArrivals,
    TraceLengths,
    Varying,
)
from experiments.sweeps.plan import SharedRequests, describe
from experiments.sweeps.points import Point, expand
from experiments.sweeps.section import SweepSpec
from policies.request import too_long
from profiler.facts.ops import OPS
from profiler.storage.strict import mistakes

PILOT_REQUESTS = 1000
MOST_REQUESTS = 50_000
"""Of a run whose length follows from the tolerance."""


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
        """Its requests a second, as the configuration has them arrive."""
        last = max((request.arrival_s for request in self.deployment.requests), default=0.0)
        return len(self.deployment.requests) / last if last else 1.0

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        cluster = self.scenario.cluster
        return cluster.tp * cluster.pp * cluster.replicas

    def at(self, probe: Probe, load: str) -> Deployment:
        """The deployment under a probe's load."""
        scenario = self.scenario
        update: dict[str, Any] = {"seed": probe.seed}
        arrivals = arrivals_at(scenario, probe.load, load, self.natural_rate)
        workload = {"arrivals": arrivals, "requests": probe.requests}
        update["workload"] = scenario.workload.model_copy(update=workload)
        if probe.slower != 1:
            scale = scenario.engine.op_scale
            scaled = {op: probe.slower * scale.get(op, 1.0) for op in OPS}
            update["engine"] = scenario.engine.model_copy(update={"op_scale": scaled})
        return replace(self.deployment, scenario=scenario.model_copy(update=update))


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


def serving(deployment: Deployment, source: Source) -> Deployment:
    """The same deployment. Raises ConfigError where it rejects every request."""
    longest = deployment.scenario.cluster.max_length
    assert longest
    if all(too_long(request, longest) for request in deployment.requests):
        raise source.error("cluster.max_length", longest, "every request is longer, and rejected")
    return deployment


def options_of(draft: Draft, section: CapacitySection) -> list[Option]:
    """The deployments that a file describes. Raises ConfigError, a line per mistake."""
    points = _points(draft, section)
    swept = list(dict.fromkeys(key for point in points for key in point))
    requests_of = SharedRequests()
    options, found = [], dict[str, None]()
    for name, override in draft.overrides.items():
        for point in points:
            tree = merge(draft.raw, override)
            for key, value in point.items():
                tree = assign(tree, tuple(key.split(".")), value)
            called = point_name(point, swept)
            several = len(draft.overrides) > 1 or not called
            called = ", ".join(filter(None, (name if several else "", called)))
            source = replace(draft.source, scenario=name, override=override)
            try:
                scenario = check_scenario(tree, source)
                pilots = deploy(_pilot_of(scenario, section), source, requests_of)
                deployment = serving(pilots, source)
            except ConfigError as error:
                found |= dict.fromkeys(str(error).splitlines())
                continue
            options.append(Option(called, {"scenario": name, **point}, deployment))
    if found:
        raise ConfigError("\n".join(found))
    return options


def point_name(point: Mapping[str, Any], keys: list[str]) -> str:
    """A point in words: ``TP 4, PP 2, vllm``."""
    cells = (describe(point[key]) for key in keys if key in point)
    named = zip((key for key in keys if key in point), cells, strict=True)
    return ", ".join(parameter(key).value(cell) for key, cell in named)


def _pilot_of(scenario: Scenario, section: CapacitySection) -> Scenario:
    """The scenario with the requests of a pilot, so that checking it takes no time."""
    if isinstance(scenario.workload.arrivals, TraceArrivals | Varying):
        return scenario  # its mean rate is that of all requests
    count = min(pilot_requests(section), scenario.workload.requests or MOST_REQUESTS)
    workload = scenario.workload.model_copy(update={"requests": count})
    return scenario.model_copy(update={"workload": workload})


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
    """How to search for an option's capacity. Raises ConfigError for runs too short for the SLO."""
    workload = option.scenario.workload
    if section.replications.least > section.replications.most:
        raise ConfigError(
            f"{where}: capacity.replications.least: value {section.replications.least}: must be at "
            f"most replications.most, which is {section.replications.most}"
        )
    least, most = section.replications.least, section.replications.most
    if section.load == "rate" and isinstance(workload.arrivals, TraceArrivals):
        least = most = 1  # a trace's arrivals are one realisation
    requests = section.requests or _long_enough(option, section)
    if isinstance(workload.lengths, TraceLengths) and section.requests is None:
        requests = min(requests, len(option.deployment.requests))
    if requests < section.fewest:
        told = "capacity.requests" if section.requests else "workload.lengths.path"
        raise ConfigError(
            f"{where}: {told}: {requests} requests a run are too few for the SLO {section.slo!r}: "
            f"at least {section.fewest}, so that {BEYOND_TEXT}"
        )
    return SearchPlan(
        section.tolerance,
        least,
        most,
        requests,
        min(requests, pilot_requests(section)),
        option.scenario.seed,
        whole=section.load == "clients",
    )


BEYOND_TEXT = "ten of them lie beyond the percentile"


def _long_enough(option: Option, section: CapacitySection) -> int:
    """So many requests that the load which one run happens to offer scatters by a third of the
    tolerance: a run's mean gap and mean work scatter with 1 / sqrt(requests)."""
    tokens = np.array([r.prompt_tokens + r.output_tokens for r in option.deployment.requests])
    variance = float(np.var(tokens) / np.mean(tokens) ** 2)
    if section.load == "rate":
        variance += 1.0
    wanted = 100 * math.ceil(variance / (section.tolerance / 3) ** 2 / 100)
    return min(max(wanted, section.fewest), MOST_REQUESTS)
