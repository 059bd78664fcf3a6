"""Run an experiment: check everything, simulate every scenario, write the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config.deployment import Deployment, deploy
from experiments.config.errors import ConfigError
from experiments.config.loading import Experiment
from experiments.config.memory import check_together, workload_needs
from experiments.config.metric_paths import metric
from experiments.config.policy_file import stored
from experiments.config.scenario import Ratio
from experiments.results import (
    FORMAT,
    SUMMARY,
    TOKEN_GAPS,
    Tables,
    check_replaceable,
    result_folder,
    to_json,
)
from experiments.run.uncertainty import Uncertainty, ratio_band, uncertainty
from profiler.storage.plain_yaml import dump_yaml
from simulator.views.metrics import Analysis
from simulator.views.paging import is_paged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.figures.slices import Window

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""


@dataclass(frozen=True)
class ScenarioRun:
    """One simulated scenario: what was deployed, what came out, and that in numbers.

    ``uncertainty`` is how sure that is; None where nothing ran.
    """

    deployment: Deployment
    analysis: Analysis
    summary: dict[str, Any]
    uncertainty: Uncertainty | None


@dataclass(frozen=True)
class ExperimentResult:
    """All scenarios of an experiment, and the ratios its ``compare`` section asks for.

    ``ratio_bands`` are the 90 % bands of those ratios that follow from makespans.
    """

    experiment: Experiment
    runs: dict[str, ScenarioRun]
    ratios: dict[str, float]
    ratio_bands: dict[str, list[float]]

    def summary(self) -> dict[str, Any]:
        """JSON-able: ``{"scenarios": {name: summary}, "ratios": {name: value}, "ratio_bands": …}``.

        A scenario's summary has the keys of docs/metrics.md, bands and warnings included.
        """
        scenarios = {}
        for name, run in self.runs.items():
            extra = run.uncertainty.as_json(run.summary) if run.uncertainty is not None else {}
            scenarios[name] = {**run.summary, **extra}
        content = {"scenarios": scenarios, "ratios": self.ratios, "ratio_bands": self.ratio_bands}
        cleaned: dict[str, Any] = to_json(content)
        return cleaned


def deploy_all(experiment: Experiment) -> dict[str, Deployment]:
    """Every scenario, checked against model, device, profiles, workload and this machine's memory.

    Their results are all kept until the end.
    """
    scenarios = experiment.scenarios
    check_together([(n, workload_needs(s)) for n, s in scenarios.items()], experiment.file)
    deployments = {
        name: deploy(scenario, experiment.sources[name]) for name, scenario in scenarios.items()
    }
    check_together([(n, d.memory_needs) for n, d in deployments.items()], experiment.file)
    return deployments


def simulate_all(
    experiment: Experiment,
    progress: Progress | None = None,
    deployments: Mapping[str, Deployment] | None = None,
) -> ExperimentResult:
    """Simulate every scenario. Raises ConfigError before the first one if any cannot run.

    ``deployments`` spares checking them again.
    """
    runs = {}
    for name, deployment in (deployments or deploy_all(experiment)).items():
        runs[name] = _run(name, deployment, progress)
    ratios = {
        name: _ratio(experiment, name, ratio, runs) for name, ratio in experiment.compare.items()
    }
    bands = {}
    for name, ratio in experiment.compare.items():
        band = ratio_band(ratio.metric, ratios[name], *(runs[s].uncertainty for s in ratio.over))
        if band is not None:
            bands[name] = band
    return ExperimentResult(experiment, runs, ratios, bands)


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    figures: bool = True,
    trace: bool = False,
    window: Window | None = None,
    progress: Progress | None = None,
) -> ExperimentResult:
    """Simulate every scenario and write the result folder ``out``, whole or not at all.

    ``trace`` adds a Perfetto trace of the ``window`` (default: some passes through the pipeline in
    the middle of the run), which is also what the stage timeline shows. Raises ConfigError, before
    anything is simulated, for whatever the user can get wrong.
    """
    check_replaceable(out)
    deployments = deploy_all(experiment)
    with result_folder(out) as folder:  # before simulating: one may not be allowed to write there
        outcome = simulate_all(experiment, progress, deployments)
        window = _checked(window, outcome)
        _write_tables(outcome, folder)
        if trace or figures:
            if trace:
                from experiments.figures.perfetto import write_trace

                for name, run in outcome.runs.items():
                    write_trace(run.analysis, window, folder / name / "timeline.json.gz")
            if figures:
                _write_figures(outcome, window, folder / "figures", progress)
    return outcome


def _checked(window: Window | None, outcome: ExperimentResult) -> Window:
    """The window, which must begin before the last scenario ends; or one worth looking at."""
    from experiments.figures.slices import default_window

    records = [run.analysis.records for run in outcome.runs.values()]
    end_s = max(log.end_s for log in records)
    if window is not None and window.start_s >= end_s > 0:
        raise ConfigError(
            f"--window {window.start_s:g}:{window.length_s:g}: nothing happens there: "
            f"START must be less than {end_s:.6g}, when the last scenario ends"
        )
    return window or default_window(records)


def draw_tables(tables: Mapping[str, Tables], folder: Path) -> list[Path]:
    """The figures that need no more than the tables; returns what was written."""
    from experiments.figures.distributions import run_figures

    return _draw(run_figures(tables), folder, None)


def tables_of(outcome: ExperimentResult) -> dict[str, Tables]:
    """Every scenario's tables, as the figures take them."""
    return {
        name: Tables(
            run.analysis.requests,
            run.analysis.ledger,
            run.analysis.token_gaps,
            run.deployment.scenario.policy.name,
            run.summary["steady"],
        )
        for name, run in outcome.runs.items()
    }


