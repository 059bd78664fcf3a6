"""Published folders as bundles: every trap by hand, what is refused, and the real files.

Vidur's, aiconfigurator's, and LLMServingSim's in its two forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.lab.fit.bundles import SOURCES, ShapePool, import_bundle
from sarathi_sim.experiments.lab.sources.llmservingsim import LAYERS
from sarathi_sim.experiments.lab.sources.measurements import OpRows
from sarathi_sim.experiments.lab.sources.vidur import half_octaves
from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import Bundle, BundleError, write_bundle
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.ops import ROW_OPS, GemmShape
from sarathi_sim.profiler.facts.roofline import wave_fill
from sarathi_sim.profiler.storage.files import public_datasets
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.sampled import needs_datasets

pytestmark = pytest.mark.lab
Cells = Iterable[tuple[Any, ...]]
M = (1, 128, 129, 1024)
SOURCE = {"vidur": "vidur", "aic": "aiconfigurator"}  # the others: llmservingsim
MLP, A100_ATTENTION = "mlp_a100_Some-7b.csv", "attention_a100_CodeLlama-34b_tp2.csv"
A6000_ATTENTION = "attention_Llama-3.1-8B_tp1.csv"


def table(columns: str, rows: Cells, **same: Any) -> str:
    return str(pd.DataFrame(rows, columns=columns.split()).assign(**same).to_csv(index=False))


def mlp(heads: int, kv_heads: int, hidden: int, ffn: int) -> str:
    """A model in Vidur's columns: times in ms, less with tp, and growing with tokens."""
    ops = {
        "emb": 0.007, "input_layernorm": 0.010, "attn_pre_proj": 0.100, "attn_rope": 0.020,
        "attn_post_proj": 0.050, "post_attention_layernorm": 0.011, "mlp_up_proj": 0.200,
        "mlp_act": 0.030, "mlp_down_proj": 0.090, "add": 0.004,
    }  # fmt: skip
    shape = {"n_head": heads, "n_kv_head": kv_heads, "n_embd": hidden, "n_expanded_embd": ffn}
    names = [f"time_stats.{op}.median" for op in ops]
    return table(" ".join([*names, "num_tokens num_tensor_parallel_workers"]), (
        (*(ms * (1 + tokens / 256) * slower / tp for ms in ops.values()), tokens, tp)
        for tp in (1, 2, 4)
        for tokens, slower in ((1, 1), (128, 1.002), (128, 1.004), (256, 1.006))
    ), **shape, use_gated_mlp=True)  # fmt: skip


def by_kind(sizes: str, prompts: Cells, decodes: Cells) -> str:
    """Attention in Vidur's columns: (chunk, batch, cached, ms)."""
    rows = [(True, *row, None) for row in prompts]
    rows += [(False, *row[:3], None, row[3]) for row in decodes]
    names = "time_stats.attn_prefill.median time_stats.attn_decode.median"
    return table(f"is_prefill {sizes} kv_cache_size {names}", rows)


