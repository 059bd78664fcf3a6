"""What other work took of a run: by hand, and on runs recorded on a quiet and a busy machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.beside.session import Cell, make_cells
from sarathi_sim.experiments.beside.torch_session import (
    MOST_OF_TARGET,
    TARGETS,
    LostTime,
    engine_spec,
    lost,
    lost_seconds,
)
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.policies.catalogue import build
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine.driver import Decision, Served
from sarathi_sim.profiler.engine.processes import EngineRun, StageLog
from sarathi_sim.profiler.engine.spec import TIMED_OPS, EngineSpec
from tests.experiments.fake_engine import FakeEngine
from tests.experiments.test_validation import cell_of, load

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return cell_of(load(tmp_path))


def found(cell: Cell, run: EngineRun, **spec: Any) -> LostTime:
    engine = replace(engine_spec([cell]), **spec)
    return lost(engine, run, cell.requests(), cell.scheduler)


def test_an_undisturbed_run_lost_nothing(cell: Cell) -> None:
    run, _ = FakeEngine(cell).serve(cell.requests())
    assert lost_seconds(run.stages).max() == 0.0
    assert found(cell, run) == LostTime(0.0, 0.0, 0.0, 0.0)


def test_lost_time_is_wall_time_less_cpu_time(cell: Cell) -> None:
    run, _ = FakeEngine(cell).serve(cell.requests())
    log = run.stages
    log.cpu[:] = 0.9 * (log.finish - log.start)
    shares = found(cell, run)
    assert shares.iteration_error_median == pytest.approx(0.1)
    assert shares.iteration_error_p90 == pytest.approx(0.1)
    # All but links and returns would have been faster by that.
    assert -0.1 < shares.makespan_error < -0.05
    assert shares.too_much() == (
        "preempted work accounts for 10.0% of iteration_error_median, and 2.50% is allowed"
    )


def test_few_micro_batches_that_lost_much_count_by_their_time(cell: Cell) -> None:
    """Neither the median nor the 90th percentile shows the largest 8 %, but the makespan does."""
    run, _ = FakeEngine(cell).serve(cell.requests())
    log = run.stages
    took = (log.finish - log.start).sum(axis=1)
    largest = np.argsort(took)[-int(0.08 * len(took)) :]
    log.cpu[largest] = 0.0
    shares = found(cell, run)
    assert shares.iteration_error_median == shares.iteration_error_p90 == 0.0
    why = shares.too_much()
    assert why is not None and " of makespan_error, " in why


def test_waiting_for_other_ranks_is_not_lost(cell: Cell) -> None:
    """Half of the stages' time is all-reduce, in which the core has nothing to do."""
    run, _ = FakeEngine(cell).serve(cell.requests())
    log = run.stages
    wall = log.finish - log.start
    log.ops[:, :, TIMED_OPS.index("all_reduce")] = wall / 2
    log.cpu[:] = wall / 2
    assert found(cell, run).too_much() is None


def test_of_a_gpus_work_the_hosts_clock_says_nothing(cell: Cell) -> None:
    run, _ = FakeEngine(cell).serve(cell.requests())
    run.stages.cpu[:] = 1e-9
    assert found(cell, run).too_much() is not None
    on_gpu = found(cell, run, device="cuda")
    assert np.isnan(on_gpu.makespan_error) and on_gpu.too_much() is None


@pytest.mark.parametrize("name", TARGETS)
def test_half_of_each_target_may_be_lost(name: str) -> None:
    nothing = LostTime(0.0, 0.0, 0.0, 0.0)
    limit = MOST_OF_TARGET * TARGETS[name]
    assert replace(nothing, **{name: 0.99 * limit}).too_much() is None
    for share in (1.01 * limit, -1.01 * limit):
        why = replace(nothing, **{name: share}).too_much()
        assert why is not None and f" of {name}, and {limit:.2%} is allowed" in why


@pytest.fixture(scope="module")
def two_stages() -> EngineSpec:
    """The engine of the recorded runs."""
    cells = make_cells(load_experiment("validate_cpu"))
    return engine_spec([cell for cell in cells if cell.layout == (2, 1)])


def of_recorded(name: str, spec: EngineSpec) -> LostTime:
    """Of a run of ``validate_cpu`` on two cores, as the engine logged it (times to 1 us)."""
    entry = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    times = {key: np.array(entry[key]) for key in ("arrived", "start", "finish", "cpu")}
    ops = np.zeros((*times["cpu"].shape, len(TIMED_OPS) + 2))
    decisions = [Decision(**one) for one in entry["decisions"]]
    run = EngineRun(Served(decisions=decisions), StageLog(**times, ops=ops))
    requests = [Request(*one) for one in entry["requests"]]
    return lost(
        spec, run, requests, lambda: MicroBatches(build(**entry["policy"]), **entry["settings"])
    )


@pytest.mark.parametrize("policy", ["orca", "sarathi"])
def test_a_run_that_had_its_cores_to_itself_is_accepted(
    two_stages: EngineSpec, policy: str
) -> None:
    """With real-time priority, so that nothing else ran beside it."""
    found = of_recorded(f"{policy}_quiet", two_stages)
    assert found.too_much() is None
    assert found.iteration_error_median < 0.01


@pytest.mark.parametrize(
    ("name", "why"),
    [
        # Beside ten other processes: the two ranks ran a seventh of the time.
        ("orca_busy", "88.8% of iteration_error_median"),
        ("sarathi_busy", "87.2% of iteration_error_median"),
        # Real-time priority, and the kernel took the core twice, for 50 ms each.
        ("sarathi_throttled", "9.6% of bubble_error"),
    ],
)
def test_a_disturbed_run_is_rejected(two_stages: EngineSpec, name: str, why: str) -> None:
    found = of_recorded(name, two_stages).too_much()
    assert found is not None and why in found
