"""A bundle survives the disk unchanged, and each way to spoil one gives its own message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pandas as pd
import pytest

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
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.facts.ops import ROW_OPS
from sarathi_sim.profiler.storage.strict import UserError


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
    """As ``make``, with all that a measurement adds."""
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
    empty = Bundle(
        bundle.meta,
        bundle.linear,
        bundle.attn_prefill,
        bundle.attn_decode,
        all_reduce=bundle.all_reduce.iloc[:0],
        send_recv=bundle.send_recv.iloc[:0],
    )
    write_bundle(empty, tmp_path / "b")
    read = load_bundle(tmp_path / "b")
    assert read.all_reduce.empty and list(read.send_recv.columns) == [
        "num_bytes",
        "scope",
        "time_us",
    ]


def edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.write_text(change(path.read_text()))

    return spoil


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return edit(name, change)


def swap_rows(text: str) -> str:
    head, first, second, *rest = text.splitlines(keepends=True)
    return "".join([head, second, first, *rest])


def repeat_row(text: str) -> str:
    head, first, *rest = text.splitlines(keepends=True)
    return "".join([head, first, first, *rest])


MALFORMED = {
    "no meta": (lambda f: (f / "meta.yaml").unlink(), r"meta\.yaml: no such file"),
    "no table": (lambda f: (f / "linear.csv").unlink(), r"linear\.csv: no such file"),
    "no all_reduce": (lambda f: (f / "all_reduce.csv").unlink(), "needed for all_reduce"),
    "missing column": (
        replace("attn_decode.csv", "batch_size", "batch"),
        "column 'batch_size' is missing",
    ),
    "a long column beside a missing one": (
        edit("all_reduce.csv", lambda t: f"num_bytes,{'9' * 5000}\n1,2.0\n"),
        r"all_reduce\.csv: column 'time_us' is missing; has .{150,250}$",
    ),
    "unknown column": (
        edit("all_reduce.csv", lambda t: "num_bytes,time_us,x\n1,2.0,3\n"),
        "unknown column 'x'",
    ),
    "nan": (
        replace("attn_prefill.csv", "2.5", "nan"),
        r"row 3: time_us must be a finite number, got 'nan'",
    ),
    "text": (replace("attn_prefill.csv", "2.5", "fast"), r"row 3: time_us must be .* got 'fast'"),
    "zero": (replace("attn_prefill.csv", "2.5", "0.0"), r"row 3: time_us must be positive"),
    "negative": (replace("attn_prefill.csv", "2.5", "-2"), r"row 3: time_us must be positive"),
    "fraction": (
        replace("attn_prefill.csv", "64,64", "64,6.5"),
        r"row 3: context_tokens must be an integer, got '6\.5'",
    ),
    "vast": (
        replace("attn_prefill.csv", "64,64", "64,6e44"),
        r"row 3: context_tokens must be below 2\^53, got '6e44'",
    ),
    "zero tokens": (
        replace("attn_prefill.csv", "64,0", "0,0"),
        r"row 2: chunk_tokens must be at least 1",
    ),
    "duplicate": (edit("attn_decode.csv", repeat_row), r"row 3 .*batch_size=1.* is a duplicate"),
    "unsorted": (edit("attn_decode.csv", swap_rows), r"row 3 .*not in sorted order"),
    "unknown op": (
        replace("linear.csv", "preproj", "pre_proj"),
        r"unknown op 'pre_proj' \(did you mean preproj\?\)",
    ),
    "lacking op": (
        edit("linear.csv", lambda t: "".join(s for s in t.splitlines(True) if "lm_h" not in s)),
        "op 'lm_head' has no rows",
    ),
    "truncated cell": (edit("linear.csv", lambda t: t + "zz\n"), r"row \d+ is truncated"),
    "truncated file": (edit("linear.csv", lambda t: t[:-1]), r"row \d+ is truncated"),
    "empty": (edit("linear.csv", lambda t: ""), "not a valid CSV"),
    "no rows": (edit("linear.csv", lambda t: t.splitlines(True)[0]), "has no rows"),
    "skew below the mean": (
        replace("attn_decode_skew.csv", "4,16,20", "4,16,12"),
        r"attn_decode_skew\.csv: row 2 \(batch_size=4, context_tokens=16, max_context_tokens=12\): "
        r"max_context_tokens is less than the mean",
    ),
    "skew beyond the sum": (
        replace("attn_decode_skew.csv", "4,16,64", "4,16,65"),
        r"attn_decode_skew\.csv: row 3 .*more than all contexts together",
    ),
    "empty layer": (
        replace("mixed.csv", "0,0,2,16", "0,0,0,0"),
        r"mixed\.csv: row 2 .*: holds neither a chunk nor decodes",
    ),
    "context of no chunk": (
        replace("mixed.csv", "0,0,2,16", "0,8,2,16"),
        r"mixed\.csv: row 2 .*: context_tokens without a chunk",
    ),
    "context of no decodes": (
        replace("mixed.csv", "64,0,0,0", "64,0,0,8"),
        r"mixed\.csv: row 4 .*: decode_context_tokens without decodes",
    ),
    "unknown overhead": (
        replace("overhead.csv", "layer_run", "layer_runs"),
        r"overhead\.csv: row 3: unknown what 'layer_runs' \(did you mean layer_run\?\)",
    ),
    "changed": (replace("attn_prefill.csv", "2.5", "2.6"), "content_sha256"),
    "meta key": (
        replace("meta.yaml", "tile:", "tiles:"),
        r"meta\.yaml: tiles: unknown key \(did you mean tile\?\); allowed: ",
    ),
    "meta type": (
        replace("meta.yaml", "tp: 2", "tp: two"),
        "tp: value 'two': must be a whole number",
    ),
    "meta version": (
        replace("meta.yaml", "format_version: 1", "format_version: 9"),
        "format_version must be 1, got 9",
    ),
    "meta source": (
        replace("meta.yaml", "source: measured", "source: modelled"),
        "device_file_sha256 is required",
    ),
    "meta yaml": (edit("meta.yaml", lambda t: t + "}"), "not valid YAML"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_bundle_is_refused_with_its_own_message(
    tmp_path: Path, bundles: Path, case: str
) -> None:
    spoil, message = MALFORMED[case]
    copytree(bundles / "plain", tmp_path / "b")
    spoil(tmp_path / "b")
    with pytest.raises(UserError, match=message) as caught:
        load_bundle(tmp_path / "b")
    assert str(tmp_path / "b") in str(caught.value)


def cut_last_line(text: str) -> str:
    return text[: text.rstrip("\n").rindex(",")] + "\n"


def in_last_row(column: str, value: str) -> Callable[[str], str]:
    """Another value in the last row, wherever that column stands."""

    def change(text: str) -> str:
        *others, last = text.splitlines()
        cells = last.split(",")
        cells[others[0].split(",").index(column)] = value
        return "\n".join([*others, ",".join(cells), ""])

    return change


FAULTS = {
    "truncated": (cut_last_line, "row {last} is truncated: it lacks a cell"),
    "no newline": (lambda text: text[:-2], "row {last} is truncated: the file does not end"),
    "unsorted": (swap_rows, "row 3 .* is not in sorted order"),
    "duplicated": (repeat_row, "row 3 .* is a duplicate"),
    "nan": (
        in_last_row("time_us", "nan"),
        "row {last}: time_us must be a finite number, got 'nan'",
    ),
    "negative": (
        in_last_row("time_us", "-1.0"),
        "row {last}: time_us must be positive, got '-1.0'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_table_with_every_fault_is_refused_by_file_and_row(
    tmp_path: Path, bundles: Path, kind: str, table: str, fault: str
) -> None:
    copytree(bundles / kind, tmp_path / "b")
    path = tmp_path / "b" / f"{table}.csv"
    change, message = FAULTS[fault]
    last = path.read_text().count("\n")
    path.write_text(change(path.read_text()))
    with pytest.raises(BundleError, match=message.format(last=last)) as caught:
        load_bundle(tmp_path / "b")
    assert str(caught.value).startswith(f"{path}: row ")


SPREADS = {
    "nan": "row {last}: spread_pct must be a finite number, got 'nan'",
    "inf": "row {last}: spread_pct must be a finite number, got 'inf'",
    "wide": "row {last}: spread_pct must be a finite number, got 'wide'",
    "-0.1": "row {last}: spread_pct must be at least 0, got '-0.1'",
    "": "row {last} is truncated: it lacks a cell",
}
BACKENDS = {
    "": "row {last} is truncated: it lacks a cell",
    " ": "row {last}: backend must be text, got ' '",
    "x\ty": "row {last}: backend must be text, got 'x\\\\ty'",
    '"torch SDPA': "row {last} is truncated: a quoted cell does not end",
}
CELLS = [(table, "spread_pct", *case) for table in TABLES for case in SPREADS.items()]
CELLS += [
    (name, "backend", *case)
    for name, table in TABLES.items()
    if "backend" in table.extras
    for case in BACKENDS.items()
]


@pytest.mark.parametrize(("table", "column", "value", "message"), CELLS)
def test_what_a_measurement_adds_is_checked_like_the_times(
    tmp_path: Path, bundles: Path, table: str, column: str, value: str, message: str
) -> None:
    copytree(bundles / "measured", tmp_path / "b")
    path = tmp_path / "b" / f"{table}.csv"
    last = path.read_text().count("\n")
    path.write_text(in_last_row(column, value)(path.read_text()))
    with pytest.raises(BundleError, match=message.format(last=last)) as caught:
        load_bundle(tmp_path / "b")
    assert str(caught.value).startswith(f"{path}: row ")


def test_a_backend_is_no_column_of_what_has_none(tmp_path: Path) -> None:
    write_bundle(make(), tmp_path / "b")
    path = tmp_path / "b" / "all_reduce.csv"
    path.write_text("num_bytes,time_us,backend\n1024,9.0,nccl\n")
    with pytest.raises(BundleError, match=r"unknown column 'backend'; allowed .*'spread_pct'"):
        load_bundle(tmp_path / "b")


def test_bundles_without_the_newer_tables_load_as_before(tmp_path: Path) -> None:
    """Their hash does not change either: shipped bundles have none of them."""
    bundle = make()
    old = Bundle(
        bundle.meta, bundle.linear, bundle.attn_prefill, bundle.attn_decode, bundle.all_reduce,
        bundle.send_recv,
    )  # fmt: skip
    write_bundle(old, tmp_path / "b")
    names = {path.name for path in (tmp_path / "b").iterdir()}
    newer = ("attn_decode_skew", "mixed", "overhead")
    assert not names & {f"{name}.csv" for name in newer}
    read = load_bundle(tmp_path / "b")
    for name in newer:
        assert list(read.tables()[name].columns) == list(TABLES[name].columns)
        assert read.tables()[name].empty


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
