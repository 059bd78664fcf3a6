"""``--set``: what it changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from tests.experiments.small_config import SMALL, message

Write = Callable[[str], Path]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("cluster.ppp=3", "--set cluster.ppp: unknown key (did you mean pp?)"),
        ("clutser.pp=3", "--set clutser: unknown key (did you mean cluster?)"),
        ("cluster.pp=x", "--set cluster.pp: value 'x': must be a whole number"),
        ("seed", "--set seed: expected KEY.PATH=VALUE"),
        ("=3", "--set =3: expected KEY.PATH=VALUE"),
        ("seed.x=3", "--set seed: value {'x': 3}: must be a whole number"),
        ("cluster.pp=[", "--set cluster.pp=[: "),
        (
            "scenarios.sarathi.policy.chunk_size=0",
            "--set scenarios.sarathi.policy.chunk_size: value 0:",
        ),
        (
            "scenarios.sarathy.seed=0",
            "no scenario is called sarathy (did you mean sarathi?); there",
        ),
        ("scenarios={}", "--set scenarios: value {}: expected scenario names, each with its keys"),
        ("scenarios.ORCA={}", "value 'ORCA': another name differs in upper and lower case only"),
        ("workload={requests: 3}", "--set workload.lengths: this key is missing"),
        ("cluster.tp=16", "--set cluster.tp: value 16: must be at most 8, the GPUs of a node of"),
        (
            "cluster={tp: 8, gpus_per_node: 2}",
            "cluster.tp: value 8: must be at most 2, the GPUs of a node (cluster.gpus_per_node): "
            "tensor parallelism between nodes is not modelled",
        ),
        ("batching.kv_reservation=declared", "kv_reservation: value 'declared': has no effect: "),
        ("compare.speedup.metric=mpsan", "--set compare.speedup.metric: value 'mpsan': mpsan is"),
        ("seed=2024-01-01", "--set seed: value '2024-01-01': must be a whole number"),
        ("seed=null", "--set seed: value null: must be a whole number"),
    ],
)
def test_set_errors(write_config: Write, assignment: str, expected: str) -> None:
    assert expected in message(write_config(SMALL), assignment)


def test_set_that_every_scenario_overrides_is_an_error(write_config: Write) -> None:
    text = SMALL.replace("  orca: {}", "  orca: {seed: 1}").replace(
        "  sarathi: {", "  sarathi: {seed: 2, "
    )
    found = message(write_config(text), "seed=3")
    assert "--set seed: value 3: has no effect" in found
    assert "--set scenarios.orca.seed=..." in found


def test_set_changes_values_in_order(write_config: Write) -> None:
    experiment = load_experiment(
        write_config(SMALL),
        ["seed=1", "seed=2", "engine.turnaround_s=5e-3", "scenarios.orca.cluster.pp=4"],
    )
    orca, sarathi = experiment.scenarios["orca"], experiment.scenarios["sarathi"]
    assert (orca.seed, sarathi.seed) == (2, 2)
    assert orca.engine.turnaround_s == 0.005
    assert (orca.cluster.pp, sarathi.cluster.pp) == (4, 8)
    assert orca.cluster.tp == 8, "the rest of the mapping stays"


def test_a_whole_mapping_is_replaced(write_config: Write) -> None:
    path = write_config(SMALL)
    experiment = load_experiment(path, ["workload.lengths={kind: fixed, prompt: 9, decode: 3}"])
    lengths = experiment.scenarios["orca"].workload.lengths
    assert lengths.model_dump(exclude_none=True) == {"kind": "fixed", "prompt": 9, "decode": 3}
    experiment = load_experiment(
        path,
        [
            "workload.arrivals={kind: poisson, rate: 1}",
            "workload.arrivals={kind: gamma, rate: 2, cv: 3}",
        ],
    )
    assert experiment.scenarios["orca"].workload.arrivals.model_dump() == {
        "kind": "gamma",
        "rate": 2.0,
        "cv": 3.0,
    }


def test_an_empty_compare_takes_the_ratios_away(write_config: Write) -> None:
    assert load_experiment(write_config(SMALL), ["compare={}"]).compare == {}


def test_a_mistake_with_line_ends_is_one_line(write_config: Write) -> None:
    with pytest.raises(ConfigError, match=r"^--set seed 3: expected KEY\.PATH=VALUE"):
        load_experiment(write_config(), ["seed\n3"])
