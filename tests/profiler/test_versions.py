"""Kernels of a version of an engine: the nearest that was measured, with bands as wide as it is
far."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sarathi_sim.profiler.facts.formats import STACKS, Kernels, named_stack, release
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.roofline import HBM_SHARE
from sarathi_sim.profiler.kernels import stack_file
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.stack_file import load_stack, stored, versions_on
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import DOUBT

MODEL = load_model("llama-3-8b")


def test_releases_are_in_order() -> None:
    assert named_stack("vllm") == ("vllm", "")
    assert named_stack("sglang@0.5.6.post2") == ("sglang", "0.5.6.post2")
    for wrong in ("tgi", "vllm@", "vllm@new", "vllm@0.19@1"):
        with pytest.raises(ValueError, match="must be one of vllm, sglang, trtllm, with a version"):
            named_stack(wrong)
    versions = ["0.5.6", "0.5.6.post2", "0.5.10", "0.14.0", "0.24", "1.2.0rc5", "1.3.0rc20 (block)"]
    assert all(release(a) < release(b) for a, b in pairwise(versions))
    assert release("0.24") == release("0.24.0")


def test_each_table_is_of_the_nearest_version() -> None:
    newest = load_stack("b200-sxm", "vllm")[0].kernels
    assert versions_on("b200-sxm", "vllm") == ["0.19.0"]
    for asked, of_gemms in (("0.19.0", "0.19.0"), ("0.12", "0.19.0"), ("0.23", "0.24.0")):
        spec, arrays = load_stack("b200-sxm", f"vllm@{asked}")
        assert spec.kernels["gemm.bf16"].version == of_gemms
        assert spec.kernels["moe.bf16.balanced"].version == "0.24.0", "one version only"
        assert spec.kernels["gemm.bf16"].left_out.keys() == newest["gemm.bf16"].left_out.keys()
        for table in spec.kernels:
            family, _, rest = table.partition(".")
            assert any(name.startswith(f"{table}.") for name in arrays), table
            if family == "added":
                assert spec.kernels[table].version == spec.kernels[f"prefill.{rest}"].version


def test_bands_know_how_far_the_version_is() -> None:
    newest = load_stack("b200-sxm", "vllm")[0].kernels

    def widths(asked: str, table: str) -> list[float]:
        found = load_stack("b200-sxm", f"vllm@{asked}")[0].kernels[table].left_out
        return [one.half_width_pct for one in found.values()]

    for table in ("gemm.bf16", "prefill.bf16.128", "all_reduce.graph.2", "moe.bf16.balanced"):
        own = [one.half_width_pct for one in newest[table].left_out.values()]
        assert widths("0.24.0", table) == own
        drift = stack_file.drift_pct(table)
        far = np.hypot(own, drift)
        np.testing.assert_allclose(widths("0.10.2", table), far, atol=0.01)
        some = np.array(widths("0.22.0", table))
        assert (some > own).all() and (some < far).all()
    assert widths("0.10.2", "all_reduce.nccl.2") == [
        one.half_width_pct for one in newest["all_reduce.nccl.2"].left_out.values()
    ]


def test_a_server_has_the_times_of_its_version() -> None:
    now, then, later = (
        StackTimes("b200-sxm", Kernels("vllm", version=version), MODEL, 1)
        for version in ("", "0.19", "0.24")
    )
    chunk, context = np.array([2048.0]), np.array([0.0])
    assert now.prefill(chunk, context) == later.prefill(chunk, context)
    assert now.prefill(chunk, context) > 1.1 * then.prefill(chunk, context), "as was measured"
    hashes = {each.meta.content_sha256 for each in (now, then, later)}
    assert len(hashes) == 3 and then.kernels.name == "vllm@0.19-bf16"
    assert "vllm 0.19.0" in then.provenance()["preproj"].mark


def test_a_fused_all_reduce_is_tensorrt_llms_and_has_an_addition_less() -> None:
    """Up to its size; beyond it everything is as without fusion."""
    model = load_model("llama-3.3-70b")
    plain, fused = (
        StackTimes("b200-sxm", Kernels("vllm", fused_all_reduce_mb=size), model, 8)
        for size in (0.0, 8.0)
    )
    lender = StackTimes("b200-sxm", Kernels("trtllm"), model, 8)
    tokens = np.array([1.0, 16.0, 512.0, 513.0, 4096.0])
    num_bytes = 2.0 * model.hidden_size * tokens
    small = num_bytes <= 8 * 2**20
    assert small.tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(
        fused.all_reduce(num_bytes),
        np.where(small, lender.all_reduce(num_bytes), plain.all_reduce(num_bytes)),
    )
    rate = HBM_SHARE * plain.device.memory_bandwidth / 1e6
    additions = 2 * np.maximum(3 * num_bytes / rate, plain.spec.floor_us)  # x, residual, sum
    less = plain.by_rows("others", tokens) - fused.by_rows("others", tokens)
    np.testing.assert_allclose(less, np.where(small, additions, 0.0), atol=1e-9)
    assert "to 8 MiB trtllm's" in fused.provenance()["all_reduce"].mark
    alone = StackTimes("b200-sxm", Kernels("vllm", fused_all_reduce_mb=8.0), model, 1)
    one = StackTimes("b200-sxm", Kernels("vllm"), model, 1)
    assert (alone.by_rows("others", tokens) == one.by_rows("others", tokens)).all()


def test_a_table_of_another_kernel_is_not_taken() -> None:
    """0.14.0's fp8 has its quantisation inside; the next version's table stands for it."""
    spec, _ = load_stack("h100-80g-sxm", "vllm@0.10.2")
    assert spec.kernels["gemm.fp8"].version == "0.24.0"
    assert spec.kernels["gemm.bf16"].version == "0.14.0"
    assert spec.kernels["gemm.fp8"].kernel == "CutlassFP8ScaledMMLinearKernel"
    old = StackTimes("h100-80g-sxm", Kernels("vllm", "fp8", version="0.10.2"), MODEL, 1)
    said = "GEMM of vllm 0.24.0, between token counts; instead of 0.14.0's, which is with dynamic"
    assert said in old.provenance()["preproj"].mark
    blackwell, _ = load_stack("b200-sxm", "vllm@0.10.2")
    assert blackwell.kernels["gemm.nvfp4"].version == "0.19.0"
    assert blackwell.kernels["gemm.fp8"].version == "0.24.0"


def test_fp8_in_blocks_is_faster_than_bf16_or_says_that_it_is_in_doubt() -> None:
    """vLLM's own table of it on Hopper times a kernel that its server does not run."""
    model, one = load_model("qwen3-32b"), np.ones(1)
    for device in ("h100-80g-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200"):
        for stack in ("vllm", "sglang", "trtllm"):
            for dtype in ("fp8", "fp8_block"):
                try:
                    found = StackTimes(device, Kernels(stack, dtype), model, 2)  # type: ignore[arg-type]
                except ValueError:
                    continue
                usual = StackTimes(device, Kernels(stack), model, 2)  # type: ignore[arg-type]
                for op in ("preproj", "ffn_ln1", "ffn_ln2"):
                    origin = found.provenance()[op]
                    slower = found.by_rows(op, one) > usual.by_rows(op, one)
                    assert not slower or (DOUBT in origin.mark and origin.half_width_pct >= 25)
    ours, theirs = (
        StackTimes("h100-80g-sxm", Kernels(stack, "fp8_block"), model, 2)  # type: ignore[arg-type]
        for stack in ("vllm", "sglang")
    )
    assert ours.by_rows("ffn_ln1", one) == theirs.by_rows("ffn_ln1", one)
    old = StackTimes("h100-80g-sxm", Kernels("vllm", "fp8_block", version="0.16"), model, 2)
    assert old.by_rows("ffn_ln1", one) > ours.by_rows("ffn_ln1", one), "before its servers ran it"
    mark = ours.provenance()["ffn_ln1"].mark
    assert "or sglang's where faster" in mark and "DeepGEMM" in mark and mark.startswith("derived")


