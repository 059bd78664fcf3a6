"""docs/sweeps.md: its commands and examples work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")

#: What makes each command short. Sweeps in processes of their own: test_sweep_workers.py.
QUICK = {"run": ["--set", "workload.requests=10"], "sweep": ["--workers", "1"]}


@pytest.fixture
def background() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_the_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml_block, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert "requests: 300" in yaml_block
    Path("my_sweep.yaml").write_text(yaml_block.replace("requests: 300", "requests: 10"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        page = PAGE.replace("8786", str(free.getsockname()[1]))
    commands = re.findall(r"^    ((?:cp|sarathi-sim|dask) .*)$", page, re.MULTILINE)
    ran = []
    for line in commands:
        program, *words = shlex.split(line.removesuffix(" &"))
        ran.append(f"{program} {words[0]}")
        if program == "cp":
            shutil.copy(ROOT / words[0], words[1])
        elif program == "dask" or "dask" in words:
            pytest.importorskip("distributed")
            if program == "dask":
                background.append(start([str(Path(sys.executable).with_name("dask")), *words]))
            else:
                invoke(words)
        else:
            invoke(words + QUICK.get(words[0], []))
    assert {"sarathi-sim plan", "sarathi-sim compare", "dask scheduler", "dask worker"} <= set(ran)
    local, remote = (
        {path.name for path in Path("runs", name, "runs").iterdir()}
        for name in ("my_sweep", "on_dask")
    )
    assert (len(local), len(remote)) == (4 * 3 * 4, 4 * 3 * 3)
    assert remote < local
    table = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(table, {})


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def invoke(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{words}: {done.output}{done.exception!r}"


def test_the_slurm_example_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "docs/sweeps.md", "exec")
