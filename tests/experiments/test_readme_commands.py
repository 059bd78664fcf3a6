"""The README's commands work as they stand there: one test a command.

A command runs after those whose files it reads. Where a comment above it says that it needs torch,
a GPU or the public measurements, it may be skipped for want of them; all others must run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DATASETS = os.environ.get("SARATHI_SIM_DATASETS")
pytestmark = pytest.mark.usefixtures("few_trees")
# Fewer requests than the reader has. Figures are drawn by the first run, which has no --out.
QUICK = {
    "run": ["--set", "workload.requests=20"],
    "bench": ["--set", "workload.requests=20", "--repeats", "1"],
}


@dataclass(frozen=True)
class Command:
    """A line of the README. ``makes`` is the path that later commands may read."""

    text: str
    needs: str
    words: list[str] = field(repr=False)

    @property
    def makes(self) -> str:
        words = self.words
        if words[0] == "cp":
            return words[2]
        if "--out" in words:
            return words[words.index("--out") + 1]
        return "runs/first_experiment" if words[1] == "run" else ""

    def reads(self, path: str) -> bool:
        given = [part for word in self.words for part in word.split("=")]
        return any(part == path or part.startswith(f"{path}/") for part in given if path)


def commands() -> list[Command]:
    found, needs = [], ""
    for line in README.replace("\\\n", " ").splitlines():
        if not line.startswith("    "):
            needs = ""
        elif line.startswith("    # needs "):
            needs = line.removeprefix("    # needs ")
        elif re.match(r"    (cp|sarathi-sim) ", line):
            found.append(Command(" ".join(line.split()), needs, shlex.split(line)))
    return found


COMMANDS = commands()


class Reader:
    """Runs commands in a folder of its own, each at most once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()

    def run(self, command: Command) -> None:
        """Run it after those it builds on."""
        if command.text in self.done:
            return
        for earlier in COMMANDS[: COMMANDS.index(command)]:
            if command.reads(earlier.makes) and earlier.needs in ("", command.needs):
                self.run(earlier)
        self._run(command)
        self.done.add(command.text)

    def _run(self, command: Command) -> None:
        program, *words = command.words
        if program == "cp":
            shutil.copy(ROOT / words[0], self.folder / words[1])
            return
        words = [name for word in words for name in _expanded(word)]
        no_figures = ["--no-figures"] if words[0] == "run" and "--out" in words else []
        done = CliRunner().invoke(app, [*words, *QUICK.get(words[0], []), *no_figures])
        assert done.exit_code == 0, f"{command.text}: {done.output}"


def _expanded(word: str) -> list[str]:
    """As a shell does."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("reader")
    for name in ("data", "tests"):
        (folder / name).symlink_to(ROOT / name)
    if DATASETS:
        (folder / "datasets").symlink_to(DATASETS)
    policy = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    (folder / "prefill_first.py").write_text(policy, encoding="utf-8")
    return Reader(folder)


@pytest.mark.parametrize("command", COMMANDS, ids=[command.text for command in COMMANDS])
def test_a_command(command: Command, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader.folder)
    monkeypatch.setattr("experiments.run.bench.BATCHES", (8,))  # bench's other sizes take longer
    monkeypatch.setattr("experiments.run.bench.OUTPUT", 40)
    for module in ("held_out", "bands"):  # so do five folds for `fit`
        monkeypatch.setattr(f"simulator.confidence.{module}.FOLDS", 2)
    monkeypatch.setattr("simulator.confidence.held_out.FOREST", 5)
    if "torch" in command.needs:
        pytest.skip(f"needs {command.needs}: see tests/profiler_torch")
    if command.needs and not DATASETS:
        pytest.skip(f"needs {command.needs}")
    reader.run(command)


def test_what_commands_may_need() -> None:
    """Only these needs are known, and they stand where a reader sees them."""
    known = ("torch", "torch and a GPU", "the public measurements")
    needs = {command.words[1]: command.needs for command in COMMANDS}
    assert all(not need or need.split(" (")[0] in known for need in needs.values())
    assert {name for name, need in needs.items() if "torch" not in need and not need} >= {
        *("check", "run", "plot", "plan", "compare", "reproduce", "advise", "make-bundle"),
        *("profile-check", "fit", "bench"),
    }
    for command in COMMANDS:
        if "datasets" in command.text:
            assert command.needs.startswith("the public measurements"), command.text
        if command.words[1] in ("profile", "validate"):
            assert command.needs.startswith("torch"), command.text
        if "cuda" in command.text or "validate_gpu" in command.text:
            assert "GPU" in command.needs, command.text
