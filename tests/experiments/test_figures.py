"""Figures of few and of many scenarios."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.figures.distributions import cdf, completions, ledger_bars, run_figures
from sarathi_sim.experiments.figures.slices import Window, stage_slices
from sarathi_sim.experiments.figures.style import (
    BLUE,
    DARK_PAGE,
    VERMILION,
    WHITE,
    dark_colour,
    line_styles,
    policy_colour,
    policy_styles,
)
from sarathi_sim.experiments.figures.timeline import stage_timeline
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
    drawn = set(run_figures({"one": _tables(3, 1.0, 1), "other": _tables(3, 1.0, stages)}))
    usual = {"ttft_cdf", "tbt_cdf", "latency_cdf", "completions", "ledger"}
    assert drawn == (usual | {"bubble_cdf"} if stages > 1 else usual)


def test_the_curves_show_the_numbers_of_the_table() -> None:
    """Medians and tails as in the summary, for requests after the warm-up of a steady run."""
    changes = ["workload.arrivals.rate=0.5", "workload.requests=200"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    tables = tables_of(outcome.runs)
    for key in ("ttft_s", "latency_s", "tbt_s"):
        for line, (name, ran) in zip(
            cdf(key, tables).axes[0].lines, outcome.runs.items(), strict=True
        ):
            assert ran.summary["steady"]["state"] == "steady"
            numbers = ran.summary["tbt_s"] if key == "tbt_s" else ran.summary["steady"][key]
            median, tail = re.findall(r"[\d.]+(?=,| s$)", str(line.get_label()))
            assert str(line.get_label()).startswith(f"{name}: median ")
            assert float(median) == pytest.approx(numbers["p50"], rel=5e-3)
            assert float(tail) == pytest.approx(numbers["p99"], rel=5e-3)
            x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
            assert np.interp(0.5, y, x) == pytest.approx(numbers["p50"], rel=0.02)


def test_an_overloaded_run_is_marked_in_its_latencies_only() -> None:
    tables = {"orca": _tables(9, 1.0, state="overloaded")}
    for key, marked in (
        ("ttft_s", True),
        ("latency_s", True),
        ("tbt_s", False),
        ("bubble_s", False),
    ):
        (line,) = cdf(key, tables).axes[0].lines
        assert str(line.get_label()).endswith(" (overloaded)") == marked


def test_a_policy_has_one_colour_whatever_stands_beside_it() -> None:
    """By name, not by place: in the CDFs, in the ledger and in the timeline."""
    assert policy_colour("mine") == policy_colour("mine") not in (BLUE, VERMILION)
    one = {"a": _tables(3, 1.0, policy="sarathi"), "b": _tables(3, 1.0, policy="orca")}
    other = {"c": _tables(3, 1.0, policy="orca")}
    assert [line.get_color() for line in cdf("ttft_s", one).axes[0].lines] == [BLUE, VERMILION]
    assert [line.get_color() for line in cdf("ttft_s", other).axes[0].lines] == [VERMILION]
    assert completions(one).axes[0].lines[1].get_color() == BLUE
    assert [axes.title.get_color() for axes in ledger_bars(one).axes] == [BLUE, VERMILION]
    changes = ["workload.requests=20"]
    outcome = simulate_all(load_experiment("first_experiment", changes))
    window = Window(0.0, 1.0)
    slices = {name: stage_slices(ran.analysis, window) for name, ran in outcome.runs.items()}
    policies = {name: table.policy for name, table in tables_of(outcome.runs).items()}
    figure = stage_timeline(slices, window, policies)
    colours = [axes.title.get_color() for axes in figure.axes]
    assert colours == [VERMILION, BLUE]


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
    lines = [style["color"] for _, style in zip(range(7), line_styles(), strict=False)]
    for count in range(1, 8):
        lines += [style["color"] for name in names for style in policy_styles([name] * count)]
    assert len(set(lines)) > 100
    for colour in set(lines):
        assert _wcag(colour, WHITE) >= 3, colour
        assert _wcag(dark_colour(colour), DARK_PAGE) >= 3, colour
