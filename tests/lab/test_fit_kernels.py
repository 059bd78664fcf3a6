"""Fits of a stack's kernels: what the public tables give, and how they are judged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.lab.fit import holdout, kernels
from sarathi_sim.experiments.lab.fit.holdout import Errors, Fitted
from sarathi_sim.experiments.lab.fit.kernels import latent_rows
from sarathi_sim.experiments.lab.sources import aiconfigurator as tables
from sarathi_sim.experiments.lab.sources import llmservingsim as perf_tables
from sarathi_sim.profiler.bundle.tables import BundleError
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.kernels.attention_grid import fit_prefill
from sarathi_sim.profiler.kernels.gemm_lattice import GemmLattice, gemm_cube
from sarathi_sim.profiler.kernels.message_curves import ExchangeCurves
from sarathi_sim.profiler.kernels.moe_surface import Rates, moe_table
from sarathi_sim.profiler.kernels.stack_attention import LESS
from sarathi_sim.profiler.kernels.stack_file import LeftOut, load_stack, stored
from sarathi_sim.profiler.kernels.stack_times import StackTimes
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.profiler.storage.strict import SpecError
from tests.profiler.test_kernels import gemm_rows
from tests.profiler.test_layer_kinds import INDEXER, RATES, rows_of
from tests.profiler.test_moe import MODELS, ROW, TOKENS, rows, table_of
from tests.profiler.test_moe import RATES as MOE_RATES
from tests.sampled import needs_datasets, put_table

pytestmark = pytest.mark.lab

H100 = "h100-80g-sxm"


def score(errors: Iterable[Errors]) -> LeftOut:
    found = holdout.summary(errors)
    assert found is not None
    return found


# Hold-outs --------------------------------------------------------------------------------------


def test_a_band_of_few_rows_is_as_wide_as_covers_further_ones() -> None:
    """Nineteen errors: the eighteenth, 0.9 * (19 + 1). Of four, the largest; of their halves, 1 and
    3 %, 2 and 4 %, the larger of the first covers one of the others."""
    errors = np.log1p(np.arange(1.0, 20.0) / 100)
    found, few = score([(errors, errors)]), score([(errors[:4], errors[:4])])
    assert (found.half_width_pct, few.half_width_pct, few.covered_pct) == (18, 4, 75)
    assert holdout.summary([]) is None


def test_a_gemm_left_out_is_neither_fitted_nor_cleaned_with() -> None:
    """One n of its own law is off by as much; the others are not. Of few shapes each is left out:
    the law is a line in the logarithm of n."""
    straight = gemm_rows()
    odd = straight.assign(time_us=straight["time_us"].where(straight["n"] != 1024, lambda t: t / 2))
    for table, least, most in ((straight, 0.0, 0.0), (odd, 90.0, 120.0)):
        raw = gemm_cube(table)
        found = score(holdout.gemm_kinds(table, raw, raw, np.array([0, 3, 6]), few=False)["shapes"])
        assert least <= found.worst_pct <= most
    few = straight[((straight["n"] == 1024) & (straight["k"] < 2048)) | (straight["k"] == 1024)]
    cube = gemm_cube(few)
    kinds = holdout.gemm_kinds(few, cube, cube, np.array([0]), few=True)
    off = [part for part, _ in kinds["shapes"]]
    shapes = few[["n", "k"]].drop_duplicates().to_numpy().tolist()
    assert len(off) == len(shapes) and np.abs(off[shapes.index([2048, 1024])]).max() < 1e-9


def test_every_other_batch_of_prompts_between_one_and_the_most_is_scored() -> None:
    table = pd.DataFrame(
        [(b, h, 1, c, 12 + 1e-3 * b * h * c)
         for b, h, c in product((1, 2, 4, 16, 64), (4, 16), (16, 64, 256))],
        columns=["batch", "heads", "kv_heads", "chunk", "time_us"],
    )  # fmt: skip
    found = score(holdout.together(table))
    assert found.rows == 3 * 6 and found.worst_pct < 0.1
    slow = table.assign(time_us=table["time_us"] * np.where(table["batch"] == 4, 2, 1))
    assert score(holdout.together(slow)).worst_pct > 40


def test_rows_on_a_law_are_found_again_without_them() -> None:
    """Chunks after a prefix, and sparse attention; of messages the middle one is off."""
    lengths = np.array([64.0, 256.0, 1024.0, 8192.0])
    fresh = pd.DataFrame({"chunk": lengths, "time_us": 1e-3 * lengths * (lengths / 2 + 64)})
    prompt = fit_prefill(fresh.assign(heads=32, kv_heads=8))
    sizes = [(c, p, 32, 8, 5 + c * p) for c in (64, 128, 512) for p in (128, 512, 2048)]
    after = pd.DataFrame(sizes, columns=["chunk", "context", "heads", "kv_heads", "time_us"])
    (clean, raw), (context, _) = holdout.prefix_kinds(after, prompt, 128)["sizes"]
    assert clean is raw and len(clean) == len(context) == 3
    for errors in holdout.sparse_kinds(rows_of(RATES), INDEXER).values():
        assert score(errors).worst_pct == 0
    sent = pd.DataFrame({"num_bytes": [256, 1024, 4096], "time_us": [3.0, 14.0, 16.0]})
    ((off, _),) = holdout.messages(sent)
    assert np.expm1(off) == pytest.approx([7.0 / ((4 / 3 + 19 / 16) / 2) / 14.0 - 1])


def test_an_exchange_is_judged_within_the_ranks_that_are_left() -> None:
    """Of two models: one with three numbers of ranks, one with the middle one."""
    shapes = np.array([(1000, 2, 8, 4), (1000, 2, 8, 8), (1000, 2, 8, 16), (2000, 2, 8, 8)])
    curves = ExchangeCurves(shapes, np.array([1.0, 4.0, 16.0]), np.log(np.ones((4, 3))))
    kinds = {kind: [*errors] for kind, errors in holdout.exchange_kinds(curves).items()}
    assert {kind: len(errors) for kind, errors in kinds.items()} == {
        "sizes": 4, "ranks": 1, "shapes": 1,
    }  # fmt: skip
    assert np.abs(kinds["ranks"][0][0]).max() < 1e-9


def test_errors_of_experts_are_those_of_whole_models_left_out() -> None:
    kinds = holdout.moe_kinds(moe_table(rows()), MOE_RATES, wide=True)
    counts = {kind: [off.shape for off, _ in errors] for kind, errors in kinds.items()}
    assert counts == {"shapes": 3 * [(3, len(TOKENS))], "beyond": [(3, len(TOKENS))], "ranks": []}
    inside = score(holdout.moe_kinds(table_of(), MOE_RATES, wide=False)["shapes"])
    assert inside.rows == 3 * 3 * len(TOKENS) and inside.worst_pct < 6.2
    slow = holdout.moe_kinds(table_of(MODELS[1]), MOE_RATES, wide=False)["shapes"]
    assert max(np.median(np.abs(off)) for off, _ in slow) == pytest.approx(np.log(6), abs=0.3)
    tables = {f"moe.bf16.{spread}": (rows(), "1.0", MOE_RATES) for spread in ("even", "skewed")}
    for fitted in kernels.fit_experts(tables):
        # Of both: six of twelve shapes, five of seven token counts (the ratio is the same at all).
        assert fitted.fit.left_out["between"].rows == 2 * 6 * 5


# Fits -------------------------------------------------------------------------------------------


def test_weights_come_from_memory_not_from_l2() -> None:
    """A memory that gives 1 byte a ns at 80 % and an L2 of 1 MB, in which half of the smaller
    shapes were timed; then the cleaning spreads none of them."""
    table = gemm_rows().query("m in (1, 8, 64)")
    true = 1e-3 * table["n"] * table["k"] / 0.8 * (1 + 0.01 * table["m"])
    held = (table["n"] * table["k"] < 1e6) & (table["n"] != 512)
    table = table.assign(time_us=true.where(~held, 0.2 * true))
    found = kernels.fit_gemm("gemm.fp8", table, "1.0", Rates(1e15, 1e9, 1.0, cache=1e6))
    assert found.fit.raised_pct == pytest.approx(100 * held.mean(), abs=0.01)
    lattice = GemmLattice.from_arrays(found.surface.arrays())
    for m, n, k in ((1, 256, 256), (8, 1024, 512), (64, 512, 512), (1, 4096, 4096)):
        wanted = 1e-3 * n * k / 0.8 * (1 + 0.01 * m)
        assert lattice.time_us(np.array([float(m)]), n, k)[0] == pytest.approx(wanted, rel=1e-3)


def test_an_eager_message_holds_no_launch_of_the_host() -> None:
    """100 GB/s at 80 %: a copy of 1 MB, read and written, takes 25 us."""
    device = replace(load_device(H100), memory_bandwidth=100e9)
    sizes = pd.DataFrame({"gpus": 2, "num_bytes": [1000, 1_000_000, 10_000_000]})
    graph = sizes.assign(time_us=[3.0, 30.0, 300.0])
    eager = sizes.assign(time_us=[60.0, 60.0, 500.0])
    found = kernels.without_launches({"graph": (graph, "1"), "eager": (eager, "1")}, device)
    np.testing.assert_allclose(found["eager"][0]["time_us"], [3.025, 55.0, 500.0])
    assert kernels.without_launches({"eager": (eager, "1")}, device)["eager"][0] is eager


def test_blocks_of_sparse_attention_are_taken_without_launches_and_gemms() -> None:
    """Blocks of up to 128 tokens take 800 us, whatever is in them: launches. What takes less than
    1.3 times as long may be launches, too. A block has four GEMMs."""

    def gemms(each_us: float) -> Any:
        return SimpleNamespace(time_us=lambda m, n, k: each_us + 0.0 * m)

    sizes = [(16, 800.0), (128, 800.0), (512, 900.0), (2048, 1041.0), (4096, 2000.0)]
    blocks = pd.DataFrame([{"heads": 8, "chunk": n, "context": 0, "time_us": t} for n, t in sizes])
    for each_us in (0.0, 10.0):
        prompts = kernels.sparse_prompts(blocks, gemms(each_us), "glm-5")
        assert prompts["chunk"].tolist() == [2048, 4096]
        assert prompts["time_us"].tolist() == [1041 - 4 * each_us, 2000 - 4 * each_us]
    decodes = pd.DataFrame(
        [{"heads": 8, "batch": b, "context": 64, "time_us": t} for b, t in ((1, 150.0), (8, 170.0))]
    )
    left = kernels.sparse_decodes(decodes, gemms(0.0), "glm-5")
    assert left["time_us"].tolist() == [30.0, 50.0] and set(left["kv_heads"]) == {1}


# Stacks -----------------------------------------------------------------------------------------


def gemm_table(root: Path, stack: str, version: str, **columns: Any) -> None:
    """GEMMs of 10 x 10 shapes that take (10 + m) us; a column may depend on the row."""
    every = [256 * i for i in range(1, 11)]
    table = [{"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 1e-3 * (10 + m)}
             for m, n, k in product((1, 8, 64), every, every)]  # fmt: skip
    changed = [{**r, **{c: f(r) for c, f in columns.items()}} for r in table]
    put_table(root, f"gemm/{stack}/{version}/gemm_perf.parquet", *changed)


def test_dynamic_quantisation_is_subtracted_and_repairs_are_counted(tmp_path: Path) -> None:
    """TensorRT-LLM's fp8 rows, as a server with static scales runs them; one row of bf16 is a bad
    sample. One pair of head counts is a stub, and a newer table holds launches."""

    def slow(row: dict[str, Any]) -> float:
        return 1.0 if row["m"] * row["n"] * row["k"] == 256**2 else float(row["latency"])

    gemm_table(tmp_path, "trtllm", "1.0", latency=slow)
    gemm_table(tmp_path, "trtllm", "0.9", gemm_dtype=lambda row: "fp8",
               latency=lambda row: row["latency"] + 0.008)  # fmt: skip
    sizes = [{"m": m, "k": 256 * i} for m in (1, 8, 64) for i in range(1, 11)]
    for table, time in (("computescale_perf", 0.006), ("scale_matrix_perf", 0.002)):
        of = ({**size, "latency": time} for size in sizes)
        put_table(tmp_path, f"quantize/trtllm/1.0/{table}.parquet", *of)
    decode = {"num_heads": 8, "num_key_value_heads": 1, "head_dim": 128, "window_size": 0}
    decode |= {"batch_size": 4, "isl": 1, "step": 255, "latency": 0.01}
    decode |= {"kv_cache_dtype": "bfloat16", "attn_dtype": "bfloat16"}
    put_table(tmp_path, "attention/trtllm/1.0/generation_attention_perf.parquet", decode)
    spec, arrays = kernels.fit_stack(tmp_path, H100, "trtllm")
    assert list(spec.kernels) == ["gemm.bf16", "gemm.fp8"] and spec.floor_us == 2.0
    assert spec.kernels["gemm.bf16"].repaired_far_pct == pytest.approx(100 / 300, abs=0.01)
    gemm_table(tmp_path, "trtllm", "2.0", latency=lambda row: 0.06)
    assert kernels.fit_stack(tmp_path, H100, "trtllm")[0] == spec
    for dtype in ("bf16", "fp8"):
        lattice = GemmLattice.from_arrays(stored(arrays, f"gemm.{dtype}"))
        times = lattice.time_us(np.array([1.0, 8.0, 64.0]), 512, 512)
        np.testing.assert_allclose(times, [11, 18, 74], rtol=0.06)


def test_another_version_is_fitted_beside_the_newest(tmp_path: Path) -> None:
    """Its own rows alone, unscored; a table of the newest's very version is left out."""
    newest = load_stack(H100, "vllm")[0].kernels["gemm.bf16"].version
    for version, names in (("0.14.0", ["gemm.bf16"]), (newest, [])):
        gemm_table(tmp_path, "vllm", version)
        of = (tmp_path, H100, f"vllm@{version}")
        spec, arrays = kernels.fit_stack(*of, families=("gemm",))
        assert [*spec.kernels] == names and spec.stack == f"vllm@{version}"
        assert all(not fit.left_out for fit in spec.kernels.values())
        assert len(arrays) == 4 * len(names)


