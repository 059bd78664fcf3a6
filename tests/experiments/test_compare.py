"""`compare`: what is noted, and the figure of the parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import sarathi_sim as sim
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.run_answers import comparison_section
from sarathi_sim.experiments.run.compare import compare
from tests.experiments.small_config import called, summary_of


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
    section = comparison_section(found)
    (traffic, arrivals, *others), notes = section.assumed, section.warnings
    assert traffic.startswith("traffic: prompts of ") and "P50" in traffic
    assert arrivals == "arrivals: Poisson, 6 requests/s"
    assert any(line.startswith("engine: ") and line.endswith("(of B)") for line in others)
    assert len(notes) == 2
    assert all("overloaded: its queue grows" in note for note in notes)
    assert "time to first token" not in section.answer and "overloaded; sarathi" in section.answer


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
        total = {key: found[key]["total"][side] for key in ("wall", "mean_latency")}
        assert total["mean_latency"] == pytest.approx(written[name]["latency_s"]["mean"], rel=1e-9)
        assert total["wall"] > written[name]["makespan_s"]
    parts = found["mean_latency"]["parts"]
    assert parts["frontend"] == {"a_s": 0.0, "b_s": 0.05, "difference_s": 0.05}
