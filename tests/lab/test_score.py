"""Rows of measured servers, the arithmetic of errors, and the answer of a score."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import NONE, HostConstants
from sarathi_sim.experiments.lab.pages import update
from sarathi_sim.experiments.lab.servers.answers import KINDS, servers_answer
from sarathi_sim.experiments.lab.servers.errors import (
    errors,
    grouped,
    predictions_table,
    read_peer,
    short_reason,
)
from sarathi_sim.experiments.lab.servers.page import DENSE, MIXTURES, tables
from sarathi_sim.experiments.lab.servers.rows import METRICS, Measured, ServerTimes, read_servers
from sarathi_sim.experiments.lab.servers.runs import plan_row
from sarathi_sim.experiments.lab.servers.scenarios import scenario_of
from sarathi_sim.experiments.lab.servers.score import ScoredRows
from sarathi_sim.experiments.report.sections import sections_of
from sarathi_sim.experiments.sweeps.plan import SharedRequests
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called

pytestmark = pytest.mark.lab

HEADER = "id,backend,model,system,precision,dense,isl,osl,length_range_ratio,concurrency,tp,flags"
ROW = "a,vllm,meta-llama/Llama-3.1-70B,h100_sxm,fp8,True,1024,1024,0.8,16,4.0,"
SMALL = ROW.replace("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B").replace("1024,1024", "256,16")


def table(folder: Path, *rows: str, header: str = f"{HEADER},ttft_ms,tpot_ms") -> Path:
    path = folder / "measured.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def measured(id: str, ttft_ms: float = 1.0, tpot_ms: float = 1.0, **more: object) -> Measured:
    given = {"backend": "vllm", "model": "m", "system": "h100_sxm", "isl": 8, "osl": 8,
             "concurrency": 4, "tp": 1, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms}  # fmt: skip
    return Measured.model_validate({"id": id, **given, **more})


def test_rows_are_read_and_broken_ones_are_refused_alone(tmp_path: Path) -> None:
    lines = [f"{ROW},80.5,20", f"{ROW},81,20", f"b{ROW[1:]},nan,20", f"c{ROW[1:]},,20"]
    lines += [f"d{ROW[1:]},80,-1", f"e{ROW[1:]},80,20".replace("1024,1024", "1024,1")]
    lines += [f"f{ROW[1:]},80,20".replace("0.8", "1.5")]
    (row,), refused = read_servers([table(tmp_path, *lines)])
    assert (row.id, row.backend, row.tp, row.pp, row.dense) == ("a", "vllm", 4, 1, True)
    assert (row.isl, row.length_range_ratio, row.concurrency) == (1024, 0.8, 16)
    assert (row.ttft_ms, row.tpot_ms, row.flags) == (80.5, 20.0, "")
    for name, reason in (
        ("row 3", "the id a is given twice"),
        ("b", "ttft_ms: value 'nan'"),
        ("c", "ttft_ms: this key is missing"),
        ("d", "tpot_ms: value '-1'"),
        ("e", "osl: value '1': must be at least 2"),
        ("f", "length_range_ratio: value '1.5'"),
    ):
        assert refused.pop(name).startswith(reason)
    assert not refused
    with pytest.raises(UserError, match="the id a is in an earlier file, too"):
        read_servers([table(tmp_path, lines[0])] * 2)


def test_what_is_no_such_table(tmp_path: Path) -> None:
    header = f"{HEADER},ttft_ms,tpot_ms"
    for text, message in (
        ("id,model\n", "column backend is missing"),
        (header.replace("ttft", "ttfts"), "column ttft_ms is missing (did you mean ttfts_ms?)"),
        (f"{header}\n{ROW},80,20,7\n", "a row has more cells than the header"),
        (f"{header}\n{ROW},80", "row 2 is truncated: it lacks a cell"),
    ):
        (path := tmp_path / "measured.csv").write_text(text)
        with pytest.raises(UserError) as caught:
            read_servers([path])
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
    """Concurrencies go by number; a precision of more digits than an integer may have is text."""
    digits = "7" * 5001
    rows = [
        measured("a", concurrency=16, precision=digits),
        measured("b", backend="sglang", dense=False, concurrency=300),
        measured("c", flags="doubtful"),
        measured("d", concurrency=17, precision="8"),
    ]
    found = {name: "".join(row.id for row in group) for name, group in grouped(rows).items()}
    assert [next(iter(found)), list(found)[-1]] == ["all", "flagged"]
    assert found["all"] == "abd" and found["flagged"] == "c"
    assert found["engine vllm"] == "ad" and found["engine sglang"] == "b"
    assert found["class dense"] == "ad" and found["class mixture of experts"] == "b"
    numbers = [f"precision {word}" for word in (digits, "8", "bf16")]
    numbers += [f"concurrency <= {most}" for most in (16, 32, 512)]
    assert [n for n in found if n.startswith(("precision", "concurrency"))] == numbers


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
    mixture = [rows[0], rows[1].model_copy(update={"dense": False})]
    parts = ScoredRows(mixture, ours, ours, {"row 9": "no"}, peers=peers).content()["classes"]
    for one, answered in ((parts["dense"], 1), (parts["mixtures"], 0)):
        assert (one["rows"], one["answered"], one["refused"]) == (1, 1, {})
        assert one["groups"]["all"]["ttft"]["mape"] == pytest.approx(10.0) and "classes" not in one
        assert one["peers"]["peer"]["groups"]["all"]["n"] == answered
    table = predictions_table(rows, ours, {"c": "no", "row 9": "broken"})
    assert table["id"].tolist() == ["a", "b", "c", "row 9"]
    assert table["ttft_ms"].isna().tolist() == [False, False, True, True]
    assert table["reason"].tolist() == ["", "", "no", "broken"]


def test_a_peers_file(tmp_path: Path) -> None:
    path = tmp_path / "peer.csv"
    for names in ("ttft_ms,tpot_ms", "predicted_ttft_ms,predicted_tpot_ms"):
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
    row = measured("a", **{"model": "Qwen/Qwen3-32B", **change})
    with pytest.raises(UserError) as caught:
        plan_row(row, scenario_of(row, NONE), SharedRequests())
    assert str(caught.value).startswith(reason) and len(short_reason(str(caught.value))) < 60


def test_a_closed_loop_is_what_a_row_describes() -> None:
    row = measured("a", model="Qwen/Qwen3-32B", isl=1024, osl=128, concurrency=8, tp=4,
                   length_range_ratio=0.8)  # fmt: skip
    described = scenario_of(row, HostConstants(0.001, 2e-5, 0.004))
    run, shares = plan_row(row, described, SharedRequests())
    assert run.key != plan_row(row, scenario_of(row, NONE), SharedRequests())[0].key
    assert sum(shares.shares["tpot"].values()) == pytest.approx(1)
    engine, workload = run.scenario.engine, run.scenario.workload
    constants = (engine.host_iteration_s, engine.host_sequence_s, engine.frontend_s)
    assert constants == (0.001, 2e-5, 0.004)
    assert workload.requests == 80 and workload.arrivals.kind == "closed_loop"
    assert workload.arrivals.clients == 8
    assert workload.lengths.kind == "random" and workload.lengths.range_ratio == 0.8
    assert workload.lengths.bounds(1024) == (819, 1024), "as InferenceX draws"
    assert run.scenario.kv_cache is not None and run.scenario.kv_cache.prefix_caching is False


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row that is answered, one of an unknown GPU, one with a broken number; and again from
    the cache."""
    monkeypatch.setenv("SARATHI_SIM_CACHE", str(tmp_path / "cache"))
    rows = [f"{SMALL},80,20", f"b{SMALL[1:]},80,20".replace("h100_sxm", "abacus")]
    rows += [f"c{SMALL[1:]},x,2"]
    call = ("lab", "score", table(tmp_path, *rows), "--json", "--workers", 1)
    first = called(*call, "--out", tmp_path / "out")
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
    shown = sections_of([tmp_path / "out"])[0]
    assert shown.answer == found["answer"] and shown.charts
    monkeypatch.delattr(Deployment, "simulate")  # its runs are there
    assert called(*call).stdout == first.stdout


