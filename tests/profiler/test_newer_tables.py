"""What only measured bundles hold: whole layers, skewed decodes, overhead, spreads and backends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.check import check_bundle, check_folder
from sarathi_sim.profiler.bundle.diff import backend_differences, diff_bundles
from sarathi_sim.profiler.bundle.schema import Bundle, load_bundle, write_bundle
from sarathi_sim.profiler.bundle.tables import OVERHEADS, TABLES
from sarathi_sim.profiler.facts.device import load_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LOCAL
from sarathi_sim.profiler.measuring.to_bundle import measured_bundle, skipped
from sarathi_sim.profiler.planning.journal import Journal, Timing

A100 = load_device("a100-80g-sxm")
SDPA, XFORMERS = "torch SDPA, mask", "xformers 0.0.35 memory_efficient_attention"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle of two points an op, by way of a journal."""
    journal = Journal(tmp_path / "work", {})
    for op in LOCAL:
        keys = [(64, 0), (64, 32)] if op.startswith("attn") else [(1,), (64,)]
        for key in keys:
            journal.add(op, key, Timing(1000.0 + key[-1], 0.01, 5))
    for index in range(len(OVERHEADS)):
        journal.add("overhead", (index,), Timing(10.0 + index))
    for key in ((64, 0, 0, 0), (0, 0, 8, 128), (56, 0, 8, 128)):
        journal.add("mixed", key, Timing(5000.0 + key[0], 0.0125, 5))
    for key in ((8, 128, 192), (8, 128, 900)):
        journal.add("attn_decode_skew", key, Timing(700.0 + key[-1], 0.02, 5))
    journal.add("mixed", (512, 0, 8, 128), Timing(None, note="too large"))
    journal.close()
    assert skipped(journal) == ["mixed (512, 0, 8, 128): too large"]
    model = load_model("tiny-llama-40m")
    sends = {1024: Timing(20.0, 0.5, 9)}
    return measured_bundle(journal, model, 1, "a100-80g-sxm", "float16", {}, "", sends, SDPA)


