"""Run an experiment: check everything, simulate every scenario, write the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.simulator.loop.simulation import SimulationError
from sarathi_sim.simulator.views.metric_registry import asked_quantiles
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.assumptions import assumed
from ..config.deployment import Deployment, check_together, deploy, workload_bytes
from ..config.effects import refuse_without_effect
from ..config.loading import Experiment, metric, refuse_of_session
from ..results import (
    ITERATIONS,
    TOKEN_GAPS,
    Tables,
    check_replaceable,
    result_folder,
    run_files,
    to_json,
)
from .uncertainty import AnyUncertainty, ratio_band, uncertainty

if TYPE_CHECKING:
    import pandas as pd

OF_ARRIVALS = 0.9
"""If this share of the makespan is before the last arrival, the arrivals set the throughput."""


@dataclass(frozen=True)
class ScenarioRun:
    """One simulated scenario. ``uncertainty`` has its bands; None if nothing ran."""

    deployment: Deployment
    analysis: Analysis
    summary: dict[str, Any]
    uncertainty: AnyUncertainty | None

    def __repr__(self) -> str:
        return f"<ScenarioRun of {self.summary['requests']} requests>"

    @property
    def requests(self) -> pd.DataFrame:
        """A row a request
        (:attr:`sarathi_sim.simulator.views.metrics.Analysis.request_columns`)."""
        return self.analysis.requests

    @property
    def iterations(self) -> pd.DataFrame:
        """A row a micro-batch (:attr:`sarathi_sim.simulator.views.metrics.Analysis.iterations`)."""
        return self.analysis.iterations

    @property
    def ledger(self) -> pd.DataFrame:
        """A row for each replica and stage: the accounts of its time, in seconds."""
        return self.analysis.ledger


@dataclass(frozen=True)
class ExperimentResult:
    """All scenarios of an experiment, and the ratios its ``compare`` section asks for.
    ``ratio_bands`` are the 90 % bands of those ratios that follow from makespans."""

    experiment: Experiment
    runs: dict[str, ScenarioRun]
    ratios: dict[str, float]
    ratio_bands: dict[str, list[float]]

    def __repr__(self) -> str:
        return f"<ExperimentResult of {self.experiment.name}: {', '.join(self.runs)}>"

    def __getitem__(self, scenario: str) -> ScenarioRun:
        return self.runs[scenario]

    @property
    def tables(self) -> dict[str, Tables]:
        """Every scenario's tables, as the figures take them."""
        return {
            name: Tables(
                *(run.requests, run.ledger, run.analysis.token_gaps),
                run.deployment.pools[-1].scenario.policy.name,
                run.summary["steady"],
            )
            for name, run in self.runs.items()
        }

    def summary(self) -> dict[str, Any]:
        """JSON-able: ``scenarios`` (summaries by name, with bands: docs/reference/metrics.md),
        ``ratios`` and ``ratio_bands``; ``notes``, the assumptions about each deployment;
        ``rejections`` if requests are rejected, ``doubts`` if op times are doubtful."""
        asked, used = self.experiment, {name: run.deployment for name, run in self.runs.items()}
        narrow = {name: _narrow_by(run) for name, run in self.runs.items()}
        content: dict[str, Any] = to_json(
            {
                "name": asked.name,
                "description": asked.description,
                "scenarios": {
                    name: {**run.summary, **run.uncertainty.as_json(run.summary)}
                    if run.uncertainty is not None
                    else run.summary
                    for name, run in self.runs.items()
                },
                "compare": _compare(asked),
                "ratios": self.ratios,
                "ratio_bands": self.ratio_bands,
                "reference": {n: r.paper for n, r in asked.compare.items() if r.paper is not None},
                "deployments": {
                    name: {"model": d.model.name, "device": d.device.name}
                    | {"op_times": d.bundle_name}
                    for name, d in used.items()
                },
                "notes": {name: assumed(d) for name, d in used.items()},
                "doubts": {name: list(d.doubts) for name, d in used.items() if d.doubts},
                "rejections": {name: d.rejections for name, d in used.items() if d.rejections},
                "narrow_bands": {name: why for name, why in narrow.items() if why},
            }
        )
        return content


def deploy_all(experiment: Experiment) -> dict[str, Deployment]:
    """Every scenario, checked against model, device, profiles, workload and this machine's memory.
    The memory must hold all scenarios' results at once: they are kept until the end."""
    scenarios = experiment.scenarios
    check_together({n: workload_bytes(s) for n, s in scenarios.items()}, experiment.file)
    deployments = {
        name: deploy(scenario, experiment.sources[name]) for name, scenario in scenarios.items()
    }
    refuse_without_effect((experiment.sources[n], d) for n, d in deployments.items())
    check_together({n: d.memory_bytes for n, d in deployments.items()}, experiment.file)
    return deployments


