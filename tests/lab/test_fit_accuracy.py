"""What the regressions reach on public measurements, and how points are chosen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.lab.fit import accuracy
from sarathi_sim.experiments.lab.fit.accuracy import (
    AIMS,
    STUDIES,
    Score,
    adaptive_grid,
    by_class,
    inside_aim,
    spread_points,
)
from sarathi_sim.experiments.lab.fit.kernels import fitted_devices
from sarathi_sim.experiments.report.sections import sections_of
from sarathi_sim.profiler.storage.files import public_datasets
from tests.experiments.small_config import called
from tests.sampled import needs_datasets

pytestmark = pytest.mark.lab


def test_the_profilers_grid_finds_a_step_by_bisection() -> None:
    size = np.arange(1.0, 2049)
    time = np.where(size > 777, 2.0, 1.0) * (100 + size)
    grid = adaptive_grid(size, time, 90)
    assert len(grid) == len(set(grid.tolist())) <= 90
    assert {776, 777} <= set(grid.tolist())  # rows of 777 and 778, the two sides of the step
    assert {0, 2047} <= set(grid.tolist())


def test_spread_points_take_the_corners_first() -> None:
    a, b = (x.ravel() for x in np.meshgrid([1.0, 2, 4, 8, 16], [0.0, 32, 96, 224, 480]))
    points = np.stack([a, b], axis=1)
    corners = {(1.0, 0.0), (16.0, 480.0), (1.0, 480.0), (16.0, 0.0)}
    assert {tuple(p) for p in points[spread_points(points, 4)].tolist()} == corners
    assert len(set(spread_points(points, 12).tolist())) == 12


#: The most that the median and the 95th percentile may be, a little above docs/lab/regressions.md:
#: other versions of the libraries round otherwise.
REACHED = {
    "GEMMs in range": {
        ("GEMM in range", "A6000 (LLMServingSim)"): (0.3, 2.1),
        ("GEMMs of a layer in range", "A6000 (LLMServingSim)"): (0.3, 1.3),
    },
    "attention": {
        ("attention, prefill", "A100 (Vidur)"): (2.1, 7.8),
        ("attention, decode", "A100 (Vidur)"): (3.5, 14.0),
        ("attention, decode", "A6000 (LLMServingSim)"): (2.5, 9.0),
    },
    "messages": {
        ("all-reduce from 2 MB", "A40, 4 GPUs (Vidur)"): (1.3, 6.6),
        ("all-reduce from 2 MB", "A40, 8 GPUs (Vidur)"): (1.8, 7.2),
    },
    "GEMMs beyond": {
        ("GEMM beyond the range", f"{gpu} ({source})"): (5.0, 16.0)
        for gpu, source in (("A100", "Vidur"), ("A40", "Vidur"), ("A6000", "LLMServingSim"))
    },
}
ROWS = {"GEMM in range": 5 * (2048 - 100), "attention, prefill": 4206 - 300}


@pytest.mark.slow
@needs_datasets
@pytest.mark.parametrize("study", REACHED)
def test_what_is_reached_today(study: str) -> None:
    found = {(score.what, score.source): score for score in STUDIES[study](public_datasets())}
    for key, (median, p95) in REACHED[study].items():
        assert found[key].median <= median and found[key].p95 <= p95, found[key]
    for (what, source), score in found.items():
        if what == "GEMM in range" or (what in ROWS and source != "A6000 (LLMServingSim)"):
            assert score.rows == ROWS[what]
        if study == "GEMMs beyond":
            assert score.covered is not None and score.covered >= 90
        else:
            assert score.covered is None or score.covered > 80
    for one in by_class([*found.values()]):
        wide = one.group in ("GEMM in range", "GEMM beyond the range")  # 96: a point too much
        assert one.covered is None or wide or inside_aim(one.covered), one


def test_a_score_says_which_aims_it_misses_and_a_class_sums_up() -> None:
    aim = (3.0, 12.0)
    met = Score("a", "x", "y", 300, 1.0, 11.0, aim, 90.0, "class")
    far = Score("b", "x", "y", 100, 2.0, 13.0, aim, 80.0, "class").because("waves", "few rows")
    open_ended = Score("c", "x", "y", 10, 40.0, 90.0, None, None, "other")
    assert (met.met, met.missed, met.because("waves", "few rows").causes) == (True, [], ())
    assert (far.met, far.missed) == (False, ["p95", "band"])
    assert far.causes == ("waves", "few rows")
    assert (open_ended.met, open_ended.missed) == (None, [])
    first, second = by_class([met, open_ended, far])
    sums = (first.group, first.scores, first.met, first.median, first.p95)
    assert sums == ("class", 2, 1, 1.5, 12)
    assert (first.covered, first.covered_range) == (87.5, (80.0, 90.0))
    assert first.causes == ["waves", "few rows"]
    assert (second.met, second.covered, second.causes) == (None, None, [])


@pytest.mark.slow
def test_accuracy_has_every_shipped_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "STUDIES", {})
    call = ("lab", "accuracy", "--json", "--datasets", tmp_path, "--out", tmp_path / "out")
    content = json.loads(called(*call).stdout)
    scores = content["scores"]
    assert {s["source"].partition(",")[0] for s in scores} == {*fitted_devices("vllm")}
    assert all(bool(s["missed"]) == bool(all(s["causes"]) and s["causes"]) for s in scores)
    assert sum(one["scores"] for one in content["classes"]) == len(scores)
    (section,) = sections_of([tmp_path / "out"])
    assert section.answer == content["answer"] and len(section.tables[0].rows) == len(scores)
    assert {*AIMS["kernels"]} == {s["what"].split()[0] for s in scores}
