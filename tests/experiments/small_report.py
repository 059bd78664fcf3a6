"""A result of every kind that a report shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.capacity.folder import CAPACITY_FORMAT
from experiments.results import SCORE_FORMAT, result_folder, write_summary
from experiments.run.compare import compare
from experiments.run.compare_figure import write_comparison

ALL_KINDS = ("run", "sweep", "comparison", "score", "recorded", "capacity")


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


def write_recorded(folder: Path) -> Path:
    """The summary of a score of two recorded runs."""

    def off(percent: float) -> dict[str, Any]:
        return {"off_pct": {m: {"mean": percent} for m in ("ttft_s", "tpot_s", "latency_s")}}

    runs = {
        name: {"requests": 50, "measured": {}, "zero": off(-12.5), "fitted": off(float(number))}
        for number, name in enumerate(("first", "second"), start=1)
    }
    with result_folder(folder, SCORE_FORMAT) as scratch:
        write_summary(scratch, SCORE_FORMAT, {"runs": runs})
    return folder


def write_capacities(folder: Path) -> Path:
    """What ``capacity`` writes of three deployments, one of which cannot run."""

    def probe(load: float, stress: float) -> dict[str, Any]:
        speeds = {"tokens_per_s_per_user": 50 / load, "output_tokens_per_s_per_gpu": 100 * load}
        return {"load": load, "holds": stress <= 1, "stress": {"p99 ttft 1s": stress}, **speeds}

    def deployment(name: str, gpus: int, capacity: float) -> dict[str, Any]:
        numbers = {"capacity": capacity, "mean": capacity, "interval": None, "band": [1.0, 9.0]}
        curve = [probe(0.5 * capacity, 0.4), probe(capacity, 1.0), probe(1.1 * capacity, 3.0)]
        binds = {"slo": "p99 ttft 1s", "because": "queueing"}
        return {"name": name, "gpus": gpus, **numbers, "curve": curve, "binds": binds}

    none = {"name": "TP 1", "gpus": 1, "capacity": None, "error": "does not fit"}
    content = {
        "name": "layouts",
        "description": "",
        "slo": "p99 ttft 1s",
        "load": "rate",
        "deployments": [deployment("TP 2", 2, 3.0), deployment("TP 8", 8, 8.0), none],
        "warnings": ["warning: TP 1: does not fit"],
    }
    with result_folder(folder, CAPACITY_FORMAT) as scratch:
        write_summary(scratch, CAPACITY_FORMAT, content)
        (scratch / "config.yaml").write_text("name: layouts\n")
    return folder
