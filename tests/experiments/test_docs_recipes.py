"""docs/recipes.md: every file is saved and every command runs, with fewer requests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
pytestmark = pytest.mark.usefixtures("few_trees")
#: What makes each command short.
QUICK = {
    "run": ["--set", "workload.requests=8", "--no-figures"],
    "sweep": ["--set", "workload.requests=8", "--set", "sweep.seeds=1", "--workers", "1"],
    "plan": ["--set", "workload.requests=8"],
}


def test_there_are_eleven() -> None:
    assert len(RECIPES) == 11


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = RECIPES[title]
    for name, content in re.findall(r"ave this as `(.+?)`.*?```\w+\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(content, encoding="utf-8")
    ran = 0
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for block in re.findall(r"(?:^    .+\n)+", prose, re.MULTILINE):
        if "# needs" in block:  # a GPU: tests/profiler_torch measures on the CPU
            continue
        for line in block.replace("\\\n", " ").splitlines():
            run(shlex.split(line))
            ran += 1
    for code in re.findall(r"```python\nimport (.*?)```", text, re.DOTALL):
        exec(f"import {code}", {})
        ran += 1
    assert ran


def run(words: list[str]) -> None:
    program, command = words[:2]
    assert program == "sarathi-sim"
    more = QUICK.get(command, [])
    if {"log.yaml", "gateway.jsonl"} & set(words):
        more = more[2:]  # a trace has its own number
    if command == "capacity":  # searches take longer: that the question can be asked, here
        words = ["sarathi-sim", "check", words[2]]
    done = CliRunner().invoke(app, [*words[1:], *more])
    assert done.exit_code == 0, f"{words}: {done.output}"
