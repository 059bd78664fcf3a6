"""Recorded runs beside their simulation: files, cached prompts, fits, what remains."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.measured.replay import (
    Case,
    Overheads,
    ServerRun,
    cases_of,
    numbers_of,
    read_server_runs,
)
from sarathi_sim.experiments.measured.score import score_runs
from sarathi_sim.experiments.measured.tune import fit
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import Write, message

CONFIG = """\
name: server
model: llama-3-8b
device: a100-80g-sxm
workload: {requests: 1, lengths: {kind: fixed, prompt: 1, decode: 1}}
cluster: {max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 16, async_scheduling: false}
kv_cache: {num_blocks: 400}
"""
TOOL: dict[str, Any] = {
    "request_rate": 4.0,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 1, 2],
    "ttfts": [0.05, 0.06, 0.07],
    "itls": [[0.01, 0.03], [], [0.02]],
}


def line(prompt: int, output: int, queued: float, first: float, last: float) -> str:
    times = {"queued_ts": queued, "first_token_ts": first, "last_token_ts": last}
    return json.dumps({"request_id": "bench", "input_toks": prompt, "output_toks": output, **times})


@pytest.fixture
def replayed(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        line(200, 1, 1000.5, 1000.75, 1000.75) + "\n" + line(300, 11, 1000.0, 1000.25, 1001.25)
    )
    return path


def table_of(path: Path) -> Any:
    (run,) = read_server_runs(path).values()
    return run.requests


def test_what_was_measured(replayed: Path) -> None:
    run = table_of(replayed)
    assert run["arrival_s"].tolist() == [0.0, 0.5]
    assert run["prompt_tokens"].tolist() == [300, 200]
    assert run["ttft_s"].tolist() == [0.25, 0.25]
    assert run["latency_s"].tolist() == [1.25, 0.25]
    assert run["tpot_s"].tolist()[0] == 0.1 and np.isnan(run["tpot_s"][1]), "one token: none"


def test_a_simulation_stands_beside_it(replayed: Path, write_config: Write) -> None:
    config = write_config(CONFIG)
    (case,) = cases_of(load_experiment(config), [replayed])
    one = case.under(Overheads()).beside(case.run, case.measured)
    assert (one["num_blocks"], one["preemptions"]) == (400, 0)
    assert case.measured["makespan_s"] == 1.25 and case.measured["ttft_s"]["mean"] == 0.25
    off = one["off_pct"]["ttft_s"]["mean"]
    assert off == pytest.approx(100 * (one["ttft_s"]["mean"] / 0.25 - 1))
    # The request of 300 tokens alone takes as long as in a run of its own.
    alone = replayed.with_name("alone.jsonl")
    alone.write_text(line(300, 11, 5.0, 5.5, 6.0))
    (single,) = cases_of(load_experiment(config), [alone])
    assert single.numbers(Overheads())["ttft_s"]["mean"] == pytest.approx(
        one["ttft_s"]["p99"], rel=0.2
    )
    with pytest.raises(UserError, match=r"cluster.max_length: .* must be at least 311"):
        cases_of(load_experiment(config, ["cluster.max_length=310"]), [replayed])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "rate_04.json"
    path.write_text(json.dumps(TOOL))
    return path


def test_prompts_are_cached(recorded: Path, write_config: Write) -> None:
    """All full blocks are found, but for the one with the last token of the prompt."""
    (run,) = read_server_runs(recorded).values()
    experiment = load_experiment(write_config(CONFIG), ["kv_cache.prompts_cached=true"])
    (case,) = cases_of(experiment, [recorded])
    found = case.under(Overheads()).analysis.requests["hit_tokens"]
    assert found.tolist() == [16 * ((p - 1) // 16) for p in run.requests["prompt_tokens"]]
    wrong = ["kv_cache.prompts_cached=true", "kv_cache.prefix_caching=false"]
    said = message(CONFIG, *wrong)
    assert re.search(r"prompts_cached: .* needs kv_cache.prefix_caching", said)


def test_a_scenario_for_each_file(recorded: Path, write_config: Write) -> None:
    """The first pattern that fits decides; a file that fits none is refused."""
    text = CONFIG + 'scenarios: {cold: {}, warm: {}}\nruns: {cold: "*_01.json", warm: "%s"}\n'
    first = recorded.with_name("rate_01.json")
    first.write_text(recorded.read_text())
    cases = cases_of(load_experiment(write_config(text % "*.json")), [first, recorded])
    assert [case.scenario for case in cases] == ["cold", "warm"]
    with pytest.raises(UserError, match=r"rate_04.json: no scenario of .* matches it"):
        cases_of(load_experiment(write_config(text % "*_02.json")), [recorded])
    with pytest.raises(UserError, match="runs: value 'hot': one of cold, warm"):
        load_experiment(write_config(text.replace('{cold: "', '{hot: "') % "*"))
    both = cases_of(load_experiment(write_config(text.split("runs")[0])), [recorded])
    assert [case.name for case in both] == ["rate_04, cold", "rate_04, warm"]


TRUTH = Overheads(0.002, 0.0001, 0.0, 0.01)


@pytest.fixture
def measured(recorded: Path, write_config: Write) -> list[Case]:
    """Two runs of a server whose host times are :data:`TRUTH`, at other rates."""
    rng = np.random.default_rng(1)
    cases = []
    for name, rate in (("slow", 2.0), ("fast", "inf")):
        lengths = rng.integers(50, 200, (2, 12)).tolist()
        given = {"input_lens": lengths[0], "output_lens": lengths[1], "request_rate": rate}
        filled = {"ttfts": [1.0] * 12, "itls": [[1.0]] * 12}
        path = recorded.with_name(f"{name}.json")
        path.write_text(json.dumps({**TOOL, **given, **filled}))
        (case,) = cases_of(load_experiment(write_config(CONFIG)), [path])
        table = case.under(TRUTH).requests
        rows = case.run.requests.assign(**{k: table[k] for k in ("ttft_s", "tpot_s", "latency_s")})
        cases.append(replace(case, run=ServerRun(rows), measured=numbers_of(rows)))
    return cases


def test_a_fit_explains_the_runs_and_moves_towards_the_truth(measured: list[Case]) -> None:
    """Two runs of twelve requests: the constants stay between where they begin and the truth."""
    found = fit(measured, measured[0].configured)
    ours = found.overheads
    assert 0.0005 < ours.host_iteration_s < 1.05 * TRUTH.host_iteration_s
    assert found.known["host_iteration_s"] > 0.2 and ours.kernels == pytest.approx(1, abs=0.16)
    for case in measured:
        off = case.under(ours).requests["tpot_s"] / case.run.requests["tpot_s"] - 1
        assert off.abs().max() < 0.05
        simulated, known = case.numbers(ours)["ttft_s"], case.measured["ttft_s"]
        assert simulated["mean"] == pytest.approx(known["mean"], rel=0.08)


@pytest.mark.slow
def test_what_is_scored(measured: list[Case]) -> None:
    runs = score_runs(measured, silent).content()["runs"]
    slow = runs["slow"]
    assert set(slow) >= {"zero", "fitted", "left_out"} and "configured" not in slow
    assert slow["zero"]["off_pct"]["tpot_s"]["mean"] < -10
    constants = (
        "host_iteration_s",
        "host_sequence_s",
        "launch_layer_s",
        "frontend_s",
        "admission_s",
    )
    assert slow["zero"]["overheads"] == dict.fromkeys(constants, 0) | {"kernels": 1, "links": 1}
    first = slow["zero"]["off_pct"]["ttft_s"]["mean"]
    for name in ("fitted", "left_out"):  # the other run has the same host times
        assert abs(slow[name]["off_pct"]["tpot_s"]["mean"]) < 2
        assert abs(slow[name]["off_pct"]["ttft_s"]["mean"]) < abs(first) / 2
    remains = slow["remains"]
    parts = ("host", "frontend", "first_token", "later_tokens")
    assert sum(remains[part] for part in parts) == pytest.approx(remains["latency_s"])
    assert sum(remains["parts"].values()) == pytest.approx(remains["host"])
    assert remains["parts"]["host"] > 0
