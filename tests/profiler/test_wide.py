"""Wide expert parallelism: its tables, the surfaces fitted to them, and the ops of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.lab.sources import aiconfigurator as kernel_tables
from sarathi_sim.profiler.facts.formats import (
    DISTRIBUTIONS,
    MOE_SPEEDUP,
    A2aBackend,
    Kernels,
    Stack,
    WeightDtype,
    exponent_of,
)
from sarathi_sim.profiler.facts.layer_kinds import busiest
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_LAYER_OPS, ALL_TO_ALL, MOE, OPS
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels.message_curves import ExchangeCurves, reached
from sarathi_sim.profiler.kernels.moe_surface import MoeSurface, MoeTable, Rates
from sarathi_sim.profiler.kernels.stack_file import load_stack, stored
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.kernels.wide_times import MODES
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.op_times.modelled import modelled_times
from tests.sampled import needs_datasets, put_table

R1 = load_model("deepseek-r1")
#: GB200 has four GPUs in a node, and NVLink between them and the others of its rack.
DEEPEP = Kernels(
    "sglang", "fp8_block", "fp8", expert_parallel=True, moe_a2a_backend="deepep", dp=32
)
BF16 = replace(DEEPEP, dtype="bf16", kv_cache_dtype="bf16")
NVLINK = replace(DEEPEP, stack="trtllm", moe_a2a_backend="nvlink_one_sided")
MODEL = {"hidden_size": 7168, "num_experts": 256}


def us(device: str, kernels: Kernels, op: str, tokens: float, tp: int = 1) -> float:
    return float(StackTimes(device, kernels, R1, tp).by_rows(op, np.array([tokens]))[0])


# Tables -----------------------------------------------------------------------------------------


def test_an_exchange_is_dispatch_and_combine_of_one_ranks_tokens(tmp_path: Path) -> None:
    """A node of an H100 has eight GPUs. Of the multiprocessors that may send, 20 are the default;
    what a rank is told before counts."""
    low = {**MODEL, "num_topk": 8, "num_token": 16, "node_num": 2}
    low |= {"dispatch_avg_t_us": 30.0, "combine_avg_t_us": 46.0}
    put_table(tmp_path, "comm/sglang/0.5/wideep_deepep_ll_perf.parquet", low)
    parts = {"dispatch_transmit_us": 4.0, "dispatch_notify_us": 1.0}
    parts |= {"combine_transmit_us": 6.0, "combine_notify_us": 2.0}
    sent = {**MODEL, "num_topk": 8, "num_token": 16, "node_num": 1, **parts}
    wide = [{**sent, "dispatch_sms": sms, "combine_sms": sms} for sms in (20, 24)]
    put_table(tmp_path, "comm/sglang/0.5/wideep_deepep_normal_perf.parquet", *wide)
    size = {"hidden": 7168, "top_k": 8, "experts": 256, "tokens": 16}
    of = (tmp_path, "h100-80g-sxm", "sglang")
    found = kernel_tables.deepep(of, "low_latency", True)
    assert found and found[0].to_dict("records") == [{**size, "ranks": 16, "time_us": 76.0}]
    found = kernel_tables.deepep(of, "normal", False)
    assert found and found[0].to_dict("records") == [{**size, "ranks": 8, "time_us": 13.0}]
    assert kernel_tables.deepep(of, "normal", True) is None


def test_the_experts_of_a_load_balancer_are_its_slots(tmp_path: Path) -> None:
    row = {**MODEL, "inter_size": 2048, "topk": 8, "moe_tp_size": 1, "moe_ep_size": 32}
    row |= {"moe_dtype": "nvfp4", "num_tokens": 64, "dp_num_tokens": 2, "latency": 0.1}
    plain = {**row, "num_slots": 256, "distribution": "power_law_1.2"}
    even = {**row, "num_slots": 288, "distribution": "power_law_1.2_eplb", "latency": 0.2}
    put_table(tmp_path, "moe/trtllm/1.3/wideep_moe_perf.parquet", plain, even)
    plain |= {"moe_dtype": "nvfp4", "kernel_source": "cutlass", "latency": 0.3}
    few = {**plain, "moe_ep_size": 8}
    slow = {**plain, "num_tokens": 128}
    put_table(tmp_path, "moe/trtllm/1.3/moe_perf.parquet", plain, few, slow)
    of = ((tmp_path, "h100-80g-sxm", "trtllm"), "nvfp4", "power_law_1.2")
    found = kernel_tables.even_experts(*of)  # type: ignore[arg-type]
    assert found and found[0][["experts", "tokens", "time_us"]].to_numpy().tolist() == [
        [288, 64, 200.0]
    ]
    found = kernel_tables.experts(*of, wide=True)  # type: ignore[arg-type]
    assert found and found[0][["experts", "tokens", "time_us"]].to_numpy().tolist() == [
        [256, 64, 100.0], [256, 128, 300.0],
    ]  # fmt: skip
    found = kernel_tables.experts(*of)  # type: ignore[arg-type]
    assert found and found[0]["ep"].tolist() == [8]


def test_tokens_of_deepeps_experts_are_those_of_all_ranks() -> None:
    """With one row for every expert, all are read: from 32 tokens of the layer on, whatever the
    number of ranks, more take no longer while weights bound the time; and they are read at 55 to
    95 % of the memory's bandwidth."""
    spec, arrays = load_stack("h200-sxm", "sglang")
    name = "wide.low_latency_experts.fp8_block.balanced"
    surface = MoeSurface.from_arrays(stored(arrays, name))
    rates = Rates(2e15, 4.8e12, 1.0)
    for shape in surface.shapes.tolist():
        ranks = shape[5]
        tokens = np.array([32.0, 64.0, 256.0])[np.array([32, 64, 256]) >= ranks]
        time = surface.time_us(tokens, tuple(shape), rates)
        assert time.max() < 1.1 * time.min(), shape
        read = 1e6 * 256 / ranks * 3 * 7168 * 2048 / 4.8e12
        assert 0.3 < read / time[0] < 0.95, shape
    assert spec.kernels[name].left_out["ranks"].half_width_pct < 15


