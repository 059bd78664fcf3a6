"""Published folders as bundles: every trap by hand, what is refused, and the real files.

Vidur's, aiconfigurator's, and LLMServingSim's in its two forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sarathi_sim.profiler.importers.assemble import half_octaves
from sarathi_sim.profiler.importers.shapes import ShapePool
from sarathi_sim.profiler.importers.sources import SOURCES, import_bundle
from sarathi_sim.profiler.public.perf_tables import LAYERS
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import run_experiment
from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import (
    Bundle,
    BundleError,
    bundle_path,
    load_bundle,
    write_bundle,
)
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ROW_OPS, GemmShape
from sarathi_sim.profiler.facts.roofline import wave_fill
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.sampled import needs_datasets

M = (1, 128, 129, 1024)
Rows = list[dict[str, object]]


def write(folder: Path, name: str, rows: Rows) -> None:
    pd.DataFrame(rows).to_csv(folder / name, index=False)


def times(bundle: Bundle, op: str) -> dict[int, float]:
    rows = bundle.linear[bundle.linear["op"] == op]
    return dict(zip(rows["num_tokens"].tolist(), rows["time_us"].tolist(), strict=True))


def marks(bundle: Bundle) -> dict[str, str]:
    return {op: str(mark) for op, mark in bundle.meta.environment.items()}


# Vidur -----------------------------------------------------------------------------------------

OPS = {
    "emb": 0.007,
    "input_layernorm": 0.010,
    "attn_pre_proj": 0.100,
    "attn_rope": 0.020,
    "attn_post_proj": 0.050,
    "post_attention_layernorm": 0.011,
    "mlp_up_proj": 0.200,
    "mlp_act": 0.030,
    "mlp_down_proj": 0.090,
    "add": 0.004,
}


def mlp(tokens: tuple[int, ...] = (1, 128, 128, 256), tp: tuple[int, ...] = (1, 2)) -> pd.DataFrame:
    """Llama-2-7b in Vidur's columns: times in ms, half of it at tp 2, and growing with tokens."""
    rows = []
    for degree in tp:
        for i, count in enumerate(tokens):
            slower = (1 + count / 256) * (1 + 0.002 * i) / degree
            row: dict[str, object] = {
                f"time_stats.{op}.median": t * slower for op, t in OPS.items()
            }
            shape = {"n_head": 32, "n_kv_head": 32, "n_embd": 4096, "n_expanded_embd": 11008}
            row |= {**shape, "use_gated_mlp": True, "num_tokens": count}
            rows.append(row | {"num_tensor_parallel_workers": degree})
    return pd.DataFrame(rows)


def reduce(workers: int, per_node: int, size: int, ms: float) -> dict[str, float]:
    named = {"num_workers": workers, "devices_per_node": per_node, "max_devices_per_node": 8}
    return {**named, "size": size, "time_stats.all_reduce.median": ms}


@pytest.fixture
def vidur(tmp_path: Path) -> Path:
    here = tmp_path / "vidur"
    here.mkdir()
    mlp().to_csv(here / "mlp_a100_Some-7b.csv", index=False)
    # Two ranks of one node, then one rank on each of two nodes: the latter must not be used.
    rows = [reduce(2, 2, 2048, 0.030), reduce(2, 2, 2**20, 0.040), reduce(2, 1, 2048, 9.0)]
    pd.DataFrame(rows).to_csv(here / "all_reduce_a100_dgx.csv", index=False)
    return here


def test_vidur_by_hand(vidur: Path) -> None:
    bundle = import_bundle("vidur", vidur, "llama-2-7b", 2)
    # Milliseconds of the tp 2 rows; 128 tokens come twice, at 1.002 and 1.004: their median.
    assert times(bundle, "preproj") == pytest.approx(
        {1: 50 * (1 + 1 / 256), 128: 50 * 1.5 * 1.003, 256: 50 * 2 * 1.006}, rel=1e-5
    )
    # Gate and up are one GEMM already: not doubled.
    assert times(bundle, "ffn_ln1")[1] == pytest.approx(100 * (1 + 1 / 256), rel=1e-5)
    # Both norms, rotary, activation once and the addition twice.
    assert times(bundle, "others")[1] == pytest.approx(39.5 * (1 + 1 / 256), rel=1e-5)
    assert bundle.all_reduce["time_us"].tolist() == [30.0, 40.0]
    about = marks(bundle)
    assert bundle.meta.source == "imported"
    assert (about["repository"], about["licence"]) == ("microsoft/vidur @7d47513", "MIT")
    assert about["preproj"] == "measured: attn_pre_proj of Some-7b, tp 2"
    assert about["others"].startswith("combined: ")
    assert about["attn_decode"].startswith("modelled: ")
    assert about["send_recv_inter_node"].startswith("modelled: ")


