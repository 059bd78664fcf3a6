"""What a configuration becomes: factors of op times, lengths, closed loops, whole layers, paged
memory, and the numbers after the warm-up.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import sarathi_sim as sim
from sarathi_sim.experiments.config.effects import ops_of
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.profiler.bundle.schema import TABLES, bundle_path, load_bundle, write_bundle
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.op_times.regression import bundle_times
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import SMALL, deployed, loaded, message, summary_of
from tests.profiler.hf_configs import LLAMA_3
from tests.sampled import profile_folder

QUANTILES = "workload.lengths={{kind: quantiles, prompt: {}, decode: {}}}"
RANDOM = "workload.lengths={kind: random, prompt: 100, decode: 20, tool: sglang, range_ratio: 0.8}"
CLOSED = "workload.arrivals={kind: closed_loop, clients: 4, think_s: 0.5}"
LOOP = ("workload.pd_ratio=null", "workload.requests=60", RANDOM)


def test_all_ops_twice_as_long_take_twice_as_long() -> None:
    """But for the links' share of it, and what whole layers add, here nothing."""
    once = deployed(SMALL)["sarathi"]
    all_ops = [f"engine.op_scale.{op}=2" for op in ops_of(once)]
    twice = deployed(SMALL, *all_ops)["sarathi"]
    makespans = [each.simulate().end_s for each in (once, twice)]
    assert makespans[1] == pytest.approx(2 * makespans[0], rel=1e-3)
    assert twice.ops is deployed(SMALL, *all_ops)["sarathi"].ops
    for op in ("attn_prefill", "all_reduce", "lm_head"):
        slower = deployed(SMALL, f"engine.op_scale.{op}=3")["sarathi"].simulate().end_s
        assert makespans[0] < slower < 2 * makespans[0], op


def test_lengths_by_percentile() -> None:
    lengths = QUANTILES.format("{p0: 10, p50: 100, p100: 500}", "{p0: 5, p100: 5}")
    given = ("workload.requests=4000", lengths, "workload.pd_ratio=null")
    requests = deployed(SMALL, *given)["sarathi"].requests
    prompt = np.array([request.prompt_tokens for request in requests])
    assert np.percentile(prompt, [0, 50, 75, 100]) == pytest.approx([10, 100, 300, 500], rel=0.08)
    assert {request.output_tokens for request in requests} == {5}
    for wrong in ("{p0: 10, p50: 5, p100: 500}", "{p10: 10, p100: 500}"):
        lengths = QUANTILES.format(wrong, "{p0: 1, p100: 9}")
        assert "must have p0 and p100" in message(SMALL, lengths, "workload.pd_ratio=null")


def test_numbers_after_the_warm_up() -> None:
    """By hand, from the tables: the requests after MSER-5's first ones, and the tokens since."""
    arrivals = ("workload.arrivals={kind: poisson, rate: 2}", "workload.requests=200")
    analysis = Analysis(deployed(SMALL, *arrivals)["sarathi"].simulate())
    found, requests = analysis.after_warmup(), analysis.requests
    rest = requests.sort_values("arrival_s").iloc[found["warmup_requests"] :]
    for name in ("ttft_s", "tbt_max_s", "latency_s"):
        assert found[name]["mean"] == pytest.approx(rest[name].mean())
        assert found[name]["p90"] == pytest.approx(np.percentile(rest[name], 90))
    everything = analysis.tbt_quantiles((0.5, 0.9, 0.99))
    if not found["warmup_requests"]:
        assert [found["tbt_s"][q] for q in ("p50", "p90", "p99")] == everything
    gaps, counts = analysis.spans[0].token_gaps()
    since = float(requests["finish_s"].max())
    late, few = analysis.spans[0].token_gaps(since)
    assert 1 <= few.sum() < counts.sum()
    assert set(late) <= set(gaps)


# A closed loop, and random lengths -----------------------------------------------------------


def test_random_lengths_are_drawn_apart() -> None:
    requests = deployed("first_experiment", *LOOP, "workload.requests=5000")["sarathi"].requests
    prompt, output = np.array([(r.prompt_tokens, r.output_tokens) for r in requests]).T
    assert (prompt.min(), prompt.max()) == (80, 100) and (output.min(), output.max()) == (16, 20)
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.05
    assert prompt.mean() == pytest.approx(90, abs=0.5)