def _run(name: str, deployment: Deployment, progress: Progress | None) -> ScenarioRun:
    total = len(deployment.requests)
    report = None
    if progress is not None:
        progress(name, 0, total)
        report = lambda done: progress(name, done, total)  # noqa: E731
    analysis = Analysis(deployment.simulate(report))
    tp = deployment.scenario.cluster.tp
    summary = analysis.summary(deployment.model, deployment.device, tp)
    return ScenarioRun(deployment, analysis, summary, uncertainty(deployment, analysis))


def _ratio(
    experiment: Experiment, name: str, ratio: Ratio, runs: Mapping[str, ScenarioRun]
) -> float:
    above, below = (
        metric(runs[scenario].summary, ratio.metric, f"{experiment.file}: compare.{name}.metric")
        for scenario in ratio.over
    )
    return above / below if below else float("nan")


def _write_tables(outcome: ExperimentResult, folder: Path) -> None:
    experiment = outcome.experiment
    scenarios, policies = {}, dict[str, bytes]()
    for name, run in outcome.runs.items():
        scenarios[name], files = stored(run.deployment.scenario, name)
        policies |= files
    resolved = {
        "name": experiment.name,
        "description": experiment.description,
        "scenarios": scenarios,
        "compare": {n: r.model_dump(exclude_none=True) for n, r in experiment.compare.items()},
    }
    _write(folder / "config.yaml", dump_yaml(resolved))
    reference = {name: r.paper for name, r in experiment.compare.items() if r.paper is not None}
    content = {"format": FORMAT, "name": experiment.name, **outcome.summary()}
    content["reference"] = reference
    _write(folder / SUMMARY, json.dumps(content, indent=2) + "\n")
    for name, run in outcome.runs.items():
        (folder / name).mkdir()
        run.analysis.requests.to_parquet(folder / name / "requests.parquet", index=False)
        run.analysis.token_gaps.to_parquet(folder / name / TOKEN_GAPS, index=False)
        run.analysis.iterations.to_parquet(folder / name / "iterations.parquet", index=False)
        run.analysis.ledger.to_csv(folder / name / "ledger.csv", index=False)
    for name, content_of in policies.items():
        (folder / name).write_bytes(content_of)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_figures(
    outcome: ExperimentResult, window: Window, folder: Path, progress: Progress | None
) -> None:
    from experiments.figures.distributions import run_figures
    from experiments.figures.gantt import stage_timeline
    from experiments.figures.occupancy import occupancy

    tables = tables_of(outcome)
    runs = {name: run.analysis for name, run in outcome.runs.items()}
    policies = {name: table.policy for name, table in tables.items()}
    drawn = {
        **run_figures(tables),
        "timeline": lambda: stage_timeline(runs, window, policies),
    }
    if any(is_paged(run.records) for run in runs.values()):
        drawn["occupancy"] = lambda: occupancy(runs, policies)
    _draw(drawn, folder, progress)


def _draw(
    drawn: Mapping[str, Callable[[], Figure]], folder: Path, progress: Progress | None
) -> list[Path]:
    from experiments.figures.style import save, styled

    folder.mkdir(exist_ok=True)
    written = []
    for done, (name, draw) in enumerate(drawn.items()):
        if progress is not None:
            progress("figures", done, len(drawn))
        with styled():
            written += save(draw(), folder, name)
    return written