# Two ranks of one node, then one rank on each of two nodes: the latter must not be used.
REDUCES = [(2, 2048, 0.030), (2, 2**20, 0.040), (1, 2048, 9.0)]
COUNTS = {"num_workers": 2, "max_devices_per_node": 8}
VIDUR = {
    MLP: mlp(32, 32, 4096, 11008),
    "all_reduce_a100_dgx.csv": table(
        "devices_per_node size time_stats.all_reduce.median", REDUCES, **COUNTS
    ),
}
PROMPTS, STEPS = [(64, 1, 32, 0.05), (128, 1, 0, 0.07)], [(0, 4, 512, 0.03), (0, 8, 512, 0.04)]
VIDUR_70B = {
    "mlp_a100_Some-70b.csv": mlp(64, 8, 8192, 28672),
    A100_ATTENTION: by_kind("prefill_chunk_size batch_size", PROMPTS, STEPS),
}
# Llama-3-8b at tp 1 wants (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336).
SHAPES = [(4096, 4096), (6144, 4096), (16384, 4096), (51200, 4096), (4096, 16384)]
HEADS = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
AIC_STEPS = [
    ("VLLM", 4, 1, 1023, 0.05), ("VLLM", 8, 1, 1023, 0.06), ("TRTLLM", 4, 1, 1023, 0.9),
    ("VLLM", 16, 1, 1023, 0.01),  # 6.7 TB/s, which only L2 can give
]  # fmt: skip
AIC_PROMPTS = [("VLLM", 1, 128, 0, 0.03), ("VLLM", 1, 256, 0, 0.04), ("VLLM", 2, 256, 0, 5.0)]
AIC = {
    "gemm_bf16.csv": table("framework m n k latency_ms", (
        (who, m, n, k, factor * 1e-9 * n * k * (1 + m))
        for who, factor in (("SGLang", 1.0), ("VLLM", 7.0)) for n, k in SHAPES for m in M
    )),
    "nccl_collectives.csv": table("op_name nccl_dtype num_gpus message_size_elements latency_ms", (
        (op, kind, gpus, size, 0.01 + 1e-9 * size)
        for op in ("all_reduce", "all_gather") for kind in ("half", "int8")
        for gpus in (2, 8) for size in (1024, 2**20)
    )),
}  # fmt: skip
for phase, calls in (("decode", AIC_STEPS), ("prefill", AIC_PROMPTS)):
    text = table("framework batch_size isl step latency_ms", calls, **HEADS)
    AIC[f"attention_{phase}_bf16.csv"] = text
WIDTHS = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096, "gate_proj": 14336,
          "up_proj": 14336, "down_proj": 14336, "lm_head": 128256, "rope": 1}  # fmt: skip
LAYER_ROWS = [(name, m, 20_000 + 2 * width * m) for name, width in WIDTHS.items() for m in M]
A6000_PROMPTS = [(1, 32, 32, 0.004), (1, 32, 96, 0.006)]
A6000_STEPS = [(4, 0, 4096, 0.08), (8, 0, 8197, 0.09)]
A6000 = {
    "layers_Llama-3.1-8B_tp1.csv": table("layer_name input latency(ns)", LAYER_ROWS, tp_size=1),
    A6000_ATTENTION: by_kind("batch_size prefill_chunk_size", A6000_PROMPTS, A6000_STEPS),
}
META = """\
{model: meta-llama/Llama-3.1-8B, gpu: NVIDIA GeForce RTX 4090, hardware: RTX4090, variant: bf16,
 vllm_version: 0.19.0, cuda_version: '12.8', profiled_at: '2026-08-17T19:43:32+00:00',
 tp_degrees: [1], engine_effective: {hf_overrides: {intermediate_size: 14336, vocab_size: 128256,
 num_attention_heads: 32, num_key_value_heads: 8}}}"""
DENSE = {"qkv_proj": 50, "o_proj": 40, "gate_up_proj": 250, "down_proj": 130, "layernorm": 2,
         "act_fn": 3, "rotary_emb": 5, "embedding": 7, "final_layernorm": 11}  # fmt: skip
DECODES = [(1, 16, 9.0), (1, 1024, 14.0), (4, 16, 10.0), (4, 1024, 15.0)]
CHUNKS = [(16, 0, 12.0), (16, 1024, 20.0), (64, 0, 30.0), (64, 1024, 40.0)]
BOTH = [(16, 0, 4, 1024, 33.0), (64, 1024, 4, 16, 60.0)]
# Microseconds: a constant of each layer's own, and one a token.
BY_TOKENS = [(layer, m, us + m) for layer, us in DENSE.items() for m in (1, 20, 64, 100)]
BY_SEQUENCES = [("lm_head", 1, 1001), ("lm_head", 8, 1008), ("sampler", 1, 71), ("sampler", 8, 78)]
CALLS = [(0, 0, *row) for row in DECODES] + [(*row[:2], 0, 0, row[2]) for row in CHUNKS] + BOTH
PERF = {
    "meta.yaml": META,
    "dense.csv": table("layer tokens time_us", BY_TOKENS),
    "per_sequence.csv": table("layer sequences time_us", BY_SEQUENCES),
    "attention.csv": table("prefill_chunk kv_prefill n_decode kv_decode time_us", CALLS),
}
FORMS = {"vidur": VIDUR, "vidur 70b": VIDUR_70B, "aic": AIC, "a6000": A6000, "perf": PERF}


