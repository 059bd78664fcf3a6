"""Any real engine beside the simulator: the order of its runs, the errors of simulations, and the
verdict.

A cell is a scenario that an engine serves and the simulator simulates. A session's repeat is a
grid of synthetic work; for each cell a calibration, the workload and a calibration; and a grid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from rich.table import Table

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import (
    check_left_out,
    layers_of,
    pool_settings,
    pools_of,
)
from sarathi_sim.experiments.config.inputs import model_of
from sarathi_sim.experiments.config.loading import Experiment
from sarathi_sim.experiments.config.requests import build_requests
from sarathi_sim.experiments.config.scenario import KvCache, Scenario, Validation
from sarathi_sim.experiments.content import rich_table
from sarathi_sim.experiments.run.decision_log import Replay
from sarathi_sim.policies.catalogue import is_pooled, of_micro_batches
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.records import Floats, Records


@dataclass(frozen=True)
class Cell:
    """A scenario that an engine serves and the simulator simulates."""

    name: str
    scenario: Scenario
    source: Source
    model: ModelSpec
    device: Literal["cpu", "cuda"]
    layers: tuple[int, ...]
    max_length: int

    @property
    def layout(self) -> tuple[int, int]:
        """(pp, tp): cells of the same share an engine."""
        return self.scenario.cluster.pp, self.scenario.cluster.tp

    @property
    def online(self) -> bool:
        """Whether its batches depend on the clock: requests arrive over time, or several
        micro-batches of a pool share them."""
        shared = self.kv_cache is not None and self.scenario.cluster.pp > 1
        return shared or self.scenario.workload.arrivals.kind != "at_once"

    @property
    def kv_cache(self) -> KvCache | None:
        """The paged cache; None for a policy that reserves memory."""
        return self.scenario.kv_cache

    @property
    def sequences(self) -> int:
        """Most sequences of a micro-batch."""
        policy = self.scenario.policy.build()
        if is_pooled(policy):
            return policy.max_num_seqs
        assert self.scenario.batching.max_batch is not None
        return self.scenario.batching.max_batch

    @property
    def policy(self) -> dict[str, Any]:
        """The policy's name and arguments, as ``sarathi_sim.policies.catalogue.build`` takes
        them."""
        return self.scenario.policy.described()

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the scheduler, or of the pool but for its blocks."""
        batching = self.scenario.batching
        policy = self.scenario.policy.build()
        if is_pooled(policy):
            return pool_settings(self.scenario, policy, self.max_length)
        in_flight = batching.max_in_flight or self.scenario.cluster.pp
        return {
            "max_batch": self.sequences,
            "max_in_flight": in_flight,
            "kv_capacity": self.sequences * in_flight * self.max_length,
            "max_length": self.max_length,
            "reserve_declared": batching.kv_reservation == "declared",
            "free_pool": batching.micro_batches == "free",
        }

    @property
    def memory(self) -> dict[str, Any]:
        """The arguments of :meth:`EngineProcesses.serve` for a paged cache."""
        if self.kv_cache is None:
            return {}
        cache = self.kv_cache
        return {"num_blocks": cache.num_blocks, "prefix_caching": cache.prefix_caching}

    def scheduler(self, requests: Sequence[Request] | None = None) -> Scheduler:
        """A fresh scheduler for the simulator and these requests (the workload by default)."""
        policy = self.scenario.policy.build()
        if is_pooled(policy):
            load = self.requests() if requests is None else requests
            return pools_of(self.scenario, self.max_length, load)[0]
        return MicroBatches(of_micro_batches(policy), **self.settings)

    def requests(self, seed: int | None = None, count: int | None = None) -> list[Request]:
        """The workload; with another seed or count a similar workload for calibration."""
        scenario = self.scenario
        update: dict[str, Any] = {} if seed is None else {"seed": seed}
        if count is not None:
            update["workload"] = scenario.workload.model_copy(update={"requests": count})
        made = build_requests(scenario.model_copy(update=update), self.max_length, self.source)
        # Arrivals in whole quanta, so that engine and simulator compare the very same numbers.
        return [
            replace(
                request,
                arrival_s=float(quantize(request.arrival_s)),
                prefix=request.prefix if self.kv_cache else (),
            )
            for request in made
        ]


def make_cells(experiment: Experiment) -> list[Cell]:
    """Every scenario, checked. Raises UserError for settings that the engine does not support."""
    return [
        _cell(name, scenario, experiment.sources[name])
        for name, scenario in experiment.scenarios.items()
    ]