def test_gemms_of_two_versions_differ_by_their_drift() -> None:
    """Nine in ten medians over shapes and tokens, of every GPU with tables of two versions."""
    tokens = np.array([1.0, 8.0, 64.0, 512.0, 2048.0, 8192.0])
    shapes = [(n, k) for n in (1024, 2560, 7168, 14336) for k in (1024, 4096, 8192)]
    moved: dict[str, list[float]] = {"gemm.bf16": [], "gemm": []}
    for device in ("h100-80g-sxm", "h200-sxm", "b200-sxm"):
        for stack in STACKS:
            (newest, now), (older, then) = (
                load_stack(device, name)
                for name in (stack, f"{stack}@{versions_on(device, stack)[0]}")
            )
            for table, fit in older.kernels.items():
                same = fit.version == newest.kernels[table].version
                if table.startswith("gemm.") and not same and not fit.unlike:
                    new, old = (GemmLattice.from_arrays(stored(of, table)) for of in (now, then))
                    ratios = [old.time_us(tokens, *s) / new.time_us(tokens, *s) for s in shapes]
                    percent = 100 * abs(float(np.median(ratios)) - 1)
                    moved[table if table == "gemm.bf16" else "gemm"].append(percent)
    assert {kind: len(found) for kind, found in moved.items()} == {"gemm.bf16": 9, "gemm": 15}
    for kind, found in moved.items():
        most = stack_file.DRIFT_PCT[kind]
        assert 0.85 * most < np.quantile(found, 0.9) <= most
