"""Surfaces of experts: what they pass through, what unlike shapes get, and a stack's op times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.lab.sources import aiconfigurator as kernel_tables
from sarathi_sim.profiler.bundle.check import check_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import Kernels, Stack, WeightDtype
from sarathi_sim.profiler.facts.layer_kinds import busiest
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_TO_ALL, MOE
from sarathi_sim.profiler.facts.roofline import HBM_SHARE
from sarathi_sim.profiler.kernels import moe_surface as moe
from sarathi_sim.profiler.kernels.message_curves import ReduceCurve
from sarathi_sim.profiler.kernels.stack_file import load_stack
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import DOUBT
from sarathi_sim.profiler.storage.files import public_datasets
from tests.sampled import needs_datasets, put_table, stack_bundle

RATES = moe.Rates(1e15, 3e12, 2.0)
TOKENS = [1, 4, 16, 64, 256, 1024, 4096]
MODELS = [(2048, 768, 8, 128), (4096, 1536, 8, 128), (4096, 14336, 2, 8), (3072, 1024, 8, 256)]
QWEN = load_model("qwen3-30b-a3b")
ROW = {
    "moe_dtype": "bfloat16", "hidden_size": 2048, "inter_size": 768, "topk": 8,
    "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 4, "distribution": "balanced",
    "num_tokens": 64, "kernel_source": "cutlass", "latency": 0.05,
}  # fmt: skip


def rows() -> pd.DataFrame:
    """Measured times: 1.5 times what is expected, and more for wide layers."""
    found = []
    for model in MODELS:
        for ranks in ((1, 1), (2, 1), (1, 4)):
            shape = np.array([(*model, *ranks)], np.float64)
            times = moe.expected_us(shape, np.array(TOKENS, np.float64), RATES)[0]
            slower = 1.5 * (model[0] / 2048) ** 0.1
            found += [(*model, *ranks, t, slower * us) for t, us in zip(TOKENS, times, strict=True)]
    return pd.DataFrame(found, columns=[*moe.SHAPE, "tokens", "time_us"])


def test_a_measured_shape_keeps_its_times_and_others_lie_between() -> None:
    table = rows()
    surface = moe.fit_moe(moe.moe_table(table), RATES)
    stored = moe.MoeSurface.from_arrays(surface.arrays())
    for shape, part in table.groupby(list(moe.SHAPE)):
        times = surface.time_us(part["tokens"].to_numpy(), shape, RATES)
        np.testing.assert_allclose(times, part["time_us"], rtol=1e-9)
        near = stored.time_us(part["tokens"].to_numpy(), shape, RATES)
        np.testing.assert_allclose(near, part["time_us"], rtol=1e-3)
    one, tokens = np.array([(3072, 1200, 8, 128, 1, 1)], np.float64), np.array([2.0, 300.0, 4096.0])
    between = surface.time_us(tokens, tuple(one[0].astype(int)), RATES)
    ratio = between / moe.expected_us(one, tokens, RATES)[0]
    assert ((ratio > 1.5) & (ratio < 1.05 * 1.5 * 2**0.1)).all()


def table_of(slow: tuple[int, ...] = ()) -> moe.MoeTable:
    """A launch of 30 us, 1.25 times the weights, twice the FLOPs; one model 6 times as slow."""
    shapes = np.unique(rows()[[*moe.SHAPE]].to_numpy(), axis=0)
    tokens = np.array(TOKENS, np.float64)
    parts = moe.parts_us(shapes, tokens, RATES)
    time = 30.0 + 1.25 * parts[..., 1] + 2.0 * parts[..., 3]
    time[(shapes[:, :4] == slow).all(axis=1) if slow else []] *= 6.0
    return moe.MoeTable(shapes, tokens, time)


def test_an_unmeasured_shape_takes_the_sum_that_the_measured_ones_take() -> None:
    table, wanted = table_of(), np.array([(4096, 2048, 8, 256, 1, 2)])
    parts = moe.parts_us(wanted, table.tokens, RATES)[0]
    right = moe.factors(moe.parts_us(table.shapes, table.tokens, RATES), table.time_us)
    np.testing.assert_allclose(right[[0, 1, 3]], [30.0, 1.25, 2.0], rtol=0.08)
    surface = moe.fit_moe(table, RATES)
    found = surface.time_us(table.tokens, tuple(wanted[0].tolist()), RATES)
    np.testing.assert_allclose(found, 30.0 + 1.25 * parts[:, 1] + 2.0 * parts[:, 3], rtol=0.03)


def test_more_tokens_take_an_unmeasured_shape_no_less_time() -> None:
    """All measured ones take nine times as long for a few tokens: what says so falls then."""
    table, shape = table_of(), np.array([(4096, 2048, 8, 256, 1, 2)])
    few = moe.MoeTable(table.shapes, table.tokens, table.time_us * np.where(table.tokens < 8, 9, 1))
    assert (np.diff(few.time_us) < 0).any()
    ratio = moe.fit_moe(few, RATES).unmeasured(shape, RATES)
    times = np.log(moe.expected_us(shape.astype(float), table.tokens, RATES)) + ratio
    assert (np.diff(times) > -1e-9).all()


def test_a_model_that_the_others_contradict_says_little_about_another_shape() -> None:
    shape = (4096, 2048, 8, 256, 1, 2)
    right, wrong = (
        moe.fit_moe(table_of(slow), RATES).time_us(np.array([64.0, 1024.0]), shape, RATES)
        for slow in ((), (4096, 14336, 2, 8))
    )
    np.testing.assert_allclose(wrong, right, rtol=0.2)


def test_weights_that_fit_l2_are_not_read_from_hbm() -> None:
    """4 experts of a rank, 3 * 2048 * 768 weights of 2 bytes each: 36 MiB."""
    shape, tokens = np.array([(2048, 768, 8, 128, 1, 32)]), np.array([64.0])
    for cache, missed in ((0.0, 1.0), (48.0, 0.0), (36.0, 0.5), (29.0, 1.0)):
        parts = moe.parts_us(shape, tokens, replace(RATES, cache=2.0**20 * cache))[0, 0]
        weights = 4 * 3 * 2048 * 768 * 2 / 3e12 * 1e6
        assert parts[1:3] == pytest.approx([missed * weights, (1 - missed) * weights])


def test_even_tokens_load_every_expert_alike() -> None:
    """128 experts, 8 a token: 4 tokens reach 32; 1,024 give each of a rank's 16 experts 64 rows."""
    rows, touched, padded = busiest(128, 8, 1, (4.0, 1024.0), 0.0)
    assert (*rows, *touched, *padded) == (32, 8192, 32, 128, 32 * 64, 8192)
    rows, touched, padded = busiest(128, 8, 8, (1.0, 1028.0), 0.0)
    assert (*rows, *touched, *padded) == (1, 1028, 1, 16, 64, 16 * 128)


