"""Figures, paired differences and comparisons of sweeps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import sarathi_sim as sim
from sarathi_sim.experiments.report import sweep_charts
from sarathi_sim.experiments.report.sweep_charts import CDF_COLUMNS, lines, pairs
from sarathi_sim.experiments.report.sweep_charts import sweep_charts as charts_of
from sarathi_sim.experiments.run.ranking import pareto_front
from sarathi_sim.experiments.sweeps.execute import paired_differences
from sarathi_sim.experiments.sweeps.sweep import Sweep, read_sweep
from sarathi_sim.profiler.storage.strict import UserError
from tests.experiments.small_config import called, summary_of
from tests.experiments.small_sweep import CHUNK, RATE, of


def table(base: list[float], other: list[float]) -> pd.DataFrame:
    rows = [
        {"policy": name, "x": 1, "seed": seed, "makespan_s": value}
        for name, values in (("a", base), ("b", other))
        for seed, value in enumerate(values)
    ]
    columns = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p50", "tbt_s.p99")
    empty = dict.fromkeys((*columns, "latency_s.p50", "bubble_s.p50"), math.nan)
    return pd.DataFrame([row | empty for row in rows])


def test_any_percentile_of_the_requests_is_drawn(
    tiny_sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[pd.DataFrame] = []
    monkeypatch.setattr(
        sweep_charts, "lines", lambda s, *rest: seen.append(s.table) or lines(s, *rest)
    )
    charts_of(read_sweep(tiny_sweep), ["latency_s.p37", "latency_s.p50"])
    row = seen[0].iloc[0]
    requests = pd.read_parquet(tiny_sweep / "runs" / row["run"] / row["name"] / "requests.parquet")
    assert row["latency_s.p37"] == requests["latency_s"].quantile(0.37)
    assert row["latency_s.p50"] == requests["latency_s"].quantile(0.5)
    with pytest.raises(UserError, match=r"--metric tbt_s\.p37: the runs of a sweep keep p50"):
        charts_of(read_sweep(tiny_sweep), ["tbt_s.p37"])


def test_a_paired_difference_is_that_of_a_t_test() -> None:
    rng = np.random.default_rng(0)
    base = np.exp(rng.normal(0, 1, 8))
    other = base * np.exp(rng.normal(0.1, 0.02, 8))
    (entry,) = paired_differences(
        table(base.tolist(), other.tolist()), "policy", ("policy", "x", "seed")
    )
    assert (entry["value"], entry["against"], entry["point"], entry["seeds"]) == (
        "b",
        "a",
        {"x": 1},
        8,
    )
    assert list(entry["ratios"]) == ["makespan_s"], "what is missing is left out"
    found = entry["ratios"]["makespan_s"]
    expected = stats.ttest_rel(np.log(other), np.log(base)).confidence_interval(0.95)
    assert math.log(found["low"]) == pytest.approx(expected.low, rel=1e-9)
    assert math.log(found["high"]) == pytest.approx(expected.high, rel=1e-9)
    assert found["ratio"] == pytest.approx(np.exp(np.mean(np.log(other / base))))
    apart = stats.ttest_ind(np.log(other), np.log(base)).confidence_interval(0.95)
    wider = (apart.high - apart.low) / (expected.high - expected.low)
    assert found["unpaired"] == pytest.approx(wider) and wider > 10, "most of the spread is common"


def test_one_seed_has_no_interval() -> None:
    (entry,) = paired_differences(table([2.0], [3.0]), "policy", ("policy", "x"))
    found = entry["ratios"]["makespan_s"]
    assert found.pop("ratio") == pytest.approx(1.5)
    assert found == {"low": None, "high": None, "unpaired": None}


def test_points_and_seeds_that_lack_a_value() -> None:
    """A seed that one side lacks is left out; a key that a point leaves at its default, or that is
    null, is a level like any other."""
    axes = ("policy", "x", "seed")
    (entry,) = paired_differences(table([1, 2, 4], [2, 4, 9]).iloc[:-1], "policy", axes)
    assert (entry["seeds"], entry["ratios"]["makespan_s"]["ratio"]) == (2, pytest.approx(2))
    rows = table([1.0, 2.0], [2.0, 4.0]).assign(cap=[math.nan, math.nan, 4.0, 4.0])
    (entry,) = paired_differences(rows, "cap", ("cap", "x", "seed"))
    assert (entry["value"], entry["against"], entry["seeds"]) == (4.0, None, 2)
    assert entry["ratios"]["makespan_s"]["ratio"] == pytest.approx(2.0)
    rows = table([1.0, 2.0], [3.0, 4.0]).assign(cap=[math.nan, 4.0, math.nan, 4.0], seed=0)
    found = paired_differences(rows, "policy", ("policy", "x", "cap", "seed"))
    assert [entry["point"] for entry in found] == [{"x": 1, "cap": None}, {"x": 1, "cap": 4.0}]
    assert [entry["ratios"]["makespan_s"]["ratio"] for entry in found] == pytest.approx([3, 2])


def test_common_requests_make_small_differences_significant(tiny_sweep: Path) -> None:
    entries = summary_of(tiny_sweep)["paired"]
    assert [entry["point"]["batching.max_batch"] for entry in entries] == [2, 4, 8]
    narrower = [entry["ratios"]["makespan_s"]["unpaired"] for entry in entries]
    assert np.median(narrower) > 3


points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30)


@given(points)
def test_the_front_is_what_nothing_beats(found: list[tuple[int, int]]) -> None:
    cost, gain = np.array(found, float).T
    front = pareto_front(cost, gain)
    unbeaten = {
        (c, g)
        for c, g in found
        if not any((x <= c and y >= g) and (x < c or y > g) for x, y in found)
    }
    assert {(int(cost[i]), int(gain[i])) for i in front} == unbeaten
    assert len(front) == len(unbeaten)


def test_plot_mistakes(tiny_sweep: Path) -> None:
    with pytest.raises(UserError, match=r"--metric makespan: .*\(did you mean makespan_s\?\)"):
        charts_of(read_sweep(tiny_sweep), ["makespan"])
    with pytest.raises(UserError, match=r"--over scenario: not one of batching\.max_batch"):
        charts_of(read_sweep(tiny_sweep), [], ["scenario"])


Change = Callable[[pd.DataFrame, dict[str, Any]], Any]


def damaged(sweep: Path, to: Path, change: Change) -> Path:
    to.mkdir()
    table, summary = pd.read_parquet(sweep / "results.parquet"), summary_of(sweep)
    change(table, summary)
    table.to_parquet(to / "results.parquet", index=False)
    (to / "summary.json").write_text(json.dumps(summary))
    (to / "runs").symlink_to(sweep / "runs")
    return to


@pytest.mark.parametrize(
    "change",
    [
        lambda table, summary: summary.pop("axes"),
        lambda table, summary: summary.update(axes=["no.such.key"]),
        lambda table, summary: summary.update(contrast="policy"),
        lambda table, summary: summary.update(notes=[{}]),
        lambda table, summary: table.pop("requests"),
        lambda table, summary: (
            table.insert(0, "../escape", range(len(table))),
            summary["axes"].append("../escape"),
        ),
    ],
)
def test_a_damaged_sweep_is_named(tiny_sweep: Path, tmp_path: Path, change: Change) -> None:
    with pytest.raises(UserError, match="sweep is damaged"):
        sim.plot([damaged(tiny_sweep, tmp_path / "copy", change)], out=tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_cdfs_leave_the_latencies_of_overloaded_runs_out_and_say_so(
    tiny_sweep: Path, tmp_path: Path
) -> None:
    states = ["overloaded"] * 4 + ["steady"] * 14
    folder = damaged(tiny_sweep, tmp_path / "copy", lambda t, _: t.update({"steady.state": states}))
    charts, note = charts_of(read_sweep(folder))
    assert note == "4 of 18 runs are overloaded and left out of: time to first token, latency"
    lost = "Overloaded: 3 of orca, 1 of sarathi."
    assert {chart.caption for chart in charts["cdf"]} == {f"{note}. {lost}"}

    table = pd.read_parquet(folder / "results.parquet")
    steady = table["steady.state"] == "steady"
    for chart, column in zip(charts["cdf"], CDF_COLUMNS, strict=True):
        shown = table if column == "tbt_max_s" else table[steady]
        for line, name in zip(chart.series, ("orca", "sarathi"), strict=True):
            runs = shown[shown["name"] == name]
            parts = [
                pd.read_parquet(tiny_sweep / "runs" / run / name / "requests.parquet")[column]
                for run in runs["run"]
            ]
            assert np.array_equal(line.x[1:], np.sort(np.concatenate(parts)))
            assert line.name == name


def test_a_pair_of_axes_leaves_out_the_points_where_every_run_is_overloaded() -> None:
    """And says so; a line for each value of the other axis."""
    points = [(x, y) for x in (1, 2, 3) for y in (10, 20)]
    table = pd.DataFrame(points, columns=["x", "y"])
    table["ttft_s.p50"] = np.arange(1.0, 7.0)
    table["steady.state"] = ["steady"] * 4 + ["overloaded"] * 2
    (chart,) = pairs(of(table, ["x", "y"]), "x", "y", "ttft_s.p50")
    found = {line.name: (line.x.tolist(), line.y.tolist()) for line in chart.series}
    assert found == {"y 10": ([1, 2], [1, 3]), "y 20": ([1, 2], [2, 4])}
    assert list(chart.x.ticks) == [1, 2, 3]
    assert chart.caption.startswith("2 of 6 runs are overloaded and left out of: time to")


def test_no_line_and_no_map_is_of_several_loads() -> None:
    """Ten times as long under the second load: a median over both would be nobody's."""
    rows = [(rate, chunk, tp) for rate in (1, 2) for chunk in (128, 256) for tp in (1, 2)]
    table = pd.DataFrame(rows, columns=[RATE, CHUNK, "cluster.tp"])
    table["tbt_s.p99"] = table[CHUNK] * 10.0 ** table[RATE] * table["cluster.tp"]
    swept = of(table, [RATE, CHUNK, "cluster.tp"])
    charts = lines(swept, CHUNK, ["tbt_s.p99"])
    assert [chart.title.rpartition(" (")[2] for chart in charts] == ["rate 1)", "rate 2)"]
    for chart, factor in zip(charts, (10, 100), strict=True):
        heights = [line.y.tolist() for line in chart.series]
        assert heights == [[factor * tp * chunk for chunk in (128, 256)] for tp in (1, 2)]
    (along,) = lines(swept, RATE, ["tbt_s.p99"])
    assert along.caption.startswith("Median over TP; band")
    both = pairs(swept, CHUNK, "cluster.tp", "tbt_s.p99")
    assert [chart.title.rpartition(" (")[2] for chart in both] == ["rate 1)", "rate 2)"]