def test_a_missing_degree_is_interpolated_from_other_shapes_and_marked(vidur: Path) -> None:
    # tp 4 is not in the file, but a width within a factor of two of it is: postproj of tp 1.
    bundle = import_bundle("vidur", vidur, "llama-2-7b", 4)
    mark = marks(bundle)["preproj"]
    assert mark.startswith("interpolated: (3072, 4096) over (n, k) by wave count, extended")
    assert "from (4096, 4096) of mlp_a100_*.csv" in mark
    assert marks(bundle)["others"].startswith("modelled: ")


def test_attention_of_other_heads_is_scaled_and_decode_of_another_kernel_is_not(
    vidur: Path,
) -> None:
    rows = [
        {"is_prefill": True, "prefill_chunk_size": 64, "batch_size": 1, "kv_cache_size": 32},
        {"is_prefill": True, "prefill_chunk_size": 128, "batch_size": 1, "kv_cache_size": 0},
        {"is_prefill": False, "prefill_chunk_size": 0, "batch_size": 4, "kv_cache_size": 512},
        {"is_prefill": False, "prefill_chunk_size": 0, "batch_size": 8, "kv_cache_size": 512},
    ]
    frame = pd.DataFrame(rows)
    frame["time_stats.attn_prefill.median"] = [0.05, 0.07, None, None]
    frame["time_stats.attn_decode.median"] = [None, None, 0.03, 0.04]
    frame.to_csv(vidur / "attention_a100_CodeLlama-34b_tp2.csv", index=False)
    shape = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672}
    mlp(tp=(1, 2, 4)).assign(**shape).to_csv(vidur / "mlp_a100_Some-70b.csv", index=False)
    # 32 query and 4 KV heads, as measured: context is what was cached BEFORE the chunk.
    same = import_bundle("vidur", vidur, "llama-2-70b", 2)
    assert same.attn_prefill.to_numpy().tolist() == [[64, 32, 50.0], [128, 0, 70.0]]
    assert same.attn_decode.to_numpy().tolist() == [[4, 512, 30.0], [8, 512, 40.0]]
    assert marks(same)["attn_decode"].startswith("measured: ")
    half = import_bundle("vidur", vidur, "llama-2-70b", 4)
    assert marks(half)["attn_decode"].startswith(
        "scaled: from 32 query and 4 KV heads to 16 and 2 by the calibrated device model's ratio"
    )
    assert (half.attn_decode["time_us"].to_numpy() < [30.0, 40.0]).all()
    mha = import_bundle("vidur", vidur, "llama-2-7b", 2)
    assert marks(mha)["attn_prefill"].startswith("scaled: ")
    assert marks(mha)["attn_decode"].startswith("modelled: ")


def test_messages_are_thinned_and_never_faster_when_larger() -> None:
    rows = pd.DataFrame(
        {"num_bytes": [1024, 1200, 1400, 1500, 4096], "time_us": [9.0, 50.0, 11.0, 5.0, 8.0]}
    )
    thin = half_octaves(rows)
    # 1024..1448 is one half octave (median 11 us at 1200), then 1500 and 4096, both raised to 11.
    assert thin.to_numpy().tolist() == [[1200, 11.0], [1500, 11.0], [4096, 11.0]]


# aiconfigurator --------------------------------------------------------------------------------


