"""How much code each room holds, and the most it may hold: ``python -m tests.budget``.

``budget.yaml`` has the limits. ``--lower`` writes the present numbers where they are lower, and
raises none. ``--against COMMIT`` prints the numbers of a commit beside the present ones.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import tokenize as tk
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "profiler", "simulator", "experiments", "sarathi_sim", "data", "tests")
CODE = (".py", ".html", ".js", ".css")
LABORATORY = "experiments/lab"
LAYOUT = {tk.COMMENT, tk.NL, tk.NEWLINE, tk.INDENT, tk.DEDENT, tk.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Table = Mapping[str, Mapping[str, int]]


def numbers_of(file: Path) -> Counter[str]:
    """Its lines; in Python also its tokens, docstrings apart, and the lines with any (``code``)."""
    text = file.read_text(encoding="utf-8")
    numbers = Counter(lines=text.count("\n"), files=int(file.suffix in CODE))
    if file.suffix == ".py":
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED))
        first = [n.body[0] for n in nodes if ast.get_docstring(n, clean=False) is not None]
        docstrings = {(each.lineno, each.col_offset) for each in first}
        tokens = [t for t in tk.generate_tokens(io.StringIO(text).readline) if t.type not in LAYOUT]
        tokens = [t for t in tokens if t.start not in docstrings]
        code = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)}
        numbers.update(tokens=len(tokens), code=len(code))
    return numbers


def measure(root: Path, rules: list[str]) -> dict[str, Counter[str]]:
    """The numbers of the three sums, and of each room (a folder of a package or the laboratory); of
    YAML only files that match ``rules`` count. Links are not followed."""
    table: dict[str, Counter[str]] = {x: Counter() for x in ("product", "laboratory", "tests")}
    for folder, _, names in sorted(walk for top in FOLDERS for walk in os.walk(root / top)):
        for file in (Path(folder, name).relative_to(root) for name in names):
            if file.suffix in CODE or any(file.match(rule) for rule in rules):
                inside = file.is_relative_to(LABORATORY)
                room = "/".join(file.parent.parts[: 3 if inside else 2])
                rows = {"laboratory" if inside else "product", room}
                for row in {"tests"} if file.parts[0] == "tests" else rows:
                    table.setdefault(row, Counter()).update(numbers_of(root / file))
    return table


def measure_commit(commit: str, rules: list[str]) -> dict[str, Counter[str]]:
    """:func:`measure` of a commit."""
    archive = subprocess.check_output(["git", "-C", str(ROOT), "archive", commit])
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measure(Path(folder), rules)


def excesses(table: Table, budget: Mapping[str, Any]) -> list[str]:
    """A line for each number above its limit. A new room has none: its sum bounds it."""
    wrong = [
        f"{name}: {table[name][key]:,} {key}, at most {limit:,}"
        for name, limits in budget["limits"].items()
        for key, limit in limits.items()
        if name in table and table[name][key] > limit
    ]
    tokens, code = (table["product"][key] + table["laboratory"][key] for key in ("tokens", "code"))
    most = budget["tokens_a_line"]
    if tokens > most * code:
        wrong.append(f"product and laboratory: {tokens / code:.2f} tokens a line, at most {most}")
    return wrong


def lowered(table: Table, limits: Table) -> str:
    """The limits as YAML, with the present numbers where they are lower, and of new rooms."""
    text = "limits:\n"
    for name, row in table.items():
        old = limits.get(name, {key: row[key] for key in ("lines", "tokens")})
        text += f"  {name}: {{{', '.join(f'{k}: {min(v, row[k])}' for k, v in old.items())}}}\n"
    return text


def beside(left: Table, right: Table, *heads: str) -> str:
    """Lines and tokens of two tables beside each other."""
    text = " " * 28 + "".join(head.rjust(16) for head in heads)
    for name in dict.fromkeys((*left, *right)):
        text += f"\n{name:28}"
        for key in ("lines", "tokens"):
            text += "".join(str(x.get(name, {}).get(key, "-")).rjust(16) for x in (left, right))
    return text


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print the table; 1 if a number is above its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.budget", description=__doc__)
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--against", metavar="COMMIT")
    options = parser.parse_args(arguments)
    file = root / "tests/budget.yaml"
    text = file.read_text(encoding="utf-8")
    budget = yaml.safe_load(text)
    limits, table = budget["limits"], measure(root, budget["rules"])
    if options.against:
        before = measure_commit(options.against, budget["rules"])
        print(beside(before, table, "lines before", "after", "tokens before", "after"))
        return 0
    print(beside(table, limits, "lines", "at most", "tokens", "at most"))
    wrong = excesses(table, budget)
    for line in wrong:
        print(f"above the budget: {line}", file=sys.stderr)
    if options.lower and not wrong:
        file.write_text(text.partition("limits:\n")[0] + lowered(table, limits), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
