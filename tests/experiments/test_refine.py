"""Where the best deployment stands next to one that carries much less: told, and refined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sarathi_sim import find_capacity
from sarathi_sim.experiments.capacity.answer import load_prices
from sarathi_sim.experiments.capacity.options import wanted_of
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.recommend import answer_of, refined
from sarathi_sim.experiments.capacity.slo import CapacitySection, Replications
from sarathi_sim.experiments.capacity.written import recommend_answer
from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.points import between, halfway, in_order, neighbours
from sarathi_sim.experiments.sweeps.store import Store

GRID = [
    {"scenario": "a", "pp": pp, "policy.chunk_size": chunk}
    for pp in (1, 2)
    for chunk in (512, 256, 1024)
]
CLIFF = """
name: cliff
model: llama-13b
device: a6000
workload:
  requests: 500
  lengths: {kind: fixed, prompt: 600, decode: 10}
  arrivals: {kind: gamma, rate: 1, cv: 0.1}
cluster: {max_length: 1024}
batching: {max_batch: 4}
policy: {name: sarathi, chunk_size: 256}
capacity:
  slo: p90 ttft 1s, p90 tbt_max 150ms
  tolerance: 0.5
  requests: 200
  replications: {least: 2, most: 2}
  space:
    grid: {policy.chunk_size: [128, 1024]}