@pytest.fixture
def aic(tmp_path: Path) -> Path:
    """Llama-3-8b at tp 1 wants (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)."""
    shapes = [(4096, 4096), (6144, 4096), (16384, 4096), (51200, 4096), (4096, 16384)]
    gemm: Rows = [
        {"framework": who, "m": m, "n": n, "k": k, "latency_ms": factor * 1e-9 * n * k * (1 + m)}
        for who, factor in (("SGLang", 1.0), ("VLLM", 7.0))
        for n, k in shapes
        for m in M
    ]
    write(tmp_path, "gemm_bf16.csv", gemm)
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    base = {"framework": "VLLM", "isl": 1, "step": 1023, **heads}
    decode: Rows = [
        {**base, "batch_size": 4, "latency_ms": 0.05},
        {**base, "batch_size": 8, "latency_ms": 0.06},
        # 16 sequences of 1023 tokens in 10 us: 6.7 TB/s, which only L2 can give.
        {**base, "batch_size": 16, "latency_ms": 0.01},
        {**base, "framework": "TRTLLM", "batch_size": 4, "latency_ms": 0.9},
    ]
    write(tmp_path, "attention_decode_bf16.csv", decode)
    first = {**base, "step": 0, "batch_size": 1}
    prefill: Rows = [
        {**first, "isl": 128, "latency_ms": 0.03},
        {**first, "isl": 256, "latency_ms": 0.04},
        {**first, "isl": 256, "batch_size": 2, "latency_ms": 5.0},
    ]
    write(tmp_path, "attention_prefill_bf16.csv", prefill)
    nccl: Rows = [
        {"op_name": op, "nccl_dtype": kind, "num_gpus": gpus, "message_size_elements": size,
         "latency_ms": 0.01 + 1e-9 * size}
        for op in ("all_reduce", "all_gather")
        for kind in ("half", "int8")
        for gpus in (2, 8)
        for size in (1024, 2**20)
    ]  # fmt: skip
    write(tmp_path, "nccl_collectives.csv", nccl)
    return tmp_path


def test_aiconfigurator_by_hand(aic: Path) -> None:
    bundle = import_bundle("aiconfigurator", aic, "llama-3-8b", 1)
    assert bundle.meta.dtype == "bfloat16"
    # One framework's rows, in microseconds.
    expected = [1e-6 * 6144 * 4096 * (1 + m) for m in M]
    assert [*times(bundle, "preproj").values()] == pytest.approx(expected, rel=1e-5)
    about = marks(bundle)
    assert about["ffn_ln1"].startswith(
        "interpolated: (28672, 4096) over (n, k) by wave count from (16384, 4096), (51200, 4096)"
    )
    assert about["ffn_ln2"].startswith(
        "interpolated: (4096, 14336) over (n, k) by wave count from (4096, 4096), (4096, 16384)"
    )
    assert "modelled" in about["lm_head"]  # 128256 columns are too far from 51200
    # Context is ``step``; the row that beats the memory and the other framework are left out.
    assert bundle.attn_decode.to_numpy().tolist() == [[4, 1023, 50.0], [8, 1023, 60.0]]
    fresh = bundle.attn_prefill[bundle.attn_prefill["context_tokens"] == 0]
    assert fresh["time_us"].tolist() == [30.0, 40.0]
    by_context = bundle.attn_prefill[bundle.attn_prefill["chunk_tokens"] == 256]
    assert by_context["time_us"].is_monotonic_increasing
    assert "plus the calibrated device model's increase" in about["attn_prefill"]


def test_nccl_sizes_are_elements_of_two_bytes(aic: Path) -> None:
    bundle = import_bundle("aiconfigurator", aic, "llama-3-8b", 2)
    assert bundle.all_reduce["num_bytes"].tolist() == [2048, 2**21]
    assert bundle.all_reduce["time_us"].tolist() == pytest.approx([10.001, 11.0486], rel=1e-4)


def test_interpolated_times_step_with_the_waves() -> None:
    """Where the measured times are a constant per wave of tiles, so are the interpolated ones."""
    device = load_device("h200-sxm")  # not calibrated: the expectation is tiles and waves alone
    sms = np.float64(device.num_sms)

    def wave_us(n: int) -> float:
        blocks = np.float64(8 * n / 128)
        return float(blocks / wave_fill(blocks, sms))

    sizes = {n: wave_us(n) for n in (8192, 16384)}
    rows = pd.DataFrame([{"m": 1024, "n": n, "k": 8192, "time_us": t} for n, t in sizes.items()])
    pool = ShapePool(rows, device, "a file")
    part = pool.part(GemmShape(n=12288, k=8192))
    assert part is not None
    assert "a roofline with tiles and waves" in part.origin
    assert part.rows["time_us"].iloc[0] == pytest.approx(wave_us(12288), rel=0.12)
    exact = pool.part(GemmShape(n=8192, k=8192))
    assert exact is not None and exact.kind == "measured"
    assert exact.rows["time_us"].tolist() == [sizes[8192]]
    beyond = pool.part(GemmShape(n=30000, k=8192))
    assert beyond is not None and "extended beyond what was measured" in beyond.origin
    assert pool.part(GemmShape(n=40000, k=8192)) is None
    assert pool.part(GemmShape(n=8192, k=2048)) is None


