"""A configuration that names a stack: op times made on the fly, memory by number format, mixtures
of experts, the host's constants, and the models that people serve today on their GPUs.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.inputs import host_of, host_times
from sarathi_sim.profiler.facts.device import engine_facts
from sarathi_sim.profiler.facts.formats import MOE_BYTES
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ALL_TO_ALL, ATTENTION, MOE, OPS, op_label
from sarathi_sim.profiler.physics.shard_times import KINDS
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.simulator.op_times.iteration import NO_HOST
from sarathi_sim.simulator.views.explain import breakdown
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import deployed, message
from tests.profiler.hf_configs import DEEPSEEK_V3, GPT_OSS_20B, LLAMA_3, MISTRAL_1

STACKS = """\
name: stacks
seed: 7
model: llama-3.1-8b
device: h100-80g-sxm
stack: vllm
workload: {requests: 8, lengths: {kind: uniform, min: 200, max: 600}, pd_ratio: 5}
cluster: {tp: 1, max_length: 1024}
policy: {name: sarathi, chunk_size: 256}
scenarios:
  bf16: {}
  fp8: {dtype: fp8}
  fp8_cache: {dtype: fp8, kv_cache_dtype: fp8}
"""
MIXTURES = f"""\
{STACKS[: STACKS.index("cluster")].replace("llama-3.1-8b", "qwen3-30b-a3b")}\
dtype: fp8
cluster: {{tp: 2, max_length: 1024}}
policy: {{name: vllm, max_num_batched_tokens: 1024, max_num_seqs: 16}}
scenarios:
  divided: {{}}
  sent: {{cluster: {{expert_parallel: true, moe_a2a_backend: nccl}}}}
  copied:
    dtype: fp8_block
    cluster: {{expert_parallel: true, moe_a2a_backend: deepep, redundant_experts: 8}}
"""
HOSTS = """\
name: hosts
model: llama-3.1-8b
device: h100-80g-sxm
stack: vllm
workload:
  requests: 12
  lengths: {kind: random, prompt: 64, decode: 8, tool: sglang, range_ratio: 0.8}
  arrivals: {kind: closed_loop, clients: 4}
  declared: exact
