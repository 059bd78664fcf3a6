"""Recorded runs of real servers, request by request, beside their simulation.

Each run is simulated without host time (``zero``: nothing fitted), as its configuration says
(``configured``, where this gives a host time), with host time fitted to all the configuration's
runs (``fitted``), and with one fitted to its other runs (``left_out``, where there are any).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.run.compare import Compared, comparison
from sarathi_sim.experiments.score.server_run import (
    MEASURES,
    ServerRun,
    beside,
    counts_of,
    from_queue,
    numbers_of,
    read_server_run,
)
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import NO_HOST, HostTime
from sarathi_sim.simulator.views.explain import explain
from sarathi_sim.simulator.views.metrics import Analysis

UNITS = np.array([1e-3, 5e-5])
"""Host seconds of an iteration and of a sequence that the fit takes as 1."""
STEP = 0.5
"""By how many of them it looks ahead: far enough that another schedule does not matter."""
MOST_STEPS = 8
MOST_FRONTEND_S = 0.05
"""What HTTP and a tokeniser may take of a request; more is something else."""
BATCHES = 4
"""Groups of requests, by how many ran beside them."""


@dataclass(frozen=True)
class Overheads:
    """Time outside of the GPUs: the host's, and ``frontend_s`` seconds of each request outside of
    the engine (HTTP, tokeniser)."""

    host: HostTime = NO_HOST
    frontend_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Case:
    """A recorded run, and the deployment that served it.

    ``server`` is the same for runs of one server, which share its time outside of the GPUs: all, or
    where every scenario describes every run, those of one scenario.
    """

    name: str
    scenario: str
    run: ServerRun
    deployment: Deployment
    server: str = ""

    @property
    def file_name(self) -> str:
        """Its name in file names."""
        return self.name.replace(", ", "_")

    @property
    def configured(self) -> Overheads:
        """Those of the configuration, or of its stack."""
        engine = self.deployment.scenario.engine
        return Overheads(host_of(engine), engine.frontend_s or 0.0)

    def under(self, overheads: Overheads) -> Simulated:
        """Its simulation with that time outside of the GPUs."""
        scenario, host = self.deployment.scenario, overheads.host
        engine = scenario.engine.model_copy(
            update={
                "host_iteration_s": host.iteration_s,
                "host_sequence_s": host.sequence_s,
                "frontend_s": overheads.frontend_s,
                "launch_layer_s": host.launch_layer_s,
            }
        )
        changed = replace(self.deployment, scenario=scenario.model_copy(update={"engine": engine}))
        return Simulated(changed, Analysis(changed.simulate()), overheads)

    @cached_property
    def beside(self) -> Floats:
        """How many requests were between their first and last token, in the mean over each one's
        own time between them; as measured."""
        rows = self.run.requests
        first = (rows["arrival_s"] + rows["ttft_s"]).to_numpy()
        last = (rows["arrival_s"] + rows["latency_s"]).to_numpy()
        shared = np.minimum.outer(last, last) - np.maximum.outer(first, first)
        own = np.where(last > first, last - first, np.nan)
        return np.asarray(np.maximum(shared, 0).sum(axis=1) / own)


@dataclass(frozen=True, eq=False)
class Simulated:
    """A simulation of a run."""

    deployment: Deployment
    analysis: Analysis
    overheads: Overheads

    @property
    def requests(self) -> pd.DataFrame:
        """Its table of requests."""
        return self.analysis.requests

    def off(self, case: Case, key: str) -> Floats:
        """Relative errors of a measure, request by request; NaN where it has none."""
        return np.asarray(self.requests[key] / case.run.requests[key] - 1, np.float64)

    def lacking(self, case: Case, key: str) -> Floats:
        """Seconds that a measure lacks, request by request."""
        return np.asarray(case.run.requests[key] - self.requests[key], np.float64)

    def compared(self, label: str) -> Compared:
        """Its parts, as ``compare`` takes them."""
        parts = explain(self.analysis, self.deployment.predictor)
        return Compared(label, self.deployment.scenario.policy.name, parts, (), ())


def cases_of(experiment: Experiment, files: Sequence[Path]) -> list[Case]:
    """Every run under the scenarios that describe it: all, or the first one of ``runs`` whose
    pattern its file name has. Raises ConfigError for a run that none describes."""
    cases: dict[str, Case] = {}
    for file in files:
        run = read_server_run(file)
        matching = [s for s, pattern in experiment.runs.items() if fnmatchcase(file.name, pattern)]
        scenarios = matching[:1] if experiment.runs else list(experiment.scenarios)
        if not scenarios:
            patterns = ", ".join(experiment.runs.values())
            raise ConfigError(f"{file}: no scenario of {experiment.file} is for it ({patterns})")
        for scenario in scenarios:
            source = experiment.sources[scenario]
            described = from_queue(experiment.scenarios[scenario])
            deployment = deploy(described, source, run.for_scenario)
            name = file.stem if len(scenarios) == 1 else f"{file.stem}, {scenario}"
            if name in cases:
                raise ConfigError(f"{file}: another run is called {name}, too")
            server = "" if experiment.runs else scenario
            cases[name] = Case(name, scenario, run, deployment, server)
    return list(cases.values())


def fitted_to(cases: Sequence[Case]) -> Overheads:
    """What these runs say of the time outside of the GPUs. None of it is negative.

    Host time gives the least squares of the relative errors of the times per output token. The time
    of a request is then the median, over the runs, of what the median time to first token lacks;
    at most :data:`MOST_FRONTEND_S`.
    """

    def errors(found: Floats) -> Floats:
        each = [case.under(_overheads(found)).off(case, "tpot_s") for case in cases]
        together = np.concatenate(each)
        return np.asarray(together[~np.isnan(together)])

    def slopes(found: Floats) -> Floats:
        now = errors(found)
        return np.stack([(errors(found + one) - now) / STEP for one in STEP * np.eye(2)], axis=1)

    found = least_squares(
        errors, np.ones(2), slopes, bounds=(0, np.inf), ftol=1e-3, xtol=2e-2, max_nfev=MOST_STEPS
    )
    host = _overheads(found.x)
    lacking = [np.median(case.under(host).lacking(case, "ttft_s")) for case in cases]
    frontend_s = float(np.clip(np.median(lacking), 0.0, MOST_FRONTEND_S))
    return replace(host, frontend_s=frontend_s)


def _overheads(units: Floats) -> Overheads:
    iteration, sequence = (units * UNITS).tolist()
    return Overheads(HostTime(iteration, sequence))


@dataclass(frozen=True, eq=False)
class Scored:
    """A run beside its simulations, by name, as the module's docstring has them."""

    case: Case
    simulated: Mapping[str, Simulated]