def test_scenarios_of_other_requests_are_loads(tiny_sweep: Path) -> None:
    swept = read_sweep(tiny_sweep)
    assert (swept.given, swept.chosen) == ([], ["batching.max_batch", "scenario"])
    same = Sweep.configured

    def other(self: Sweep, run: str, scenario: str) -> dict[str, Any]:
        found = dict(same(self, run, scenario))
        return found | ({"workload": {"requests": 9}} if scenario == "orca" else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, "configured", other)
        assert read_sweep(tiny_sweep).given == ["scenario"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("plot SWEEP RUN --out NEW", "is a sweep: name it alone, or the folders of its runs"),
        ("plot RUN --out SWEEP", r"is a result of another kind \(sweep\)"),
        ("compare SWEEP SWEEP", "is a sweep: name two of its runs"),
        ("compare ANSWER RUN/orca", "is the answer of capacity, .*: sarathi-sim report .*/answer"),
        ("compare RUN RUN/orca", r"holds several scenarios: name one of .*orca, .*sarathi"),
        ("compare NEW RUN/orca", "not the result of a run"),
    ],
)
def test_folders_that_are_refused(
    tiny_sweep: Path, result: Path, tmp_path: Path, words: str, problem: str
) -> None:
    answer = tmp_path / "answer"
    answer.mkdir()
    (answer / "summary.json").write_text('{"format": "sarathi-sim capacity 1"}')
    places = {"SWEEP": tiny_sweep, "RUN": result, "ANSWER": answer, "NEW": tmp_path / "new"}
    for name, place in places.items():
        words = words.replace(name, str(place))
    assert re.search(problem, called(*words.split(), code=2).stderr)