cluster: {max_length: 128}
policy: {name: vllm}
scenarios: {it: {}}
"""


def checkpoint(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def note_of(deployment: Deployment, topic: str) -> str:
    (note,) = (note for note in deployment.notes if note.startswith(topic))
    return note


def test_number_formats_decide_memory_and_op_times() -> None:
    runs = deployed(STACKS)
    model = load_model("llama-3.1-8b")
    usable = 0.9 * 80e9
    _, matrices, norms = model.parameters_in()
    bf16 = 2 * (2 * model.vocab_size * model.hidden_size + norms)
    for name, weight, cache in (("bf16", 2, 2), ("fp8", 1, 2), ("fp8_cache", 1, 1)):
        left = usable - weight * matrices - bf16
        assert runs[name].kv_capacity == int(left // model.kv_bytes_per_token(cache)), name
        assert runs[name].ops.meta.source == "modelled"
        assert runs[name].ops.number_bytes.activation == 2, "of activations"
    assert runs["bf16"].bundle_name == "h100-80g-sxm/llama-3.1-8b/tp1-vllm-bf16"
    assert runs["fp8_cache"].bundle_name.endswith("tp1-vllm-fp8-kv-fp8")
    assert len({run.bundle_sha256 for run in runs.values()}) == 3
    layer = [float(run.ops.by_rows["ffn_ln1"](64)) for run in runs.values()]
    assert layer[1] == layer[2] < 0.75 * layer[0]
    (log,) = runs["fp8"].simulate().replicas
    assert log.stage_durations().sum() > 0
    note = note_of(runs["fp8"], "op times: ")
    assert "; modelled: elementwise ops, embedding" in note
    assert "measured: QKV projection, output projection" in note
    assert len(note) < 400  # the sources themselves are in meta.yaml


def test_a_checkpoint_on_disk_sets_the_number_formats(tmp_path: Path) -> None:
    """A folder or its config.json; what the configuration says goes before the checkpoint."""
    cached = {"type": "float", "num_bits": 8}
    weights = {**cached, "strategy": "tensor"}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "input_activations": cached}},
        "kv_cache_scheme": cached,
    }
    folder = checkpoint(tmp_path / "my-llama", {**LLAMA_3, "quantization_config": section})
    for path in (folder, folder / "config.json"):
        run = deployed(STACKS, f"model={path}")["bf16"]
        assert run.bundle_name == "h100-80g-sxm/my-llama/tp1-vllm-fp8-kv-fp8"
        assert run.scenario.dtype == "fp8"
    plain = deployed(STACKS, f"model={folder}", "dtype=bf16", "kv_cache_dtype=bf16")["bf16"]
    assert plain.kv_capacity == deployed(STACKS)["bf16"].kv_capacity
    text = message(STACKS, f"model={folder}", "stack=null", "scenarios={a: {}}")
    assert "stack: is needed for my-llama (dtype fp8, kv_cache_dtype fp8)" in text
    section["quant_method"] = "hqq"
    checkpoint(folder, {**LLAMA_3, "quantization_config": section})
    text = message(STACKS, f"model={folder}")
    assert "quantization_config.quant_method 'hqq': not supported" in text


def test_windows_leave_room_for_more_sequences(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "windowed", MISTRAL_1)
    long = ["workload.lengths={kind: uniform, min: 7000, max: 8000}", "workload.pd_ratio=50"]
    long += ["cluster={tp: 1, max_length: 16384}"]
    run, full = (deployed(STACKS, f"model={m}", *long)["bf16"] for m in (folder, "mistral-7b"))
    assert run.model.windows is not None
    share = full.kv_capacity / run.kv_capacity
    assert 4096 / 8000 < share < 4096 / 6800
    told = f"sliding windows: the KV cache keeps {share:.0%} of this workload's tokens"
    assert note_of(run, "sliding windows: ") == told


def test_a_device_of_the_users_has_no_stack(tmp_path: Path) -> None:
    sheet = (data_dir() / "devices" / "h100-80g-sxm.yaml").read_text().partition("# --- below")[0]
    (tmp_path / "own.yaml").write_text(sheet.replace("name: h100-80g-sxm", "name: own"))
    said = "were fitted on own, a device of yours; take the closest shipped one"
    assert said in message(STACKS, f"device={tmp_path / 'own.yaml'}")


def test_a_stack_may_name_its_version() -> None:
    newest, older = (deployed(STACKS, *s)["bf16"] for s in ((), ("stack=vllm@0.14",)))
    assert older.bundle_name == "h100-80g-sxm/llama-3.1-8b/tp1-vllm@0.14-bf16"
    assert older.scenario.engine == newest.scenario.engine, "the engine's host"
    assert older.bundle_sha256 != newest.bundle_sha256
    problem = message(STACKS, "stack=tgi@1")
    assert "stack" in problem and "with a version or without (vllm@0.24)" in problem


@pytest.mark.parametrize(
    ("text", "assignments", "expected"),
    [
        (STACKS, "stack=null dtype=fp8", "dtype: value 'fp8': needs stack: sglang, trtllm, vllm"),
        (STACKS, "stack=vlm", "stack: value 'vlm': "),
        (STACKS, "dtype=nvfp4", "no gemm of vllm was measured on h100-80g-sxm for dtype nvfp4"),
        (STACKS, "device=a6000", "stack: no kernels of stack vllm were fitted on device a6000"),
        (MIXTURES, "model=llama-3.1-8b", "cluster.expert_parallel: value true: model llama-3.1-8b"),
        (MIXTURES, "cluster.moe_a2a_backend=nccl", "nccl': needs cluster.expert_parallel: true"),
        (MIXTURES, "cluster.redundant_experts=2", "2: needs cluster.expert_parallel: true"),
        (
            MIXTURES,
            "cluster.expert_parallel=true cluster.redundant_experts=3",
            "tp 2 does not divide num_experts + 3 redundant_experts (131)",
        ),
        (STACKS, "cluster.dp=2", "cluster.dp: value 2: must be 1: model llama-3.1-8b"),
        (MIXTURES, "cluster.dp=2 cluster.pp=2", "cluster.pp: value 2: must be 1: with data-"),
        (MIXTURES, "cluster.dp=2 cluster.gpus_per_node=4", "gpus_per_node: must be left out: with"),
        (MIXTURES, "cluster.dp=2 cluster.inter_node.kind=roce", "inter_node: must be left out: w"),
        (MIXTURES, "cluster.dp=2 cluster.intra_node.bandwidth=4e11", "intra_node: must be left ou"),
        (MIXTURES, "cluster.rank_router=least_tokens", "least_tokens': must be left out: needs"),
        (MIXTURES, "expert_distribution=even", "expert_distribution: value 'even': "),
        (MIXTURES, "stack=null dtype=null moe_dtype=fp8", "moe_dtype: value 'fp8': needs stack: "),
    ],
)
def test_mistakes(text: str, assignments: str, expected: str) -> None:
    said = message(text, *assignments.split())
    assert expected in said and (text == MIXTURES or "\n" not in said.strip())


# Mixtures of experts -------------------------------------------------------------------------


def test_mixtures_run_and_say_where_their_experts_times_come_from() -> None:
    runs = deployed(MIXTURES)
    run, sent = runs["divided"], runs["sent"]
    assert op_label(MOE) in note_of(run, "op times: ")
    mark = str(run.ops.meta.environment[MOE])
    assert mark.startswith("measured: fp8 experts of vllm 0.24.0") and "tp 2 x ep 1" in mark
    (log,) = run.simulate().replicas
    used = breakdown(log, run.predictor)
    assert used[MOE].time_s.sum() > used["moe_router"].time_s.sum() > 0
    assert ALL_TO_ALL not in used and run.ops.reduces == OPS["all_reduce"].calls
    assert sent.bundle_name.endswith("qwen3-30b-a3b/tp2-vllm@0.33-fp8-ep-a2a-nccl")
    assert run.kv_capacity == sent.kv_capacity
    assert ALL_TO_ALL in sent.ops.linear and sent.ops.reduces == 1
    marks = {op: str(mark) for op, mark in sent.ops.meta.environment.items()}
    assert "NCCL" in marks[ALL_TO_ALL] and "dispatch and combine" in marks[ALL_TO_ALL]
    assert "tp 1 x ep 2" in marks[MOE]
    assert "DeepEP of sglang" in str(runs["copied"].ops.meta.environment[ALL_TO_ALL])
    more = runs["copied"].ops.number_bytes.held_experts(128)
    assert more == 1 + 8 / 128 and runs["copied"].kv_capacity < sent.kv_capacity
    parts, whole = (one.predictor.cost.layer_parts(64) for one in (sent, run))
    assert parts["all_reduce"] == whole["all_reduce"] / 2 and parts[ALL_TO_ALL] > 0


def test_experts_count_in_the_memory_by_their_own_format() -> None:
    model = load_model("qwen3-30b-a3b")
    routed, matrices, plain = model.parameters_in(tp=2)
    tables = 2 * 2 * model.vocab_size * model.hidden_size
    for assignments, dtype in (((), "fp8"), (("moe_dtype=bf16",), "bf16")):
        memory = deployed(MIXTURES, *assignments)["divided"].memory
        expected = (MOE_BYTES[dtype] * routed + matrices + 2 * plain + tables) / 2
        assert memory is not None and memory.weight_bytes == pytest.approx(expected)


# The host's constants ------------------------------------------------------------------------


def test_a_stack_has_its_constants_and_says_so() -> None:
    found = deployed(HOSTS)["it"]
    shipped = asdict(host_times().stacks["vllm"])
    assert shipped["host_iteration_s"] > 0 and shipped["host_sequence_s"] > 0
    engine = found.scenario.engine
    own = [key for key in host_times().constants if key != "launch_s"]
    assert all(getattr(engine, key) == shipped[key] for key in own)
    assert (engine.launch_layer_s > 0) == (shipped["launch_s"] > 0)
    assert found.predictor.cost.host.iteration_s == shipped["host_iteration_s"]
    note = note_of(found, "host time: vllm's, ")
    assert host_times().fitted_to in note and " ms per sequence" in note
    again = deploy(found.scenario, Source("config.yaml of a result", "it", {}, ()))
    assert note in again.notes, "what is simulated again says it, too"


def test_an_empty_iteration_takes_none_of_the_gpu() -> None:
    """One client, one token: the iteration formed ahead is empty, and delays nobody."""
    given = ("workload.lengths={kind: fixed, prompt: 64, decode: 1}",
             "workload.arrivals={kind: closed_loop, clients: 1}")  # fmt: skip
    ends = []
    for ahead in (False, True):
        found = deployed(HOSTS, *given, f"policy.async_scheduling={ahead}")["it"]
        log = Analysis(found.simulate()).records.replicas[0]
        empty = log.iterations["decodes"] + log.iterations["chunks"] == 0
        assert empty.any() == ahead and not log.stage_durations()[empty].any()
        assert found.scenario.engine.host_iteration_s
        ends.append(Analysis(found.simulate()).requests["finish_s"].max())
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)


def test_prompts_that_no_graph_holds_are_launched_call_by_call() -> None:
    """vLLM's FULL_DECODE_ONLY, or a graph in one piece; 4 GEMMs, 2 norms, an activation, and 4."""
    launch_s = 11 * engine_facts("vllm").at("launch_s")
    for keys, expected in (
        (["engine.cudagraph_mode=FULL_DECODE_ONLY"], launch_s),
        (["engine.splitting_ops=[]"], launch_s),
        (["engine.cudagraph_mode=FULL_DECODE_ONLY", "engine.launch_layer_s=0.002"], 0.002),
        (["engine.cudagraph_mode=PIECEWISE"], 0.0),
        ([], 0.0),
    ):
        found = deployed(HOSTS, *keys)["it"]
        assert found.scenario.engine.launch_layer_s == pytest.approx(expected)
        assert found.predictor.cost.host.launch_layer_s == pytest.approx(expected)
    run = deployed(HOSTS, "engine.cudagraph_mode=FULL_DECODE_ONLY")["it"]
    assert "launches from documents" in note_of(run, "host time: vllm's, ")
    log = Analysis(run.simulate()).records.replicas[0]
    prompts = log.iterations["chunks"] > 0
    durations = log.stage_durations()[:, 0]
    assert durations[prompts].min() >= 32 * launch_s > durations[~prompts].max()