def put(folder: Path, *forms: str) -> Path:
    for form in forms:
        for name, text in FORMS[form].items():
            (folder / name).write_text(text)
    return folder


def imported(form: str, folder: Path, model: str = "", tp: int = 0, device: str = "") -> Bundle:
    usual, degree = ("llama-2-7b", 2) if form == "vidur" else ("llama-3-8b", 1)
    source = SOURCE.get(form, "llmservingsim")
    return import_bundle(source, folder, model or usual, tp or degree, device or None)


def times(bundle: Bundle, op: str) -> dict[int, float]:
    rows = bundle.linear[bundle.linear["op"] == op]
    return dict(zip(rows["num_tokens"].tolist(), rows["time_us"].tolist(), strict=True))


def rows_of(frame: pd.DataFrame) -> list[tuple[float, ...]]:
    return [*frame.itertuples(index=False, name=None)]


def test_vidur_by_hand(tmp_path: Path) -> None:
    bundle = imported("vidur", put(tmp_path, "vidur"))
    # Milliseconds of the tp 2 rows; 128 tokens come twice, at 1.002 and 1.004: their median.
    assert times(bundle, "preproj") == pytest.approx(
        {1: 50 * (1 + 1 / 256), 128: 50 * 1.5 * 1.003, 256: 50 * 2 * 1.006}, rel=1e-5
    )
    # Gate and up are one GEMM already: not doubled.
    assert times(bundle, "ffn_ln1")[1] == pytest.approx(100 * (1 + 1 / 256), rel=1e-5)
    # Both norms, rotary, activation once and the addition twice.
    assert times(bundle, "others")[1] == pytest.approx(39.5 * (1 + 1 / 256), rel=1e-5)
    assert bundle.all_reduce["time_us"].tolist() == [30.0, 40.0]


def test_attention_of_other_heads_is_scaled(tmp_path: Path) -> None:
    put(tmp_path, "vidur", "vidur 70b")
    # 32 query and 4 KV heads, as measured: context is what was cached BEFORE the chunk.
    same = imported("vidur", tmp_path, "llama-2-70b", 2)
    assert rows_of(same.attn_prefill) == [(64, 32, 50.0), (128, 0, 70.0)]
    assert rows_of(same.attn_decode) == [(4, 512, 30.0), (8, 512, 40.0)]
    half = imported("vidur", tmp_path, "llama-2-70b", 4)
    assert (half.attn_decode["time_us"].to_numpy() < [30.0, 40.0]).all()


def test_messages_are_thinned_and_never_faster_when_larger() -> None:
    rows = [(1024, 9.0), (1200, 50.0), (1400, 11.0), (1500, 5.0), (4096, 8.0)]
    thin = half_octaves(pd.DataFrame(rows, columns=["num_bytes", "time_us"]))
    # 1024..1448 is one half octave (median 11 us at 1200), then 1500 and 4096, both raised to 11.
    assert rows_of(thin) == [(1200, 11.0), (1500, 11.0), (4096, 11.0)]