def _cell(name: str, scenario: Scenario, source: Source) -> Cell:
    cluster, batching, workload = scenario.cluster, scenario.batching, scenario.workload
    model, policy = model_of(scenario, source), scenario.policy.build()
    try:
        model.check_plain("the engine")
    except ValueError as error:
        raise source.error("model", scenario.model, str(error)) from None
    policy_name, cache, pooled = scenario.policy.name, scenario.kv_cache, is_pooled(policy)
    given = scenario.engine.model_dump(exclude_defaults=True)
    # Key, value, whether the engine supports the value, and what it supports.
    for key, value, good, problem in (
        ("device", scenario.device, scenario.device in ("cpu", "cuda"),
         "must be cpu or cuda: the machine that runs this command is validated"),
        ("cluster.replicas", cluster.replicas, cluster.replicas == 1,
         "must be 1: one engine is run"),
        ("batching.formation", batching.formation, pooled or batching.formation == "lazy",
         "must be lazy: the engine forms a batch when its first stage is free"),
        ("policy.name", policy_name, not policy.needs_costs,
         "needs predicted times, which only the simulator has"),
        ("kv_cache", cache and cache.model_dump(exclude_defaults=True), pooled or cache is None,
         f"must be left out: {policy_name} reserves memory for whole requests"),
        ("workload.too_long", workload.too_long, workload.too_long == "error",
         "must be error: the engine's KV slots hold cluster.max_length tokens"),
        ("workload.arrivals.kind", workload.arrivals.kind, workload.arrivals.kind != "closed_loop",
         "needs clients that wait for answers, which only the simulator has"),
        ("workload.sessions", workload.sessions and workload.sessions.model_dump(),
         workload.sessions is None, "must be left out: only the simulator waits for answers"),
        ("speculation", scenario.speculation and scenario.speculation.method,
         scenario.speculation is None, "must be left out: the engine that is run has no drafter"),
        ("engine", given, not given, "must be left out: a real engine is measured instead"),
    ):  # fmt: skip
        if not good:
            raise source.error(key, value, problem)
    if is_pooled(policy):
        if cache is None or cache.num_blocks is None:
            raise source.error("kv_cache.num_blocks", None, "this key is missing")
        check_left_out(scenario, policy.max_num_seqs, source)
    elif batching.max_batch is None:
        raise source.error("batching.max_batch", None, "this key is missing")
    layers = layers_of(scenario, model, source)
    device: Literal["cpu", "cuda"] = "cpu" if scenario.device == "cpu" else "cuda"
    max_length = cluster.max_length or model.max_position_embeddings
    cell = Cell(name, scenario, source, model, device, layers, max_length)
    try:
        cell.scheduler(())
    except ValueError as error:
        raise source.error("batching.micro_batches", batching.micro_batches, str(error)) from None
    return cell


def cells_table(cells: Sequence[Cell]) -> Table:
    """The cells of a validation, side by side."""
    rows: dict[str, list[str]] = {
        "model": [cell.model.name for cell in cells],
        "this machine's": [cell.device for cell in cells],
        "policy": [cell.scenario.policy.name for cell in cells],
        "TP x PP": [f"{tp} x {pp}" for pp, tp in (cell.layout for cell in cells)],
        "sequences of a micro-batch": [str(cell.sequences) for cell in cells],
        "requests": [f"{len(cell.requests()):,}" for cell in cells],
    }
    return rich_table([""], [cell.name for cell in cells], [[k, *v] for k, v in rows.items()])


# Measured beside simulated ----------------------------------------------------------------------

KINDS = ("prefill", "decode", "mixed")
"""Of micro-batches."""


@dataclass(frozen=True)
class Comparison:
    """One cell in one repeat. ``iterations`` and ``whole`` are by prediction.

    ``steps`` has a row an iteration: its content. ``measured_iterations`` is the time of each,
    summed over the stages. ``measured`` and ``whole`` are totals of runs by name, in seconds and
    tokens a second. ``more`` are results of one kind of engine only.
    """

    parity: Replay
    steps: pd.DataFrame
    measured_iterations: Floats
    iterations: dict[str, Floats]
    measured: dict[str, float]
    whole: dict[str, dict[str, float]]
    records: dict[str, Records] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def off(simulated: float, measured: float) -> float:
    """The relative error; NaN if the measured value is 0 (a run without bubbles, for example)."""
    return simulated / measured - 1 if measured else float("nan")


def total_errors(simulated: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Relative errors of totals, signed; of bubbles only where there is a pipeline, else NaN."""
    alone = "bubble_stage1" not in measured
    return {
        f"{key}_error": float("nan")
        if alone and key.startswith("bubble")
        else off(simulated[key], value)
        for key, value in measured.items()
    }


def prediction_errors(outcome: Comparison, prediction: str) -> dict[str, float]:
    """Errors of iterations (median and 90th percentile), and of each total."""
    spread = median_p90(iteration_errors(outcome, prediction))
    of_iterations = {f"iteration_error_{name}": value for name, value in spread.items()}
    return of_iterations | total_errors(outcome.whole[prediction], outcome.measured)


def median_p90(errors: Floats) -> dict[str, float]:
    """Median and 90th percentile of absolute errors."""
    return {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def middles(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median and range of each number."""
    return {key: middle([row[key] for row in rows]) for key in rows[0]}


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
    }


def spread(values: Sequence[float]) -> float:
    """The range over the median."""
    return float((np.max(values) - np.min(values)) / np.median(values))


