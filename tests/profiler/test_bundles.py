"""Bundles on disk, each way to spoil one, and what is found in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pandas as pd
import pytest

from sarathi_sim.profiler.bundle.check import Finding, check_bundle, check_folder
from sarathi_sim.profiler.bundle.schema import (
    TABLES,
    Bundle,
    BundleError,
    BundleMeta,
    find_bundle,
    list_bundles,
    load_bundle,
    write_bundle,
)
from sarathi_sim.profiler.bundle.tables import OVERHEADS
from sarathi_sim.profiler.facts.device import load_device, shipped_device
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import LOCAL, ROW_OPS
from sarathi_sim.profiler.measuring.to_bundle import measured_bundle, skipped
from sarathi_sim.profiler.planning.grid import Journal, Timing
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called
from tests.sampled import device_bundle, profile_folder


def make(tp: int = 2) -> Bundle:
    meta = BundleMeta(
        device="some-gpu",
        model="tiny-llama-40m",
        model_spec=load_model("tiny-llama-40m"),
        tp=tp,
        source="measured",
        created="2025-01-31",
        generator="test",
    )
    rows = [(op, m, 0.1 * m + 1 / 3) for op in ROW_OPS for m in (1, 128, 129)]
    return Bundle(
        meta=meta,
        linear=pd.DataFrame(rows, columns=["op", "num_tokens", "time_us"]),
        attn_prefill=pd.DataFrame(
            {"chunk_tokens": [64, 64], "context_tokens": [0, 64], "time_us": [1.0, 2.5]}
        ),
        attn_decode=pd.DataFrame(
            {"batch_size": [1, 2], "context_tokens": [16, 16], "time_us": [3.0, 4.0]}
        ),
        all_reduce=pd.DataFrame({"num_bytes": [1024, 2048], "time_us": [9.0, 10.0]}),
        send_recv=pd.DataFrame(
            {"num_bytes": [8, 8], "scope": ["inter_node", "intra_node"], "time_us": [5.0, 2.0]}
        ),
        attn_decode_skew=pd.DataFrame(
            [(4, 16, 20, 6.0), (4, 16, 64, 8.0)],
            columns=["batch_size", "context_tokens", "max_context_tokens", "time_us"],
        ),
        mixed=pd.DataFrame(
            [(0, 0, 2, 16, 9.0), (60, 64, 4, 16, 11.0), (64, 0, 0, 0, 10.0)],
            columns=[*TABLES["mixed"].columns],
        ),
        overhead=pd.DataFrame({"what": ["layer_launch", "layer_run"], "time_us": [7.0, 20.0]}),
    )


def measured() -> Bundle:
    bundle = make()
    tables = {}
    for name, frame in bundle.tables().items():
        tables[name] = frame.assign(spread_pct=[0.5 * row for row in range(len(frame))])
        if "backend" in TABLES[name].extras:
            tables[name]["backend"] = ["torch SDPA, mask", *['a "new" one'] * (len(frame) - 1)]
    return Bundle(bundle.meta, **tables)


KINDS = {"plain": make, "measured": measured}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind, written once: tests that spoil one spoil a copy."""
    folder = tmp_path_factory.mktemp("bundles")
    for kind, of in KINDS.items():
        write_bundle(of(), folder / kind)
    return folder


