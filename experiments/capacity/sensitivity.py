"""The sensitivity of capacity, or of a run's metrics, to op times, links, the host, the workload.

One factor at a time is lowered, and raised. All runs share their random numbers, so small
differences show. Each replication's capacity is searched again from the unchanged one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, OPS, SEND_RECV, op_label
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from sarathi_sim.simulator.confidence.quantile import mean_and_interval
from sarathi_sim.simulator.views.metric_registry import known
from ..config.base import Assignments, Config, Source
from ..config.deployment import Deployment, deploy
from ..config.effects import ops_of, refuse_without_effect
from ..config.loading import (
    Draft,
    check_metric,
    load_experiment,
    metric,
    read_draft,
    refuse_of_session,
)
from ..config.requests import build_requests
from ..config.scenario import Engine, Scenario
from ..config.workload import AtOnce, Closed
from ..results import SUMMARY, check_kept, json_bytes, percentile_in
from ..sweeps.execute import execute
from ..sweeps.plan import Run, SweepPlan, run_key
from .answer import question_yaml, read_question, said_of
from .options import Option, plan_of, slowed, with_engines
from .probing import NAME, SENSITIVITY_FORMAT, Laboratory
from .search import (
    Crossing,
    Probed,
    Search,
    SearchPlan,
    breakable_pilot,
    exact,
    lengthened,
    replications,
    shifted,
    too_short,
)
from .slo import UNITS, CapacitySection

HOST = tuple(key for key in Engine.model_fields if key.endswith("_s"))
"""The engine's keys that are seconds."""
LENGTHS = {"prompt lengths": "prompt", "output lengths": "output"}
BURSTINESS = "burstiness"
KINDS = ("ops", "op", "link", "host", "workload")


@dataclass(frozen=True)
class Factor:
    """An input that can be scaled. ``changed(scenario, times)`` is the scenario with it scaled."""

    name: str
    kind: str
    changed: Callable[[Scenario, float], Scenario]

    def realised(self, option: Option, times: float) -> float:
        """The scale that is reached: lengths are whole tokens, at most the longest. Raises
        UserError where requests become too long."""
        if (key := LENGTHS.get(self.name)) is None:
            return times
        deployment = option.deployment
        length = deployment.pools[-1].scenario.cluster.max_length
        assert length is not None
        scenario = option.scenario.having("workload", requests=len(deployment.requests))
        source = Source(self.name, "", {}, ())
        before, after = (
            [getattr(request, f"{key}_tokens") for request in build_requests(one, length, source)]
            for one in (scenario, self.changed(scenario, times))
        )
        return float(np.mean(after) / np.mean(before))


@dataclass(frozen=True)
class Question:
    """The question: ``options`` and the ``factors`` of each, the relative change ``by``, and the
    number of replications. ``measures`` are metrics; none: the capacity under the section's SLO."""

    draft: Draft
    section: CapacitySection
    options: dict[Option, list[Factor]]
    by: float
    replications: int
    measures: tuple[str, ...] = ()


def factors_of(deployment: Deployment, gaps: bool | None = None) -> list[Factor]:
    """All factors. ``gaps``: whether requests arrive one by one (None: as the workload says)."""
    pools, arrivals = deployment.pools, deployment.scenario.workload.arrivals
    there = {op for pool in pools for op in ops_of(pool)}
    ops = [op for op in OPS if op in there]
    links = [op for op in ops if op in (ALL_REDUCE, ALL_TO_ALL, SEND_RECV)]
    found = [Factor("all ops", "ops", _ops(ops)), *(Factor(op, "op", _ops([op])) for op in ops)]
    if links:
        found.append(Factor("link speed", "link", _ops(links, -1)))
    if len(pools) > 1:
        found.append(Factor("handover bandwidth", "link", _bandwidth))
    if any(getattr(pool.scenario.engine, key) for pool in pools for key in HOST):
        found.append(Factor("host time", "host", _host))
    shifts = dict(LENGTHS)
    if not isinstance(arrivals, AtOnce | Closed) if gaps is None else gaps:
        shifts[BURSTINESS] = BURSTINESS
    return found + [Factor(name, "workload", partial(_shift, key)) for name, key in shifts.items()]


