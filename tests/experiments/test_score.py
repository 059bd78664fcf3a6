"""Rows of measured servers, and the arithmetic of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config.errors import ConfigError
from experiments.score.errors import Prediction, errors, grouped
from experiments.score.measured import Measured, read_measured

HEADER = "id,backend,model,system,precision,dense,isl,osl,length_range_ratio,concurrency,tp,flags"
ROW = "a,vllm,meta-llama/Llama-3.1-70B,h100_sxm,fp8,True,1024,1024,0.8,16,4.0,"


def table(folder: Path, *rows: str, header: str = f"{HEADER},ttft_ms,tpot_ms") -> Path:
    path = folder / "measured.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def measured(id: str, ttft_ms: float, tpot_ms: float, **more: object) -> Measured:
    given = {"backend": "vllm", "model": "m", "system": "h100_sxm", "isl": 8, "osl": 8,
             "concurrency": 4, "tp": 1, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}  # fmt: skip
    return Measured.model_validate({"id": id, **given, **more})


def test_a_row_is_read(tmp_path: Path) -> None:
    rows, refused = read_measured(table(tmp_path, f"{ROW},80.5,20"))
    assert refused == {}
    (row,) = rows
    assert (row.id, row.backend, row.tp, row.pp, row.dense) == ("a", "vllm", 4, 1, True)
    assert (row.isl, row.length_range_ratio, row.concurrency) == (1024, 0.8, 16)
    assert (row.ttft_ms, row.tpot_ms, row.flags) == (80.5, 20.0, "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (f"{ROW},broken,20", "ttft_ms: value 'broken'"),
        (f"{ROW},nan,20", "ttft_ms: value 'nan'"),
        (f"{ROW},80,-1", "tpot_ms: value '-1'"),
        (f"{ROW},,20", "ttft_ms: this key is missing"),
        (ROW.replace("1024,1024", "0,1024") + ",80,20", "isl: value '0'"),
        (ROW.replace("0.8", "1.5") + ",80,20", "length_range_ratio: value '1.5'"),
    ],
)
def test_a_broken_row_is_refused_alone(tmp_path: Path, row: str, reason: str) -> None:
    rows, refused = read_measured(table(tmp_path, row, f"b{ROW[1:]},80,20"))
    assert [one.id for one in rows] == ["b"]
    assert list(refused) == ["a"]
    assert refused["a"].startswith(reason), refused["a"]


def test_an_id_is_one_rows(tmp_path: Path) -> None:
    rows, refused = read_measured(table(tmp_path, f"{ROW},80,20", f"{ROW},81,20"))
    assert [row.ttft_ms for row in rows] == [80.0]
    assert refused == {"row 3": "the id a is given twice"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,model\n", "column backend is missing"),
        (f"{HEADER},ttfts_ms,tpot_ms\n", "column ttft_ms is missing (did you mean ttfts_ms?)"),
        (f"{HEADER},ttft_ms,tpot_ms\n{ROW},80", "row 2 is truncated"),
        (f"{HEADER},ttft_ms,tpot_ms\n{ROW},80,20,7\n", "a row has more cells than the header"),
    ],
)
def test_what_is_no_such_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_measured(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_errors_by_hand() -> None:
    """Off by +10, -20, +60 and 0 percent; bands hold the first and miss the second."""
    rows = [measured(name, 100.0, 10.0) for name in "abcde"]
    predictions = {
        "a": Prediction(110.0, 10.0, (90.0, 120.0), (9.0, 11.0)),
        "b": Prediction(80.0, 10.0, (75.0, 99.0), (9.0, 11.0)),
        "c": Prediction(160.0, 10.0),
        "d": Prediction(100.0, 10.0),
    }
    found = errors(rows, predictions, "ttft")
    assert found is not None
    assert found.mape == pytest.approx(22.5)
    assert found.median == pytest.approx(15.0)
    assert found.p90 == pytest.approx(20 + 0.7 * 40)
    assert found.bias == pytest.approx(12.5)
    assert found.coverage == 50.0
    assert errors(rows, predictions, "tpot").mape == 0.0  # type: ignore[union-attr]
    assert errors(rows[4:], predictions, "ttft") is None


def test_groups() -> None:
    rows = [
        measured("a", 1.0, 1.0, concurrency=16),
        measured("b", 1.0, 1.0, backend="sglang", dense=False, concurrency=17),
        measured("c", 1.0, 1.0, flags="doubtful"),
    ]
    found = {name: [row.id for row in group] for name, group in grouped(rows).items()}
    assert [next(iter(found)), list(found)[-1]] == ["all", "flagged"]
    assert found["all"] == ["a", "b"] and found["flagged"] == ["c"]
    assert found["engine vllm"] == ["a"] and found["engine sglang"] == ["b"]
    assert found["concurrency <= 16"] == ["a"] and found["concurrency <= 32"] == ["b"]
    assert found["class dense"] == ["a"] and found["class mixture of experts"] == ["b"]
