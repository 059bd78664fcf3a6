"""A small experiment, as a file and as a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.loading import load_experiment
from experiments.run import run_experiment
from tests.experiments.small_config import SMALL


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
    run_experiment(load_experiment(config), folder / "run", trace=True)
    return folder / "run"