# Surfaces ---------------------------------------------------------------------------------------


def test_an_exchange_is_measured_by_bytes_or_between_ranks() -> None:
    shapes = np.array([(1000, 2, 8, 4), (1000, 2, 8, 16), (4000, 2, 8, 16)])
    tokens = np.array([1.0, 4.0, 16.0])
    log = np.log(np.array([[10.0, 20.0, 40.0], [20.0, 40.0, 80.0], [30.0, 90.0, 270.0]]))
    curves = ExchangeCurves(shapes, tokens, log, each=True)
    at = np.array([0.5, 4.0, 8.0, 32.0])
    np.testing.assert_allclose(
        curves.time_us(at, (1000, 2, 8, 4)), [10, 20, 20 * 2**0.5, 80]
    )  # fmt: skip
    # Eight ranks: halfway between four and sixteen.
    np.testing.assert_allclose(curves.time_us(at[1:2], (1000, 2, 8, 8)), [30])
    # Of a token's two copies 3/4 leave one of four ranks, 31/32 one of 32 (15/16 of sixteen).
    far = float(curves.time_us(np.array([8.0]), (1000, 2, 8, 32))[0])
    assert far == pytest.approx(float(curves.time_us(8 * np.array([31 / 30]), (1000, 2, 8, 16))[0]))
    # Twice the numbers of the nearest shape: as many bytes as twice the tokens.
    assert float(curves.time_us(np.array([2.0]), (2000, 2, 8, 4))[0]) == pytest.approx(20)
    assert [curves.measured(shape) for shape in (
        (1000, 2, 8, 16), (1000, 2, 8, 8), (2000, 2, 8, 8), (1000, 2, 8, 32)
    )] == ["sizes", "ranks", "shapes", ""]  # fmt: skip
    assert reached(1, 4) == 1 and reached(2, 2) == 1.5


def test_a_gap_is_filled_by_the_expected_time() -> None:
    rates = Rates(1e15, 1e12, 1.0)
    shapes = np.array([(1024, 512, 2, 8, 1, 2), (1024, 512, 2, 8, 1, 4)])
    tokens = np.array([1.0, 16.0, 4096.0])
    time = np.array([[50.0, 60.0, np.nan], [np.nan, 40.0, 70.0]])
    clean = MoeTable(shapes, tokens, time).cleaned(rates)
    ratio = clean.log_ratio(rates)
    assert clean.time_us[0, :2].tolist() == [50, 60] and ratio[0, 2] == pytest.approx(ratio[0, 1])
    assert ratio[1, 0] == pytest.approx(ratio[1, 1])


