"""A validation on real vLLM: its parts, on what vLLM answered once (``recorded/vllm.jsonl.gz``)."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli import app
from sarathi_sim.experiments.config.loading import Experiment, load_experiment
from sarathi_sim.experiments.lab.servers.answers import validation_answer
from sarathi_sim.experiments.measured import vllm_session
from sarathi_sim.experiments.measured.session import Cell, make_cells, plan_of
from sarathi_sim.experiments.measured.validation import evaluate_all, iterations, report
from sarathi_sim.experiments.measured.vllm_session import (
    StepPrediction,
    StepTimes,
    VllmSession,
    check_cells,
    find_python,
    grid_work,
    job_of,
    session_of,
    totals_of,
)
from sarathi_sim.experiments.results import to_json
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError

RECORDED = Path(__file__).parent / "recorded" / "vllm.jsonl.gz"
SMALL = [
    "workload.requests=5",
    "workload.lengths.max=80",
    "validation.repeats=1",
    "validation.calibration_requests=3",
    "policy.max_num_seqs=4",
    "policy.max_num_batched_tokens=24",
    "kv_cache.num_blocks=8",
    "cluster.max_length=96",
    "scenarios.high.workload.arrivals.rate=40",
]


def small(*more: str) -> tuple[Experiment, list[Cell]]:
    experiment = load_experiment("validate_vllm", [*SMALL, *more])
    return experiment, make_cells(experiment)


@pytest.fixture
def answers() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]


def recorded_session(answers: list[dict[str, Any]]) -> VllmSession:
    experiment, cells = small()
    plan = [item for part in plan_of(cells, experiment.validation) for item in part]
    return session_of(cells, plan, answers, [1.0] * len(answers), 9.0)


@pytest.fixture
def session(answers: list[dict[str, Any]]) -> VllmSession:
    return recorded_session(answers)


def test_the_order_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up; then grid, calibration, workload and calibration of each cell, grid."""
    monkeypatch.setattr(vllm_session, "TIMES", 2)
    experiment, cells = small("validation.repeats=2")
    parts = plan_of(cells, experiment.validation)
    repeat = ["grid", *["low"] * 3, *["high"] * 3, "grid"]
    assert [[name for name, _ in part] for part in parts] == [
        ["grid", "warm-up"], repeat, repeat, [],
    ]  # fmt: skip
    plan = [item for part in parts for item in part]
    sizes = [len(requests or ()) for _, requests in plan]
    assert sizes[2:10] == [0, 3, 5, 3, 3, 5, 3, 0]
    assert plan[3][1] != plan[11][1], "calibration has other seeds in each repeat"
    assert plan[4][1] == plan[12][1] == cells[0].requests()
    job = job_of(cells, plan)
    assert len(job["work"]) == len(plan) and job["model"]["hidden_size"] == 512
    assert job["engine"]["num_gpu_blocks_override"] == 8
    grid = grid_work(cells)
    assert max(grid["decodes"]) + max(grid["prompts"]) <= 24, "in the budget"


def test_every_recorded_decision_is_ours(session: VllmSession) -> None:
    """Prompts are cut, and decodes run beside them."""
    outcomes = evaluate_all([session], silent)
    for name in ("low", "high"):
        (outcome,) = outcomes[name]
        assert outcome.parity.first_difference is None
        assert outcome.parity.identical == outcome.parity.decisions == len(outcome.steps) > 20
        assert set(outcome.whole) == {"grid", "calibrated"}
        # The worst that a busy machine did to a run of half a second.
        assert 0.3 < outcome.whole["grid"]["tpot"] / outcome.measured["tpot"] < 3
        beside = outcome.steps["decodes"] * outcome.steps["prompt_tokens"]
        assert (beside > 0).any(), "decodes beside a prompt"
    table_of = iterations(outcomes)
    assert set(table_of["cell"]) == {"low", "high"} and (table_of["measured_s"] > 0).all()


def test_a_changed_decision_is_found(session: VllmSession) -> None:
    events = session.repeats[0].served["low"].run["events"]
    first = next(event for event in events if event[0] == "schedule" and event[2])
    first[2][0][2] -= 1
    (outcome,) = evaluate_all([session], silent)["low"]
    assert "decision of step 0" in str(outcome.parity.first_difference)


