"""The three doors through which files come: whatever is in them, a message or a result."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.sweeps.plan import plan_sweep
from sarathi_sim.profiler.bundle.schema import TABLES, BundleError, load_bundle
from sarathi_sim.profiler.bundle.table_files import read_table
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.load.trace import read_trace
from sarathi_sim.simulator.load.workload import WorkloadError
from tests.experiments.small_sweep import SWEEP
from tests.sampled import profile_folder

ROOT = Path(__file__).resolve().parents[2]
# Digits are left out: a longer number of requests is not a mistake, it only takes long.
edits = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 12),
        st.text(alphabet=" \n\t:{}[],-&*!|>'\"#%@`?~abexXnul.é\x00\ud800", max_size=6),
    ),
    min_size=1,
    max_size=4,
)
same_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120
)


def edited(text: str, changes: list[tuple[int, int, str]]) -> bytes:
    for place, cut, new in changes:
        place %= len(text) + 1
        text = text[:place] + new + text[place + cut :]
    return text.encode("utf-8", "surrogatepass")


@given(edits)
@example([(0, 0, "\x00")])
@same_folder
def test_a_damaged_sweep_file(tmp_path: Path, changes: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(edited(SWEEP, changes))
    for read in (plan_sweep, load_experiment):
        with contextlib.suppress(ConfigError):
            read(path)


@given(st.sampled_from(sorted(TABLES)), edits)
@same_folder
def test_a_damaged_profile(tmp_path: Path, name: str, changes: list[tuple[int, int, str]]) -> None:
    shipped = profile_folder("a100-80g-sxm", "gpt3-175b", 8) / f"{name}.csv"
    if shipped.is_file():
        lines = shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:60]
    else:  # a table that only measured bundles have
        columns = (*TABLES[name].columns, *TABLES[name].extras)
        lines = [
            ",".join(row) + "\n"
            for row in (columns, *(map(str, [i] * len(columns)) for i in (1, 2)))
        ]
    path = tmp_path / f"{name}.csv"
    path.write_bytes(edited("".join(lines), changes))
    with contextlib.suppress(BundleError):
        read_table(path, TABLES[name])


def test_a_row_with_more_cells_than_the_header(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.csv"
    path.write_text("num_bytes,time_us\n1024,2.0,5\n2048,3.0,5\n")
    with pytest.raises(BundleError, match="more cells than the header"):
        read_table(path, TABLES["all_reduce"])


@given(edits)
@same_folder
def test_a_damaged_trace(tmp_path: Path, changes: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.5},{100 + i},{10 + i % 7}" for i in range(40)]
    path.write_bytes(edited("\n".join(["arrival,prompt,decode", *rows, ""]), changes))
    with contextlib.suppress(WorkloadError):
        read_trace(path)


@pytest.mark.parametrize("name", ["object/apply:os.system", "name:os.system", "object/new:os.x"])
def test_no_tag_is_executed(tmp_path: Path, name: str) -> None:
    proof, path = tmp_path / "proof", tmp_path / "meta.yaml"
    path.write_text(f"name: x\nmodel: !!python/{name} ['touch {proof}']\n")
    for read, place in ((plan_sweep, path), (read_mapping, path), (load_bundle, tmp_path)):
        with pytest.raises((ConfigError, SpecError), match="not valid YAML"):
            read(place)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["../../escape", "/escape", "a/b", "..", ".hidden", "a\\b"])
def test_no_name_leaves_the_output_folder(name: str) -> None:
    tree = yaml.safe_load(SWEEP)
    for change in ({"name": name}, {"scenarios": {name: tree["scenarios"]["orca"]}}):
        with pytest.raises(ConfigError, match="letters, digits"):
            plan_sweep(tree | change)


def test_nothing_unpickles() -> None:
    """No call that reads a pickle, in any package."""
    patterns: dict[type[ast.AST], str] = {
        ast.Import: r"\b(pickle|dill|shelve)\b",
        ast.ImportFrom: r"\b(pickle|dill|shelve)\b",
        ast.Call: r"read_pickle|allow_pickle=True|joblib\.load",
    }
    found = []
    for package in ("policies", "profiler", "simulator", "experiments"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if not re.search("pickle|dill|shelve|joblib", source):
                continue  # none of the words below
            for node in ast.walk(ast.parse(source)):
                pattern = patterns.get(type(node))
                if pattern and re.search(pattern, ast.unparse(node)):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []
