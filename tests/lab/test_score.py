"""Rows of measured servers, and the arithmetic of errors."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config.inputs import NONE, HostConstants
from sarathi_sim.experiments.lab.servers.errors import (
    errors,
    grouped,
    predictions_table,
    read_peer,
    short_reason,
)
from sarathi_sim.experiments.lab.servers.rows import Measured, ServerTimes, read_measured
from sarathi_sim.experiments.lab.servers.runs import (
    RowCache,
    RowOutcome,
    RowPlan,
    data_fingerprint,
    outcome_key,
    plan_rows,
)
from sarathi_sim.experiments.lab.servers.scenarios import MODELS, scenario_of
from sarathi_sim.experiments.lab.servers.score import ScoredRows
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.facts.model import list_models
from sarathi_sim.profiler.storage.strict import UserError

pytestmark = pytest.mark.lab

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


def planned(row: Measured, **hosts: HostConstants) -> RowPlan:
    variants = {name: partial(scenario_of, host=host) for name, host in hosts.items()}
    variants = variants or {"": partial(scenario_of, host=NONE)}
    return plan_rows("f.csv", [row], lambda *_: None, variants, RowCache(None))


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
        (ROW.replace("1024,1024", "1024,1") + ",80,20", "osl: value '1': must be at least 2"),
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


def test_the_last_row_may_end_without_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(f"{HEADER},ttft_ms,tpot_ms\n{ROW},80,20")
    rows, _ = read_measured(path)
    assert [(row.ttft_ms, row.tpot_ms) for row in rows] == [(80.0, 20.0)]
    path.write_text(f"{HEADER},ttft_ms,tpot_ms\n{ROW},80")
    with pytest.raises(UserError, match="row 2 is truncated: it lacks a cell"):
        read_measured(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,model\n", "column backend is missing"),
        (f"{HEADER},ttfts_ms,tpot_ms\n", "column ttft_ms is missing (did you mean ttfts_ms?)"),
        (f"{HEADER},ttft_ms,tpot_ms\n{ROW},80,20,7\n", "a row has more cells than the header"),
    ],
)
def test_what_is_no_such_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_measured(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_errors_by_hand() -> None:
    """Off by +10, -20, +60 and 0 percent; bands hold the first and miss the second."""
    rows = [measured(name, 100.0, 10.0) for name in "abcde"]
    predictions = {
        "a": ServerTimes(110.0, 10.0, bands={"ttft": (90.0, 120.0), "tpot": (9.0, 11.0)}),
        "b": ServerTimes(80.0, 10.0, bands={"ttft": (75.0, 99.0), "tpot": (9.0, 11.0)}),
        "c": ServerTimes(160.0, 10.0),
        "d": ServerTimes(100.0, 10.0),
    }
    found = errors(rows, predictions, "ttft")
    assert found == pytest.approx(
        {"mape": 22.5, "median": 15.0, "p90": 20 + 0.7 * 40, "bias": 12.5, "coverage": 50.0,
         "interval_score": (30 + 24 + 20 * 1) / 2, "coverage_pm": None}
    )  # fmt: skip
    two = [rows[0], rows[1].model_copy(update={"tp": 8})]  # servers: one inside, one not
    both = errors(two, predictions, "ttft")
    assert both is not None and both["coverage_pm"] == pytest.approx(196 * 0.5**0.5 / 2)
    tpot = errors(rows, predictions, "tpot")
    assert tpot is not None and tpot["mape"] == 0.0
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


def test_dense_models_and_mixtures_have_a_score_each() -> None:
    rows = [measured("a", 100.0, 10.0), measured("b", 100.0, 10.0, dense=False)]
    ours = {"a": ServerTimes(110.0, 9.0), "b": ServerTimes(150.0, 10.0)}
    found = ScoredRows(rows, ours, ours, {"row 9": "no"}, peers={"peer": ours}).content()
    assert (found["rows"], found["answered"]) == (3, 2)
    for name, error in (("dense", 10.0), ("mixtures", 50.0)):
        one = found["classes"][name]
        assert (one["rows"], one["answered"], one["refused"]) == (1, 1, {})
        assert one["groups"]["all"]["ttft"]["mape"] == pytest.approx(error)
        assert one["peers"]["peer"]["groups"]["all"]["n"] == 1 and "classes" not in one


def test_groups_go_by_number_only_where_they_have_one() -> None:
    """Python reads no integer of over 4,300 digits; a text of them is a name as any other."""
    digits = "7" * 5001
    given = [(17, digits), (5, "8"), (300, "bf16")]
    rows = [measured(str(n), 1.0, 1.0, concurrency=n, precision=word) for n, word in given]
    found = [name for name in grouped(rows) if name.startswith(("precision", "concurrency"))]
    assert found == [
        *(f"precision {word}" for word in (digits, "8", "bf16")),
        *(f"concurrency <= {most}" for most in (8, 32, 512)),
    ]


def test_a_score_by_hand() -> None:
    """Ours is off by 10 % on a and b, the peer by 20 % on a, and it lacks b."""
    rows = [measured("a", 100.0, 10.0), measured("b", 100.0, 10.0), measured("c", 1.0, 1.0)]
    ours, refused = {name: ServerTimes(110.0, 9.0) for name in "ab"}, {"c": "no", "row 9": "no"}
    peers = {"peer": {"a": ServerTimes(80.0, 12.0)}}
    found = ScoredRows(rows, ours, ours, refused, peers=peers).content()
    assert (found["rows"], found["answered"], found["refused"]) == (4, 2, {"no": 2})
    every = found["groups"]["all"]
    assert every["n"] == 2 and every["tpot"]["bias"] == pytest.approx(-10.0)
    beside = found["peers"]["peer"]["groups"]["all"]
    assert beside["n"] == 1
    assert beside["ours"]["ttft"]["mape"] == pytest.approx(10.0)
    assert beside["theirs"]["ttft"]["mape"] == pytest.approx(20.0)
    bands = {"a": (44.0, 170.0), "b": (44.0, 177.0)}  # of 110: b's is wider than 60 % either way
    banded = {name: replace(ours[name], bands={"ttft": band}) for name, band in bands.items()}
    wide = ScoredRows(rows, banded, ours, refused).content()
    assert (wide["answered"], wide["too_wide"]) == (1, 1)
    assert wide["groups"]["all"]["n"] == 2 and wide["groups"]["all"]["ttft"]["coverage"] == 100.0
    assert "no answer" in predictions_table(rows, banded, {})["reason"][1]
    table = predictions_table(rows, ours, {"c": "no", "row 9": "broken"})
    assert table["id"].tolist() == ["a", "b", "c", "row 9"]
    assert table["ttft_ms"].isna().tolist() == [False, False, True, True]
    assert table["reason"].tolist() == ["", "", "no", "broken"]


@pytest.mark.parametrize("names", ["ttft_ms,tpot_ms", "predicted_ttft_ms,predicted_tpot_ms"])
def test_a_peers_file(tmp_path: Path, names: str) -> None:
    path = tmp_path / "peer.csv"
    path.write_text(f"id,{names}\na,5,2\nb,,3\nc,-1,2\n")
    assert read_peer(path) == {"a": ServerTimes(5.0, 2.0)}
    path.write_text("id,other\na,5\n")
    with pytest.raises(UserError, match="needs the columns id, ttft_ms and tpot_ms"):
        read_peer(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"system": "abacus"}, "system abacus: not modelled; modelled: a100_sxm, "),
        ({"model": "acme/huge"}, "model acme/huge: not modelled; modelled: meta-llama/"),
        ({"backend": "orca"}, "backend orca: not modelled; modelled: vllm, sglang, trtllm"),
        ({"precision": "fp2"}, "precision fp2: not modelled"),
        ({"mode": "disagg", "tp": None}, "separate prefill workers: no launch settings"),
        ({"dp": 4}, "cluster.dp: value 4: must be 1: model qwen3-32b has no experts"),
        ({"backend": "sglang", "dp": 4}, "cluster.dp: value 4: must be 1: model qwen3-32b has no"),
        ({"tp": None}, "tp: this key is missing"),
        ({"tp": 3}, "cluster.tp: value 3"),
    ],
)
def test_what_is_not_modelled_has_a_reason(change: dict[str, object], reason: str) -> None:
    row = measured("a", 1.0, 1.0, **{"model": "Qwen/Qwen3-32B", **change})
    plan = planned(row)
    assert plan.runs == {"": {}} and reason in plan.refused["a"]
    assert len(short_reason(plan.refused["a"])) < 60


def test_a_closed_loop_is_what_a_row_describes() -> None:
    row = measured("a", 1.0, 1.0, model="Qwen/Qwen3-32B", isl=1024, osl=128, concurrency=8, tp=4,
                   length_range_ratio=0.8)  # fmt: skip
    host = HostConstants(0.001, 2e-5, 0.004)
    plan = planned(row, some=host, no=NONE)
    runs = plan.runs["some"]
    assert plan.refused == {} and plan.runs["no"]["a"].key != runs["a"].key
    scenario = runs["a"].run.scenario
    engine = scenario.engine
    assert (engine.host_iteration_s, engine.host_sequence_s, engine.frontend_s) == (
        0.001, 2e-5, 0.004,
    )  # fmt: skip
    workload = scenario.workload
    assert workload.requests == 80 and workload.arrivals.kind == "closed_loop"
    assert workload.arrivals.clients == 8
    assert workload.lengths.kind == "random" and workload.lengths.range_ratio == 0.8
    assert workload.lengths.bounds(1024) == (819, 1024), "as InferenceX draws"
    assert scenario.kv_cache is not None and scenario.kv_cache.prefix_caching is False


def test_qwens_fp8_is_in_blocks() -> None:
    for model, dtype in (("Qwen/Qwen3-32B", "fp8_block"), ("meta-llama/Llama-3.1-70B", "fp8")):
        row = measured("a", 1.0, 1.0, model=model, tp=4, precision="fp8")
        assert scenario_of(row, NONE)["dtype"] == dtype


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row that is answered, one of an unknown GPU, one with a broken number; and again from
    the cache."""
    monkeypatch.setenv("SARATHI_SIM_CACHE", str(tmp_path / "cache"))
    qwen = ROW.replace("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B").replace("1024,1024", "256,16")
    rows = [f"{qwen},80,20", f"b{qwen[1:]},80,20".replace("h100_sxm", "abacus"), f"c{qwen[1:]},x,2"]
    call = ["score", str(table(tmp_path, *rows)), "--json", "--workers", "1"]
    first = CliRunner().invoke(app, [*call, "--out", str(tmp_path / "out")])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert (found["rows"], found["answered"]) == (3, 1)
    refused = {"system abacus: not modelled": 1, "ttft_ms: must be a number": 1}
    assert found["refused"] == refused and found["groups"]["all"]["n"] == 1
    assert found["variants"]["zero_fit"]["all"]["n"] == 1 and "fitted to" in found["constants"]
    for metric in ("ttft", "tpot", "latency"):
        assert found["groups"]["all"][metric]["coverage"] in (0.0, 100.0)
    assert found["groups"]["all"]["throughput"] is None  # the table does not have it
    lines = (tmp_path / "out" / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["id", "a", "b", "c"]
    assert (tmp_path / "out" / "figures" / "measured_predicted.png").stat().st_size > 10_000
    monkeypatch.setattr(
        "sarathi_sim.experiments.lab.servers.runs.deploy", None
    )  # nothing is built again,
    monkeypatch.setattr("sarathi_sim.experiments.lab.servers.runs.execute", None)  # nothing is run
    again = CliRunner().invoke(app, call)
    assert again.stdout == first.stdout


def test_a_table_without_an_answer_draws_and_fits_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rows in ([], [f"{ROW},x,2"]):
        call = ["score", str(table(tmp_path, *rows)), "--workers", "1", "--out", str(out), "--fit"]
        with warnings.catch_warnings(action="error"):
            done = CliRunner().invoke(app, call)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith(f"0 of {len(rows)} rows have a prediction.")
        assert "host time of mixtures" in done.stdout
        assert not (out / "figures").exists() and not list(out.glob("host_time*"))


def test_an_outcome_is_that_of_its_scenario_and_data(tmp_path: Path) -> None:
    """Another constant, or another table, is another key; a damaged file is none."""
    row = measured("a", 1.0, 1.0, model="Qwen/Qwen3-32B", tp=4)
    key = outcome_key(scenario_of(row, NONE))
    assert key == outcome_key(scenario_of(row.model_copy(update={"ttft_ms": 2.0}), NONE))
    assert key != outcome_key(scenario_of(row, replace(NONE, host_sequence_s=1e-9)))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.yaml").write_text("1")
    before = data_fingerprint(tmp_path)
    data_fingerprint.cache_clear()
    (tmp_path / "kernels" / "a.yaml").write_text("2")
    assert data_fingerprint(tmp_path) != before
    data_fingerprint.cache_clear()
    kept, outcome = RowCache(tmp_path / "kept"), RowOutcome({"ttft_ms": 0.1})
    kept.write(key, outcome)
    assert kept.read(key) == outcome and kept.read(key[::-1]) is None
    (file,) = (path for path in (tmp_path / "kept").rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.2"))
    assert kept.read(key) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("system abacus: not modelled; modelled: a, b", "system abacus: not modelled"),
        ("cluster.tp: value 72: m: tp 72 does not", "tp that the model, or a node, cannot have"),
        ("kv_cache: m leaves no room; more", "no room for a KV cache beside the weights"),
        ("ttft_ms: value 'a: b; c': must be a number; osl: value 1", "ttft_ms: must be a number"),
        ("osl: value 1: must be at least 2", "osl: must be at least 2"),
        ("concurrency: this key is missing", "concurrency: this key is missing"),
    ],
)
def test_a_refusal_in_a_few_words(message: str, reason: str) -> None:
    assert short_reason(message) == reason
    table = predictions_table([], {}, {"row 1": f"{message}\nmore"})
    assert table.loc[0, ["reason", "detail"]].tolist() == [reason, f"{message} more"]


