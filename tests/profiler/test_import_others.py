"""aiconfigurator's and LLMServingSim's folders as bundles: traps by hand, and the real files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import Bundle, BundleError, write_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.ops import GemmShape
from sarathi_sim.profiler.facts.roofline import wave_fill
from sarathi_sim.profiler.importers.shapes import ShapePool
from sarathi_sim.profiler.importers.sources import SOURCES, import_bundle
from sarathi_sim.profiler.storage.files import DATASETS_VARIABLE, public_datasets

needs_datasets = pytest.mark.skipif(
    not os.environ.get(DATASETS_VARIABLE),
    reason=f"needs the public measurements: set {DATASETS_VARIABLE} to their folder",
)
M = (1, 128, 129, 1024)


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    pd.DataFrame(rows).to_csv(folder / name, index=False)


def times(bundle: Bundle, op: str) -> list[float]:
    rows: pd.DataFrame = bundle.linear[bundle.linear["op"] == op]
    return rows["time_us"].tolist()


@pytest.fixture
def aic(tmp_path: Path) -> Path:
    """Llama-3-8b at tp 1 wants (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)."""
    shapes = [(4096, 4096), (6144, 4096), (16384, 4096), (51200, 4096), (4096, 16384)]
    gemm: list[dict[str, object]] = [
        {"framework": who, "m": m, "n": n, "k": k, "latency_ms": factor * 1e-9 * n * k * (1 + m)}
        for who, factor in (("SGLang", 1.0), ("VLLM", 7.0))
        for n, k in shapes
        for m in M
    ]
    write(tmp_path, "gemm_bf16.csv", gemm)
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    base = {"framework": "VLLM", "isl": 1, "step": 1023, **heads}
    decode: list[dict[str, object]] = [
        {**base, "batch_size": 4, "latency_ms": 0.05},
        {**base, "batch_size": 8, "latency_ms": 0.06},
        # 16 sequences of 1023 tokens in 10 us: 6.7 TB/s, which only L2 can give.
        {**base, "batch_size": 16, "latency_ms": 0.01},
        {**base, "framework": "TRTLLM", "batch_size": 4, "latency_ms": 0.9},
    ]
    write(tmp_path, "attention_decode_bf16.csv", decode)
    first = {**base, "step": 0, "batch_size": 1}
    prefill: list[dict[str, object]] = [
        {**first, "isl": 128, "latency_ms": 0.03},
        {**first, "isl": 256, "latency_ms": 0.04},
        {**first, "isl": 256, "batch_size": 2, "latency_ms": 5.0},
    ]
    write(tmp_path, "attention_prefill_bf16.csv", prefill)
    nccl: list[dict[str, object]] = [
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
    assert times(bundle, "preproj") == pytest.approx(expected, rel=1e-5)
    marks = {op: str(mark) for op, mark in bundle.meta.environment.items()}
    assert marks["ffn_ln1"].startswith(
        "interpolated: (28672, 4096) over (n, k) by wave count from (16384, 4096), (51200, 4096)"
    )
    assert marks["ffn_ln2"].startswith(
        "interpolated: (4096, 14336) over (n, k) by wave count from (4096, 4096), (4096, 16384)"
    )
    assert "modelled" in marks["lm_head"]  # 128256 columns are too far from 51200
    # Context is ``step``; the row that beats the memory and the other framework are left out.
    assert bundle.attn_decode.to_numpy().tolist() == [[4, 1023, 50.0], [8, 1023, 60.0]]
    fresh = bundle.attn_prefill[bundle.attn_prefill["context_tokens"] == 0]
    assert fresh["time_us"].tolist() == [30.0, 40.0]
    by_context = bundle.attn_prefill[bundle.attn_prefill["chunk_tokens"] == 256]
    assert by_context["time_us"].is_monotonic_increasing
    assert "plus the calibrated device model's increase" in marks["attn_prefill"]


def test_nccl_sizes_are_elements_of_two_bytes(aic: Path) -> None:
    bundle = import_bundle("aiconfigurator", aic, "llama-3-8b", 2)
    assert bundle.all_reduce["num_bytes"].tolist() == [2048, 2**21]
    assert bundle.all_reduce["time_us"].tolist() == pytest.approx([10.001, 11.0486], rel=1e-4)


def test_aiconfigurator_files_that_are_missing_or_wrong(aic: Path) -> None:
    with pytest.raises(BundleError, match=r"measured on a100-80g-sxm, not on a40"):
        import_bundle("aiconfigurator", aic, "llama-3-8b", 1, "a40")
    path = aic / "attention_decode_bf16.csv"
    path.write_text(path.read_text().replace("0.05", "NaN"))
    with pytest.raises(BundleError, match=r"row 2: latency_ms must be a finite number, got"):
        import_bundle("aiconfigurator", aic, "llama-3-8b", 1)
    path.unlink()
    bundle = import_bundle("aiconfigurator", aic, "llama-3-8b", 1)
    assert str(bundle.meta.environment["attn_decode"]).startswith("modelled: ")
    (aic / "gemm_bf16.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"gemm_bf16.csv: no such file"):
        import_bundle("aiconfigurator", aic, "llama-3-8b", 1)


def test_interpolated_times_step_with_the_waves() -> None:
    """Where the measured times are a constant per wave of tiles, so are the interpolated ones."""
    device = load_device(
        "h200-sxm"
    )  # no calibrated model: the expectation is tiles and waves alone
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


@pytest.fixture
def lss(tmp_path: Path) -> Path:
    widths = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096, "gate_proj": 14336,
              "up_proj": 14336, "down_proj": 14336, "lm_head": 128256, "rope": 1}  # fmt: skip
    rows: list[dict[str, object]] = [
        {"layer_name": name, "input": m, "kv_cache": 0, "tp_size": 1,
         "latency(ns)": 20_000 + 2 * width * m}
        for name, width in widths.items()
        for m in M
    ]  # fmt: skip
    write(tmp_path, "layers_Llama-3.1-8B_tp1.csv", rows)
    first = {"is_prefill": True, "batch_size": 1, "time_stats.attn_decode.median": None}
    then = {"is_prefill": False, "prefill_chunk_size": 0, "time_stats.attn_prefill.median": None}
    attention: list[dict[str, object]] = [
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
    assert times(bundle, "postproj") == pytest.approx([20 + 2e-3 * 4096 * m for m in M], rel=1e-5)
    marks = {op: str(mark) for op, mark in bundle.meta.environment.items()}
    # The projections are separate in the file: QKV and gate + up are made from their neighbours.
    assert marks["preproj"].startswith("interpolated: (6144, 4096)")
    assert marks["ffn_ln1"].startswith("interpolated: (28672, 4096)")
    assert times(bundle, "postproj")[-1] < times(bundle, "preproj")[-1] < 20 + 2e-3 * 14336 * 1024
    assert marks["others"].startswith("modelled: ")  # its norms and rotary are unfused
    # kv_cache_size includes the chunk (prefill) and is the total of the batch (decode).
    assert bundle.attn_prefill.to_numpy().tolist() == [[32, 0, 4.0], [32, 64, 6.0]]
    assert bundle.attn_decode.to_numpy().tolist() == [[4, 1024, 80.0], [8, 1024, 90.0]]


def test_llmservingsim_refusals(lss: Path) -> None:
    with pytest.raises(BundleError, match=r"no GEMM of gpt3-175b at tp 1.*run without profiles"):
        import_bundle("llmservingsim", lss, "gpt3-175b", 1)
    with pytest.raises(BundleError, match="measured on a6000, not on a40"):
        import_bundle("llmservingsim", lss, "llama-3-8b", 1, "a40")
    path = lss / "attention_Llama-3.1-8B_tp1.csv"
    path.write_text(path.read_text().replace("32,96", "32,16"))
    with pytest.raises(BundleError, match=r"row 3: kv_cache_size 16 is less than the chunk of 32"):
        import_bundle("llmservingsim", lss, "llama-3-8b", 1)
    path.write_text(path.read_text().replace("True,1", "maybe,1", 1))
    with pytest.raises(BundleError, match=r"row 2: is_prefill must be True or False, got 'maybe'"):
        import_bundle("llmservingsim", lss, "llama-3-8b", 1)


@needs_datasets
@pytest.mark.parametrize(
    ("source", "folder", "model", "tp", "interpolated"),
    [
        ("aiconfigurator", "aiconfigurator_a100_sxm", "gpt3-175b", 8, {"preproj", "lm_head"}),
        ("aiconfigurator", "aiconfigurator_a100_sxm", "llama-2-70b", 8, {"preproj", "lm_head"}),
        ("aiconfigurator", "aiconfigurator_a100_sxm", "llama-3-8b", 1,
         {"ffn_ln1", "ffn_ln2", "lm_head"}),
        ("llmservingsim", "llmservingsim_a6000", "llama-3-8b", 1, {"preproj", "ffn_ln1"}),
    ],
)  # fmt: skip
def test_the_real_folders(
    tmp_path: Path, source: str, folder: str, model: str, tp: int, interpolated: set[str]
) -> None:
    bundle = import_bundle(source, public_datasets() / folder, model, tp)
    write_bundle(bundle, tmp_path / "b")
    checked = check_folder(tmp_path / "b")
    assert not checked.failed, checked.findings
    kinds = {op: str(mark).partition(":")[0] for op, mark in bundle.meta.environment.items()}
    assert {op for op, kind in kinds.items() if kind == "interpolated"} == interpolated
    assert kinds["attn_prefill"] == kinds["attn_decode"] == "measured"


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
    with pytest.raises(BundleError, match=r"vidur \(Vidur's CSVs: mlp_"):
        import_bundle("none", tmp_path, "llama-3-8b", 1)