def test_a_stack_without_other_tables_still_has_its_experts(tmp_path: Path) -> None:
    both = [{**ROW, "num_tokens": tokens} for tokens in (1, 64)]
    put_table(tmp_path, "moe/sglang/0.5/moe_perf.parquet", *both)
    spec, arrays = kernels.fit_stack(tmp_path, H100, "sglang")
    assert list(spec.kernels) == ["moe.bf16.balanced"]
    assert {name.rpartition(".")[0] for name in arrays} == set(spec.kernels)


def test_what_has_no_published_kernels() -> None:
    assert [len(kernels.check_fitted(None, stack)) for stack in ("vllm", "sglang")] == [9, 8]
    for device, stack, said in (("h100", "vllm", "device 'h100'"), (None, "vlm", "stack 'vlm'")):
        with pytest.raises(SpecError, match=rf"{said} has no published kernels \(did you mean"):
            kernels.check_fitted(device, stack)


# What ships is what the public tables give ------------------------------------------------------


def check(found: Iterable[Fitted], device: str, stack: str) -> set[str]:
    """Each is the shipped one, to the number; returns their names."""
    spec, arrays = load_stack(device, stack)
    names = set()
    for one in found:
        shipped = spec.kernels[one.table]
        assert replace(one.fit, kernel=shipped.kernel) == shipped, one.table
        again, known = one.surface.arrays(), stored(arrays, one.table)
        assert again.keys() == known.keys()
        assert all(np.array_equal(again[name], known[name]) for name in again), one.table
        names.add(one.table)
    assert names
    return names