def test_ranks_that_norm_queries_over_all_heads_add_up_their_squares() -> None:
    """MiniMax M2: two float32 numbers a row more in each layer."""
    rows, run = np.array([1.0, 64.0, 2048.0]), served("minimax-m2", "b200-sxm", "vllm", 4, 1, None)
    cost, ops = run.predictor.cost, run.ops
    plain = replace(ops.meta.model_spec, norm_over_heads=False)
    other = replace(cost, ops=replace(ops, meta=replace(ops.meta, model_spec=plain)))
    assert ops.all_reduce is not None
    expected = ops.all_reduce(8 * rows)
    np.testing.assert_allclose(cost.beside_s(rows) - other.beside_s(rows), expected)
    both = (each.layer_parts(rows)[ALL_REDUCE] for each in (cost, other))
    np.testing.assert_allclose(next(both) - next(both), expected)
    alone = replace(cost, ops=replace(ops, meta=replace(ops.meta, tp=1)))
    np.testing.assert_allclose(alone.reduce_s(rows), other.reduce_s(rows))


def test_a_mixture_has_the_constants_of_mixtures() -> None:
    """A frontend's time a token counts for the mean prompt, a launch for each call of a layer."""
    sizes = ("model=gpt-oss-20b", "workload.lengths.range_ratio=1", "workload.lengths.prompt=100")
    found = deployed(HOSTS, *sizes)["it"]
    shipped, engine = host_times(mixtures=True).stacks["vllm"], found.scenario.engine
    assert shipped != host_times().stacks["vllm"]
    assert engine.host_sequence_s == shipped.host_sequence_s
    prompts = [request.prompt_tokens for request in found.requests]
    tokens_s = shipped.frontend_token_s * sum(prompts) / len(prompts)
    assert tokens_s > 0 and engine.frontend_s == pytest.approx(shipped.frontend_s + tokens_s)
    assert engine.launch_layer_s == pytest.approx(12 * shipped.launch_s)
    assert found.predictor.cost.host == host_of(engine)
    note = note_of(found, "host time: vllm's, ")
    assert " ms to launch a layer" in note and host_times(mixtures=True).fitted_to in note
    again = deploy(found.scenario, Source("config.yaml of a result", "it", {}, ()))
    assert note in again.notes, "what is simulated again says it, too"
    dense = deployed(HOSTS)["it"].scenario.engine
    assert dense.host_iteration_s == host_times().stacks["vllm"].host_iteration_s > 0
    given = deployed(HOSTS, *sizes, "engine.launch_layer_s=0", "engine.frontend_s=0.25")["it"]
    assert (given.scenario.engine.launch_layer_s, given.scenario.engine.frontend_s) == (0, 0.25)


