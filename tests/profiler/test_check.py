"""profile-check and profile-diff: what they say of bundles that are spoilt on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.profiler.bundle.check import Finding, bundle_folders, check_bundle, check_folder
from sarathi_sim.profiler.bundle.diff import diff_bundles
from sarathi_sim.profiler.bundle.schema import Bundle, BundleError, load_bundle, write_bundle
from sarathi_sim.profiler.facts.device import load_device, shipped_device
from sarathi_sim.profiler.facts.model import load_model
from tests.sampled import device_bundle, profile_folder

A100 = load_device("a100-80g-sxm")
GPT3 = ("a100-80g-sxm", "gpt3-175b")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return load_bundle(profile_folder(*GPT3, 8))


def changed(bundle: Bundle, table: str, change: Callable[[pd.DataFrame], object]) -> Bundle:
    frame = bundle.tables()[table].copy()
    change(frame)
    return dataclasses.replace(bundle, **{table: frame})


def scaled(factor: float, op: str | None = None) -> Callable[[pd.DataFrame], object]:
    def change(frame: pd.DataFrame) -> None:
        rows = frame["op"] == op if op else frame["time_us"] > 0
        frame.loc[rows, "time_us"] *= factor

    return change


def set_time(op: str, tokens: int, factor: float) -> Callable[[pd.DataFrame], object]:
    def change(frame: pd.DataFrame) -> None:
        frame.loc[(frame["op"] == op) & (frame["num_tokens"] == tokens), "time_us"] *= factor

    return change


def of(findings: list[Finding], level: str) -> dict[str, str]:
    return {f.where: f.message for f in findings if f.level == level}


def test_a_device_model_passes() -> None:
    for folder in bundle_folders(profile_folder(*GPT3, 8)):
        checked = check_folder(folder)
        assert not checked.failed, checked.findings
        assert checked.coverage["preproj"].startswith("272 points, num_tokens 1..131072")


@pytest.mark.parametrize(
    ("table", "change", "where", "said"),
    [
        ("linear", scaled(1e-3, "ffn_ln1"), "ffn_ln1", "312 TFLOP/s"),
        ("linear", scaled(0.5, "postproj"), "postproj", "312 TFLOP/s"),
        ("linear", set_time("lm_head", 1, 0.01), "lm_head", "2039 GB/s of memory"),
        ("attn_prefill", scaled(0.2), "attn_prefill", "312 TFLOP/s"),
        ("attn_decode", scaled(0.5), "attn_decode", "2039 GB/s of memory"),
        ("all_reduce", scaled(0.25), "all_reduce", "300 GB/s of NVLink 3"),
        ("send_recv", scaled(0.5), "send_recv inter_node", "25 GB/s of InfiniBand"),
    ],
)
def test_wrong_units_are_faster_than_the_device_can(
    bundle: Bundle, table: str, change: Callable[[pd.DataFrame], object], where: str, said: str
) -> None:
    errors = of(check_bundle(changed(bundle, table, change), A100), "error")
    assert where in errors
    assert errors[where].startswith("faster than the device can: ")
    assert said in errors[where]
    assert "wrong unit or shape?" in errors[where]


def test_drops_and_outliers_are_named(bundle: Bundle) -> None:
    spoilt = changed(bundle, "linear", set_time("others", 2048, 3.0))
    messages = [f.message for f in check_bundle(spoilt, A100) if f.where == "others"]
    assert [m.split(" ")[0] for m in messages] == ["takes", "outlier:"]
    assert "% less at num_tokens=2049 than just before" in messages[0]
    assert "at num_tokens=2048, where its neighbours say" in messages[1]
    before = of(check_bundle(bundle, A100), "warning")
    assert "others" not in before


def test_a_step_is_no_outlier() -> None:
    modelled = device_bundle("a100-80g-sxm", load_model("gpt3-175b"), 8, max_tokens=600)
    rows = modelled.linear[modelled.linear["op"] == "ffn_ln2"].set_index("num_tokens")["time_us"]
    assert rows[257] > 1.3 * rows[256]
    found = [f for f in check_bundle(modelled, A100) if f.where == "ffn_ln2"]
    assert not any("outlier" in f.message for f in found)


def test_missing_sides_of_tile_edges_are_a_warning(bundle: Bundle) -> None:
    gone = bundle.linear["num_tokens"].isin([129, 257]) & (bundle.linear["op"] == "preproj")
    without = dataclasses.replace(bundle, linear=bundle.linear[~gone])
    found = of(check_bundle(without, A100), "warning")
    assert "of 8 multiples of 128 tokens to 1024" in found["linear"]
    assert found["linear"].endswith("preproj 2")
    assert "linear" not in of(check_bundle(bundle, A100), "warning")


def test_an_unknown_device_is_said(bundle: Bundle, tmp_path: Path) -> None:
    meta = dataclasses.replace(bundle.meta, device="my-gpu", source="measured")
    write_bundle(dataclasses.replace(bundle, meta=meta), tmp_path / "b")
    checked = check_folder(tmp_path / "b")
    assert not checked.failed
    assert of(checked.findings, "note")["device"].startswith("no data sheet of my-gpu ships")


def test_the_check_command(bundle: Bundle, tmp_path: Path) -> None:
    def invoke(path: Path) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["profile-check", str(path)])
        return done.exit_code, done.output

    write_bundle(bundle, tmp_path / "good")
    code, output = invoke(tmp_path)
    assert code == 0
    assert "272 points, num_tokens 1..131072" in output
    write_bundle(changed(bundle, "linear", scaled(1e-3, "ffn_ln1")), tmp_path / "units")
    code, output = invoke(tmp_path)
    assert code == 2
    assert "error: ffn_ln1: faster than the device can" in output
    # What load_bundle refuses is said in its words, and the other bundles are still checked.
    csv = tmp_path / "units" / "linear.csv"
    csv.write_text(csv.read_text().replace("ffn_ln1,1,", "ffn_ln1,1,-"))
    code, output = invoke(tmp_path)
    assert code == 2
    assert "time_us must be positive, got '-" in output
    assert str(tmp_path / "good") in output.replace("\n", "")
    code, output = invoke(tmp_path / "good" / "nothing")
    assert code == 2
    assert "no meta.yaml here or in a folder below" in output


def test_diff_of_common_and_of_interpolated_points(bundle: Bundle) -> None:
    slower = changed(bundle, "linear", scaled(1.5, "preproj"))
    slower = changed(slower, "linear", set_time("preproj", 512, 2.0))
    found, left_out = diff_bundles(bundle, slower)
    by_op = {diff.op: diff for diff in found}
    assert left_out == []
    preproj = by_op["preproj"]
    assert (preproj.points, preproj.interpolated) == (272, False)
    assert preproj.median == pytest.approx(1.5)
    assert (preproj.worst, preproj.worst_at) == (pytest.approx(3.0), "num_tokens=512")
    assert by_op["postproj"].median == by_op["attn_decode"].p95 == 1.0
    # Sizes that never coincide: both linear between their points.
    sizes = pd.DataFrame({"num_bytes": [3000, 300_000, 30_000_000], "time_us": [50.0, 90.0, 800.0]})
    other = dataclasses.replace(bundle, all_reduce=sizes, send_recv=bundle.send_recv.iloc[:0])
    found, left_out = diff_bundles(bundle, other)
    reduce = next(diff for diff in found if diff.op == "all_reduce")
    assert reduce.interpolated and reduce.points > 20
    assert left_out == [
        "send_recv inter_node: the second bundle has none",
        "send_recv intra_node: the second bundle has none",
    ]
    # Chunks and contexts that never coincide: interpolated between the second's points.
    shifted = bundle.attn_prefill[bundle.attn_prefill["chunk_tokens"] % 128 == 1]
    kept = bundle.attn_prefill[bundle.attn_prefill["chunk_tokens"] % 128 == 0]
    one = dataclasses.replace(bundle, attn_prefill=shifted)
    two = dataclasses.replace(bundle, attn_prefill=kept)
    prefill = next(diff for diff in diff_bundles(one, two)[0] if diff.op == "attn_prefill")
    assert prefill.interpolated
    assert 0.8 < prefill.median < 1.1


def test_different_shards_are_not_compared(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="different tps: the first has 8, the second 1"):
        diff_bundles(bundle, load_bundle(profile_folder(*GPT3, 1)))
    meta = dataclasses.replace(bundle.meta, model="other")
    with pytest.raises(BundleError, match="different models: the first has gpt3-175b"):
        diff_bundles(bundle, dataclasses.replace(bundle, meta=meta))
    done = CliRunner().invoke(app, ["profile-diff", *[str(profile_folder(*GPT3, 8))] * 2])
    assert done.exit_code == 0
    assert "preproj" in done.output and "1.00" in done.output


def test_the_import_command_ends_in_one_message(tmp_path: Path) -> None:
    options = ["--model", "llama-2-7b", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["import", "vidur", str(tmp_path), *options])
    assert done.exit_code == 2
    assert "has no mlp_a100_MODEL.csv" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "product", "shipped"),
    [
        ("h100-80gb-hbm3", "", "h100-80g-sxm"),
        ("h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", "h100-80g-sxm"),
        ("my-h200", "NVIDIA H200", "h200-sxm"),
        ("h200", "", "h200-sxm"),
        ("a40", "NVIDIA A40", "a40"),
        ("my-gpu", "NVIDIA L40S", "l40s"),
        ("h200-sxm", "", "h200-sxm"),
    ],
)
def test_limits_are_those_of_the_product_it_was_measured_on(
    bundle: Bundle, tmp_path: Path, device: str, product: str, shipped: str
) -> None:
    """A peak of 2.6e16 FLOP/s passed, because h100-80gb-hbm3 was no shipped name."""
    environment = {"gpu": product} if product else {}
    meta = dataclasses.replace(bundle.meta, device=device, source="measured",
                               environment=environment, device_file_sha256=None)  # fmt: skip
    n, k = (shape := bundle.meta.model_spec.gemms(bundle.meta.tp)["ffn_ln1"]).n, shape.k
    linear = bundle.linear.copy()
    rows = linear["op"] == "ffn_ln1"
    linear.loc[rows, "time_us"] = 1e6 * 2.0 * n * k * linear.loc[rows, "num_tokens"] / 2.6e16
    write_bundle(dataclasses.replace(bundle, meta=meta, linear=linear), tmp_path / "b")
    errors = of(check_folder(tmp_path / "b").findings, "error")
    assert f"TFLOP/s of {shipped} need at least" in errors["ffn_ln1"]


def test_a_product_that_is_not_shipped_has_no_limits() -> None:
    assert shipped_device("h200-nvl", "NVIDIA H200 NVL") is None
    assert shipped_device("cpu") is None