def test_two_scores_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARATHI_SIM_CACHE", str(tmp_path / "cache"))
    qwen = ROW.replace("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B").replace("1024,1024", "256,16")
    folder = tmp_path / "cache" / "scores"
    planned = Mock(side_effect=AssertionError("it plans before it asks for the lock"))
    monkeypatch.setattr("sarathi_sim.experiments.lab.servers.score.plan_rows", planned)
    store = Store(folder)
    store.open(resume=False)
    with store.locked():
        call = ["score", str(table(tmp_path, f"{qwen},80,20")), "--workers", "1"]
        done = CliRunner().invoke(app, call)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: another score is at work: wait for it, or set SARATHI_SIM_CACHE=off "
        f"(process {os.getpid()} on "
    )


def test_latency_and_throughput_are_scored() -> None:
    """Outputs of 8 to 10 tokens have 9 in the mean: 100 + 8 x 10 ms."""
    row = measured("a", 100.0, 10.0, osl=10, length_range_ratio=0.8, output_tokens_per_s=50.0)
    times = ServerTimes(100.0, 10.0, 55.0, {"latency": (170.0, 179.0), "throughput": (45.0, 55.0)})
    latency, rate = (errors([row], {"a": times}, name) for name in ("latency", "throughput"))
    assert latency is not None and (latency["mape"], latency["coverage"]) == (0.0, 0.0)
    assert rate is not None and rate["bias"] == pytest.approx(10.0)
    assert rate["coverage"] == 100.0
    given = row.model_copy(update={"latency_ms": 200.0, "output_tokens_per_s": None})
    latency = errors([given], {"a": times}, "latency")
    assert latency is not None and latency["bias"] == pytest.approx(-10.0)
    assert errors([given], {"a": times}, "throughput") is None


