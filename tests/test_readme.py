"""The README's examples do what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.config.loading import load_experiment, shipped_configs
from experiments.run.experiment import simulate_all
from tests.simulator import oracle
from tests.simulator.test_textbook import assert_bitwise_equal
from tests.test_architecture import imports, within

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("free_pool", [False, True])
def test_the_example_policy(monkeypatch: pytest.MonkeyPatch, lazy: bool, free_pool: bool) -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    monkeypatch.setitem(oracle.POLICIES, "prefill_first", names["PrefillFirst"]())
    system = oracle.System(
        policy="prefill_first",
        layers=(2, 1, 2),
        max_in_flight=3,
        lazy=lazy,
        free_pool=free_pool,
        requests=oracle.make_requests(60, seed=4, rate=50.0),
    )
    records = system.fast()
    assert_bitwise_equal(records, system.textbook())
    columns = records.replicas[0].iterations
    assert not ((columns["prefill_tokens"] > 0) & (columns["decodes"] > 0)).any()


def test_the_example_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml")[0], encoding="utf-8")
    assert set(load_experiment(path).scenarios) == {"orca", "sarathi"}
    shipped = yaml.safe_load(blocks("yaml")[0])
    assert shipped["name"] in shipped_configs()


def test_the_example_policy_in_a_file_of_ones_own(tmp_path: Path) -> None:
    """As the README says: beside the configuration, and named in a scenario."""
    code = blocks("python")[0]
    (tmp_path / "prefill_first.py").write_text(code, encoding="utf-8")
    first, fragment = blocks("yaml")[:2]
    config = first[: first.index("scenarios:")] + fragment
    (tmp_path / "mine.yaml").write_text(config, encoding="utf-8")
    experiment = load_experiment(tmp_path / "mine.yaml", ["workload.requests=50"])
    assert simulate_all(experiment).runs["mine"].summary["finished"] == 50


def test_the_example_policy_may_stand_in_the_package(tmp_path: Path) -> None:
    """``make test`` goes on passing: the file says what it is for, and imports what it may."""
    file = tmp_path / "policies" / "prefill_first.py"
    file.parent.mkdir()
    file.write_text(blocks("python")[0], encoding="utf-8")
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert all(within(name, "policies") for name in imports(file))


def test_no_count_of_tests_goes_stale() -> None:
    assert not re.search(r"\d+ (passed|skipped)", README)


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", root / "data" / "README.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
