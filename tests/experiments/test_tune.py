"""A server whose constants are known is measured by each load tool, and tuned to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import check_replaceable, read_calibration
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.measured.load_tools import Benchmark
from sarathi_sim.experiments.measured.replay import MeasuredRun, Overheads, cases_of, simulated
from sarathi_sim.experiments.measured.tune import (
    TunedServer,
    least_kernels,
    reading_s,
    too_fast,
    tune,
    under_load,
)
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called, summary_of

CONFIG = """\
name: server
model: llama-3-8b
device: h100-80g-sxm
stack: vllm
workload:
  requests: 40
  lengths: {kind: fixed, prompt: 400, decode: 30}
  declared: exact
  arrivals: {kind: poisson, rate: 4}
cluster: {max_length: 2048}
policy: {name: vllm, max_num_batched_tokens: 2048, max_num_seqs: 64}
kv_cache: {prefix_caching: false}
"""
TRUTH = Overheads(0.004, 6e-5, 0.0, 0.02, 0.01, 1.1)
CLIENTS = Benchmark(
    tool="", concurrency=8, requests_count=40, mean_prompt=400, mean_output=30, ttft_s=1, tpot_s=1,
    output_tokens_per_s=1, duration_s=1,
)  # fmt: skip
BURST = replace(CLIENTS, concurrency=None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(CONFIG)
    return path


def deployment(config: Path, load: Benchmark, *assignments: str) -> Deployment:
    experiment = load_experiment(str(config), [*assignments])
    return under_load(experiment.scenarios["server"], experiment.sources["server"], load)


def measured(config: Path, load: Benchmark) -> pd.DataFrame:
    """What a load tool would see of the server."""
    return simulated(TRUTH.of(deployment(config, load))).requests


def gaps(row: pd.Series[Any]) -> list[float]:
    return [row["tpot_s"]] * (int(row["output_tokens"]) - 1)


def vllm(table: pd.DataFrame, load: Benchmark) -> Any:
    return {
        "request_rate": "inf",
        "max_concurrency": load.concurrency,
        "request_goodput": None,
        "input_lens": table["prompt_tokens"].tolist(),
        "output_lens": table["output_tokens"].tolist(),
        "ttfts": table["ttft_s"].tolist(),
        "itls": [gaps(row) for _, row in table.iterrows()],
        "start_times": (100 + table["arrival_s"]).tolist(),
    }


def sglang(table: pd.DataFrame, load: Benchmark) -> Any:
    """Means only: without --output-details."""
    end = float((table["arrival_s"] + table["latency_s"]).max())
    return {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": load.concurrency,
        "duration": end,
        "completed": len(table),
        "total_input_tokens": int(table["prompt_tokens"].sum()),
        "total_output_tokens": int(table["output_tokens"].sum()),
        "output_throughput": float(table["output_tokens"].sum()) / end,
        "mean_ttft_ms": 1e3 * table["ttft_s"].mean(),
        "mean_tpot_ms": 1e3 * table["tpot_s"].mean(),
    }


def bench(config: Path, load: Benchmark, tool: Callable[..., Any], name: str = "run") -> Path:
    path = config.with_name(f"{name}.json")
    content = tool(measured(config, load), load)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def tuned(config: Path, *files: Path) -> TunedServer:
    return tune(load_experiment(str(config)), files, silent)


def off(config: Path, load: Benchmark, *assignments: str) -> tuple[float, float]:
    """Percent by which mean TTFT and TPOT of another load are off."""
    truth = measured(config, load)
    ours = simulated(deployment(config, load, *assignments)).requests
    ttft, tpot = (100 * (ours[m].mean() / truth[m].mean() - 1) for m in ("ttft_s", "tpot_s"))
    return float(ttft), float(tpot)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [sglang, vllm])
def test_one_run_of_each_tool_predicts_another_load(config: Path, tool: Callable[..., Any]) -> None:
    """As the recipe has it: the command, then the calibration in a configuration."""
    path, out = bench(config, CLIENTS, tool), config.with_name("tuned.yaml")
    done = called("tune", path, "--config", config, "--out", out)
    assert f"written: {out}" in done.output
    before, after = off(config, BURST), off(config, BURST, f"calibration={out}")
    assert abs(before[1]) > 20 and abs(after[1]) < 8
    assert abs(after[0]) < abs(before[0])
    if tool is sglang:
        assert "has only means" in done.output and "--output-details" in done.output


@pytest.mark.slow
def test_two_loads_settle_what_one_leaves_open(config: Path) -> None:
    one = tuned(config, bench(config, CLIENTS, vllm))
    burst = replace(BURST, mean_prompt=60, requests_count=60)
    both = tuned(config, bench(config, CLIENTS, vllm), bench(config, burst, vllm, "burst"))
    known = one.fitted.known, both.fitted.known
    assert known[1]["admission_s"] > 0.8 > 0.2 > known[0]["admission_s"]
    assert both.fitted.overheads.admission_s == pytest.approx(TRUTH.admission_s, rel=0.2)
    assert len(one.next_runs) == 4 and min(one.next_runs.values()) >= 0
    for run in both.content()["runs"].values():
        assert all(abs(of["after_pct"]) < abs(of["before_pct"]) / 4 for of in run.values())


@pytest.mark.slow
def test_what_the_runs_do_not_tell_stays_at_the_stack(config: Path) -> None:
    server = tuned(config, bench(config, replace(CLIENTS, concurrency=1), sglang))
    found = server.fitted
    sequence = found.overheads.host_sequence_s / found.before.host_sequence_s
    assert found.known["host_sequence_s"] < 0.2 and 0.5 < sequence < 2
    assert np.all(np.diag(found.covariance) <= 1 + 1e-9)
    written = config.with_name("tuned.yaml")
    written.write_text(server.calibration.text())
    assert read_calibration(written) == server.calibration


FACTORS = """\
# written by sarathi-sim tune
stack: vllm
model: llama-3-8b
device: h100-80g-sxm
runs: [run]
engine: {host_iteration_s: 0.004, host_sequence_s: 6.0e-05, frontend_s: 0.02, admission_s: 0.002}
kernels: 1.5
links: 1.0
known: {kernels: 0.75}
"""


def test_a_calibration_is_of_its_device_and_its_engine(config: Path) -> None:
    out = config.with_name("tuned.yaml")
    out.write_text(FACTORS)
    given = f"calibration={out}"
    plain, ours = (deployment(config, CLIENTS, *more) for more in ((), (given,)))
    size = np.array([512.0])
    ratio = ours.ops.by_rows["ffn_ln1"](size) / plain.ops.by_rows["ffn_ln1"](size)
    assert ratio == pytest.approx(1.5)
    assert ours.scenario.engine.host_iteration_s == 0.004
    assert any("tuned to run" in note for note in ours.notes)
    other = deployment(config, CLIENTS, given, "model=llama-3.1-8b")
    assert any("not this server" in note for note in other.notes)
    own = deployment(config, CLIENTS, given, "engine.host_iteration_s=0.001")
    assert own.scenario.engine.host_iteration_s == 0.001
    # Another GPU: the host's constants, not the kernels'.
    there, elsewhere = (
        deployment(config, CLIENTS, "device=h200-sxm", *more) for more in ((), (given,))
    )
    assert elsewhere.ops.by_rows["ffn_ln1"](size) == there.ops.by_rows["ffn_ln1"](size)
    assert elsewhere.scenario.engine.admission_s == 0.002
    with pytest.raises(UserError, match="is of vllm, and this scenario has sglang"):
        deployment(config, CLIENTS, given, "stack=sglang", "policy={name: sglang}")
    with pytest.raises(UserError, match="score compares several sets of constants"):
        cases_of(load_experiment(str(config), [given]), [bench(config, CLIENTS, vllm)])
    for old, new, problem in (
        ("1.5", "fast", "kernels: value 'fast': must be a number"),
        ("1.5", "0", "kernels: value 0: must be at least 0.1"),
        ("admission_s: 0.002", "admission_s: -1", "must be at least 0"),
        ("host_iteration_s", "host_iteraton_s", "host_iteraton_s"),
    ):
        out.write_text(FACTORS.replace(old, new))
        with pytest.raises(UserError, match=problem):
            deployment(config, CLIENTS, given)


def test_a_calibration_is_part_of_the_runs_key(config: Path) -> None:
    from sarathi_sim.experiments.sweeps.plan import run_key

    out = config.with_name("tuned.yaml")
    keys = set()
    for kernels in ("1.5", "1.6", "1.5"):
        out.write_text(FACTORS.replace("1.5", kernels))
        keys.add(run_key(deployment(config, CLIENTS, f"calibration={out}"), "server"))
    assert len(keys) == 2


def test_what_tune_refuses(config: Path) -> None:
    path, out = bench(config, CLIENTS, sglang), config.with_name("mine.yaml")
    out.write_text("mine: 1\n")
    done = called("tune", path, "--config", config, "--out", out, code=2)
    assert "tune did not write it" in done.output
    assert out.read_text() == "mine: 1\n"
    with pytest.raises(UserError, match="there is no folder"):
        check_replaceable(config.parent / "no" / "tuned.yaml")
    for text, message in (
        (CONFIG.replace("stack: vllm\n", ""), "stack: is needed: the fit starts from"),
        (CONFIG + "scenarios: {a: {}, b: {}}\n", "has the scenarios a, b: tune needs exactly one"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match=message):
            tuned(config, path)
    config.write_text(CONFIG)
    with pytest.raises(UserError, match="two runs are called run"):
        tuned(config, path, path)


@pytest.mark.slow
def test_a_server_that_is_what_is_shipped_stays_so(config: Path) -> None:
    """Measured with the stack's own constants, by the server's clock and by the client's."""
    for load in (CLIENTS, BURST):
        table = simulated(deployment(config, load)).requests
        path = config.with_name("same.json")
        path.write_text(json.dumps(vllm(table, load)))
        found = tuned(config, path)
        for of in found.content()["runs"]["same"].values():
            assert abs(of["after_pct"]) < 0.5
        assert found.fitted.overheads == found.fitted.before