# LLMServingSim ---------------------------------------------------------------------------------


@pytest.fixture
def lss(tmp_path: Path) -> Path:
    widths = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096, "gate_proj": 14336,
              "up_proj": 14336, "down_proj": 14336, "lm_head": 128256, "rope": 1}  # fmt: skip
    rows: Rows = [
        {"layer_name": name, "input": m, "kv_cache": 0, "tp_size": 1,
         "latency(ns)": 20_000 + 2 * width * m}
        for name, width in widths.items()
        for m in M
    ]  # fmt: skip
    write(tmp_path, "layers_Llama-3.1-8B_tp1.csv", rows)
    first = {"is_prefill": True, "batch_size": 1, "time_stats.attn_decode.median": None}
    then = {"is_prefill": False, "prefill_chunk_size": 0, "time_stats.attn_prefill.median": None}
    attention: Rows = [
        {**first, "prefill_chunk_size": 32, "kv_cache_size": 32,
         "time_stats.attn_prefill.median": 0.004},
        {**first, "prefill_chunk_size": 32, "kv_cache_size": 96,
         "time_stats.attn_prefill.median": 0.006},
        {**then, "batch_size": 4, "kv_cache_size": 4096, "time_stats.attn_decode.median": 0.08},
        {**then, "batch_size": 8, "kv_cache_size": 8197, "time_stats.attn_decode.median": 0.09},
    ]  # fmt: skip
    write(tmp_path, "attention_Llama-3.1-8B_tp1.csv", attention)
    return tmp_path


def test_llmservingsim_by_hand(lss: Path) -> None:
    bundle = import_bundle("llmservingsim", lss, "llama-3-8b", 1)
    # Nanoseconds; q and o have one shape, so their times are merged.
    postproj, about = times(bundle, "postproj"), marks(bundle)
    assert postproj == pytest.approx({m: 20 + 2e-3 * 4096 * m for m in M}, rel=1e-5)
    # The projections are separate in the file: QKV and gate + up are made from their neighbours.
    assert about["preproj"].startswith("interpolated: (6144, 4096)")
    assert about["ffn_ln1"].startswith("interpolated: (28672, 4096)")
    assert postproj[1024] < times(bundle, "preproj")[1024] < 20 + 2e-3 * 14336 * 1024
    assert about["others"].startswith("modelled: ")  # its norms and rotary are unfused
    # kv_cache_size includes the chunk (prefill) and is the total of the batch (decode).
    assert bundle.attn_prefill.to_numpy().tolist() == [[32, 0, 4.0], [32, 64, 6.0]]
    assert bundle.attn_decode.to_numpy().tolist() == [[4, 1024, 80.0], [8, 1024, 90.0]]


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
    for name, layers, size, counts in (
        ("dense", DENSE, "tokens", (1, 20, 64, 100)),
        ("per_sequence", {"lm_head": 1000, "sampler": 70}, "sequences", (1, 8)),
    ):
        rows: Rows = [
            {"layer": layer, size: m, "time_us": us + m}
            for layer, us in layers.items()
            for m in counts
        ]
        write(folder, f"{name}.csv", rows)
    (folder / "attention.csv").write_text(ATTENTION)
    return folder


def test_every_op_of_a_perf_folder_by_hand(perf: Path) -> None:
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
    assert times(bundle, "lm_head") == {1: 1072.0, 8: 1086.0}
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


def test_a_perf_folders_meta_says_where_every_op_is_from(perf: Path, tmp_path: Path) -> None:
    bundle = import_bundle("llmservingsim", perf, "llama-3-8b", 1)
    about = marks(bundle)
    assert about["preproj"] == "measured: qkv_proj of dense.csv"
    assert about["others"] == "combined: 2 x layernorm + act_fn + rotary_emb of dense.csv"
    assert about["mixed"].startswith("combined: ")
    assert about["repository"] == "casys-kaist/LLMServingSim, profiled 2026-08-17T19:43:32+00:00"
    assert "RTX 4090; meta-llama/Llama-3.1-8B, vLLM 0.19.0" in about["hardware"]
    assert set(LAYERS) == set(ROW_OPS), "every op of the registry has layers of theirs"
    write_bundle(bundle, tmp_path / "b")
    assert check_folder(tmp_path / "b").bundle is not None


