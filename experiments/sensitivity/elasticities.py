"""How capacity, or the metrics of a run, move with each op's time, links, the host, the workload.

One factor at a time is a part ``by`` less, and more. All runs share their random numbers, so small
differences show. With a ``capacity`` section each replication's capacity is searched again, with
short runs, from the one that nothing was changed for; otherwise each run is simulated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sarathi_sim.experiments.capacity.answer import said_of
from sarathi_sim.experiments.capacity.asked import read_question
from sarathi_sim.experiments.capacity.capacity_section import CapacitySection
from sarathi_sim.experiments.capacity.folder import SENSITIVITY_FORMAT
from sarathi_sim.experiments.capacity.options import Option, plan_of
from sarathi_sim.experiments.capacity.probing import NAME, Laboratory
from sarathi_sim.experiments.capacity.search import (
    Crossing,
    Probe,
    Probed,
    Search,
    SearchPlan,
    breakable_pilot,
    crossing,
    exact,
    lengthened,
    together,
    too_short,
)
from sarathi_sim.experiments.capacity.written import UNITS
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import (
    SHAPE,
    Assignments,
    Config,
    load_experiment,
    metric,
    read_draft,
    refuse_of_session,
)
from sarathi_sim.experiments.sensitivity.factors import Factor, Question, chosen, factors_of
from sarathi_sim.experiments.sensitivity.tornado import sensitivity_answer
from sarathi_sim.experiments.sweeps.execute import execute
from sarathi_sim.experiments.sweeps.identity import run_key
from sarathi_sim.experiments.sweeps.plan import Run, SweepPlan
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.simulator.confidence.quantile import mean_and_interval
from sarathi_sim.simulator.views.metric_registry import known

FINE = 0.01
"""The tolerance of searches: wide steps would hide what a tenth of a small op does."""
CAPACITY = "capacity"
METRICS = ("ttft_s.p99", "tbt_s.p99", "output_tokens_per_s")
SIDES = (-1, 1)
ONE_RUN = (
    "one replication has no interval, so the order of the factors may be chance: "
    "--replications 3 shows which effects are more than that"
)
_ANY_SLO = CapacitySection(slo="mean latency 1s")


@dataclass(frozen=True)
class Shifted:
    """An option with a factor at one side (0: nothing changed), really ``times`` what it was."""

    option: Option
    factor: str = ""
    side: int = 0
    times: float = 1.0


Values = dict[tuple[Option, str, int], dict[str, list[float]] | str]
"""By option, factor and side: each measure's values, one a replication; or why there are none."""


