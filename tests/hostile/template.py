"""Valid files of every door, as small as they can be: what the hostile inputs are made from."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from sarathi_sim.experiments.config.inputs import ServerCalibration
from sarathi_sim.profiler.bundle.schema import bundle_path, write_bundle
from sarathi_sim.profiler.facts.model import load_model
from tests.experiments import test_benchmarks as load_tools
from tests.experiments.small_config import AT_MOST
from tests.experiments.small_report import (
    write_capacities,
    write_recommendation,
    write_recorded,
    write_score,
    write_sensitivity,
)
from tests.sampled import device_bundle

EXPERIMENT = """\
name: small
description: Two schedulers on a handful of requests.
seed: 7
model: model.yaml
device: device.yaml
profiles: profiles
workload:
  requests: 6
  lengths: {kind: zipf, theta: 0.4, min: 24, max: 60, step: 4}
  arrivals: {kind: gamma, rate: 50.0, cv: 1.5}
  pd_ratio: 3
  system_prompts: {few: {share: 0.5, tokens: 4}}
  sessions: {min_turns: 1, max_turns: 1, think_s: 2.5}
cluster: {tp: 1, pp: 2, replicas: 1, router: round_robin, max_length: 64, usable_memory: 0.9}
batching: {max_batch: 4, formation: eager, micro_batches: bound}
engine: {turnaround_s: 1.0e-5, jitter: 0.02, send: overlapped, lm_head: true}
policy: {name: orca, case: best}
scenarios:
  orca: {}
  sarathi: {policy: {name: sarathi, chunk_size: 32}}
compare:
  speedup: {metric: makespan_s, over: [orca, sarathi], paper: 1.5}
"""

SWEEP = (
    EXPERIMENT
    + """\
sweep:
  grid:
    batching.max_batch: [2, 4]
  seeds: 1