def test_clients_wait_for_their_answers_and_think() -> None:
    """Also: a run twice from one deployment is the same, and another seed is another run."""
    deployment = deployed("first_experiment", *LOOP, CLOSED)["sarathi"]
    found, again = (Analysis(deployment.simulate()).requests for _ in range(2))
    assert again.equals(found)
    arrival, finish = found["arrival_s"].to_numpy(), found["finish_s"].to_numpy()
    assert (arrival[:4] == 0).all() and (np.diff(arrival[4:]) >= 0).sum() < 56
    sent = np.sort(arrival)
    # When the n-th request after the first four is sent, at least n have finished.
    assert (np.sort(finish)[:56] <= sent[4:]).all()
    thought = np.sort(arrival[4:]) - np.sort(finish)[:56]
    assert 0.25 < thought.mean() < 1.0
    for given, same in (((), True), (("seed=1",), False)):
        other = deployed("first_experiment", *LOOP, CLOSED, *given)["sarathi"]
        assert Analysis(other.simulate()).requests.equals(found) is same


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("workload.arrivals={kind: closed_loop, clients: 0}", "arrivals.clients"),
        ("workload.arrivals={kind: closed_loop}", "arrivals.clients: this key is missing"),
        ("workload.pd_ratio=3", "workload.pd_ratio: value 3"),
        ("workload.lengths.range_ratio=0", "lengths.range_ratio"),
        ("workload.sessions={max_turns: 3, think_s: 1}", "turns already wait for the answers"),
    ],
)
def test_mistakes_of_a_closed_loop(change: str, expected: str) -> None:
    assert expected in message("first_experiment", *LOOP, CLOSED, change)


# Bundles with whole layers and skewed decodes ------------------------------------------------

SHARD = ("a100-80g-sxm", "gpt3-175b", 8)


def padded_layers(root: Path) -> Path:
    """The shipped bundle, with layers that take a third longer and decodes that are padded."""
    bundle = load_bundle(profile_folder(*SHARD))
    ops = bundle_times(bundle)
    rows = []
    for chunk, batch in ((256, 0), (512, 0), (0, 8), (0, 32), (248, 8), (480, 32)):
        seconds = sum(float(op(chunk + batch)) for op in ops.linear.values())
        seconds += float(ops.prefill(chunk, 0)) if chunk else 0.0
        seconds += float(ops.decode(batch, 512)) if batch else 0.0
        rows.append((chunk, 0, batch, 512 if batch else 0, 4 / 3 * 1e6 * seconds))
    skewed = [(b, 128, 384, 1e6 * float(ops.decode(b, 384))) for b in (4, 8)]
    more = replace(
        bundle,
        mixed=pd.DataFrame(rows, columns=list(TABLES["mixed"].columns)),
        attn_decode_skew=pd.DataFrame(skewed, columns=list(TABLES["attn_decode_skew"].columns)),
    )
    write_bundle(more, bundle_path(root, *SHARD))
    return root


def test_whole_layers_and_skew_reach_the_simulation(tmp_path: Path) -> None:
    measured = f"profiles={padded_layers(tmp_path)}"
    plain, skew_only, both = (
        {name: float(one.simulate().end_s) for name, one in deployed(SMALL, *given).items()}
        for given in ((), (measured, "engine.layer_time=sum"), (measured,))
    )
    for name, seconds in plain.items():
        # Lengths are uneven, so padding costs, but decode attention is a small part of it all.
        assert seconds < skew_only[name] < 1.1 * seconds
        # All-reduces and transfers do not grow, and the prior holds the third back a little.
        assert 1.15 < both[name] / skew_only[name] < 4 / 3


# Paged memory, from a configuration to a result -------------------------------------------------

PAGED = """\
name: paged
model: llama-3-8b
device: a100-80g-sxm
workload:
  requests: 40
  lengths: {kind: uniform, min: 200, max: 600}
  pd_ratio: 1
cluster: {max_length: 1024}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 16, async_scheduling: false}
scenarios:
  enough: {}
  few: {kv_cache: {num_blocks: 120}}
  ahead: {policy: {name: vllm, async_scheduling: true}, kv_cache: {prefix_caching: false}}
"""

few_trees = pytest.mark.usefixtures("few_trees")