def test_aiconfigurator_by_hand(tmp_path: Path) -> None:
    bundle = imported("aic", put(tmp_path, "aic"))
    assert (bundle.meta.dtype, bundle.meta.source) == ("bfloat16", "imported")
    # One framework's rows, in microseconds.
    expected = [1e-6 * 6144 * 4096 * (1 + m) for m in M]
    assert [*times(bundle, "preproj").values()] == pytest.approx(expected, rel=1e-5)
    # Context is ``step``; the row that beats the memory and the other framework are left out.
    assert rows_of(bundle.attn_decode) == [(4, 1023, 50.0), (8, 1023, 60.0)]
    fresh = bundle.attn_prefill[bundle.attn_prefill["context_tokens"] == 0]
    assert fresh["time_us"].tolist() == [30.0, 40.0]
    by_context = bundle.attn_prefill[bundle.attn_prefill["chunk_tokens"] == 256]
    assert by_context["time_us"].is_monotonic_increasing and len(by_context) == 11
    # NCCL's sizes are elements of two bytes.
    reduces = imported("aic", tmp_path, tp=2).all_reduce
    assert reduces["num_bytes"].tolist() == [2048, 2**21]
    assert reduces["time_us"].tolist() == pytest.approx([10.001, 11.0486], rel=1e-4)


def test_llmservingsim_by_hand(tmp_path: Path) -> None:
    bundle = imported("a6000", put(tmp_path, "a6000"))
    # Nanoseconds; q and o have one shape, so their times are merged.
    postproj = times(bundle, "postproj")
    assert postproj == pytest.approx({m: 20 + 2e-3 * 4096 * m for m in M}, rel=1e-5)
    assert postproj[1024] < times(bundle, "preproj")[1024] < 20 + 2e-3 * 14336 * 1024
    # kv_cache_size includes the chunk (prefill) and is the total of the batch (decode).
    assert rows_of(bundle.attn_prefill) == [(32, 0, 4.0), (32, 64, 6.0)]
    assert rows_of(bundle.attn_decode) == [(4, 1024, 80.0), (8, 1024, 90.0)]


def test_every_op_of_a_perf_folder_by_hand(tmp_path: Path) -> None:
    bundle = imported("perf", put(tmp_path, "perf"))
    assert (bundle.meta.device, bundle.meta.dtype) == ("rtx-4090", "bfloat16")
    at_20 = bundle.linear[bundle.linear["num_tokens"] == 20].set_index("op")["time_us"].to_dict()
    others, embedding = 2 * 22.0 + 23.0 + 25.0, 27.0 + 31.0  # a layer has two norms
    gemms = {"preproj": 70.0, "postproj": 60.0, "ffn_ln1": 270.0, "ffn_ln2": 150.0}
    assert at_20 == {**gemms, "others": others, "embedding": embedding}
    assert times(bundle, "lm_head") == {1: 1072.0, 8: 1086.0}
    assert rows_of(bundle.attn_prefill) == CHUNKS and rows_of(bundle.attn_decode) == DECODES
    # A layer of 20 tokens, and one of 68: everything but the embedding, and the call over both.
    layers = [20 * 8 + 482 + 33.0, 68 * 8 + 482 + 60.0]
    mixed = [(*call[:4], us) for call, us in zip(BOTH, layers, strict=True)]
    assert rows_of(bundle.mixed) == mixed
    assert set(LAYERS) == set(ROW_OPS), "every op of the registry has layers of theirs"
    write_bundle(bundle, tmp_path / "b")
    assert check_folder(tmp_path / "b").bundle is not None