def _compare(experiment: Experiment) -> dict[str, dict[str, Any]]:
    return {n: ratio.model_dump(exclude_none=True) for n, ratio in experiment.compare.items()}


def simulate_all(experiment: Experiment, progress: Progress = silent) -> ExperimentResult:
    """Simulate every scenario. Raises UserError before the first one if any cannot run."""
    return _simulate(experiment, deploy_all(experiment), progress)


def _simulate(
    experiment: Experiment, deployments: Mapping[str, Deployment], progress: Progress
) -> ExperimentResult:
    asked = asked_quantiles(ratio.metric for ratio in experiment.compare.values())
    runs = {name: _run(name, each, asked, progress) for name, each in deployments.items()}
    for name, run in runs.items():

        def told(done: int, name: str = name, total: int = len(run.deployment.requests)) -> None:
            progress(f"{name}: errors of op times", done, total)

        band = uncertainty(run.deployment, run.analysis, told)
        runs[name] = replace(run, uncertainty=band)
    ratios, bands = dict[str, float](), dict[str, list[float]]()
    for name, ratio in experiment.compare.items():
        where, both = f"{experiment.file}: compare.{name}.metric", [runs[s] for s in ratio.over]
        above, below = (metric(run.summary, ratio.metric, where) for run in both)
        ratios[name] = above / below if below else float("nan")
        one = ratio_band(ratio.metric, ratios[name], *(run.uncertainty for run in both))
        if one is not None:
            bands[name] = one
    return ExperimentResult(experiment, runs, ratios, bands)


@contextmanager
def writing(
    experiment: Experiment, out: Path, progress: Progress = silent
) -> Iterator[tuple[ExperimentResult, Path]]:
    """Simulate every scenario and write the result folder ``out``, whole or not at all. The block
    gets the result and the folder, to which it adds the summary, and other files. Raises UserError,
    before any simulation, for mistakes of the user."""
    check_replaceable(out)
    for name, scenario in experiment.scenarios.items():
        refuse_of_session(scenario, experiment.sources[name])
    deployments = deploy_all(experiment)
    with result_folder(out) as folder:  # made before simulating: writing there may not be allowed
        outcome = _simulate(experiment, deployments, progress)
        _write_tables(outcome, folder)
        yield outcome, folder


def _run(
    name: str, deployment: Deployment, quantiles: Sequence[float], progress: Progress
) -> ScenarioRun:
    total = len(deployment.requests)
    progress(name, 0, total)
    try:
        records = deployment.simulate(lambda done: progress(name, done, total))
    except SimulationError as error:
        raise SimulationError(f"{name}: {error}") from error
    analysis = Analysis(records, quantiles)
    summary = deployment.summary(analysis)
    kv_cache, memory = deployment.scenario.kv_cache, deployment.memory
    if kv_cache is not None and memory is not None:
        blocks = {"num_blocks": kv_cache.num_blocks, "block_size": kv_cache.block_size}
        summary["kv_cache"] = blocks | memory.as_json()
    return ScenarioRun(deployment, analysis, summary, None)


def _narrow_by(run: ScenarioRun) -> str | None:
    """The reason why a run's band is narrower than its op errors would make it; None without."""
    workload, sent_s = run.deployment.scenario.workload, run.analysis.records.arrival_s
    if run.uncertainty is None or run.analysis.records.handovers is not None:
        return None
    if workload.sessions is not None or workload.arrivals.kind == "closed_loop":
        return "clients"
    lasts_s = float(sent_s.max() - sent_s.min())
    return "arrivals" if lasts_s > OF_ARRIVALS * run.summary["makespan_s"] else None


def _write_tables(outcome: ExperimentResult, folder: Path) -> None:
    experiment, runs = outcome.experiment, outcome.runs
    for name, run in runs.items():
        (folder / name).mkdir()
        run.analysis.token_gaps.to_parquet(folder / name / TOKEN_GAPS, index=False)
        run.analysis.iterations.to_parquet(folder / name / ITERATIONS, index=False)
    config = {
        "name": experiment.name,
        "description": experiment.description,
        "scenarios": {},
        "compare": _compare(experiment),
    }
    simulated = {n: (run.deployment.scenario, run.analysis) for n, run in runs.items()}
    for name, file in run_files(simulated, config).items():
        (folder / name).write_bytes(file)