@pytest.mark.slow
@few_trees
def test_preemption_is_in_tables_figures_and_summary(tmp_path: Path) -> None:
    out = tmp_path / "result"
    sim.run(loaded(PAGED), out=out)
    summary = summary_of(out)["scenarios"]
    assert summary["enough"]["preemptions"] == 0 == summary["enough"]["recomputed_share"]
    requests = pd.read_parquet(out / "few" / "requests.parquet")
    assert requests["preemptions"].sum() == summary["few"]["preemptions"] > 0
    iterations = pd.read_parquet(out / "few" / "iterations.parquet")
    computed = (iterations["prefill_tokens"] + iterations["decodes"]).sum()
    once = (requests["prompt_tokens"] + requests["output_tokens"] - 1).sum()
    assert computed == once + requests["recomputed_tokens"].sum()
    assert summary["few"]["recomputed_share"] == requests["recomputed_tokens"].sum() / computed
    assert iterations["kv_tokens"].max() <= 119 * 16
    assert (out / "figures" / "occupancy.png").is_file()


@few_trees
def test_prefix_cache_hits_are_in_tables_and_summary(tmp_path: Path) -> None:
    """Of a system prompt of 170 tokens ten blocks are whole; all but the first find them."""
    out = tmp_path / "result"
    assignments = ["workload.system_prompts={all: {share: 1, tokens: 170}}", "scenarios={a: {}}"]
    outcome = sim.run(loaded(PAGED, *assignments), out=out, figures=False)
    summary = summary_of(out)["scenarios"]["a"]
    requests = pd.read_parquet(out / "a" / "requests.parquet")
    assert requests["hit_tokens"].tolist() == [0] + 39 * [160]
    assert summary["hit_rate"] == 39 * 160 / requests["prompt_tokens"].sum()
    # What was found in the cache takes no FLOPs.
    model, device = (getattr(outcome.runs["a"].deployment, name) for name in ("model", "device"))
    flops = 0.0
    for _, r in requests.iterrows():
        computed = int(r["prompt_tokens"] + r["output_tokens"] - 1 - r["hit_tokens"])
        flops += computed * sum(model.linear_flops_by_kind())
        pairs = computed * r["hit_tokens"] + computed * (computed + 1) / 2
        flops += 4 * model.num_layers * model.num_heads * model.head_dim * pairs
        flops += int(r["output_tokens"]) * model.lm_head_flops_per_token()
    expected = flops / (summary["makespan_s"] * device.peak_flops)
    assert summary["mfu"] == pytest.approx(expected, rel=1e-12)


@few_trees
def test_a_pool_takes_its_depth_and_blocks_from_the_layout() -> None:
    deployments = deployed(PAGED)
    batching = {name: each.scenario.batching for name, each in deployments.items()}
    assert [each.max_in_flight for each in batching.values()] == [1, 1, 2]
    kept = [each.max_batch for each in batching.values()]
    assert kept == [16, 16, 16], "a scenario keeps the keys it does not change"
    assert deployments["few"].kv_capacity == 119 * 16, "one block is the null block"


@few_trees
def test_blocks_by_the_engines_formula(tmp_path: Path) -> None:
    """Given shares and parts count; what is assumed is in the notes and in the summary."""
    runs = deployed(PAGED)
    found = runs["enough"]
    assert found.memory is not None and found.scenario.kv_cache is not None
    assert found.scenario.kv_cache.num_blocks == found.memory.num_blocks
    note = next(note for note in found.notes if "KV blocks" in note)
    assert "gpu_memory_utilization 0.92 of 84.99 GB" in note and "(assumed)" in note
    less = "scenarios={a: {kv_cache: {gpu_memory_utilization: 0.5, activation_bytes: 0.0}}}"
    smaller = deployed(PAGED, less)["a"]
    assert smaller.memory is not None and smaller.memory.num_blocks < found.memory.num_blocks
    assert smaller.memory.assumed == ("outside of torch",)
    assert not [note for note in runs["few"].notes if "KV blocks" in note], "those were given"
    short = loaded(PAGED, "workload.requests=2")
    sim.run(short, out=tmp_path / "result", figures=False)
    summary = summary_of(tmp_path / "result")["scenarios"]
    assert summary["few"]["kv_cache"]["num_blocks"] == 120
    assert summary["few"]["kv_cache"]["formula_blocks"] == found.memory.num_blocks
    assert summary["enough"]["kv_cache"]["assumed"] == ["activations", "outside of torch"]


