"""Charts of every kind of result: what each must show, and how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.config.policy import POLICIES
from sarathi_sim.experiments.report.charts import (
    all_run_charts,
    cdf,
    completions,
    ledger,
    run_charts,
    run_heading,
    workload_charts,
)
from sarathi_sim.experiments.report.draw import drawn, files
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
from sarathi_sim.experiments.report.score_answers import fit_chart
from sarathi_sim.experiments.report.section import (
    MOST_NAMED,
    Axis,
    Chart,
    Series,
    heading_of,
    legend,
)
from sarathi_sim.experiments.report.sections import sections_of
from sarathi_sim.experiments.report.sweep_charts import sweep_charts
from sarathi_sim.experiments.report.timeline import StageSlices, Window, joined
from sarathi_sim.experiments.results import Tables
from sarathi_sim.experiments.run.experiment import ExperimentResult, simulate_all
from sarathi_sim.experiments.sweeps.sweep import read_sweep
from sarathi_sim.profiler.bundle.schema import load_bundle
from sarathi_sim.simulator.confidence.bands import fit_band
from sarathi_sim.simulator.confidence.held_out import op_tables
from sarathi_sim.simulator.views.ledger import ACCOUNTS
from tests.experiments.small_config import ROOT

COUNTS = ("requests", "tokens", "sequences", "bytes", "ratio", "batch")
"""Axes of these need no unit in brackets."""
Figures = dict[str, tuple[str, Sequence[Chart]]]


@pytest.fixture(scope="module")
def outcome() -> ExperimentResult:
    changes = ["workload.arrivals.rate=0.5", "workload.requests=200"]
    return simulate_all(load_experiment("first_experiment", changes))


@pytest.fixture(scope="module")
def figures(reported: dict[str, Path], outcome: ExperimentResult) -> Figures:
    """Heading and charts of each figure: of every kind of result, as on its page and in its files,
    of a workload and of a bundle."""
    found: Figures = {}
    for kind, folder in reported.items():
        (section,) = sections_of([folder])
        found |= {f"{kind} {n}": (section.heading, [c]) for n, c in enumerate(section.charts)}
    plotted: dict[str, Mapping[str, Sequence[Chart]]] = {
        "run": all_run_charts(outcome, Window(20.0, 10.0)),
        "swept": sweep_charts(read_sweep(reported["sweep"]))[0],
    }
    (one, _) = outcome.runs.values()
    plotted["workload"] = {"all": workload_charts(one.deployment.requests)}
    bundle = load_bundle(ROOT / "data/profiles/h200/llama-3-8b/tp2")
    table = next(each for each in op_tables(bundle) if each.op == "all_reduce")
    plotted["fit"] = {table.op: [fit_chart(table, fit_band(table))]}
    name = run_heading(outcome)
    return found | {f"{k} {n}": (name, c) for k, some in plotted.items() for n, c in some.items()}


@pytest.mark.slow
def test_every_chart_has_units_a_short_legend_and_words(figures: Figures) -> None:
    assert len(figures) > 35
    for name, (_, charts) in figures.items():
        for chart in charts:
            for axis in (chart.x, chart.y):
                unit = axis.rows or "(" in axis.label or any(c in axis.label for c in COUNTS)
                assert unit, (name, axis.label)
            names = {one.name for one in chart.series if one.name}
            assert len(names) <= MOST_NAMED, (name, names)
            told = chart.alt[1:]
            assert all(any(line.startswith(f"{one}: ") for line in told) for one in names)
            assert chart.y.ends != (0.0, 1.02) or all("100.0 at " in line for line in told), name
            assert chart.series and all(re.search(r"\d", line) for line in told), name


@pytest.mark.slow
def test_a_policy_has_one_colour_in_all_charts(figures: Figures) -> None:
    """Orca and Sarathi, whatever stands beside them; the bars of their parts are no policies."""
    seen: dict[str, set[str]] = {"orca": set(), "sarathi": set()}
    for _, charts in figures.values():
        for chart in charts:
            for policy, colours in seen.items():
                names = re.compile(rf"(?:[AB]: .*)?\b{policy}\b(?! x)")
                colours |= {one.colour for one in chart.series if names.match(one.name)}
                if chart.colour != "#000000" and re.search(rf"\b{policy}\b", chart.title):
                    colours.add(chart.colour)
    assert seen == {"orca": {VERMILION}, "sarathi": {BLUE}}
    assert len({policy_colour(name) for name in POLICIES}) == len(POLICIES)
    assert {policy_colour(f"my {n}") for n in range(20)}.isdisjoint(map(policy_colour, POLICIES))


def boxes(figure: Any) -> dict[Text, Any]:
    """Where the texts of a figure are, in pixels; without those at ticks that are not seen."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    found = {}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            found[text] = text.get_window_extent(renderer)
    return found