SENT = "send_recv_inter_node, send_recv_intra_node"
#: By folder, model and degree: how each op came about, and the origins of some.
MARKS = {
    ("vidur", "llama-2-7b", 2): ("combined: all_reduce, others; interpolated: lm_head; measured: "
        "embedding, ffn_ln1, ffn_ln2, postproj, preproj; modelled: attn_decode, "  # MHA
        f"{SENT}; scaled: attn_prefill",
        {"repository": "microsoft/vidur @7d47513",
         "preproj": "measured: attn_pre_proj of Some-7b, tp 2"}),
    # tp 8 is not in the file, but a depth within a factor of two of it is: postproj's of tp 4.
    ("vidur", "llama-2-7b", 8): ("interpolated: ffn_ln1, ffn_ln2, lm_head, postproj, preproj; "
        f"modelled: all_reduce, attn_decode, embedding, others, {SENT}; scaled: attn_prefill",
        {"postproj": "interpolated: (4096, 512) over (n, k) by wave count, extended beyond what"}),
    ("vidur", "llama-2-70b", 4): ("combined: others; interpolated: lm_head; measured: embedding, "
        f"ffn_ln1, ffn_ln2, postproj, preproj; modelled: all_reduce, {SENT}; "
        "scaled: attn_decode, attn_prefill",
        {"attn_decode": "scaled: from 32 query and 4 KV heads to 16 and 2 by the calibrated "}),
    # 128256 columns of the LM head are too far from 51200.
    ("aic", "llama-3-8b", 1): ("interpolated: ffn_ln1, ffn_ln2; measured: attn_decode, "
        f"attn_prefill, postproj, preproj; modelled: embedding, lm_head, others, {SENT}",
        {"ffn_ln2": "interpolated: (4096, 14336) over (n, k) by wave count from (4096, 4096), (40",
         "attn_prefill": "measured: attention_prefill_bf16.csv, VLLM, 32 query and 8 KV heads; "}),
    # The projections are separate in the file, its norms and rotary unfused.
    ("a6000", "llama-3-8b", 1): ("interpolated: ffn_ln1, preproj; measured: attn_decode, "
        f"attn_prefill, ffn_ln2, lm_head, postproj; modelled: embedding, others, {SENT}",
        {"preproj": "interpolated: (6144, 4096) over"}),
    ("perf", "llama-3-8b", 1): ("combined: embedding, lm_head, others; measured: attn_decode, "
        "attn_prefill, ffn_ln1, ffn_ln2, postproj, preproj",
        {"others": "combined: 2 x layernorm + act_fn + rotary_emb of dense.csv",
         "mixed": "combined: linear ops of dense.csv + one call of attention.csv",
         "repository": "casys-kaist/LLMServingSim, profiled 2026-08-17T19:43:32+00:00",
         "hardware": "NVIDIA GeForce RTX 4090; meta-llama/Llama-3.1-8B, vLLM 0.19.0"}),
}  # fmt: skip


@pytest.mark.parametrize(("form", "model", "tp"), MARKS)
def test_every_op_says_where_it_is_from(tmp_path: Path, form: str, model: str, tp: int) -> None:
    put(tmp_path, form, *(["vidur 70b"] if form == "vidur" else []))
    bundle, (kinds, origins) = imported(form, tmp_path, model, tp), MARKS[form, model, tp]
    assert bundle.meta.notes == kinds
    for what, text in origins.items():
        assert str(bundle.meta.environment[what]).startswith(text), what