@few_trees
@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("kv_cache.mem_fraction_static=0.8", "kv_cache.mem_fraction_static: value 0.8: must be le"),
        ("kv_cache.mem_fraction_static=0.8", "vllm takes kv_cache.gpu_memory_utilization"),
        ("kv_cache.gpu_memory_utilization=0.15", "kv_cache: llama-3-8b leaves no room"),
        ("kv_cache.num_blocks=100000000", "kv_cache.num_blocks: value 100000000: must be at most"),
        ("batching.max_batch=4", "batching.max_batch: value 4: must be left out: vllm decides"),
        ("policy.watermark=1.5", "watermark must lie between 0 and 1, not 1.5"),
        ("policy={name: sarathi}", "sarathi reserves memory for whole requests"),
        # What an engine refuses: TensorRT-LLM, a prompt that neither fits nor is cut ...
        (
            "scenarios.few.policy={name: trtllm, max_batch_size: 8, max_num_tokens: 100}",
            "scenarios.few.policy.max_num_tokens: value 100: must be at least 300, the longest "
            "prompt, unless enable_chunked_prefill is true",
        ),
        (
            "scenarios.few.policy={name: trtllm, max_batch_size: 8, max_num_tokens: 8, "
            "enable_chunked_prefill: true}",
            "scenarios.few.policy.max_num_tokens: value 8: must be at least 16, kv_cache.block_siz",
        ),
        (  # ... and vLLM, whatever the prompts.
            "scenarios.few.policy={enable_chunked_prefill: false}",
            "policy.max_num_batched_tokens: value 512: must be at least 1024 (cluster.max_length) "
            "without enable_chunked_prefill",
        ),
    ],
)
def test_mistakes(assignment: str, text: str) -> None:
    assert text in message(PAGED, assignment)


def test_a_path_starts_at_the_folder_of_its_file_or_at_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, device, profiles and draft model, of the scenario and of a pool; no second place is
    tried, and a result says the whole path."""
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder in (beside / "model", elsewhere):
        folder.mkdir(parents=True)
    (beside / "model" / "config.json").write_text(json.dumps(LLAMA_3))
    shutil.copy(data_dir() / "devices" / "a40.yaml", beside / "own.yaml")
    (beside / "few.csv").write_text("prompt,decode\n8,2\n")
    tree = {
        **{"name": "x", "model": "model", "device": "own.yaml", "policy": {"name": "vllm"}},
        **{"workload": {"lengths": {"kind": "trace", "path": "few.csv"}}, "seed": 3},
        "disaggregation": {"prefill": {"device": "own.yaml"}, "decode": {}},
    }
    (beside / "x.yaml").write_text(json.dumps(tree))
    monkeypatch.chdir(elsewhere)
    found = load_experiment(beside / "x.yaml").scenarios["x"]
    assert (found.model, found.device) == (str(beside / "model"), str(beside / "own.yaml"))
    assert found.disaggregation is not None
    assert found.disaggregation.prefill["device"] == str(beside / "own.yaml")
    with pytest.raises(UserError, match=rf"--set model: .*{elsewhere}/model\.json: No such file"):
        deployed(Path("../beside/x.yaml"), "model=model.json")
    monkeypatch.chdir(tmp_path)
    set_here = load_experiment("beside/x.yaml", ["model=beside/model", "device=a40"]).scenarios["x"]
    assert (set_here.model, set_here.device) == (str(beside / "model"), "a40")
    (tmp_path / "own.yaml").write_text("")  # what lies in the current folder does not matter
    assert load_experiment("beside/x.yaml").scenarios["x"].device == str(beside / "own.yaml")
    (beside / "own.yaml").unlink()
    with pytest.raises(UserError, match=rf"device: {beside}/own\.yaml: no such file"):
        deployed(Path("beside/x.yaml"))


def test_the_beginning_of_a_devices_name_is_enough_where_no_other_begins_so() -> None:
    tree = yaml.safe_load(SMALL) | {"model": "llama-3-8b", "stack": "vllm", "cluster": {}}
    tree["workload"]["lengths"] = {"kind": "uniform", "min": 20, "max": 60}
    tree["batching"] = {}
    found = deployed(json.dumps(tree), "device=H200")["orca"]
    assert (found.scenario.device, found.device.name) == ("h200-sxm", "h200-sxm")
    assert "device: H200 is h200-sxm" in found.notes
    found = deployed(json.dumps(tree), "device=h200-sxm")["orca"]
    assert not any(note.startswith("device") for note in found.notes)
    said = message(json.dumps(tree), "device=a100")
    assert said == "--set device: device 'a100': may be a100-40g-sxm or a100-80g-sxm: give one"
    assert "unknown device 'h1000'" in message(json.dumps(tree), "device=h1000")
