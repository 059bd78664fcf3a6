"""The kernels that ship, and the bundles that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.lab.fit.bundles import wanted_ops
from sarathi_sim.profiler.bundle.check import check_bundle
from sarathi_sim.profiler.bundle.schema import Bundle, load_bundle, write_bundle
from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import (
    KV_DTYPES,
    MOE_SPEEDUP,
    SPEEDUP,
    STACKS,
    WEIGHT_DTYPES,
    Kernels,
    exponent_of,
    named_stack,
    release,
)
from sarathi_sim.profiler.facts.layer_kinds import busiest
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, MOE, OPS
from sarathi_sim.profiler.facts.roofline import HBM_SHARE, Array
from sarathi_sim.profiler.kernels import stack_file
from sarathi_sim.profiler.kernels.attention_grid import alike
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.stack_file import (
    BLACKWELL,
    load_stack,
    stack_files,
    stacks_on,
    stored,
    versions_on,
)
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import DOUBT, KINDS
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.op_times.op_times import OpTimes
from tests.sampled import stack_bundle

MEASURED = (
    *("a100-80g-sxm", "b200-sxm", "b300-sxm", "gb200", "h100-80g-sxm", "h200-sxm", "l40s"),
    "rtx-pro-6000",
)
MIXTRAL = load_model("mixtral-8x7b")
SIX = replace(MIXTRAL, experts=replace(MIXTRAL.experts, num_experts=6))  # type: ignore[type-var]
LLAMA_8B, LLAMA_70B = load_model("llama-3.1-8b"), load_model("llama-3.3-70b")


def made(dtype: str = "bf16", kv: str = "bf16", tp: int = 4, stack: str = "vllm") -> Bundle:
    kernels = Kernels(stack, dtype, kv)  # type: ignore[arg-type]
    return stack_bundle("h100-80g-sxm", LLAMA_70B, tp, kernels)


def test_every_measured_device_has_every_stack_and_they_are_small() -> None:
    with_stacks = {name: stacks_on(name) for name in list_devices() if stacks_on(name)}
    assert with_stacks.pop("rtx-4090") == ["vllm"], "LLMServingSim's profile"
    assert with_stacks == dict.fromkeys(sorted([*MEASURED, "a100-40g-sxm"]), sorted(STACKS))
    sizes = [p.stat().st_size for d in MEASURED for s in STACKS for p in stack_files(d, s)]
    assert max(sizes) < 1_000_000 and sum(sizes) < 12_000_000


@pytest.mark.parametrize("device", MEASURED)
def test_what_ships_is_plain_numbers_with_its_origin(device: str) -> None:
    for stack in STACKS:
        spec, arrays = load_stack(device, stack)
        assert (spec.device, spec.stack) == (device, stack)
        assert "aiconfigurator @" in spec.origin and spec.licence == "Apache-2.0"
        assert all(array.dtype.kind == "i" for array in arrays.values())
        assert all(arrays[name] is arrays[name] for name in arrays), "unpacked once"
        assert not any(array.flags.writeable for array in arrays.values())
        assert {name.rpartition(".")[0] for name in arrays} == set(spec.kernels)
        assert all(fit.version and fit.rows and fit.left_out for fit in spec.kernels.values())


def test_a_run_gets_what_the_tables_give() -> None:
    """To the last bit, at sizes that were not measured: windows, calls of several and a mean layer
    included."""
    model, rows = load_model("gemma-3-12b"), np.array([1.0, 237.0, 5001.0])
    times = StackTimes("h100-80g-sxm", Kernels("vllm"), model, 2)
    ops, windows = modelled_times(times), model.windows
    for op in model.row_ops:
        assert np.array_equal(ops.by_rows[op](rows), 1e-6 * times.by_rows(op, rows)), op
    assert windows is not None
    share, everywhere = windows.layers / model.num_layers, replace(windows, layers=model.num_layers)
    assert 0 < share < 1
    whole, near = (
        StackTimes("h100-80g-sxm", Kernels("vllm"), replace(model, windows=of), 2).decode(
            rows, 7 * rows
        )
        for of in (None, everywhere)
    )
    mean = 1e-6 * ((1 - share) * whole + share * near)
    np.testing.assert_allclose(ops.decode(rows, 7 * rows), mean, rtol=1e-12)
    assert ops.all_reduce is not None
    assert ops.all_reduce(12345.0) == 1e-6 * times.all_reduce(np.array([12345.0]))[0]
    assert np.array_equal(ops.together.added(rows), 1e-6 * times.added(rows))
    assert ops.together.added(rows).shape == (len(times.batches), 3)
    other = StackTimes("h100-80g-sxm", Kernels("vllm", "fp8"), model, 2)
    assert ops.meta.content_sha256 != other.meta.content_sha256


def test_a_bundle_says_of_every_op_where_it_came_from(tmp_path: Path) -> None:
    bundle = made("fp8", "fp8")
    write_bundle(bundle, tmp_path / "b")
    again = load_bundle(tmp_path / "b")
    meta = again.meta
    assert meta.kernels is not None and meta.kernels.used == Kernels("vllm", "fp8", "fp8")
    for op in wanted_ops(4):
        assert str(meta.environment[op]).partition(":")[0] in KINDS, op
        assert 0 < meta.kernels.half_width_pct[op] < 40
    assert "fp8 GEMM of vllm" in str(meta.environment["ffn_ln1"])
    assert "bf16 GEMM of vllm" in str(meta.environment["lm_head"])
    origins = StackTimes("h100-80g-sxm", Kernels("vllm"), LLAMA_8B, 1).provenance()
    places = {"preproj": "between token counts", "ffn_ln2": "between (n, k)", "lm_head": "beyond"}
    widths = [origins[op].half_width_pct for op in places]
    assert widths == sorted(set(widths))
    for op, place in places.items():
        assert place in origins[op].mark
    assert "formula, no data" in str(meta.environment["send_recv_inter_node"])
    write_bundle(made("fp8", "fp8"), tmp_path / "again")
    assert (tmp_path / "b/meta.yaml").read_bytes() == (tmp_path / "again/meta.yaml").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind", "layers", "least"),
    [
        ("qwen3.5-397b-a17b", "measured", "; 45 of 60 layers recurrent, measured 0.24.0", 10),
        (
            "nemotron-3-nano",
            "derived",
            "; 23 of 29 layers recurrent, as 0.24.0's gated delta nets of as many numbers "
            "(assumed)",
            60,
        ),
    ],
)
def test_provenance_names_recurrent_layers(name: str, kind: str, layers: str, least: float) -> None:
    """The band is the wider one of attention's and the state's tables."""
    times = StackTimes("h200-sxm", Kernels("vllm"), load_model(name), 4)
    for op in ("attn_prefill", "attn_decode"):
        origin = times.provenance()[op]
        assert origin.kind == kind and origin.mark.endswith(layers)
        state = times.spec.kernels[f"{op.removeprefix('attn_')}.state.gdn"].left_out["sizes"]
        assert origin.half_width_pct >= max(least, state.half_width_pct)


def test_number_formats_change_what_they_should() -> None:
    bf16, fp8, fp8_kv = (made(*formats) for formats in (("bf16",), ("fp8",), ("fp8", "fp8")))

    def rows(bundle: Bundle, op: str) -> np.ndarray:
        return bundle.linear.query("op == @op and num_tokens <= 64")["time_us"].to_numpy()

    assert 0.45 < (rows(fp8, "ffn_ln1") / rows(bf16, "ffn_ln1")).mean() < 0.75
    for op in ("lm_head", "others", "embedding"):
        np.testing.assert_array_equal(rows(bf16, op), rows(fp8, op))
    long = "batch_size == 256 and context_tokens == 8192"
    times = [b.attn_decode.query(long)["time_us"].item() for b in (bf16, fp8, fp8_kv)]
    assert times[0] == times[1] and 0.4 < times[2] / times[0] < 0.7


def test_a_captured_batch_and_a_larger_one_take_different_all_reduces() -> None:
    times = StackTimes("h100-80g-sxm", Kernels("vllm"), LLAMA_8B, 8)
    edge = times.captured_bytes
    assert edge == 2 * 512 * LLAMA_8B.hidden_size
    small, at, beyond = times.all_reduce(np.array([1024.0, edge, edge + 1]))
    assert small < 8 and 1.05 * at < beyond < 1.2 * at  # the message is copied


def test_a_chunk_after_a_prefix_has_its_pairs_and_reads_its_cache() -> None:
    times = StackTimes("h100-80g-sxm", Kernels("vllm"), LLAMA_8B, 1)
    one = np.ones(1)
    for chunk, context in ((512, 0), (512, 8192), (1, 65536)):
        found = times.prefill(chunk * one, context * one)[0]
        length = alike(chunk * one, context * one)
        # As many pairs, half a block of keys a row included.
        wanted = chunk * (context + chunk / 2 + 64)
        assert length * (length / 2 + 64) == pytest.approx(wanted)
        pairs = times.prefill(length, 0 * one)[0]
        reading = times.decode(one, (chunk + context) * one)[0]
        assert found == pytest.approx(max(pairs, reading) if context else pairs)


def test_a_chunk_after_a_prefix_takes_no_less_than_alone() -> None:
    """B200, TensorRT-LLM, 16 query and 2 KV heads: 96 tokens were measured to take less than 64."""
    kernels, model = Kernels("trtllm", "fp8", "fp8"), load_model("llama-3-70b")
    times = StackTimes("b200-sxm", kernels, model, 4)
    chunk, context = np.array([64.0, 96.0]), np.array([[0.0], [32.0]])
    alone, after = times.prefill(chunk, context)
    assert alone[1] >= alone[0] and (after >= alone).all()
    # H200, 8 heads of latent attention: 128 tokens were measured to take 38 times as long as 256.
    kernels, model = Kernels("trtllm"), load_model("kimi-k2")
    times = StackTimes("h200-sxm", kernels, model, 8)
    chunk = np.array([128.0, 256.0])
    short, longer = times.prefill(chunk, np.zeros_like(chunk))
    assert 0.5 * longer < short < 1.1 * longer


def test_short_prompts_in_one_call_take_little_more_than_one() -> None:
    """H100, vLLM, 16 query and 2 KV heads, measured: 64 tokens 13.8 us, 16 times that 17 us; 4096
    tokens 131 us, 16 times that 2,003 us."""
    ops = modelled_times(StackTimes("h100-80g-sxm", Kernels("vllm"), LLAMA_70B, 4))
    chunk = np.array([64.0, 4096.0])
    alone, sixteen = ops.prefill(chunk, 0.0), 16 * _added(ops, 16, chunk)
    assert sixteen[0] < 2 * alone[0]
    assert 0.9 < sixteen[1] / (16 * alone[1]) <= 1
    within = StackTimes("h100-80g-sxm", Kernels("vllm"), load_model("gemma-3-12b"), 1)
    many = _added(modelled_times(within), 256, 2.0 ** np.arange(4, 14))
    assert (np.diff(many) > 0).all()
    without = StackTimes("rtx-4090", Kernels("vllm"), LLAMA_8B, 1)
    assert len(without.batches) == 0  # not measured: prompts are summed


def _added(ops: OpTimes, batch: int, chunk: Floats) -> Floats:
    together = ops.together
    return np.asarray(together.added(chunk)[together.batches.tolist().index(batch)])


def test_the_same_chip_with_slower_memory_is_slower_where_memory_bounds_it() -> None:
    base, derived = (
        StackTimes(device, Kernels("vllm"), LLAMA_8B, 1)
        for device in ("a100-80g-sxm", "a100-40g-sxm")
    )
    tokens = np.array([1.0, 8192.0])
    ratio = derived.by_rows("ffn_ln1", tokens) / base.by_rows("ffn_ln1", tokens)
    assert ratio[0] == pytest.approx(2039 / 1555, rel=0.05) and ratio[1] == 1.0
    assert derived.provenance()["ffn_ln1"].mark.startswith("derived: from a100-80g-sxm")


@pytest.mark.parametrize(
    ("device", "kernels", "model", "tp", "message"),
    [
        ("a100-80g-sxm", Kernels("vllm", "fp8"), LLAMA_8B, 1, "no gemm of vllm.*; measured: bf16"),
        ("a6000", Kernels("vllm"), LLAMA_8B, 1, "no kernels of stack vllm.*a6000; fitted: none"),
        ("rtx-4090", Kernels("vllm"), LLAMA_8B, 2, "no all_reduce of vllm"),
        ("h100-80g-sxm", Kernels("vllm"), load_model("gpt3-175b"), 5, "tp 5 does not divide"),
        ("h100-80g-sxm", Kernels("sglang", "fp8"), load_model("qwen3-30b-a3b"), 1,
         "no moe of sglang was measured .*fp8.power_law_1.2"),
        ("h100-80g-sxm", Kernels("vllm", expert_parallel=True), SIX, 4,
         "tp 4 does not divide num_experts .6.; allowed here: expert_parallel: false"),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_refused(
    device: str, kernels: Kernels, model: object, tp: int, message: str
) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        StackTimes(device, kernels, model, tp)  # type: ignore[arg-type]
    StackTimes("h100-80g-sxm", Kernels("vllm", expert_parallel=True), MIXTRAL, 1)  # as they are


def test_an_autotuned_format_takes_the_fastest_of_the_published_kernels() -> None:
    """TensorRT-LLM's nvfp4 table holds one kernel; its server chooses among several."""
    tokens = np.array([1.0, 64.0, 4096.0])
    alone = {
        stack: StackTimes("b200-sxm", Kernels(stack, "nvfp4", "fp8"), LLAMA_70B, 4)  # type: ignore[arg-type]
        for stack in STACKS
    }
    times = {stack: one.by_rows("ffn_ln2", tokens) for stack, one in alone.items()}
    assert np.array_equal(times["trtllm"], np.minimum(times["trtllm"], times["vllm"]))
    assert (
        times["trtllm"][0] < 0.8 * alone["trtllm"]._gemm("ffn_ln2").time_us(tokens, 8192, 7168)[0]
    )
    assert "sglang or vllm's where faster" in alone["trtllm"].provenance()["ffn_ln2"].mark
    assert "where faster" not in alone["vllm"].provenance()["ffn_ln2"].mark
    assert "where faster" not in alone["trtllm"].provenance()["lm_head"].mark


