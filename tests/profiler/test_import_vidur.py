"""Vidur's folder as a bundle: every trap by hand, and the real files."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import run_experiment
from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import (
    Bundle,
    BundleError,
    bundle_path,
    load_bundle,
    write_bundle,
)
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.importers.assemble import half_octaves
from sarathi_sim.profiler.importers.sources import import_bundle
from sarathi_sim.profiler.storage.files import DATASETS_VARIABLE, public_datasets

needs_datasets = pytest.mark.skipif(
    not os.environ.get(DATASETS_VARIABLE),
    reason=f"needs the public measurements: set {DATASETS_VARIABLE} to their folder",
)
OPS = {
    "emb": 0.007,
    "input_layernorm": 0.010,
    "attn_pre_proj": 0.100,
    "attn_rope": 0.020,
    "attn_post_proj": 0.050,
    "post_attention_layernorm": 0.011,
    "mlp_up_proj": 0.200,
    "mlp_act": 0.030,
    "mlp_down_proj": 0.090,
    "add": 0.004,
}


def mlp(tokens: tuple[int, ...] = (1, 128, 128, 256), tp: tuple[int, ...] = (1, 2)) -> pd.DataFrame:
    """Llama-2-7b in Vidur's columns: times in ms, half of it at tp 2, and growing with tokens."""
    rows = []
    for degree in tp:
        for i, count in enumerate(tokens):
            slower = (1 + count / 256) * (1 + 0.002 * i) / degree
            row: dict[str, object] = {
                f"time_stats.{op}.median": t * slower for op, t in OPS.items()
            }
            shape = {"n_head": 32, "n_kv_head": 32, "n_embd": 4096, "n_expanded_embd": 11008}
            row |= {**shape, "use_gated_mlp": True, "num_tokens": count}
            rows.append(row | {"num_tensor_parallel_workers": degree})
    return pd.DataFrame(rows)


def reduce(workers: int, per_node: int, size: int, ms: float) -> dict[str, float]:
    named = {"num_workers": workers, "devices_per_node": per_node, "max_devices_per_node": 8}
    return {**named, "size": size, "time_stats.all_reduce.median": ms}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = tmp_path / "vidur"
    here.mkdir()
    mlp().to_csv(here / "mlp_a100_Some-7b.csv", index=False)
    # Two ranks of one node, then one rank on each of two nodes: the latter must not be used.
    rows = [reduce(2, 2, 2048, 0.030), reduce(2, 2, 2**20, 0.040), reduce(2, 1, 2048, 9.0)]
    pd.DataFrame(rows).to_csv(here / "all_reduce_a100_dgx.csv", index=False)
    return here


def times(bundle: Bundle, op: str) -> dict[int, float]:
    rows = bundle.linear[bundle.linear["op"] == op]
    return dict(zip(rows["num_tokens"].tolist(), rows["time_us"].tolist(), strict=True))


def test_by_hand(folder: Path) -> None:
    bundle = import_bundle("vidur", folder, "llama-2-7b", 2)
    # Milliseconds of the tp 2 rows; 128 tokens come twice, at 1.002 and 1.004: their median.
    assert times(bundle, "preproj") == pytest.approx(
        {1: 50 * (1 + 1 / 256), 128: 50 * 1.5 * 1.003, 256: 50 * 2 * 1.006}, rel=1e-5
    )
    # Gate and up are one GEMM already: not doubled.
    assert times(bundle, "ffn_ln1")[1] == pytest.approx(100 * (1 + 1 / 256), rel=1e-5)
    # Both norms, rotary, activation once and the addition twice.
    assert times(bundle, "others")[1] == pytest.approx(39.5 * (1 + 1 / 256), rel=1e-5)
    assert bundle.all_reduce["time_us"].tolist() == [30.0, 40.0]
    marks = bundle.meta.environment
    assert bundle.meta.source == "imported"
    assert marks["repository"] == "microsoft/vidur @7d47513"
    assert marks["licence"] == "MIT"
    assert str(marks["preproj"]) == "measured: attn_pre_proj of Some-7b, tp 2"
    assert str(marks["others"]).startswith("combined: ")
    assert str(marks["attn_decode"]).startswith("modelled: ")
    assert str(marks["send_recv_inter_node"]).startswith("modelled: ")