@needs_datasets
def test_shipped_experts_and_curves() -> None:
    of = public_datasets(), H100, "vllm"
    check(kernels.fit_experts(kernels.expert_tables(of, "w4a16_mxfp4")), *of[1:])
    check(kernels._fits(of, {"all_reduce", "all_to_all"}), *of[1:])


@pytest.mark.slow
@needs_datasets
@pytest.mark.parametrize(
    ("device", "stack", "families", "pattern"),
    [
        ("gb200", "sglang", {"wide"}, r"wide\."),
        ("l40s", "vllm", {"gemm"}, r"gemm\."),
        ("l40s", "trtllm", {"attention"}, r"(prefill|added|decode)\.bf16\.(64|mla)$"),
        ("b200-sxm", "sglang", {"attention"}, r".*(\.dsa|state\.)"),
    ],
)
def test_shipped_tables(device: str, stack: str, families: set[str], pattern: str) -> None:
    chosen = re.compile(pattern)
    found = kernels._fits((public_datasets(), device, stack), families)
    names = check((one for one in found if chosen.match(one.table)), device, stack)
    assert names == {*filter(chosen.match, load_stack(device, stack)[0].kernels)}


@needs_datasets
def test_the_shipped_profile_is_what_its_folder_gives() -> None:
    """To the number; and close to what was measured, prefixes included."""
    of = public_datasets(), "rtx-4090", "vllm"
    check(kernels._fits(of, {"gemm", "attention"}), *of[1:])
    times = StackTimes("rtx-4090", Kernels("vllm"), load_model("llama-3.1-8b"), 1)
    cells = perf_tables.attention_cells(public_datasets() / "llmservingsim_rtx4090")
    chunks = perf_tables.alone(cells, {"prefill_chunk": "chunk", "kv_prefill": "context"})
    chunk, context = (chunks[c].to_numpy(np.float64) for c in ("chunk", "context"))
    off = np.abs(np.log(times.prefill(chunk, context) / chunks["time_us"]))
    # A few cells are faster than HBM: their cache was in L2.
    assert len(off) == 96 and np.quantile(off, 0.9) < 0.01 and off.max() < 0.2


