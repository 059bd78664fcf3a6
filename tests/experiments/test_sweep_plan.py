"""From a file to runs: what each one is, and what its key depends on."""

from __future__ import annotations

import subprocess
import sys
from copy import copy
from pathlib import Path, PurePath

import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.config.policy import POLICIES
from sarathi_sim.experiments.sweeps.plan import _CODE, SweepPlan, coordinates, plan_sweep
from sarathi_sim.profiler.bundle.schema import load_bundle, write_bundle
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import ROOT, Write
from tests.experiments.small_sweep import RUNS, SWEEP
from tests.sampled import profile_folder


def planned(write_config: Write, text: str = SWEEP, *assignments: str) -> SweepPlan:
    return plan_sweep(write_config(text), assignments)


def test_every_point_scenario_and_seed_is_a_run(write_config: Write) -> None:
    plan = planned(write_config)
    assert plan.axes == ("batching.max_batch", "scenario", "seed")
    assert plan.contrast == "scenario"
    found = [(r.scenario.batching.max_batch, r.name, r.seed) for r in plan.runs]
    assert found == [
        (batch, name, seed)
        for batch in (2, 4, 8)
        for name in ("orca", "sarathi")
        for seed in (3, 4, 5)
    ]
    assert len({run.key for run in plan.runs}) == RUNS


def test_what_is_swept_is_laid_over_the_scenarios(write_config: Write) -> None:
    text = SWEEP.replace("batching.max_batch: [2, 4, 8]", "policy.chunk_size: [64, 96]")
    text = text.replace("  orca: {policy: {name: orca, case: best}}\n", "")
    policies = [run.scenario.policy.model_dump() for run in planned(write_config, text).runs]
    assert [policy["chunk_size"] for policy in policies] == [64] * 3 + [96] * 3


def test_a_whole_policy_replaces_another(write_config: Write) -> None:
    grid = "policy: [{name: orca}, {name: sarathi, chunk_size: 64}]"
    text = SWEEP.replace("batching.max_batch: [2, 4, 8]", grid)
    text = text[: text.index("scenarios:")] + text[text.index("sweep:") :]
    plan = planned(write_config, text)
    assert plan.contrast == "policy"
    cells = [coordinates(run, plan.axes) for run in plan.runs]
    assert cells[0] == {"policy": "orca", "policy.name": "orca", "seed": 3}
    assert cells[-1] == {
        "policy": "sarathi chunk_size 64",
        "policy.name": "sarathi",
        "policy.chunk_size": 64,
        "seed": 5,
    }


def test_the_key_is_that_of_the_content(write_config: Write, tmp_path: Path) -> None:
    """Defaults spelled out and files moved change nothing; another profile or seed does."""
    key = planned(write_config).runs[0].key
    alike = SWEEP.replace("name: tiny", "name: other\ndescription: what it is about")
    alike = alike.replace("max_length: 512}", "max_length: 512, tp: 1}")
    assert planned(write_config, alike).runs[0].key == key
    for change in ("seed=9", "cluster.usable_memory=0.8", "engine.jitter=0.1"):
        assert planned(write_config, SWEEP, change).runs[0].key != key

    profile = profile_folder("a6000", "llama-13b", 1)
    key = planned(write_config, SWEEP, f"profiles={profile.parents[2]}").runs[0].key
    bundle = load_bundle(profile)
    copy = tmp_path / "profiles" / "a6000" / "llama-13b" / "tp1"
    write_bundle(bundle, copy)
    elsewhere = f"profiles={tmp_path / 'profiles'}"
    assert (copy / "meta.yaml").read_bytes() == (profile / "meta.yaml").read_bytes()
    assert planned(write_config, SWEEP, elsewhere).runs[0].key == key
    bundle.linear.loc[0, "time_us"] *= 1.5
    write_bundle(bundle, copy)
    assert planned(write_config, SWEEP, elsewhere).runs[0].key != key


def key_of(write_config: Write, trace: Path, content: str) -> str:
    """The key of the first run where the trace has the requests."""
    trace.write_text(content)
    text = SWEEP.replace("  requests: 40\n", "").replace("  pd_ratio: 5\n", "")
    lengths = f"workload.lengths={{kind: trace, path: {trace}}}"
    return planned(write_config, text, lengths).runs[0].key


def test_the_key_depends_on_what_is_in_the_trace(write_config: Write, tmp_path: Path) -> None:
    """Not on what it is called, nor on when it was written."""

    def key(name: str, rows: str) -> str:
        return key_of(write_config, tmp_path / name, f"arrival,prompt,decode\n{rows}")

    first = key("trace.csv", "0,50,10\n1,60,10\n")
    assert key("moved.csv", "0,50,10\n1,60,10\n") == first
    # The same file with other content of the same size, and the first content again.
    assert key("trace.csv", "0,50,10\n1,61,10\n") != first
    assert key("trace.csv", "0,50,10\n1,60,11\n") != first
    assert key("trace.csv", "0,50,10\n1,60,10\n") == first