@pytest.mark.slow
def test_no_text_is_cut_off_or_hides_another(figures: Figures) -> None:
    for name, (heading, charts) in figures.items():
        figure = drawn(charts, f"{heading} " * 3)
        places, width, height = boxes(figure), *figure.bbox.size
        titles = [axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
        labels = [axes.yaxis.label for axes in figure.axes]
        beside = [text for axes in figure.axes for text in axes.texts]
        own = [*titles, *labels, *beside, *figure.texts]
        own += [text for one in figure.legends for text in one.get_texts()]
        for text in (text for text in own if text in places):
            box = places[text]
            assert box.x0 >= -1 and box.x1 <= width + 1, (name, text.get_text())
            assert box.y0 >= -1 and box.y1 <= height + 1, (name, text.get_text())
        apart = [text for text in (*titles, *labels, *beside) if text in places]
        for one, other in combinations(apart, 2):
            a, b = places[one], places[other]
            over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(over) <= 2, (name, one.get_text(), other.get_text())


SERVED = {"name": "a", "deployments": {"x": {"model": "m", "device": "g"}}}
ASKED = {"model": "m", "slo": "p99 ttft 1s", "deployments": [{"device": "g"}, {"device": "h"}]}


@pytest.mark.parametrize(
    ("summaries", "said"),
    [
        ([SERVED], "a: m on g"),
        ([SERVED | {"assumptions": ["arrivals: Poisson (of x)"]}], "a: m on g; Poisson"),
        ([ASKED], "m on g and h; p99 ttft 1s"),
        ([{"name": n, "assumptions": [f"arrivals: {n}"]} for n in "bc"], "b and c: b or c"),
        ([{}], ""),
    ],
)
def test_the_heading_names_model_gpu_and_load(summaries: list[dict[str, Any]], said: str) -> None:
    assert heading_of(*summaries) == said


def test_the_heading_of_a_run(outcome: ExperimentResult) -> None:
    said = "first_experiment: llama-13b on a6000; 200 requests, Poisson, 0.5 requests/s"
    assert run_heading(outcome) == said


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
    """Without one, all scenarios are rows of one ledger."""
    charts = run_charts({"one": _tables(3, 1.0, 1), "other": _tables(3, 1.0, stages)})
    usual = {"ttft_cdf", "tbt_cdf", "latency_cdf", "completions", "ledger"}
    assert set(charts) == (usual | {"bubble_cdf"} if stages > 1 else usual)
    rows = [list(chart.y.rows) for chart in charts["ledger"]]
    together = [["one: 100 % busy", "other: 100 % busy"]]
    assert rows == (together if stages == 1 else [["stage 0"], ["stage 0", "stage 1"]])


def test_the_curves_show_the_numbers_of_the_table(outcome: ExperimentResult) -> None:
    """Medians and tails as in the summary, for requests after the warm-up of a steady run."""
    tables = outcome.tables
    for key in ("ttft_s", "latency_s", "tbt_s"):
        for line, (name, ran) in zip(cdf(key, tables).series, outcome.runs.items(), strict=True):
            assert ran.summary["steady"]["state"] == "steady"
            numbers = ran.summary["tbt_s"] if key == "tbt_s" else ran.summary["steady"][key]
            median, tail = re.findall(r"[\d.]+(?=,| s$)", line.name)
            assert line.name.startswith(f"{name}: median ")
            assert float(median) == pytest.approx(numbers["p50"], rel=5e-3)
            assert float(tail) == pytest.approx(numbers["p99"], rel=5e-3)
            assert np.interp(0.5, line.y, line.x) == pytest.approx(numbers["p50"], rel=0.02)


@pytest.mark.parametrize("key", ["ttft_s", "latency_s", "tbt_s", "bubble_s"])
def test_an_overloaded_run_is_marked_in_its_latencies_only(key: str) -> None:
    (line,) = cdf(key, {"orca": _tables(9, 1.0, state="overloaded")}).series
    assert line.name.endswith(" (overloaded)") == (key in ("ttft_s", "latency_s"))


def test_what_is_in_the_system_is_drawn_where_requests_arrive() -> None:
    """Two, then one, then two requests; where all are there at once, the completed ones."""
    table = _tables(3, 1.0)
    table.requests["arrival_s"], table.requests["finish_s"] = [0.0, 0.0, 2.0], [1.0, 3.0, 4.0]
    chart = completions({"one": table})
    (line,) = chart.series
    assert chart.y.label == "requests in the system"
    at = np.searchsorted(line.x, [0.5, 1.5, 2.5, 3.5])
    assert line.y[at].tolist() == [2, 1, 2, 1]
    table.requests["arrival_s"] = 0.0
    (line,) = completions({"one": table}).series
    assert (line.x.tolist(), line.y.tolist()) == ([1, 1, 3, 4], [0, 1, 2, 3])


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


def test_boxes_that_are_too_thin_are_joined() -> None:
    """Of 500 parts of 10 ms: decodes of 1 ms in a row, one with more bubble than work, nothing."""
    start = np.arange(1000) * 1e-3
    finish, released = start + 1e-3, start.copy()
    start, finish = np.append(start, 1.008), np.append(finish, 1.01)
    released, kind = np.append(released, 1.0), np.ones(1001, int)
    idle, none = np.append(np.zeros(1000), 0.008), np.zeros(1001, int)
    stage = StageSlices(0, "0", 0, none, kind, start, finish, released, idle, none)
    prefill, decode, mixed, bubble = joined(stage, Window(0.0, 5.0))
    assert [one.tolist() for one in decode] == [[0.0], [pytest.approx(1.0)]]
    assert [one.tolist() for one in bubble] == [[pytest.approx(1.0)], [pytest.approx(1.01)]]
    assert not len(prefill[0]) and not len(mixed[0])


def _chart(count: int, kind: Any = "line", caption: str = "") -> Chart:
    some = np.arange(1.0, 4.0)
    series = [Series(kind, f"part {number}", number + some, some) for number in range(count)]
    rows = ("", "a", "b", "c") if kind == "bars" else ()
    return Chart("Parts", Axis("time (s)"), Axis("count", rows=rows), series, caption)


def test_a_legend_has_seven_entries_and_the_caption_the_others() -> None:
    """And each sentence once."""
    charts = [_chart(9, caption="One. Two."), _chart(9, caption="Two. 3 of 4.")]
    notes = ["One.", "Two.", "3 of 4.", "Not in the legend: part 7, part 8."]
    assert legend(charts) == ([f"part {n}" for n in range(7)], notes)
    (drawn_one,) = drawn(charts).legends
    assert [text.get_text() for text in drawn_one.get_texts()] == legend(charts)[0]
    assert drawn_one.get_title().get_text().split() == " ".join(notes).split()


@pytest.mark.parametrize("kind", ["line", "step", "points", "bars", "gantt"])
def test_a_chart_is_there_in_words_too(kind: str) -> None:
    """As the description of its SVG."""
    chart = _chart(2, kind)
    assert chart.alt[0].startswith("Parts: ") and len(chart.alt) == 3
    said = files([chart])["svg"].decode()
    assert all(line.replace("&", "&amp;") in said for line in chart.alt)


def test_a_text_stands_where_it_hides_nothing_or_nowhere() -> None:
    """Far from all others it is above its point; of thirty at one place most are left out."""
    x, y = np.concatenate([np.array([[0, 0, 1, 1], [0, 1, 0, 1]]), np.full((2, 30), 0.5)], axis=1)
    spots = Series("points", "", x, y, texts=["", "", "", "", *["text"] * 30])
    places = Chart("t", Axis("x"), Axis("y"), [spots]).text_places()[0]
    assert places[:4] == [None] * 4 and places[4] == (0, 12)
    kept = np.array([place for place in places if place is not None])
    assert 4 <= len(kept) < 25
    for one, other in combinations(kept, 2):
        across, up = np.abs(one - other)
        assert across >= 4 * 6.5 or up >= 14
    last = Series("points", "", [9.0], [1.0], texts=["a text"])
    chart = Chart("t", Axis("x", ends=(0.0, None)), Axis("y"), [last])
    assert chart.text_places()[0] == [(-27.5, 0)], "the axis ends at it"
    falling = Series("line", "", np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0]))
    spot = Series("points", "", [1.0], [1.0], texts=["a text"])
    ((right, up),) = Chart("t", Axis("x"), Axis("y"), [spot, falling]).text_places()[0]
    assert (right, up) != (0, 12) and right * up >= 0, "beside a line, not on it"


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
    band, whiskers, spots, bars = axes.collections
    assert band.get_paths()[0].vertices[:, 1].max() == 4
    assert [segment[:, 0].tolist() for segment in whiskers.get_segments()] == [[-1, 1], [0, 2]]  # type: ignore[attr-defined]
    assert np.asarray(spots.get_offsets()).tolist() == [[0, 2], [1, 3]]
    corners = [path.vertices[:4].tolist() for path in bars.get_paths()]
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
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return float(np.dot([0.2126, 0.7152, 0.0722], parts))

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