def test_a_missing_degree_is_interpolated_from_other_shapes_and_marked(folder: Path) -> None:
    # tp 4 is not in the file, but a width within a factor of two of it is: postproj of tp 1.
    bundle = import_bundle("vidur", folder, "llama-2-7b", 4)
    mark = str(bundle.meta.environment["preproj"])
    assert mark.startswith("interpolated: (3072, 4096) over (n, k) by wave count, extended")
    assert "from (4096, 4096) of mlp_a100_*.csv" in mark
    assert str(bundle.meta.environment["others"]).startswith("modelled: ")


def test_attention_of_other_heads_is_scaled_and_decode_of_another_kernel_is_not(
    folder: Path,
) -> None:
    rows = [
        {"is_prefill": True, "prefill_chunk_size": 64, "batch_size": 1, "kv_cache_size": 32},
        {"is_prefill": True, "prefill_chunk_size": 128, "batch_size": 1, "kv_cache_size": 0},
        {"is_prefill": False, "prefill_chunk_size": 0, "batch_size": 4, "kv_cache_size": 512},
        {"is_prefill": False, "prefill_chunk_size": 0, "batch_size": 8, "kv_cache_size": 512},
    ]
    frame = pd.DataFrame(rows)
    frame["time_stats.attn_prefill.median"] = [0.05, 0.07, None, None]
    frame["time_stats.attn_decode.median"] = [None, None, 0.03, 0.04]
    frame.to_csv(folder / "attention_a100_CodeLlama-34b_tp2.csv", index=False)
    shape = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672}
    mlp(tp=(1, 2, 4)).assign(**shape).to_csv(folder / "mlp_a100_Some-70b.csv", index=False)
    # 32 query and 4 KV heads, as measured: context is what was cached BEFORE the chunk.
    same = import_bundle("vidur", folder, "llama-2-70b", 2)
    assert same.attn_prefill.to_numpy().tolist() == [[64, 32, 50.0], [128, 0, 70.0]]
    assert same.attn_decode.to_numpy().tolist() == [[4, 512, 30.0], [8, 512, 40.0]]
    assert str(same.meta.environment["attn_decode"]).startswith("measured: ")
    half = import_bundle("vidur", folder, "llama-2-70b", 4)
    assert str(half.meta.environment["attn_decode"]).startswith(
        "scaled: from 32 query and 4 KV heads to 16 and 2 by the calibrated device model's ratio"
    )
    assert (half.attn_decode["time_us"].to_numpy() < [30.0, 40.0]).all()
    mha = import_bundle("vidur", folder, "llama-2-7b", 2)
    assert str(mha.meta.environment["attn_prefill"]).startswith("scaled: ")
    assert str(mha.meta.environment["attn_decode"]).startswith("modelled: ")


def test_messages_are_thinned_and_never_faster_when_larger() -> None:
    rows = pd.DataFrame(
        {"num_bytes": [1024, 1200, 1400, 1500, 4096], "time_us": [9.0, 50.0, 11.0, 5.0, 8.0]}
    )
    thin = half_octaves(rows)
    # 1024..1448 is one half octave (median 11 us at 1200), then 1500 and 4096, both raised to 11.
    assert thin.to_numpy().tolist() == [[1200, 11.0], [1500, 11.0], [4096, 11.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("num_tokens", "tokens"), "column 'num_tokens' is missing"),
        (lambda t: t[:-5], "row 9 is truncated: the file does not end with a newline"),
        (lambda t: t[: t.rindex(",")] + "\n", "row 9: num_tensor_parallel_workers must be an int"),
        (lambda t: t.replace("True,256,2", "True,0,2"), "row 9: num_tokens must be at least 1"),
        (lambda t: t.replace("True,256,2", "True,2.5,2"), "row 9: num_tokens must be an integer"),
        (lambda t: t.replace("True,256,2", "True,2e56,2"), "row 9: num_tokens must be below 2"),
        (lambda t: t.replace("\n0.", "\n-0.", 1), "row 2: time_stats.emb.median must be positive"),
        (lambda t: "", "not a valid CSV"),
    ],
)  # fmt: skip
def test_malformed_files(folder: Path, change: object, message: str) -> None:
    path = folder / "mlp_a100_Some-7b.csv"
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(BundleError, match=message) as caught:
        import_bundle("vidur", folder, "llama-2-7b", 2)
    assert str(path) in str(caught.value)