@pytest.mark.parametrize("bundle", [make(), measured()], ids=KINDS)
def test_round_trip_keeps_every_value(tmp_path: Path, bundle: Bundle) -> None:
    meta = write_bundle(bundle, tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    assert read.meta == meta
    for name, frame in bundle.tables().items():
        keys = list(TABLES[name].key)
        expected = frame.sort_values(keys).reset_index(drop=True)
        actual = read.tables()[name].sort_values(keys).reset_index(drop=True)
        pd.testing.assert_frame_equal(actual, expected, check_exact=True, check_dtype=False)


def test_same_bundle_gives_same_bytes_and_replaces_the_old_one(tmp_path: Path) -> None:
    write_bundle(make(), tmp_path / "a")
    write_bundle(make(), tmp_path / "b")
    write_bundle(make(), tmp_path / "b", force=True)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_bundle_that_would_not_load_leaves_nothing_behind(tmp_path: Path) -> None:
    bundle = make()
    bundle.linear.loc[4, "time_us"] = -1.0
    with pytest.raises(BundleError, match="time_us must be positive"):
        write_bundle(bundle, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_absent_communication_tables_are_empty_for_tp1(tmp_path: Path) -> None:
    bundle = make(tp=1)
    empty = {name: bundle.tables()[name].iloc[:0] for name in ("all_reduce", "send_recv")}
    write_bundle(Bundle(bundle.meta, **{**bundle.tables(), **empty}), tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    assert read.all_reduce.empty and list(read.send_recv) == ["num_bytes", "scope", "time_us"]


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def swap_rows(text: str) -> str:
    head, first, second, *rest = text.splitlines(keepends=True)
    return "".join([head, second, first, *rest])


def repeat_row(text: str) -> str:
    head, first, *rest = text.splitlines(keepends=True)
    return "".join([head, first, first, *rest])


PREFILL, MIXED, SKEW = "attn_prefill.csv", "mixed.csv", "attn_decode_skew.csv"
REDUCE, META = "all_reduce.csv", "meta.yaml"
#: A file, what is changed in it (None: it is gone), and what is said of it.
MALFORMED: list[tuple[str, Callable[[str], str] | None, str]] = [
    (META, None, r"meta\.yaml: no such file"),
    ("linear.csv", None, r"linear\.csv: no such file"),
    (REDUCE, None, "needed for all_reduce"),
    ("attn_decode.csv", swap("batch_size", "batch"), "column 'batch_size' is missing"),
    (REDUCE, lambda t: f"num_bytes,{'9' * 5000}\n1,2.0\n",
     r"all_reduce\.csv: column 'time_us' is missing; has .{150,250}$"),
    (REDUCE, lambda t: "num_bytes,time_us,x\n1,2.0,3\n", "unknown column 'x'"),
    (REDUCE, lambda t: "num_bytes,time_us,backend\n1024,9.0,nccl\n",
     "unknown column 'backend'; allowed .*'spread_pct'"),
    (PREFILL, swap("2.5", "fast"), "row 3: time_us must be .* got 'fast'"),
    (PREFILL, swap("2.5", "0.0"), "row 3: time_us must be positive"),
    (PREFILL, swap("64,64", "64,6.5"), r"row 3: context_tokens must be an integer, got '6\.5'"),
    (PREFILL, swap("64,64", "64,6e44"), r"row 3: context_tokens must be below 2\^53, got '6e44'"),
    (PREFILL, swap("64,0", "0,0"), "row 2: chunk_tokens must be at least 1"),
    (PREFILL, swap("2.5", "2.6"), "content_sha256"),
    ("linear.csv", swap("preproj", "pre_proj"),
     r"unknown op 'pre_proj' \(did you mean preproj\?\)"),
    ("linear.csv", lambda t: "".join(s for s in t.splitlines(True) if "lm_h" not in s),
     "op 'lm_head' has no rows"),
    ("linear.csv", lambda t: "", "not a valid CSV"),
    ("linear.csv", lambda t: t.splitlines(True)[0], "has no rows"),
    (SKEW, swap("4,16,20", "4,16,12"),
     r"attn_decode_skew\.csv: row 2 \(batch_size=4, context_tokens=16, max_context_tokens=12\): "
     "max_context_tokens is less than the mean"),
    (SKEW, swap("4,16,64", "4,16,65"), "skew.csv: row 3 .*more than all contexts together"),
    (MIXED, swap("0,0,2,16", "0,0,0,0"), "mixed.csv: row 2 .*: holds neither a chunk nor decodes"),
    (MIXED, swap("0,0,2,16", "0,8,2,16"), r"mixed\.csv: row 2 .*: context_tokens without a chunk"),
    (MIXED, swap("64,0,0,0", "64,0,0,8"), "row 4 .*: decode_context_tokens without decodes"),
    ("overhead.csv", swap("layer_run", "layer_runs"),
     r"overhead\.csv: row 3: unknown what 'layer_runs' \(did you mean layer_run\?\)"),
    (META, swap("tile:", "tiles:"),
     r"meta\.yaml: tiles: unknown key \(did you mean tile\?\); allowed: "),
    (META, swap("tp: 2", "tp: two"), "tp: value 'two': must be a whole number"),
    (META, swap("format_version: 1", "format_version: 9"), "format_version must be 1, got 9"),
    (META, swap("source: measured", "source: modelled"), "device_file_sha256 is required"),
    (META, lambda t: t + "}", "not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "message"), MALFORMED)
def test_malformed_bundle_is_refused_with_its_own_message(
    tmp_path: Path, bundles: Path, file: str, change: Callable[[str], str] | None, message: str
) -> None:
    copytree(bundles / "plain", tmp_path / "b")
    path = tmp_path / "b" / file
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message) as caught:
        load_bundle(tmp_path / "b")
    assert str(tmp_path / "b") in str(caught.value)


def cut_last_line(text: str) -> str:
    return text[: text.rstrip("\n").rindex(",")] + "\n"


def in_last_row(column: str, value: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        *others, last = text.splitlines()
        cells = last.split(",")
        cells[others[0].split(",").index(column)] = value
        return "\n".join([*others, ",".join(cells), ""])

    return change


Fault = tuple[Callable[[str], str], str]
FAULTS: list[Fault] = [
    (cut_last_line, "row {last} is truncated: it lacks a cell"),
    (lambda text: text[:-2], "row {last} is truncated: the file does not end"),
    (swap_rows, "row 3 .* is not in sorted order"),
    (repeat_row, "row 3 .*=.* is a duplicate"),
    (in_last_row("time_us", "nan"), "row {last}: time_us must be a finite number, got 'nan'"),
    (in_last_row("time_us", "-1.0"), "row {last}: time_us must be positive, got '-1.0'"),
]
SPREADS: list[Fault] = [
    (in_last_row("spread_pct", "-0.1"), "row {last}: spread_pct must be at least 0, got '-0.1'"),
    (in_last_row("spread_pct", ""), "row {last} is truncated: it lacks a cell"),
    *(
        (in_last_row("spread_pct", odd), f"row {{last}}: spread_pct must be a finite .* '{odd}'")
        for odd in ("nan", "inf", "wide")
    ),
]
BACKENDS: list[Fault] = [
    (in_last_row("backend", ""), "row {last} is truncated: it lacks a cell"),
    (in_last_row("backend", " "), "row {last}: backend must be text, got ' '"),
    (in_last_row("backend", "x\ty"), "row {last}: backend must be text, got 'x\\\\ty'"),
    (in_last_row("backend", '"torch SDPA'), "row {last} is truncated: a quoted cell does not end"),
]
CASES = [(kind, table, *fault) for kind in KINDS for table in TABLES for fault in FAULTS]
CASES += [("measured", table, *fault) for table in TABLES for fault in SPREADS]
CASES += [
    ("measured", name, *fault)
    for name, table in TABLES.items()
    if "backend" in table.extras
    for fault in BACKENDS
]


@pytest.mark.parametrize(("kind", "table", "change", "message"), CASES)
def test_every_table_with_every_fault_is_refused_by_file_and_row(
    tmp_path: Path, bundles: Path, kind: str, table: str, change: Callable[[str], str], message: str
) -> None:
    copytree(bundles / kind, tmp_path / "b")
    path = tmp_path / "b" / f"{table}.csv"
    last = path.read_text().count("\n")
    path.write_text(change(path.read_text()))
    with pytest.raises(BundleError, match=message.format(last=last)) as caught:
        load_bundle(tmp_path / "b")
    assert str(caught.value).startswith(f"{path}: row ")


def test_find_bundle_names_what_there_is_and_the_command(tmp_path: Path) -> None:
    write_bundle(make(), tmp_path / "some-gpu" / "tiny-llama-40m" / "tp2")
    path = find_bundle(tmp_path, "some-gpu", "tiny-llama-40m", 2)
    assert load_bundle(path).meta.tp == 2
    with pytest.raises(BundleError) as caught:
        find_bundle(tmp_path, "some-gpu", "tiny-llama-40m", 4)
    assert "some-gpu/tiny-llama-40m/tp2" in str(caught.value)
    assert str(caught.value).endswith("to measure one: sarathi-sim profile, on that device")
    with pytest.raises(BundleError, match="without profiles the calibrated model of a40 is asked"):
        find_bundle(tmp_path, "a40", "tiny-llama-40m", 2)


def test_a_root_of_bundles_is_no_bundle_but_names_them(tmp_path: Path) -> None:
    for number in range(10):
        write_bundle(make(), tmp_path / "some-gpu" / f"model-{number}" / "tp2")
    with pytest.raises(BundleError) as caught:
        load_bundle(tmp_path)
    first, last = tmp_path / "some-gpu" / "model-0" / "tp2", tmp_path / "some-gpu" / "model-7/tp2"
    assert str(caught.value).startswith(
        f"{tmp_path / 'meta.yaml'}: no such file; give one of the bundles below: {first}, "
    )
    assert str(caught.value).endswith(f", {last} and 2 more")
    with pytest.raises(BundleError, match=f"bundles below: {first}$"):
        load_bundle(first.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=r"meta\.yaml: no such file$"):
        load_bundle(tmp_path / "empty")


@pytest.mark.parametrize("name", ["tp\u00b2", "tp4-vllm", "tpx"])  # superscript two is a digit
def test_other_folders_beside_bundles_are_not_listed(tmp_path: Path, name: str) -> None:
    for each in ("tp2", name):
        (tmp_path / "dev" / "model" / each).mkdir(parents=True)
        (tmp_path / "dev" / "model" / each / "meta.yaml").touch()
    assert list_bundles(tmp_path) == [("dev", "model", 2)]


# What is found in bundles that are spoilt on purpose


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
    checked = check_folder(profile_folder(*GPT3, 8))
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
    assert "at num_tokens=2048, where its neighbours have" in messages[1]
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


def test_fit_begins_with_the_findings(bundle: Bundle, tmp_path: Path) -> None:
    write_bundle(changed(bundle, "linear", scaled(1e-3, "ffn_ln1")), tmp_path / "b")
    done = called("fit", tmp_path / "b", code=2)
    assert "272 points, num_tokens 1..131072" in done.output
    assert "error: ffn_ln1: faster than the device can" in done.output
    assert "held-out" not in done.output
    csv = tmp_path / "b" / "linear.csv"
    csv.write_text(csv.read_text().replace("ffn_ln1,1,", "ffn_ln1,1,-"))
    done = called("fit", tmp_path / "b", code=2)
    assert "time_us must be positive, got '-" in done.output


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


# What only measured bundles hold: whole layers, skewed decodes, overhead, spreads and backends


SDPA, XFORMERS = "torch SDPA, mask", "xformers 0.0.35 memory_efficient_attention"


@pytest.fixture
def small(tmp_path: Path) -> Bundle:
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


def test_the_journal_becomes_the_tables(small: Bundle, tmp_path: Path) -> None:
    write_bundle(small, tmp_path / "b")
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


def test_layers_and_skewed_decodes_faster_than_the_device_are_errors(small: Bundle) -> None:
    assert not [f for f in check_bundle(small, A100) if f.level == "error"]
    for table in ("mixed", "attn_decode_skew"):
        frame = small.tables()[table].assign(time_us=1e-3)
        found = check_bundle(replace(small, **{table: frame}), A100)
        assert [f.where for f in found if f.level == "error"] == [table]


def test_a_longer_maximum_that_takes_less_is_a_warning(small: Bundle) -> None:
    frame = small.attn_decode_skew.assign(time_us=[900.0, 600.0])
    found = check_bundle(replace(small, attn_decode_skew=frame), A100)
    (drop,) = [f.message for f in found if f.where == "attn_decode_skew"]
    assert drop == (
        "takes 33 % less at max_context_tokens=900 batch_size=8 context_tokens=128 than just before"
    )


def test_points_that_scatter_are_named_the_worst_first(small: Bundle) -> None:
    linear = small.linear.copy()
    preproj = linear["op"] == "preproj"
    linear.loc[preproj, "spread_pct"] = [20.0, 20.5]
    prefill = small.attn_prefill.assign(spread_pct=[30.0, 45.0])
    found = check_bundle(replace(small, linear=linear, attn_prefill=prefill), A100)
    said = {f.where: f.message for f in found if f.message.startswith("samples scatter")}
    assert said == {
        "preproj": "samples scatter by 20.5 % of the median at num_tokens=64",
        "attn_prefill": (
            "samples scatter by 45 % of the median at chunk_tokens=64 context_tokens=32; "
            "samples scatter by 30 % of the median at chunk_tokens=64 context_tokens=0"
        ),
        "send_recv inter_node": "samples scatter by 50 % of the median at num_bytes=1024",
    }


def test_two_backends_in_a_table_are_said(small: Bundle, tmp_path: Path) -> None:
    decode = small.attn_decode.assign(backend=[SDPA, XFORMERS])
    both = replace(small, attn_decode=decode)
    write_bundle(both, tmp_path / "b")  # it is legal
    read = load_bundle(tmp_path / "b")
    assert read.attn_decode["backend"].tolist() == [SDPA, XFORMERS]
    (warning,) = [f for f in check_bundle(read, A100) if "backends" in f.message]
    assert (warning.level, warning.where) == ("warning", "attn_decode")
    assert warning.message == (
        f"2 backends in one table: '{SDPA}' 1 points (first batch_size=64 context_tokens=0), "
        f"'{XFORMERS}' 1 points (first batch_size=64 context_tokens=32)"
    )