def test_tables_that_are_missing_are_modelled_but_for_gemms(tmp_path: Path) -> None:
    (put(tmp_path, "aic") / "attention_decode_bf16.csv").unlink()
    assert "attn_decode" in imported("aic", tmp_path).modelled
    (tmp_path / "gemm_bf16.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"gemm_bf16.csv: no such file"):
        imported("aic", tmp_path)
    (tmp_path / "aiconfigurator").mkdir()
    with pytest.raises(BundleError, match=r"holds the parquet tables .*which a run with"):
        imported("aic", tmp_path)


def test_interpolated_times_step_with_the_waves() -> None:
    """Where the measured times are a constant per wave of tiles, so are the interpolated ones."""
    device = load_device("h200-sxm")  # not calibrated: the expectation is tiles and waves alone

    def wave_us(n: int) -> float:
        blocks = np.float64(8 * n / 128)
        return float(blocks / wave_fill(blocks, np.float64(device.num_sms)))

    sizes = {n: wave_us(n) for n in (8192, 16384)}
    rows = pd.DataFrame([{"m": 1024, "n": n, "k": 8192, "time_us": t} for n, t in sizes.items()])
    pool = ShapePool(OpRows(rows, "a file"), device)
    between, exact, beyond, *far = (
        pool.part(GemmShape(n=n, k=k))
        for n, k in ((12288, 8192), (8192, 8192), (30000, 8192), (40000, 8192), (8192, 2048))
    )
    assert between and "a roofline with tiles and waves" in between.origin
    assert between.frame["time_us"].iloc[0] == pytest.approx(wave_us(12288), rel=0.12)
    assert exact and exact.kind == "measured" and exact.frame["time_us"].iloc[0] == sizes[8192]
    assert beyond and "extended beyond what was measured" in beyond.origin
    assert far == [None, None]


def test_sizes_of_a_perf_folder_are_those_of_a_rank_of_the_last_degree(tmp_path: Path) -> None:
    """The repository keeps each degree in a folder, and writes whole numbers as keys."""
    (tmp_path / "tp1").mkdir()
    for name in put(tmp_path, "perf").glob("*.csv"):
        name.rename(tmp_path / "tp1" / name.name)
    assert len(imported("perf", tmp_path).mixed) == 2
    meta = META.replace("[1]", "[1, 2, 16]").replace("size: 14336", "size: 896")
    for size, rank in (("heads: 32", "heads: 2"), ("heads: 8", "heads: 1"), ("128256", "8016")):
        meta = meta.replace(size, rank)
    (tmp_path / "meta.yaml").write_text(meta[:-1] + ", skew_fit: {1: 0.05}}")
    assert len(imported("perf", tmp_path).mixed) == 2
    (tmp_path / "meta.yaml").write_text(meta.replace("heads: 1", "heads: 2"))
    said = "num_key_value_heads of meta-llama/Llama-3.1-8B is 2 on one of 16 ranks, but"
    with pytest.raises(BundleError, match=said):
        imported("perf", tmp_path)


#: A folder, with model, degree and device if other than usual; of a file (or none) a pattern and
#: what takes its place; what is said.
REFUSED = [
    (("vidur",), MLP, "num_tokens", "tokens", "column 'num_tokens' is missing"),
    (("vidur",), MLP, r"True\n\Z", "True", "row 13 is truncated: the file does not end"),
    (("vidur",), MLP, "256,4", "0,4", "row 13: num_tokens must be at least 1"),
    (("vidur",), MLP, r"\n0\.", "\n-0.", "row 2: time_stats.emb.median must be positive"),
    (("vidur",), MLP, r"\n0\.\d+,", "\nNaN,", "row 2: time_stats.emb.median must be a finite"),
    (("vidur",), MLP, r"(128,1,.*)\n0\.\d+", r"\1\n9", "rows 3, 4 hold the same point.*=128"),
    (("a6000",), A6000_ATTENTION, "32,96", "32,16", "row 3: kv_cache_size 16 is less than"),
    (("a6000",), A6000_ATTENTION, "True,1", "maybe,1", "row 2: is_prefill must be True or False"),
    (("perf",), "meta.yaml", "RTX4090", "ABACUS9",
     "hardware ABACUS9: no shipped device is called so .*rtx-4090.*--device"),
    (("perf",), "meta.yaml", "bf16", "fp8", "variant 'fp8' is not modelled: must be one of bf16"),
    (("perf",), "meta.yaml", r"s: \[1\]", "s: [2]", r"tp_degrees \[2\]: --tp 1 was not"),
    (("perf",), "meta.yaml", "14336", "28672",
     "intermediate_size of meta-llama/Llama-3.1-8B is 28672, but llama-3-8b has 14336"),
    (("perf",), "dense.csv", r"(?s)act_fn,.*rotary", "rotary", "no rows of act_fn; there are"),
    (("perf",), "attention.csv", "kv_prefill", "prefill_key", "column 'kv_prefill' is missing"),
    (("perf",), "attention.csv", "0,0,4,16,10.0", "0,0,4,16,-1", "row 4: time_us must be pos"),
    (("vidur", "", 0, "a40"), "", "", "", r"no mlp_a40_MODEL.csv.*devices there: a100; vid"),
    (("vidur", "gpt3-175b", 1), "", "", "", "no GEMM of gpt3-175b at tp 1.*run without profiles"),
    (("vidur", "", 3), "", "", "", "tp 3 does not divide"),
    (("aic", "", 0, "a40"), "", "", "", "measured on a100-80g-sxm, not on a40"),
    (("a6000", "", 0, "a40"), "", "", "", "measured on a6000, not on a40"),
    (("perf", "", 0, "a6000"), "", "", "", "measured on RTX4090, not on a6000"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "file", "old", "new", "message"), REFUSED)
def test_what_is_wrong_or_absent_is_named(
    tmp_path: Path, asked: tuple[Any, ...], file: str, old: str, new: str, message: str
) -> None:
    form, *request = asked
    put(tmp_path, form)
    if file:
        text, changes = re.subn(old, new, (tmp_path / file).read_text(), count=1)
        assert changes
        (tmp_path / file).write_text(text)
    with pytest.raises((BundleError, FileNotFoundError), match=message) as caught:
        imported(form, tmp_path, *request)
    assert not file or str(tmp_path) in str(caught.value)


def test_a_device_without_a_calibrated_model_cannot_fill_gaps(tmp_path: Path) -> None:
    (put(tmp_path, "vidur") / MLP).rename(tmp_path / "mlp_h200_Some-7b.csv")
    with pytest.raises(BundleError, match=r"has no .*attn_prefill, attn_decode.*cannot fill"):
        imported("vidur", tmp_path, tp=1, device="h200-sxm")


def test_errors_say_which_files_a_source_reads(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"source 'vidor' \(did you mean vidur\?\).*CSVs: mlp_"):
        import_bundle("vidor", tmp_path, "llama-3-8b", 1)
    for name, source in SOURCES.items():
        for folder in (tmp_path / "absent", tmp_path):
            with pytest.raises((BundleError, FileNotFoundError)) as caught:
                import_bundle(name, folder, "llama-3-8b", 1)
            assert source.FILES in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@needs_datasets
@pytest.mark.parametrize(
    ("folder", "model", "tp", "device", "interpolated"),
    [
        ("aiconfigurator_a100_sxm", "gpt3-175b", 8, None, {"preproj", "lm_head"}),
        ("aiconfigurator_a100_sxm", "llama-3-8b", 1, None, {"ffn_ln1", "ffn_ln2", "lm_head"}),
        ("llmservingsim_a6000", "llama-3-8b", 1, None, {"preproj", "ffn_ln1"}),
        ("llmservingsim_rtx4090", "llama-3-8b", 1, None, {""}),
        ("vidur", "llama-2-70b", 8, "a100-80g-sxm", {"lm_head"}),
        ("vidur", "qwen-72b", 8, "a40", {"lm_head"}),
    ],
)
def test_the_real_folders(
    tmp_path: Path, folder: str, model: str, tp: int, device: str | None, interpolated: set[str]
) -> None:
    source = folder.partition("_")[0]
    bundle = import_bundle(source, public_datasets() / folder, model, tp, device)
    write_bundle(bundle, tmp_path / "b")
    checked = check_folder(tmp_path / "b")
    assert not checked.failed, checked.findings
    kinds = dict(part.split(": ") for part in bundle.meta.notes.split("; "))
    assert set(kinds.get("interpolated", "").split(", ")) == interpolated
    attention = {"a40": "modelled", "a100-80g-sxm": "scaled"}.get(device or "", "measured")
    assert "attn_decode, attn_prefill" in kinds[attention]
    if source == "vidur":
        assert len(times(bundle, "preproj")) == 259
    if folder == "llmservingsim_rtx4090":
        # Decodes beside a chunk take about twice as long as alone.
        assert 0.8 < bundle_times(bundle).whole_layer.decode < 1.6