@pytest.mark.parametrize("device", ["h100-80g-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200"])
def test_every_table_ships_with_its_held_out_errors(device: str) -> None:
    for stack in ("sglang", "trtllm"):
        spec = load_stack(device, stack)[0]
        wide = {name: fit for name, fit in spec.kernels.items() if name.startswith("wide.")}
        assert wide and all(fit.left_out and fit.version for fit in wide.values())
        own = {"sglang": "low_latency_experts", "trtllm": "even"}[stack]
        assert any(name.startswith(f"wide.{own}.") for name in wide)
        errors = [
            left.median_pct for name, fit in wide.items() for kind, left in fit.left_out.items()
            if kind in ("between", "sizes") and "normal.nodes" not in name
        ]  # fmt: skip
        assert max(errors) < 7, "token counts are interpolated"


# Op times ---------------------------------------------------------------------------------------


def test_times_of_the_tables_themselves() -> None:
    """Rows of AIConfigurator's tables (095f58a), microseconds."""
    balanced = replace(DEEPEP, expert_distribution="balanced")
    assert us("gb200", balanced, MOE, 4096) == pytest.approx(86.9, rel=0.02)
    four = replace(balanced, dp=4)
    assert us("gb200", four, ALL_TO_ALL, 128) == pytest.approx(26.86 + 36.227, rel=0.001)
    eight = replace(balanced, dp=8)
    assert us("h200-sxm", eight, ALL_TO_ALL, 128) == pytest.approx(35.119 + 67.745, rel=0.001)
    assert us("gb200", NVLINK, MOE, 1024) == pytest.approx(120.5, rel=0.03)  # DeepGEMM
    fp4 = replace(NVLINK, dtype="bf16", moe_dtype="nvfp4")
    assert us("gb200", fp4, ALL_TO_ALL, 128) == pytest.approx(25.6 + 47.8, rel=0.01)
    even = replace(fp4, redundant_experts=32)
    assert us("gb200", even, MOE, 1024) == pytest.approx(134.7, rel=0.06)


def test_a_rank_has_its_own_attention_and_shares_the_experts() -> None:
    alone, rank = (StackTimes("gb200", k, R1, 1) for k in (replace(DEEPEP, dp=1), DEEPEP))
    tokens = np.array([1.0, 100.0, 4096.0])
    for op in R1.gemms(1):
        np.testing.assert_array_equal(rank.by_rows(op, tokens), alone.by_rows(op, tokens))
    np.testing.assert_array_equal(rank.decode(tokens, tokens), alone.decode(tokens, tokens))
    assert ALL_TO_ALL in rank.provenance() and ALL_TO_ALL not in alone.provenance()
    # Each of 32 ranks has a 32nd of the weights that a rank alone reads: 45 GB/s of a layer less.
    assert rank.by_rows(MOE, 32 * tokens)[1] < 0.2 * alone.by_rows(MOE, tokens)[1]
    ops = modelled_times(rank)
    assert ops.all_reduce is None and ops.by_rows[MOE](3200) == pytest.approx(
        1e-6 * rank.by_rows(MOE, np.array([3200.0]))[0]
    )
    two = modelled_times(StackTimes("gb200", replace(DEEPEP, dp=16), R1, 2))
    assert two.all_reduce is not None and two.reduces == 2 - 58 / 61
    sizes = 2.0 ** np.arange(10, 20)
    four, single = (StackTimes("gb200", replace(DEEPEP, dp=dp), R1, 4) for dp in (8, 1))
    np.testing.assert_array_equal(four.all_reduce(sizes), single.all_reduce(sizes))
    # Two ranks of a group share its tokens: each sends half of them.
    half = StackTimes("gb200", replace(DEEPEP, dp=16), R1, 2).by_rows(ALL_TO_ALL, 2 * tokens)
    np.testing.assert_array_equal(half, rank.by_rows(ALL_TO_ALL, tokens))


