"""Imports run one way, and a simulation needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "profiler", "simulator", "experiments")
# The part of the profiler that is data and needs no torch.
TORCH_FREE = {
    f"profiler.{name}" for name in ("schema", "model", "device", "paths", "residual", "strict")
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def allowed(package: str, name: str) -> bool:
    target = name.partition(".")[0]
    if target == package:
        return True
    if package == "policies":
        return target in sys.stdlib_module_names
    if target not in PACKAGES:
        return target not in ("torch", "xformers") or package == "profiler"
    if package == "profiler":
        return target == "policies"
    if package == "simulator":
        return target == "policies" or name in TORCH_FREE
    return True


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    files = modules(package)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if not allowed(package, name)
    ]
    assert wrong == []


def test_a_simulation_needs_no_torch() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("policies", "simulator", "experiments")
        for path in modules(package)
        if path.stem != "__main__"
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['xformers'] = None  # importing them raises\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    silent = [p.name for p in modules(package) if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []
