"""Reading the published kernel tables: units, versions, what is left out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.lab.fit.kernels import latent_rows
from sarathi_sim.experiments.lab.sources import aiconfigurator as tables
from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.stack_attention import LESS
from tests.sampled import put_table

pytestmark = pytest.mark.lab
GEMM = {"gemm_dtype": "bfloat16", "m": 8, "n": 512, "k": 1024, "latency": 0.004}
HEADS = {"num_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
DECODE = {
    **HEADS,
    "batch_size": 4, "isl": 1, "step": 255, "window_size": 0,
    "kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16", "latency": 0.01,
}  # fmt: skip


def test_the_newest_version_that_has_the_number_format_counts(tmp_path: Path) -> None:
    older = {**GEMM, "gemm_dtype": "int4_wo", "latency": 0.002}
    put_table(tmp_path, "gemm/trtllm/1.3.0rc5/gemm_perf.parquet", {**GEMM, "latency": 9.0}, older)
    put_table(tmp_path, "gemm/trtllm/1.3.0rc20/gemm_perf.parquet", GEMM)
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
    put_table(
        tmp_path, path, DECODE, windowed, {**DECODE, "kv_cache_dtype": "fp8", "latency": 0.02}
    )
    for kv_dtype, time_us in (("bf16", 10.0), ("fp8", 20.0)):
        found = tables.decode(tmp_path, "h100-80g-sxm", "vllm", kv_dtype)  # type: ignore[arg-type]
        assert found is not None
        (row,) = found[0].to_dict("records")
        assert (row["batch"], row["context"], row["time_us"]) == (4, 256, time_us)
        assert (row["heads"], row["kv_heads"], row["head_dim"]) == (8, 1, 128)


def test_with_an_fp8_cache_the_kernel_that_computes_in_fp8_counts(tmp_path: Path) -> None:
    row = {**DECODE, "batch_size": 1, "isl": 512, "step": 0, "kv_cache_dtype": "fp8"}
    rows = [{**row, "attn_dtype": a, "latency": t} for a, t in (("fp8", 0.02), ("bfloat16", 0.03))]
    rows += [{**rows[0], "batch_size": 8, "latency": 0.05}, {**rows[0], "step": 9}]
    put_table(tmp_path, "attention/sglang/0.5/context_attention_perf.parquet", *rows)
    found = tables.prefill(tmp_path, "h100-80g-sxm", "sglang", "fp8")
    assert found is not None
    assert found[0][["batch", "chunk", "time_us"]].to_numpy().tolist() == [
        [1, 512, 20.0],
        [8, 512, 50.0],
    ]


def test_messages_are_bytes_and_kernels_apart(tmp_path: Path) -> None:
    row = {"num_gpus": 2, "message_size": 128, "latency": 0.004}
    custom = [
        {**row, "kernel_source": "vLLM_custom_graph"},
        {**row, "kernel_source": "vLLM_custom_eager", "latency": 0.02},
    ]
    put_table(tmp_path, "comm/vllm/0.24.0/custom_allreduce_perf.parquet", *custom)
    nccl = {**row, "nccl_dtype": "half", "op_name": "all_reduce", "latency": 0.006}
    put_table(tmp_path, "comm/nccl/2.29/nccl_perf.parquet", nccl, {**nccl, "op_name": "alltoall"})
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
def test_impossible_cells(tmp_path: Path, change: dict[str, object], message: str) -> None:
    put_table(tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", {**GEMM, **change})
    with pytest.raises(BundleError, match=message):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    file = put_table(
        tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", {"gemm_dtype": "bfloat16", "m": 1}
    )
    with pytest.raises(BundleError, match=r"column 'n' is missing; has \['gemm_dtype', 'm'\]"):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))
    file.write_bytes(b"no parquet")
    with pytest.raises(BundleError, match=r"gemm_perf\.parquet: not a parquet table"):
        list(tables.gemms(tmp_path, "h100-80g-sxm", "vllm", "bf16"))
    with pytest.raises(FileNotFoundError, match="l40s: no such folder"):
        list(tables.gemms(tmp_path, "l40s", "vllm", "bf16"))


def test_windows_are_tables_of_their_own(tmp_path: Path) -> None:
    path = "attention/vllm/0.24.0/generation_attention_perf.parquet"
    put_table(tmp_path, path, DECODE, {**DECODE, "window_size": 128, "latency": 0.5})
    without = {key: value for key, value in DECODE.items() if key != "window_size"}
    put_table(tmp_path, path.replace("vllm/0.24.0", "sglang/0.5"), without)

    def times(stack: str, window: int) -> list[float]:
        found = tables.decode(tmp_path, "h100-80g-sxm", stack, "bf16", window)
        return [] if found is None else found[0]["time_us"].tolist()

    assert [times("vllm", window) for window in (0, 128, 64)] == [[10.0], [500.0], []]
    assert [times("sglang", window) for window in (0, 128)] == [[10.0], []]


MLA = {"num_heads": 16, "batch_size": 4, "isl": 1, "step": 255, "kv_cache_dtype": "bfloat16",
       "mla_dtype": "bfloat16", "latency": 0.02}  # fmt: skip


def test_latent_attention_is_the_kernel_or_the_block_less_its_gemms(tmp_path: Path) -> None:
    """GEMMs of 10 us each; of a single token's block 50 us are launches, but for 10 us."""
    alone = "mla/sglang/0.5/generation_mla_perf.parquet"
    put_table(tmp_path, alone, MLA, {**MLA, "kv_cache_dtype": "fp8", "latency": 0.03})
    ten = GemmLattice(
        np.array([256.0, 1e5]), np.array([256.0, 1e5]), np.array([1.0, 1e6]), np.zeros((2, 2, 2))
    )
    object.__setattr__(ten, "time_us", lambda m, n, k: 10.0 + 0 * m)
    found = latent_rows((tmp_path, "h100-80g-sxm", "sglang"), "decode", "bf16", None)
    assert found is not None and found[1] == "0.5"
    assert found[0].to_dict("records") == [
        {"heads": 16, "batch": 4, "context": 256, "time_us": 20.0, "kv_heads": 1}
    ]
    block = {**MLA, "gemm_type": "bfloat16"}
    single = {**block, "batch_size": 1, "step": 1, "latency": 0.1}
    other = {**block, "gemm_type": "fp8_block", "latency": 9.0}
    put_table(tmp_path, "mla/vllm/0.24.0/mla_generation_module_perf.parquet",
        single, other, {**block, "latency": 0.2})  # fmt: skip
    prompt = {**block, "batch_size": 1, "isl": 512, "step": 0, "latency": 0.3}
    put_table(tmp_path, "mla/vllm/0.24.0/mla_context_module_perf.parquet", prompt)
    for kind, expected in (("decode", [10.0, 110.0]), ("prefill", [210.0])):
        found = latent_rows((tmp_path, "h100-80g-sxm", "vllm"), kind, "bf16", ten)
        assert found is not None and found[1] == f"0.24.0 {LESS}"
        assert found[0]["time_us"].tolist() == pytest.approx(expected)
        assert set(found[0]["kv_heads"]) == ({1} if kind == "decode" else {16})
    assert latent_rows((tmp_path, "h100-80g-sxm", "vllm"), "decode", "bf16", None) is None
    assert latent_rows((tmp_path, "h100-80g-sxm", "trtllm"), "decode", "bf16", ten) is None


def test_the_l2_of_every_device_with_tables_is_known() -> None:
    """Rows whose weights the loop found in L2 are cleaned by its size."""
    assert [name for name in tables.SYSTEMS if not load_device(name).l2_bytes] == []