@pytest.mark.parametrize("device", BLACKWELL)
def test_sglang_runs_the_fastest_gemms_in_fp8_blocks_on_blackwell(device: str) -> None:
    """Its table takes 14 us for a GEMM that reads 5 MB, on Hopper 5 us; TensorRT-LLM's takes 6."""
    model, one = load_model("deepseek-r1"), np.array([4.0])

    def q_up(device: str, stack: Any) -> float:
        times = StackTimes(device, Kernels(stack, "fp8_block", "fp8"), model, 8)
        return float(times.by_rows("q_up", one)[0])

    assert q_up(device, "sglang") == q_up(device, "trtllm") < 8
    times = StackTimes(device, Kernels("sglang", "fp8_block", "fp8"), model, 8)
    assert times._gemm("q_up").time_us(one, 3072, 1536)[0] > 13
    assert "trtllm" in times.provenance()["q_up"].mark
    assert "where faster" not in times.provenance()["lm_head"].mark
    hopper = StackTimes("h200-sxm", Kernels("sglang", "fp8_block", "bf16"), model, 8)
    assert "where faster" not in hopper.provenance()["q_up"].mark


def test_a_profile_of_one_model_is_a_stack_of_one_gpu() -> None:
    """RTX 4090: chunks after a prefix and elementwise kernels were measured there."""
    times = StackTimes("rtx-4090", Kernels("vllm"), LLAMA_8B, 1)
    origins = times.provenance()
    assert origins["ffn_ln1"].mark == "measured: bf16 GEMM of vllm 0.19.0, between token counts"
    assert origins["attn_prefill"].mark.endswith("chunks after a prefix measured")
    assert origins["others"].mark.startswith("interpolated: elementwise kernels of vllm 0.19.0")
    assert "llmservingsim" in times.spec.origin.lower() and times.spec.licence == "MIT"
    bundle = stack_bundle("rtx-4090", LLAMA_8B, 1, Kernels("vllm"), max_tokens=4096)
    found = check_bundle(bundle, load_device("rtx-4090"))
    assert [f for f in found if f.level == "error"] == []
    with pytest.raises(SpecError, match=r"no all_reduce of vllm was measured on rtx-4090"):
        StackTimes("rtx-4090", Kernels("vllm"), LLAMA_8B, 2)


