"""Runs a real engine and the simulator on the same workloads: one cell per scenario."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

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
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import chunking_of, is_pooled, needs_costs, of_micro_batches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.bundle.schema import Bundle, bundle_path, list_bundles, load_bundle
from sarathi_sim.profiler.engine.processes import EngineProcesses, EngineRun, Facts, StageLog
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.measuring.to_bundle import GridWork, grid_works
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.simulator.loop.quantum import quantize

Dtype = Literal["float32", "bfloat16", "float16"]


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
        """What :meth:`EngineProcesses.serve` takes of a paged cache."""
        if self.kv_cache is None:
            return {}
        cache = self.kv_cache
        return {"num_blocks": cache.num_blocks, "prefix_caching": cache.prefix_caching}

    def scheduler(self, requests: Sequence[Request] | None = None) -> Scheduler:
        """A fresh one for the simulator, which serves these requests (the workload by default)."""
        policy = self.scenario.policy.build()
        if is_pooled(policy):
            load = self.requests() if requests is None else requests
            return pools_of(self.scenario, self.max_length, load)[0]
        return MicroBatches(of_micro_batches(policy), **self.settings)

    def requests(self, seed: int | None = None, count: int | None = None) -> list[Request]:
        """The workload; with another seed or count one of the same kind, to calibrate on."""
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
    """Every scenario, checked. Raises ConfigError for settings that the engine does not support."""
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
    # Key, value, whether the engine can do that, and what it can do.
    for key, value, good, problem in (
        ("device", scenario.device, scenario.device in ("cpu", "cuda"),
         "must be cpu or cuda: the machine that runs this command is validated"),
        ("cluster.replicas", cluster.replicas, cluster.replicas == 1,
         "must be 1: one engine is run"),
        ("batching.formation", batching.formation, pooled or batching.formation == "lazy",
         "must be lazy: the engine forms a batch when its first stage is free"),
        ("policy.name", policy_name, not needs_costs(policy),
         "needs predicted times, which only the simulator has"),
        ("kv_cache", cache and cache.model_dump(exclude_defaults=True), pooled or cache is None,
         f"must be left out: {policy_name} reserves memory for whole requests"),
        ("workload.too_long", workload.too_long, workload.too_long == "error",
         "must be error: the engine's KV slots hold cluster.max_length tokens"),
        ("workload.arrivals.kind", workload.arrivals.kind, workload.arrivals.kind != "closed_loop",
         "needs clients that wait for answers, which only the simulator has"),
        ("workload.sessions", workload.sessions and workload.sessions.model_dump(),
         workload.sessions is None, "must be left out: only the simulator waits for answers"),
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


def engine_spec(
    cells: Sequence[Cell], dtype: Dtype = "float32", *, realtime: bool = False
) -> EngineSpec:
    """The engine that can serve all of the cells, which have one layout."""
    first = cells[0]
    for cell in cells:
        problem = f"must be as in {first.name}, whose engine it shares"
        if (cell.model, cell.layers) != (first.model, first.layers):
            raise cell.source.error("model", cell.scenario.model, problem)
        if cell.device != first.device:
            raise cell.source.error("device", cell.device, problem)
        if _block_size(cell) != _block_size(first):
            raise cell.source.error("kv_cache.block_size", _block_size(cell), problem)
    batch = max(cell.sequences for cell in cells)
    slots = max(
        cell.sequences * (1 if cell.kv_cache else cell.settings["max_in_flight"]) for cell in cells
    )
    longest = max(cell.max_length for cell in cells)
    return EngineSpec(
        first.model,
        first.layers,
        first.scenario.cluster.tp,
        slots=slots + 1,  # the grid's chunk has one of its own
        max_length=longest,
        max_tokens=batch * longest,
        num_blocks=max(cell.memory.get("num_blocks", 0) for cell in cells),
        block_size=_block_size(first) or 0,
        device=first.device,
        dtype=dtype,
        realtime=realtime,
    )


def _block_size(cell: Cell) -> int | None:
    return cell.kv_cache.block_size if cell.kv_cache else None


def grid_of(cells: Sequence[Cell]) -> list[GridWork]:
    """Micro-batches that cover those of the cells."""
    batch = max(cell.sequences for cell in cells)
    requests = [request for cell in cells for request in cell.requests()]
    prompt = max(request.prompt_tokens for request in requests)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    chunks: set[int] = set()
    for cell in cells:
        chunking = chunking_of(cell.scenario.policy.build())
        if chunking is not None:
            size = chunking.tokens
            chunks |= {max(1, size // 4), max(1, size // 2), max(1, size - batch), size}
    whole = [16, 32, *range(64, prompt, 64), prompt]
    return grid_works(batch, sorted(c for c in chunks if c <= prompt), whole, longest)


@dataclass(frozen=True)
class CellRuns:
    """A cell's run, and the two calibration runs around it with their requests."""

    run: EngineRun
    calibration: list[tuple[EngineRun, list[Request]]]