"""
)

MODEL = """\
name: tiny
num_layers: 4
hidden_size: 64
num_heads: 4
num_kv_heads: 2
head_dim: 16
ffn_hidden_size: 128
gated_ffn: true
vocab_size: 512
tied_embeddings: false
max_position_embeddings: 256
"""

DEVICE = """\
name: dev
memory_bytes: 24.0e+9
peak_flops: 100.0e+12
memory_bandwidth: 900.0e+9
num_sms: 64
gpus_per_node: 8
intra_node: {kind: NVLink, bandwidth: 50.0e+9}
inter_node: {kind: InfiniBand, bandwidth: 12.0e+9}
notes: made up
fitted: null
"""

LOG = "".join(
    json.dumps({"timestamp": f"2026-01-02T03:04:{i:02}Z", "input_tokens": 20 + i,
                "usage": {"out": 4 + i}, "output_len": 9.0, "session_id": f"s{i % 2}"}) + "\n"
    for i in range(6)
)  # fmt: skip
SERVED = {"input_lens": [20, 30], "output_lens": [5, 9], "start_times": [1.5, 2.0], "ttfts": [0.1]}

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float16",
}

TRACE = "arrival,prompt,decode\n" + "".join(
    f"{0.01 * i:.2f},{16 + 3 * i},{4 + i % 5}\n" for i in range(8)
)
MOONCAKE = "".join(
    f'{{"timestamp": {10 * i}, "input_length": {16 + 3 * i}, "output_length": {4 + i % 5}, '
    f'"hash_ids": [{i // 2}]}}\n'
    for i in range(8)
)

POLICY = AT_MOST.replace("prompts: int", "prompts: int = 2")
OWN = EXPERIMENT[: EXPERIMENT.index("policy:")] + "policy: {file: mine.py, name: at_most}\n"

MEASURED = "id,backend,model,system,isl,osl,concurrency,ttft_ms,tpot_ms,tp,precision\n" + "".join(
    f"{id},vllm,meta-llama/Llama-3.1-8B,h100_sxm,64,4,{number},20.5,9.25,1,bf16\n"
    for number, id in enumerate("abc", 1)
)
SERVER = "".join(
    json.dumps({"input_toks": 20 + i, "output_toks": 5, "queued_ts": 0.1 * i,
                "first_token_ts": 0.1 * i + 0.05, "last_token_ts": 0.1 * i + 0.2}) + "\n"
    for i in range(4)
)  # fmt: skip
RUNS = {
    "vllm.json": [load_tools.VLLM],
    "sglang.jsonl": [load_tools.SGLANG_MEANS | load_tools.LISTS],
    "aiperf.jsonl": load_tools.AIPERF,
    "guidellm.json": [load_tools.report(load_tools.guidellm(load_tools.POISSON))],
}
"""What load tools save: an object a line."""
STACKED = """\
name: stacked
model: llama-3.2-1b
device: h100-80g-sxm
stack: vllm
workload: {requests: 6, lengths: {kind: fixed, prompt: 64, decode: 4}, arrivals: {kind: at_once}}
policy: {name: vllm, max_num_batched_tokens: 512, max_num_seqs: 8}
cluster: {max_length: 1024}
"""
CALIBRATION = ServerCalibration(
    "vllm", "llama-3.2-1b", "h100-80g-sxm", ["a.json"], {"host_iteration_s": 1e-3}, 1.1, 0.9
)
_LOG = Path(__file__).parents[1] / "data/vllm/few_blocks.jsonl.gz"

#: The sizes that the tiny bundle keeps of the many that a modelled one has.
_TOKENS = {1, 2, 4, 8, 16, 32, 64, 128, 129, 256}
_CONTEXTS = {0, 1, 16, 64, 128, 256}
_BYTES = {2**10, 2**14, 2**20, 2**24}


def write_template(folder: Path) -> None:
    """Write every file into ``folder``. The commands of the doors run beside them."""
    for name, text in {
        "exp.yaml": EXPERIMENT,
        "sweep.yaml": SWEEP,
        "model.yaml": MODEL,
        "device.yaml": DEVICE,
        "trace.csv": TRACE,
        "trace.jsonl": MOONCAKE,
        "log.jsonl": LOG,
        "served.json": json.dumps(SERVED),
        "hf/tiny/config.json": json.dumps(HF_CONFIG, indent=1),
        "mine.py": POLICY,
        "own.yaml": OWN,
        "measured.csv": MEASURED,
        "peer.csv": "id,ttft_ms,tpot_ms\na,20,9\nb,30,9\n",
        "server.jsonl": SERVER,
        "decisions.jsonl": gzip.decompress(_LOG.read_bytes()).decode(),
        "stacked.yaml": STACKED,
        "calibration.yaml": CALIBRATION.text(),
        **{name: "".join(f"{json.dumps(one)}\n" for one in runs) for name, runs in RUNS.items()},
        "mine/notes.txt": "what the user wrote\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    model = load_model(folder / "model.yaml")
    whole = device_bundle("a6000", model, 1, max_tokens=256, max_context=256)
    meta = replace(whole.meta, device="dev", source="imported", device_file_sha256=None)
    bundle = replace(
        whole,
        meta=meta,
        linear=_only(whole.linear, num_tokens=_TOKENS),
        attn_prefill=_only(whole.attn_prefill, chunk_tokens=_TOKENS, context_tokens=_CONTEXTS),
        attn_decode=_only(whole.attn_decode, batch_size=_TOKENS, context_tokens=_CONTEXTS),
        send_recv=_only(whole.send_recv, num_bytes=_BYTES),
    )
    write_bundle(bundle, bundle_path(folder / "profiles", "dev", "tiny", 1))


def write_results(folder: Path) -> None:
    """A result of every kind that the template's own commands do not write."""
    write_score(folder / "scored")
    write_recorded(folder / "recorded")
    write_capacities(folder / "capacities")
    write_recommendation(folder / "recommended")
    write_sensitivity(folder / "sensitivity")


def _only(frame: pd.DataFrame, **kept: set[int]) -> pd.DataFrame:
    for column, values in kept.items():
        frame = frame[frame[column].isin(values)]
    return frame.reset_index(drop=True)
