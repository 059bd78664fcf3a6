"""Tables that a GPU lacks, from another GPU of its architecture by the ratio of what both have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.config.inputs import provenance
from sarathi_sim.profiler.facts.formats import STACKS, Kernels, Stack, WeightDtype
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, MOE
from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.kernels import borrowed, stack_file, stack_times
from sarathi_sim.profiler.kernels.attention_grid import HeadGrid
from sarathi_sim.profiler.kernels.borrowed import ALIKE, LENT_PCT, differences, with_borrowed
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice
from sarathi_sim.profiler.kernels.moe_surface import MoeSurface
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.shard_times import DOUBT
from sarathi_sim.profiler.storage.strict import SpecError

SIDES = np.array([256.0, 1024.0])
SHAPES = np.array([[1024, 512, 2, 8, 1, 1], [2048, 512, 2, 8, 1, 1]])
HEADS, LENGTHS = np.array([[8, 8], [8, 2]]), np.array([16.0, 64.0, 256.0])
Pair = dict[str, tuple[stack_file.StackSpec, stack_file.Arrays]]
ONE = stack_file.LeftOut(9, 1.0, 2.0, 3.0, 1.0, 2.0, 5.0, 90.0)


def gemm(slower: float, tokens: tuple[int, ...] = (1, 64, 256)) -> GemmLattice:
    rate = np.log(slower) + 0.1 * np.arange(4 * len(tokens)).reshape(2, 2, -1)
    return GemmLattice(SIDES, SIDES, np.array(tokens, np.float64), rate)


def made(**surfaces: stack_file.StoredSurface) -> tuple[stack_file.StackSpec, stack_file.Arrays]:
    """A stack with these tables (``__`` for a dot), all of one version and error."""
    tables = {name.replace("__", "."): surface for name, surface in surfaces.items()}
    fits = {name: stack_file.KernelFit("1.0", 4, 4, 0.0, 0.0, {"between": ONE}) for name in tables}
    arrays = {f"{t}.{n}": a for t, surface in tables.items() for n, a in surface.arrays().items()}
    return stack_file.StackSpec(
        "d", "vllm", "made", "none", "2026-01-01", 2.0, "made", fits
    ), arrays


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two GPUs of one architecture, ``near`` and ``far``, and ``alone``; far has more tables."""
    experts = MoeSurface(SHAPES, LENGTHS, np.zeros((2, 3)))
    slow = MoeSurface(SHAPES[1:], LENGTHS, np.full((1, 3), np.log(1.5)))
    prompts = HeadGrid(HEADS, (LENGTHS,), np.arange(6.0).reshape(2, 3))
    calls = HeadGrid(HEADS, (LENGTHS[:2], LENGTHS), np.ones((2, 2, 3)))
    slower = HeadGrid(HEADS[:1], (LENGTHS[1:],), np.log(1.25) + prompts.log_us[:1, 1:])
    found = {
        "near": made(
            gemm__bf16=gemm(2.0, (1, 32, 64)), gemm__fp8=gemm(0.9), gemm__nvfp4=gemm(1.2),
            moe__bf16__balanced=slow, prefill__bf16__64=slower,
        ),
        "far": made(
            gemm__bf16=gemm(1.0), gemm__fp8=gemm(1.0), gemm__nvfp4=gemm(1.0),
            gemm__fp8_block=gemm(0.7), moe__bf16__balanced=experts, moe__fp8__balanced=experts,
            prefill__bf16__64=prompts, prefill__bf16__128=prompts, added__bf16__128=calls,
            added__bf16__64=calls, all_reduce__graph__2=gemm(1.0),
        ),
        "alone": made(gemm__bf16=gemm(1.0)),
    }  # fmt: skip
    monkeypatch.setattr(borrowed, "ALIKE", (("far", "near"),))
    monkeypatch.setattr(borrowed, "load_stack", lambda device, stack: found[device])
    monkeypatch.setattr(borrowed, "stacks_on", lambda device: ["vllm"])
    caches = borrowed._loan, borrowed.differences
    yield found
    for cache in caches:
        cache.cache_clear()