# Kernels of a version of an engine: the nearest that was measured, with bands as wide as it is far

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


# No op is faster than memory delivers its weights and cache, or than matrix units multiply

#: Clocks above the data sheet's, and what of the activations a kernel finds in L2.
LEAST = 0.9
MODELS = ("llama-3-8b", "gemma-3-12b", "qwen3-30b-a3b", "gpt-oss-120b", "qwen3-next-80b-a3b")
TOKENS = np.unique(np.round(2 ** np.arange(0, 13.1, 0.5)))
CONTEXTS = np.round(2 ** np.arange(0, 17.1, 1.0))


def floors(times: StackTimes) -> Iterator[tuple[str, Array, Array]]:
    """(op, times, what they are at least) of every op that reads weights or a cache, or sends."""
    kernels, device, model, tp = times.kernels, times.device, times.model, times.tp
    number, us = kernels.number_bytes, 1e6 / device.memory_bandwidth
    for op, shape in model.gemms(tp).items():
        own = OPS[op].split
        weight, speed = (number.weight, SPEEDUP[kernels.dtype]) if own else (2.0, 1.0)
        rows = TOKENS * (weight * shape.k + 2.0 * shape.n)
        read = us * (weight * shape.n * shape.k + rows)
        product = 2e6 * TOKENS * shape.n * shape.k / (device.peak_flops * speed)
        yield op, times.by_rows(op, TOKENS), np.maximum(read, product)
    mix = model.experts
    if mix is not None:
        at, ranks = tuple(TOKENS.tolist()), tp if kernels.expert_parallel else 1
        spread = exponent_of(kernels.expert_distribution)
        rows, touched, _ = busiest(mix.num_experts, mix.top_k, ranks, at, spread)
        numbers = 3.0 * model.hidden_size * mix.intermediate_size * ranks / tp
        read = us * number.expert_weight * touched * numbers
        product = 2e6 * rows * numbers / (device.peak_flops * MOE_SPEEDUP[kernels.experts_in])
        yield MOE, times.by_rows(MOE, TOKENS), np.maximum(read, product)
    cached, sparse, recurrent = model.cached_bytes(tp, number.kv), model.indexer, model.recurrent

    def read_bytes(context: Array) -> Array:
        """What a decode of a sequence reads in a mean layer; a state is written, too."""
        if sparse is not None:
            near = np.minimum(context, sparse.top_k)
            return sparse.key_bytes * context + (cached - sparse.key_bytes) * near
        state = 2 * recurrent.state_bytes(tp) / cached if recurrent is not None else 0.0
        return cached * model.kept_tokens(context, state)

    batch, context = (each.ravel() for each in np.meshgrid(TOKENS[:17], CONTEXTS))
    yield "decode", times.decode(batch, context), us * batch * read_bytes(context)
    chunk, context = (each.ravel() for each in np.meshgrid(TOKENS, np.append(0, CONTEXTS[4::2])))
    flops = model.attention_flops_per_pair * model.pairs(chunk, context, edge=0.0) / tp
    product = 1e6 * flops / (device.peak_flops * (1.0 if number.kv == 2 else 2.1))
    read = us * (read_bytes(context) if sparse is None else sparse.key_bytes * context)
    yield "prefill", times.prefill(chunk, context), np.maximum(product, read)
    if tp > 1:
        sizes = 2.0 ** np.arange(8, 30)
        link = 1e6 * sizes * (tp - 1) / tp / device.intra_node.bandwidth
        yield ALL_REDUCE, times.all_reduce(sizes), link


