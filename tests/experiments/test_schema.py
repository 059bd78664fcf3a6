"""Files that commands write hold the fields of data/schema.yaml, and these alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sarathi_sim.experiments.capacity import options
from sarathi_sim.experiments.lab.pages import fields_of, schema
from sarathi_sim.experiments.results import SCHEMA
from sarathi_sim.simulator.views.ledger import ACCOUNTS
from sarathi_sim.simulator.views.metric_registry import METRICS
from tests.experiments.small_config import called
from tests.experiments.test_assumed import ASKED, SEARCHED, SERVER

CONTENT = schema()
METRIC = "|".join(
    re.escape(".".join(filter(None, (one.key, statistic))))
    for one in METRICS.values()
    for statistic in one.statistics or ("",)
)
TREES = {"METRIC": f"(?:{METRIC})", "ACCOUNT": f"(?:{'|'.join(ACCOUNTS)})"}
TREES |= {"COUNT": r"(?:(?:prefill_|decode_)?(?:tp|pp|dp|drafts|replicas|gpus))"}
TREES |= {"CLAUSE": r"p\d+ .+", "KEY": r"[a-z_]+(?:\.[a-z_]+)*"}


def pattern(path: str) -> re.Pattern[str]:
    """A path of the schema as a regular expression."""
    text = re.escape(path).replace(r"\*\*", ".*").replace(r"\*", "[^|]+?")
    for name, tree in TREES.items():
        text = re.sub(rf"(?<![A-Za-z]){name}(?![A-Za-z])", lambda _, tree=tree: tree, text)
    return re.compile(text)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a JSON tree with its path; an empty list or object counts as null."""
    inner: dict[str, Any] = {}
    if isinstance(value, Mapping):
        inner = {f"{path}.{key}" if path else key: one for key, one in value.items()}
        for key, one in inner.items():
            yield from leaves(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, f"{path}[]")
    if not inner and not (isinstance(value, list) and value):
        yield path, value if not isinstance(value, list | Mapping) else None


def fits(value: Any, unit: str) -> bool:
    """Whether a value has the type of its unit."""
    kinds = {"text": str, "yes/no": bool, "tree": object, "text or number": object}
    expected = kinds.get(unit, int | float)
    return isinstance(value, expected) and (unit in kinds or not isinstance(value, bool))


def check(content: Any, fields: Mapping[str, str]) -> set[str]:
    """The fields that a file has; fails for one that the schema lacks, or of another type."""
    patterns = {path: pattern(path) for path in fields}
    beginnings = {one[: cut.start()] for one in fields for cut in re.finditer(r"\.|\[\]", one)}
    trees = [pattern(one) for one in beginnings]
    seen = set()
    for path, value in leaves(content):
        mine = [one for one, known in patterns.items() if known.fullmatch(path)]
        whole = value is None and any(tree.fullmatch(path.removesuffix("[]")) for tree in trees)
        assert mine or whole, f"{path} = {value!r} is in no line of data/schema.yaml"
        if value is not None:
            unit = fields[mine[0]].partition(", ")[0]
            assert fits(value, unit), f"{path} = {value!r} is no {unit}"
        seen.update(mine)
    return seen


def result(kind: str) -> dict[str, str]:
    one = CONTENT["results"][kind]
    return fields_of(one, CONTENT["groups"]) | {"format": "text", "schema": "version"}


RARE = re.compile(
    "rejections|narrow_bands|kv_cache|outside_profile|reference|doubts|missing|paired|notes|warnings"
)
"""Fields that a plain run lacks."""


def test_of_runs_sweeps_and_comparisons(
    reported: dict[str, Path], tiny_sweep: Path, tmp_path: Path
) -> None:
    called("workload", "256:8~0.5", "--out", str(tmp_path / "w"))
    folders = {"run": reported["run"], "sweep": tiny_sweep, "compare": reported["comparison"]}
    for kind, folder in (folders | {"workload": tmp_path / "w"}).items():
        content = json.loads((folder / "summary.json").read_bytes())
        assert content["format"] == CONTENT["results"][kind]["format"]
        assert content["schema"] == SCHEMA == CONTENT["version"]
        missing = result(kind).keys() - check(content, result(kind))
        assert not {path for path in missing if not RARE.search(path)}, kind


@pytest.mark.parametrize("table", ["requests", "iterations", "ledger", "token_gaps"])
def test_of_the_tables_of_a_run(reported: dict[str, Path], table: str) -> None:
    (name,) = (name for name in CONTENT["tables"] if f"/{table}." in name)
    path = reported["run"] / "orca" / Path(name).name
    check_table(path, name)


def test_of_the_table_of_a_sweep(tiny_sweep: Path) -> None:
    check_table(tiny_sweep / "results.parquet", "results.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in ASKED if one != "run"])
def test_of_searches(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for most in ("LEAST_REQUESTS", "FINEST_REQUESTS", "PILOT_REQUESTS"):
        monkeypatch.setattr(options, most, 400)
    Path("server.yaml").write_text(SERVER)
    Path("searched.yaml").write_text(SERVER + SEARCHED)
    printed = json.loads(called(*shlex.split(ASKED[command]), "--out", "out", "--json").stdout)
    kind = "capacity --sensitivity" if command == "sensitivity" else command
    for content in (printed, json.loads(Path("out/summary.json").read_bytes())):
        assert len(check(content, result(kind))) > 20
    tables = list(Path("out").glob("*.csv"))
    assert tables
    for path in tables:
        check_table(path, path.name)


def check_table(path: Path, name: str) -> None:
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    columns = {
        one: unit
        for names, unit in CONTENT["tables"][name]["columns"].items()
        for one in ([names] if "CLAUSE" in names else names.split(", "))
    }
    for column in table:
        mine = [one for one in columns if pattern(one).fullmatch(str(column))]
        assert mine, f"{name}: {column} is in no line of data/schema.yaml"
