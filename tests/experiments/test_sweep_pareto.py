"""The Pareto front of a sweep: its directions, its seeds, its layouts; and the table at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from sarathi_sim.experiments.config.scenario import PARAMETERS, Scenario, value_name
from sarathi_sim.experiments.figures.style import policy_colour
from sarathi_sim.experiments.sweeps.drawing import groups, label, pareto, seed_means, ticks_at
from sarathi_sim.experiments.sweeps.printing import results_table
from tests.experiments.small_sweep import SWEEP

AXES = ["cluster.tp", "cluster.pp", "seed"]


def _table() -> pd.DataFrame:
    """Three layouts, two seeds each; the last one is worse in both metrics."""
    rows = []
    for tp, pp, tokens, latency in ((1, 4, 100.0, 2.0), (2, 2, 120.0, 3.0), (4, 1, 90.0, 4.0)):
        for seed in (0, 1):
            off = 0.1 * (2 * seed - 1)
            rows.append(
                {
                    "cluster.tp": tp, "cluster.pp": pp, "seed": seed, "steady.state": "steady",
                    "policy.name": "sarathi", "tokens_per_s": tokens + 10 * off,
                    "latency_s.p50": latency + off, "makespan_s": latency, "mfu": 0.5,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def _front(panel: Axes) -> list[tuple[float, float]]:
    (front,) = (line for line in panel.lines if line.get_label() == "front")
    return [(float(x), float(y)) for x, y in np.asarray(front.get_xydata()).round(6)]


def test_each_metric_has_its_own_direction() -> None:
    """Whatever stands first: less latency is better, more tokens are."""
    table = _table()
    panel = pareto(table, "latency_s.p50", "tokens_per_s", AXES, None, None).axes[0]
    assert _front(panel) == [(2.0, 100.0), (3.0, 120.0)]
    assert panel.get_xlabel() == "latency, median (s),\nless is better"
    assert panel.get_ylabel() == "token throughput (tokens/s),\nmore is better"
    turned = pareto(table, "tokens_per_s", "latency_s.p50", AXES, None, None).axes[0]
    assert _front(turned) == [(120.0, 3.0), (100.0, 2.0)]
    both = pareto(table, "makespan_s", "latency_s.p50", AXES, None, None).axes[0]
    assert _front(both) == [(2.0, 2.0)], "of two metrics of which less is better"


def test_seeds_are_averaged_and_their_spread_is_drawn() -> None:
    table = _table()
    figure = pareto(table, "latency_s.p50", "tokens_per_s", AXES, None, None)
    (points,) = (line for line in figure.axes[0].lines if line.get_label() != "front")
    assert np.allclose(np.asarray(points.get_xydata()), [(2, 100), (3, 120), (4, 90)])
    across, up = (
        lines.get_segments()  # type: ignore[attr-defined]
        for lines in figure.axes[0].collections
    )
    ends = np.array([[segment[:, 0] for segment in across], [segment[:, 1] for segment in up]])
    assert np.allclose(ends[0], [(1.9, 2.1), (2.9, 3.1), (3.9, 4.1)])
    assert np.allclose(ends[1], [(99, 101), (119, 121), (89, 91)])
    assert figure.get_suptitle().startswith("mean over 2 seeds; whiskers: smallest and largest")


def test_a_point_that_lacks_a_seed_is_left_out() -> None:
    table = _table()
    table.loc[0, "latency_s.p50"] = np.nan
    assert seed_means(table, ["latency_s.p50"], AXES)["cluster.tp"].tolist() == [2, 4]


def test_shares_are_in_percent() -> None:
    assert seed_means(_table(), ["mfu"], AXES)["mfu"].tolist() == [50.0] * 3


@pytest.mark.parametrize(
    ("values", "axis"), [([512, 1024, 2048, 4096, 8192], "log"), ([256, 512, 1024], "linear")]
)
def test_doubled_values_do_not_lie_on_each_other(values: list[int], axis: str) -> None:
    axes = Figure().subplots()
    ticks_at(axes, pd.Series(values, dtype=float))
    assert axes.get_xscale() == axis
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(v) for v in values]


def test_layouts_are_labelled() -> None:
    figure = pareto(_table(), "latency_s.p50", "tokens_per_s", AXES, None, None)
    written = {text.get_text(): text.xy for text in figure.axes[0].texts}  # type: ignore[attr-defined]
    assert {letter: tuple(np.round(xy, 6)) for letter, xy in written.items()} == {
        "A": (2.0, 100.0),
        "B": (3.0, 120.0),
        "C": (4.0, 90.0),
    }
    key = figure.get_suptitle().replace("\N{NO-BREAK SPACE}", " ")
    assert "A: TP 1, PP 4; B: TP 2, PP 2; C: TP 4, PP 1" in key


def test_a_panel_says_which_workload_it_is() -> None:
    table = _table().assign(**{"workload.pd_ratio": 10})
    axes = [*AXES, "workload.pd_ratio"]
    figure = pareto(table, "latency_s.p50", "tokens_per_s", axes, None, "workload.pd_ratio")
    assert figure.axes[0].get_title() == "P:D 10"


def test_many_letters_do_not_lie_on_each_other() -> None:
    table = pd.DataFrame(
        {
            "cluster.tp": range(12), "steady.state": "steady",
            "tokens_per_s": [100.0, 200.0] * 6, "latency_s.p50": [2.0, 3.0] * 6,
        }
    )  # fmt: skip
    panel = pareto(table, "latency_s.p50", "tokens_per_s", ["cluster.tp"], None, None).axes[0]
    places = [(*text.xy, *text.get_position()) for text in panel.texts]  # type: ignore[attr-defined]
    assert len(set(places)) == 12


def test_a_policy_has_its_colour_in_sweeps() -> None:
    table = _table().assign(policy=["sarathi chunk_size 256", "orca case best"] * 3)
    table["policy.name"] = ["sarathi", "orca"] * 3
    found = {name: style["color"] for name, _, style in groups(table, "policy")}
    assert found == {
        "sarathi chunk size 256": policy_colour("sarathi"),
        "orca case best": policy_colour("orca"),
    }


def _leaves(model: type[BaseModel], before: str = "") -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        path, kind = f"{before}{key}", field.annotation
        members = getattr(kind, "__args__", ()) or (kind,)
        models = [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]
        if key == "policy":
            continue  # a policy's keys are its own
        found += [p for m in models for p in _leaves(m, f"{path}.")] if models else [path]
    return found


def test_every_key_of_a_scenario_has_a_name() -> None:
    paths = _leaves(Scenario)
    assert {"workload.arrivals.rate", "cluster.tp", "engine.jitter"} <= set(paths)
    assert [path for path in paths if path not in PARAMETERS] == []
    assert all("_" not in label(path) for path in PARAMETERS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.4, "0.4"),
        (4, "4"),
        ("orca_pp", "orca_pp"),
        ("sarathi chunk_size 9", "sarathi chunk size 9"),
    ],
)
def test_names_of_values(value: object, text: str) -> None:
    assert value_name(value) == text


def test_a_sweep_prints_its_table_at_the_end(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(SWEEP, encoding="utf-8")
    words = ["sweep", str(config), "--out", str(tmp_path / "out"), "--workers", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for words_of_it in ("batch (sequences)", "time to first token, p99 (s)", "means over 3 seeds"):
        assert words_of_it in done.stdout
    table = pd.read_parquet(tmp_path / "out" / "results.parquet")
    mine = table[(table["batching.max_batch"] == 2) & (table["scenario"] == "orca")]
    assert f"{mine['tbt_s.p99'].mean():.3g}" in done.stdout


def _printed(table: pd.DataFrame, axes: list[str]) -> tuple[dict[str, list[str]], str]:
    found = results_table(table, axes)
    assert found is not None
    columns = {str(column.header): list(map(str, column.cells)) for column in found.columns}
    return columns, str(found.caption)


def test_the_table_says_which_points_are_overloaded_and_where_their_numbers_are() -> None:
    paths = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")
    table = pd.DataFrame(
        {"seed": [0, 1] * 2, "cluster.tp": [1, 1, 2, 2]} | dict.fromkeys(paths, 0.5)
    )
    table["steady.state"] = ["steady", "overloaded", "steady", "steady"]
    columns, caption = _printed(table, ["cluster.tp", "seed"])
    assert columns["latency, median (s)"] == ["overloaded", "0.5"]
    assert columns["time between tokens, p99 (s)"] == ["0.5", "0.5"]
    assert columns["model FLOPs utilisation (%)"] == ["50.00", "50.00"]
    assert "overloaded runs are in results.parquet" in caption
    many = pd.concat([table.assign(**{"cluster.tp": n}) for n in range(25)])
    columns, caption = _printed(many, ["cluster.tp", "seed"])
    assert len(columns["TP"]) == 20
    assert "and 5 more in results.parquet" in caption
    assert results_table(table[:0], ["cluster.tp"]) is None