def combinations(models: tuple[str, ...], degrees: tuple[int, ...]) -> Iterator[StackTimes]:
    """Every device, stack and number format, measured or borrowed, with each of ``models`` and
    ``degrees`` that runs."""
    for device in list_devices():
        for stack in stacks_on(device) if not load_device(device).same_chip else ():
            spec = load_stack(device, stack)[0]
            measured = spec.having("gemm")
            formats = measured + [name for name in WEIGHT_DTYPES if name not in measured]
            for number, dtype in enumerate(formats):
                for name in models:
                    for tp in degrees:
                        kv = KV_DTYPES[number % 2]
                        model = load_model(name)
                        try:
                            yield StackTimes(
                                device, Kernels(stack, dtype, kv, model.moe_dtype), model, tp
                            )
                        except ValueError:
                            continue


def slowest_share(models: tuple[str, ...], degrees: tuple[int, ...]) -> tuple[float, int, str]:
    """The least share of a floor that any op takes, of how many points, and where."""
    least, points, where = np.inf, 0, ""
    for times in combinations(models, degrees):
        for op, us, floor in floors(times):
            share = us / np.maximum(floor, 1e-12)
            points += share.size
            if share.min() < least:
                least = float(share.min())
                where = f"{times.device.name} {times.kernels.name} {times.model.name} {op}"
    return least, points, where


SLOW = pytest.mark.slow
CASES = [
    (("qwen3-32b",), (4,), 40_000),
    pytest.param(MODELS, (1, 2, 8), 300_000, marks=SLOW),
    pytest.param(("qwen3-next-80b-a3b", "glm-5"), (8,), 30_000, marks=SLOW),
]


@pytest.mark.parametrize(("models", "degrees", "most"), CASES)
def test_no_op_is_faster_than_memory_and_matrix_units(models: Any, degrees: Any, most: int) -> None:
    least, points, where = slowest_share(models, degrees)
    assert least > LEAST - 1e-3 and points > most, (least, points, where)