def test_a_power_law_gives_the_busiest_rank_more_and_no_expert_a_token_twice() -> None:
    tokens = (1.0, 16.0, 1024.0)
    alone, one_of = busiest(128, 8, 1, tokens, 1.2), busiest(128, 8, 8, tokens, 1.2)
    assert alone.rows == pytest.approx([8, 128, 8192])
    assert (one_of.rows > alone.rows / 8).all() and (one_of.rows < alone.rows).all()
    assert alone.touched[1] < 80 < 127 < alone.touched[2] <= 128
    assert (alone.padded >= alone.rows).all()
    both = busiest(2, 2, 1, (100.0,), 1.2)
    assert (both.rows, both.touched) == (200, 2) and 192 <= both.padded <= 256


def test_where_a_shape_comes_from_and_what_it_reads() -> None:
    surface = moe.fit_moe(moe.moe_table(rows()), RATES)
    assert surface.from_what((2048, 768, 8, 128, 2, 1)) == "between"
    assert surface.from_what((2048, 768, 8, 128, 8, 1)) == "shapes"
    assert surface.from_what((2048, 768, 6, 128, 1, 1)) == "beyond"
    # One token of Mixtral reads two of eight experts; many read all of them once.
    shape = np.array([(4096, 14336, 2, 8, 1, 1)], np.float64)
    one, all_of_them = moe.expected_us(shape, np.array([1.0, 64.0]), RATES)[0] - 20
    assert all_of_them / one == pytest.approx(4, rel=0.05)


def test_more_tokens_take_no_less_time_and_a_gap_leaves_a_shape_out() -> None:
    table = rows()
    at = table.index[(table["tokens"] == 64) & (table["hidden"] == 2048)][0]
    table.loc[at, "time_us"] *= 50
    clean = moe.moe_table(table).cleaned(RATES)
    assert (np.diff(clean.time_us, axis=1) >= 0).all()
    assert len(moe.moe_table(table.drop(index=at)).shapes) == len(clean.shapes) - 1


