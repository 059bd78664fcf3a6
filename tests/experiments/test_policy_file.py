"""A policy of the user's own: from a file, into a run, a sweep, a result and a comparison."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.config.policy import FilePolicy
from sarathi_sim.experiments.run.experiment import simulate_all
from sarathi_sim.experiments.sweeps.backends import Backend, InProcess, LocalProcesses
from sarathi_sim.experiments.sweeps.plan import plan_sweep
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import AT_MOST, SMALL, Write, called, message, refused
from tests.experiments.small_sweep import SWEEP, swept, tree

KEYS = "policy: {name: sarathi, chunk_size: 256}"
CONSTRUCTOR = "    def __post_init__(self):\n        "
OWN = "policy: {file: mine.py, name: at_most, prompts: 2}"


@pytest.fixture
def config(write_config: Write, tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AT_MOST, encoding="utf-8")
    return write_config(SMALL.replace(KEYS, OWN))


def own(path: Path, *assignments: str) -> FilePolicy:
    policy = load_experiment(path, assignments).scenarios["sarathi"].policy
    assert isinstance(policy, FilePolicy)
    return policy


def test_it_is_found_beside_the_configuration(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    policy = own(config)
    assert (policy.build().prompts, policy.build().eager) == (2, True)  # type: ignore[attr-defined]
    assert policy.sha256 == hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()
    finished = simulate_all(load_experiment(config)).runs["sarathi"].summary["finished"]
    assert finished == 60


def test_of_set_it_is_found_where_the_command_runs(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "other.py").write_text(AT_MOST)
    monkeypatch.chdir(here)
    change = "scenarios.sarathi.policy={file: other.py, name: at_most, prompts: 3}"
    assert own(write_config(SMALL), change).build().prompts == 3  # type: ignore[attr-defined]


AT = "file: mine.py, name: at_most"
MISTAKES = {
    "no such file": (AT_MOST, "file: none.py, name: at_most", "none.py: No such file or directory"),
    "a NUL": (AT_MOST, 'file: "a\\0b", name: at_most', "policy.file: value 'a\\x00b': "),
    "syntax": ("x = (\n", AT, "line 1: '(' was never closed"),
    "raises": ("\n1 / 0\n", AT, "line 2: ZeroDivisionError: division by"),
    "exits": ("raise SystemExit(3)\n", AT, "line 1: SystemExit: 3"),
    "no policy": ("x = 1\n", AT, "marks no policy with @named"),
    "no such name": (AT_MOST, "file: mine.py, name: at_mots", "one of at_most (did you mean at_"),
    "no name": (AT_MOST, "file: mine.py", "policy.name: this key is missing; one of at_most"),
    "missing": (AT_MOST, AT, "policy.prompts: this key is missing"),
    "unknown": (
        AT_MOST,
        f"{AT}, prompts: 2, eagre: true",
        "policy.eagre: unknown key (did you mean eager?); allowed: name, file, sha256, prompts",
    ),
    "type": (AT_MOST, f"{AT}, prompts: x", "policy.prompts: value 'x': must be a whole number"),
    "another content": (AT_MOST, f"{AT}, prompts: 2, sha256: abc", "policy.sha256: value 'abc': "),
    "two of a name": (
        AT_MOST + "\n\n@named('at_most')\nclass Two:\n    pass\n",
        AT,
        "there are two policies called 'at_most'",
    ),
    "a parameter that is taken": (
        AT_MOST.replace("prompts: int", "file: int"),
        AT,
        "a parameter cannot be called file: the key is taken",
    ),
    "a parameter of no such type": (
        AT_MOST.replace("prompts: int", "prompts: View"),
        AT,
        "its parameters cannot be keys: ",
    ),
    "not a policy": (
        AT_MOST.replace("    def plan", "    def plans"),
        f"{AT}, prompts: 2",
        "at_most cannot be built: TypeError: it has no attribute plan; needed: plan",
    ),
    "pooled and no limit": (
        AT_MOST.replace("holds_finished = False", "pooled = True"),
        f"{AT}, prompts: 2",
        "TypeError: it has no attribute max_num_seqs; needed: plan and max_num_seqs",
    ),
    "chunks of no known kind": (
        AT_MOST.replace("holds_finished = False", "chunking = 5"),
        f"{AT}, prompts: 2",
        "at_most cannot be built: TypeError: its chunking is no Chunking, but 5",
    ),
    "its constructor raises": (
        AT_MOST.replace("    def plan", f"{CONSTRUCTOR}1 / 0\n    def plan"),
        f"{AT}, prompts: 2",
        "at_most cannot be built: line 20: ZeroDivisionError: division by zero",
    ),
    "no text": ("x = '\xff'\n", f"{AT}, prompts: 2", "mine.py': is not UTF-8 text"),
    "too large": (
        "#" * 1_000_001,
        f"{AT}, prompts: 2",
        "mine.py: holds 1,000,001 bytes: must be at most 1,000,000",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(write_config: Write, tmp_path: Path, mistake: str) -> None:
    code, keys, expected = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(code, encoding="latin-1")
    text = SMALL.replace("policy: {name: orca, case: best}\n", "", 1).replace(
        "orca: {}", "orca: {policy: {name: orca}}"
    )
    config = write_config(text.replace(KEYS, f"policy: {{{keys}}}"))
    line = refused("run", "--dry-run", config)
    assert re.match(rf"error: {config}: (scenarios\.sarathi\.)?policy\.", line)
    assert expected in line


UNTOLD = "raise type('Untold', (Exception,), {'__str__': lambda self: 1 / 0})"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1 / 0", "policy at_most: line 20: ZeroDivisionError: division by zero"),
        ("return Plan()", "policy at_most: PolicyError: the plan is empty"),
        ("return 5", "policy at_most: AttributeError: 'int' object has no attribute"),
        ("raise SystemExit(3)", "policy at_most: line 20: SystemExit: 3"),
        (UNTOLD, "policy at_most: line 20: Untold"),
    ],
)
def test_a_plan_that_goes_wrong_is_one_line(
    config: Path, tmp_path: Path, body: str, expected: str
) -> None:
    code = AT_MOST.replace("        joining", f"        {body}\n        joining")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        simulate_all(load_experiment(config))
    assert str(caught.value).startswith(f"{tmp_path / 'mine.py'}: {expected}")
    assert "\n" not in str(caught.value)


def test_batches_that_leave_together_need_bound_ones(config: Path, tmp_path: Path) -> None:
    code = AT_MOST.replace("holds_finished = False", "holds_finished = True")
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    expected = "must be bound: the batches of at_most leave together"
    assert expected in message(config, "batching.micro_batches=free")


@pytest.mark.slow
def test_a_result_can_be_simulated_again_anywhere(config: Path, tmp_path: Path) -> None:
    sim.run(load_experiment(config), out=tmp_path / "first", figures=False)
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "first", moved)
    (tmp_path / "mine.py").unlink()
    stored = yaml.safe_load((moved / "config.yaml").read_text())["scenarios"]["sarathi"]["policy"]
    digest = hashlib.sha256(AT_MOST.encode()).hexdigest()
    assert stored.pop("sha256") == digest
    told = {"name": "at_most", "file": "sarathi/policy.py", "prompts": 2, "eager": True}
    assert stored == told
    again = tmp_path / "again"
    sim.run(load_experiment(moved / "config.yaml"), out=again, figures=False)
    assert (again / "config.yaml").read_bytes() == (moved / "config.yaml").read_bytes()
    name = "sarathi/requests.parquet"
    assert (again / name).read_bytes() == (moved / name).read_bytes()

    words = ("compare", moved / "orca", moved / "sarathi", "--json")
    assert json.loads(called(*words).stdout)["notes"] == []
    called("plot", moved, "--out", tmp_path / "plot")

    file = moved / "sarathi" / "policy.py"
    file.write_text(AT_MOST + "# changed\n")
    line = refused(*words)
    assert "policy.sha256: value '" in line and "policy.py has another content" in line
    file.unlink()
    assert f"value 'sarathi/policy.py': {file}: No such file or directory" in refused(*words)


OWN_SWEEP = SWEEP.replace("policy: {name: sarathi, chunk_size: 128}", OWN).replace(
    "    batching.max_batch: [2, 4, 8]\n", "    batching.max_batch: [2, 4]\n"
)


def swept_without(file: Path, backend: Backend) -> Path:
    """The folder of a sweep beside the policy's file, which is away meanwhile."""
    plan, code = plan_sweep(file.with_name("sweep.yaml")), file.read_bytes()
    file.unlink()
    report = swept(plan, file.parent / "out", backend)
    assert (report.finished, report.failures) == (12, {})
    file.write_bytes(code)
    return file.parent / "out"


