"""A small experiment, as a file and as a result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sarathi_sim as sim
from sarathi_sim.experiments.config import inputs
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.plan import SweepPlan, plan_sweep
from tests.experiments.small_config import SMALL
from tests.experiments.small_report import (
    write_capacities,
    write_difference,
    write_recommendation,
    write_recorded,
    write_score,
    write_sensitivity,
)
from tests.experiments.small_sweep import RUNS, SWEEP, Files, swept, tree


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Op times of fewer trees: less exact, and a bundle is fitted in a tenth of the time."""
    monkeypatch.setattr("sarathi_sim.simulator.op_times.regression.TREES", 20)
    _forget_op_times()
    yield
    _forget_op_times()


def _forget_op_times() -> None:
    inputs._load.cache_clear()
    inputs._modelled.cache_clear()


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str = SMALL) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with everything in it. Tests only read it."""
    folder = tmp_path_factory.mktemp("result")
    config = folder / "small.yaml"
    config.write_text(SMALL, encoding="utf-8")
    sim.run(load_experiment(config), out=folder / "run", timeline=True)
    return folder / "run"


@pytest.fixture
def copy(result: Path, tmp_path: Path) -> Path:
    """A result that a test may disturb."""
    return Path(shutil.copytree(result, tmp_path / "copy"))


@pytest.fixture(scope="session")
def plotted(result: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what ``plot`` draws of it. Tests only read it."""
    out = tmp_path_factory.mktemp("plotted") / "figures"
    sim.plot([result], out=out)
    return out


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sweep of eighteen runs."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(SWEEP, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_plan(tiny_config: Path) -> SweepPlan:
    """Its runs."""
    return plan_sweep(tiny_config)


@pytest.fixture(scope="session")
def tiny_sweep(tiny_plan: SweepPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of it, where nothing happened on the way. Tests only read it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "sweep"
    report = swept(tiny_plan, folder, InProcess())
    assert (report.finished, report.total, report.failures) == (RUNS, RUNS, {})
    return folder


@pytest.fixture(scope="session")
def tiny_files(tiny_sweep: Path) -> Files:
    """Every file of it."""
    return tree(tiny_sweep)


@pytest.fixture(scope="session")
def reported(
    result: Path, tiny_sweep: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The folder of a finished result of each kind that a report shows. Tests only read them."""
    folder = tmp_path_factory.mktemp("reported")
    return {
        "run": result,
        "sweep": tiny_sweep,
        "comparison": write_difference(result, folder / "difference"),
        "score": write_score(folder / "score"),
        "recorded": write_recorded(folder / "recorded"),
        "capacity": write_capacities(folder / "capacity"),
        "recommend": write_recommendation(folder / "recommend"),
        "sensitivity": write_sensitivity(folder / "sensitivity"),
    }