def _ops(names: Collection[str], power: int = 1) -> Callable[[Scenario, float], Scenario]:
    return lambda scenario, times: slowed(scenario, names, times**power)


def _host(scenario: Scenario, times: float) -> Scenario:
    return with_engines(scenario, lambda engine: _scaled(engine, HOST, times))


def _bandwidth(scenario: Scenario, times: float) -> Scenario:
    assert scenario.disaggregation is not None
    handover = scenario.disaggregation.handover
    handover = handover.model_copy(update=_scaled(handover, ["bandwidth"], times))
    return scenario.having("disaggregation", handover=handover)


def _shift(key: str, scenario: Scenario, times: float) -> Scenario:
    shift = scenario.workload.shift
    shift = shift.model_copy(update=_scaled(shift, [key], times))
    return scenario.having("workload", shift=shift)


def _scaled(section: object, keys: Iterable[str], times: float) -> dict[str, Any]:
    given = {key: getattr(section, key) for key in keys}
    return {key: value and times * value for key, value in given.items()}


FINE = 0.01
"""The tolerance of searches: wide steps would hide the effect of a tenth of a small op."""
CAPACITY = "capacity"
METRICS = ("ttft_s.p99", "tbt_s.p99", "output_tokens_per_s")
SIDES = (-1, 1)
ONE_RUN = (
    "one replication has no confidence interval, so the order of the factors may be chance: "
    "--replications 3 shows which effects are significant"
)
_ANY_SLO = CapacitySection(slo="mean latency 1s")


@dataclass(frozen=True)
class Shifted:
    """An option with a factor at one side (0: unchanged), scaled by ``times`` in effect."""

    option: Option
    factor: str = ""
    side: int = 0
    times: float = 1.0


Values = dict[tuple[Option, str, int], dict[str, list[float]] | str]
"""By option, factor and side: each measure's values by replication; or the reason for none."""