# The published kernel tables: units, versions, what is left out, and what is refused

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
    newest, before = tables.gemms((tmp_path, "h100-80g-sxm", "trtllm"), "bf16")
    assert (newest[1], before[1]) == ("1.3.0rc20", "1.3.0rc5")
    assert newest[0].to_dict("records") == [{"m": 8, "n": 512, "k": 1024, "time_us": 4.0}]
    ((_, version),) = tables.gemms((tmp_path, "h100-80g-sxm", "trtllm"), "int4_wo")
    assert version == "1.3.0rc5"
    assert list(tables.gemms((tmp_path, "h100-80g-sxm", "trtllm"), "nvfp4")) == []
    assert list(tables.gemms((tmp_path, "h100-80g-sxm", "vllm"), "bf16")) == []


def test_a_decode_holds_its_cached_tokens_and_the_new_one(tmp_path: Path) -> None:
    windowed = {**DECODE, "window_size": 128, "latency": 0.5}
    path = "attention/vllm/0.24.0/generation_attention_perf.parquet"
    fp8 = {**DECODE, "kv_cache_dtype": "fp8", "latency": 0.02}
    put_table(tmp_path, path, DECODE, windowed, fp8)
    for kv_dtype, time_us in (("bf16", 10.0), ("fp8", 20.0)):
        found = tables.decode((tmp_path, "h100-80g-sxm", "vllm"), kv_dtype)  # type: ignore[arg-type]
        assert found is not None
        (row,) = found[0].to_dict("records")
        assert (row["batch"], row["context"], row["time_us"]) == (4, 256, time_us)
        assert (row["heads"], row["kv_heads"], row["head_dim"]) == (8, 1, 128)