def test_a_nan_and_far_apart_repeats_name_their_rows(folder: Path) -> None:
    path = folder / "mlp_a100_Some-7b.csv"
    frame = mlp()
    frame.loc[5, "time_stats.mlp_up_proj.median"] = None
    frame.to_csv(path, index=False)
    with pytest.raises(BundleError, match=r"row 7: time_stats.mlp_up_proj.median must be a finite"):
        import_bundle("vidur", folder, "llama-2-7b", 2)
    frame = mlp()
    frame.loc[6, "time_stats.mlp_up_proj.median"] *= 3
    frame.to_csv(path, index=False)
    with pytest.raises(BundleError, match=r"rows 7, 8 hold the same point.*num_tokens=128"):
        import_bundle("vidur", folder, "llama-2-7b", 2)


def test_what_cannot_be_imported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no mlp_a40_MODEL.csv.*devices there: a100; vid"):
        import_bundle("vidur", folder, "llama-2-7b", 2, "a40")
    with pytest.raises(BundleError, match=r"no GEMM of gpt3-175b at tp 1.*run without profiles"):
        import_bundle("vidur", folder, "gpt3-175b", 1)
    with pytest.raises(BundleError, match=r"unknown source 'vidor' \(did you mean vidur\?\)"):
        import_bundle("vidor", folder, "llama-2-7b", 2)
    with pytest.raises(BundleError, match="no such folder"):
        import_bundle("vidur", tmp_path / "nowhere", "llama-2-7b", 2)
    with pytest.raises(BundleError, match="tp 3 does not divide"):
        import_bundle("vidur", folder, "llama-2-7b", 3)
    # A device without a calibrated model cannot fill in what the folder lacks.
    (folder / "mlp_a100_Some-7b.csv").rename(folder / "mlp_h200_Some-7b.csv")
    with pytest.raises(
        BundleError, match=r"has no .*attn_prefill, attn_decode.*cannot fill them in"
    ):
        import_bundle("vidur", folder, "llama-2-7b", 1, "h200-sxm")


@needs_datasets
@pytest.mark.parametrize(
    ("device", "model", "tp", "scaled"),
    [
        ("a100-80g-sxm", "llama-2-70b", 8, True),
        ("a100-80g-sxm", "qwen-72b", 1, False),
        ("a40", "llama-2-7b", 1, False),
        ("a40", "qwen-72b", 8, False),
    ],
)
def test_the_real_folder(tmp_path: Path, device: str, model: str, tp: int, scaled: bool) -> None:
    bundle = import_bundle("vidur", public_datasets() / "vidur", model, tp, device)
    write_bundle(bundle, tmp_path / "b")
    checked = check_folder(tmp_path / "b")
    assert not checked.failed, checked.findings
    marks = {op: str(mark).partition(":")[0] for op, mark in bundle.meta.environment.items()}
    for op in ("preproj", "postproj", "ffn_ln1", "ffn_ln2", "embedding"):
        assert marks[op] == "measured"
    assert marks["attn_decode"] == ("scaled" if scaled else "modelled")
    assert len(times(bundle, "preproj")) == 259


@needs_datasets
@pytest.mark.slow
def test_a_run_on_imported_data(tmp_path: Path) -> None:
    root = tmp_path / "profiles"
    bundle = import_bundle("vidur", public_datasets(), "llama-2-70b", 4)
    path = bundle_path(root, "a100-80g-sxm", "llama-2-70b", 4)
    write_bundle(bundle, path)
    assert load_bundle(path).meta.model_spec == load_model("llama-2-70b")
    config = tmp_path / "imported.yaml"
    config.write_text(
        f"""\
name: imported
model: llama-2-70b
device: a100-80g-sxm
profiles: {root}
workload: {{requests: 40, lengths: {{kind: fixed, prompt: 900, decode: 100}}}}
cluster: {{tp: 4, pp: 2, max_length: 2048}}
scenarios:
  orca: {{policy: {{name: orca, case: best}}}}
  sarathi: {{policy: {{name: sarathi, chunk_size: 256}}}}
"""
    )
    outcome = run_experiment(load_experiment(config), tmp_path / "run", figures=False)
    scenarios = outcome.summary()["scenarios"]
    assert all(scenario["finished"] == 40 for scenario in scenarios.values())
    assert all(5 < scenario["makespan_s"] < 60 for scenario in scenarios.values())
