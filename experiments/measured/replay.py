"""Recorded runs of real servers, request by request, beside their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.requests import make_requests
from sarathi_sim.simulator.views.explain import explain
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.base import Source
from ..config.deployment import Deployment, PoolsDeployment, deploy
from ..config.effects import refuse_without_effect
from ..config.inputs import DEFAULTS, factors
from ..config.loading import Experiment
from ..config.requests import Traffic
from ..config.scenario import Engine, Scenario
from ..run.compare import Compared
from .load_tools import Benchmark, read_benchmarks


@dataclass(frozen=True, eq=False)
class ServerRun:
    """A measured run. ``requests`` are :attr:`Benchmark.requests`, ``at_client`` or by the server's
    own clock; ``note`` says what of its file is not used."""

    requests: pd.DataFrame
    at_client: bool = True
    note: str = ""

    @classmethod
    def of(cls, run: Benchmark) -> ServerRun:
        """A load tool's run that has all its requests."""
        assert run.requests is not None
        return cls(run.requests, run.tool != "LLMServingSim", run.note)

    def for_scenario(self, scenario: Scenario, max_length: int, source: Source) -> list[Request]:
        """Its requests, in place of the ``workload`` section's; they declare their true output."""
        names = ("arrival_s", "prompt_tokens", "output_tokens")
        arrival_s, prompt, output = (self.requests[name].to_numpy() for name in names)
        if (longest := int((prompt + output).max())) > max_length:
            problem = f"must be at least {longest}, the longest request of the run"
            raise source.error("cluster.max_length", max_length, problem)
        columns = (arrival_s, prompt, output)
        found = Traffic(make_requests(*columns, max_length=max_length, declare_exact=True))
        found.said = (self.note,) if self.note else ()
        return found


def read_server_runs(path: Path) -> dict[str, ServerRun]:
    """The runs in a load tool's file by name. Raises UserError as :func:`read_benchmarks` does,
    and for a run of which only means were kept."""
    runs = {}
    for found in read_benchmarks(path):
        if found.requests is None:
            kept = f"these keep the times of every request: {found.command}"
            raise UserError(f"{path}: {found.name}: has only means; {kept}")
        runs[found.name] = ServerRun.of(found)
    return runs


MEASURES = ("ttft_s", "tpot_s", "latency_s")
STATISTICS = ("mean", "p50", "p90", "p99")
NUMBERS = (
    *("makespan_s", "output_tokens_per_s"),
    *(f"{key}.{each}" for key in MEASURES for each in STATISTICS),
)
VARIANTS = {
    "measured": "measured",
    "zero": "no host time",
    "configured": "as configured",
    "fitted": "fitted to these runs",
    "left_out": "fitted to other runs",
}
"""Names of a run's simulations in a score."""
COUNTS = {
    "preemptions": "preemptions",
    "hit_rate": "hit rate of the prefix cache",
    "num_blocks": "KV blocks",
}


def numbers_of(table: pd.DataFrame) -> dict[str, Any]:
    """The :data:`NUMBERS` of a table of requests, measured or simulated."""
    makespan = float((table["arrival_s"] + table["latency_s"]).max())
    found: dict[str, Any] = {
        "makespan_s": makespan,
        "output_tokens_per_s": int(table["output_tokens"].sum()) / makespan,
    }
    for key in MEASURES:
        values = table[key].dropna().to_numpy(np.float64)
        quantiles = np.quantile(values, [0.5, 0.9, 0.99]).tolist() if len(values) else [None] * 3
        mean = float(values.mean()) if len(values) else None
        found[key] = dict(zip(STATISTICS, [mean, *quantiles], strict=True))
    return found


def number_at(numbers: Mapping[str, Any], path: str) -> float | None:
    """The number at ``KEY`` or ``KEY.STATISTIC``; None where there is none."""
    key, _, statistic = path.partition(".")
    value = numbers.get(key)
    found: float | None = value.get(statistic) if statistic and value is not None else value
    return found