def noise_floor(repeats: list[Floats]) -> float:
    """Median relative difference of a micro-batch's time between two repeats, over all pairs.

    NaN for a single repeat. Only repeats with the same micro-batches are compared.
    """
    differences = [
        np.abs(one / other - 1)
        for index, one in enumerate(repeats)
        for other in repeats[index + 1 :]
        if len(one) == len(other)
    ]
    return float(np.median(np.concatenate(differences))) if differences else float("nan")


def iteration_errors(outcome: Comparison, prediction: str) -> Floats:
    """|predicted / measured - 1| of every micro-batch."""
    return np.asarray(np.abs(outcome.iterations[prediction] / outcome.measured_iterations - 1))


def errors_by_kind(repeats: list[Comparison], prediction: str) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the iterations' errors, by kind, of all repeats together."""
    errors = np.concatenate([iteration_errors(outcome, prediction) for outcome in repeats])
    kind = np.concatenate([outcome.steps["kind"].to_numpy() for outcome in repeats])
    found = {}
    for name in KINDS:
        some = errors[kind == name]
        if len(some):
            found[name] = {"count": len(some), **median_p90(some)}
    return found


def judged(what: str, of: str, limit: float, value: float, *, may: bool) -> list[dict[str, Any]]:
    """A target's row: whether it was met, None unless it ``may`` be judged. Empty for a NaN."""
    if not np.isfinite(value):
        return []
    met = abs(value) <= limit if may else None
    return [{"what": what, "cell": of, "limit": limit, "value": value, "met": met}]


# A session --------------------------------------------------------------------------------------

Plan = list[tuple[str, list[Request] | None]]
"""The work in order: items of a cell's name and its requests, or of a grid, without either."""


def plan_of(cells: Sequence[Cell], settings: Validation, once: Sequence[Cell] = ()) -> list[Plan]:
    """All work of a session, in parts: every shape once, as a warm-up; each repeat; the cells that
    are served ``once``. Calibration runs have other seeds than the workloads."""
    few = settings.calibration_requests
    parts: list[Plan] = [[("grid", None), ("warm-up", cells[0].requests(seed=1, count=few))]]
    apart = {cell.name for cell in once}
    for number in range(settings.repeats):
        plan: Plan = [("grid", None)]
        for cell in (each for each in cells if each.name not in apart):
            first, last = (cell.requests(2_000_000 + 2 * number + n, few) for n in (0, 1))
            plan += [(cell.name, first), (cell.name, cell.requests()), (cell.name, last)]
        parts.append([*plan, ("grid", None)])
    return [*parts, [(cell.name, cell.requests()) for cell in once]]


@dataclass(frozen=True)
class CellRuns:
    """A cell's run, and the two calibration runs around it with their requests."""

    run: Any
    calibration: list[tuple[Any, list[Request]]]


@dataclass(frozen=True)
class Repeat:
    """One repeat: the grids before and after, the runs of each cell, and the load average then."""

    grids: tuple[Any, Any]
    served: dict[str, CellRuns]
    load: float


def repeats_of(
    plan: Plan, answers: Sequence[Any], loads: Sequence[float]
) -> tuple[list[Repeat], dict[str, Any]]:
    """The engine's answers, in the order of the plan, as repeats, and the runs of the cells that
    were served once."""
    work: list[Any] = list(zip(plan, answers, loads, strict=True))[2:]
    repeats = []
    while work and work[0][0][1] is None:
        (_, before, _), *work = work
        served = {}
        while work[0][0][1] is not None:
            ((name, first), around, _), (_, run, _), ((_, last), after, _), *work = work
            served[name] = CellRuns(run, [(around, first), (after, last)])
        (_, after, load), *work = work
        repeats.append(Repeat((before, after), served, load))
    return repeats, {name: run for (name, _), run, _ in work}


@dataclass(frozen=True)
class Session(ABC):
    """All measurements of one engine: the name of its layout, the cells, their repeats, and the
    runs of cells that were served once (``online``). ``about`` describes the engine in a report."""

    layout: str
    cells: list[Cell]
    repeats: list[Repeat]
    online: dict[str, Any]
    seconds: float
    about: dict[str, Any]

    targets: ClassVar[dict[str, float]]
    """The allowed errors of a prediction; decided beforehand."""
    measures: ClassVar[dict[str, str]]
    """The measured totals in a report, with their names."""
    by_clock: ClassVar[bool] = False
    """Whether batches may differ between runs of a cell."""

    @abstractmethod
    def evaluate(self, repeat: Repeat, cell: Cell) -> Comparison:
        """The comparison of one cell in one repeat."""

    @abstractmethod
    def drift(self, repeat: Repeat) -> float:
        """The grid's time after the repeat over that before it (1: no drift)."""

    def spoilt(self, outcome: Comparison) -> str | None:
        """Why disturbance by other programs makes a run useless, or None."""
        return None

    def entry(self, cell: Cell, outcomes: Sequence[Comparison], some: Sequence[Comparison]) -> Any:
        """The engine's own part of a cell's report: of all ``outcomes``, or of ``some`` that were
        accepted."""
        return {}

    def served_once(self) -> dict[str, dict[str, Any]]:
        """The report's part on the :attr:`online` runs."""
        return {}