def test_experts_without_a_gate_are_left_out_and_the_faster_kernel_counts(tmp_path: Path) -> None:
    slow = {**ROW, "kernel_source": "min_latency", "latency": 0.09}
    others = [
        {**ROW, "topk": 22},
        {**ROW, "hidden_size": 4096, "kernel_source": "torch_flow_nongated"},
        {**ROW, "moe_tp_size": 2},
        {**ROW, "moe_ep_size": 32},
        {**ROW, "distribution": "power_law_1.2"},
    ]
    put_table(tmp_path, "moe/vllm/0.24.0/moe_perf.parquet", ROW, slow, *others)
    plain = kernel_tables.experts(
        (tmp_path, "h100-80g-sxm", "vllm"), "bf16", "balanced", gated=False
    )
    assert plain is not None and plain[0][["hidden", "top_k"]].to_numpy().tolist() == [
        [2048, 22], [4096, 8]
    ]  # fmt: skip
    found = kernel_tables.experts((tmp_path, "h100-80g-sxm", "vllm"), "bf16", "balanced")
    assert found is not None and found[1] == "0.24.0"
    (row,) = found[0].to_dict("records")
    assert tuple(row[name] for name in moe.SHAPE) == (2048, 768, 8, 128, 1, 4)
    assert (row["tokens"], row["time_us"]) == (64, 50.0)
    assert kernel_tables.experts((tmp_path, "h100-80g-sxm", "vllm"), "fp8", "balanced") is None


def test_tokens_that_deepseeks_gate_grouped_are_not_balanced(tmp_path: Path) -> None:
    grouped = {**ROW, "hidden_size": 7168, "inter_size": 2048, "num_experts": 256}
    skewed = {**grouped, "distribution": "power_law_1.2"}
    for stack in ("vllm", "trtllm"):
        put_table(tmp_path, f"moe/{stack}/1.0/moe_perf.parquet", ROW, grouped, skewed)
    hidden = {
        (stack, spread): found[0]["hidden"].tolist()
        for stack in ("vllm", "trtllm")
        for spread in ("balanced", "power_law_1.2")
        if (found := kernel_tables.experts((tmp_path, "h100-80g-sxm", stack), "bf16", spread))
    }
    assert hidden == {
        ("vllm", "balanced"): [2048], ("vllm", "power_law_1.2"): [7168],
        ("trtllm", "balanced"): [2048, 7168], ("trtllm", "power_law_1.2"): [7168],
    }  # fmt: skip


def test_an_all_to_all_is_read_in_bytes(tmp_path: Path) -> None:
    row = {"op_name": "alltoall", "nccl_dtype": "half", "num_gpus": 4, "latency": 0.02}
    other = {**row, "op_name": "all_reduce", "message_size": 512}
    put_table(tmp_path, "comm/nccl/2.27/nccl_perf.parquet", {**row, "message_size": 512}, other)
    found = kernel_tables.all_to_alls((tmp_path, "h100-80g-sxm", "vllm"))
    assert found is not None
    assert found[0].to_dict("records") == [{"num_bytes": 1024, "gpus": 4, "time_us": 20.0}]


# Op times ---------------------------------------------------------------------------------------


def us(kernels: Kernels, op: str = MOE, tokens: float = 256, tp: int = 4) -> float:
    times = StackTimes("h100-80g-sxm", kernels, QWEN, tp)
    return float(times.by_rows(op, np.array([tokens]))[0])


def test_provenance_names_format_ranks_and_spread() -> None:
    origin = StackTimes("h100-80g-sxm", Kernels("trtllm", "fp8"), QWEN, 4).provenance()
    assert origin[MOE].mark == (
        "measured: fp8 experts of trtllm 1.3.0rc20, tokens power_law_1.2, tp 4 x ep 1, "
        "between token counts"
    )
    assert 1 < origin[MOE].half_width_pct < 10
    unlike = replace(QWEN, experts=replace(QWEN.experts, top_k=3))
    far = StackTimes("h100-80g-sxm", Kernels("trtllm", "fp8"), unlike, 4).provenance()[MOE]
    assert "another number of experts" in far.mark
    assert far.half_width_pct > origin[MOE].half_width_pct


@pytest.mark.parametrize("device", ["h100-80g-sxm", "h200-sxm"])
def test_fp8_experts_slower_than_bf16s_are_in_doubt(device: str) -> None:
    """The band reaches down to the table of fp8_block at every size, and the reason is written."""
    tokens = 2.0 ** np.arange(14)
    origin = StackTimes(device, Kernels("vllm", "fp8"), QWEN, 1).provenance()[MOE]
    fp8, block, bf16 = (
        StackTimes(device, Kernels("vllm", dtype), QWEN, 1).by_rows(MOE, tokens)
        for dtype in ("fp8", "fp8_block", "bf16")
    )
    assert np.median(fp8 / bf16) > 2, "half the bytes, and twice as long"
    assert np.isclose(1 + origin.half_width_pct / 100, (fp8 / block).max())
    _, found, doubt = origin.mark.partition(DOUBT)
    assert found and "give dtype fp8_block" in doubt
    assert f"{(fp8 / bf16).min():.1f} to {(fp8 / bf16).max():.1f} times as long as in bf16" in doubt


