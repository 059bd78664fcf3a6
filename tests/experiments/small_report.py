"""A result of every kind that a report shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sarathi_sim as sim
from sarathi_sim.experiments.capacity.answer import add_costs
from sarathi_sim.experiments.capacity.probing import CAPACITY_FORMAT, RECOMMEND_FORMAT
from sarathi_sim.experiments.report.section import (
    Axis,
    Chart,
    Section,
    Series,
    Table,
    write_section,
)
from sarathi_sim.experiments.results import SCORE_FORMAT, result_folder, write_summary

PRICES = {"date": "2026-01-01", "currency": "USD", "mark": "assumed"}
ALL_KINDS = (
    *("run", "sweep", "comparison", "score", "recorded", "capacity", "recommend"),
    "sensitivity",
)


def write_score(folder: Path) -> Path:
    """What the laboratory writes of a score of three rows, one of them refused."""
    errors = {"ttft": {"median": 45.0}, "tpot": {"median": 33.0}}
    groups = {"all": {"n": 2, **errors}, "engine vllm": {"n": 2, **errors}, "none": {"n": 0}}
    table = Table("Errors by group", ("group", "rows"), [("all", "2"), ("engine vllm", "2")])
    with result_folder(folder, SCORE_FORMAT) as scratch:
        write_summary(scratch, SCORE_FORMAT, {"groups": groups})
        bars = Series("bars", "TTFT", [45.0, 45.0], [0.0, 1.0])
        rows = Axis("", rows=("all", "engine vllm"))
        charts = [Chart("Median error by group", Axis("error (%)"), rows, [bars])]
        section = Section("score", "", "How far?", "By 45 %.", [table], charts=charts)
        write_section(scratch, section)
    return folder


def write_difference(result: Path, folder: Path) -> Path:
    """What ``compare --out`` writes of the two scenarios of a small run."""
    sim.compare(result / "orca", result / "sarathi", out=folder)
    return folder


def recorded_run(
    check: Mapping[str, tuple[float, float, float, float]], **off_pct: float
) -> dict[str, Any]:
    """A recorded run as ``score`` says it: by path the predicted and the measured number and the
    ends of the band, by simulation the percent by which all means are off."""
    off_pct = {"zero": 1.0} | off_pct
    measures = ("ttft_s", "tpot_s", "latency_s")
    off = {
        name: {"off_pct": {m: {"mean": value} for m in measures}, "notes": []}
        for name, value in off_pct.items()
    }
    numbers = {
        path: {"predicted": ours, "measured": real, "band": [low, high]}
        | {"inside": low <= real <= high}
        for path, (ours, real, low, high) in check.items()
    }
    remains = dict.fromkeys(("latency_s", "host", "frontend", "first_token", "later_tokens"), 0.0)
    about = {"requests": 50, "measured": {}, "too_fast": "", "stack_error": None}
    return {"check": numbers, "remains": {**remains, "parts": {}}, **about, **off}


def write_recorded(folder: Path) -> Path:
    """The summary of a score of two recorded runs."""
    check = {"ttft_s.mean": (0.3, 0.9, 0.2, 1.0), "tpot_s.mean": (0.02, 0.04, 0.01, 0.03)}
    runs = {
        name: recorded_run(check, zero=-12.5, fitted=float(number))
        for number, name in enumerate(("first", "second"), start=1)
    }
    with result_folder(folder, SCORE_FORMAT) as scratch:
        write_summary(scratch, SCORE_FORMAT, {"runs": runs})
    return folder


def searched(name: str, gpus: int, capacity: float) -> dict[str, Any]:
    """A deployment with a capacity, and its curve of three loads."""

    def probe(load: float, stress: float) -> dict[str, Any]:
        speeds = {"tokens_per_s_per_user": 50 / load, "output_tokens_per_s_per_gpu": 100 * load}
        latencies = {"ttft_p99_s": stress, "tbt_p99_s": 0.05}
        latencies |= {"input_tokens_per_s": 400 * load, "output_tokens_per_s": 100 * load}
        about = {"run": f"{gpus}{load:g}", "holds": stress <= 1, "stress": {"p99 ttft 1s": stress}}
        kept = {"overloaded": False, "requests_per_s": load, "rejected_share": 0.0}
        return {"load": load, "requests": 2500, **about, **kept, **speeds, **latencies}

    numbers = {"capacity": capacity, "interval": [0.9 * capacity, capacity], "band": [1.0, 9.0]}
    numbers |= {"settled": True, "why_not": "", "rejected_share": 0.0, "offered": capacity}
    numbers |= {"replicas": 1, "simulated_replicas": 1, "device": "a6000", "stack": "vllm"}
    numbers |= {"point": {"shape": name.partition(" budget ")[0]}, "at_rate": None}
    numbers |= {"carries": capacity, "gpus_paid": gpus}
    curve = [probe(0.5 * capacity, 0.4), probe(capacity, 1.0), probe(1.1 * capacity, 3.0)]
    binds = {"slo": "p99 ttft 1s", "because": "queueing", "at_load": 1.1 * capacity}
    binds |= {"kv_peak_share": 0.25, "bubble_share": 0.1, "queueing_share_of_ttft": 0.9}
    binds["mean_batch"] = 12.0
    found = {"name": name, "gpus": gpus, **numbers, "curve": curve, "binds": binds}
    found["at_capacity"] = curve[1]
    add_costs(found, 2.5 * gpus)
    return found


def write_capacities(folder: Path) -> Path:
    """What ``capacity`` writes of three deployments, one of which cannot run."""
    none = {"name": "TP 1", "gpus": 1, "capacity": None, "error": "does not fit"}
    none |= {"settled": False, "point": {"scenario": "TP 1"}}
    content = {
        "name": "layouts",
        "description": "",
        "slo": "p99 ttft 1s",
        "load": "rate",
        "deployments": [searched("TP 2", 2, 3.0), searched("TP 8", 8, 8.0), none],
        "tolerance": 0.05,
        "keep": 0.9,
        "notes": {n: ["traffic: all alike", "op times: all modelled"] for n in ("TP 2", "TP 8")},
        "prices": PRICES,
    }
    with result_folder(folder, CAPACITY_FORMAT) as scratch:
        write_summary(scratch, CAPACITY_FORMAT, content)
        (scratch / "config.yaml").write_text("name: layouts\n")
    return folder


def recommended(*rows: dict[str, Any], **given: Any) -> dict[str, Any]:
    """The content of the summary of ``recommend`` on 8 GPUs, with these finalists."""
    carries = bool(rows[0]["capacity"])
    return {
        "model": "llama-13b",
        "devices": ["a6000"],
        "gpus": 8,
        "rate": None,
        "slo": "p99 ttft 1s",
        "load": "rate",
        "deployments": list(rows),
        "screened": [],
        "dropped": {},
        "far_neighbours": [],
        "equal": [],
        "next": None,
        "prices": PRICES,
        "tolerance": 0.11,
        "keep": 0.9,
        "notes": {"TP 2": ["traffic: all alike"]},
        "winner": rows[0]["name"] if carries else None,
        "one_fewer": None,
        "command": "vllm serve llama-13b" if carries else None,
        "needs": None,
        **given,
    }


def write_recommendation(folder: Path) -> Path:
    """What ``recommend`` writes of two finalists, one that was screened, and one left out."""
    rows = searched("TP 8 budget 256 seqs 16", 8, 8.0), searched("TP 2 budget 256 seqs 16", 8, 6.0)
    screened = {**searched("TP 4 budget 256 seqs 16", 4, 2.5), "replicas": 2, "about": 5.0}
    left = {"stage": "unfit", "beaten_by": None, "at": None, "clause": "does not fit"}
    dropped = {"TP 1 budget 256 seqs 16": left}
    content = recommended(*rows, screened=[screened], dropped=dropped)
    with result_folder(folder, RECOMMEND_FORMAT) as scratch:
        write_summary(scratch, RECOMMEND_FORMAT, content)
        (scratch / "winner.yaml").write_text("name: winner\n")
        (scratch / "launch.sh").write_text("vllm serve llama-13b\n")
    return folder


def write_sensitivity(folder: Path) -> Path:
    """The result of ``sensitivity``: what three factors do to a tiny run."""
    config = {
        "name": "tiny",
        "model": "llama-13b",
        "device": "a6000",
        "workload": {"requests": 4, "lengths": {"kind": "fixed", "prompt": 200, "decode": 20}},
        "cluster": {"max_length": 512},
        "policy": {"name": "sarathi", "chunk_size": 256},
    }
    sim.capacity(
        config,
        sensitivity=True,
        metrics=["output_tokens_per_s"],
        only=["all ops", "attn_prefill", "output lengths"],
        replications=1,
        out=folder,
    )
    return folder