def test_the_repository_keeps_each_degree_in_a_folder(perf: Path) -> None:
    (perf / "tp1").mkdir()
    for name in ("dense.csv", "per_sequence.csv", "attention.csv"):
        (perf / name).rename(perf / "tp1" / name)
    assert len(import_bundle("llmservingsim", perf, "llama-3-8b", 1).mixed) == 2


def test_the_sizes_in_a_perf_folders_meta_are_those_of_a_rank_of_the_last_degree(
    perf: Path,
) -> None:
    """With whole numbers as keys, as the repository writes them."""
    (perf / "tp1").mkdir()
    for name in ("dense.csv", "per_sequence.csv", "attention.csv"):
        (perf / name).rename(perf / "tp1" / name)
    meta = META.replace("[1]", "[1, 2, 16]").replace("size: 14336", "size: 896")
    for size, rank in (("heads: 32", "heads: 2"), ("heads: 8", "heads: 1"), ("128256", "8016")):
        meta = meta.replace(size, rank)
    (perf / "meta.yaml").write_text(f"{meta}skew_fit: {{per_tp: {{1: {{alpha: 0.05}}}}}}\n")
    assert len(import_bundle("llmservingsim", perf, "llama-3-8b", 1).mixed) == 2
    (perf / "meta.yaml").write_text(meta.replace("heads: 1", "heads: 2"))
    said = "num_key_value_heads of meta-llama/Llama-3.1-8B is 2 on one of 16 ranks, but"
    with pytest.raises(BundleError, match=said):
        import_bundle("llmservingsim", perf, "llama-3-8b", 1)


# What is refused -------------------------------------------------------------------------------


def swap(old: str, new: str, count: int = -1) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, count)

    return change


MLP, ATTENTION_A6000 = "mlp_a100_Some-7b.csv", "attention_Llama-3.1-8B_tp1.csv"
WRONG: list[tuple[str, str, Callable[[str], str], str]] = [
    ("vidur", MLP, swap("num_tokens", "tokens"), "column 'num_tokens' is missing"),
    ("vidur", MLP, lambda t: t[:-5], "row 9 is truncated: the file does not end with a newline"),
    ("vidur", MLP, lambda t: t[: t.rindex(",")] + "\n", "row 9: num_tensor_parallel_workers must"),
    ("vidur", MLP, swap("True,256,2", "True,0,2"), "row 9: num_tokens must be at least 1"),
    ("vidur", MLP, swap("True,256,2", "True,2.5,2"), "row 9: num_tokens must be an integer"),
    ("vidur", MLP, swap("True,256,2", "True,2e56,2"), "row 9: num_tokens must be below 2"),
    ("vidur", MLP, swap("\n0.", "\n-0.", 1), "row 2: time_stats.emb.median must be positive"),
    ("vidur", MLP, lambda t: "", "not a valid CSV"),
    ("aic", "attention_decode_bf16.csv", swap("0.05", "NaN"),
     "row 2: latency_ms must be a finite number, got"),
    ("lss", ATTENTION_A6000, swap("32,96", "32,16"),
     "row 3: kv_cache_size 16 is less than the chunk of 32"),
    ("lss", ATTENTION_A6000, swap("True,1", "maybe,1", 1),
     "row 2: is_prefill must be True or False, got 'maybe'"),
    ("perf", "meta.yaml", swap("RTX4090\n", "ABACUS9\n"),
     "hardware ABACUS9: no shipped device is called so .*rtx-4090.*--device"),
    ("perf", "meta.yaml", swap("bf16", "fp8"),
     "variant 'fp8' is not modelled: must be one of bf16, fp16"),
    ("perf", "meta.yaml", swap("tp_degrees: [1]", "tp_degrees: [2]"),
     r"tp_degrees \[2\]: --tp 1 was not"),
    ("perf", "meta.yaml", swap("14336", "28672"),
     "intermediate_size of meta-llama/Llama-3.1-8B is 28672, but llama-3-8b has 14336"),
    ("perf", "dense.csv", swap("act_fn", "moe_act"), "dense.csv: no rows of act_fn; there are"),
    ("perf", "attention.csv", swap("kv_prefill", "prefill_key"), "column 'kv_prefill' is missing"),
    ("perf", "attention.csv", swap("0,0,4,16,10.0", "0,0,4,16,-1"),
     "row 4: time_us must be positive"),
]  # fmt: skip
SOURCE = {"vidur": "vidur", "aic": "aiconfigurator"}  # the others: llmservingsim