def _off(found: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    errors: dict[str, Any] = dict.fromkeys(measured)
    for key, value in measured.items():
        if isinstance(value, dict):
            errors[key] = _off(found[key], value)
        elif value and found[key] is not None:
            errors[key] = 100 * (found[key] / value - 1)
    return errors


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
        if isinstance(deployment, PoolsDeployment):
            prefill, decode = map(self.of, deployment.pools)
            return replace(deployment, prefill=prefill, decode=decode)
        constants = {key: getattr(self, key) for key in DEFAULTS}
        scenario, ops = deployment.scenario.having("engine", **constants), deployment.ops
        if (self.kernels, self.links) != (1.0, 1.0):
            ops = ops.scaled(factors(self.kernels, self.links))
        return replace(deployment, scenario=scenario, ops=ops)


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """The numbers of a run (:func:`numbers_of`; some may lack), and what served it."""

    name: str
    measured: Mapping[str, Any]
    deployment: Deployment

    @property
    def configured(self) -> Overheads:
        """The overheads of the configuration, or of its stack."""
        return Overheads.configured(self.deployment.pools[0].scenario.engine)

    def under(self, overheads: Overheads) -> Simulated:
        return simulated(overheads.of(self.deployment))

    def numbers(self, overheads: Overheads) -> dict[str, Any]:
        """Its simulated numbers."""
        return numbers_of(self.under(overheads).requests)


@dataclass(frozen=True, eq=False)
class Case(MeasuredRun):
    """A recorded run under a scenario. ``server`` is the same for runs that share its time outside
    of the GPUs: all, or those of one scenario if every scenario describes every run."""

    scenario: str
    run: ServerRun
    server: str = ""


@dataclass(frozen=True, eq=False)
class Simulated:
    """A simulation of a run."""

    deployment: Deployment
    analysis: Analysis

    @property
    def requests(self) -> pd.DataFrame:
        return self.analysis.requests

    def beside(self, run: ServerRun, measured: Mapping[str, Any]) -> dict[str, Any]:
        """The simulated values of the numbers in ``measured``, and the :data:`COUNTS`; ``off_pct``
        (their errors), ``per_request_pct`` (medians of absolute errors by request), ``notes``."""
        deployment, analysis, requests = self.deployment, self.analysis, self.requests
        found = numbers_of(requests)
        each = {key: requests[key] / run.requests[key] - 1 for key in MEASURES}
        cache, counts = deployment.scenario.kv_cache, deployment.summary(analysis)
        counts |= {"num_blocks": cache.num_blocks} if cache is not None else {}
        return {
            **found,
            "off_pct": _off(found, measured),
            "per_request_pct": {key: float((100 * e.abs()).median()) for key, e in each.items()},
            **{key: counts[key] for key in COUNTS if counts.get(key) is not None},
            "notes": list(deployment.remarks),
        }

    def compared(self, label: str) -> Compared:
        """Its parts, as ``compare`` takes them; two pools have none."""
        one, *others = self.deployment.pools
        parts = None if others else explain(self.analysis, one.predictor)
        return Compared(label, one.scenario.policy.name, {}, parts, (), ())


def simulated(deployment: Deployment) -> Simulated:
    """Simulate a deployment with its own requests."""
    return Simulated(deployment, Analysis(deployment.simulate()))


def case_of(experiment: Experiment, scenario: str, run: ServerRun, name: str = "") -> Case:
    """A run under a scenario; without front-end time, unless it is given, where a run by the
    server's clock does not include it. Raises UserError as :func:`deploy` does."""
    given = experiment.scenarios[scenario]
    frontend_s = given.engine.frontend_s if run.at_client else given.engine.frontend_s or 0.0
    engine = given.engine.model_copy(update={"frontend_s": frontend_s})
    described = given.model_copy(update={"engine": engine})
    deployment = deploy(described, experiment.sources[scenario], run.for_scenario)
    server = "" if experiment.runs else scenario
    return Case(name, numbers_of(run.requests), deployment, scenario, run, server)


def cases_of(experiment: Experiment, files: Sequence[Path]) -> list[Case]:
    """Every run under the scenarios that describe it: all or, with ``runs``, the first whose
    pattern its file's name matches. Raises UserError for a run without any, and for a
    calibration."""
    for name, given in experiment.scenarios.items():
        if given.calibration is not None:
            problem = "must be left out: score compares several sets of constants itself"
            raise experiment.sources[name].error("calibration", given.calibration, problem)
    cases: dict[str, Case] = {}
    runs = [(file, *each) for file in files for each in read_server_runs(file).items()]
    for file, run_name, run in runs:
        matching = [s for s, pattern in experiment.runs.items() if fnmatchcase(file.name, pattern)]
        scenarios = matching[:1] if experiment.runs else list(experiment.scenarios)
        if not scenarios:
            patterns = ", ".join(experiment.runs.values())
            raise UserError(f"{file}: no scenario of {experiment.file} matches it ({patterns})")
        for scenario in scenarios:
            name = run_name if len(scenarios) == 1 else f"{run_name}, {scenario}"
            if name in cases:
                raise UserError(f"{file}: another run is called {name}, too")
            cases[name] = case_of(experiment, scenario, run, name)
    found = list(cases.values())
    refuse_without_effect((experiment.sources[one.scenario], one.deployment) for one in found)
    return found
