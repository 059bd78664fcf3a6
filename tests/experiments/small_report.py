"""A result of every kind that a report shows."""

from __future__ import annotations

from pathlib import Path

from experiments.results import SCORE_FORMAT, result_folder, write_summary
from experiments.run.compare import compare
from experiments.run.compare_figure import write_comparison

ALL_KINDS = ("run", "sweep", "comparison", "score")


def write_score(folder: Path) -> Path:
    """The summary of a score of three rows, one of them refused."""
    errors = {
        "ttft": {"mape": 46.0, "median": 45.0, "p90": 61.0, "bias": 46.0},
        "tpot": {"mape": 34.0, "median": 33.0, "p90": 37.0, "bias": -33.0},
    }
    groups = {"all": {"n": 2, **errors}, "engine vllm": {"n": 2, **errors}, "none": {"n": 0}}
    content = {"rows": 3, "answered": 2, "groups": groups, "refused": {"not modelled": 1}}
    with result_folder(folder, SCORE_FORMAT) as scratch:
        write_summary(scratch, SCORE_FORMAT, content)
    return folder


def write_difference(result: Path, folder: Path) -> Path:
    """What ``compare --out`` writes of the two scenarios of a small run."""
    write_comparison(compare(result / "orca", result / "sarathi"), folder)
    return folder