@pytest.mark.parametrize(("form", "file", "change", "message"), WRONG)
def test_a_file_that_is_wrong_is_named(
    request: pytest.FixtureRequest,
    form: str,
    file: str,
    change: Callable[[str], str],
    message: str,
) -> None:
    path = request.getfixturevalue(form) / file
    path.write_text(change(path.read_text()))
    model = "llama-2-7b" if form == "vidur" else "llama-3-8b"
    with pytest.raises(BundleError, match=message) as caught:
        import_bundle(
            SOURCE.get(form, "llmservingsim"), path.parent, model, 2 if form == "vidur" else 1
        )
    assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("form", "model", "tp", "device", "message"),
    [
        ("vidur", "llama-2-7b", 2, "a40", r"no mlp_a40_MODEL.csv.*devices there: a100; vid"),
        ("vidur", "gpt3-175b", 1, None, "no GEMM of gpt3-175b at tp 1.*run without profiles"),
        ("vidur", "llama-2-7b", 3, None, "tp 3 does not divide"),
        ("aic", "llama-3-8b", 1, "a40", "measured on a100-80g-sxm, not on a40"),
        ("lss", "gpt3-175b", 1, None, "no GEMM of gpt3-175b at tp 1.*run without profiles"),
        ("lss", "llama-3-8b", 1, "a40", "measured on a6000, not on a40"),
        ("perf", "llama-3-8b", 1, "a6000", "measured on RTX4090, not on a6000"),
    ],
)
def test_what_a_folder_does_not_have_is_said(
    request: pytest.FixtureRequest, form: str, model: str, tp: int, device: str | None, message: str
) -> None:
    with pytest.raises((BundleError, FileNotFoundError), match=message):
        folder = request.getfixturevalue(form)
        import_bundle(SOURCE.get(form, "llmservingsim"), folder, model, tp, device)


def test_folders_that_are_none(vidur: Path, tmp_path: Path) -> None:
    for source, folder, message in (
        ("vidor", vidur, r"unknown source 'vidor' \(did you mean vidur\?\)"),
        ("none", tmp_path, r"vidur \(Vidur's CSVs: mlp_"),
        ("vidur", tmp_path / "nowhere", "no such folder"),
        ("llmservingsim", tmp_path, r"none of its forms: layers_.*profiler/perf.*dense\.csv"),
    ):
        with pytest.raises(BundleError, match=message):
            import_bundle(source, folder, "llama-2-7b", 2)
    # A device without a calibrated model cannot fill in what the folder lacks.
    (vidur / MLP).rename(vidur / "mlp_h200_Some-7b.csv")
    with pytest.raises(BundleError, match=r"has no .*attn_prefill, attn_decode.*cannot fill"):
        import_bundle("vidur", vidur, "llama-2-7b", 1, "h200-sxm")


def test_a_nan_and_far_apart_repeats_name_their_rows(vidur: Path) -> None:
    for row, factor, message in (
        (5, np.nan, "row 7: time_stats.mlp_up_proj.median must be a finite"),
        (6, 3, "rows 7, 8 hold the same point.*num_tokens=128"),
    ):
        frame = mlp()
        frame.loc[row, "time_stats.mlp_up_proj.median"] *= factor
        frame.to_csv(vidur / MLP, index=False)
        with pytest.raises(BundleError, match=message):
            import_bundle("vidur", vidur, "llama-2-7b", 2)


