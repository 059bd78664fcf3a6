"""The kernels that ship, and the bundles that are made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.lab.fit.bundles import wanted_ops
from sarathi_sim.profiler.bundle.check import check_bundle
from sarathi_sim.profiler.bundle.schema import Bundle, load_bundle, write_bundle
from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import STACKS, Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.kernels.attention_grid import alike
from sarathi_sim.profiler.kernels.stack_file import BLACKWELL, load_stack, stack_files, stacks_on
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import KINDS
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
        ("a100-80g-sxm", Kernels("vllm", "fp8"), LLAMA_8B, 1, "no gemm of vllm.*fp8; there: bf16"),
        ("a6000", Kernels("vllm"), LLAMA_8B, 1, "no kernels of stack vllm.*a6000; there: none"),
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
