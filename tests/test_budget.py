"""The budget fails above a limit, takes a fall, and refuses a rise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.budget import main

HEAD = "# What stands above the limits stays.\nrules: [data/engines/*.yaml]\n"
SUMS = "laboratory: {files: 1, lines: 9, tokens: 9}, tests: {lines: 9, tokens: 9}"
CODE = '"""Docstring."""\n\n# comment\nx = 1\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two rooms of the product, of four lines and three tokens each, and rules in YAML."""
    for name in ("policies/a.py", "simulator/loop/b.py", "data/engines/c.yaml", "data/d.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE if name.endswith(".py") else "a: 1\n")
    (tmp_path / "tests").mkdir()
    return tmp_path


def limit(tree: Path, product: str, *, tokens_a_line: float = 10.0) -> Path:
    file = tree / "tests" / "budget.yaml"
    head = f"{HEAD}tokens_a_line: {tokens_a_line}\n"
    file.write_text(
        f"{head}limits:\n  {{product: {{{product}}}, {SUMS}, policies: {{lines: 9}}}}\n"
    )
    return file


def test_the_present_numbers_pass(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit(tree, "files: 2, lines: 9, tokens: 6", tokens_a_line=3.0)
    assert main([], tree) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["product", "9", "9", "6", "6"]


@pytest.mark.parametrize(
    ("product", "dense", "line"),
    [
        ("lines: 8", 3.0, "product: 9 lines, at most 8"),
        ("tokens: 5", 3.0, "product: 6 tokens, at most 5"),
        ("files: 1", 3.0, "product: 2 files, at most 1"),
        ("lines: 9", 2.9, "product and laboratory: 3.00 tokens a line, at most 2.9"),
    ],
)
def test_above_a_limit_it_fails_and_lowers_nothing(
    tree: Path, product: str, dense: float, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = limit(tree, product, tokens_a_line=dense)
    before = file.read_text()
    assert main(["--lower"], tree) == 1
    assert capsys.readouterr().err == f"above the budget: {line}\n"
    assert file.read_text() == before


def test_a_fall_is_taken(tree: Path) -> None:
    """A new room gets its present numbers, and one that is gone loses its own."""
    file = limit(tree, "files: 9, lines: 9, tokens: 7")
    (tree / "policies" / "a.py").write_text("y = 2\n")
    assert main(["--lower"], tree) == 0
    assert file.read_text().startswith(f"{HEAD}tokens_a_line: 10.0\nlimits:\n")
    limits = yaml.safe_load(file.read_text())["limits"]
    assert limits["product"] == {"files": 2, "lines": 6, "tokens": 6}
    assert limits["policies"] == {"lines": 1}
    assert limits["simulator/loop"] == {"lines": 4, "tokens": 3}
    assert limits["tests"] == {"lines": 0, "tokens": 0}
    (tree / "simulator" / "loop" / "b.py").unlink()
    assert main(["--lower"], tree) == 0
    assert "simulator/loop" not in yaml.safe_load(file.read_text())["limits"]
    (tree / "policies" / "a.py").write_text(CODE)
    assert main(["--lower"], tree) == 1
