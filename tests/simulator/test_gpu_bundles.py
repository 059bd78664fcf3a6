"""The bundles measured on GPUs (data/profiles), held to floors: beside published kernels, whole
layers beside their ops, and the regressions on points left out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.schema import (
    TABLES,
    Bundle,
    bundle_path,
    list_bundles,
    load_bundle,
)
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import Kernels, Stack
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, OPS, PREFILL
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.physics.fit import median_p95_worst
from sarathi_sim.profiler.physics.shard_times import asked_at
from sarathi_sim.simulator.confidence.held_out import between, beyond, op_tables, residuals
from sarathi_sim.simulator.op_times.interaction import interaction_errors, skew_errors
from sarathi_sim.simulator.op_times.op_times import MEAN, OpTimes
from sarathi_sim.simulator.op_times.regression import bundle_times

ROOT = Path(__file__).resolve().parents[2] / "data" / "profiles"
NAMES = list_bundles(ROOT)
#: The same shards by xformers, on two machines.
TWO_HOURS = ("h200", "h200-dense")
H100 = "h100-80gb-hbm3"


@cache
def bundle(name: tuple[str, str, int]) -> Bundle:
    return load_bundle(bundle_path(ROOT, *name))


def ratios(first: Bundle, second: Bundle) -> dict[str, pd.Series[float]]:
    """Times of ``second`` over those of ``first`` at the sizes of both, by op."""
    ratio = {}
    for name in ("linear", PREFILL, DECODE):
        tables = (bundle.tables()[name] for bundle in (first, second))
        both = pd.merge(*tables, on=list(TABLES[name].key), suffixes=("_first", "_second"))
        values = both.time_us_second / both.time_us_first
        ratio |= dict(list(values.groupby(both.op))) if name == "linear" else {name: values}
    return ratio


@cache
def times(name: tuple[str, str, int]) -> OpTimes:
    return bundle_times(bundle(name))


def test_all_are_there() -> None:
    gpus = [bundle(name).meta.environment["gpu"] for name in NAMES]
    assert gpus == 8 * ["NVIDIA H100 80GB HBM3"] + 8 * ["NVIDIA H200"]


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", [n for n in NAMES if n[0] in (*TWO_HOURS, H100)], ids=str)
def test_gemms_take_what_published_kernels_take(name: tuple[str, str, int], stack: Stack) -> None:
    """In bf16, within 10 % in the median of each GEMM of TP 1; of TP 2, and of a mixture with 2048
    columns, whose weights are small and read in part from the L2 by some, within 15 %."""
    ours = bundle(name)
    model, tp = ours.meta.model_spec, ours.meta.tp
    gpu = "h100-80g-sxm" if name[0] == H100 else "h200-sxm"
    theirs = asked_at(StackTimes(gpu, Kernels(stack), model, tp), ours)
    found = ratios(theirs, ours)
    small = tp > 1 or model.experts is not None
    for op in set(model.gemms(tp)) - {"moe_router"}:
        assert abs(found[op].median() - 1) < (0.15 if small else 0.10), op


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-32b"])
def test_gemms_in_fp8_take_what_published_kernels_take(name: str) -> None:
    """TensorRT-LLM's, within 10 % in the median of each; an H200's within 5 %; and 50 to 60 % of
    what they take in bf16. SGLang's and vLLM's take 1.2 to 1.7 times as long as ours."""
    ours, bf16 = bundle((f"{H100}-fp8", name, 1)), bundle((H100, name, 1))
    model = ours.meta.model_spec
    published = asked_at(StackTimes("h100-80g-sxm", Kernels("trtllm", "fp8"), model, 1), ours)
    h200 = [bundle(other) for other in NAMES if other == ("h200-fp8", name, 1)]
    to_published, to_bf16, *to_h200 = (
        {op: found.median() for op, found in ratios(other, ours).items()}
        for other in (published, bf16, *h200)
    )
    for op in set(model.gemms(1)) - {"lm_head"}:
        assert abs(to_published[op] - 1) < 0.10, op
        assert all(abs(to[op] - 1) < 0.05 for to in to_h200), op
        assert 0.50 < to_bf16[op] < 0.60, op
    assert abs(to_bf16["lm_head"] - 1) < 0.01  # it is in bf16 in both


def test_two_models_share_the_times_of_equal_shapes() -> None:
    """Llama 3 8B and Qwen3 8B have the same QKV, output and attention. Measured a day apart, each
    is within 2 % in the median, and nine in ten within 10 %."""
    llama, qwen = (bundle((H100, model, 1)) for model in ("llama-3-8b", "qwen3-8b"))
    meta = replace(qwen.meta, model="llama-3-8b", model_spec=llama.meta.model_spec)
    renamed = Bundle(meta, **qwen.tables())
    found = ratios(llama, renamed)
    for op in ("preproj", "postproj", PREFILL, DECODE):
        low, middle, high = found[op].quantile([0.05, 0.5, 0.95])
        assert len(found[op]) > 75 and abs(middle - 1) < 0.02, op
        assert low > 0.9 and high < 1.1, op


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_decodes_by_cudnn_take_what_published_kernels_take(stack: Stack) -> None:
    """Within 10 % in the median; by xformers, which runs FlashAttention 2 on this GPU, half as long
    again and more."""
    cases = (("h200-cudnn", -0.10, 0.10), ("h200", 0.50, 0.80), ("h200-dense", 0.40, 0.80))
    for device, low, high in cases:
        ours = bundle((device, "llama-13b", 1))
        theirs = asked_at(StackTimes("h200-sxm", Kernels(stack), ours.meta.model_spec, 1), ours)
        assert low < ratios(theirs, ours)[DECODE].median() - 1 < high


@pytest.mark.parametrize("model", ["llama-13b", "llama-3-8b"])
def test_two_machines_measured_the_same(model: str) -> None:
    """At the same sizes, each op within 3 % in the median, and nine in ten within 10 %."""
    first, second = (bundle((device, model, 1)) for device in TWO_HOURS)
    found = ratios(first, second)
    assert {PREFILL, DECODE, *first.meta.model_spec.gemms(1)} <= found.keys()
    for op, ratio in found.items():
        assert abs(ratio.median() - 1) < 0.03, op
        assert ratio.quantile(0.05) > 0.9 and ratio.quantile(0.95) < 1.1, op


@pytest.mark.parametrize("model", ["llama-13b", "llama-3-8b"])
def test_an_h100_is_an_h200_with_slower_memory(model: str) -> None:
    """Attention of prompts within 5 % of an H200's in the median. The LM head, which reads its
    weights, takes longer by the copies' ratio (1.40), within 5 % of it at the fewest tokens."""
    slow, fast = bundle((H100, model, 1)), bundle(("h200-dense", model, 1))
    assert abs(ratios(fast, slow)[PREFILL].median() - 1) < 0.05
    copies = [load_device(ROOT / f"{name}.yaml").memory_bandwidth for name in ("h200-dense", H100)]
    heads = [
        b.linear[b.linear.op == "lm_head"].set_index("num_tokens").time_us for b in (slow, fast)
    ]
    assert heads[0][1] / heads[1][1] == pytest.approx(copies[0] / copies[1], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-13b", "llama-3-8b"])
@pytest.mark.parametrize("fitted", TWO_HOURS)
def test_one_machine_predicts_points_that_only_the_other_measured(fitted: str, model: str) -> None:
    """Within 10 % in the median of attention and of each GEMM with ten such points. Most were
    measured because their neighbours had not told them."""
    (other,) = {*TWO_HOURS} - {fitted}
    ours, theirs, known = (
        times((fitted, model, 1)),
        bundle((other, model, 1)),
        bundle((fitted, model, 1)),
    )
    for op, rows in theirs.linear.groupby("op"):
        seen = known.linear[known.linear.op == op].num_tokens
        rows = rows[~rows.num_tokens.isin(seen)]
        if len(rows) >= 10:
            told = ours.by_rows[str(op)](rows.num_tokens.to_numpy(float)) * 1e6
            assert np.median(np.abs(told / rows.time_us - 1)) < 0.10, op
    for op, ask in ((PREFILL, ours.prefill), (DECODE, ours.decode)):
        keys = list(TABLES[op].key)
        rows = theirs.tables()[op].merge(
            known.tables()[op][keys], on=keys, how="left", indicator=True
        )
        rows = rows[rows["_merge"] == "left_only"]
        told = ask(*(rows[key].to_numpy(float) for key in keys)) * 1e6
        assert len(rows) and np.median(np.abs(told / rows.time_us - 1)) < 0.10, op


WITH_LAYERS = [name for name in NAMES if len(bundle(name).mixed)]


@pytest.mark.parametrize("name", WITH_LAYERS, ids=str)
def test_a_layer_is_the_sum_of_its_ops(name: tuple[str, str, int]) -> None:
    """Within 2 % in the median. In fp8 a layer rounds its activations, too, which no op holds: 5 %,
    and 2 % with the terms of whole layers."""
    errors = interaction_errors(bundle(name), times(name))
    assert errors["sum"].median() < (5 if name[0].endswith("-fp8") else 2)
    assert errors["measured"].median() < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_regressions_hold_on_points_left_out(name: tuple[str, str, int]) -> None:
    """Between points within 5 % in the median of each op; 11 % in attention of prompts, of which
    13B has 60 points. An extrapolated GEMM within 4 %, and within 15 % the LM head, whose points up
    to 64 rows show no FLOP rate, and those of a mixture, which are small (6 to 12 % off)."""
    small = bundle(name).meta.model_spec.experts is not None
    for table in op_tables(bundle(name)):
        if table.op.startswith("send_recv") or table.op == ALL_REDUCE:
            continue  # published ones
        inside, _ = residuals(table, between(table), table.fit)
        assert median_p95_worst(inside)[0] < (11 if table.op == PREFILL else 5), table.op
        if table.shape is not None and (outside := beyond(table)):
            median = median_p95_worst(residuals(table, outside, table.far)[0])[0]
            assert median < (15 if small or OPS[table.op].outputs else 4), table.op


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_unequal_decodes_are_nearer_than_their_mean(name: tuple[str, str, int]) -> None:
    """On batch sizes left out, in the median. On the H100 13B, Qwen2.5 and the mixture keep the
    mean: the law is no better there (10.0 % both; 12.6 and 10.2; 10.4 and 8.7)."""
    errors, skew = skew_errors(bundle(name), times(name)).median(), times(name).skew
    if name[0] == H100 and name[1] in ("llama-13b", "qwen2.5-7b", "qwen3-30b-a3b"):
        assert skew == MEAN and errors["skew"] > errors["mean"] - 0.1
        return
    assert errors["skew"] < errors["mean"]
    padded = name[0] in ("h200-cudnn", "h200-sdpa")
    assert errors["skew"] < (16 if padded else 7)
    assert (skew.sequences == np.inf) == padded
