"""The Pareto front of a sweep: its directions, its seeds, its layouts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel

from sarathi_sim.experiments.config.scenario import PARAMETERS, Scenario
from sarathi_sim.experiments.report.section import Chart
from sarathi_sim.experiments.report.sweep_charts import label, pareto, points
from tests.experiments.small_sweep import of

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
                    "latency_s.p50": latency + off, "makespan_s": latency, "mfu": 0.05 * tp,
                    "run": f"{tp} {seed}", "name": "a",
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def drawn(table: pd.DataFrame, x: str, y: str, axes: list[str] = AXES) -> Chart:
    (chart,) = pareto(of(table, axes), x, y)
    return chart


def _front(chart: Chart) -> list[tuple[float, float]]:
    (front,) = (one for one in chart.series if one.name == "the front")
    return list(zip(front.x.round(6).tolist(), front.y.round(6).tolist(), strict=True))


def test_each_metric_has_its_own_direction() -> None:
    """Whatever stands first: less latency is better, more tokens are."""
    table = _table()
    chart = drawn(table, "latency_s.p50", "tokens_per_s")
    assert _front(chart) == [(2.0, 100.0), (3.0, 120.0)]
    assert chart.x.label == "latency, median (s), less is better"
    assert chart.y.label == "token throughput (tokens/s), more is better"
    turned = drawn(table, "tokens_per_s", "latency_s.p50")
    assert _front(turned) == [(120.0, 3.0), (100.0, 2.0)]
    both = drawn(table, "makespan_s", "latency_s.p50")
    assert _front(both) == [(2.0, 2.0)], "of two metrics of which less is better"


def test_seeds_are_averaged_and_their_spread_is_drawn() -> None:
    table = _table()
    chart = drawn(table, "latency_s.p50", "tokens_per_s")
    (spots,) = (one for one in chart.series if one.kind == "points")
    assert np.allclose(np.stack([spots.x, spots.y], 1), [(2, 100), (3, 120), (4, 90)])
    assert spots.ends_x is not None and spots.ends is not None
    assert np.allclose(np.stack(spots.ends_x, 1), [(1.9, 2.1), (2.9, 3.1), (3.9, 4.1)])
    assert np.allclose(np.stack(spots.ends, 1), [(99, 101), (119, 121), (89, 91)])
    assert chart.caption.startswith("Mean over 2 seeds; whiskers: smallest and largest")


def test_a_point_that_lacks_a_seed_is_left_out_and_shares_are_in_percent() -> None:
    table = _table()
    table.loc[0, "latency_s.p50"] = np.nan
    swept = of(table, AXES)
    metrics = ("latency_s.p50", "mfu")
    (load,) = swept.loads(metrics)
    found = points(swept, load, *metrics)
    assert found["_option"].tolist() == ["TP 2, PP 2", "TP 4, PP 1"]
    assert found["mfu"].tolist() == pytest.approx([10.0, 20.0])
    chart = drawn(table, "latency_s.p50", "mfu")
    assert chart.caption.endswith("Left out: TP 1, PP 4 (only 1 of 2 seeds).")


def test_an_equal_value_puts_no_point_on_the_front() -> None:
    """The third layout is worse in latency, and has 0.5 % more tokens than the second."""
    table = _table()
    table["tokens_per_s"] = [100.0, 100, 120, 120, 120.6, 120.6]
    chart = drawn(table, "latency_s.p50", "tokens_per_s")
    assert _front(chart) == [(2.0, 100.0), (3.0, 120.0)]
    table["tokens_per_s"] = 120.0
    assert pareto(of(table, AXES), "latency_s.p50", "tokens_per_s") == []


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
