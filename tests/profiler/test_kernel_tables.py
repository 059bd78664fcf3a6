"""Reading the published kernel tables: units, versions, what is left out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from profiler.bundle.tables import BundleError
from profiler.public import kernel_tables as tables

GEMM = {"gemm_dtype": "bfloat16", "m": 8, "n": 512, "k": 1024, "latency": 0.004}
HEADS = {"num_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
DECODE = {
    **HEADS,
    "batch_size": 4, "isl": 1, "step": 255, "window_size": 0,
    "kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16", "latency": 0.01,
}  # fmt: skip


def put(root: Path, path: str, *rows: dict[str, object]) -> Path:
    file = root / "aiconfigurator" / "h100_sxm" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(rows)).to_parquet(file)
    return file


def test_the_newest_version_that_has_the_number_format_counts(tmp_path: Path) -> None:
    older = {**GEMM, "gemm_dtype": "int4_wo", "latency": 0.002}
    put(tmp_path, "gemm/trtllm/1.3.0rc5/gemm_perf.parquet", {**GEMM, "latency": 9.0}, older)
    put(tmp_path, "gemm/trtllm/1.3.0rc20/gemm_perf.parquet", GEMM)
    newest, before = tables.gemms(tmp_path, "h100-80g-sxm", "trtllm", "bf16")
    assert (newest[1], before[1]) == ("1.3.0rc20", "1.3.0rc5")
    assert newest[0].to_dict("records") == [{"m": 8, "n": 512, "k": 1024, "time_us": 4.0}]
    ((_, version),) = tables.gemms(tmp_path, "h100-80g-sxm", "trtllm", "int4_wo")
    assert version == "1.3.0rc5"
    assert list(tables.gemms(tmp_path, "h100-80g-sxm", "trtllm", "nvfp4")) == []
    assert list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16")) == []


def test_a_decode_holds_its_cached_tokens_and_the_new_one(tmp_path: Path) -> None:
    windowed = {**DECODE, "window_size": 128, "latency": 0.5}
    path = "attention/vllm/0.24.0/generation_attention_perf.parquet"
    put(tmp_path, path, DECODE, windowed, {**DECODE, "kv_cache_dtype": "fp8", "latency": 0.02})
    for kv_dtype, time_us in (("bf16", 10.0), ("fp8", 20.0)):
        found = tables.decode(tmp_path, "h100-80g-sxm", "vllm", kv_dtype)  # type: ignore[arg-type]
        assert found is not None
        (row,) = found[0].to_dict("records")
        assert (row["batch"], row["context"], row["time_us"]) == (4, 256, time_us)
        assert (row["heads"], row["kv_heads"], row["head_dim"]) == (8, 1, 128)


def test_with_an_fp8_cache_the_kernel_that_computes_in_fp8_counts(tmp_path: Path) -> None:
    row = {**DECODE, "batch_size": 1, "isl": 512, "step": 0, "kv_cache_dtype": "fp8"}
    rows = [{**row, "attn_dtype": a, "latency": t} for a, t in (("fp8", 0.02), ("bfloat16", 0.03))]
    put(tmp_path, "attention/sglang/0.5/context_attention_perf.parquet", *rows)
    found = tables.prefill(tmp_path, "h100-80g-sxm", "sglang", "fp8")
    assert found is not None
    assert found[0][["chunk", "time_us"]].to_numpy().tolist() == [[512, 20.0]]


def test_messages_are_bytes_and_kernels_apart(tmp_path: Path) -> None:
    row = {"num_gpus": 2, "message_size": 128, "latency": 0.004}
    custom = [
        {**row, "kernel_source": "vLLM_custom_graph"},
        {**row, "kernel_source": "vLLM_custom_eager", "latency": 0.02},
    ]
    put(tmp_path, "comm/vllm/0.24.0/custom_allreduce_perf.parquet", *custom)
    nccl = {**row, "nccl_dtype": "half", "op_name": "all_reduce", "latency": 0.006}
    put(tmp_path, "comm/nccl/2.29/nccl_perf.parquet", nccl, {**nccl, "op_name": "alltoall"})
    found = tables.all_reduces(tmp_path, "h100-80g-sxm", "vllm")
    times = {kernel: rows.to_dict("records") for kernel, (rows, _) in found.items()}
    assert times == {
        kernel: [{"num_bytes": 256, "gpus": 2, "time_us": time_us}]
        for kernel, time_us in (("graph", 4.0), ("eager", 20.0), ("nccl", 6.0))
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency": 0.0}, r"gemm_perf\.parquet: a latency must be positive, got 0\.0 ms at m=8"),
        ({"latency": float("nan")}, "must be positive, got nan"),
        ({"latency": "fast"}, "column 'latency' holds str"),
    ],
)
def test_a_cell_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    put(tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", {**GEMM, **change})
    with pytest.raises(BundleError, match=message):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    file = put(tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", {"gemm_dtype": "bfloat16", "m": 1})
    with pytest.raises(BundleError, match=r"column 'n' is missing; has \['gemm_dtype', 'm'\]"):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))
    file.write_bytes(b"no parquet")
    with pytest.raises(BundleError, match=r"gemm_perf\.parquet: not a parquet table"):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))
    with pytest.raises(FileNotFoundError, match="l40s: no such folder"):
        list(tables.gemms(tmp_path, "l40s", "vllm", "bf16"))
