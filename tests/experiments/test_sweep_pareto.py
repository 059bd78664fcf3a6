"""The Pareto front of a sweep: its directions, its seeds, its layouts; and the table at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel

from sarathi_sim.experiments.config.scenario import PARAMETERS, Scenario
from sarathi_sim.experiments.report.section import Chart
from sarathi_sim.experiments.report.sweep_charts import label, pareto, points
from sarathi_sim.experiments.sweeps.sweep_answer import sweep_answer
from tests.experiments.small_config import called
from tests.experiments.small_sweep import CHUNK, RATE, of

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


@pytest.mark.slow
def test_a_sweep_prints_its_answer_at_the_end(tiny_config: Path, tmp_path: Path) -> None:
    done = called("sweep", tiny_config, "--out", tmp_path / "out", "--workers", 1)
    for words_of_it in ("batch (sequences)", "time to first token, p99 (s)", "means over 3 seeds"):
        assert words_of_it in done.stdout
    table = pd.read_parquet(tmp_path / "out" / "results.parquet")
    mine = table[(table["batching.max_batch"] == 2) & (table["scenario"] == "orca")]
    assert f"{mine['tbt_s.p99'].mean():.3g}" in done.stdout
    means = table.groupby(["batching.max_batch", "scenario"])["output_tokens_per_s"].mean()
    ((batch, scenario),) = means.nlargest(1).index
    assert done.stdout.startswith(f"batch {batch}, {scenario} has the highest output token through")
    printed = called("plot", tmp_path / "out", "--out", tmp_path / "f")
    assert printed.stdout.split("\n")[:9] == done.stdout.split("\n")[:9]


PATHS = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p99", "latency_s.p50", "mfu")


def runs(**columns: list[object]) -> pd.DataFrame:
    """Runs whose metrics are 0.5 where nothing is said, each under a key of its own."""
    count = len(next(iter(columns.values())))
    given = {"steady.state": "steady", "name": "a", "run": [f"{n:016x}" for n in range(count)]}
    return pd.DataFrame(dict.fromkeys(PATHS, 0.5) | given | columns, index=range(count))


def test_the_table_says_which_points_are_overloaded_and_where_their_numbers_are() -> None:
    table = runs(**{"seed": [0, 1] * 2, "cluster.tp": [1, 1, 2, 2]})
    table["steady.state"] = ["steady", "overloaded", "steady", "steady"]
    found = sweep_answer(of(table, ["cluster.tp", "seed"])).table
    columns = dict(zip(found.headings, zip(*found.rows, strict=True), strict=True))
    assert columns["latency, median (s)"] == ("overloaded", "0.5")
    assert columns["time between tokens, p99 (s)"] == ("0.5", "0.5")
    assert columns["model FLOPs utilisation (%)"] == ("50.00", "50.00")
    assert found.note == (
        "Predicted, means over 2 seeds. Latencies of overloaded runs are in results.parquet, over "
        "all their requests."
    )


def test_choices_are_ranked_at_equal_load() -> None:
    """The highest offered rate wins nothing: the arrivals set the throughput."""
    table = runs(**{RATE: [1, 1, 2, 2], CHUNK: [128, 256] * 2})
    table["output_tokens_per_s"] = [100, 100.5, 200, 201]
    table["tbt_s.p99"] = [0.05, 0.1, 0.06, 0.12]
    table["ttft_s.p99"] = [0.3, 0.2, 0.4, 0.4]
    section = sweep_answer(of(table, [RATE, CHUNK]))
    assert section.question == "Which chunk is best at each rate, and what does it cost?"
    assert section.answer == (
        "chunk 128 has the shortest p99 time between tokens at all 2 loads: 0.05 to 0.06 s "
        "(chunk 256 0.1 to 0.12 s); its p99 time to first token at 1 of 2 loads is 50 % "
        "longer: 0.3 s (chunk 256 0.2 s); equal: output token throughput, 100.0 to 201.0 "
        "tokens/s."
    )
    assert section.command == f"sarathi-sim run sweep/runs/{2:016x}/config.yaml"
    assert section.tables[0].rows == [
        ["rate 1", "100.5: all equal", "0.2: chunk 256", "0.05: chunk 128"],
        ["rate 2", "201.0: all equal", "0.4: all equal", "0.06: chunk 128"],
    ]
    alone = sweep_answer(of(table[::2], [RATE]))
    assert alone.question == "What does the rate do to throughput and latencies?"
    assert alone.answer.startswith("From rate 1 to rate 2: output token throughput 100.0 to 200.0")


def test_what_the_seeds_do_not_tell_apart_is_not_ranked() -> None:
    """Both differ by 20 % in the mean; only one of them does so for every seed."""
    table = runs(**{"seed": [0, 1, 2] * 2, CHUNK: [128] * 3 + [256] * 3})
    table["tbt_s.p99"] = [1.0, 2.0, 3.0, 1.2, 2.4, 3.6]
    table["ttft_s.p99"] = [1.0, 2.0, 3.0, 3.6, 2.4, 1.2]
    section = sweep_answer(of(table, [CHUNK, "seed"]))
    assert section.answer == (
        "chunk 128 has the shortest p99 time between tokens: 2.00 s (chunk 256 2.40 s); "
        "equal: output token throughput, 0.5 tokens/s; not told apart by the seeds: p99 time to "
        "first token, 2.00 to 2.40 s."
    )


def test_an_overloaded_choice_competes_with_others_of_its_kind() -> None:
    table = runs(**{CHUNK: [128, 256, 512], "output_tokens_per_s": [120.0, 119.5, 80.0]})
    table["ttft_s.p99"] = [0.2, 0.1, 0.01]
    table["steady.state"] = ["steady", "steady", "overloaded"]
    assert sweep_answer(of(table, [CHUNK])).answer == (
        "chunk 256 has the shortest p99 time to first token: 0.1 s (chunk 128 0.2 s); equal: "
        "output token throughput, 119.5 to 120.0 tokens/s and p99 time between tokens, 0.5 s; "
        "overloaded: chunk 512."
    )
    table["steady.state"], table[RATE] = "overloaded", 1
    assert sweep_answer(of(table, [CHUNK, RATE])).answer.startswith(
        "chunk 128 has the highest output token throughput: 120.0 tokens/s (the others 80.00 to "
    )