"""


def test_neighbours_differ_in_one_key() -> None:
    assert neighbours(0, GRID) == [("pp", 3), ("policy.chunk_size", 1), ("policy.chunk_size", 2)]
    assert neighbours(5, GRID) == [("pp", 2), ("policy.chunk_size", 3)]
    kinds = [{"name": "a", "eager": True}, {"name": "b", "eager": True}, {"name": "a"}]
    assert neighbours(0, kinds) == [], "neither a word nor a switch is an axis"
    assert neighbours(0, [{"tp": 1, "pp": 2}, {"tp": 2, "pp": 1}]) == [], "two keys differ"
    mixed = [{"requests": 5}, {"requests": None}, {"requests": 9}]
    assert neighbours(0, mixed) == [("requests", 2)]


@pytest.mark.parametrize(
    ("one", "other", "middle"),
    [
        (512, 1024, 768),
        (1024, 512, 768),
        (512, 768, 640),
        (512, 704, 640),  # 608 lies as near to 576
        (512, 576, None),
        (100, 512, 306),
        (1, 2, None),
        (1, 4, 2),
        (0.8, 0.9, 0.85),
        (1, 1.5, 1.25),
    ],
)
def test_half_way(one: float, other: float, middle: float | None) -> None:
    assert halfway(one, other) == middle


def test_new_points_lie_between_the_best_and_its_neighbours() -> None:
    best = {"scenario": "a", "pp": 1}
    chunks = [{**best, "policy.chunk_size": chunk} for chunk in (384, 768)]
    assert between(0, GRID) == chunks, "nothing lies between 1 and 2 stages"
    points = GRID + chunks
    ordered = [points[place] for place in in_order(points)]
    assert [(one["pp"], one["policy.chunk_size"]) for one in ordered] == [
        *((1, chunk) for chunk in (256, 384, 512, 768, 1024)),
        *((2, chunk) for chunk in (256, 512, 1024)),
    ]


def test_the_order_of_words_stays() -> None:
    points = [{"policy": {"name": "b"}}, {"policy": {"name": "a"}}, {}, {"policy": None}]
    assert in_order(points) == [2, 0, 1, 3]


def asked(tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    path, out = tmp_path / "cliff.yaml", tmp_path / "out"
    path.write_text(CLIFF)
    given = ["capacity", str(path), "--out", str(out), "--workers", "1", "--no-bands", "--json"]
    done = CliRunner().invoke(app, [*given, *words])
    assert done.exit_code == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content, done.stderr


@pytest.mark.slow
def test_capacity_refines_on_request(tmp_path: Path) -> None:
    content, printed = asked(tmp_path)
    best, far = (one["capacity"] for one in content["deployments"])
    assert best > 2 * far, "a chunk of 600 tokens takes longer than 150 ms"
    (warning,) = (line for line in content["warnings"] if "next to it" in line)
    assert warning.startswith("chunk 128 carries the most, and chunk 1024 next to it ")
    assert "give --refine" in warning and f"warning: {warning}" in printed
    runs = tmp_path / "out" / "probes" / "runs"
    before = {path.name: path.stat().st_mtime_ns for path in runs.iterdir()}

    finer, _ = asked(tmp_path, "--refine", "2")
    names = [one["name"] for one in finer["deployments"]]
    assert names == [f"chunk {chunk}" for chunk in (128, 384, 576, 768, 1024)]
    assert [finer["deployments"][place] for place in (0, 4)] == content["deployments"]
    assert finer["answer"].startswith("chunk 384, 1 server of 1 GPU (TP 1), carries ")
    assert max(one["capacity"] for one in finer["deployments"]) > 1.2 * best
    assert not any("next to it" in line for line in finer["warnings"]), "576 carries 94 % of it"
    kept = {path.name: path.stat().st_mtime_ns for path in runs.iterdir()}
    assert before.items() < kept.items(), "finished probes are kept"

    table = find_capacity(tmp_path / "cliff.yaml", out=tmp_path / "out", bands=False, refine=2)
    assert list(table["name"]) == names
    assert list(table["capacity"]) == [one["capacity"] for one in finer["deployments"]]
    assert len(list(runs.iterdir())) == len(kept)


@pytest.mark.slow
def test_what_cannot_be_deployed_is_left_out(tmp_path: Path) -> None:
    """Between TP 2 and TP 4 lies 3, which divides no heads."""
    space = "capacity.space={cases: [{cluster.tp: 2}, {cluster.tp: 4}]}"
    content, printed = asked(tmp_path, "--refine", "1", "--set", space)
    assert [one["name"] for one in content["deployments"]] == ["TP 2", "TP 4"]
    assert "not between: " in printed and "cluster.tp" in printed


def answer(dropped: dict[str, str], **given: Any) -> list[str]:
    """The warnings of a recommendation whose first carries 20 requests/s with two replicas."""
    binds = {"slo": "p99 tbt 50ms", "because": "iterations", "at_load": 21.0, "mean_batch": 9}
    binds |= {"kv_peak_share": 0.5, "bubble_share": 0.0, "queueing_share_of_ttft": 0.1}
    row = {
        "name": "TP 2 budget 512 seqs 128 x 2", "why": "carries 20", "capacity": 20.0,
        "carries": 20.0, "replicas": 2, "settled": True, "interval": [19.8, 20.2], "gpus": 4,
        "rejected_share": 0.0, "binds": binds, "curve": [], "scenario": {"policy": {}},
    }  # fmt: skip
    found = {
        "deployments": [row], "load": "rate", "rate": None, "tolerance": 0.05, "winner": "x",
        "one_fewer": None, "screened": [], "dropped": dropped, "replicas": 2, "model": "m",
        "devices": ["d"], "gpus": 4, "slo": "p99 tbt 50ms", "command": "vllm serve m",
        "prices": {"currency": "USD", "date": "2025", "mark": "assumed"},
        "keep": 0.9, "needs": None, **given,
    }  # fmt: skip
    return list(recommend_answer(found).warnings)


def test_an_answer_without_a_command_says_which_checkpoint_it_needs() -> None:
    needs = "no launch file: no checkpoint of m in int4_wo that vllm loads is known by name"
    assert answer({}, command=None, needs=needs)[-1] == needs
    assert not [line for line in answer({}) if "launch" in line]


@pytest.mark.parametrize(
    ("name", "why", "told"),
    [
        ("budget 1024 seqs 128", "breaks p99 tbt 50ms at 14 requests/s: over 30% behind X", True),
        ("budget 1024 seqs 128", "breaks p99 tbt 50ms at 0.01 requests/s: under any load", True),
        ("budget 1024 seqs 128", "at most 9.9 requests/s by its op times: over 30% behind", True),
        ("budget 1024 seqs 128", "at most 13 requests/s by its op times: over 30% behind", False),
        ("budget 512 seqs 64", "breaks p90 ttft 1s at 20 requests/s: no better than X", False),
        ("budget 1024 seqs 128", "weights take 70 GB, more than the memory", False),
        ("budget 576 seqs 128", "breaks p99 tbt 50ms at 14 requests/s: over 30% behind X", False),
        ("budget 1024 seqs 64", "breaks p99 tbt 50ms at 14 requests/s: over 30% behind X", False),
    ],
)
def test_recommend_names_what_breaks_next_to_the_best(name: str, why: str, told: bool) -> None:
    warnings = answer({f"TP 2 {name}": why, "TP 1 budget 1024 seqs 128": "breaks p: behind"})
    assert len(warnings) == told
    if told:
        reason = why.partition(":")[0]
        assert f"and TP 2 {name} next to it is far behind ({reason})" in warnings[0]
        assert "give --refine" in warnings[0]


def test_what_was_screened_is_compared_by_replicas() -> None:
    there = {"name": "TP 2 budget 1024 seqs 128", "replicas": 2, "curve": []}
    assert answer({}, screened=[{**there, "about": 11.0}]) == []
    (warning,) = answer({}, screened=[{**there, "about": 9.0}])
    assert "(carries 4.50 requests/s a replica)" in warning


def test_recommend_refines_on_request(tmp_path: Path) -> None:
    asked = wanted_of(
        *("llama-13b", "a6000", "p90 ttft 1s, p90 tbt_max 150ms", 1, None, "600:10", None, None),
        *("bf16", "128,1024", "4", 0.5),
    )
    few = Replications(least=2, most=2)
    section = CapacitySection(slo=asked.section.slo, tolerance=0.5, requests=200, replications=few)
    arrivals = {"kind": "gamma", "rate": 1, "cv": 0.1}
    asked = replace(asked, section=section, workload={**asked.workload, "arrivals": arrivals})
    store, said = Store(tmp_path), list[str]()
    store.open(resume=True)
    lab, prices = Laboratory(section, store, InProcess()), load_prices(None)
    with store.locked():
        found = refined(lab, asked, prices, said.append, 1)
    assert "refining: budgets (128, 576, 1024), sequence limits (4,)" in said
    named = {one.option.name for one in (*found.finalists, *found.screened)} | found.dropped.keys()
    assert {name.partition(" x ")[0] for name in named} == {
        f"TP 1 budget {budget} seqs 4" for budget in (128, 576, 1024)
    }
    content = answer_of(found, asked, prices)
    assert content["winner"] == "TP 1 budget 128 seqs 4 x 1"
    assert any("TP 1 budget 576 seqs 4 next to it" in line for line in content["warnings"])