def read_sensitivity(
    config: Config,
    assignments: Assignments = (),
    *,
    by: float = 0.1,
    replications: int = 3,
    only: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Question:
    """The question, checked. Raises ConfigError, a line per mistake."""
    given = assignments if isinstance(assignments, Mapping) else list(assignments)
    if not 0 < by < 1:
        raise ConfigError(f"--by {by:g}: must be more than 0 and less than 1")
    draft, section = read_draft(config, given), _ANY_SLO
    measures = () if draft.header.capacity is not None and not metrics else metrics or METRICS
    for path in measures:
        metric(SHAPE, path, "--metric")
    if measures:
        found = load_experiment(config, given)
        options = [
            Option(name, {"scenario": name}, deploy(scenario, found.sources[name]))
            for name, scenario in found.scenarios.items()
        ]
    else:
        draft, section, options = read_question(config, given)
    gaps = None if measures else section.load == "rate"
    for option in options:
        refuse_of_session(option.scenario, draft.source)
    every = {option: factors_of(option.deployment, gaps) for option in options}
    names = {factor.name: factor for factors in every.values() for factor in factors}
    wanted = {factor.name for factor in chosen(names.values(), only, "--only")}
    picked = {option: [f for f in every[option] if f.name in wanted] for option in options}
    return Question(draft, section, picked, by, replications, tuple(measures))


def sensitivity(lab: Laboratory, asked: Question) -> dict[str, Any]:
    """The question and the answer, as ``summary.json`` has it. Raises ConfigError for an SLO that
    the runs are too short for."""
    changed, notes = list[tuple[Shifted, Option]](), list[str]()
    if asked.replications == 1:
        notes.append(ONE_RUN)
    for option, factors in asked.options.items():
        for factor in factors:
            sides = list(_sides(option, factor, asked.by, notes))
            changed += sides if len(sides) == len(SIDES) else []
    if asked.measures:
        values = _metrics(lab, asked, changed)
    else:
        values = _capacities(lab, asked, changed, notes)
    rows, measures = [], asked.measures or (CAPACITY,)
    kinds = {factor.name: factor.kind for each in asked.options.values() for factor in each}
    pairs: dict[tuple[Option, str], list[Shifted]] = {}
    for case, _ in changed:
        pairs.setdefault((case.option, case.factor), []).append(case)
    for (option, name), (low, high) in pairs.items():
        for measure in measures:
            row = {"deployment": option.name, "measure": measure}
            row |= {"factor": name, "kind": kinds[name]}
            rows.append(row | _row(values, low, high, measure, notes))
    rows = [row for row in rows if row["elasticity"] is not None]
    content = {
        "format": SENSITIVITY_FORMAT,
        "name": asked.draft.header.name,
        "description": asked.draft.header.description,
        "slo": None if asked.measures else asked.section.slo,
        "load": None if asked.measures else asked.section.load,
        "by": asked.by,
        "replications": asked.replications,
        "measures": {measure: label(measure, asked.section) for measure in measures},
        "deployments": [
            {"name": option.name, "gpus": option.gpus, "base": _base(values, option, measures)}
            for option in asked.options
        ],
        "rows": rows,
        "warnings": list(dict.fromkeys(notes)),
        "probes": lab.report.finished,
        **said_of(asked.options, None if asked.measures else asked.section.load),
        "provenance": "predicted",
    }
    return content | sensitivity_answer(content).words()


def label(measure: str, section: CapacitySection) -> str:
    """A measure with its unit, in words."""
    return (
        f"load where the SLO breaks ({UNITS[section.load]})"
        if measure == CAPACITY
        else known(measure).axis
    )


def _sides(
    option: Option, factor: Factor, by: float, notes: list[str]
) -> Iterator[tuple[Shifted, Option]]:
    """The option with this factor less, and more; a note where it does not change."""
    for side in SIDES:
        times = 1 + side * by
        try:
            really = factor.realised(option, times)
        except ConfigError as error:
            notes.append(f"{option.name}: {factor.name} x {times:g} is left out: {error}")
            return
        if really == 1:
            notes.append(f"{option.name}: {factor.name} are whole tokens, and do not change")
            return
        yield Shifted(option, factor.name, side, really), factor.of(option, times)


# Values --------------------------------------------------------------------------------------


def _capacities(
    lab: Laboratory, asked: Question, changed: list[tuple[Shifted, Option]], notes: list[str]
) -> Values:
    """Each replication's load in every case; a note where its run is too short for the SLO. Raises
    ConfigError where no load breaks the SLO."""
    plans, found = dict[Option, SearchPlan](), Values()
    for option in asked.options:
        plan = plan_of(option, asked.section, asked.draft.source.file)
        fine = min(plan.tolerance, FINE)
        plans[option] = replace(plan, tolerance=fine, least=min(asked.replications, plan.most))
    bases = lab.pursue({option: _base_search(plan) for option, plan in plans.items()})
    for option, base in bases.items():
        found[option, "", 0] = _loads(base, plans[option])
        if not isinstance(base, str) and base:
            why = too_short(plans[option], [one.kept for one in base])
            notes += [f"{option.name}: {why} (capacity.most_requests)"] if why else []
    quiet, factors = replace(lab, progress=silent), dict.fromkeys(c.factor for c, _ in changed)
    for number, factor in enumerate(factors):  # one at a time: all its runs share tables
        lab.progress("factors", number, len(factors))
        cases = {option: case for case, option in changed if case.factor == factor}
        searches = {
            option: _changed_search(base, plans[case.option])
            for option, case in cases.items()
            if not isinstance(base := bases[case.option], str) and base
        }
        for option, loads in quiet.pursue(searches).items():
            case = cases[option]
            found[case.option, factor, case.side] = _loads(loads, plans[case.option])
    lab.progress("factors", len(factors), len(factors))
    lab.write_tables()
    return found


def _base_search(plan: SearchPlan) -> Search[list[Crossing]]:
    """The load where each replication's SLO breaks, in runs that last long enough to show an
    overload; none where the SLO breaks under any load."""
    _, rough, plan = yield from breakable_pilot(plan)
    if not isinstance(rough, Crossing):
        return []
    plan = lengthened(plan, [rough.kept])
    while True:
        found = yield from together(
            crossing(Probe(0, plan.seed + number, plan.requests), rough.load, rough.slope, plan)
            for number in range(plan.least)
        )
        crossings = [one for one in found if isinstance(one, Crossing)]
        longer = lengthened(plan, [one.kept for one in crossings]) if crossings else plan
        if longer.requests <= plan.requests:
            return crossings
        plan = longer


def _changed_search(base: Sequence[Crossing], plan: SearchPlan) -> Search[list[Crossing | Probed]]:
    """The same replications with something changed, each searched from its own base."""
    found = yield from together(crossing(one.kept.probe, one.load, one.slope, plan) for one in base)
    return found


def _loads(found: Sequence[Crossing | Probed] | str, plan: SearchPlan) -> Any:
    """The loads; 0 where the SLO breaks under any load. Or why a run failed."""
    if isinstance(found, str):
        return found
    return {CAPACITY: [exact(one, plan) if isinstance(one, Crossing) else 0.0 for one in found]}


def _metrics(lab: Laboratory, asked: Question, changed: list[tuple[Shifted, Option]]) -> Values:
    """Each replication's metrics in every case."""
    runs: dict[tuple[Option, str, int], list[Run]] = {}
    for case, option in [*((Shifted(option), option) for option in asked.options), *changed]:
        runs[case.option, case.factor, case.side] = [
            _run(case, option, option.scenario.seed + number)
            for number in range(asked.replications)
        ]
    listed = tuple(run for each in runs.values() for run in each)
    axes = ("deployment", "factor", "times", "seed")
    plan = SweepPlan("", "sensitivity", "", axes, None, listed, ())
    execute(plan, lab.store, lab.backend, lab.progress, lab.report, lab.say)
    found, failed = Values(), lab.report.failures
    for key, each in runs.items():
        errors = [failed[run.key] for run in each if run.key in failed]
        summaries = [] if errors else [lab.store.summary(run.key, NAME) for run in each]
        found[key] = (
            errors[0]
            if errors
            else {path: [_number(one, path) for one in summaries] for path in asked.measures}
        )
    return found


def _number(summary: Mapping[str, Any], path: str) -> float:
    """NaN for a metric that no request has: single tokens have no time between them."""
    try:
        return metric(summary, path, "summary")
    except ConfigError:
        return math.nan


def _run(case: Shifted, option: Option, seed: int) -> Run:
    scenario = option.scenario.model_copy(update={"seed": seed})
    deployment = replace(option.deployment, scenario=scenario)
    point = {"deployment": case.option.name, "factor": case.factor or "-", "times": case.times}
    return Run(run_key(deployment, NAME), NAME, seed, point, scenario)


# Rows ----------------------------------------------------------------------------------------


def _row(
    values: Values, low: Shifted, high: Shifted, measure: str, notes: list[str]
) -> dict[str, Any]:
    """Effects of both sides in percent, and the elasticity with its 95 % interval."""
    option, name = low.option, low.factor
    sides = [values.get((option, each, s)) for each, s in (("", 0), (name, -1), (name, 1))]
    if isinstance(sides[0], str):
        notes.append(f"{option.name}: {sides[0]}")
        return {"elasticity": None}
    said = next((side for side in sides if isinstance(side, str)), None)
    base, down, up = (
        np.array(side[measure] if isinstance(side, dict) else [], np.float64) for side in sides
    )
    nothing: dict[str, Any] = {"elasticity": None}
    if said is not None or not len(base) == len(down) == len(up) or not len(base):
        notes.append(f"{option.name}: {name} is left out: {said or 'the SLO holds under no load'}")
        return nothing
    if not (np.isfinite([base, down, up]).all() and min(base.min(), down.min(), up.min()) > 0):
        notes.append(f"{option.name}: {name} is left out: {measure} is 0, or unknown, there")
        return nothing
    each = np.log(up / down) / math.log(high.times / low.times)
    mean, interval = mean_and_interval(each.tolist())
    return {
        "low_times": low.times,
        "high_times": high.times,
        "low": float(down.mean()),
        "high": float(up.mean()),
        "low_pct": 100 * float(np.mean(down / base) - 1),
        "high_pct": 100 * float(np.mean(up / base) - 1),
        "elasticity": mean,
        "interval": list(interval) if len(set(each)) > 1 else None,  # not of one run, repeated
    }


def _base(values: Values, option: Option, measures: Iterable[str]) -> dict[str, float | None]:
    """What nothing was changed for, by measure."""
    found = values.get((option, "", 0))
    if not isinstance(found, dict):
        return dict.fromkeys(measures)
    return {key: float(np.mean(found[key])) if found[key] else None for key in measures}