def test_tables_that_are_missing_are_modelled_but_for_gemms(aic: Path) -> None:
    (aic / "attention_decode_bf16.csv").unlink()
    bundle = import_bundle("aiconfigurator", aic, "llama-3-8b", 1)
    assert marks(bundle)["attn_decode"].startswith("modelled: ")
    (aic / "gemm_bf16.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"gemm_bf16.csv: no such file"):
        import_bundle("aiconfigurator", aic, "llama-3-8b", 1)


def test_help_and_errors_say_which_files_a_source_reads(tmp_path: Path) -> None:
    def words(text: str) -> set[str]:
        return set(re.findall(r"[\w{},]+\.(?:csv|yaml)|\w+_perf\b", text))

    shown = CliRunner().invoke(app, ["import", "--help"]).stdout
    for name, source in SOURCES.items():
        assert words(source.forms) and words(source.forms) <= words(shown), name
        with pytest.raises((BundleError, FileNotFoundError)) as caught:
            import_bundle(name, tmp_path / "absent", "llama-3-8b", 1)
        assert source.forms in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises((BundleError, FileNotFoundError)) as caught:
            import_bundle(name, tmp_path, "llama-3-8b", 1)
        assert words(source.forms) <= words(str(caught.value)), "an empty folder"


# The real files --------------------------------------------------------------------------------


@pytest.mark.slow
@needs_datasets
@pytest.mark.parametrize(
    ("source", "folder", "model", "tp", "device", "interpolated"),
    [
        ("aiconfigurator", "aiconfigurator_a100_sxm", "gpt3-175b", 8, None, "preproj lm_head"),
        ("aiconfigurator", "aiconfigurator_a100_sxm", "llama-2-70b", 8, None, "preproj lm_head"),
        ("aiconfigurator", "aiconfigurator_a100_sxm", "llama-3-8b", 1, None,
         "ffn_ln1 ffn_ln2 lm_head"),
        ("llmservingsim", "llmservingsim_a6000", "llama-3-8b", 1, None, "preproj ffn_ln1"),
        ("llmservingsim", "llmservingsim_rtx4090", "llama-3-8b", 1, None, ""),
        ("vidur", "vidur", "llama-2-70b", 8, "a100-80g-sxm", ""),
        ("vidur", "vidur", "qwen-72b", 1, "a100-80g-sxm", ""),
        ("vidur", "vidur", "llama-2-7b", 1, "a40", ""),
        ("vidur", "vidur", "qwen-72b", 8, "a40", ""),
    ],
)  # fmt: skip
def test_the_real_folders(
    tmp_path: Path,
    source: str,
    folder: str,
    model: str,
    tp: int,
    device: str | None,
    interpolated: str,
) -> None:
    bundle = import_bundle(source, public_datasets() / folder, model, tp, device)
    write_bundle(bundle, tmp_path / "b")
    checked = check_folder(tmp_path / "b")
    assert not checked.failed, checked.findings
    kinds = {op: mark.partition(":")[0] for op, mark in marks(bundle).items()}
    if source == "vidur":
        for op in ("preproj", "postproj", "ffn_ln1", "ffn_ln2", "embedding"):
            assert kinds[op] == "measured"
        scaled = (model, device) == ("llama-2-70b", "a100-80g-sxm")
        assert kinds["attn_decode"] == ("scaled" if scaled else "modelled")
        assert len(times(bundle, "preproj")) == 259
    else:
        assert {op for op, kind in kinds.items() if kind == "interpolated"} == {
            *interpolated.split()
        }
        assert kinds["attn_prefill"] == kinds["attn_decode"] == "measured"
    if folder == "llmservingsim_rtx4090":
        # Decodes beside a chunk take about twice as long as alone.
        assert 0.8 < bundle_times(bundle).whole_layer.decode < 1.6


@needs_datasets
@pytest.mark.slow
def test_a_run_on_imported_data(tmp_path: Path) -> None:
    root = tmp_path / "profiles"
    bundle = import_bundle("vidur", public_datasets(), "llama-2-70b", 4)
    path = bundle_path(root, "a100-80g-sxm", "llama-2-70b", 4)
    write_bundle(bundle, path)
    assert load_bundle(path).meta.model_spec == load_model("llama-2-70b")
    config = tmp_path / "imported.yaml"
    config.write_text(
        f"""\
name: imported
model: llama-2-70b
device: a100-80g-sxm
profiles: {root}
workload: {{requests: 40, lengths: {{kind: fixed, prompt: 900, decode: 100}}}}
cluster: {{tp: 4, pp: 2, max_length: 2048}}
scenarios:
  orca: {{policy: {{name: orca, case: best}}}}
  sarathi: {{policy: {{name: sarathi, chunk_size: 256}}}}
"""
    )
    outcome = run_experiment(load_experiment(config), tmp_path / "run", figures=False)
    scenarios = outcome.summary()["scenarios"]
    assert all(scenario["finished"] == 40 for scenario in scenarios.values())
    assert all(5 < scenario["makespan_s"] < 60 for scenario in scenarios.values())