@pytest.mark.slow
def test_a_sweep_sends_it_along(tmp_path: Path) -> None:
    files = tmp_path / "here" / "mine.py", tmp_path / "there" / "called_otherwise.py"
    for file in files:
        file.parent.mkdir()
        file.write_text(AT_MOST)
        file.with_name("sweep.yaml").write_text(OWN_SWEEP.replace("mine.py", file.name))
    backends: tuple[Backend, Backend] = InProcess(), LocalProcesses(2)
    one, other = (swept_without(file, each) for file, each in zip(files, backends, strict=True))
    assert tree(one / "runs") == tree(other / "runs")
    codes = [name for name in tree(one) if name.endswith("policy.py")]
    assert len(codes) == 6
    again = load_experiment((one / codes[0]).parents[1] / "config.yaml")
    assert simulate_all(again).runs["sarathi"].summary["finished"] == 40


def test_its_content_is_in_the_key(tmp_path: Path) -> None:
    config, file = tmp_path / "sweep.yaml", tmp_path / "mine.py"
    config.write_text(OWN_SWEEP)

    def keys(code: str) -> dict[str, set[str]]:
        file.write_text(code)
        found: dict[str, set[str]] = {"orca": set(), "sarathi": set()}
        for run in plan_sweep(config).runs:
            found[run.name].add(run.key)
        return found

    before, after = keys(AT_MOST), keys(AT_MOST + "# another\n")
    assert before["orca"] == after["orca"]
    assert not before["sarathi"] & after["sarathi"]
    assert keys(AT_MOST) == before


def test_it_can_be_swept(tmp_path: Path) -> None:
    config = tmp_path / "sweep.yaml"
    (tmp_path / "mine.py").write_text(AT_MOST)
    listed = "    policy: [{name: orca}, {file: mine.py, name: at_most, prompts: 2}]\n"
    config.write_text(SWEEP.partition("scenarios:")[0] + "sweep:\n  grid:\n" + listed)
    assert [run.scenario.policy.name for run in plan_sweep(config).runs] == ["orca", "at_most"]
    text = "    policy.file: [mine.py, none.py]\n"
    policy = "policy: {file: x.py, name: at_most, prompts: 2}\n"
    config.write_text(SWEEP.partition("scenarios:")[0] + policy + "sweep:\n  grid:\n" + text)
    with pytest.raises(
        UserError, match=r"sweep: policy\.file: value 'none\.py': .*none\.py: No such"
    ):
        plan_sweep(config)
