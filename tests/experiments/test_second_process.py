"""What a second process does for a run: the same, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.figures.slices import Drawing, Window, stage_slices
from sarathi_sim.experiments.figures.timeline import draw
from sarathi_sim.experiments.run.experiment import run_experiment, simulate_all, tables_of
from sarathi_sim.experiments.run.second_process import SecondProcess


@pytest.fixture(autouse=True)
def one_process() -> None:
    """Not here."""


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    outcome = simulate_all(load_experiment("first_experiment", ["workload.requests=20"]))
    window = Window(0.0, 1.0)
    slices = {name: stage_slices(run.analysis, window) for name, run in outcome.runs.items()}
    return Drawing(tables_of(outcome.runs), window, slices, {}, {})


@pytest.fixture(scope="module")
def expected(drawing: Drawing, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("here")
    draw(drawing, folder, lambda done, total: None)
    return _contents(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_same_figures_are_drawn(
    drawing: Drawing, expected: dict[str, bytes], tmp_path: Path
) -> None:
    told = []
    with SecondProcess() as second:
        work = second.begin(draw, drawing, tmp_path / "figures")
        second.result(work, lambda done, total: told.append((done, total)))
        process = second.process
    assert _contents(tmp_path / "figures") == expected
    assert told == [(done, len(told)) for done in range(len(expected) // 2)]
    assert process.returncode is not None


def test_what_a_killed_process_leaves_is_done_here(
    drawing: Drawing, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with SecondProcess() as second:
        os.kill(second.process.pid, signal.SIGKILL)
        added = second.begin(_sum, 2, 3)
        work = second.begin(draw, drawing, tmp_path / "figures")
        second.result(work)
        assert second.result(added) == 5
    assert _contents(tmp_path / "figures") == expected


@pytest.mark.slow
def test_what_a_function_raises_is_raised_here(drawing: Drawing, tmp_path: Path) -> None:
    with SecondProcess() as second:
        missing = second.begin(draw, drawing, tmp_path / "missing" / "figures")
        wrong = second.begin(_sum, 2, "3")
        with pytest.raises(TypeError, match="unsupported operand"):
            second.result(wrong)  # in any order
        with pytest.raises(FileNotFoundError, match="missing"):
            second.result(missing)


def _sum(left: int, right: int, told: object) -> int:
    return left + right


@pytest.mark.slow
def test_bands_are_the_same_from_a_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load_experiment("first_experiment", ["workload.requests=20"])
    begun = []
    begin = SecondProcess.begin

    def noted(self: SecondProcess, function: Any, *arguments: Any) -> Any:
        begun.append(function.__name__)
        return begin(self, function, *arguments)

    monkeypatch.setattr(SecondProcess, "begin", noted)
    outcome = run_experiment(small, tmp_path / "run")
    assert begun == ["uncertainty_of"] * (len(small.scenarios) - 1) + ["_draw"]
    assert outcome.summary() == simulate_all(small).summary()


@pytest.mark.slow
def test_scaled_op_times_are_sent(tmp_path: Path) -> None:
    """The recipe of docs/recipes.md, with its figures."""
    scaled = "engine.op_scale={attn_decode: 0.9, ffn_ln1: 1.2, ffn_ln2: 1.2}"
    small = load_experiment("first_experiment", ["workload.requests=20", scaled])
    outcome = run_experiment(small, tmp_path / "run")
    assert outcome.summary() == simulate_all(small).summary()
    assert any((tmp_path / "run" / "figures").iterdir())