def test_what_is_given_stays_and_without_a_stack_there_is_none() -> None:
    given = ("engine.host_iteration_s=0", "engine.host_sequence_s=0.001", "engine.frontend_s=0")
    found = deployed(HOSTS, *given)["it"]
    engine = found.scenario.engine
    assert (engine.host_iteration_s, engine.frontend_s, engine.host_sequence_s) == (0, 0, 0.001)
    assert note_of(found, "host time: as configured, ").endswith(", 1 ms per sequence")
    run = deployed("first_experiment")["sarathi"]
    engine = run.scenario.engine
    assert (engine.host_iteration_s, engine.host_sequence_s, engine.frontend_s) == (0, 0, 0)
    assert run.predictor.cost.host == NO_HOST


def test_a_frontend_counts_in_ttft_and_latency_and_delays_the_next_request() -> None:
    plain, later = (
        Analysis(deployed(HOSTS, f"engine.frontend_s={s}")["it"].simulate()).request_columns
        for s in (0.0, 0.25)
    )
    first = slice(0, 4)  # the burst: the same schedule
    assert later["ttft_s"][first] == pytest.approx(plain["ttft_s"][first] + 0.25, abs=1e-8)
    within = later["finish_s"] - later["arrival_s"]
    assert later["latency_s"] == pytest.approx(within + 0.25, abs=1e-8)
    waited = sorted(later["arrival_s"])[4:], sorted(later["finish_s"])[:8]
    assert 0.05 < sum(waited[0]) / 8 - sum(waited[1]) / 8 < 0.6  # exponential, 0.25 in the mean