def test_the_verdict_is_honest(session: VllmSession) -> None:
    """One repeat is too few to claim anything; three that drifted are rejected."""
    experiment, _ = small()
    result = to_json(report(experiment, [session], evaluate_all([session], silent)))
    assert result["quiet"] is False and result["cells"]["low"]["parity"] == 1
    judged = {(row["what"], row["met"]) for row in result["targets"]}
    assert ("parity", True) in judged and ("ttft_error", None) in judged
    section = validation_answer(result)
    assert any("nothing is claimed" in line for line in section.warnings)
    assert len(section.table.rows) > 5
    before, after = session.repeats[0].grids
    for rows, slower in ((before, 1.0), (after, 1.2)):
        for row in rows["grid"]:
            row[3:] = [slower * (10 + row[0] + row[2])] * 2
    result = report(experiment, [session], evaluate_all([session], silent))
    assert result["repeats"]["vllm"]["rejected"] == [
        {"repeat": 0, "why": "the grid took 1.20 times as long after as before"}
    ]


def grid_rows() -> list[list[float]]:
    """Steps of 2 ms, 0.1 a decode, 0.001 a token of their contexts, 0.01 a prompt token; 0.5 ms
    for each new request."""
    rows = []
    for context in (16, 116):
        for decodes in (0, 1, 4):
            for prompt in (0, 10, 20):
                if not (decodes or prompt):
                    continue
                step = 2 + 0.1 * decodes + 0.001 * decodes * context + 0.01 * prompt
                seconds = 1e-3 * (step + 0.5 * bool(prompt))
                rows.append([decodes, context, prompt, seconds, 1e-3 * step])
    return rows


def test_times_between_the_grids_points() -> None:
    times = StepTimes.of(grid_rows())
    assert times.add_s == pytest.approx(0.5e-3)
    steps = np.array([[4, 66, 0, 0], [1, 16, 15, 1], [0, 0, 20, 2], [4, 116, 5, 0]])
    expected = [2.4 + 0.264, 2.1 + 0.016 + 0.15 + 0.5, 2.2 + 1, 2.4 + 0.464 + 0.05]
    assert 1e3 * times(steps) == pytest.approx(expected)
    assert 1e3 * times(np.array([0, 0, 40, 0])) == pytest.approx([2.4]), "beyond the grid"


def test_a_simulation_takes_the_grids_times() -> None:
    """One request: its prompt in two chunks of 24 and 16, then decodes."""
    _, (cell, _) = small("workload.requests=1")
    (request,) = cell.requests()
    prediction = StepPrediction(cell, StepTimes.of(grid_rows()), turnaround_s=0.0)
    records = prediction.simulate([request])
    steps = records.replicas[0].iterations["layer_s"]
    whole, rest = divmod(request.prompt_tokens, 24)
    chunks = [24] * whole + [rest] * bool(rest)
    first = [2 + 0.01 * tokens + 0.5 * (n == 0) for n, tokens in enumerate(chunks)]
    contexts = request.prompt_tokens + np.arange(request.output_tokens - 1)
    assert 1e3 * steps == pytest.approx([*first, *(2.1 + 0.001 * contexts)], rel=1e-3)


def test_totals_by_hand() -> None:
    found = totals_of(*(np.array(row, float) for row in ([0, 1], [0.5, 2.0], [2.5, 2.0], [5, 1])))
    assert found == {"ttft": 0.75, "tpot": 0.5, "latency": 1.75, "throughput": 6 / 2.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.async_scheduling=true", "must be vllm, not asynchronous"),
        ("scenarios.high.policy.watermark=0.1", "must be as in low, whose engine it shares"),
        ("cluster.pp=2", "one process is run"),
    ],
)
def test_what_it_does_not_run(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_cells(small(change)[1])


def test_too_few_blocks_for_the_grid() -> None:
    with pytest.raises(UserError, match=r"num_blocks: .* the grid holds 15 sequences at a time"):
        grid_work(small("policy.max_num_seqs=16")[1])


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(vllm_session.VARIABLE, raising=False)
    monkeypatch.setattr(vllm_session.importlib.util, "find_spec", lambda name: None)
    told = CliRunner().invoke(app, ["validate", "--engine", "vllm", "--out", str(tmp_path / "out")])
    assert told.exit_code == 2 and "no vLLM: install the extra" in told.output
    monkeypatch.setenv(vllm_session.VARIABLE, str(tmp_path / "nowhere"))
    told = CliRunner().invoke(app, ["validate", "--engine", "vllm", "--out", str(tmp_path / "out")])
    assert told.exit_code == 2 and "nowhere: No such file" in told.output
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    not os.environ.get(vllm_session.VARIABLE),
    reason=f"no vLLM: name in {vllm_session.VARIABLE} a Python with it",
)
def test_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine does, decisions are those of our policy."""
    assert find_python()
    monkeypatch.setattr(vllm_session, "TIMES", 2)
    out = tmp_path / "out"
    words = [word for each in SMALL for word in ("--set", each)]
    done = CliRunner().invoke(app, ["validate", "--engine", "vllm", "--out", str(out), *words])
    assert done.exit_code == 0, done.output
    found = json.loads((out / "validation.json").read_text())
    assert all(cell["parity"] == 1 for cell in found["cells"].values())
