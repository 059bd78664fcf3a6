"""``sarathi-sim tune``: few short runs of the user's own server make its calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.calibration import ServerCalibration
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.effects import refuse_without_effect
from sarathi_sim.experiments.config.inputs import DEFAULTS
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.content import Section, SortableTable, enumerated, thinned
from sarathi_sim.experiments.measured.benchmarks import TOOLS, Benchmark, read_benchmarks
from sarathi_sim.experiments.measured.recorded import ServerRun, case_of, numbers_of, simulated
from sarathi_sim.experiments.measured.tuning import (
    NOISE,
    Overheads,
    Tuned,
    TunedRun,
    fit,
    slopes_at,
    too_fast,
)
from sarathi_sim.profiler.facts.formats import named_stack
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metric_registry import METRICS as METRICS_BY_KEY

SETTLED, OPEN = 0.6, 0.2
"""A constant is settled, or still open, if the runs tell so much of it."""
HELD_BACK = 0.9
"""Clients held the requests back if fewer than this share of the rate was served."""
MOST_REQUESTS = 4000
DOUBTFUL_PCT = 20
"""An error after the fit beyond which the calibration is doubted."""
ALIKE = 0.05
"""The workload of the configuration is that of a run if its mean lengths differ by no more."""


@dataclass(frozen=True, eq=False)
class Means:
    """A run of which only means are known, or one that is only thought of (nothing measured)."""

    name: str
    measured: Mapping[str, Any]
    deployment: Deployment

    def numbers(self, overheads: Overheads) -> dict[str, Any]:
        """Its simulated numbers."""
        return numbers_of(simulated(overheads.of(self.deployment)).requests)


@dataclass(frozen=True, eq=False)
class TunedServer:
    """A server's constants and the runs that they were fitted to, each with its numbers before and
    after; ``told`` is what a next run under each load would tell."""

    fitted: Tuned
    targets: Sequence[TunedRun]
    told: Mapping[str, float]
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
        runs = {}
        for target in self.targets:
            before, after = map(target.numbers, (self.fitted.before, self.fitted.overheads))
            runs[target.name] = {
                metric: {
                    "measured_s": target.measured[metric]["mean"],
                    **{
                        name: 100 * (of[metric]["mean"] / target.measured[metric]["mean"] - 1)
                        for name, of in (("before_pct", before), ("after_pct", after))
                    },
                }
                for metric in NOISE
                if target.measured[metric].get("mean")
            }
        return {
            "runs": runs,
            "before": asdict(self.fitted.before),
            "tuned": asdict(self.fitted.overheads),
            "known": self.fitted.known,
            "mixed_up": [list(pair) for pair in self.fitted.mixed_up],
            "next_runs": dict(self.told),
            "notes": list(self.notes),
            "too_fast": list(filter(None, map(too_fast, self.targets))),
        }


def tune(experiment: Experiment, files: Sequence[Path], progress: Progress) -> TunedServer:
    """The constants of the server that an experiment describes in its only scenario.

    Raises UserError for files that are no load tool's, for a scenario without a stack or with a
    calibration, and as :func:`deploy` does.
    """
    if len(experiment.scenarios) > 1:
        names = ", ".join(experiment.scenarios)
        raise UserError(f"{experiment.file}: has the scenarios {names}: tune needs just one")
    ((name, scenario),) = experiment.scenarios.items()
    source = experiment.sources[name]
    if scenario.stack is None:
        raise source.error("stack", None, "is needed: constants are shrunk towards a stack's")
    if scenario.calibration is not None:
        raise source.error("calibration", scenario.calibration, "is what tune makes: leave it out")
    read = [run for file in files for run in read_benchmarks(file)]
    called = [run.name for run in read]
    if twice := next((one for one in called if called.count(one) > 1), None):
        raise UserError(f"two runs are called {twice}: give the files other names")
    targets: list[TunedRun] = []
    for run in read:
        if run.requests is not None:
            targets.append(case_of(experiment, name, ServerRun.of(run), run.name))
        else:
            known = {
                metric: {} if isnan(value) else {"mean": value}
                for metric, value in (("ttft_s", run.ttft_s), ("tpot_s", run.tpot_s))
            }
            targets.append(Means(run.name, known, under_load(scenario, source, run)))
    refuse_without_effect((source, target.deployment) for target in targets)
    engine = targets[0].deployment.scenario.engine
    fitted = fit(targets, Overheads.configured(engine), progress)
    base = read[0]
    nothing = {metric: {"mean": 1.0} for metric in NOISE}
    thought = {}
    for text, one in next_runs(base).items():
        with suppress(UserError):  # longer than the server allows
            thought[text] = Means(text, nothing, under_load(scenario, source, one))
    told = {text: fitted.gain(slopes_at(one, fitted)) for text, one in thought.items()}
    lacking = [run for run in read if run.requests is None]
    notes = [
        f"{run.name}: holds means only, which tell less: {TOOLS.get(run.tool, TOOLS['AIPerf'])}"
        for run in lacking
    ]
    notes += [f"{run.name}: {run.note}" for run in read if run.note]
    return TunedServer(fitted, targets, told, notes)


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


def next_runs(base: Benchmark) -> dict[str, Benchmark]:
    """Other loads of the same server that take a few minutes, in words."""
    alone = replace(base, rate=None, requests=None)
    many = max(64, 2 * (base.concurrency or 32))
    return {
        "one client": replace(alone, concurrency=1, requests_count=20),
        f"{many} clients": replace(alone, concurrency=many, requests_count=4 * many),
        "200 requests at once": replace(alone, concurrency=None, requests_count=200),
        "prompts four times as long, answers of 16 tokens, 4 clients": replace(
            alone,
            concurrency=4,
            requests_count=80,
            mean_prompt=4 * base.mean_prompt,
            mean_output=16,
        ),
    }


def tune_answer(content: Mapping[str, Any], name: str = "") -> Section:
    """Of what ``tune --json`` prints."""
    runs, known = content["runs"], content["known"]
    worst = {
        when: {m: max(abs(r[m][when]) for r in runs.values() if m in r) for m in NOISE
               if any(m in r for r in runs.values())}
        for when in ("before_pct", "after_pct")
    }  # fmt: skip
    after, before = worst["after_pct"], worst["before_pct"]
    change = enumerated(
        [
            f"{METRICS_BY_KEY[m].name} by at most {after[m]:.1f} % (before {before[m]:.1f} %)"
            for m in after
        ]
    )
    rows = [
        (
            key,
            _told(key, content["before"]),
            _told(key, content["tuned"]),
            "yes" if known[key] >= SETTLED else "no" if known[key] < OPEN else "partly",
        )
        for key in known
    ]
    errors = [(run, *(_beside(of.get(m)) for m in NOISE)) for run, of in runs.items()]
    told = sorted(content["next_runs"].items(), key=lambda one: -one[1])
    warnings = content["too_fast"] + [
        f"the runs cannot tell {a} and {b} apart: trust their sum, not each"
        for a, b in content["mixed_up"]
    ]
    warnings += [
        f"{METRICS_BY_KEY[m].name} is still {off:.0f} % off: the configuration is not of this "
        "server, or something of it is not modelled"
        for m, off in after.items()
        if off > DOUBTFUL_PCT
    ]
    return Section(
        kind="tune",
        name=name,
        question="Which constants make the simulation of this server what was measured?",
        answer=f"Tuned to {', '.join(runs)}, the simulation is off in {change}."
        + "".join(f" The next run that would tell most: {best}." for best, _ in told[:1]),
        command=content.get("command", ""),
        table=SortableTable(
            "Constants",
            ("constant", "of the stack", "tuned", "settled by the runs"),
            rows,
            "Constants that the runs do not settle stay near those of the stack.",
        ),
        details=[
            SortableTable(
                "Means beside measured",
                ("run", *(f"{METRICS_BY_KEY[m].name}: measured, before, after" for m in NOISE)),
                errors,
                "In sample: these runs were fitted to. Other loads are less certain.",
            ),
            SortableTable(
                "What a next run would tell",
                ("load", "information (nats)"),
                [(text, f"{gain:.2f}") for text, gain in told],
            ),
        ],
        assumptions=thinned(content["notes"]),
        warnings=warnings,
    )


def _told(key: str, values: Mapping[str, float]) -> str:
    value = values[key]
    return f"{value:.3f}" if key in ("kernels", "links") else f"{1e3 * value:.3g} ms"


def _beside(one: Mapping[str, float] | None) -> str:
    if one is None:
        return ""
    return (
        f"{1e3 * one['measured_s']:.4g} ms, {one['before_pct']:+.1f} %, {one['after_pct']:+.1f} %"
    )