def test_the_key_depends_on_what_a_trace_shares(write_config: Write, tmp_path: Path) -> None:
    def key(hash_ids: str) -> str:
        line = f'"timestamp": 0, "input_length": 300, "output_length": 9, "hash_ids": {hash_ids}'
        return key_of(write_config, tmp_path / "trace.jsonl", f"{{{line}}}\n")

    assert key("[1]") == key("[1]") != key("[2]")


def test_policies_serve_the_same_requests(write_config: Write) -> None:
    workloads = {}
    for run in planned(write_config).runs:
        workloads.setdefault(run.seed, set()).add(run.scenario.workload.model_dump_json())
    assert {seed: len(found) for seed, found in workloads.items()} == {3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_batch: [2, 4, 8]", "max_batch: [2, 0]", r"sweep: batching\.max_batch: value 0: must"),
        ("max_batch: [2", "max_bach: [2", r"sweep: batching\.max_bach: unknown key .*max_batch\?"),
        ("max_batch: [2", "max_batch: [99999, 2", "value 99999: does not fit: must be at most"),
        ("  seeds: 3", "  seeds: 0", r"sweep\.seeds.*at least 1"),
        ("  seeds: 3", "  seeds: [1, 1]", "a seed is given twice"),
        ("  seeds: 3", "  seeds: 100000", "describes 600,000 runs, .*: at most 200,000"),
        ("  seeds: 3", "  seeds: .nan", r"sweep\.seeds: value nan: must be a whole number$"),
        ("  seeds: 3", "  seeds: [a]", r"sweep\.seeds\.0: value 'a': must be a whole number$"),
        (": [2, 4, 8]", ": {from: 2, to: .inf, num: 3}", r"max_batch\.to: value inf: .* finite .*"),
        (": [2, 4, 8]", ": {from: 2, too: 8}", r"max_batch\.to: this key is missing\n.*too: unkno"),
        (": [2, 4, 8]", ": 2", r"sweep\.grid\.batching\.max_batch: value 2: must be a list$"),
        ("  seeds: 3", "  sedes: 3", r"sweep\.sedes: unknown key \(did you mean seeds\?\)"),
        ("  seeds: 3", "  contrast: polisy", r"contrast: value 'polisy': must be one of .*scenari"),
        ("max_batch: [2", "name: [a", "unknown key"),
        ("batching.max_batch: [2", "scenarios.orca.seed: [2", "cannot be swept"),
        ("batching.max_batch: [2, 4, 8]", "model: [no-such-model]", "unknown model 'no-such-model"),
    ],
)
def test_mistakes_are_found_before_any_run(
    write_config: Write, old: str, new: str, expected: str
) -> None:
    assert old in SWEEP
    with pytest.raises(UserError, match=expected):
        planned(write_config, SWEEP.replace(old, new))


def test_setting_what_is_swept_has_no_effect(write_config: Write) -> None:
    with pytest.raises(UserError, match=r"--set batching\.max_batch: has no effect"):
        planned(write_config, SWEEP, "batching.max_batch=3")
    assert len(planned(write_config, SWEEP, "sweep.seeds=1").runs) == 6


def test_a_run_of_a_sweep_is_refused(write_config: Write) -> None:
    with pytest.raises(UserError, match="use sarathi-sim sweep"):
        load_experiment(write_config(SWEEP))


def test_a_file_without_a_sweep_section_is_a_sweep_of_its_scenarios(write_config: Write) -> None:
    plan = planned(write_config, SWEEP[: SWEEP.index("sweep:")])
    assert [run.name for run in plan.runs] == ["orca", "sarathi"]


def test_the_shipped_sweeps() -> None:
    plan = plan_sweep("pd_sweep")
    assert len(plan.runs) == len({run.key for run in plan.runs}) == 7 * 4 * 9 >= 200
    assert {"workload.pd_ratio", "batching.max_batch", "policy"} == set(plan.axes)
    plan = plan_sweep("mtp_qwen3_5")
    assert len(plan.runs) == len({run.key for run in plan.runs}) > 1
    assert any("speculation" in axis for axis in plan.axes)


def test_the_key_covers_the_code_that_reads_profiles() -> None:
    code = (
        "import sys, sarathi_sim.experiments.sweeps.jobs\n"
        "print(*(m for m in sys.modules if 'profiler.' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {
        f"{name.replace('.', '/')}.py".removeprefix("sarathi_sim/") for name in done.stdout.split()
    }
    assert loaded, done.stderr
    modules = {path for path in loaded if (ROOT / path).is_file()}  # the others are packages
    assert "profiler/bundle/tables.py" in modules
    covered = {path for path in modules if any(PurePath(path).match(each) for each in _CODE)}
    assert modules == covered


def test_policies_travel_to_workers_by_name() -> None:
    """Copies of the classes would make workers warn of values of the wrong class."""
    for name, model in POLICIES.items():
        policy = model(name=name)
        again = copy(policy)  # as pickle takes it apart and puts it together
        assert type(again) is model and again == policy
