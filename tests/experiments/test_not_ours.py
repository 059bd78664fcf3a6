"""What a command did not write itself it neither deletes nor overwrites: exit code 2, and why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from tests.experiments.small_config import SMALL
from tests.experiments.small_sweep import SWEEP, tree

Write = Callable[[str], Path]


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result, *expected: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, "one line"
    for text in expected:
        assert text in result.stderr


@pytest.fixture
def sweep_config(tmp_path: Path) -> Path:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    return file


@pytest.fixture
def copy(result: Path, tmp_path: Path) -> Path:
    """A result that a test may disturb."""
    return Path(shutil.copytree(result, tmp_path / "r1"))


def test_a_sweep_is_not_resumed_in_a_folder_that_only_looks_like_one(
    tmp_path: Path, sweep_config: Path
) -> None:
    out = tmp_path / "precious"
    for name in ("runs/.git/HEAD", "runs/notes.md", "failed/thesis.txt", "summary.json", "lock"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(f"my {name}")
    (out / "results.parquet").write_bytes(b"mine")
    before = tree(out)
    for flags in ([], ["--resume"]):
        done = command("sweep", sweep_config, "--out", out, "--workers", 1, *flags)
        refused(done, "no sweep's folder", "runs/.git/HEAD", "failed/thesis.txt")
        assert "--resume" not in done.stderr, "nobody is invited to try that"
        assert tree(out) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sweep's configuration, and its folder."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.yaml").write_text(SWEEP)
    done = command(
        "sweep", folder / "sweep.yaml", "--out", folder / "out", "--workers", 1, "--quiet"
    )
    assert done.exit_code == 0, done.output
    return folder / "sweep.yaml", folder / "out"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("runs/.git/HEAD", "not ours: runs/.git/HEAD"),
        ("runs/notes.md", "not ours: runs/notes.md"),
        ("failed/notes.txt", "not ours: failed/notes.txt"),
        ("analysis.ipynb", "not ours: analysis.ipynb"),
        ("summary.json", "changed: summary.json"),
        ("results.parquet", "changed: results.parquet"),
        ("lock", "lock: is not a lock of ours"),
    ],
)
def test_a_resumed_sweep_touches_only_what_is_its_own(
    finished: tuple[Path, Path], tmp_path: Path, name: str, named: str
) -> None:
    config, original = finished
    out = Path(shutil.copytree(original, tmp_path / "out"))
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = tree(out)
    refused(command("sweep", config, "--out", out, "--resume", "--workers", 1), named)
    assert tree(out) == before


def test_figures_in_a_sweep_are_no_obstacle_and_stay(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    config, original = finished
    out = Path(shutil.copytree(original, tmp_path / "out"))
    (out / "figures").mkdir()
    (out / "figures" / "mine.svg").write_text("mine")
    before = tree(out)
    done = command("sweep", config, "--out", out, "--resume", "--workers", 1)
    assert (done.exit_code, tree(out)) == (0, before), done.output


def test_a_traceback_that_was_annotated_stays(finished: tuple[Path, Path], tmp_path: Path) -> None:
    from experiments.sweeps.store import Store

    config, original = finished
    out = Path(shutil.copytree(original, tmp_path / "out"))
    Store(out).write_failure("0" * 16, "Traceback")
    assert command("sweep", config, "--out", out, "--resume", "--workers", 1).exit_code == 0
    assert not (out / "failed").exists(), "the sweep's own are dropped"
    Store(out).write_failure("0" * 16, "Traceback")
    (out / "failed" / f"{'0' * 16}.txt").write_text("Traceback: because of the cache")
    before = tree(out)
    refused(
        command("sweep", config, "--out", out, "--resume", "--workers", 1),
        f"changed: failed/{'0' * 16}.txt",
    )
    assert tree(out) == before


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("orca/analysis.ipynb", "not ours: orca/analysis.ipynb"),
        ("figures/mine.svg", "not ours: figures/mine.svg"),
        ("orca/.git/objects/ab/cd", "not ours: orca/.git/objects/ab/cd"),
        ("config.yaml", "changed: config.yaml"),
        ("orca/ledger.csv", "changed: orca/ledger.csv"),
    ],
)
def test_a_result_with_a_file_of_the_users_is_not_replaced(
    write_config: Write, copy: Path, name: str, named: str
) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("mine")
    before = tree(copy)
    refused(command("run", write_config(SMALL), "--out", copy, "--no-figures", "--quiet"), named)
    assert tree(copy) == before


def test_figures_with_a_file_of_the_users_are_not_replaced(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "plotted"
    assert command("plot", copy, "--out", out).exit_code == 0
    assert command("plot", copy, "--out", out).exit_code == 0, "ours is replaced"
    (out / "figures" / "mine.svg").write_text("mine")
    before = tree(out)
    refused(command("plot", copy, "--out", out), "not ours: figures/mine.svg")
    assert tree(out) == before


def test_figures_of_a_sweep_replace_only_such(finished: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "figures"
    assert command("plot", finished[1], "--out", out).exit_code == 0
    assert command("plot", finished[1], "--out", out).exit_code == 0
    (out / "mine.svg").write_text("mine")
    (out / "cdf.svg").write_text("edited")
    before = tree(out)
    refused(command("plot", finished[1], "--out", out), "changed: cdf.svg", "not ours: mine.svg")
    assert tree(out) == before