def tables_of_modes(device: str, suffix: str = "") -> list[ExchangeCurves]:
    _, arrays = load_stack(device, "sglang")
    names = (f"wide.{mode}{suffix}" for mode in MODES)
    return [ExchangeCurves.from_arrays(stored(arrays, name)) for name in names]


def test_deepep_changes_its_mode_with_the_tokens_of_a_gpu() -> None:
    """On Hopper after 256 tokens of a GPU, as many as were measured between nodes; on GB200 after
    1,024. Experts and exchange change at the same number of tokens."""
    for device, dp, most, suffix in (
        ("h200-sxm", 8, 256, ""), ("h200-sxm", 16, 256, ".nodes"), ("gb200", 4, 1024, ""),
    ):  # fmt: skip
        times = StackTimes(device, replace(DEEPEP, dp=dp), R1, 1)
        low, normal = tables_of_modes(device, suffix)
        shape, at = (7168, 8, 256, dp), np.array([1.0, most, 4.0 * most, 16384.0])
        found = times.by_rows(ALL_TO_ALL, at)
        np.testing.assert_array_equal(found[:2], low.time_us(at[:2], shape))
        np.testing.assert_array_equal(found[2:], normal.time_us(at[2:], shape))
        assert f"low latency up to {most} tokens" in times.provenance()[ALL_TO_ALL].mark
        few, many = times.by_rows(MOE, dp * np.array([most, most + 1.0]))
        near = times.by_rows(MOE, dp * np.array([most - 1.0]))[0]
        assert many - few > 20 * (few - near), "another kernel"


def test_what_was_not_measured_in_low_latency_is_in_normal_mode() -> None:
    """Sixteen ranks of H200s: 520.6 us for 256 tokens were measured in low latency, 373.0 in normal
    mode, which an exchange of more tokens takes at least 520.6 us for: a wider band."""
    times = StackTimes("h200-sxm", replace(DEEPEP, dp=16), R1, 1)
    found = times.by_rows(ALL_TO_ALL, np.array([256.0, 257.0, 512.0]))
    assert found == pytest.approx([520.6, 520.6, 574.7], rel=2e-4)
    width = times.provenance()[ALL_TO_ALL].half_width_pct
    assert width == pytest.approx(100 * (520.6 / 373.0 - 1), abs=0.1)


@pytest.mark.parametrize("device", ["h100-80g-sxm", "h200-sxm", "b200-sxm", "gb200"])
@pytest.mark.parametrize("dp", [4, 8, 16, 32, 64])
def test_more_tokens_take_no_less_time(device: str, dp: int) -> None:
    tokens = np.unique(np.round(2 ** np.arange(0, 14.01, 0.125)))
    tokens = np.union1d(tokens, [255, 257, 1023, 1025])
    for backend in ("deepep", "none"):
        sending: A2aBackend = "deepep" if backend == "deepep" else "none"
        times = StackTimes(device, replace(DEEPEP, moe_a2a_backend=sending, dp=dp), R1, 1)
        exchange, experts = times.by_rows(ALL_TO_ALL, tokens), times.by_rows(MOE, dp * tokens)
        assert (np.diff(exchange) >= 0).all(), backend
        assert (experts[1:] > 0.98 * experts[:-1]).all(), backend


