"""`compare`: what is noted, and the figure of the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.compare import TITLES, compare, comparison_answer
from tests.experiments.small_config import called, summary_of


def test_the_headline_says_what_differs() -> None:
    breakdown = _breakdown(10.0, 15.0, {"linear": (9.0, 13.0), "pb1": (1.0, 2.0)})
    found = {"a": "runs/orca", "b": "runs/sarathi", "notes": [], "same_requests": False}
    section = comparison_answer(found | dict.fromkeys(TITLES, breakdown))
    assert section.answer == (
        "sarathi (B) takes 15.00 s, 50.0 % more than the 10.00 s of orca (A), the largest part of "
        "it linear ops (+4 s); a request's mean latency is 15.00 s, 50.0 % more than the 10.00 s "
        "of orca (A), the largest part of it linear ops (+4 s)."
    )
    # What goes the other way is no part of it.
    breakdown = _breakdown(10.0, 11.0, {"linear": (9.0, 4.0), "pb1": (1.0, 7.0)})
    assert (
        "the largest part of it PB1"
        in comparison_answer(found | dict.fromkeys(TITLES, breakdown)).answer
    )
    assert section.warnings == ["A and B serve different requests."]
    alike = _breakdown(10.0, 9.95, {"linear": (10.0, 9.95)})
    answer = comparison_answer(found | {"wall": alike, "mean_latency": breakdown}).answer
    assert answer.startswith("sarathi (B) takes 9.95 s, within 1 % of orca (A); a request's mean")


def _breakdown(total_a: float, total_b: float, parts: dict[str, tuple[float, float]]) -> Any:
    def row(a: float, b: float) -> dict[str, float]:
        return {"a_s": a, "b_s": b, "difference_s": b - a}

    rows = {name: row(a, b) for name, (a, b) in parts.items()}
    return {"total": row(total_a, total_b), "parts": rows}


def _cells(breakdown: Any) -> tuple[list[str], dict[str, list[str]]]:
    """Headings, and the cells of every row."""
    sides = {"a": "one/x", "b": "two/y", "notes": [], "same_requests": True}
    table = comparison_answer(sides | dict.fromkeys(TITLES, breakdown)).table
    return list(table.headings), {row[0]: list(row[1:]) for row in table.rows}


def test_of_a_difference_near_nothing_no_shares_are_printed() -> None:
    """1.37 s of 0.05 s would be +2740 %: parts that cancel."""
    parts = {"linear": (800.0, 801.37), "decode_attention": (7.9, 6.58)}
    headings, rows = _cells(_breakdown(807.9, 807.95, parts))
    assert headings == ["part", "A (s)", "B (s)", "B - A (s)", "of A's total"]
    assert rows["linear ops"] == ["800.0000", "801.3700", "+1.3700", "+0.2 %"]
    assert rows["in all"] == ["807.9000", "807.9500", "+0.0500", "+0.0 %"]


def test_a_real_difference_is_divided() -> None:
    headings, rows = _cells(_breakdown(10.0, 15.0, {"linear": (9.0, 13.0), "pb1": (1.0, 2.0)}))
    assert headings[-2:] == ["of A's total", "of the difference"]
    assert rows["linear ops"][-2:] == ["+40.0 %", "+80.0 %"]
    assert rows["in all"][-2:] == ["+50.0 %", "+100.0 %"]


def test_of_nothing_there_is_no_share() -> None:
    assert _cells(_breakdown(0.0, 0.0, {"linear": (0.0, 0.0)}))[1]["in all"][-1] == "-"
    assert _cells(_breakdown(0.0, 1.0, {"linear": (0.0, 1.0)}))[1]["in all"][-2:] == [
        "-",
        "+100.0 %",
    ]


@pytest.mark.slow
def test_the_folder_is_written_whole(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "difference"
    words = ("compare", result / "orca", result / "sarathi", "--out", out)
    done = called(*words)
    assert f"written: {out}" in done.stdout
    assert summary_of(out)["wall"]["total"]["a_s"] > 0
    with Image.open(out / "figures" / "comparison.png") as image:
        assert len(image.convert("RGB").getcolors(maxcolors=2**24) or []) > 20
    called(*words)  # an earlier one is replaced
    done = called(*words[:-1], result, code=2)
    assert "is a result of another kind" in done.stderr


def test_an_overloaded_run_is_named(tmp_path: Path) -> None:
    changes = ["workload.requests=100", "workload.arrivals.rate=6"]
    sim.run(load_experiment("first_experiment", changes), out=tmp_path / "run", figures=False)
    found = compare(tmp_path / "run" / "orca", tmp_path / "run" / "sarathi")
    notes, (traffic, arrivals, *others) = found["notes"], found["assumptions"]
    assert traffic.startswith("traffic: prompts of ") and "P50" in traffic
    assert arrivals == "arrivals: Poisson, 6 requests/s"
    assert any(line.startswith("engine: ") and line.endswith("(of B)") for line in others)
    assert len(notes) == 2
    assert all("overloaded: its queue grows" in note for note in notes)


@pytest.mark.slow
def test_the_frontend_is_part_of_a_latency_as_in_the_summary(tmp_path: Path) -> None:
    """The clock runs from t = 0, and so is not the makespan, which begins at the first arrival."""
    (tmp_path / "c.yaml").write_text(
        """
        name: frontend
        model: llama-3-8b
        device: a100-80g-sxm
        workload: {requests: 20, lengths: {kind: uniform, min: 64, max: 900}, pd_ratio: 2,
                   arrivals: {kind: poisson, rate: 5}}
        cluster: {max_length: 1024}
        policy: {name: vllm}
        scenarios: {none: {}, host: {engine: {frontend_s: 0.05, host_iteration_s: 0.002}}}
        """
    )
    sim.run(load_experiment(tmp_path / "c.yaml"), out=tmp_path / "run", figures=False)
    found = compare(tmp_path / "run" / "none", tmp_path / "run" / "host")
    written = summary_of(tmp_path / "run")["scenarios"]
    for side, name in (("a_s", "none"), ("b_s", "host")):
        total = {key: found[key]["total"][side] for key in TITLES}
        assert total["mean_latency"] == pytest.approx(written[name]["latency_s"]["mean"], rel=1e-9)
        assert total["wall"] > written[name]["makespan_s"]
    parts = found["mean_latency"]["parts"]
    assert parts["frontend"] == {"a_s": 0.0, "b_s": 0.05, "difference_s": 0.05}
