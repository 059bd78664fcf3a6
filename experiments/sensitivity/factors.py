"""What a sensitivity is asked, and what it changes, one at a time: each op's time, links, the host,
the workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sarathi_sim.experiments.capacity.options import Option
from sarathi_sim.experiments.capacity.slo import CapacitySection
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.loading import Draft
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.experiments.config.scenario import Engine, Scenario
from sarathi_sim.experiments.config.workload import AtOnce, Closed
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, ATTENTION, OPS, SEND_RECV
from sarathi_sim.profiler.storage.strict import did_you_mean

HOST = tuple(key for key in Engine.model_fields if key.endswith("_s"))
"""The engine's keys that are seconds."""
LENGTHS = {"prompt lengths": "prompt", "output lengths": "output"}
BURSTINESS = "burstiness"
KINDS = ("ops", "op", "link", "host", "workload")


@dataclass(frozen=True)
class Factor:
    """Something that may be so many times what it is. ``changed``: the scenario where it is."""

    name: str
    kind: str
    changed: Callable[[Scenario, float], Scenario]

    def of(self, option: Option, times: float) -> Option:
        """The option where this is ``times`` what it was."""
        scenario = self.changed(option.scenario, times)
        name = f"{option.name}; {self.name} x {times:g}"
        return Option(name, option.point, replace(option.deployment, scenario=scenario))

    def realised(self, option: Option, times: float) -> float:
        """How many times it really is: lengths are whole tokens, within the longest one.

        Raises ConfigError where requests become too long.
        """
        key = LENGTHS.get(self.name)
        if key is None:
            return times
        scenario, length = option.scenario, option.scenario.cluster.max_length
        assert length is not None
        few = scenario.workload.model_copy(update={"requests": len(option.deployment.requests)})
        scenario = scenario.model_copy(update={"workload": few})
        source = Source(self.name, "", {}, ())
        before, after = (
            [getattr(request, f"{key}_tokens") for request in build_requests(one, length, source)]
            for one in (scenario, self.changed(scenario, times))
        )
        return float(np.mean(after) / np.mean(before))


@dataclass(frozen=True)
class Question:
    """What is asked: ``options`` and the ``factors`` of each, ``by`` which part they are changed,
    and how often. ``measures`` are metrics; none: the capacity under the section's SLO."""

    draft: Draft
    section: CapacitySection
    options: dict[Option, list[Factor]]
    by: float
    replications: int
    measures: tuple[str, ...] = ()


def factors_of(deployment: Deployment, gaps: bool | None = None) -> list[Factor]:
    """All that its runs depend on. ``gaps``: whether requests arrive one after the other (None: as
    its workload says)."""
    ops = ops_of(deployment)
    links = [op for op in ops if op in (ALL_REDUCE, ALL_TO_ALL, SEND_RECV)]
    found = [Factor("all ops", "ops", _ops(ops)), *(Factor(op, "op", _ops([op])) for op in ops)]
    if links:
        found.append(Factor("link speed", "link", _ops(links, -1)))
    if any(getattr(deployment.scenario.engine, key) for key in HOST):
        found.append(Factor("host time", "host", _host))
    found += [Factor(name, "workload", _shift(key)) for name, key in LENGTHS.items()]
    arrivals = deployment.scenario.workload.arrivals
    if not isinstance(arrivals, AtOnce | Closed) if gaps is None else gaps:
        found.append(Factor(BURSTINESS, "workload", _shift(BURSTINESS)))
    return found


def chosen(found: Iterable[Factor], names: Iterable[str], told: str) -> list[Factor]:
    """Those of these names; all, where there are none. Raises ConfigError for an unknown one."""
    known, wanted = {factor.name: factor for factor in found}, list(names)
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"{told}: {name!r}: one of {', '.join(known)}{did_you_mean(name, known)}"
            )
    return [factor for name, factor in known.items() if not wanted or name in wanted]


def ops_of(deployment: Deployment) -> list[str]:
    """The ops that its batches take time for."""
    cluster, ops = deployment.scenario.cluster, deployment.ops
    there = {*ops.by_rows, *ATTENTION}
    if ops.all_reduce is not None and cluster.tp > 1:
        there.add(ALL_REDUCE)
    if cluster.pp > 1:
        there.add(SEND_RECV)
    head = deployment.scenario.engine.lm_head
    return [op for op in OPS if op in there and (head or not OPS[op].outputs)]


def _ops(names: Iterable[str], power: int = 1) -> Callable[[Scenario, float], Scenario]:
    def changed(scenario: Scenario, times: float) -> Scenario:
        scale = scenario.engine.op_scale
        slower = {op: scale.get(op, 1.0) * times**power for op in names}
        return _with(scenario, "engine", op_scale={**scale, **slower})

    return changed


def _host(scenario: Scenario, times: float) -> Scenario:
    engine = scenario.engine
    return _with(scenario, "engine", **{key: times * (getattr(engine, key) or 0) for key in HOST})


def _shift(key: str) -> Callable[[Scenario, float], Scenario]:
    def changed(scenario: Scenario, times: float) -> Scenario:
        shift = scenario.workload.shift
        shifted = shift.model_copy(update={key: times * getattr(shift, key)})
        return _with(scenario, "workload", shift=shifted)

    return changed


def _with(scenario: Scenario, section: str, **values: Any) -> Scenario:
    made = getattr(scenario, section).model_copy(update=values)
    return scenario.model_copy(update={section: made})
