"""From a file to runs: what each one is, and what its key depends on."""

from __future__ import annotations

import subprocess
import sys
from copy import copy
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.config.policy import POLICIES
from sarathi_sim.experiments.sweeps.plan import _CODE, SweepPlan, coordinates, plan_sweep
from sarathi_sim.experiments.sweeps.points import Range, Sample, SweepSpec, axis_values, expand
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


# Which points a sweep section describes ---------------------------------------------------------


def points(contrast: str | None = None, **sections: Any) -> list[dict[str, Any]]:
    return expand(SweepSpec.model_validate(sections), contrast, "sweep")


def test_grid_zip_and_cases_are_crossed() -> None:
    found = points(
        grid={"a": [1, 2]}, zip={"b": [10, 20], "c": ["x", "y"]}, cases=[{"d.e": 0}, {"d.f": 1}]
    )
    assert len(found) == 2 * 2 * 2
    assert found[0] == {"a": 1, "b": 10, "c": "x", "d.e": 0}
    assert found[1] == {"a": 1, "b": 10, "c": "x", "d.f": 1}
    assert {"a": 2, "b": 20, "c": "x", "d.e": 0} not in found


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ({"from": 0.1, "to": 0.5, "step": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"from": 128, "to": 512, "step": 128}, [128, 256, 384, 512]),
        ({"from": 1, "to": 8, "step": 3}, [1, 4, 7]),
        ({"from": 1, "to": 1000, "num": 4, "scale": "log"}, [1, 10, 100, 1000]),
        ({"from": 0, "to": 1, "num": 3}, [0.0, 0.5, 1.0]),
    ],
)
def test_ranges(axis: dict[str, Any], values: list[float]) -> None:
    found = axis_values(Range.model_validate(axis), "axis")
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def test_a_key_taken_in_step_may_repeat_a_value() -> None:
    assert points(zip={"a": [1, 1], "b": [2, 3]}) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_a_sample_holds_different_points_of_the_grid(a: int, b: int, seed: int) -> None:
    grid = {"a": list(range(a)), "b": list(range(b))}
    count = max(1, a * b // 2)
    drawn = points(grid=grid, sample={"points": count, "seed": seed})
    assert drawn == points(grid=grid, sample={"points": count, "seed": seed})
    assert len({tuple(point.items()) for point in drawn}) == len(drawn) == count
    everything = points(grid=grid)
    places = [everything.index(point) for point in drawn]
    assert places == sorted(places)


def test_all_that_is_compared_is_at_every_drawn_point() -> None:
    drawn = points(
        "policy", grid={"a": list(range(9)), "policy": ["x", "y", "z"]}, sample={"points": 4}
    )
    assert len(drawn) == 12
    at: dict[int, list[str]] = {}
    for point in drawn:
        at.setdefault(point["a"], []).append(point["policy"])
    assert list(at.values()) == [["x", "y", "z"]] * 4


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"grid": {"a": []}}, r"sweep\.grid\.a: value \[\]: must name at least one"),
        ({"grid": {"a": [1, 1]}}, r"sweep\.grid\.a: value 1: is given twice"),
        ({"cases": [{"a": 1}, {"b": 1}, {"a": 1}]}, r"sweep\.cases: value .*: is given twice"),
        ({"zip": {"a": [1, 1], "b": [2, 2]}}, r"sweep\.zip: value .*: is given twice"),
        ({"grid": {"a": {"from": 1, "to": 2}}}, "needs either step or num"),
        ({"grid": {"a": {"from": 1, "to": 2, "step": 1, "num": 2}}}, "needs either step or num"),
        ({"grid": {"a": {"from": 3, "to": 2, "num": 2}}}, r"\.to: value 2: must be at least from,"),
        ({"grid": {"a": {"from": 0, "to": 2, "num": 2, "scale": "log"}}}, "from above 0"),
        ({"grid": {"a": {"from": 0, "to": 1e9, "step": 1e-9}}}, "at most 200000"),
        ({"zip": {"a": [1], "b": [1, 2]}}, "the same number of values: a has 1, b has 2"),
        ({"grid": {"a": [1], "b..c": [1]}}, "is not a key path"),
        ({"grid": {"a": [1]}, "cases": [{"a": 2}]}, "a is swept twice"),
        ({"grid": {"a": [1, 2]}, "sample": {"points": 3}}, "value 3: must be at most 2"),
        (
            {"grid": {k: {"from": 1, "to": 9999, "step": 1} for k in "abc"}},
            "points: at most 200,000",
        ),
    ],
)
def test_mistakes(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        points(**sections)


def test_a_sample_of_a_grid_too_large_to_list() -> None:
    axes = {key: Range.model_validate({"from": 1, "to": 9999, "step": 1}) for key in "abc"}
    drawn = expand(SweepSpec(grid=axes, sample=Sample(points=5)), None, "sweep")
    assert len(drawn) == 5
    assert all(1 <= point[key] <= 9999 for point in drawn for key in "abc")