def score_runs(cases: Sequence[Case], progress: Progress) -> list[Scored]:
    """Simulate and fit."""
    found, together = [], dict[str, Overheads]()
    for done, case in enumerate(cases):
        progress("fits", done, len(cases))
        alike = [each for each in cases if each.server == case.server]
        if case.server not in together:
            together[case.server] = fitted_to(alike)
        variants = {"zero": Overheads(), "configured": case.configured}
        variants["fitted"] = together[case.server]
        if case.configured.host == NO_HOST:
            del variants["configured"]
        if others := [each for each in alike if each is not case]:
            variants["left_out"] = fitted_to(others)
        simulated = {name: case.under(overheads) for name, overheads in variants.items()}
        found.append(Scored(case, simulated))
    progress("fits", len(cases), len(cases))
    return found


def content_of(scored: Sequence[Scored]) -> dict[str, Any]:
    """Numbers as ``score --json`` prints them: ``runs`` by name.

    A run has the numbers ``measured``; each simulation has the same, ``off_pct`` (how far off),
    ``per_request_pct`` (the median over requests of the absolute error) and its ``host_s``;
    ``remains`` divides the difference in the mean latency, ``by_batch`` has the time per output
    token of requests by how many ran beside them.
    """
    return {"runs": {each.case.name: _of_run(each) for each in scored}}


def _of_run(scored: Scored) -> dict[str, Any]:
    case = scored.case
    measured = numbers_of(case.run.requests)
    content: dict[str, Any] = {
        "scenario": case.scenario,
        "requests": len(case.run.requests),
        "measured": measured,
    }
    for name, simulated in scored.simulated.items():
        content[name] = {
            **beside(simulated.requests, case.run, measured, {}),
            **counts_of(simulated.deployment, simulated.analysis),
            "overheads": {
                **asdict(simulated.overheads.host),
                "frontend_s": simulated.overheads.frontend_s,
            },
        }
    return content | {"remains": _remains(scored), "by_batch": _by_batch(scored)}


def _remains(scored: Scored) -> dict[str, Any]:
    """What the mean latency lacks without host time, in seconds.

    ``host`` is what the fitted one brings, directly and by what follows from it (``parts``, as
    ``compare`` has them), ``frontend`` the fitted time outside of the engine. Of the rest,
    ``first_token`` is before the first token (scheduling, admission, prompts), ``later_tokens``
    after it (ops, and host time of another shape).
    """
    zero, fitted = (scored.simulated[name] for name in ("zero", "fitted"))
    tables = (scored.case.run.requests, zero.requests, fitted.requests)
    (ttft, latency), (_, before), (first, after) = (
        (float(table["ttft_s"].mean()), float(table["latency_s"].mean())) for table in tables
    )
    parts = comparison(zero.compared("zero"), fitted.compared("fitted"))["mean_latency"]["parts"]
    parts.pop("frontend", None)  # has its own line
    return {
        "latency_s": latency - before,
        "host": after - before - fitted.overheads.frontend_s,
        "frontend": fitted.overheads.frontend_s,
        "first_token": ttft - first,
        "later_tokens": (latency - ttft) - (after - first),
        "parts": {name: part["difference_s"] for name, part in parts.items()},
        "predicted_parts": {name: part["a_s"] for name, part in parts.items()},
    }


def _by_batch(scored: Scored) -> list[dict[str, Any]]:
    """Groups of equally many requests: the median of those beside, and mean times per output
    token."""
    columns = {"running": scored.case.beside, "measured_s": scored.case.run.requests["tpot_s"]}
    columns |= {f"{n}_s": s.requests["tpot_s"] for n, s in scored.simulated.items()}
    table = pd.DataFrame(columns).dropna().sort_values("running", ignore_index=True)
    groups = [each for each in np.array_split(np.arange(len(table)), BATCHES) if len(each)]
    return [
        {
            "requests": len(rows),
            "running": float(table["running"].iloc[rows].median()),
            **{name: float(table[name].iloc[rows].mean()) for name in columns if name != "running"},
        }
        for rows in groups
    ]


def requests_table(scored: Sequence[Scored]) -> pd.DataFrame:
    """A row a request: its run, lengths, and the measures as measured and as simulated."""
    tables = []
    for each in scored:
        rows = each.case.run.requests
        columns: dict[str, Any] = {"run": each.case.name, "request": np.arange(len(rows))}
        columns |= {name: rows[name] for name in ("arrival_s", "prompt_tokens", "output_tokens")}
        columns |= {f"measured_{key}": rows[key] for key in MEASURES}
        for name, simulated in each.simulated.items():
            columns |= {f"{name}_{key}": simulated.requests[key] for key in MEASURES}
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)