def test_without_an_exchange_tokens_are_gathered() -> None:
    """By NCCL's tables in a node: 128 tokens of each of eight ranks, in bf16."""
    gathers = replace(DEEPEP, moe_a2a_backend="none", dp=8)
    times = StackTimes("h200-sxm", gathers, R1, 1)
    found = times.provenance()[ALL_TO_ALL]
    assert found.mark.startswith("measured: NCCL") and found.half_width_pct == 25
    few, many = times.by_rows(ALL_TO_ALL, np.array([128.0, 128 * 64]))
    assert 2 * 7 * 2 * 128 * 64 * 7168 / 450e9 * 1e6 < many < 1.6 * 64 * few
    fp4 = replace(gathers, dtype="bf16", moe_dtype="nvfp4")
    less, more = (us("b200-sxm", kernels, ALL_TO_ALL, 8192) for kernels in (fp4, gathers))
    assert less / more == pytest.approx((0.5625 + 2) / 4, rel=0.03)
    far = StackTimes("h200-sxm", replace(gathers, dp=16), R1, 1)
    found = far.provenance()[ALL_TO_ALL]
    assert found.mark.startswith("derived: from 8 GPUs by bytes, and messages over InfiniBand")
    assert found.half_width_pct == 50
    # Each GPU sends its own rows to its peer, twice, in 10 us and at 50 GB/s; then a node has twice
    # as many.
    sent = 2 * (10 + 128 * 64 * 7168 * 2 / 50e9 * 1e6)
    nodes = far.by_rows(ALL_TO_ALL, np.array([128.0 * 64]))[0]
    twice = times.by_rows(ALL_TO_ALL, np.array([2 * 128.0 * 64]))[0]
    assert nodes == pytest.approx(twice + sent) and nodes < 4 * many
    # Three nodes: two peers. Ranks that are no multiple of a node fill one in part.
    for dp, copies in ((20, 64), (24, 32)):
        kernels = replace(gathers, dp=dp, redundant_experts=copies)
        more = StackTimes("h200-sxm", kernels, R1, 1)
        within = times.by_rows(ALL_TO_ALL, np.array([dp / 8 * 128.0 * 64]))[0]
        assert more.by_rows(ALL_TO_ALL, np.array([128.0 * 64]))[0] == pytest.approx(
            within + 2 * sent
        )


def test_experts_may_be_divided_among_all_ranks() -> None:
    """Without expert parallelism each of 8 ranks has an eighth of every expert, of all tokens."""
    divided = replace(DEEPEP, expert_parallel=False, moe_a2a_backend="none", dp=4)
    times = StackTimes("h200-sxm", divided, R1, 2)
    alone = StackTimes("h200-sxm", replace(divided, dp=1), R1, 8)
    tokens = np.array([1.0, 512.0, 8192.0])
    np.testing.assert_array_equal(times.by_rows(MOE, tokens), alone.by_rows(MOE, tokens))
    assert "tp 8 x ep 1" in times.provenance()[MOE].mark


def test_copies_of_experts_take_slots_and_make_the_load_even() -> None:
    """24 and 48 ranks do not divide 256 experts; with 32 copies they do."""
    even = replace(DEEPEP, expert_distribution="balanced")
    for ranks, fewer, more in ((24, 16, 32), (48, 32, 64)):  # 12 and 6 experts a GPU
        kernels = replace(DEEPEP, dp=ranks, redundant_experts=32)
        found = StackTimes("gb200", kernels, R1, 1).provenance()[MOE]
        assert "balanced" in found.mark and f"ep {ranks}" in found.mark
        assert found.half_width_pct == 50
        slow, fast = (us("gb200", replace(even, dp=n), MOE, 32 * n) for n in (fewer, more))
        assert 1.1 * fast < us("gb200", kernels, MOE, 32 * ranks) < 0.9 * slow
    own = replace(NVLINK, dtype="nvfp4", redundant_experts=32)
    found = StackTimes("gb200", own, R1, 1).provenance()[MOE]
    assert "even.nvfp4" in found.mark and found.half_width_pct < 10
    assumed = replace(DEEPEP, moe_a2a_backend="none", dp=8, redundant_experts=32)
    found = StackTimes("b200-sxm", assumed, R1, 1).provenance()[MOE]
    assert "copies make the load even (assumed)" in found.mark


def test_what_has_no_table_follows_from_a_law_that_says_so() -> None:
    fp4 = replace(DEEPEP, dtype="bf16", moe_dtype="nvfp4")
    found = StackTimes("gb200", fp4, R1, 1).provenance()
    assert found[MOE].mark.startswith("derived: fp8_block experts of sglang")
    assert "nvfp4 by the rates of both formats" in found[MOE].mark
    assert found[MOE].half_width_pct == found[ALL_TO_ALL].half_width_pct == 50
    assert us("gb200", fp4, MOE, 4096) < us("gb200", DEEPEP, MOE, 4096)
    # Between nodes of B200s: as of H200s, whose adapters have half the bandwidth.
    lent = StackTimes("b200-sxm", DEEPEP, R1, 1).provenance()[ALL_TO_ALL]
    version = r"derived: DeepEP of sglang [\d.a-z]+, 32 ranks; "
    assert re.match(version + "from h200-sxm by the links' bandwidths; tokens", lent.mark)
    assert lent.mark.endswith("low latency up to 256 tokens of a GPU")
    h200, b200 = (us(name, DEEPEP, ALL_TO_ALL, 256) for name in ("h200-sxm", "b200-sxm"))
    assert 0.4 < b200 / h200 < 0.7
    # Another stack's DeepEP is the same library.
    mark = StackTimes("h200-sxm", replace(DEEPEP, stack="vllm"), R1, 1).provenance()[MOE].mark
    assert "of sglang" in mark


