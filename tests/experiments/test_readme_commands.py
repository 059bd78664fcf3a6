"""The README's commands work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    datasets = os.environ.get("SARATHI_SIM_DATASETS")
    if datasets:
        (tmp_path / "datasets").symlink_to(datasets)
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    ran = []
    for line in re.findall(r"^    ((?:cp|sarathi-sim) .*)$", text, re.MULTILINE):
        program, *words = shlex.split(line)
        if words[0] in ("profile", "validate") or "profiles/cpu.yaml" in line:
            continue  # tests/profiler_torch runs these, where torch is installed
        if words[0] in ("import", "profile-check", "profile-diff") and not datasets:
            continue
        if program == "cp":
            shutil.copy(ROOT / words[0], words[1])
            continue
        if words[0] == "run":
            words += ["--set", "workload.requests=20"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{line}: {done.output}"
        ran.append(words[0])
    assert {"check", "run", "plot", "make-bundle"} <= set(ran)