@dataclass(frozen=True)
class Repeat:
    """One repeat: the grids before and after, what each cell served, and the load average then."""

    grids: tuple[StageLog, StageLog]
    served: dict[str, CellRuns]
    load: float


@dataclass(frozen=True)
class Session:
    """All measurements on one engine, and its environment."""

    spec: EngineSpec
    cells: list[Cell]
    works: list[GridWork]
    repeats: list[Repeat]
    online: dict[str, EngineRun]
    seconds: float
    environment: Facts
    isolated: Bundle | None = None
    """What ``profile`` measured of the same model on the same device, op by op."""


def isolated_bundle(root: Path, spec: EngineSpec, known: Facts) -> Bundle | None:
    """The bundle under ``root`` that ``profile`` measured of the engine's model, TP degree and
    number format, on the device that the engine's facts name; None without one."""
    hardware = "gpu" if spec.device == "cuda" else "processor"
    for device, model, tp in list_bundles(root):
        if (model, tp) != (spec.model.name, spec.tp):
            continue
        bundle = load_bundle(bundle_path(root, device, model, tp))
        meta = bundle.meta
        same = meta.environment.get(hardware) == known.get(hardware)
        if same and (meta.source, meta.dtype) == ("measured", spec.dtype):
            return bundle
    return None


def run_sessions(
    cells: Sequence[Cell],
    settings: Validation,
    *,
    realtime: bool,
    timeout_s: float,
    progress: Progress,
    say: Say,
    profiles: Path | None = None,
) -> list[Session]:
    """Measure all cells, layout by layout. Raises ProfileError where an engine fails.

    ``profiles`` is the root of the bundles that :func:`isolated_bundle` searches.
    """
    by_layout = sorted(cells, key=lambda cell: cell.layout)
    layouts = [list(group) for _, group in groupby(by_layout, key=lambda cell: cell.layout)]
    # Checked before anything is measured.
    specs = [engine_spec(group, settings.dtype, realtime=realtime) for group in layouts]
    total = sum(
        2 + (2 + 3 * sum(not cell.online for cell in group)) * settings.repeats
        + sum(cell.online for cell in group)
        for group in layouts
    )  # fmt: skip
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("runs of the engine", done, total)

    progress("runs of the engine", 0, total)
    sessions = []
    for spec, group in zip(specs, layouts, strict=True):
        say(f"pp {spec.pp}, tp {spec.tp}: {spec.ranks} processes")
        with EngineProcesses(spec, timeout_s) as engine:
            sessions.append(_session(engine, group, settings, step))
        if profiles and (found := isolated_bundle(profiles, spec, sessions[-1].environment)):
            sessions[-1] = replace(sessions[-1], isolated=found)
            say(f"pp {spec.pp}, tp {spec.tp}: predicted from {found.meta.device}'s profile, too")
        say(f"pp {spec.pp}, tp {spec.tp}: done after {sessions[-1].seconds:.0f} s")
    return sessions


def _session(
    engine: EngineProcesses,
    cells: list[Cell],
    settings: Validation,
    step: Callable[[], None],
) -> Session:
    began = time.perf_counter()
    offline = [cell for cell in cells if not cell.online]
    works, few = grid_of(cells), settings.calibration_requests

    def serve(cell: Cell, requests: list[Request]) -> EngineRun:
        run = engine.serve(requests, cell.policy, cell.settings, **cell.memory)
        step()
        return run

    def grid() -> StageLog:
        log = engine.play(works)
        step()
        return log

    grid()  # every shape once, so that none is met cold
    serve(cells[0], cells[0].requests(seed=1, count=few))
    done = []
    for number in range(settings.repeats):
        before = grid()
        served = {}
        for cell in offline:
            # The targets' seed is the configuration's; these are other ones.
            seeds = [2_000_000 + 2 * number, 2_000_001 + 2 * number]
            around = [cell.requests(seed, few) for seed in seeds]
            first = serve(cell, around[0])
            run = serve(cell, cell.requests())
            last = serve(cell, around[1])
            served[cell.name] = CellRuns(run, [(first, around[0]), (last, around[1])])
        done.append(Repeat((before, grid()), served, os.getloadavg()[0]))
    online = {cell.name: serve(cell, cell.requests()) for cell in cells if cell.online}
    seconds = time.perf_counter() - began
    return Session(engine.spec, cells, works, done, online, seconds, engine.environment)