def test_a_rate_with_a_limit_of_clients_is_an_open_loop_unless_they_hold_it_back(
    config: Path,
) -> None:
    slow = replace(CLIENTS, rate=1.0, concurrency=64, requests_count=40, duration_s=40.0)
    arrivals = deployment(config, slow).scenario.workload.arrivals
    assert (arrivals.kind, arrivals.rate) == ("gamma", 1.0)  # type: ignore[union-attr]
    held = replace(slow, rate=10.0, concurrency=2)
    assert deployment(config, held).scenario.workload.arrivals.kind == "closed_loop"


def test_lengths_are_the_runs_where_the_configurations_are_not(config: Path) -> None:
    for text in (
        CONFIG,
        CONFIG.replace("prompt: 400", "prompt: 100"),
        CONFIG.replace("  requests: 40\n", "  requests: 40\n  shift: {prompt: 2}\n"),
    ):
        config.write_text(text)
        sent = deployment(config, CLIENTS).requests
        assert {(one.prompt_tokens, one.output_tokens) for one in sent} == {(400, 30)}


@pytest.mark.slow
def test_outputs_of_one_token_and_answers_at_once(config: Path) -> None:
    table = measured(config, replace(CLIENTS, mean_output=1))
    config.with_name("ones.json").write_text(json.dumps(vllm(table, CLIENTS)))
    assert tuned(config, config.with_name("ones.json")).fitted.known["frontend_s"] > 0
    whole = vllm(measured(config, CLIENTS), CLIENTS) | {"itls": [[]] * 40}
    config.with_name("whole.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="it must be streamed"):
        tuned(config, config.with_name("whole.json"))


def test_a_result_keeps_its_calibration(config: Path, tmp_path: Path) -> None:
    given, out = config.with_name("tuned.yaml"), tmp_path / "result"
    given.write_text(FACTORS)
    called("run", config, "--set", f"calibration={given}", "--out", out, "--no-figures")
    given.write_text(FACTORS.replace("1.5", "3.0"))
    called("run", out / "config.yaml", "--out", tmp_path / "again", "--no-figures")
    first, second = (summary_of(folder)["scenarios"] for folder in (out, tmp_path / "again"))
    assert [one["tpot_s"] for one in first.values()] == [one["tpot_s"] for one in second.values()]


@pytest.mark.slow
def test_no_server_is_faster_than_its_weights_can_be_read(config: Path) -> None:
    """Llama 3 8B: 32 layers of 218,103,808 weights and an LM head of 525,336,576, in bf16, at the
    3.35 TB/s of an H100, of which a kernel may take a tenth less than the data sheet says."""
    whole_s = 0.9 * 2 * (32 * 218_103_808 + 525_336_576) / 3.35e12
    alone = deployment(config, CLIENTS)
    assert reading_s(alone) == pytest.approx(whole_s, rel=1e-4)
    assert 0.6 < least_kernels(alone) < 1
    assert reading_s(deployment(config, CLIENTS, "cluster.tp=2")) == reading_s(alone) / 2
    half_s = 0.9 * (32 * 218_103_808 + 2 * 525_336_576) / 3.35e12
    assert reading_s(deployment(config, CLIENTS, "dtype=fp8")) == pytest.approx(half_s, rel=1e-4)
    assert too_fast(MeasuredRun("fast", {"tpot_s": {"mean": 1.01 * whole_s}}, alone)) == ""
    load = replace(CLIENTS, requests_count=16)
    table = measured(config, load).assign(tpot_s=0.6 * whole_s)
    path = config.with_name("fast.json")
    path.write_text(json.dumps(sglang(table, load)))
    found = tuned(config, path)
    said = f"fast: {600 * whole_s:.3g} ms a token, but reading the weights of llama-3-8b takes"
    assert [one[: len(said)] for one in found.content()["too_fast"]] == [said]
    assert found.fitted.overheads.kernels == least_kernels(alone)
    assert found.calibration.kernels == round(least_kernels(alone), 4)


def test_a_run_takes_the_calibration(config: Path) -> None:
    """FACTORS' kernels take 1.5 times as long, and its host 4 ms an iteration."""
    (out := config.with_name("tuned.yaml")).write_text(FACTORS)
    plain, ours = (
        simulated(deployment(config, CLIENTS, *some)).requests["tpot_s"].mean()
        for some in ((), (f"calibration={out}",))
    )
    assert ours > 1.5 * plain
