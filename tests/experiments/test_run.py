"""A run's folder: complete, the same bytes every time, there only if the run succeeded; folders
that are refused, and results that are damaged.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import SHAPE, Experiment, load_experiment
from sarathi_sim.experiments.report.timeline import Window, parse_window, stage_slices
from sarathi_sim.experiments.results import FORMAT, csv_bytes, read_tables
from sarathi_sim.experiments.run.experiment import ExperimentResult, simulate_all
from sarathi_sim.experiments.run.uncertainty import PER_MAKESPAN
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.ledger import ACCOUNTS
from sarathi_sim.simulator.views.metric_registry import METRICS
from tests.experiments.small_config import SMALL, summary_of

CDFS = ("ttft_cdf", "tbt_cdf", "latency_cdf", "bubble_cdf")
FIGURES = (*CDFS, "completions", "ledger", "timeline")


def loaded(*changes: str) -> Experiment:
    return load_experiment(yaml.safe_load(SMALL), changes)


def simulated(*changes: str) -> ExperimentResult:
    return simulate_all(loaded(*changes))


def test_the_folder_is_complete(result: Path) -> None:
    found = {str(path.relative_to(result)) for path in result.rglob("*") if path.is_file()}
    parquets = ("requests.parquet", "iterations.parquet", "token_gaps.parquet")
    tables = (*parquets, "ledger.csv", "timeline.json.gz")
    assert found == {
        "config.yaml",
        "summary.json",
        "manifest.json",
        *(f"{name}/{table}" for name in ("orca", "sarathi") for table in tables),
        *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "svg")),
    }


def test_the_summary_says_what_the_tables_say(result: Path) -> None:
    summary = summary_of(result)
    assert summary["format"] == FORMAT
    for name, scenario in summary["scenarios"].items():
        requests = pd.read_parquet(result / name / "requests.parquet")
        iterations = pd.read_parquet(result / name / "iterations.parquet")
        assert scenario["requests"] == scenario["finished"] == len(requests) == 60
        assert scenario["makespan_s"] == requests["finish_s"].max()
        assert scenario["iterations"] == len(iterations)
        # Every token once: the prompt, and a decode for each output token but the first.
        assert iterations["prefill_tokens"].sum() == requests["prompt_tokens"].sum()
        assert iterations["decodes"].sum() == (requests["output_tokens"] - 1).sum()
        ledger = pd.read_csv(result / name / "ledger.csv")
        accounts = ledger[[f"{account}_s" for account in ACCOUNTS]].sum(axis=1)
        assert np.array_equal(accounts, ledger["wall_s"])
    orca, sarathi = (summary["scenarios"][name]["makespan_s"] for name in ("orca", "sarathi"))
    assert summary["ratios"] == {"speedup": orca / sarathi}
    assert summary["reference"] == {"speedup": 1.5}


def test_the_resolved_config_gives_the_same_result(result: Path, tmp_path: Path) -> None:
    again = load_experiment(result / "config.yaml")
    assert again.scenarios["orca"].batching.max_in_flight == 8
    sim.run(again, out=tmp_path / "again", figures=False)
    for name in ("summary.json", "config.yaml", "orca/requests.parquet", "sarathi/ledger.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (result / name).read_bytes(), name


@pytest.mark.parametrize("given", [[], ["engine.jitter=0.1"]])
def test_a_run_follows_its_seed(given: list[str]) -> None:
    runs = [simulated(*given, f"seed={seed}").summary() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_requests_that_are_too_long_are_rejected() -> None:
    run = simulated("cluster.max_length=400", "workload.too_long=reject").runs["orca"]
    requests = run.analysis.requests
    too_long = requests["prompt_tokens"] + requests["output_tokens"] > 400
    assert 0 < too_long.sum() < 60
    assert run.summary["rejected"] == too_long.sum()
    assert (requests["rejected"].notna() == too_long).all()


def test_a_run_in_which_nothing_finishes(tmp_path: Path) -> None:
    """Where every request is rejected there is nothing to run; where all but the shortest are, the
    share and the longest one are told."""
    with pytest.raises(UserError, match="max_length: value 10: every request is rejected: the "):
        sim.run(loaded("cluster.max_length=10", "workload.too_long=reject"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    summary = simulated("cluster.max_length=210", "workload.too_long=reject").summary()
    orca, told = summary["scenarios"]["orca"], summary["rejections"]["orca"]
    served = 60 - orca["rejected"]
    assert orca["finished"] == served and 0 < served < 10
    assert told.startswith(f"{(60 - served) / 60:.1%} of the requests are rejected: the longest ")


def test_json_has_no_nan(tmp_path: Path) -> None:
    """Outputs of one token have no time between tokens."""
    one = "workload.lengths={kind: fixed, prompt: 100, decode: 1}"
    ratio = "compare.speedup={metric: tbt_s.p99, over: [orca, sarathi]}"
    short = loaded("workload.pd_ratio=null", one, ratio)
    summary = sim.run(short, out=tmp_path / "run", figures=False).summary()
    assert summary["scenarios"]["orca"]["tbt_s"]["p99"] is None
    assert summary["ratios"] == {"speedup": None}, "JSON has no NaN"
    assert "NaN" not in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And over an earlier result it leaves that as it was."""

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fails() -> None:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr("sarathi_sim.experiments.run.experiment._write_tables", full_disk)
            sim.run(loaded(), out=out)

    out = tmp_path / "out" / "run"
    fails()
    assert not out.parent.exists()
    sim.run(loaded(), out=out, figures=False)
    before = (out / "summary.json").read_bytes()
    fails()
    assert [path.name for path in out.parent.iterdir()] == ["run"]
    assert (out / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("makespan", "makespan is not one of requests, finished"),
        ("bubble_s", r"is not a number; one of bubble_s\.mean"),
        ("bubble_s.p51x", "p51x is not one of mean, p50"),
        ("bubble_s.p0.5", "p0.5 is not one of mean, p50"),
        ("makespan_s.p95", "makespan_s.p95"),
    ],
)
def test_unknown_metric_names_what_there_is(metric: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        simulated(f"compare.speedup.metric={metric}")


@pytest.mark.parametrize("metric", ["latency_s.p37", "steady.latency_s.p99.9", "tbt_s.p75"])
def test_a_file_may_name_any_percentile(metric: str) -> None:
    """The ratio is that of the tables, for each run's own column is at hand."""
    changes = ["workload.arrivals={kind: poisson, rate: 0.2}", f"compare.speedup.metric={metric}"]
    outcome = simulated(*changes)
    share = float(metric.rpartition(".p")[2]) / 100
    if metric == "steady.latency_s.p99.9":
        share = 0.999
    values = []
    for run in outcome.runs.values():
        if metric.startswith("tbt"):
            values += run.analysis.tbt_quantiles([share])
            continue
        part = run.analysis.requests.sort_values("arrival_s", kind="stable")
        first = run.summary["steady"]["warmup_requests"] if metric.startswith("steady") else 0
        values.append(part["latency_s"][first:].quantile(share))
    assert outcome.ratios["speedup"] == pytest.approx(values[0] / values[1])


def test_figures_show_something(result: Path) -> None:
    for name in FIGURES:
        with Image.open(result / "figures" / f"{name}.png") as image:
            assert image.width > 800
            assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
        root = ElementTree.parse(result / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
        assert sum(1 for element in root.iter() if element.tag.endswith("path")) > 20


def test_the_trace_is_one_that_perfetto_reads(result: Path) -> None:
    trace = json.loads(gzip.decompress((result / "orca" / "timeline.json.gz").read_bytes()))
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named == {event["tid"] for event in slices} == set(range(1, 9))
    assert {event["pid"] for event in events} == {1}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert order == {tid: tid - 1 for tid in named}
    assert {"prefill", "decode", "mixed", "bubble"} >= {event["cat"] for event in slices}
    for stage in named:
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == stage)
        ends = [round(1000 * (ts + dur)) for ts, dur in mine]
        starts = [round(1000 * ts) for ts, _ in mine]
        assert all(dur >= 0 for _, dur in mine)
        assert all(a <= b for a, b in zip(ends, starts[1:], strict=False)), "slices overlap"


def test_slices_of_a_window() -> None:
    run = simulated().runs["orca"]
    whole = stage_slices(run.analysis, Window(0, run.analysis.records.end_s))
    assert [len(stage.row) for stage in whole] == [run.summary["iterations"]] * 8
    busy = sum((stage.finish - stage.start).sum() for stage in whole)
    assert busy == pytest.approx(run.analysis.ledger["busy_s"].sum(), rel=1e-12)
    bubbles = sum(stage.bubble_s.sum() for stage in whole)
    parts = ["pb1_s", "pb2_s", "pb3_s", "equal_s", "communication_s", "turnaround_s"]
    assert bubbles == pytest.approx(run.analysis.ledger[parts].to_numpy().sum(), rel=1e-12)
    some = stage_slices(run.analysis, Window(run.analysis.records.end_s / 2, 0.01))
    assert 0 < sum(len(stage.row) for stage in some) < 100


def test_windows() -> None:
    assert parse_window("120:1.5") == Window(120.0, 1.5)
    for text in ("1", "1:", ":1", "-1:2", "1:0", "1:-2", "a:b", "nan:1", "1:inf"):
        with pytest.raises(UserError, match="expected START:LENGTH"):
            parse_window(text)


def test_plot_errors(result: Path, tmp_path: Path) -> None:
    score, out = tmp_path / "score", tmp_path / "out"
    score.mkdir()
    (score / "summary.json").write_text('{"format": "sarathi-sim score 1"}')
    for folder, where, expected in (
        (tmp_path, out, "not the result of a run"),
        (score, out, r"is the answer of score, .* report"),
        (tmp_path / "absent", out, "no such folder"),
        (result, result, "is one of the results to plot"),
    ):
        with pytest.raises(UserError, match=expected):
            sim.plot([folder], out=where)
    assert not out.exists()


# What is refused --------------------------------------------------------------------------------


def test_outs_that_are_refused(
    result: Path, copy: Path, plotted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is simulated for a folder that cannot be written, or is not to be replaced."""
    monkeypatch.setattr(
        "sarathi_sim.experiments.run.experiment._run", lambda *_: pytest.fail("simulated")
    )
    monkeypatch.chdir(copy / "orca")
    (tmp_path / "file").write_text("")
    for out, expected in (
        (Path(), "the command runs in this folder"),
        (Path(".."), "the command runs in this folder"),
        (plotted, r"another kind \(figures\)"),
        (tmp_path / "a\udcff", "is not a name in UTF-8"),
        (tmp_path / "file" / "run", r"--out .*file/run: "),
    ):
        with pytest.raises(UserError, match=expected):
            sim.run(loaded(), out=out)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"another kind \(result\)"):
        sim.plot([result], out=copy)
    with pytest.raises(UserError, match="name the runs' own folders"):
        read_tables(plotted)


def _drop(path: Path, column: str) -> None:
    if path.suffix == ".csv":
        pd.read_csv(path).drop(columns=column).to_csv(path, index=False)
    else:
        pd.read_parquet(path).drop(columns=column).to_parquet(path)


def _swap(folder: Path) -> None:
    tables = folder / "requests.parquet", folder / "ledger.csv"
    first, second = (path.read_bytes() for path in tables)
    tables[0].write_bytes(second)
    tables[1].write_bytes(first)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: _drop(f / "orca" / "ledger.csv", "busy_s"), "no column busy_s"),
        (lambda f: _drop(f / "orca" / "requests.parquet", "finish_s"), "no column finish_s"),
        (lambda f: _swap(f / "orca"), "the result is damaged"),
        (lambda f: (f / "orca" / "ledger.csv").write_text(""), "the result is damaged"),
        (lambda f: (f / "orca" / "ledger.csv").unlink(), "the result is damaged"),
    ],
)
def test_damaged_tables(copy: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=expected):
        read_tables(copy)


def test_damaged_summaries(copy: Path) -> None:
    content = summary_of(copy)
    for scenarios in (None, [], {}, "orca", 3):
        (copy / "summary.json").write_text(json.dumps({**content, "scenarios": scenarios}))
        with pytest.raises(UserError, match=r"summary\.json names no scenarios"):
            read_tables(copy)


def test_a_window_after_the_end_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--window 1e\+06:1: nothing happens there: START must"):
        sim.run(loaded(), out=tmp_path / "a" / "b", window="1e6:1")
    assert not (tmp_path / "a").exists()


def test_the_metrics_one_can_name_are_those_of_a_run(result: Path) -> None:
    def keys(tree: object) -> object:
        return {k: keys(v) for k, v in tree.items()} if isinstance(tree, dict) else None

    for summary in summary_of(result)["scenarios"].values():
        numbers = {k: v for k, v in summary.items() if not isinstance(v, list)}
        other = {k for k, metric in METRICS.items() if metric.paged or metric.pools}
        assert keys(numbers) == keys({k: v for k, v in SHAPE.items() if k not in other})
        assert set(summary) - set(numbers) == {
            "outside_profile",
            *(f"{metric}_band" for metric in ("makespan_s", *PER_MAKESPAN)),
        }


def test_tables_are_to_the_byte_those_of_pandas() -> None:
    ledger = {"stage": np.arange(4), "busy_s": np.array([0.1, 1 / 3, 1e-17, 2e22])}
    assert csv_bytes(ledger) == pd.DataFrame(ledger).to_csv(index=False).encode()