# What people serve today ---------------------------------------------------------------------

SERVED = """\
name: served
workload: {{requests: 4, lengths: {{kind: uniform, min: 200, max: 600}}, pd_ratio: 5}}
policy: {{name: vllm}}
model: {model}
device: {device}
stack: {stack}
cluster: {{tp: {tp}, pp: {pp}, max_length: 1024}}
scenarios: {{a: {changes}}}
"""
# Model, device, stack, tp, pp, number format (None: the checkpoint's), and what then is used.
CELLS = [
    ("llama-3.3-70b", "h100-80g-sxm", "vllm", 4, 1, "fp8", "fp8"),
    ("llama-3.3-70b", "h200-sxm", "trtllm", 2, 1, None, "bf16"),
    ("llama-3.3-70b", "b200-sxm", "sglang", 1, 1, "nvfp4", "nvfp4"),
    ("qwen3-32b", "h100-80g-sxm", "sglang", 2, 1, None, "bf16"),
    ("qwen3-32b", "h200-sxm", "vllm", 1, 1, "fp8", "fp8"),
    ("qwen3-32b", "b200-sxm", "vllm", 1, 1, "nvfp4", "nvfp4"),
    ("gpt-oss-120b", "h100-80g-sxm", "vllm", 2, 1, None, "bf16-moe-w4a16_mxfp4"),
    ("gpt-oss-120b", "h200-sxm", "vllm", 1, 1, None, "bf16-moe-w4a16_mxfp4"),
    # Blackwell computes with fp8 activations.
    ("gpt-oss-120b", "b200-sxm", "trtllm", 1, 1, None, "bf16-moe-w4a8_mxfp4_mxfp8"),
    ("deepseek-v3", "h100-80g-sxm", "sglang", 8, 2, None, "fp8_block"),
    ("deepseek-v3", "h200-sxm", "vllm", 8, 1, None, "fp8_block"),
    ("deepseek-v3", "b200-sxm", "trtllm", 8, 1, "nvfp4", "nvfp4"),
]


def served(
    model: object, device: str, stack: str, tp: int, pp: int, dtype: str | None
) -> Deployment:
    changes = json.dumps({"dtype": dtype} if dtype else {})
    text = SERVED.format(model=model, device=device, stack=stack, tp=tp, pp=pp, changes=changes)
    return deployed(text)["a"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell[:3])))
def test_by_name(cell: tuple[str, str, str, int, int, str | None, str]) -> None:
    model, device, stack, tp, *_, used = cell
    run = served(*cell[:-1])
    of = "vllm@0.33" if stack == "vllm" else stack  # the policy's version, if it is that engine's
    assert run.bundle_name == f"{device}/{model}/tp{tp}-{of}-{used}"
    note, marks = note_of(run, "op times: "), run.ops.meta.environment
    for op in (*run.model.row_ops, *ATTENTION, *([ALL_REDUCE] if tp > 1 else [])):
        assert str(marks[op]).startswith(KINDS) and op_label(op) in note
    assert run.memory is not None and run.memory.num_blocks > 100


