"""Figures drawn in a process beside the run: the same, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from experiments.config.loading import load_experiment
from experiments.figures.beside import Artist
from experiments.figures.drawing_process import draw
from experiments.figures.slices import Drawing, Window, stage_slices
from experiments.run.experiment import simulate_all, tables_of


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


def test_the_same_figures_are_drawn(
    drawing: Drawing, expected: dict[str, bytes], tmp_path: Path
) -> None:
    told = []
    with Artist() as artist:
        artist.begin(drawing, tmp_path / "figures")
        artist.finish(lambda done, total: told.append((done, total)))
        process = artist.process
    assert _contents(tmp_path / "figures") == expected
    assert told == [(done, len(told)) for done in range(len(expected) // 2)]
    assert process.returncode is not None


def test_what_a_killed_process_leaves_is_drawn_here(
    drawing: Drawing, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with Artist() as artist:
        os.kill(artist.process.pid, signal.SIGKILL)
        artist.begin(drawing, tmp_path / "figures")
        artist.finish(lambda done, total: None)
    assert _contents(tmp_path / "figures") == expected


def test_what_drawing_raises_is_raised_here(drawing: Drawing, tmp_path: Path) -> None:
    with Artist() as artist, pytest.raises(FileNotFoundError, match="missing"):
        artist.begin(drawing, tmp_path / "missing" / "figures")
        artist.finish(lambda done, total: None)
