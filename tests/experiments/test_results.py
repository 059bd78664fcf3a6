"""Folders that are refused: what is not ours to replace, and results that are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import SHAPE, Experiment, load_experiment
from sarathi_sim.experiments.figures.slices import Window
from sarathi_sim.experiments.results import csv_bytes, parquet_bytes, read_tables
from sarathi_sim.experiments.run.compare import plot_results
from sarathi_sim.experiments.run.experiment import run_experiment
from sarathi_sim.experiments.run.uncertainty import PER_MAKESPAN
from sarathi_sim.simulator.views.metric_registry import METRICS
from tests.experiments.small_config import SMALL


@pytest.fixture
def copy(result: Path, tmp_path: Path) -> Path:
    """A result that a test may damage."""
    return Path(shutil.copytree(result, tmp_path / "copy"))


@pytest.fixture
def small() -> Experiment:
    return load_experiment(yaml.safe_load(SMALL))


def test_the_folder_of_the_command_is_not_replaced(
    small: Experiment, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy / "orca")
    for out in (Path(), Path("..")):
        with pytest.raises(ConfigError, match="the command runs in this folder"):
            run_experiment(small, out)


def test_a_run_does_not_replace_figures_nor_the_reverse(
    small: Experiment, result: Path, copy: Path, plotted: Path
) -> None:
    with pytest.raises(ConfigError, match=r"another kind \(figures\)"):
        run_experiment(small, plotted)
    with pytest.raises(ConfigError, match=r"another kind \(result\)"):
        plot_results([result], copy)
    with pytest.raises(ConfigError, match="name the runs' own folders"):
        read_tables(plotted)


def test_a_name_that_is_not_text(small: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a name in UTF-8"):
        run_experiment(small, tmp_path / "a\udcff")


def _drop(path: Path, column: str) -> None:
    if path.suffix == ".csv":
        pd.read_csv(path).drop(columns=column).to_csv(path, index=False)
    else:
        pd.read_parquet(path).drop(columns=column).to_parquet(path)


def _swap(folder: Path) -> None:
    tables = folder / "requests.parquet", folder / "ledger.csv"
    first, second = (path.read_bytes() for path in tables)
    tables[0].write_bytes(second)
    tables[1].write_bytes(first)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: _drop(f / "orca" / "ledger.csv", "busy_s"), "no column busy_s"),
        (lambda f: _drop(f / "orca" / "requests.parquet", "finish_s"), "no column finish_s"),
        (lambda f: _swap(f / "orca"), "the result is damaged"),
        (lambda f: (f / "orca" / "ledger.csv").write_text(""), "the result is damaged"),
        (lambda f: (f / "orca" / "ledger.csv").unlink(), "the result is damaged"),
    ],
)
def test_damaged_tables(copy: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(copy)
    with pytest.raises(ConfigError, match=expected):
        read_tables(copy)


def test_damaged_summaries(copy: Path) -> None:
    content = json.loads((copy / "summary.json").read_text())
    for scenarios in (None, [], {}, "orca", 3):
        (copy / "summary.json").write_text(json.dumps({**content, "scenarios": scenarios}))
        with pytest.raises(ConfigError, match=r"summary\.json names no scenarios"):
            read_tables(copy)


def test_a_window_after_the_end_writes_nothing(small: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--window 1e\+06:1: nothing happens there: START must"):
        run_experiment(small, tmp_path / "a" / "b", window=Window(1e6, 1))
    assert not (tmp_path / "a").exists()


def test_where_nothing_can_be_written_nothing_is_simulated(
    small: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "sarathi_sim.experiments.run.experiment._run", lambda *_: pytest.fail("simulated")
    )
    with pytest.raises(ConfigError, match=r"--out .*file/run: "):
        run_experiment(small, tmp_path / "file" / "run")


def test_the_metrics_one_can_name_are_those_of_a_run(result: Path) -> None:
    def keys(tree: object) -> object:
        return {k: keys(v) for k, v in tree.items()} if isinstance(tree, dict) else None

    for summary in json.loads((result / "summary.json").read_text())["scenarios"].values():
        numbers = {k: v for k, v in summary.items() if not isinstance(v, list)}
        unpaged = {k: v for k, v in SHAPE.items() if k not in METRICS or not METRICS[k].paged}
        assert keys(numbers) == keys(unpaged)
        assert set(summary) - set(numbers) == {
            "outside_profile",
            *(f"{metric}_band" for metric in ("makespan_s", *PER_MAKESPAN)),
        }


@pytest.mark.parametrize("reasons", [[None] * 3, [None, "too long", None], ["a", "b", "c"], []])
def test_tables_are_to_the_byte_those_of_pandas(reasons: list[str | None]) -> None:
    table = {
        "request": np.arange(len(reasons)),
        "ttft_s": np.array([0.1, np.nan, 1e-17][: len(reasons)]),
        "rejected": np.array(reasons, object),
    }
    assert parquet_bytes(table) == pd.DataFrame(table).to_parquet(index=False)
    ledger = {"stage": np.arange(4), "busy_s": np.array([0.1, 1 / 3, 1e-17, 2e22])}
    assert csv_bytes(ledger) == pd.DataFrame(ledger).to_csv(index=False).encode()