def test_a_table_without_an_answer_draws_and_fits_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rows in ([], [f"{ROW},x,2"]):
        with warnings.catch_warnings(action="error"):
            done = called("lab", "fit-host", table(tmp_path, *rows), "--workers", 1, "--out", out)
        assert done.stdout.startswith(f"0 of {len(rows)} rows have a prediction.")
        assert "host time of mixtures" in done.stdout
        assert not (out / "figures").exists() and not list(out.glob("host_time*"))


def test_a_refusal_in_a_few_words() -> None:
    for message, reason in (
        ("system abacus: not modelled; modelled: a, b", "system abacus: not modelled"),
        ("cluster.tp: value 72: m: tp 72 does not", "tp that the model, or a node, cannot have"),
        ("kv_cache: m leaves no room; more", "no room for a KV cache beside the weights"),
        ("ttft_ms: value 'a: b; c': must be a number; osl: 1", "ttft_ms: must be a number"),
        ("osl: value 1: must be at least 2", "osl: must be at least 2"),
        ("concurrency: this key is missing", "concurrency: this key is missing"),
    ):
        table = predictions_table([], {}, {"row 1": f"{message}\nmore"})
        assert table.loc[0, ["reason", "detail"]].tolist() == [reason, f"{message} more"]


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


def test_a_model_has_its_checkpoints_formats() -> None:
    for model, precision, system, formats in (
        ("Qwen/Qwen3-32B", "fp8", "h100_sxm", ("fp8_block", None)),
        ("meta-llama/Llama-3.1-70B", "fp8", "h100_sxm", ("fp8", None)),
        ("MiniMaxAI/MiniMax-M2.5", "fp8", "h100_sxm", ("fp8_block", "fp8_block")),
        ("openai/gpt-oss-120b", "fp4", "h100_sxm", ("bf16", "w4a16_mxfp4")),
        ("openai/gpt-oss-120b", "fp4", "b200_sxm", ("bf16", "w4a8_mxfp4_mxfp8")),
    ):
        given = {"model": model, "precision": precision, "system": system, "tp": 4}
        found = scenario_of(measured("a", **given), NONE)
        assert (found["dtype"], found.get("moe_dtype")) == formats
        if formats[1]:
            assert found["cluster"]["expert_parallel"] is False
            spread = scenario_of(measured("a", **given, moe_ep=4), NONE)
            assert spread["cluster"]["expert_parallel"] is True