def test_the_journal_becomes_the_tables(bundle: Bundle, tmp_path: Path) -> None:
    write_bundle(bundle, tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    assert read.mixed.to_numpy().tolist() == [
        [0, 0, 8, 128, 5000.0, 1.25, SDPA],
        [56, 0, 8, 128, 5056.0, 1.25, SDPA],
        [64, 0, 0, 0, 5064.0, 1.25, SDPA],
    ]
    assert read.attn_decode_skew.to_numpy().tolist() == [
        [8, 128, 192, 892, 2.0, SDPA],
        [8, 128, 900, 1600, 2.0, SDPA],
    ]
    assert read.overhead.to_numpy().tolist() == [
        ["layer_graph_launch", 10.0, 0.0],
        ["layer_graph_run", 11.0, 0.0],
        ["layer_launch", 12.0, 0.0],
        ["layer_run", 13.0, 0.0],
    ]
    assert read.send_recv.to_numpy().tolist() == [[1024, "inter_node", 20.0, 50.0]]
    assert read.attn_decode.iloc[0].tolist() == [64, 0, 1000.0, 1.0, SDPA]
    assert list(read.linear.columns) == ["op", "num_tokens", "time_us", "spread_pct"]
    assert set(read.linear["spread_pct"]) == {1.0}
    facts = read.meta.environment
    assert (facts["spread_pct_mixed"], facts["spread_pct_attn_decode_skew"]) == (1.25, 2.0)
    covered = check_folder(tmp_path / "b").coverage
    assert covered["mixed"].startswith("3 points, chunk_tokens 0..64")
    assert covered["attn_decode_skew"].endswith(f"max_context_tokens 192..900; {SDPA}")
    assert covered["overhead"] == ", ".join(OVERHEADS)


def test_layers_and_skewed_decodes_faster_than_the_device_are_errors(bundle: Bundle) -> None:
    assert not [f for f in check_bundle(bundle, A100) if f.level == "error"]
    for table in ("mixed", "attn_decode_skew"):
        frame = bundle.tables()[table].assign(time_us=1e-3)
        found = check_bundle(replace(bundle, **{table: frame}), A100)
        assert [f.where for f in found if f.level == "error"] == [table]


def test_a_longer_maximum_that_takes_less_is_a_warning(bundle: Bundle) -> None:
    frame = bundle.attn_decode_skew.assign(time_us=[900.0, 600.0])
    found = check_bundle(replace(bundle, attn_decode_skew=frame), A100)
    (drop,) = [f.message for f in found if f.where == "attn_decode_skew"]
    assert drop == (
        "takes 33 % less at max_context_tokens=900 batch_size=8 context_tokens=128 than just before"
    )


def test_two_bundles_are_compared_at_the_points_they_share(bundle: Bundle) -> None:
    slower = bundle.mixed.assign(time_us=bundle.mixed["time_us"] * [1.0, 1.5, 2.0]).iloc[1:]
    overhead = bundle.overhead.assign(time_us=bundle.overhead["time_us"] * 3).iloc[1:]
    found, left_out = diff_bundles(bundle, replace(bundle, mixed=slower, overhead=overhead))
    by_op = {diff.op: diff for diff in found}
    mixed = by_op["mixed"]
    assert (mixed.points, mixed.interpolated, mixed.median, mixed.worst) == (2, False, 1.75, 2.0)
    assert mixed.worst_at == (
        "chunk_tokens=64 context_tokens=0 batch_size=0 decode_context_tokens=0"
    )
    assert by_op["overhead layer_run"].median == 3.0
    assert "overhead layer_graph_launch: the second bundle has none" in left_out
    apart = bundle.mixed.assign(chunk_tokens=bundle.mixed["chunk_tokens"] + 1)
    _, left_out = diff_bundles(bundle, replace(bundle, mixed=apart))
    assert "mixed: their sizes do not overlap" in left_out
    nothing = pd.DataFrame(columns=list(TABLES["mixed"].columns))
    _, left_out = diff_bundles(bundle, replace(bundle, mixed=nothing))
    assert "mixed: the second bundle has none" in left_out


def test_points_that_scatter_are_named_the_worst_first(bundle: Bundle) -> None:
    linear = bundle.linear.copy()
    preproj = linear["op"] == "preproj"
    linear.loc[preproj, "spread_pct"] = [20.0, 20.5]
    prefill = bundle.attn_prefill.assign(spread_pct=[30.0, 45.0])
    found = check_bundle(replace(bundle, linear=linear, attn_prefill=prefill), A100)
    said = {f.where: f.message for f in found if f.message.startswith("samples scatter")}
    assert said == {
        "preproj": "samples scatter by 20.5 % of the median at num_tokens=64",
        "attn_prefill": (
            "samples scatter by 45 % of the median at chunk_tokens=64 context_tokens=32; "
            "samples scatter by 30 % of the median at chunk_tokens=64 context_tokens=0"
        ),
        "send_recv inter_node": "samples scatter by 50 % of the median at num_bytes=1024",
    }


def test_two_backends_in_a_table_are_said(bundle: Bundle, tmp_path: Path) -> None:
    decode = bundle.attn_decode.assign(backend=[SDPA, XFORMERS])
    both = replace(bundle, attn_decode=decode)
    write_bundle(both, tmp_path / "b")  # it is legal
    read = load_bundle(tmp_path / "b")
    assert read.attn_decode["backend"].tolist() == [SDPA, XFORMERS]
    (warning,) = [f for f in check_bundle(read, A100) if "backends" in f.message]
    assert (warning.level, warning.where) == ("warning", "attn_decode")
    assert warning.message == (
        f"2 backends in one table: '{SDPA}' 1 points (first batch_size=64 context_tokens=0), "
        f"'{XFORMERS}' 1 points (first batch_size=64 context_tokens=32)"
    )
    assert backend_differences(bundle, bundle) == []
    assert backend_differences(bundle, both) == [
        f"attn_decode: {SDPA} in the first, {SDPA} and {XFORMERS} in the second"
    ]
    unsaid = replace(bundle, attn_decode=decode.drop(columns="backend"))
    assert backend_differences(bundle, unsaid) == []
