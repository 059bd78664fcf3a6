"""Runs a real engine and the simulator on the same workloads, interleaved with calibration.

One engine for each layout (pp, tp). A repeat is: grid; for each cell calibration, the workload,
calibration; grid. The grid is a profile of the engine by synthetic micro-batches, the calibration
runs are workloads of the same kind with other seeds. Online cells are run once, for their parity.
:mod:`sarathi_sim.experiments.validate.differences` compares simulation and measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from sarathi_sim.experiments.config.scenario import Validation
from sarathi_sim.experiments.validate.cells import Cell, engine_spec, grid_of
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.bundle.schema import Bundle, bundle_path, list_bundles, load_bundle
from sarathi_sim.profiler.engine.processes import EngineProcesses, EngineRun, Facts, StageLog
from sarathi_sim.profiler.engine.spec import EngineSpec
from sarathi_sim.profiler.measuring.to_bundle import GridWork
from sarathi_sim.profiler.storage.child import Progress, Say


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
