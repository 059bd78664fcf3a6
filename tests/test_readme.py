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
from tests.policies import by_hand
from tests.simulator import oracle
from tests.simulator.oracle import assert_bitwise_equal
from tests.test_architecture import MODULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Of the page about policies; before them the README's configuration."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [*re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[:1], *found][language != "yaml" :]


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


def test_the_example_policy_in_a_file_of_ones_own(tmp_path: Path) -> None:
    """As the README says: beside the configuration, and named in a scenario."""
    code = blocks("python")[0]
    (tmp_path / "prefill_first.py").write_text(code, encoding="utf-8")
    first, fragment = blocks("yaml")[:2]
    config = first[: first.index("scenarios:")] + fragment
    (tmp_path / "mine.yaml").write_text(config, encoding="utf-8")
    experiment = load_experiment(tmp_path / "mine.yaml", ["workload.requests=50"])
    assert simulate_all(experiment).runs["mine"].summary["finished"] == 50


def test_the_example_policy_that_preempts(tmp_path: Path) -> None:
    """Beside the configuration, with so few blocks that requests are preempted; all are served."""
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    arrivals = {0: [by_hand.request(0, 5, 5), by_hand.request(1, 6, 3), by_hand.request(2, 1, 1)]}
    steps = by_hand.schedule(names["NewestWaits"](), arrivals, blocks=4)
    # Blocks of 4. Prompts of 5 and 6 tokens take all 4, so request 2 waits. 1 to 2: they grow to 7
    # and 8, and request 1 has its 3 tokens. 3: request 2 joins request 0.
    assert by_hand.chunks(steps) == [[(0, 5), (1, 6)], [], [], [(2, 1)], []]
    arrivals = {0: [by_hand.request(0, 5, 6), by_hand.request(1, 6, 5)]}
    steps = by_hand.schedule(names["NewestWaits"](), arrivals, blocks=4)
    # 3: request 1, with 8 tokens, needs a third block: it waits. 4: so does request 0, and gets it.
    #    Request 1 needs 3 for its 6 + 3 tokens, of 1, until request 0 has left with iteration 5.
    assert [step.preempted for step in steps] == [[], [], [], [1], [], [], [], []]
    assert by_hand.chunks(steps)[6:] == [[(1, 9)], []]

    (tmp_path / "newest_waits.py").write_text(blocks("python")[1], encoding="utf-8")
    first, fragment = blocks("yaml")[0], blocks("yaml")[2]
    config = first[: first.index("scenarios:")] + fragment
    (tmp_path / "mine.yaml").write_text(config, encoding="utf-8")
    experiment = load_experiment(tmp_path / "mine.yaml", ["workload.requests=50"])
    (run,) = simulate_all(experiment).runs.values()
    assert run.summary["finished"] == 50
    assert run.summary["preemptions"] > 0


TEMPLATES = ("orca", "sarathi", "sarathi_serve", "vllm", "sglang", "trtllm", "fair")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_shipped_policy_may_be_copied_as_a_start(tmp_path: Path, name: str) -> None:
    """A copy of its file runs by ``file:`` as it is, and as the shipped one."""
    code = (ROOT / "policies" / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(code.replace(f'@named("{name}")', '@named("mine")'))
    tree = {
        **yaml.safe_load(blocks("yaml")[0]),
        "scenarios": {
            "mine": {"policy": {"file": str(tmp_path / "mine.py"), "name": "mine"}},
            "shipped": {"policy": {"name": name}},
        },
    }
    runs = simulate_all(load_experiment(tree, {"workload.requests": 30})).runs
    mine, shipped = (runs[key].summary for key in ("mine", "shipped"))
    assert mine["finished"] == 30 and mine["latency_s"] == shipped["latency_s"]


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "data" / "README.md", *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


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


# The messages of docs/troubleshooting.md, and the site of the docs


def test_messages_are_worded_as_in_the_code() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
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
    assert 'href="workloads.html"' in start
    assert 'src="images/gpt3_pp_timeline.png"' in start
    assert (tmp_path / "site" / "images" / "gpt3_pp_timeline.png").is_file()
    notebook = (tmp_path / "site" / "notebook.html").read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,' in notebook
    shutil.rmtree(tmp_path / "site")