def test_a_borrowed_table_is_the_lenders_times_the_ratio(pair: Pair) -> None:
    """The median of three ratios: 1.2 of 0.9, 1.2 and what bf16 has at the two common counts."""
    spec, arrays = with_borrowed("near", "vllm", ["gemm.fp8_block", "gemm.bf16"])
    lent = GemmLattice.from_arrays(stack_file.stored(arrays, "gemm.fp8_block"))
    by_hand = 1.2 * np.exp(gemm(0.7).log_rate)
    np.testing.assert_allclose(np.exp(lent.log_rate), by_hand, rtol=1.5 / stack_file.STEPS)
    assert lent.m.tolist() == [1.0, 64.0, 256.0]
    fit = spec.kernels["gemm.fp8_block"]
    assert fit.version == "1.0 from far by the ratio 1.20 of gemm.bf16, gemm.fp8, gemm.nvfp4"
    assert fit.origin(True) == "derived" and fit.lender == "far"
    own = pair["near"][1]
    assert all(arrays[name] is own[name] for name in own), "what was measured stays"
    off = differences("near", "far", "vllm", "gemm")["gemm.bf16"]
    assert off.shape == (2, 2, 2), "1 and 64 tokens"


def test_experts_and_attention_are_borrowed_by_their_own_ratios(pair: Pair) -> None:
    wanted = ["moe.fp8.balanced", "prefill.bf16.128", "added.bf16.128", "added.bf16.64"]
    spec, arrays = with_borrowed("near", "vllm", wanted)
    experts = MoeSurface.from_arrays(stack_file.stored(arrays, "moe.fp8.balanced"))
    np.testing.assert_allclose(np.exp(experts.log_ratio), 1.5, rtol=1.5 / stack_file.STEPS)
    prompts = HeadGrid.from_arrays(stack_file.stored(arrays, "prefill.bf16.128"))
    by_hand = 1.25 * np.exp(np.arange(6.0).reshape(2, 3))
    np.testing.assert_allclose(np.exp(prompts.log_us), by_hand, rtol=1.5 / stack_file.STEPS)
    assert "added.bf16.64" not in spec.kernels, "its prompts were measured: composed as ever"
    assert "added.bf16.128" not in spec.kernels, "no table of calls to take a ratio from"


def test_bands_are_as_much_wider_as_borrowing_is_wrong(pair: Pair) -> None:
    spec = with_borrowed("near", "vllm", ["gemm.fp8_block", "moe.fp8.balanced"])[0]
    for table, unknown in (("gemm.fp8_block", 25.0), ("moe.fp8.balanced", 50.0)):
        fit, pct = spec.kernels[table], LENT_PCT[stack_file.family_of(table)]
        assert fit.half_width_pct("between", unknown) == round((25 + pct**2) ** 0.5, 2)
        assert fit.half_width_pct("beyond", unknown) == round((unknown**2 + pct**2) ** 0.5, 2)
    own = spec.kernels["gemm.bf16"]
    assert (own.half_width_pct("between", 25.0), own.half_width_pct("beyond", 25.0)) == (5.0, 25.0)


def test_nothing_is_borrowed_that_nobody_has(pair: Pair) -> None:
    spec = with_borrowed("near", "vllm", ["gemm.int4_wo", "all_reduce.graph.2"])[0]
    assert spec is pair["near"][0]
    with pytest.raises(SpecError, match=r"dtype int4_wo; measured: bf16, fp8, nvfp4$"):
        spec.need("gemm", "int4_wo", "dtype")
    with pytest.raises(SpecError, match=r"no all_reduce of vllm .* measured: none$"):
        spec.need(ALL_REDUCE, "graph.2", "kernel, tp")
    assert with_borrowed("alone", "vllm", ["gemm.fp8"])[0] is pair["alone"][0]


def times(device: str, stack: Stack, dtype: WeightDtype) -> StackTimes:
    return StackTimes(device, Kernels(stack, dtype), load_model("minimax-m2"), 4)


