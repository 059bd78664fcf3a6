"""The commands: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import GROUPS, app
from sarathi_sim.experiments.cli.common import print_notes
from tests.experiments.small_config import SMALL, called

COMMANDS = sorted(typer.main.get_command(app).commands)
ROOT = Path(__file__).resolve().parents[2]
Write = Callable[[str], Path]


@pytest.mark.slow
def test_run_prints_tables(write_config: Write, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = called("run", write_config(SMALL), "--out", out).stdout
    for expected in ("Two schedulers on a small load.", "makespan", "speedup", "1.50", str(out)):
        assert expected in told
    assert (out / "figures" / "timeline.svg").is_file()


def test_json_is_one_object_and_nothing_else(write_config: Write, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = called("run", write_config(SMALL), "--out", out, "--no-figures", "--json")
    printed = json.loads(done.stdout)
    assert list(printed)[:4] == ["question", "answer", "assumptions", "warnings"]
    assert list(printed["scenarios"]) == ["orca", "sarathi"]
    said = printed["notes"]["orca"]
    assert said == json.loads((out / "summary.json").read_text())["notes"]["orca"]
    assert [note for note in said if note.startswith("op times: ")]
    assert list(printed["ratios"]) == ["speedup"]
    assert "makespan" in done.stderr
    assert not (out / "figures").exists()
    again = called("run", write_config(SMALL), "--out", out, "--no-figures", "--quiet")
    assert again.output == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "CONFIG", "--set", "cluster.pp=0"], "--set cluster.pp: value 0: must be at least"),
        (["run", "absent.yaml"], "absent.yaml: no such file"),
        (["run", "CONFIG", "--window", "x"], "--window x: expected START:LENGTH"),
        (["check", "CONFIG", "--set", "model=gpt4"], "--set model: unknown model 'gpt4'"),
        (["plot", "absent"], "absent: no such folder"),
        (["support", "--model", "llama-14b"], "did you mean llama-13b"),
        (["calibrate", "--datasets", "absent"], "--datasets names absent, which is not a folder"),
        (["run", "CONFIG", "--out", "."], "--out .: the command runs in this folder"),
        (["reproduce", "--out", "small.yaml"], "--out small.yaml: exists and is not a folder"),
        (["calibrate", "--report", "--write"], "--write: does not go with --report"),
        (["run", "CONFIG", "--sett", "seed=1"], "No such option"),
    ],
)
def test_user_errors(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    config = str(write_config(SMALL))
    monkeypatch.chdir(tmp_path)
    done = called(*(config if a == "CONFIG" else a for a in arguments), code=2)
    assert expected in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("models", "gpt3-175b"),
        ("devices", "a100-80g-sxm"),
        ("devices", "sglang, trtllm, vllm"),
        ("policies", "chunk_size=256, tile=128, chunk_rule=fill"),
        ("policies", "case=best (or worst, unconstrained)"),
        ("calibrate --report --device a6000", "roofline alone"),  # it needs no datasets
        ("calibrate --report --stack vllm --device h100-80g-sxm", "gemm fp8"),
        ("calibrate --report --stack vllm --device h100-80g-sxm", "missed"),
        ("calibrate --report --stack vllm --device h100-80g-sxm", "met"),
        ("--help", "--install-completion"),
    ],
)
def test_lists(words: str, expected: str) -> None:
    assert expected in called(*words.split()).stdout


def test_check_says_what_would_run_and_version(write_config: Write) -> None:
    told = called("check", write_config(SMALL)).stdout
    assert "small.yaml: good" in told and "8 x 8 x 1" in told
    assert called("--version").stdout.strip()


def test_many_notes_that_differ_in_numbers_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/experiments/test_assumed.py says which."""
    print_notes([f"{count:,} KV blocks a replica" for count in range(28_000, 28_005)])
    first, rest = capsys.readouterr().err.splitlines()
    assert first == "note: 28,000 KV blocks a replica"
    assert rest.startswith("note: and 4 more like this")


@pytest.mark.slow
def test_every_command_has_help_with_an_example() -> None:
    for command in COMMANDS:
        told = called(command, "--help").stdout
        assert "Examples:" in told and f"sarathi-sim {command}" in told, command


def test_the_commands_stand_in_groups_and_none_is_cut_off() -> None:
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    found: dict[str, list[str]] = {}
    for block in done.stdout.split("\n\n"):
        title, *lines = block.splitlines()
        found[title] = [line.split()[0] for line in lines]
        if title.removesuffix(":") in GROUPS:
            assert all(re.search(r"[^.]\.$", line) for line in lines)
    for title, names in GROUPS.items():
        assert found[f"{title}:"] == list(names)
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)


def test_a_list_of_degrees_is_shown_as_one_gives_it() -> None:
    usage = called("profile", "--help").stdout.splitlines()[0]
    assert usage.endswith("profile [OPTIONS] [--tp N]...")
    wrong = called("profile", "--model", "tiny-llama-40m", "--tp", "1", "x", code=2)
    assert "'--tp N'" in wrong.output


def test_module_runs_like_the_command_and_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sarathi_sim", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0
    assert "first-light" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    heavy = ("numpy", "pandas", "simpy", "matplotlib", "sklearn", "pydantic", "scipy", "yaml")
    assert not imported & set(heavy)


LEFT_OUT = (("models", 60), ("models", 80), ("devices", 60))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["models", "devices"])
def test_no_name_and_no_number_is_broken(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell's words stand whole in its line; what has no room is named, and in --json."""
    console = Console(file=StringIO(), width=width, force_terminal=False)
    monkeypatch.setattr("sarathi_sim.experiments.cli.data.consoles", lambda: (console, console))
    called(command)
    told = json.loads(called(command, "--json").stdout)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    names = {line.split("│")[1].strip() for line in lines if line.startswith("│")} - {""}
    assert names == set(told) and len(told) > 10
    whole = {line.split("│")[2].strip() for line in lines if line.startswith("│")} - {""}
    key, digits = {"models": ("num_parameters", 2), "devices": ("memory_bytes", 0)}[command]
    assert whole == {f"{one[key] / 1e9:.{digits}f}" for one in told.values()}
    assert ("See --json for" in "".join(lines)) == ((command, width) in LEFT_OUT)
