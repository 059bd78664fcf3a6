"""Figures of few and of many scenarios."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.charts import (
    all_run_charts,
    cdf,
    completions,
    ledger,
    run_charts,
)
from sarathi_sim.experiments.report.draw import MOST_NAMED, drawn, files
from sarathi_sim.experiments.report.palette import (
    BLUE,
    DARK_PAGE,
    VERMILION,
    WHITE,
    dark_colour,
    line_styles,
    policy_colour,
    policy_styles,
)
from sarathi_sim.experiments.report.section import Axis, Chart, Series
from sarathi_sim.experiments.report.timeline import Window
from sarathi_sim.experiments.results import Tables
from sarathi_sim.experiments.run.experiment import simulate_all, tables_of
from sarathi_sim.simulator.views.ledger import ACCOUNTS


def _tables(
    count: int, value: float, stages: int = 2, policy: str = "orca", state: str = "closed"
) -> Tables:
    requests = pd.DataFrame(
        dict.fromkeys(("ttft_s", "latency_s", "bubble_s"), np.full(count, value))
        | {"arrival_s": np.arange(float(count)), "finish_s": np.linspace(0.1, 0.31234, count)}
    )
    accounts = dict.fromkeys((f"{account}_s" for account in ACCOUNTS), 0.0) | {"busy_s": 1.0}
    rows = [{"replica": 0, "stage": stage, "wall_s": 1.0} | accounts for stage in range(stages)]
    share = np.linspace(0, 1, 1001)
    gaps = pd.DataFrame({"share": share, "tbt_s": 0.05 + 0.1 * share})
    steady = {"state": state, "warmup_requests": 0}
    return Tables(requests, pd.DataFrame(rows), gaps, policy, steady)


@pytest.mark.parametrize("stages", [1, 2])
def test_bubbles_are_drawn_where_there_is_a_pipeline(stages: int) -> None:
    names = set(run_charts({"one": _tables(3, 1.0, 1), "other": _tables(3, 1.0, stages)}))
    usual = {"ttft_cdf", "tbt_cdf", "latency_cdf", "completions", "ledger"}
    assert names == (usual | {"bubble_cdf"} if stages > 1 else usual)


def test_the_curves_show_the_numbers_of_the_table() -> None:
    """Medians and tails as in the summary, for requests after the warm-up of a steady run."""
    changes = ["workload.arrivals.rate=0.5", "workload.requests=200"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    tables = tables_of(outcome.runs)
    for key in ("ttft_s", "latency_s", "tbt_s"):
        for line, (name, ran) in zip(cdf(key, tables).series, outcome.runs.items(), strict=True):
            assert ran.summary["steady"]["state"] == "steady"
            numbers = ran.summary["tbt_s"] if key == "tbt_s" else ran.summary["steady"][key]
            median, tail = re.findall(r"[\d.]+(?=,| s$)", line.name)
            assert line.name.startswith(f"{name}: median ")
            assert float(median) == pytest.approx(numbers["p50"], rel=5e-3)
            assert float(tail) == pytest.approx(numbers["p99"], rel=5e-3)
            assert np.interp(0.5, line.y, line.x) == pytest.approx(numbers["p50"], rel=0.02)


def test_an_overloaded_run_is_marked_in_its_latencies_only() -> None:
    tables = {"orca": _tables(9, 1.0, state="overloaded")}
    for key, marked in (
        ("ttft_s", True),
        ("latency_s", True),
        ("tbt_s", False),
        ("bubble_s", False),
    ):
        (line,) = cdf(key, tables).series
        assert line.name.endswith(" (overloaded)") == marked


def test_a_policy_has_one_colour_whatever_stands_beside_it() -> None:
    """By name, not by place: in the CDFs, in the ledger and in the timeline."""
    assert policy_colour("mine") == policy_colour("mine") not in (BLUE, VERMILION)
    one = {"a": _tables(3, 1.0, policy="sarathi"), "b": _tables(3, 1.0, policy="orca")}
    other = {"c": _tables(3, 1.0, policy="orca")}
    assert [line.colour for line in cdf("ttft_s", one).series] == [BLUE, VERMILION]
    assert [line.colour for line in cdf("ttft_s", other).series] == [VERMILION]
    assert completions(one).series[1].colour == BLUE
    assert [chart.colour for chart in ledger(one)] == [BLUE, VERMILION]
    changes = ["workload.requests=20"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    stages = all_run_charts(outcome, Window(0.0, 1.0))["timeline"]
    assert [chart.colour for chart in stages] == [VERMILION, BLUE]
    assert [axes.title.get_color() for axes in drawn(stages).axes] == [VERMILION, BLUE]


def test_the_accounts_of_a_ledger_fill_the_run() -> None:
    table = _tables(3, 1.0)
    shares = np.geomspace(0.4, 1e-3, len(ACCOUNTS))
    for account, share in zip(ACCOUNTS, shares / shares.sum(), strict=True):
        table.ledger[f"{account}_s"] = share
    (chart,) = ledger({"one": table})
    assert len(chart.series) <= MOST_NAMED and chart.series[-1].name == "other"
    ends = [0.0, *(part.x[0] for part in chart.series)]
    assert [part.start[0] for part in chart.series] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(100)


def _chart(count: int, kind: Any = "line") -> Chart:
    some = np.arange(1.0, 4.0)
    series = [Series(kind, f"part {number}", number + some, some) for number in range(count)]
    rows = ("", "a", "b", "c") if kind == "bars" else ()
    return Chart("Parts", Axis("time (s)"), Axis("count", rows=rows), series)


def test_a_legend_has_seven_entries_and_the_caption_the_others() -> None:
    figure = drawn([_chart(9), _chart(9)])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"part {n}" for n in range(7)]
    assert legend.get_title().get_text() == "Not in the legend: part 7, part 8."


@pytest.mark.parametrize("kind", ["line", "step", "points", "bars", "gantt"])
def test_a_chart_is_there_in_words_too(kind: str) -> None:
    """As the description of its SVG."""
    chart = _chart(2, kind)
    assert chart.alt[0].startswith("Parts: ") and len(chart.alt) == 3
    said = files([chart])["svg"].decode()
    assert all(line.replace("&", "&amp;") in said for line in chart.alt)


def test_a_chart_is_drawn_as_its_data_say() -> None:
    """Every kind of series, by what matplotlib then holds."""
    x, y = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    series = [
        Series("line", "a line", x, y, dash="--", ends=(y - 1, y + 1)),
        Series("step", "steps", x, y),
        Series("points", "points", x, y, texts=["text", ""], ends_x=(x - 1, x + 1)),
        Series("bars", "bars", y, x, start=x, thick=0.5),
    ]
    chart = Chart("t", Axis("x", ends=(-1.0, 5.0)), Axis("y"), series, level=7, edge=8)
    axes = drawn([chart], "A heading").axes[0]
    line, stepped, across, up = axes.get_lines()
    assert (list(line.get_ydata()), line.get_linestyle()) == ([2, 3], "--")  # type: ignore[arg-type]
    assert stepped.get_drawstyle() == "steps-post" and axes.get_xlim() == (-1, 5)
    assert list(across.get_ydata()) == [7, 7] and list(up.get_xdata()) == [8, 8]  # type: ignore[arg-type]
    assert [text.get_text() for text in axes.texts] == ["text"]
    band, whiskers, spots, boxes = axes.collections
    assert band.get_paths()[0].vertices[:, 1].max() == 4
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [[-1, 1], [0, 2]]  # type: ignore[attr-defined]
    assert np.asarray(spots.get_offsets()).tolist() == [[0, 2], [1, 3]]
    corners = [path.vertices[:4].tolist() for path in boxes.get_paths()]
    assert corners[1] == [[1, 0.75], [3, 0.75], [3, 1.25], [1, 1.25]]


def test_bars_of_two_series_stand_beside_each_other() -> None:
    """Whatever their signs."""
    axes = drawn([_chart(2, "bars")]).axes[0]
    first, second = (one.get_paths()[0].vertices for one in axes.collections)
    assert (first[:, 0].max(), second[:, 0].max()) == (1.0, 2.0)
    assert first[:, 1].max() <= second[:, 1].min() + 1e-9


def _wcag(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, by its text."""

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_line_can_be_seen_on_a_light_and_on_a_dark_page() -> None:
    """All shades of every colour that a policy may have, with a contrast of 3 at least."""
    assert _wcag("#000000", "#ffffff") == pytest.approx(21)
    names = ["sarathi", "orca", "request_level", "", *(f"mine {i}" for i in range(20))]
    lines = [style.colour for _, style in zip(range(7), line_styles(), strict=False)]
    for count in range(1, 8):
        lines += [style.colour for name in names for style in policy_styles([name] * count)]
    assert len(set(lines)) > 100
    for colour in set(lines):
        assert _wcag(colour, WHITE) >= 3, colour
        assert _wcag(dark_colour(colour), DARK_PAGE) >= 3, colour
