"""Figures, paired differences and comparisons of sweeps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from experiments.cli import app
from experiments.errors import ConfigError
from experiments.sweeps.backends import InProcess
from experiments.sweeps.execute import execute
from experiments.sweeps.figures import label, pareto_front
from experiments.sweeps.paired import paired_differences
from experiments.sweeps.plan import plan_sweep
from experiments.sweeps.plot import plot_sweep
from experiments.sweeps.store import Store
from tests.experiments.small_sweep import SWEEP


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep. Tests only read it."""
    folder = tmp_path_factory.mktemp("sweep")
    config = folder / "tiny.yaml"
    config.write_text(SWEEP, encoding="utf-8")
    store = Store(folder / "out")
    store.open(False)
    execute(plan_sweep(config), store, InProcess())
    return folder / "out"


def table(base: list[float], other: list[float]) -> pd.DataFrame:
    rows = [
        {"policy": name, "x": 1, "seed": seed, "makespan_s": value}
        for name, values in (("a", base), ("b", other))
        for seed, value in enumerate(values)
    ]
    columns = ("output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tbt_s.p50", "tbt_s.p99")
    empty = dict.fromkeys((*columns, "latency_s.p50", "bubble_s.p50"), math.nan)
    return pd.DataFrame([row | empty for row in rows])


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
    assert found["unpaired"] > 10, "what the seeds have in common is most of the spread"


def test_one_seed_has_no_interval() -> None:
    (entry,) = paired_differences(table([2.0], [3.0]), "policy", ("policy", "x"))
    found = entry["ratios"]["makespan_s"]
    assert found.pop("ratio") == pytest.approx(1.5)
    assert found == {"low": None, "high": None, "unpaired": None}


def test_a_seed_that_one_side_lacks_is_left_out() -> None:
    rows = table([1.0, 2.0, 4.0], [2.0, 4.0, 9.0]).iloc[:-1]
    (entry,) = paired_differences(rows, "policy", ("policy", "x", "seed"))
    assert entry["seeds"] == 2
    assert entry["ratios"]["makespan_s"]["ratio"] == pytest.approx(2.0)


def test_common_requests_make_small_differences_significant(sweep: Path) -> None:
    entries = json.loads((sweep / "summary.json").read_text())["paired"]
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


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("output_tokens_per_s", "output tokens (1/s)"),
        ("tbt_s.p99", "time between tokens p99 (s)"),
        ("mfu", "mfu"),
    ],
)
def test_labels(column: str, expected: str) -> None:
    assert label(column) == expected


def test_figures(sweep: Path, tmp_path: Path) -> None:
    written = plot_sweep(sweep, tmp_path / "figures")
    names = {path.stem for path in written}
    assert {"lines_batching.max_batch", "pareto", "cdf"} <= names
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
    again = plot_sweep(sweep, tmp_path / "again")
    assert [p.read_bytes() for p in written] == [p.read_bytes() for p in again]


def test_plot_mistakes(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metric makespan: .*\(did you mean makespan_s\?\)"):
        plot_sweep(sweep, tmp_path, ["makespan"])
    with pytest.raises(ConfigError, match=r"--over scenario: not one of batching\.max_batch"):
        plot_sweep(sweep, tmp_path, [], ["scenario"])


def test_the_commands(sweep: Path, tmp_path: Path) -> None:
    runs = sorted(path for path in (sweep / "runs").iterdir())
    done = CliRunner().invoke(app, ["compare", str(runs[0]), str(runs[1])])
    assert done.exit_code == 0, done.output
    assert "+100.0 %" in done.stdout
    done = CliRunner().invoke(app, ["compare", str(runs[0]), str(runs[1]), "--json"])
    for key in ("makespan", "mean_latency"):
        result = json.loads(done.stdout)[key]
        for side in ("a_s", "b_s", "difference_s"):
            parts = [part[side] for part in result["parts"].values()]
            assert math.fsum(parts) == pytest.approx(result["total"][side], rel=1e-12, abs=1e-12)
    figures = tmp_path / "figures"
    done = CliRunner().invoke(app, ["plot", str(sweep), "--out", str(figures), "--metric", "mfu"])
    assert done.exit_code == 0, done.output
    assert (figures / "lines_batching.max_batch.png").exists()


def test_compare_mistakes(result: Path, tmp_path: Path) -> None:
    for folders, expected in (
        ((result, result / "orca"), r"holds several scenarios: name one of .*orca, .*sarathi"),
        ((tmp_path, result / "orca"), "not the result of a run"),
    ):
        done = CliRunner().invoke(app, ["compare", *map(str, folders)])
        assert done.exit_code == 2
        assert re.search(expected, done.stderr)