def test_with_an_fp8_cache_the_kernel_that_computes_in_fp8_counts(tmp_path: Path) -> None:
    row = {**DECODE, "batch_size": 1, "isl": 512, "step": 0, "kv_cache_dtype": "fp8"}
    rows = [{**row, "attn_dtype": a, "latency": t} for a, t in (("fp8", 0.02), ("bfloat16", 0.03))]
    rows += [{**rows[0], "batch_size": 8, "latency": 0.05}, {**rows[0], "step": 9}]
    put_table(tmp_path, "attention/sglang/0.5/context_attention_perf.parquet", *rows)
    found = tables.prefill((tmp_path, "h100-80g-sxm", "sglang"), "fp8")
    assert found is not None
    times = found[0][["batch", "chunk", "time_us"]].to_numpy().tolist()
    assert times == [[1, 512, 20.0], [8, 512, 50.0]]


def test_messages_are_bytes_and_kernels_apart(tmp_path: Path) -> None:
    row = {"num_gpus": 2, "message_size": 128, "latency": 0.004}
    custom = {**row, "kernel_source": "vLLM_custom_graph"}
    eager = {**custom, "kernel_source": "vLLM_custom_eager", "latency": 0.02}
    put_table(tmp_path, "comm/vllm/0.24.0/custom_allreduce_perf.parquet", custom, eager)
    nccl = {**row, "nccl_dtype": "half", "op_name": "all_reduce", "latency": 0.006}
    put_table(tmp_path, "comm/nccl/2.29/nccl_perf.parquet", nccl, {**nccl, "op_name": "alltoall"})
    found = tables.all_reduces((tmp_path, "h100-80g-sxm", "vllm"))
    times = {kernel: rows.to_numpy().tolist() for kernel, (rows, _) in found.items()}
    assert times == {"graph": [[256, 2, 4.0]], "eager": [[256, 2, 20.0]], "nccl": [[256, 2, 6.0]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency": 0.0}, r"gemm_perf\.parquet: row 0: a latency must be positive, got 0\.0"),
        ({"latency": float("nan")}, "row 0: latency must be a finite number"),
        ({"latency": "fast"}, "latency must be a finite number, got 'fast'"),
    ],
)
def test_impossible_cells(tmp_path: Path, change: dict[str, object], message: str) -> None:
    put_table(tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", {**GEMM, **change})
    with pytest.raises(BundleError, match=message):
        list(tables.gemms((tmp_path, "h100-80g-sxm", "vllm"), "bf16"))


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    row = {"gemm_dtype": "bfloat16", "m": 1}
    file = put_table(tmp_path, "gemm/vllm/1.0/gemm_perf.parquet", row)
    with pytest.raises(BundleError, match=r"column 'n' is missing; has \['gemm_dtype', 'm'\]"):
        list(tables.gemms((tmp_path, "h100-80g-sxm", "vllm"), "bf16"))
    file.write_bytes(b"no parquet")
    with pytest.raises(BundleError, match=r"gemm_perf\.parquet: not a parquet table"):
        list(tables.gemms((tmp_path, "h100-80g-sxm", "vllm"), "bf16"))
    with pytest.raises(FileNotFoundError, match="l40s: no such folder"):
        list(tables.gemms((tmp_path, "l40s", "vllm"), "bf16"))


def test_windows_are_tables_of_their_own(tmp_path: Path) -> None:
    path = "attention/vllm/0.24.0/generation_attention_perf.parquet"
    put_table(tmp_path, path, DECODE, {**DECODE, "window_size": 128, "latency": 0.5})
    without = {key: value for key, value in DECODE.items() if key != "window_size"}
    put_table(tmp_path, path.replace("vllm/0.24.0", "sglang/0.5"), without)

    def times(stack: str, window: int) -> list[float]:
        found = tables.decode((tmp_path, "h100-80g-sxm", stack), "bf16", window)
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