@pytest.mark.parametrize(
    ("device", "kernels", "tp", "error", "message"),
    [
        ("h200-sxm", NVLINK, 1, SpecError, "no wide of trtllm was measured on h200-sxm"),
        ("gb200", replace(DEEPEP, dp=24), 1, ValueError, r"num_experts \(256\)"),
        ("gb200", replace(DEEPEP, redundant_experts=8), 1, ValueError, "8 redundant_experts"),
        ("gb200", Kernels("sglang", "fp8_block", redundant_experts=8), 1, ValueError, "need exp"),
        ("l40s", replace(BF16, dp=2), 1, SpecError, "no wide of sglang"),
    ],
)
def test_refused(
    device: str, kernels: Kernels, tp: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        StackTimes(device, kernels, R1, tp)


@pytest.mark.parametrize("device", ["h200-sxm", "b200-sxm", "gb200"])
@pytest.mark.parametrize("stack", ["sglang", "trtllm"])
def test_latent_attention_of_whole_heads_is_measured(device: str, stack: Stack) -> None:
    """DeepSeek-R1 on ranks with all 128 heads: prompts and decodes."""
    formats: list[WeightDtype] = ["fp8_block"] + (["nvfp4"] if device != "h200-sxm" else [])
    for dtype in formats:
        kernels = Kernels(stack, dtype, "fp8", expert_parallel=True, dp=8)
        times = StackTimes(device, kernels, R1, 1)
        for op in ("attn_prefill", "attn_decode"):
            kind = "derived" if (stack, device) == ("sglang", "h200-sxm") else "measured"
            assert times.provenance()[op].mark.startswith(kind)
            assert times.provenance()[op].half_width_pct < 40
        assert times.prefill(np.array([1024.0]), np.array([0.0]))[0] < 1000
        assert times.decode(np.array([64.0]), np.array([2048.0]))[0] < 500


TOKENS = np.unique(np.round(2 ** np.arange(0, 15.1, 0.5)))


def floors(times: StackTimes) -> Iterator[tuple[str, Array, Array]]:
    """(op, times, what they are at least) of the experts and the exchange."""
    kernels, device, total = times.kernels, times.device, times.tp * times.kernels.dp
    even = kernels.redundant_experts > 0
    exponent = 0.0 if even else exponent_of(kernels.expert_distribution)
    slots, at = 256 + kernels.redundant_experts, tuple(TOKENS.tolist())
    rows, touched, _ = busiest(slots, 8, total, at, exponent)
    numbers = 3.0 * 7168 * 2048
    read = 1e6 * kernels.number_bytes.expert_weight * touched * numbers / device.memory_bandwidth
    speed = device.peak_flops * MOE_SPEEDUP[kernels.experts_in]
    yield MOE, times.by_rows(MOE, TOKENS), np.maximum(read, 2e6 * rows * numbers / speed)
    # At least a copy in fp4 to each other rank that is reached, and one in bf16 back.
    inside = total <= device.gpus_per_node
    link = device.intra_node if inside else device.inter_node
    if not inside and link.bandwidth < device.intra_node.bandwidth:
        others = device.gpus_per_node  # DeepEP sends a token once to each node
        copies = total / others * (1 - (1 - others / total) ** 8) * (1 - others / total)
    else:
        copies = reached(8, total) * (1 - 1 / total)
    sent = 1e6 * TOKENS * 7168 * 2.5 * copies / link.bandwidth
    yield ALL_TO_ALL, times.by_rows(ALL_TO_ALL, TOKENS), sent


@pytest.mark.parametrize("device", ["h100-80g-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200"])
def test_no_wide_op_is_faster_than_memory_matrix_units_and_links(device: str) -> None:
    points, least, where = 0, np.inf, ""
    backends: dict[Stack, tuple[A2aBackend, ...]] = {
        "sglang": ("deepep", "none"),
        "trtllm": ("none", *(("nvlink_one_sided",) if device == "gb200" else ())),
    }
    for stack, sending in backends.items():
        for backend in sending:
            for dp, copies, spread in (
                (8, 0, DISTRIBUTIONS[0]), (32, 32, DISTRIBUTIONS[2]), (64, 0, DISTRIBUTIONS[1]),
            ):  # fmt: skip
                kernels = Kernels(
                    stack, "fp8_block", "fp8", None, spread, True, backend,
                    dp=dp, redundant_experts=copies,
                )  # type: ignore[arg-type]  # fmt: skip
                for op, time, floor in floors(StackTimes(device, kernels, R1, 1)):
                    share = time / floor
                    points += share.size
                    if share.min() < least:
                        least, where = float(share.min()), f"{kernels.name} {op}"
    assert least > 0.9 - 1e-3 and points > 500, (least, where)


def test_sglang_on_hopper_has_other_kernels_for_latent_attention() -> None:
    """Its tables hold decodes with a cache in fp8 that take four times as long as with one in bf16,
    and prompts in the absorbed form. A block of 128 decodes at 2,048 tokens takes 234 us on an
    H200, of which GEMMs are some 90."""
    ranks = Kernels("sglang", "fp8_block", "fp8", expert_parallel=True, dp=8)
    wide, alone = (StackTimes("h200-sxm", k, R1, 1) for k in (ranks, replace(ranks, dp=1)))
    batch, context = np.array([128.0]), np.array([2047.0])
    assert alone.decode(batch, context)[0] > 550
    gemms = sum(
        float(wide.by_rows(op, batch)[0]) for op in ("preproj", "q_up", "kv_up", "postproj")
    )
    assert wide.decode(batch, context)[0] == pytest.approx(234 - gemms, rel=0.1)
    chunk, none = np.array([4096.0]), np.array([0.0])
    assert wide.prefill(chunk, none)[0] < 0.4 * alone.prefill(chunk, none)[0]
    found = wide.provenance()
    assert "as trtllm's" in found["attn_prefill"].mark
    assert found["attn_prefill"].half_width_pct >= 25
    assert "block less GEMMs" in found["attn_decode"].mark
    assert alone.wider == 1 and wide.wider == pytest.approx(3.4), "absorbed already"
    gb200 = StackTimes("gb200", ranks, R1, 1)
    assert "trtllm's where" not in gb200.provenance()["attn_prefill"].mark


@needs_datasets
def test_prompts_of_sglangs_ranks_on_hopper_are_no_absorbed_ones() -> None:
    """Whole blocks on an H200 (SGLang 0.5.10, FlashAttention 3, 128 heads), less their GEMMs."""
    table = "aiconfigurator/h200_sxm/mla/sglang/0.5.10/wideep_context_mla_perf.parquet"
    rows = pd.read_parquet(public_datasets() / table)
    rows = rows[(rows["kernel_source"] == "fa3") & (rows["num_heads"] == 128)]
    rows = rows[(rows["batch_size"] == 1) & rows["isl"].between(2048, 16384)].sort_values("isl")
    chunk = rows["isl"].to_numpy(np.float64)
    ranks = Kernels("sglang", "fp8_block", "fp8", expert_parallel=True, dp=8)
    wide, alone = (StackTimes("h200-sxm", k, R1, 1) for k in (ranks, replace(ranks, dp=1)))
    gemms = [wide.by_rows(op, chunk) for op in ("preproj", "q_up", "kv_up", "postproj")]
    rest = 1e3 * rows["latency"].to_numpy() - sum(gemms)
    ratio = rest / wide.prefill(chunk, np.zeros_like(chunk))
    assert len(chunk) == 4 and 0.835 < ratio.min() < 0.845 and 1.255 < ratio.max() < 1.265
    own = (alone.prefill(chunk, np.zeros_like(chunk)) / rest)[chunk >= 4096]
    assert own.min() > 3.45 and own.max() < 4.1


# A decode step of a rank beside measured ones: InferenceX's disaggregated runs of DeepSeek-R1 on
# GB200 of 2026 (TPOT without drafts). A rank decodes the clients divided by the ranks, at a mean
# context of the prompt and half of the output. Nothing is fitted to them, and no host is added


#: By engine and format of the experts: (ranks, prompt, clients, milliseconds).
MEASURED: dict[str, list[tuple[int, int, int, float]]] = {
    "trtllm fp8_block": [
        (32, 1024, 256, 15.33), (32, 1024, 1127, 19.55), (16, 1024, 2151, 28.49),
        (16, 8192, 615, 23.08), (16, 8192, 1229, 27.14), (8, 1024, 6144, 78.05),
    ],
    "sglang fp8_block": [
        (32, 1024, 1024, 17.90), (32, 1024, 2048, 20.90), (32, 1024, 4096, 26.64),
        (32, 1024, 6144, 32.28), (48, 1024, 1024, 16.24), (48, 1024, 2048, 18.36),
        (48, 1024, 4096, 23.49), (8, 1024, 4096, 60.99),
    ],
    "sglang nvfp4": [
        (32, 1024, 512, 14.68), (32, 1024, 2048, 16.98), (32, 1024, 4096, 21.67),
        (48, 1024, 2048, 15.96), (48, 1024, 4096, 17.78),
    ],
    "trtllm nvfp4": [
        (32, 1024, 666, 12.64), (32, 1024, 2048, 17.44), (16, 8192, 2253, 26.33),
        (8, 1024, 4301, 42.63),
    ],
}  # fmt: skip


def kernels_of(engine: str, dtype: str, ranks: int) -> Kernels:
    """The recipes' kernels: DeepEP with 32 copies of experts, or TensorRT-LLM's exchange. Attention
    of NVIDIA's FP4 checkpoints is in bf16."""
    layer, moe = ("bf16", "nvfp4") if dtype == "nvfp4" else ("fp8_block", None)
    backend, copies = {"sglang": ("deepep", 32), "trtllm": ("nvlink_one_sided", 0)}[engine]
    return Kernels(
        engine, layer, "fp8", moe, expert_parallel=True, moe_a2a_backend=backend, dp=ranks,
        redundant_experts=copies,
    )  # type: ignore[arg-type]  # fmt: skip


def step_ms(times: StackTimes, batch: float, context: float) -> float:
    """One decode step of every rank: ``batch`` sequences each, with ``context`` tokens."""
    rows = np.array([batch])
    layer = times.decode(rows, np.array([context]))[0]
    for op in times.provenance():
        if op in ALL_LAYER_OPS:
            tokens = rows * (times.kernels.dp if op == MOE else 1)
            layer += R1.share(op) * times.by_rows(op, tokens)[0]
    head = sum(times.by_rows(op, rows)[0] for op in OPS if OPS[op].part in ("first", "last"))
    return float(R1.num_layers * layer + head) / 1e3


@pytest.mark.parametrize(
    ("name", "mean", "bias"),
    [
        ("trtllm fp8_block", 0.06, 0.03),
        ("sglang fp8_block", 0.20, 0.19),
        ("sglang nvfp4", 0.10, 0.08),
        ("trtllm nvfp4", 0.40, 0.40),
    ],
)
def test_a_step_takes_about_as_long_as_on_a_server(name: str, mean: float, bias: float) -> None:
    """TensorRT-LLM in fp8 blocks by 4 %; its FP4 kernels of the tables are slower than a server's
    (CuTe DSL's are in no table). SGLang's in fp8 blocks are 8 % too short with 32 sequences a rank,
    25 % with 128 and more: until its GEMMs were taken from TensorRT-LLM's table its own, twice as
    slow, made up for that."""
    off, (engine, dtype) = [], name.split()
    for ranks, prompt, clients, measured in MEASURED[name]:
        times = StackTimes("gb200", kernels_of(engine, dtype, ranks), R1, 1)
        off.append(step_ms(times, clients / ranks, prompt + 512) / measured - 1)
    assert np.abs(off).mean() < mean and abs(np.mean(off)) < bias, off