@pytest.mark.parametrize(
    ("device", "stack", "dtype"),
    [
        ("h100-80g-sxm", "vllm", "fp8_block"),
        ("h100-80g-sxm", "vllm", "bf16"),
        ("h100-80g-sxm", "trtllm", "fp8"),
        ("l40s", "vllm", "fp8"),
    ],
)
def test_other_experts_are_not_in_doubt(device: str, stack: Stack, dtype: WeightDtype) -> None:
    origin = StackTimes(device, Kernels(stack, dtype), QWEN, 1).provenance()[MOE]
    assert DOUBT not in origin.mark and origin.half_width_pct < 10


def test_tensorrt_llm_takes_its_kernels_from_the_other_stacks_tables_on_blackwell() -> None:
    model, tokens = load_model("deepseek-v3"), np.array([4.0, 64.0, 4096.0])
    found = {
        stack: StackTimes("b200-sxm", Kernels(stack, "fp8_block", "fp8"), model, 8)
        for stack in ("trtllm", "sglang", "vllm")
    }
    times = {stack: one.by_rows(MOE, tokens) for stack, one in found.items()}
    fastest = np.minimum(times["sglang"], times["vllm"])
    assert (times["trtllm"] <= fastest).all() and times["trtllm"][0] == fastest[0]
    assert "or sglang or vllm's where faster" in found["trtllm"].provenance()[MOE].mark
    assert "where faster" not in found["sglang"].provenance()[MOE].mark


def test_vllm_and_sglang_share_flashinfers_experts_of_gpt_oss() -> None:
    """vLLM's table holds other models' shapes in this format, SGLang's gpt-oss's own."""
    model, dtype = load_model("gpt-oss-120b"), "w4a8_mxfp4_mxfp8"
    kernels = {s: Kernels(s, "bf16", "fp8", moe_dtype=dtype) for s in ("vllm", "sglang")}
    times = {s: StackTimes("b200-sxm", one, model, 2) for s, one in kernels.items()}
    tokens = np.array([4.0, 1024.0])
    of_moe = [one.by_rows(MOE, tokens) for one in times.values()]
    assert np.array_equal(*of_moe)
    assert times["vllm"].provenance()[MOE] == times["sglang"].provenance()[MOE]
    own = StackTimes("b200-sxm", Kernels("vllm", "bf16", "fp8", moe_dtype="w4a16_mxfp4"), model, 2)
    assert own.provenance()[MOE].mark.startswith("measured: w4a16_mxfp4 experts of vllm")


def test_expert_parallel_ranks_may_send_tokens_instead_of_adding_up() -> None:
    spread = Kernels("vllm", expert_parallel=True)
    sending = replace(spread, moe_a2a_backend="nccl")
    adds, sends = (
        stack_bundle("h100-80g-sxm", QWEN, 4, kernels, max_tokens=4096)
        for kernels in (spread, sending)
    )
    assert ALL_TO_ALL not in set(adds.linear["op"])
    assert {ALL_TO_ALL, MOE} < set(sends.linear["op"])
    assert "all-to-all" in str(sends.meta.environment[ALL_TO_ALL])
    assert [f for f in check_bundle(sends, load_device("h100-80g-sxm")) if f.level == "error"] == []
    # 4096 tokens, 1024 a rank; the eight experts of a token lie on 3.6 of 4 ranks.
    num_bytes = 2 * 1024 * 4 * (1 - 0.75**8) * 2048
    spec, arrays = load_stack("h100-80g-sxm", "vllm")
    name = "all_to_all.nccl.4"
    sizes, log_us = arrays[f"{name}.size"], arrays[f"{name}.log_us"] / 1800
    expected = 2 * ReduceCurve(sizes, log_us).time_us(np.float64(num_bytes))
    assert us(sending, ALL_TO_ALL, 4096) == pytest.approx(expected) and name in spec.kernels


def test_without_a_table_the_all_to_all_follows_from_the_link() -> None:
    sending = Kernels("vllm", expert_parallel=True, moe_a2a_backend="nccl")
    experts = StackTimes("h100-80g-sxm", sending, QWEN, 4)._own[ALL_TO_ALL]
    experts.spec = replace(experts.spec, kernels={})
    # 4096 tokens: 1024 a rank to 3.6 ranks each, 3/4 of them over the link at 450 GB/s.
    num_bytes = 2 * 1024 * 4 * (1 - 0.75**8) * 2048 * 3 / 4
    expected = 2 * (10 + 1e6 * num_bytes / 450e9)
    assert experts.time_us(np.array([4096.0]))[0] == pytest.approx(expected)
    assert experts.provenance()[0].startswith("modelled: 10 us + bytes / NVLink")


