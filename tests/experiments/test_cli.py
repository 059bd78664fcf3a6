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
from tests.experiments.small_config import SMALL

COMMANDS = sorted(typer.main.get_command(app).commands)
ROOT = Path(__file__).resolve().parents[2]
Write = Callable[[str], Path]


def test_run_prints_tables(write_config: Write, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", str(write_config(SMALL)), "--out", str(out)])
    assert done.exit_code == 0, done.output
    for expected in ("Two schedulers on a small load.", "makespan", "speedup", "1.50", str(out)):
        assert expected in done.stdout
    assert (out / "figures" / "timeline.svg").is_file()


def test_json_is_one_object_and_nothing_else(write_config: Write, tmp_path: Path) -> None:
    config = str(write_config(SMALL))
    options = ["--out", str(tmp_path / "run"), "--no-figures", "--json"]
    done = CliRunner().invoke(app, ["run", config, *options])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert list(printed)[:4] == ["question", "answer", "assumptions", "warnings"]
    assert list(printed["scenarios"]) == ["orca", "sarathi"]
    said = printed["notes"]["orca"]
    assert said == json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]["orca"]
    assert [note for note in said if note.startswith("op times: ")]
    assert list(printed["ratios"]) == ["speedup"]
    assert "makespan" in done.stderr
    assert not (tmp_path / "run" / "figures").exists()


def test_quiet(write_config: Write, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "run"), "--no-figures", "--quiet"]
    done = CliRunner().invoke(app, ["run", str(write_config(SMALL)), *options])
    assert (done.exit_code, done.output) == (0, "")


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
    done = CliRunner().invoke(app, [config if a == "CONFIG" else a for a in arguments])
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_check_says_what_would_run(write_config: Write) -> None:
    done = CliRunner().invoke(app, ["check", str(write_config(SMALL))])
    assert done.exit_code == 0
    assert "small.yaml: good" in done.stdout
    assert "8 x 8 x 1" in done.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("models", "gpt3-175b"),
        ("devices", "a100-80g-sxm"),
        ("policies", "chunk_size=256, tile=128, chunk_rule=fill"),
    ],
)
def test_lists(command: str, expected: str) -> None:
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 0
    assert expected in done.stdout


def test_policies_lists_what_a_key_may_be() -> None:
    assert "case=best (or worst, unconstrained)" in CliRunner().invoke(app, ["policies"]).stdout


def test_many_notes_that_differ_in_numbers_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [f"{count:,} KV blocks a replica" for count in range(28_000, 28_005)]
    print_notes([*blocks, "op times: all modelled", *blocks])
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"note: {blocks[0]}" and told[1].startswith("note: and 4 more like this")
    assert told[2:] == ["note: op times: all modelled"]
    print_notes(blocks[:3])
    assert capsys.readouterr().err.count("KV blocks") == 3


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.strip()


def test_calibrate_report_needs_no_datasets() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--report", "--device", "a6000"])
    assert done.exit_code == 0, done.output
    assert "roofline alone" in done.stdout


def test_every_command_has_help_with_an_example() -> None:
    for command in COMMANDS:
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0
        assert "Examples:" in done.stdout, command
        assert f"sarathi-sim {command}" in done.stdout, command


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
    usage = CliRunner().invoke(app, ["profile", "--help"]).stdout.splitlines()[0]
    assert usage.endswith("profile [OPTIONS] [--tp N]...")
    wrong = CliRunner().invoke(app, ["profile", "--model", "tiny-llama-40m", "--tp", "1", "x"])
    assert wrong.exit_code == 2 and "'--tp N'" in wrong.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import sarathi_sim.experiments.cli.app; "
        "heavy = {'numpy', 'pandas', 'simpy', 'matplotlib', 'pydantic', 'scipy', 'yaml'}; "
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_module_runs_like_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sarathi_sim", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0
    assert "profile-check" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "pandas", "simpy", "matplotlib", "sklearn", "pydantic"}


LEFT_OUT = (("models", 60), ("models", 80), ("devices", 60))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["models", "devices"])
def test_no_name_and_no_number_is_broken(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell's words stand whole in its line; what has no room is named, and in --json."""
    console = Console(file=StringIO(), width=width, force_terminal=False)
    monkeypatch.setattr("sarathi_sim.experiments.cli.data.consoles", lambda: (console, console))
    assert CliRunner().invoke(app, [command]).exit_code == 0
    told = json.loads(CliRunner().invoke(app, [command, "--json"]).stdout)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    names = {line.split("│")[1].strip() for line in lines if line.startswith("│")} - {""}
    assert names == set(told) and len(told) > 10
    whole = {line.split("│")[2].strip() for line in lines if line.startswith("│")} - {""}
    key, digits = {"models": ("num_parameters", 2), "devices": ("memory_bytes", 0)}[command]
    assert whole == {f"{one[key] / 1e9:.{digits}f}" for one in told.values()}
    assert ("See --json for" in "".join(lines)) == ((command, width) in LEFT_OUT)


def test_completion_is_there() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in done.output