def read_sensitivity(
    config: Config,
    assignments: Assignments = (),
    workload: str | None = None,
    *,
    by: float = 0.1,
    replications: int = 3,
    only: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Question:
    """The question, checked. Raises UserError, a line per mistake."""
    given = assignments if isinstance(assignments, Mapping) else list(assignments)
    if not 0 < by < 1:
        raise UserError(f"--by {by:g}: must be more than 0 and less than 1")
    draft, section = read_draft(config, given), _ANY_SLO
    measures = () if draft.header.capacity is not None and not metrics else metrics or METRICS
    if workload is not None and measures:
        raise UserError("--workload: must be left out with metrics of a run: give --set workload")
    for path in measures:
        check_metric(path, "--metric")
        check_kept(path, "--metric")
    if measures:
        found = load_experiment(config, given)
        options = [
            Option(name, {"scenario": name}, deploy(scenario, found.sources[name]))
            for name, scenario in found.scenarios.items()
        ]
        refuse_without_effect((found.sources[one.name], one.deployment) for one in options)
    else:
        draft, section, options = read_question(config, given, workload)
    gaps = None if measures else section.load == "rate"
    for option in options:
        refuse_of_session(option.scenario, draft.source)
    every = {option: factors_of(option.deployment, gaps) for option in options}
    names = dict.fromkeys(factor.name for factors in every.values() for factor in factors)
    labels = {op_label(name): name for name in names}
    only = [labels.get(name, name) for name in only]
    for name in only:
        if name not in names:
            hint = f"one of {', '.join(names)}{did_you_mean(name, names)}"
            raise UserError(f"--only: {name!r}: {hint}")
    wanted = only or names
    picked = {option: [f for f in every[option] if f.name in wanted] for option in options}
    return Question(draft, section, picked, by, replications, tuple(measures))


def sensitivity(lab: Laboratory, asked: Question) -> dict[str, Any]:
    """The question and the answer, as in ``summary.json``. Raises UserError if runs are too
    short."""
    changed, notes = list[tuple[Shifted, Option]](), list[str]()
    if asked.replications == 1:
        notes.append(ONE_RUN)
    pairs = list[tuple[Factor, Shifted, Shifted]]()
    for option, factors in asked.options.items():
        for factor in factors:
            sides = list(_sides(option, factor, asked.by, notes))
            if len(sides) == len(SIDES):
                changed += sides
                pairs.append((factor, sides[0][0], sides[1][0]))
    if asked.measures:
        values = _metrics(lab, asked, changed)
    else:
        values = _capacities(lab, asked, changed, notes)
    rows, measures = [], asked.measures or (CAPACITY,)
    capacities = {CAPACITY: f"load where the SLO breaks ({UNITS[asked.section.load]})"}
    for factor, low, high in pairs:
        for measure in measures:
            row = {"deployment": low.option.name, "measure": measure}
            row |= {"factor": factor.name, "kind": factor.kind}
            if effect := _row(values, low, high, measure, notes):
                rows.append(row | effect)
    return {
        "format": SENSITIVITY_FORMAT,
        "name": asked.draft.header.name,
        "description": asked.draft.header.description,
        "slo": None if asked.measures else asked.section.slo,
        "load": None if asked.measures else asked.section.load,
        "by": asked.by,
        "replications": asked.replications,
        "measures": {path: known(path).axis for path in asked.measures} or capacities,
        "deployments": [
            {
                "name": option.name,
                "model": option.deployment.model.name,
                "device": option.deployment.device.name,
                "gpus": option.gpus,
                "base": _base(values, option, measures),
            }
            for option in asked.options
        ],
        "rows": rows,
        "warnings": list(dict.fromkeys(notes)),
        "probes": lab.report.finished,
        **said_of(asked.options, None if asked.measures else asked.section.load),
        "provenance": "predicted",
    }


def _sides(
    option: Option, factor: Factor, by: float, notes: list[str]
) -> Iterator[tuple[Shifted, Option]]:
    for side in SIDES:
        times = 1 + side * by
        try:
            really = factor.realised(option, times)
        except UserError as error:
            notes.append(f"{option.name}: {factor.name} x {times:g} is left out: {error}")
            return
        if really == 1:
            notes.append(f"{option.name}: {factor.name} are whole tokens, and do not change")
            return
        name, scenario = f"{option.name}; {factor.name} x {times:g}", option.scenario
        changed = option.changed(name, factor.changed(scenario, times))
        yield Shifted(option, factor.name, side, really), changed


def _capacities(
    lab: Laboratory, asked: Question, changed: list[tuple[Shifted, Option]], notes: list[str]
) -> Values:
    """Each replication's load in every case; a note if its run is too short for the SLO. Raises
    UserError if no load breaks the SLO."""
    plans, found = dict[Option, SearchPlan](), Values()
    for option in asked.options:
        plan = plan_of(option, asked.section, asked.draft.source.file)
        fine = min(plan.tolerance, FINE)
        plans[option] = replace(
            plan,
            tolerance=fine,
            least=min(asked.replications, plan.most),
        )
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
        searches = {}
        for option, case in cases.items():
            base, plan = bases[case.option], plans[case.option]
            if not isinstance(base, str) and base:  # each replication from its own base
                searches[option] = shifted(plan, base)
        for option, loads in quiet.pursue(searches).items():
            case = cases[option]
            found[case.option, factor, case.side] = _loads(loads, plans[case.option])
    lab.progress("factors", len(factors), len(factors))
    lab.write_tables()
    return found


def _base_search(plan: SearchPlan) -> Search[list[Crossing]]:
    """The load where each replication's SLO breaks, in runs that last long enough to show an
    overload; none if the SLO breaks under any load."""
    rough, plan = yield from breakable_pilot(plan)
    if not isinstance(rough, Crossing):
        return []
    found = yield from replications(lengthened(plan, [rough.kept]), rough)
    return [] if isinstance(found, Probed) else found[1]


def _loads(found: Sequence[Crossing | Probed] | str, plan: SearchPlan) -> Any:
    """The loads; 0 if the SLO breaks under any load. Or the error of a failed run."""
    if isinstance(found, str):
        return found
    return {CAPACITY: [exact(one, plan) if isinstance(one, Crossing) else 0.0 for one in found]}


def _metrics(lab: Laboratory, asked: Question, changed: list[tuple[Shifted, Option]]) -> Values:
    runs: dict[tuple[Option, str, int], list[Run]] = {}
    for case, option in [*((Shifted(option), option) for option in asked.options), *changed]:
        first = option.scenario.seed
        seeds = range(first, first + asked.replications)
        runs[case.option, case.factor, case.side] = [_run(case, option, seed) for seed in seeds]
    listed = tuple(run for each in runs.values() for run in each)
    axes = ("deployment", "factor", "times", "seed")
    plan = SweepPlan("", "sensitivity", "", axes, None, listed, ())
    deque(execute(plan, lab.store, lab.backend, lab.progress, lab.report, lab.say), maxlen=0)
    found, failed = Values(), lab.report.failures
    for key, each in runs.items():
        if errors := [failed[run.key] for run in each if run.key in failed]:
            found[key] = errors[0]
        else:
            found[key] = {
                path: [_number(lab, run, path) for run in each] for path in asked.measures
            }
    return found


def _number(lab: Laboratory, run: Run, path: str) -> float:
    """A metric; NaN if no request has it: single tokens have no time between them."""
    summary, found = lab.store.summary(run.key, NAME), known(path)
    if found.statistic and found.statistic not in found.metric.statistics:
        return percentile_in(lab.store.runs / run.key / NAME, path, summary["steady"])
    try:
        return metric(summary, path, "summary")
    except UserError:
        return math.nan


def _run(case: Shifted, option: Option, seed: int) -> Run:
    scenario = option.scenario.model_copy(update={"seed": seed})
    deployment = replace(option.deployment, scenario=scenario)
    point = {"deployment": case.option.name, "factor": case.factor or "-", "times": case.times}
    return Run(run_key(deployment, NAME), NAME, seed, point, scenario)


def _row(
    values: Values, low: Shifted, high: Shifted, measure: str, notes: list[str]
) -> dict[str, Any]:
    """Effects in percent, the elasticity and its 95 % interval; empty, with a note, without."""
    option, name = low.option, low.factor
    sides = [values.get((option, each, s)) for each, s in (("", 0), (name, -1), (name, 1))]
    if isinstance(sides[0], str):
        notes.append(f"{option.name}: {sides[0]}")
        return {}
    said = next((side for side in sides if isinstance(side, str)), "")
    base, down, up = (
        np.array(side[measure] if isinstance(side, dict) else [], np.float64) for side in sides
    )
    if said or not len(base) == len(down) == len(up) or not len(base):
        said = said or "the SLO holds under no load"
    elif not (np.isfinite([base, down, up]).all() and min(base.min(), down.min(), up.min()) > 0):
        said = f"{measure} is 0 or unknown"
    if said:
        notes.append(f"{option.name}: {name} is left out: {said}")
        return {}
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
        "interval": list(interval) if len(set(each)) > 1 else None,  # equal runs are one run
    }


def _base(values: Values, option: Option, measures: Iterable[str]) -> dict[str, float | None]:
    found = values.get((option, "", 0))
    if not isinstance(found, dict):
        return dict.fromkeys(measures)
    return {key: float(np.mean(found[key])) if found[key] else None for key in measures}


def table_of(content: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each deployment, measure and factor."""
    rows = []
    for row in content["rows"]:
        low, high = row["interval"] or (None, None)
        plain = {key: value for key, value in row.items() if key != "interval"}
        rows.append({**plain, "interval_low": low, "interval_high": high})
    return pd.DataFrame(rows)


def sensitivity_files(asked: Question, content: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the result beside its runs."""
    return {
        SUMMARY: json_bytes(content),
        "sensitivity.csv": table_of(content).to_csv(index=False).encode(),
        "config.yaml": question_yaml(asked.draft, None if asked.measures else asked.section),
    }
