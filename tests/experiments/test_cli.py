"""The commands: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

import sarathi_sim as sim
from sarathi_sim.experiments.cli import GROUPS, app
from tests.experiments.small_config import ROOT, SMALL, Write, called, refused, summary_of

COMMANDS = [name for names in GROUPS.values() for name in names]


def test_json_is_one_object_and_nothing_else(write_config: Write, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = called("run", write_config(SMALL), "--out", out, "--no-figures", "--json")
    printed = json.loads(done.stdout)
    assert list(printed)[:4] == ["question", "answer", "assumptions", "warnings"]
    assert list(printed["scenarios"]) == ["orca", "sarathi"]
    said = printed["notes"]["orca"]
    assert said == summary_of(out)["notes"]["orca"]
    assert [note for note in said if note.startswith("op times: ")]
    assert list(printed["ratios"]) == ["speedup"]
    assert "makespan" in done.stderr
    assert not (out / "figures").exists()
    again = called("run", write_config(SMALL), "--out", out, "--no-figures", "--quiet")
    assert again.output == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plot", "absent"], "absent: no such folder"),
        (["list", "support", "--model", "llama-14b"], "did you mean llama-13b"),
        (["lab", "calibrate", "--datasets", "absent"], "--datasets names absent, which is not a f"),
        (["lab", "reproduce", "--out", "small.yaml"], "--out small.yaml: exists and is not a fold"),
        (["capacity", "x", "--metric", "mfu"], "--metric: has no effect without --sensitivity"),
        (["lab", "calibrate", "--report", "--write"], "--write: does not go with --report"),
    ],
)
def test_user_errors(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    write_config(SMALL)
    monkeypatch.chdir(tmp_path)
    done = called(*arguments, code=2)
    assert expected in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


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
        assert [name for name in found[f"{title}:"] if name != "lab"] == list(names)
    assert [*COMMANDS, "lab"] == list(typer.main.get_command(app).commands)


def test_module_runs_like_the_command_and_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sarathi_sim", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0
    assert "profile" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    heavy = ("numpy", "pandas", "simpy", "matplotlib", "sklearn", "scipy", "pyarrow")
    assert not imported & set(heavy)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("check gpt3_pp", "check is now: sarathi-sim run CONFIG --dry-run"),
        ("models", "models is now: sarathi-sim list models"),
        ("replay my.yaml a.json", "replay is now: sarathi-sim score FILE --config CONFIG"),
        ("lockstep a.jsonl", "lockstep is now: sarathi-sim lab lockstep"),
        ("sweep pd_sweep --backend dask", "--backend is now: --workers tcp://HOST:PORT"),
        ("recommend --tolerance 0.1", "--tolerance is now: --set tolerance=VALUE"),
        ("profile --flush read", "--flush is now: --set flush=VALUE"),
    ],
)
def test_an_old_name_says_the_new_one(words: str, now: str) -> None:
    assert now in " ".join(called(*words.split(), code=2).stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_library_function(name: str) -> None:
    """One name and one docstring; its options are parameters, with what they say and default to.
    The page of help fits one screen and has examples."""
    function = getattr(sim, {"list": "list_"}.get(name, name))
    page = " ".join(called(name, "--help").stdout.split())
    narrow = CliRunner().invoke(app, [name, "--help"], terminal_width=100).stdout
    assert len(narrow.splitlines()) <= 60
    assert "Examples:" in page and f"sarathi-sim {name}" in page
    first, *_ = (function.__doc__ or "").split("\n\n")
    assert " ".join(first.split()) in page
    for key, one in signature(function).parameters.items():
        about = get_args(one.annotation)
        helps = [getattr(each, "help", each) for each in about if not hasattr(each, "__origin__")]
        said = [text for text in helps if isinstance(text, str)]
        assert all(" ".join(text.split()) in page for text in said), key
        assert said or key in ("progress", "say"), key


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("tolerance=0.9", "tolerance: value 0.9: must be at most 0.5"),
        ("tolerence=0.1", "tolerence: unknown key (did you mean tolerance?)"),
        ("tolerance", "expected NAME=VALUE"),
    ],
)
def test_set_reaches_the_other_options(assignment: str, said: str) -> None:
    asked = ("--model", "llama-3.1-8b", "--device", "l40s", "--slo", "p99 ttft 1s", "--gpus", "1")
    assert said in refused("recommend", *asked, "--set", assignment)
