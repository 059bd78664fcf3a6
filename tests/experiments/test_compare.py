"""`compare`: what is noted, and the figure of the parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from experiments.cli import app
from experiments.compare import TITLES, compare, part_label
from experiments.compare_figure import drawn_parts, parts_figure
from experiments.errors import ConfigError
from experiments.loading import load_experiment
from experiments.results import SUMMARY
from experiments.run import run_experiment


@pytest.fixture(scope="module")
def compared(result: Path) -> dict[str, Any]:
    return compare(result / "orca", result / "sarathi")


def test_the_figure_has_a_pair_of_bars_for_each_part(compared: dict[str, Any]) -> None:
    for axes, key in zip(parts_figure(compared).axes, TITLES, strict=True):
        names = drawn_parts(compared[key])
        assert [t.get_text() for t in axes.get_yticklabels()] == [part_label(key, n) for n in names]
        for side, bars in zip("ab", axes.containers, strict=True):
            widths = [bar.get_width() for bar in bars]  # type: ignore[attr-defined]
            assert widths == [compared[key]["parts"][name][f"{side}_s"] for name in names]
        differences = [abs(compared[key]["parts"][name]["difference_s"]) for name in names]
        assert differences == sorted(differences, reverse=True)


def test_small_parts_are_not_drawn() -> None:
    part = {"a_s": 1.0, "b_s": 2.0, "difference_s": 1.0}
    small = {"a_s": 0.01, "b_s": 0.001, "difference_s": -0.009}
    breakdown = {
        "parts": {"fill": small, "linear": part},
        "total": {"a_s": 1.01, "b_s": 2.001, "difference_s": 0.991},
    }
    assert drawn_parts(breakdown) == ["linear"]
    breakdown["parts"]["fill"] = {**small, "a_s": 0.02}
    assert drawn_parts(breakdown) == ["linear", "fill"]


def test_the_folder_is_written_whole(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "difference"
    words = ["compare", str(result / "orca"), str(result / "sarathi"), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"figures: {out / 'figures'}" in done.stdout
    assert json.loads((out / SUMMARY).read_text())["makespan"]["total"]["a_s"] > 0
    with Image.open(out / "figures" / "comparison.png") as image:
        assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
    assert CliRunner().invoke(app, words).exit_code == 0, "an earlier one is replaced"
    done = CliRunner().invoke(app, [*words[:-1], str(result)])
    assert done.exit_code == 2
    assert "is a result of another kind" in done.stderr


def test_an_overloaded_run_is_named(tmp_path: Path) -> None:
    changes = ["workload.requests=100", "workload.arrivals.rate=6"]
    run_experiment(load_experiment("first_experiment", changes), tmp_path / "run", figures=False)
    notes = compare(tmp_path / "run" / "orca", tmp_path / "run" / "sarathi")["notes"]
    assert len(notes) == 2
    assert all("overloaded: its queue grows" in note for note in notes)


@pytest.mark.parametrize("scenarios", [{"orca": 3}, {"orca": None}])
def test_a_damaged_summary(tmp_path: Path, scenarios: dict[str, Any]) -> None:
    text = json.dumps({"format": "sarathi-sim result 1", "scenarios": scenarios})
    (tmp_path / SUMMARY).write_text(text)
    with pytest.raises(ConfigError, match="not the result of a run"):
        compare(tmp_path / "orca", tmp_path / "orca")