def test_a_score_of_few_rows_without_a_flag_says_which_errors_it_prints() -> None:
    """1 of 4 rows has no flag: the group of the most rows is that of the flagged ones."""
    one, three = (
        {"n": n, **{m: dict.fromkeys(("mape", "median", "p90", "bias"), off) for m in METRICS}}
        for n, off in ((1, 5.0), (3, 17.1))
    )
    content: dict[str, Any] = {"rows": 4, "answered": 4, "refused": {}}
    for groups, expected in (
        ({"all": one, "flagged": three}, "of the 1 that are not flagged is 5.0 % for TTFT"),
        ({"all": {"n": 0}, "flagged": three}, "of the 3 that are flagged is 17.1 % for TTFT"),
    ):
        section = servers_answer(content | {"groups": groups})
        assert f"4 of 4 rows have a prediction; the median error {expected}" in section.answer


# The page --------------------------------------------------------------------------------------

ALL, OF_MIXTURES = KINDS[DENSE], KINDS[MIXTURES]
PAGE = (Path(__file__).parents[2] / "docs/lab/servers_dense.md").read_text(encoding="utf-8")


def of(mape: float) -> dict[str, Any]:
    numbers = {"mape": mape, "median": mape / 2, "p90": 9.0, "bias": -1.0, "coverage": 88.0}
    return {"n": 3, "ttft": numbers, "tpot": numbers, "latency": {**numbers, "coverage": 91.0}}


BESIDE = {"n": 2, "ours": of(3.0), "theirs": of(40.0), "leave_one_triple_out": of(8.0)}
CONTENT = {
    "groups": {ALL: of(4.0), "engine vllm": of(5.0), "flagged": {**of(1.0), "n": 0}},
    "variants": {
        "zero_fit": {ALL: of(6.0), "engine vllm": of(7.0)},
        "cross_validated": {ALL: of(4.0)},
        "leave_one_gpu_out": {ALL: {"n": 0}},
    },
    "peers": {"peer.csv": {"groups": {ALL: BESIDE}}},
    "host_time": {"vllm": {"host_iteration_s": 1e-3, "host_sequence_s": 2e-5, "frontend_s": 0.01}},
    "rows": 5,
    "answered": 3,
    "refused": {"mode disagg": 2},
}


def test_every_table_of_the_page_is_made() -> None:
    made = update(PAGE, tables(CONTENT), some=True)
    for row in (
        "| ours, nothing fitted to such rows | 3 | 6.0 / 3.0 | 6.0 / 3.0 |",
        "| peer, on the rows that it answers | 3 | 40.0 / 20.0 | 40.0 / 20.0 |",
        "| ours on those, without the row's model, GPU and engine | 3 | 8.0 / 4.0 | 8.0 / 4.0 |",
        "| cross validated | 3 | 4.0 / 2.0 | 4.0 / 2.0 | 4.0 / 2.0 | 88 % | 88 % | 91 % |",
        "| engine vllm | 3 | 5.0 / 2.5 | -1.0 | 88 % | 7.0 / 3.5 | 5.0 / 2.5 |",
        "| vllm | 1.00 | 0.0200 | 10.0 |",
        "| mode disagg | 2 |",
    ):
        assert row in made
    dense = "| leave one gpu out | 499 |"
    assert dense in PAGE and dense not in made
    groups = made.partition("table: Errors by group, dense models")[2].partition("<!-- end")[0]
    assert "| engine vllm |" in groups and "| flagged |" not in groups