def test_minimax_runs_on_a_b300_and_says_what_was_borrowed() -> None:
    lent, own = times("b300-sxm", "vllm", "fp8_block"), times("b200-sxm", "vllm", "fp8_block")
    marks = lent.provenance()
    mark, wide = marks["preproj"].mark, marks["preproj"].half_width_pct
    started = r"derived: fp8_block GEMM of vllm \S+ from b200-sxm by the ratio 0\.\d+ of gemm"
    assert re.match(started, mark)
    assert wide > own.provenance()["preproj"].half_width_pct and wide > LENT_PCT["gemm"]
    assert marks[MOE].kind == "measured" and marks["moe_router"].kind == "measured"
    tokens = np.array([1.0, 100.0, 2000.0])
    ratio = lent.by_rows("preproj", tokens) / own.by_rows("preproj", tokens)
    said = float(re.findall(r"by the ratio (\S+) of", mark)[0])
    np.testing.assert_allclose(ratio, said, atol=0.006)
    told = provenance(lent.meta)
    origin, _, doubt = mark.removeprefix("derived: ").partition(DOUBT)
    assert f"; borrowed: QKV projection, output projection: {origin} (within 29 %)" in told
    assert "take longer than bf16's for one token" in doubt
    assert "borrowed" not in provenance(own.meta)


@pytest.mark.parametrize("device", ALIKE[0])
def test_experts_that_no_gpu_alike_has_stay_refused(device: str) -> None:
    kernels = Kernels("trtllm", "bf16", moe_dtype="int4_wo")
    with pytest.raises(SpecError, match=r"no moe of trtllm .* int4_wo\S+; measured: bf16.balanced"):
        StackTimes(device, kernels, load_model("kimi-k2.5"), 4)


def test_a_borrowed_time_has_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And only a borrowed one: others keep the identity that they had."""
    lent, own = times("b300-sxm", "vllm", "fp8_block").meta, times("b300-sxm", "vllm", "fp8").meta
    assert lent.kernels is not None and own.kernels is not None
    assert own.kernels.sha256 == stack_file.stack_sha256("b300-sxm", "vllm")
    assert lent.kernels.sha256 == stack_file.stack_sha256("b300-sxm", "vllm", ["b200-sxm"])
    assert lent.kernels.sha256 != own.kernels.sha256
    asked: list[tuple[str, list[str]]] = []

    def seen(device: str, stack: str, lenders: list[str]) -> str:
        asked.append((device, lenders))
        return "other files"

    monkeypatch.setattr(stack_times, "stack_sha256", seen)
    assert times("b300-sxm", "vllm", "fp8_block").meta.content_sha256 != lent.content_sha256
    assert asked == [("b300-sxm", ["b200-sxm"])]


def test_an_older_engine_borrows_its_own_version() -> None:
    table = "gemm.fp8_block"
    old = with_borrowed("b300-sxm", "vllm@0.19.0", [table])[0].kernels[table]
    assert old.version.startswith("0.19.0 from b200-sxm")
    far = with_borrowed("b300-sxm", "vllm@0.24.0", [table])[0].kernels[table]
    assert far.half_width_pct("between", 25.0) > old.half_width_pct("between", 25.0)


def test_only_what_is_missing_is_looked_at() -> None:
    """No array of another GPU is unpacked for a stack that has everything."""
    spec, arrays = stack_file.load_stack("b300-sxm", "vllm")
    got = with_borrowed("b300-sxm", "vllm", ["gemm.fp8", "prefill.bf16.128", "added.bf16.128"])
    assert got[0] is spec and got[1] is arrays


def whole(table: str) -> str:
    """What would be missing with a table: the number format of experts with any distribution, the
    attention with any window."""
    if stack_file.family_of(table) == "attention":
        return re.sub(r"w\d+$", "", table)
    return ".".join(table.split(".")[:2])


def wrong(kind: str) -> Iterator[Array]:
    """The logarithmic errors of every table that two GPUs have, borrowed by the other tables."""
    pairs = (pair for group in ALIKE for pair in combinations(group, 2))
    for device, lender in pairs:
        for stack in STACKS:
            off = differences(device, lender, stack, kind)
            for table, mine in off.items():
                rest = [np.median(one) for name, one in off.items() if whole(name) != whole(table)]
                if rest:
                    yield np.abs(mine - np.median(rest)).ravel()


@pytest.mark.parametrize("family", LENT_PCT)
def test_the_error_of_borrowing_is_that_of_tables_both_have(family: str) -> None:
    kinds = ("prefill", "added", "decode") if family == "attention" else (family,)
    errors = np.concatenate([error for kind in kinds for error in wrong(kind)])
    assert len(errors) > 300_000
    found = 100 * np.expm1(np.quantile(errors, 0.9))
    assert abs(found - LENT_PCT[family]) < 0.1, found
