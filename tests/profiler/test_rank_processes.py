"""What a rank does once its parent is gone. torch-free: the ranks are stand-ins."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "stays"), [("sarathi-sim-ranks-x", False), ("mine", True)])
def test_scratch_goes_with_the_parent_and_nothing_else(
    tmp_path: Path, name: str, stays: bool
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "spec.json").write_text("{}")
    code = (
        "import pathlib, sys, time\n"
        "from sarathi_sim.profiler.shard.rank_processes import channel_of_rank\n"
        "channel_of_rank(pathlib.Path(sys.argv[1]))\n"
        "time.sleep(60)\n"
    )
    ours, theirs = Pipe()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdin=theirs.fileno()
        )
    assert (process.wait(PATIENCE_S), folder.exists()) == (0, stays)
    assert tmp_path.is_dir()