@pytest.mark.parametrize(
    ("config", "name"), [(DEEPSEEK_V3, "deepseek-v3"), (GPT_OSS_20B, "gpt-oss-20b")]
)
def test_from_a_config_json(tmp_path: Path, config: dict[str, object], name: str) -> None:
    """The same op times as by name, and a run of them."""
    folder = checkpoint(tmp_path / name, config)
    found, named = (served(model, "h200-sxm", "vllm", 8, 1, None) for model in (folder, name))
    assert found.bundle_sha256 == named.bundle_sha256
    (log,) = found.simulate().replicas
    assert log.stage_durations().sum() > 0


# States of recurrent layers: a pool of them (SGLang), or blocks (vLLM) --------------------------

MODEL = Path(__file__).with_name("qwen3_6_27b.json")
"""The layers of Qwen3.6-27B: 48 recurrent ones, whose states are 153.9 MB, and 16 others."""


def tree(engine: str, device: str, policy: str, share: str, more: str = "") -> str:
    return f"""
name: states
model: {MODEL}
device: {device}
stack: {engine}
{more}
workload: {{requests: 300, lengths: {{kind: fixed, prompt: 512, decode: 64}}}}
cluster: {{max_length: 4096}}
policy: {{name: {engine}, {policy}}}
kv_cache: {{{share}}}
"""


def found(text: str, *assignments: str) -> Deployment:
    (one,) = deployed(text, *assignments).values()
    return one


@pytest.mark.parametrize(
    ("assignments", "running"),
    [
        ((), 40),
        (("policy.disable_overlap_schedule=true",), 67),
        (("kv_cache.prefix_caching=false",), 203),
        (("policy.max_running_requests=24",), 24),
        # 0.2 of 1.2 parts of 66.2 GB in place of 0.9 of 1.9: 71 states.
        (("policy.version=0.5.3",), 14),
    ],
)
def test_sglang_runs_as_many_requests_as_its_pool_of_states_allows(
    assignments: tuple[str, ...], running: int
) -> None:
    """By hand: 0.9/1.9 of 0.8 x 150.0 - 53.8 GB hold 203 states; 3 a request, and 2 more with
    overlap. (SGLang 0.5.16 served 6,322 tokens/s so, at 39.3 ms a token.)"""
    text = tree("sglang", "h200-sxm", "chunked_prefill_size: 8192", "mem_fraction_static: 0.8")
    one = found(text, *assignments)
    policy: dict[str, Any] = one.scenario.policy.described()
    assert policy["max_running_requests"] == one.scenario.batching.max_batch == running
    (note,) = (note for note in one.notes if note.startswith("recurrent layers"))
    assert "states take 153.9 MB per" in note and f"{running} requests run at once" in note
    assert one.memory is not None and one.memory.states is not None
    parts = {name: size for name, size, _ in one.memory.parts()}
    assert parts["states"] == one.memory.states * one.memory.state_bytes
    rows = Analysis(one.simulate()).records.replicas[0].iterations
    assert (rows["decodes"] + rows["chunks"]).max() <= running


VLLM = tree(
    *("vllm", "h100-80g-sxm", "max_num_batched_tokens: 8192, max_num_seqs: 1024"),
    *("gpu_memory_utilization: 0.95", "dtype: fp8_block"),
)


def test_vllm_does_not_start_with_more_sequences_than_blocks_of_states() -> None:
    """vLLM 0.2x said 856 for the checkpoint with its encoder (vllm-project/recipes, pull 551)."""
    said = re.search(r"max_num_seqs: value 1024: must be at most (\d+): each needs", message(VLLM))
    assert said is not None and int(said[1]) == pytest.approx(856, rel=0.1)
    most = f"policy.max_num_seqs={said[1]}"
    assert found(VLLM, most).scenario.batching.max_batch == int(said[1])
    assert found(VLLM, 'policy.version="0.16"').scenario.batching.max_batch == 1024


def test_states_are_blocks_of_every_running_sequence() -> None:
    """512 + 64 tokens are 36 blocks of 16; the states of a sequence are 147 more: of 1,000 blocks
    five sequences have their own. One of the longest length has room for its states, too."""
    one = found(VLLM, "policy.max_num_seqs=64", "kv_cache.num_blocks=1000")
    assert one.memory is not None and one.memory.state_blocks == 147
    records = one.simulate()
    rows = records.replicas[0].iterations
    assert (rows["decodes"] + rows["chunks"]).max() == 5 == 999 // (147 + 36)
    assert Analysis(records).requests["finish_s"].notna().all()
    whole = found(VLLM, "policy.max_num_seqs=64", "cluster.max_length=262144")
    assert whole.kv_capacity > 262144 + 147 * 16