def test_bytes_of_a_weight_of_layers_and_of_experts() -> None:
    """Of experts alone, int4 has a scale for every 32 weights."""
    for kernels, expected in (
        (Kernels("vllm", moe_dtype="w4a16_mxfp4"), (2.0, 0.5 + 1 / 32)),
        (Kernels("vllm", "fp8"), (1.0, 1.0)),
        (Kernels("vllm", moe_dtype="int4_wo"), (2.0, 0.5 + 2 / 32)),
        (Kernels("vllm", "int4_wo"), (0.5 + 2 / 128, 0.5 + 2 / 128)),
    ):
        numbers = kernels.number_bytes
        assert (numbers.weight, numbers.expert_weight) == expected


NANO = load_model("nemotron-3-nano")


def test_experts_without_gates_count_as_gated_ones_of_two_thirds_of_the_width() -> None:
    tokens, kernels = np.array([1.0, 64.0, 4096.0]), Kernels("vllm")
    gated = replace(
        NANO, gated_ffn=True, experts=replace(NANO.experts, intermediate_size=round(1856 * 2 / 3))
    )
    plain, same = (StackTimes("h200-sxm", kernels, model, 1) for model in (NANO, gated))
    np.testing.assert_array_equal(plain.by_rows(MOE, tokens), same.by_rows(MOE, tokens))
    found, gate = plain.provenance()[MOE], same.provenance()[MOE]
    assert (
        found.mark
        == f"{gate.mark}; without gates: as gated ones of two thirds of the width " + ("(assumed)")
    )
    assert found.half_width_pct >= 50


@needs_datasets
@pytest.mark.parametrize("device", ["h200-sxm", "b200-sxm"])
def test_experts_without_gates_take_as_long_as_measured(device: str) -> None:
    """Nemotron 3 Nano's in vLLM: the band holds, and most are far inside of it."""
    found = kernel_tables.experts(
        (public_datasets(), device, "vllm"), "bf16", "power_law_1.2", gated=False
    )
    assert found is not None
    rows = found[0].query("hidden == 2688 and ep == 1 and tp <= 4")
    off = []
    for tp, part in rows.groupby("tp"):
        times = StackTimes(device, Kernels("vllm"), NANO, tp)
        off.append(
            np.log(times.by_rows(MOE, part["tokens"].to_numpy(np.float64)) / part["time_us"])
        )
    errors = np.abs(np.concatenate(off))
    assert len(errors) == 3 * 27
    assert np.median(errors) < 0.1 and (errors < np.log(1.5)).all()


def test_padded_experts_by_hand() -> None:
    """4 of 16 experts a token, in tiles of 128 rows: few tokens wait for the weights of all,
    many for their FLOPs, and twice the ranks halve both."""
    rates = moe.Rates(flops=1e12, bandwidth=1e9, weight_bytes=1.0)
    tokens = np.array([1.0, 1e6])
    few, many = moe.padded_us((64, 32, 4, 16, 1, 1), tokens, rates) - 20.0
    assert few == pytest.approx(1e6 * 16 * 3 * 64 * 32 / (HBM_SHARE * 1e9))
    assert many == pytest.approx(6e6 * (4e6 + 127 * 16) * 64 * 32 / (0.6 * 1e12))
    for ranks in ((2, 1), (1, 2)):
        halved = moe.padded_us((64, 32, 4, 16, *ranks), tokens, rates) - 20.0
        assert halved == pytest.approx([few / 2, many / 2])


@pytest.mark.parametrize(
    ("version", "padded"), [("0.12.0", True), ("0.14.0", False), ("0.10.2", False), ("", False)]
)
def test_vllm_computed_all_experts_in_some_versions(version: str, padded: bool) -> None:
    """A decode of Qwen3-235B in blocks on H200 took as long with 4 sequences as with 64."""
    kernels = Kernels("vllm", dtype="fp8_block", version=version)
    times = StackTimes("h200-sxm", kernels, load_model("qwen3-235b-a22b"), 2)
    few, many = times.by_rows(MOE, np.array([4.0, 64.0]))
    assert (few == pytest.approx(many)) == padded
    assert ("tiles of 128 rows" in times.provenance()[MOE].mark) == padded