def test_a_mixture_has_its_checkpoints_formats_and_its_layout() -> None:
    minimax = {"model": "MiniMaxAI/MiniMax-M2.5", "precision": "fp8", "tp": 4}
    spread = scenario_of(measured("a", 1.0, 1.0, **minimax, moe_ep=4), NONE)
    assert (spread["dtype"], spread["moe_dtype"]) == ("fp8_block", "fp8_block")
    assert spread["cluster"]["expert_parallel"] is True
    divided = scenario_of(measured("a", 1.0, 1.0, **minimax), NONE)
    assert divided["cluster"]["expert_parallel"] is False
    oss = {"model": "openai/gpt-oss-120b", "precision": "fp4", "tp": 1}
    hopper = scenario_of(measured("a", 1.0, 1.0, **oss), NONE)
    assert (hopper["dtype"], hopper["moe_dtype"]) == ("bf16", "w4a16_mxfp4")
    blackwell = scenario_of(measured("a", 1.0, 1.0, **oss, system="b200_sxm"), NONE)
    assert blackwell["moe_dtype"] == "w4a8_mxfp4_mxfp8"
    with pytest.raises(UserError, match="precision fp8 of openai/gpt-oss-120b: not modelled"):
        scenario_of(measured("a", 1.0, 1.0, **{**oss, "precision": "fp8"}), NONE)
    assert set(MODELS.values()) <= set(list_models())
