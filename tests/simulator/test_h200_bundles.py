"""The bundles measured on an H200 (data/profiles), held to floors: beside published kernels, whole
layers beside their ops, and the regressions on points left out."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.profiler.bundle.diff import diff_bundles
from sarathi_sim.profiler.bundle.schema import Bundle, bundle_path, list_bundles, load_bundle
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.hold_out import median_p95_worst
from sarathi_sim.profiler.physics.shard_times import asked_at
from sarathi_sim.simulator.confidence.held_out import between, beyond, op_tables, residuals
from sarathi_sim.simulator.op_times.interaction import interaction_errors, skew_errors
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.regression import bundle_times

ROOT = Path(__file__).resolve().parents[2] / "data" / "profiles"
NAMES = list_bundles(ROOT)


@cache
def bundle(name: tuple[str, str, int]) -> Bundle:
    return load_bundle(bundle_path(ROOT, *name))


@cache
def times(name: tuple[str, str, int]) -> OpTimes:
    return bundle_times(bundle(name))


def test_all_six_are_there() -> None:
    assert len(NAMES) == 6
    assert all(bundle(name).meta.environment["gpu"] == "NVIDIA H200" for name in NAMES)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", [name for name in NAMES if name[0] == "h200"], ids=str)
def test_gemms_take_what_published_kernels_take(name: tuple[str, str, int], stack: Stack) -> None:
    """In bf16, within 10 % in the median of each GEMM of TP 1; of TP 2, whose weights are half as
    large and read in part from the L2 by some, within 15 %."""
    ours = bundle(name)
    model, tp = ours.meta.model_spec, ours.meta.tp
    theirs = asked_at(StackTimes("h200-sxm", Kernels(stack), model, tp), ours)
    found = {diff.op: diff.median for diff in diff_bundles(theirs, ours)[0]}
    for op in model.gemms(tp):
        assert abs(found[op] - 1) < (0.10 if tp == 1 else 0.15), op


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_decodes_by_cudnn_take_what_published_kernels_take(stack: Stack) -> None:
    """Within 10 % in the median; by xformers, which runs FlashAttention 2 on this GPU, half as long
    again and more."""
    for device, low, high in (("h200-cudnn", -0.10, 0.10), ("h200", 0.50, 0.80)):
        ours = bundle((device, "llama-13b", 1))
        theirs = asked_at(StackTimes("h200-sxm", Kernels(stack), ours.meta.model_spec, 1), ours)
        found = {diff.op: diff.median for diff in diff_bundles(theirs, ours)[0]}
        assert low < found[DECODE] - 1 < high


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_layer_is_the_sum_of_its_ops(name: tuple[str, str, int]) -> None:
    """Within 2 % in the median. In fp8 a layer rounds its activations, too, which no op holds: 5 %,
    and 2 % with the terms of whole layers."""
    errors = interaction_errors(bundle(name), times(name))
    assert errors["sum"].median() < (5 if name[0] == "h200-fp8" else 2)
    assert errors["measured"].median() < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_regressions_hold_on_points_left_out(name: tuple[str, str, int]) -> None:
    """Between points within 5 % in the median of each op; 11 % in attention of prompts, of which
    13B has 60 points. An extrapolated GEMM within 4 %, and within 15 % the LM head, whose points up
    to 64 rows show no FLOP rate."""
    for table in op_tables(bundle(name)):
        if table.op.startswith("send_recv") or table.op == ALL_REDUCE:
            continue  # published ones
        inside, _ = residuals(table, between(table), table.fit)
        assert median_p95_worst(inside)[0] < (11 if table.op == PREFILL else 5), table.op
        if table.shape is not None and (outside := beyond(table)):
            median = median_p95_worst(residuals(table, outside, table.far)[0])[0]
            assert median < (15 if OPS[table.op].outputs else 4), table.op


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_unequal_decodes_are_nearer_than_their_mean(name: tuple[str, str, int]) -> None:
    errors = skew_errors(bundle(name), times(name)).median()
    assert errors["skew"] < errors["mean"]
    padded = name[0] in ("h200-cudnn", "h200-sdpa")
    assert errors["skew"] < (16 if padded else 7)
    skew = times(name).skew
    assert (skew.sequences == np.inf) == padded
