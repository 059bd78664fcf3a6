"""The README's examples do what it says, and the site of the docs is built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import simulate_all
from tests.patience import PATIENCE_S
from tests.simulator import oracle
from tests.simulator.oracle import assert_bitwise_equal
from tests.test_architecture import MODULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (DOCS / "research" / "policies.md").read_text(encoding="utf-8")
FIRST = ROOT / "experiments" / "configs" / "first_experiment.yaml"


def blocks(language: str) -> list[str]:
    """Of the page about policies."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def saved(folder: Path) -> Path:
    """The files of the page as it says; the configuration."""
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "mine.yaml"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("free_pool", [False, True])
def test_the_example_policy(monkeypatch: pytest.MonkeyPatch, lazy: bool, free_pool: bool) -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    monkeypatch.setitem(oracle.POLICIES, "shortest_first", names["ShortestFirst"](chunk_size=32))
    system = oracle.System(
        policy="shortest_first",
        layers=(2, 1, 2),
        max_in_flight=3,
        lazy=lazy,
        free_pool=free_pool,
        requests=oracle.make_requests(60, seed=4, rate=50.0),
    )
    records = system.fast()
    assert_bitwise_equal(records, system.textbook())
    columns = records.replicas[0].iterations
    assert (columns["prefill_tokens"] + columns["decodes"]).max() == 32


def test_the_example_policies_in_files_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page says: beside the configuration, and named in scenarios; what it asserts holds."""
    config = saved(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = re.findall(r"--set (scenarios\S*?='.*?'|kv_cache\S+)", PAGE)
    assert len(options) == 2
    for changes in ([], options):
        changes = [each.replace("'", "") for each in changes]
        runs = simulate_all(load_experiment(config, ["workload.requests=50", *changes])).runs
        assert {run.summary["finished"] for run in runs.values()} == {50}
    (code,) = (each for each in blocks("python") if "assert" in each)
    exec(code, {})


TEMPLATES = ("orca", "sarathi", "sarathi_serve", "vllm", "sglang", "trtllm", "fair")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_shipped_policy_may_be_copied_as_a_start(tmp_path: Path, name: str) -> None:
    """A copy of its file runs by ``file:`` as it is, and as the shipped one."""
    code = (ROOT / "policies" / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(code.replace(f'@named("{name}")', '@named("mine")'))
    scenarios = {
        "mine": {"policy": {"file": str(tmp_path / "mine.py"), "name": "mine"}},
        "shipped": {"policy": {"name": name}},
    }
    tree = yaml.safe_load(FIRST.read_text("utf-8")) | {"scenarios": scenarios, "compare": {}}
    runs = simulate_all(load_experiment(tree, {"workload.requests": 30})).runs
    mine, shipped = (runs[key].summary for key in ("mine", "shipped"))
    assert mine["finished"] == 30 and mine["latency_s"] == shipped["latency_s"]


def test_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), ROOT / "data" / "README.md", *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_are_short() -> None:
    """All but the laboratory's and the generated ones together, too."""
    generated = {DOCS / "model" / "limits.md", *DOCS.glob("reference/*.md")}
    pages = {page: page.read_text(encoding="utf-8") for page in {*DOCS.rglob("*.md")} - generated}
    assert {page.name for page, text in pages.items() if text.count("\n") > 300} == set()
    written = [text for page, text in pages.items() if page.parent.name != "lab"]
    assert sum(text.count("\n") for text in written) <= 3000
    assert sum(len(text.split()) for text in written) <= 40_000
    assert README.count("\n") <= 150
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n") < 80


def test_documents_name_files_that_exist() -> None:
    """Paths in the packages, and in ARCHITECTURE.md's table also what to look at in them."""
    pages = (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *ROOT.glob("docs/**/*.md"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = r"`((?:policies|profiler|simulator|experiments|tests)/[\w/.]+)`"
        for path in re.findall(named, text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    rows = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    questions = [
        row.split("|") for row in rows if re.match(r"\|[^|]*\?? \| `\w+/[\w/]+\.py` \|", row)
    ]
    assert len(questions) >= 8
    for _, question, file, where, _ in questions:
        code = (ROOT / file.strip(" `")).read_text(encoding="utf-8")
        first = re.findall(r"`(?:[A-Z]\w*\.)?(\w+)`", where)[:1]
        assert all(re.search(rf"\b{name}\b", code) for name in first), question


# The messages of docs/start/troubleshooting.md, and the site of the docs


def test_messages_are_worded_as_in_the_code() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \|", (DOCS / "start" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) > 9
    code = " ".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    code = re.sub(r'"\s*f?"', "", re.sub(r"\s+", " ", code))
    for message in re.findall(r"`(.+?)`", " ".join(rows)):
        for part in re.split(r"'?\.\.\.'?|[(?)]|: ", message):
            assert part.strip() in code, message


@pytest.mark.slow
def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install -e '.[dev]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="plan/gpus.html"' in start
    concepts = (tmp_path / "site" / "start" / "concepts.html").read_text(encoding="utf-8")
    assert 'src="../images/gpt3_pp_timeline.png"' in concepts
    assert (tmp_path / "site" / "images" / "gpt3_pp_timeline.png").is_file()
    notebook = (tmp_path / "site" / "notebook.html").read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,' in notebook
    shutil.rmtree(tmp_path / "site")
