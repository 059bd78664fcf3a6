"""Finished runs that somebody or something changed: found out, kept, and done again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.plan import SweepPlan
from tests.experiments.small_sweep import RUNS, Files, swept, tree


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def edit_a_number(path: Path) -> None:
    text, times = re.subn(r'("makespan_s": )', r"\g<1>1", path.read_text())
    assert times == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("SCENARIO/requests.parquet", cut, "changed: SCENARIO/requests.parquet"),
        ("config.yaml", Path.unlink, "missing: config.yaml"),
        ("summary.json", edit_a_number, "changed: summary.json"),
        ("summary.json", lambda path: path.write_text("{"), "changed: summary.json"),
        ("manifest.json", Path.unlink, "it has no manifest.json"),
        ("manifest.json", cut, "it has no manifest.json, or one that cannot be read"),
    ],
)
def test_a_damaged_run_is_done_again_and_nothing_is_deleted(
    tiny_plan: SweepPlan,
    tiny_files: Files,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder, run = tmp_path / "sweep", tiny_plan.runs[4]
    runs, scenario = folder / "runs", run.name.partition(" ")[0]
    swept(tiny_plan, folder, InProcess())
    (runs / run.key / "mine.ipynb").write_text("hours of work")
    (runs / tiny_plan.runs[5].key / "mine.ipynb").write_text("an added file is no damage")
    for number in (1, 2):
        damage(runs / run.key / name.replace("SCENARIO", scenario))
        was = tree(runs / run.key)
        said: list[str] = []
        report = swept(tiny_plan, folder, InProcess(), resume=True, say=said.append)
        kept = folder / "damaged" / (run.key if number == 1 else f"{run.key}-2")
        says = says.replace("SCENARIO", scenario)
        assert said == [
            f"run {run.key} is damaged ({says}) and is done again; its old folder is now {kept}"
        ] or (name == "manifest.json" and says in said[0] and len(said) == 1)
        assert (report.earlier, report.finished) == (RUNS - 1, RUNS)
        assert tree(kept) == was
    (runs / tiny_plan.runs[5].key / "mine.ipynb").unlink()
    shutil.rmtree(folder / "damaged")
    assert tree(folder) == tiny_files
