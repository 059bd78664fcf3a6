"""LLMServingSim's ``profiler/perf`` folders as bundles: every op by hand, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import BundleError, write_bundle
from sarathi_sim.profiler.facts.ops import ROW_OPS
from sarathi_sim.profiler.importers.sources import import_bundle
from sarathi_sim.profiler.public.perf_tables import LAYERS
from sarathi_sim.profiler.storage.files import DATASETS_VARIABLE, public_datasets
from sarathi_sim.simulator.op_times.regression import bundle_times

META = """\
vllm_version: 0.19.0
cuda_version: '12.8'
gpu: NVIDIA GeForce RTX 4090
hardware: RTX4090
profiled_at: '2026-08-17T19:43:32+00:00'
model: meta-llama/Llama-3.1-8B
variant: bf16
tp_degrees: [1]
engine_effective:
  hf_overrides:
    intermediate_size: 14336
    num_attention_heads: 32
    num_key_value_heads: 8
    vocab_size: 128256
"""
DENSE = {"qkv_proj": 50, "o_proj": 40, "gate_up_proj": 250, "down_proj": 130, "layernorm": 2,
         "act_fn": 3, "rotary_emb": 5, "embedding": 7, "final_layernorm": 11}  # fmt: skip
ATTENTION = """\
prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,9.0
0,0,1,1024,14.0
0,0,4,16,10.0
0,0,4,1024,15.0
16,0,0,0,12.0
16,1024,0,0,20.0
64,0,0,0,30.0
64,1024,0,0,40.0
16,0,4,1024,33.0
64,1024,4,16,60.0
"""


@pytest.fixture
def perf(tmp_path: Path) -> Path:
    folder = tmp_path / "bf16"
    folder.mkdir()
    (folder / "meta.yaml").write_text(META)
    # Microseconds: a constant of each layer's own, and one a token.
    rows = [(name, m, us + m) for name, us in DENSE.items() for m in (1, 20, 64, 100)]
    pd.DataFrame(rows, columns=["layer", "tokens", "time_us"]).to_csv(
        folder / "dense.csv", index=False
    )
    rows = [(name, m, us + m) for name, us in (("lm_head", 1000), ("sampler", 70)) for m in (1, 8)]
    pd.DataFrame(rows, columns=["layer", "sequences", "time_us"]).to_csv(
        folder / "per_sequence.csv", index=False
    )
    (folder / "attention.csv").write_text(ATTENTION)
    return folder


def test_every_op_by_hand(perf: Path) -> None:
    bundle = import_bundle("llmservingsim", perf, "llama-3-8b", 1)
    assert (bundle.meta.device, bundle.meta.dtype, bundle.meta.source) == (
        "rtx-4090", "bfloat16", "imported",
    )  # fmt: skip
    at_20 = bundle.linear[bundle.linear["num_tokens"] == 20].set_index("op")["time_us"].to_dict()
    assert at_20 == {
        "preproj": 70.0,
        "postproj": 60.0,
        "ffn_ln1": 270.0,
        "ffn_ln2": 150.0,
        "others": 2 * 22.0 + 23.0 + 25.0,  # a layer has two norms
        "embedding": 27.0 + 31.0,
    }
    head = bundle.linear[bundle.linear["op"] == "lm_head"]
    assert head["num_tokens"].tolist() == [1, 8]
    assert head["time_us"].tolist() == [1072.0, 1086.0]
    assert bundle.attn_prefill.to_numpy().tolist() == [
        [16, 0, 12.0], [16, 1024, 20.0], [64, 0, 30.0], [64, 1024, 40.0],
    ]  # fmt: skip
    assert bundle.attn_decode.to_numpy().tolist() == [
        [1, 16, 9.0], [1, 1024, 14.0], [4, 16, 10.0], [4, 1024, 15.0],
    ]  # fmt: skip
    # A layer of 20 tokens, and one of 68: everything but the embedding, and the call over both.
    layers = [20 * 8 + 482 + 33.0, 68 * 8 + 482 + 60.0]
    assert bundle.mixed["time_us"].tolist() == layers
    assert bundle.mixed.iloc[0].tolist()[:4] == [16, 0, 4, 1024]


def test_its_meta_says_where_every_op_is_from(perf: Path, tmp_path: Path) -> None:
    bundle = import_bundle("llmservingsim", perf, "llama-3-8b", 1)
    about = bundle.meta.environment
    assert about["preproj"] == "measured: qkv_proj of dense.csv"
    assert about["others"] == "combined: 2 x layernorm + act_fn + rotary_emb of dense.csv"
    assert str(about["mixed"]).startswith("combined: ")
    assert about["repository"] == "casys-kaist/LLMServingSim, profiled 2026-08-17T19:43:32+00:00"
    assert "RTX 4090; meta-llama/Llama-3.1-8B, vLLM 0.19.0" in str(about["hardware"])
    assert set(LAYERS) == set(ROW_OPS), "every op of the registry has layers of theirs"
    write_bundle(bundle, tmp_path / "b")
    assert check_folder(tmp_path / "b").bundle is not None


def test_the_repository_keeps_each_degree_in_a_folder(perf: Path) -> None:
    (perf / "tp1").mkdir()
    for name in ("dense.csv", "per_sequence.csv", "attention.csv"):
        (perf / name).rename(perf / "tp1" / name)
    assert len(import_bundle("llmservingsim", perf, "llama-3-8b", 1).mixed) == 2


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("meta.yaml", "RTX4090\n", "ABACUS9\n",
         r"hardware ABACUS9: no shipped device is called so .*rtx-4090.*--device"),
        ("meta.yaml", "bf16", "fp8", r"variant 'fp8' is not modelled: must be one of bf16, fp16"),
        ("meta.yaml", "tp_degrees: [1]", "tp_degrees: [2]", r"tp_degrees \[2\]: --tp 1 was not"),
        ("meta.yaml", "14336", "28672",
         r"intermediate_size of meta-llama/Llama-3.1-8B is 28672, but llama-3-8b has 14336"),
        ("dense.csv", "act_fn", "moe_act", r"dense.csv: no rows of act_fn; there are"),
        ("attention.csv", "kv_prefill", "prefill_key", r"column 'kv_prefill' is missing"),
        ("attention.csv", "0,0,4,16,10.0", "0,0,4,16,-1", r"row 4: time_us must be positive"),
    ],
)  # fmt: skip
def test_refusals(perf: Path, file: str, old: str, new: str, message: str) -> None:
    path = perf / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BundleError, match=message):
        import_bundle("llmservingsim", perf, "llama-3-8b", 1)


def test_another_device_and_a_folder_of_neither_form(perf: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="measured on RTX4090, not on a6000"):
        import_bundle("llmservingsim", perf, "llama-3-8b", 1, "a6000")
    with pytest.raises(BundleError, match=r"none of its forms: layers_.*profiler/perf.*dense\.csv"):
        import_bundle("llmservingsim", tmp_path / "..", "llama-3-8b", 1)


@pytest.mark.skipif(
    not os.environ.get(DATASETS_VARIABLE),
    reason=f"needs the public measurements: set {DATASETS_VARIABLE} to their folder",
)
def test_the_real_folder(tmp_path: Path) -> None:
    folder = public_datasets() / "llmservingsim_rtx4090"
    bundle = import_bundle("llmservingsim", folder, "llama-3-8b", 1)
    write_bundle(bundle, tmp_path / "b")
    assert not check_folder(tmp_path / "b").failed
    # Decodes beside a chunk take about twice as long as alone.
    assert 0.8 < bundle_times(bundle).whole_layer.decode < 1.6
