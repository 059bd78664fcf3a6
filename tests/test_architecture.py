"""Imports run one way, and a simulation needs no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sarathi_sim.policies.catalogue import builders

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "profiler", "simulator", "experiments")
MOST_LINES = 80  # of a function

# Every room, from the ground up, and what it may import beside the libraries. ARCHITECTURE.md draws
# this map.
ROOMS: dict[str, str] = {
    "policies": "",
    "profiler.storage": "",
    "profiler.facts": "profiler.storage",
    "profiler.bundle": "profiler.facts profiler.storage",
    "profiler.public": "profiler.bundle profiler.facts profiler.storage",
    "profiler.physics": "profiler.public profiler.bundle profiler.facts profiler.storage",
    "profiler.kernels": (
        "profiler.physics profiler.public profiler.bundle profiler.facts profiler.storage"
    ),
    "profiler.importers": (
        "profiler.kernels profiler.physics profiler.public profiler.bundle profiler.facts "
        "profiler.storage"
    ),
    "profiler.planning": "profiler.bundle profiler.facts profiler.storage",
    "profiler.shard": "profiler.planning profiler.facts profiler.storage",
    "profiler.engine": "policies profiler.shard profiler.planning profiler.facts profiler.storage",
    "profiler.measuring": (
        "profiler.shard profiler.planning profiler.bundle profiler.facts profiler.storage"
    ),
    "profiler.first_light": (
        "profiler.measuring profiler.shard profiler.planning profiler.kernels profiler.physics "
        "profiler.bundle profiler.facts profiler.storage"
    ),
    "simulator.loop": "policies",
    "simulator.op_times": (
        "policies simulator.loop profiler.physics profiler.bundle profiler.facts profiler.storage"
    ),
    "simulator.load": "policies simulator.loop profiler.facts profiler.storage",
    "simulator.views": "policies simulator.loop simulator.op_times profiler.facts",
    "simulator.confidence": (
        "simulator.views simulator.op_times simulator.loop profiler.physics profiler.bundle "
        "profiler.facts profiler.storage"
    ),
    "experiments.configs": "",
    "experiments.config": "policies profiler simulator",
    "experiments.results": "experiments.config profiler simulator",
    "experiments.content": "experiments.config profiler simulator",
    "experiments.figures": "experiments.results experiments.config policies profiler simulator",
    "experiments.run": (
        "experiments.content experiments.figures experiments.results experiments.config policies "
        "profiler simulator"
    ),
    "experiments.sweeps": (
        "experiments.run experiments.figures experiments.content experiments.results "
        "experiments.config policies profiler simulator"
    ),
    "experiments.capacity": (
        "experiments.sweeps experiments.run experiments.figures experiments.content "
        "experiments.results experiments.config policies profiler simulator"
    ),
    "experiments.measured": (
        "experiments.capacity experiments.sweeps experiments.run experiments.figures "
        "experiments.content experiments.results experiments.config policies profiler simulator"
    ),
    "experiments.paper": (
        "experiments.run experiments.figures experiments.content experiments.results "
        "experiments.config policies profiler simulator"
    ),
    "experiments.report": (
        "experiments.capacity experiments.measured experiments.sweeps "
        "experiments.run experiments.figures experiments.content experiments.results "
        "experiments.config profiler simulator"
    ),
    "experiments.lab": (
        "experiments.report experiments.capacity experiments.measured experiments.sweeps "
        "experiments.run experiments.figures experiments.content experiments.results "
        "experiments.config policies profiler simulator"
    ),
    "experiments.api": (
        "experiments.lab experiments.report experiments.capacity experiments.measured "
        "experiments.sweeps experiments.run experiments.figures experiments.content "
        "experiments.results experiments.config policies profiler simulator"
    ),
    "experiments.cli": "experiments policies profiler simulator",
    "experiments.reference": "experiments.config experiments.sweeps profiler simulator",
    "sarathi_sim": "experiments.api",
    "sarathi_sim.__main__": "experiments.cli",
}
# Of the profiler the simulator imports what reads bundles, and nothing that measures.
TORCH = ("profiler.shard", "profiler.engine", "profiler.measuring", "profiler.first_light")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


DOOR = (ROOT / "sarathi_sim").glob("*.py")  # what else is in that folder are links
MODULES = {dotted(path): path for package in PACKAGES for path in modules(package)}
MODULES |= {dotted(path): path for path in DOOR}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_forgotten() -> Iterator[None]:
    """Of millions of nodes every later collection of garbage would look at each."""
    yield
    nodes.cache_clear()


def inside(name: str) -> str:
    """The name of a module of ours within the package."""
    return name.removeprefix("sarathi_sim.")


@cache
def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, wherever in it, for types alone too; modules where it
    can."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {inside(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            full = {inside(f"{node.module}.{alias.name}") for alias in node.names}
            found |= {name if name in MODULES else inside(node.module) for name in full}
    return found


def room(module: str) -> str:
    """The room a module is in: a sub-package, or a module that stands by itself."""
    if module.startswith("policies"):
        return "policies"
    return ".".join(module.split(".")[:2])


def within(module: str, places: str) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places.split())


def allowed(here: str, name: str) -> bool:
    """Whether a room may import that."""
    target = name.partition(".")[0]
    if target in PACKAGES:
        return room(name) == here or within(name, ROOMS[here])
    if here == "policies":
        return target in sys.stdlib_module_names
    return target not in ("torch", "xformers") or here in TORCH


def test_imports_run_one_way() -> None:
    wrong = []
    for module, path in MODULES.items():
        here = room(module)
        if here in PACKAGES and here != "policies":  # a package's docstring
            continue
        wrong += [f"{module} imports {name}" for name in imports(path) if not allowed(here, name)]
    assert wrong == []


def test_the_map_runs_one_way_itself() -> None:
    known = list(ROOMS)
    for number, (place, reachable) in enumerate(ROOMS.items()):
        for other in known[number:]:
            assert place == "experiments.cli" or not within(other, reachable), (place, other)
        if place.startswith("simulator"):
            assert not any(within(each, reachable) for each in TORCH)
    assert {room(module) for module in MODULES} - set(PACKAGES) <= set(known)


def test_no_module_imports_itself_through_others() -> None:
    order: list[str] = []
    open_, done = [], set()

    def visit(module: str) -> None:
        assert module not in open_, " -> ".join([*open_[open_.index(module) :], module])
        if module in done:
            return
        open_.append(module)
        for name in sorted(imports(MODULES[module]) & MODULES.keys() - {module}):
            visit(name)
        order.append(open_.pop())
        done.add(module)

    for module in MODULES:
        visit(module)
    assert len(order) == len(MODULES)


# A command, a configuration or a figure may have the name of what it is for.
DOORS = ("experiments.cli", "experiments.config", "experiments.lab", "experiments.paper.figures")


def test_no_name_has_two_meanings() -> None:
    """No two top-level classes of one name, a leading underscore or not; no two modules either."""
    classes = [
        node.name.lstrip("_")
        for path in MODULES.values()
        for node in ast.iter_child_nodes(nodes(path)[0])
        if isinstance(node, ast.ClassDef)
    ]
    names = [
        module.rpartition(".")[2]
        for module, path in MODULES.items()
        if path.name != "__init__.py" and not any(within(module, door) for door in DOORS)
    ]
    assert [name for name, times in Counter(classes).items() if times > 1] == []
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_there_is_one_import_name() -> None:
    """Another wheel may have a package with the name of one of our folders."""
    files = [*MODULES.values(), *modules("tests"), *modules("docs")]
    wrong = []
    for path in files:
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            wrong += [f"{path}: {n}" for n in names if n.partition(".")[0] in PACKAGES]
    assert wrong == []
    links = {p.name: p.resolve() for p in (ROOT / "sarathi_sim").iterdir() if p.is_symlink()}
    assert links == {name: ROOT / name for name in (*PACKAGES, "data")}


def test_no_function_is_long() -> None:
    long = {
        f"{module}.{node.name}": length
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MOST_LINES  # type: ignore[operator]
    }
    assert long == {}


def calls(module: str, *names: str) -> list[str]:
    """The calls of functions and methods of these names."""
    return [
        ast.unparse(node)
        for node in nodes(MODULES[module])
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) in names or getattr(node.func, "attr", None) in names)
    ]


def test_nothing_is_set_by_its_name_as_a_string() -> None:
    """What a module or an object holds is in its text."""
    forbidden = re.compile(r"globals\(\)|vars\(.+\)\.update\(")
    wrong = [
        f"{name}: {call}"
        for name in MODULES
        for call in calls(name, "globals", "update")
        if forbidden.match(call)
    ]
    assert wrong == []


def test_policies_say_what_they_are() -> None:
    """Outside ``policies/`` no name of a policy is compared, and no attribute is guessed."""
    guesses = re.compile(r"(get|has)attr\(([\w.]+\.)?policy(\.\w+\(\))?,")
    wrong = []
    for name, path in MODULES.items():
        if room(name) == "policies":
            continue
        wrong += [
            f"{name}: {call}" for call in calls(name, "getattr", "hasattr") if guesses.match(call)
        ]
        for node in nodes(path):
            if isinstance(node, ast.Compare) and "policy" in ast.unparse(node):
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                if words & builders().keys():
                    wrong.append(f"{name}: {ast.unparse(node)}")
    assert wrong == []


def test_a_simulation_needs_no_torch() -> None:
    """Nor what draws reports, which the command line imports for ``report`` alone."""
    names = [
        name
        for name in MODULES
        if not name.startswith(("profiler", "experiments.report", "sarathi_sim"))
    ]
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'xformers', 'bokeh'): sys.modules[name] = None  # importing raises\n"
        f"for name in {names!r}: importlib.import_module('sarathi_sim.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    silent = [p.name for p in modules(package) if not ast.get_docstring(nodes(p)[0])]
    assert silent == []
