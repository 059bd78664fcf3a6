"""Imports run one way, and a simulation needs no torch."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sarathi_sim.policies.catalogue import builders

ROOT = Path(__file__).resolve().parents[1]
LABORATORY = "experiments.lab"
PACKAGES = ("policies", "profiler", "simulator", "experiments")
MOST_LINES = 80  # of a function, its docstring included, its signature not

# Every room, from the ground up, and the nearest that it imports; it may import what those may.
# ARCHITECTURE.md draws this map.
NEAREST: dict[str, str] = {
    "policies": "",
    "profiler.storage": "",
    "profiler.facts": "profiler.storage",
    "profiler.bundle": "profiler.facts",
    "profiler.physics": "profiler.bundle",
    "profiler.kernels": "profiler.physics",
    "profiler.planning": "profiler.facts",
    "profiler.shard": "profiler.planning",
    "profiler.engine": "policies profiler.shard",
    "profiler.measuring": "profiler.shard profiler.bundle",
    "simulator.loop": "policies",
    "simulator.op_times": "simulator.loop profiler.physics",
    "simulator.load": "simulator.loop profiler.facts",
    "simulator.views": "simulator.op_times",
    "simulator.confidence": "simulator.views",
    "experiments.configs": "policies",  # a policy of the user's kind
    "experiments.config": "simulator.confidence simulator.load profiler.kernels",
    "experiments.results": "experiments.config",
    "experiments.report.section": "experiments.config",
    "experiments.run": "experiments.results experiments.report.section",
    "experiments.sweeps": "experiments.run",
    "experiments.capacity": "experiments.sweeps",
    "experiments.measured": "experiments.run",
    "experiments.report": "experiments.capacity experiments.measured",
    "experiments.options": "experiments.sweeps",
    "experiments.library": "experiments.report experiments.options",
    "experiments.own_server": "experiments.library profiler.measuring",
    "experiments.cli": "experiments.own_server",
    "sarathi_sim": "experiments.own_server",
    "sarathi_sim.__main__": "experiments.cli",
    "experiments.lab.sources": "profiler.kernels",
    "experiments.lab.fit": "experiments.lab.sources experiments.report profiler.planning",
    "experiments.lab.pages": "experiments.lab.fit",
    "experiments.lab.paper": "experiments.lab.pages",
    "experiments.lab.engines": "experiments.own_server profiler.engine",
    "experiments.lab.servers": "experiments.lab.pages experiments.lab.engines",
    "experiments.lab.cli": "experiments.lab.servers experiments.lab.paper experiments.cli",
}


def reachable(place: str) -> set[str]:
    nearest = NEAREST[place].split()
    return {*nearest, *(room for each in nearest for room in reachable(each))}


ROOMS = {place: " ".join(sorted(reachable(place))) for place in NEAREST}
# Of the profiler the simulator imports what reads bundles, and nothing that measures.
TORCH = ("profiler.shard", "profiler.engine", "profiler.measuring")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


DOOR = (ROOT / "sarathi_sim").glob("*.py")
MODULES = {dotted(path): path for package in PACKAGES for path in modules(package)}
MODULES |= {dotted(path): path for path in DOOR}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_forgotten() -> Iterator[None]:
    """Of millions of nodes every collection of garbage would look at each."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def inside(name: str) -> str:
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
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = inside(".".join([*above, *filter(None, [node.module])]))
            full = {inside(f"{module}.{alias.name}") for alias in node.names}
            found |= {name if name in MODULES else module for name in full}
    return found


def room(module: str) -> str:
    """The room a module is in: a sub-package, or a module that stands by itself."""
    if module.startswith("policies"):
        return "policies"
    return ".".join(module.split(".")[: 3 if within(module, LABORATORY) else 2])


def within(module: str, places: str) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places.split())


def allowed(here: str, name: str) -> bool:
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
        if here in (*PACKAGES, LABORATORY) and here != "policies":  # a package's docstring
            continue
        wrong += [f"{module} imports {name}" for name in imports(path) if not allowed(here, name)]
    assert wrong == []


def test_the_map_runs_one_way_itself() -> None:
    known = list(ROOMS)
    for number, (place, names) in enumerate(ROOMS.items()):
        for other in known[number:]:
            assert other not in names.split(), (place, other)
        if place.startswith("simulator"):
            assert not any(within(each, names) for each in TORCH)
        if not within(place, LABORATORY):
            assert LABORATORY not in names, f"{place}: the product imports the laboratory"
    assert {room(module) for module in MODULES} - {*PACKAGES, LABORATORY} <= set(known)


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
DOORS = ("experiments.cli", "experiments.options", "experiments.config", "experiments.lab")


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
    own = re.compile(rf"^ *(?:from|import) (?:{'|'.join(PACKAGES)})\b.*", re.MULTILINE)
    files = [*MODULES.values(), *modules("tests"), *modules("docs")]
    wrong = {str(path): own.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


TEMPLATES = ("orca", "sarathi", "sarathi_serve", "vllm", "sglang", "trtllm", "fair")


def test_inside_a_folder_imports_are_relative() -> None:
    """So an editor follows them on a bare checkout; but for policies that users copy as a start."""
    wrong = []
    for module, path in MODULES.items():
        top = module.partition(".")[0]
        if top not in PACKAGES or (top == "policies" and path.stem in TEMPLATES):
            continue
        names = (
            n.module or "" for n in nodes(path) if isinstance(n, ast.ImportFrom) and not n.level
        )
        wrong += [f"{module}: {name}" for name in names if name.startswith(f"sarathi_sim.{top}.")]
    assert [one for one in wrong if "configs" not in one] == []


def test_a_wheel_has_every_package() -> None:
    """And a checkout no symbolic link: a clone on Windows holds a text file in its place."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {dotted(path) for path in MODULES.values() if path.name == "__init__.py"}
    packages = {"sarathi_sim", *(f"sarathi_sim.{name}" for name in folders - {"sarathi_sim"})}
    assert set(tool["packages"]) == packages | {"sarathi_sim.data"}
    places = {f"sarathi_sim.{name}": name for name in (*PACKAGES, "data")}
    assert tool["package-dir"] == {"sarathi_sim": "sarathi_sim", **places}
    tops = [path for path in ROOT.iterdir() if path.name in ("sarathi_sim", "data", *PACKAGES)]
    assert not [path for top in tops for path in [top, *top.rglob("*")] if path.is_symlink()]


def test_no_function_is_long() -> None:
    long = {
        f"{module}.{node.name}": length
        for module, path in MODULES.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.body[0].lineno + 1) > MOST_LINES  # type: ignore[operator]
    }
    assert long == {}


def calls(module: str, *names: str) -> list[str]:
    return [
        ast.unparse(node)
        for node in nodes(MODULES[module])
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) in names or getattr(node.func, "attr", None) in names)
    ]


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


@pytest.mark.slow
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
