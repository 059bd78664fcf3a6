"""Recurrent layers and sparse attention: tables, laws, and a mean layer by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.experiments.lab.sources import aiconfigurator as tables
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.layer_kinds import Indexer
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import OPS, elementwise
from sarathi_sim.profiler.facts.roofline import attended_within
from sarathi_sim.profiler.kernels.sparse_law import SparseLaw, fit_sparse
from sarathi_sim.profiler.kernels.stack_attention import STATE, StateTimes
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.op_times.modelled import modelled_times
from tests.sampled import put_table

INDEXER = Indexer(heads=32, dim=128, top_k=2048)
RATES = np.array([0.4, 2e-3, 3e-7, 4e-7, 5e-5])


def rows_of(rates: np.ndarray) -> pd.DataFrame:
    """Prompts that follow the law, by hand: one row a chunk, context and number of heads."""
    found = []
    for heads in (8, 16, 64):
        for chunk in (512, 2048, 8192):
            for context in (0, 1024, 65536):
                near = float(attended_within(np.float64(chunk), np.float64(context), 2048))
                pairs = 32 * chunk * (context + chunk / 2)
                parts = [chunk, chunk * heads, pairs, near * heads, near]
                time = float(np.dot(parts, rates))
                found.append({"heads": heads, "chunk": chunk, "context": context, "time_us": time})
    return pd.DataFrame(found)


def test_the_law_of_sparse_attention_finds_its_rates_again() -> None:
    rows = rows_of(RATES)
    law = fit_sparse(rows, INDEXER)
    assert np.exp(law.log_rate) == pytest.approx(RATES, rel=1e-6)
    # A rate of nothing is stored, and is nothing again.
    none = fit_sparse(rows_of(RATES * [1, 0, 1, 0, 1]), INDEXER)
    again = SparseLaw.from_arrays(none.arrays())
    sizes = np.array([4096.0]), np.array([8192.0])
    assert again.us(*sizes, 8, INDEXER) == pytest.approx(none.us(*sizes, 8, INDEXER), rel=2e-3)
    assert again.us(*sizes, 64, INDEXER) == pytest.approx(again.us(*sizes, 8, INDEXER))


def test_stalls_of_the_host_do_not_move_the_law() -> None:
    rows = rows_of(RATES)
    stalled = rows.assign(time_us=rows["time_us"].where(rows.index % 9 > 0, 30 * rows["time_us"]))
    assert np.exp(fit_sparse(stalled, INDEXER).log_rate) == pytest.approx(RATES, rel=1e-4)


@given(
    st.floats(1, 2**15), st.floats(0, 2**17), st.integers(1, 128), st.floats(1, 4), st.booleans()
)
def test_more_tokens_and_more_context_take_no_less_time(
    chunk: float, context: float, heads: int, times: float, longer: bool
) -> None:
    law = SparseLaw(np.log(RATES))
    one = law.us(np.array([chunk]), np.array([context]), heads, INDEXER)
    size, held = (times * chunk, context) if longer else (chunk, times * context)
    assert law.us(np.array([size]), np.array([held]), heads, INDEXER) >= one * (1 - 1e-12)


GDN = {"phase": "context", "batch_size": 2, "seq_len": 64, "num_v_heads": 8, "num_k_heads": 2,
       "head_k_dim": 128, "head_v_dim": 128, "d_conv": 4}  # fmt: skip
DSA = {"architecture": "GlmMoeDsaForCausalLM", "op_name": "dsa_context_module",
       "kv_cache_dtype": "fp8", "gemm_type": "bfloat16", "num_heads": 8, "batch_size": 1,
       "isl": 4096, "step": 128, "latency": 1.5}  # fmt: skip


def test_a_recurrent_layer_is_its_convolution_and_its_scan(tmp_path: Path) -> None:
    conv, scan = ({**GDN, "kernel_source": name} for name in ("conv", "scan"))
    path = "linear_attention/vllm/0.24.0/gdn_perf.parquet"
    put_table(tmp_path, path,
        {**conv, "latency": 0.003}, {**scan, "latency": 0.02},
        {**scan, "latency": 0.03},                      # a second model with these heads: slower
        {**conv, "seq_len": 128, "latency": 0.004},     # the scan did not fit
        {**conv, "phase": "generation", "seq_len": 1, "latency": 0.002},
        {**scan, "phase": "generation", "seq_len": 1, "latency": 0.005})  # fmt: skip
    known = {"batch": 2, "heads": 8, "kv_heads": 2}
    for kind, chunk, time_us in (("prefill", 64, 23.0), ("decode", 1, 7.0)):
        found = tables.recurrent((tmp_path, "h100-80g-sxm", "vllm"), kind)
        assert found is not None and found[1] == "0.24.0"
        (row,) = found[0].to_dict("records")
        assert row == {**known, "chunk": chunk, "time_us": pytest.approx(time_us)}
    assert tables.recurrent((tmp_path, "h100-80g-sxm", "sglang"), "decode") is None


def test_blocks_of_sparse_attention_are_of_one_model_format_and_indexer(tmp_path: Path) -> None:
    path = "sparse_attention/sglang/0.5.14/dsa_context_module_perf.parquet"
    put_table(tmp_path, path, DSA,
        {**DSA, "op_name": "dsa_context_module_skip_indexer"}, {**DSA, "batch_size": 2},
        {**DSA, "architecture": "DeepseekV32ForCausalLM"},
        {**DSA, "gemm_type": "fp8_block", "latency": 0.5})  # fmt: skip
    for dtype, time_us in (("bf16", 1500.0), ("fp8_block", 500.0)):
        found = tables.sparse(
            (tmp_path, "h100-80g-sxm", "sglang"), "prefill", "fp8", DSA["architecture"], dtype
        )  # type: ignore[arg-type]
        assert found is not None and found[0].to_dict("records") == [
            {"heads": 8, "chunk": 4096, "context": 128, "time_us": time_us}
        ]


QWEN = load_model("qwen3-next-80b-a3b")


def test_a_mean_layer_is_a_quarter_attention_and_three_quarters_a_state() -> None:
    times = StackTimes("h200-sxm", Kernels("vllm"), QWEN, 4)
    plain = replace(QWEN, recurrent=None)
    full = StackTimes("h200-sxm", Kernels("vllm"), plain, 4)
    state = times.attention.state
    assert state is not None and state.heads == (8, 4) and not state.borrowed
    chunk, context = np.array([64.0, 2048.0]), np.array([0.0, 4096.0])
    expected = 0.25 * full.prefill(chunk, context) + 0.75 * state.prefill(chunk)
    assert times.prefill(chunk, context) == pytest.approx(expected)
    batch = np.array([1.0, 64.0])
    expected = 0.25 * full.decode(batch, context) + 0.75 * state.decode(batch)
    assert times.decode(batch, context) == pytest.approx(expected)
    expected = 0.25 * full.added(chunk) + 0.75 * state.added(times.batches, chunk)
    assert times.added(chunk) == pytest.approx(expected)
    # The table, at a measured size: both kernels of 64 sequences with 8 heads.
    assert state.decode(np.array([64.0]))[0] == pytest.approx(18.6, rel=0.02)


def test_projections_of_a_mean_layer_count_by_their_layers() -> None:
    assert [QWEN.share(op) for op in ("preproj", "postproj")] == [0.25, 0.25]
    assert [QWEN.share(op) for op in ("recurrent_in", "recurrent_out")] == [0.75, 0.75]
    shapes = QWEN.gemms(4)
    # A rank's queries, keys, values and gates, with a decay and a strength of each of 8 heads.
    channels = 2 * 4 * 128 + 8 * 128
    assert (shapes["recurrent_in"].n, shapes["recurrent_in"].k) == (channels + 8 * 130, 2048)
    assert (shapes["recurrent_out"].n, shapes["recurrent_out"].k) == (2048, 8 * 128)
    # Four query heads, each with a gate, and a KV head that two ranks share.
    assert shapes["preproj"].n == (2 * 4 + 2 * 1) * 256
    assert {"recurrent_in", "recurrent_out"} <= set(QWEN.row_ops)
    assert not any(OPS[op].layers == "recurrent" for op in load_model("qwen3-32b").row_ops)


def test_a_layer_without_a_network_has_one_all_reduce_and_one_norm() -> None:
    mix = QWEN.experts
    assert mix is not None
    bare = replace(QWEN, experts=replace(mix, bare_layers=tuple(range(12))))
    kernels = Kernels("vllm")
    found = [modelled_times(StackTimes("h200-sxm", kernels, m, 4)).reduces for m in (QWEN, bare)]
    assert found == [2.0, 1.75]
    shares = [
        sum(one.times for one in elementwise(model.shard(1)) if one.numbers == 2 * 2048)
        for model in (QWEN, bare)
    ]
    assert shares[0] - shares[1] == pytest.approx(0.25 + 0.25)  # a norm, and the shared gate's
    assert bare.share("moe") == 0.75
    expert = (
        512 * 3 * 2048 * 512 + 3 * 2048 * 512 + 512 * 2048 + 2048
    )  # routed, shared, router, gate
    assert QWEN.num_parameters - bare.num_parameters == 12 * (expert + 2048)


def test_an_indexer_reads_all_keys_and_attends_to_the_best() -> None:
    glm = load_model("glm-5")
    assert glm.cached_bytes(8, 2) == 576 * 2 + 132 and glm.cached_bytes(8, 1) == 656 + 132
    sizes = np.array([1.0]), np.array([100_000.0])
    assert glm.pairs(*sizes) == pytest.approx(2048.0)
    shapes, v32 = glm.gemms(8), load_model("deepseek-v3.2").gemms(8)
    assert shapes["preproj"].n == 2048 + 576 + 128 + 32 and shapes["q_up"].n == 8 * 256 + 32 * 128
    assert v32["preproj"].n == 1536 + 576 + 128 + 64 and v32["q_up"].n == 16 * 192 + 64 * 128


def test_what_was_not_measured_is_refused() -> None:
    glm, sizes = load_model("glm-5"), "measured with the sizes of deepseek-v3.2 and glm-5 only"
    with pytest.raises(SpecError, match=sizes):
        StackTimes("b200-sxm", Kernels("sglang"), replace(glm, indexer=Indexer(16, 128, 2048)), 8)
    with pytest.raises(SpecError, match="recurrent layers, which qwen3-next-80b-a3b has"):
        StackTimes("l40s", Kernels("vllm"), QWEN, 4)


def test_states_of_other_sizes_count_as_heads_with_as_many_numbers() -> None:
    assert QWEN.recurrent is not None
    spec = StackTimes("h200-sxm", Kernels("vllm"), QWEN, 1).spec
    grid = StackTimes("h200-sxm", Kernels("vllm"), QWEN, 1).attention._named
    mamba = replace(QWEN.recurrent, kind="mamba2", key_heads=8, value_heads=64, value_dim=64)
    times = StateTimes(spec, grid, "nano", mamba, 1)
    assert times.borrowed and times.heads == (32, 8)
    assert f"decode.{STATE}" in spec.kernels


def test_layers_without_a_network_are_refused_where_layers_are_alike() -> None:
    model = load_model("qwen3-30b-a3b")
    model.check_plain("the profiler", mixtures=True)
    bare = replace(model, experts=replace(model.experts, bare_layers=(3,)))  # type: ignore[type-var]
    with pytest.raises(
        ValueError, match="has layers without a network, not supported by the profiler"
    ):
        bare.check_plain("the profiler", mixtures=True)
