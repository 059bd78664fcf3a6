"""Questions whose answers once were too high: the winner runs again, with other seeds and longer.

They take half a minute or more each: ``python -m pytest -m slow``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sarathi_sim.experiments.cli.app import app
from tests.answers.judge import judged

pytestmark = pytest.mark.slow


def answered(out: Path, *words: str) -> dict[str, Any]:
    """The ``summary.json`` of a command."""
    done = CliRunner().invoke(app, [*words, "--out", str(out), "--quiet"])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def judgement(one: dict[str, Any], slo: str, folder: Path, factor: float = 1.0) -> bool:
    """Whether a deployment keeps the SLO at so many times its load (its limits 5 % wider at the
    load itself)."""
    found = judged(one["name"], slo, one["scenario"], factor, (101, 102), folder, times=4)
    return found.nearly if factor == 1 else found.keeps


MANY = (
    *("recommend", "--model", "llama-3.1-8b", "--device", "h100-80g-sxm", "--stack", "vllm"),
    *("--slo", "p90 ttft 2s, p90 tpot 50ms", "--workload", "750:75~0.33", "--budget", "8192"),
    *("--seqs", "256", "--max-length", "2048"),
)


def test_many_replicas_carry_as_often_what_one_carries(tmp_path: Path) -> None:
    """Once 1,014 requests/s on 16 GPUs and 5,001 on 64, where they served 682 and 2,600."""
    for gpus in (16, 64):
        found = answered(tmp_path / str(gpus), *MANY, "--gpus", str(gpus))
        first = found["deployments"][0]
        assert 40 * gpus < first["capacity"] < 46 * gpus
        assert first["capacity"] <= first["saturation"]
        assert first["at_capacity"]["holds"] and not first["at_capacity"]["overloaded"]
        assert judgement(first, found["slo"], tmp_path)
        assert not judgement(first, found["slo"], tmp_path, 1.15)


def test_a_wide_tolerance_carries_no_more(tmp_path: Path) -> None:
    """Once 8 GPUs for 50 requests/s at a tolerance of 0.4, and 12 at 0.2; 16 it takes."""
    words = [
        *("recommend", "--model", "qwen3-32b", "--device", "h100-80g-sxm", "--rate", "50"),
        *("--stack", "sglang", "--slo", "p90 ttft 3s, p90 tpot 60ms", "--budget", "4096"),
        *("--workload", "1536:192~0.33", "--seqs", "128"),
    ]
    for tolerance in ("0.4", "0.05"):
        found = answered(tmp_path / tolerance, *words, "--tolerance", tolerance)
        first = found["deployments"][0]
        assert (first["gpus"], first["carries"]) == (16, 50)
        assert judgement(first, found["slo"], tmp_path)
        assert "one server fewer is too few" in found["answer"]
        paid = first["per_million_output_tokens"] * 50 * 192 * 3600 / 1e6
        assert paid == pytest.approx(first["per_hour"], rel=0.02), "the price of that rate"


def test_the_number_of_replications_moves_no_capacity(tmp_path: Path) -> None:
    """Once 23.0 of 3, 20.9 of 10 and 17.4 of 100 replications, beside the interval of the mean."""
    found = {}
    for count in (5, 10, 30):
        path = tmp_path / f"{count}.yaml"
        path.write_text(REPLICATED.format(count=count))
        (one,) = answered(tmp_path / str(count), "capacity", str(path), "--no-bands")["deployments"]
        low, high = one["interval"]
        assert low <= one["capacity"] <= high
        found[count] = one["capacity"], low, high
    assert found[5][0] == pytest.approx(found[30][0], rel=0.05)
    assert found[10][0] == pytest.approx(found[30][0], rel=0.03)
    assert found[10][1] <= found[30][0] <= found[10][2]


REPLICATED = """\
name: cap
model: llama-3-8b
device: a100-80g-sxm
workload:
  lengths: {{kind: uniform, min: 100, max: 900}}
  pd_ratio: 4
cluster: {{max_length: 1024}}
policy: {{name: vllm, max_num_batched_tokens: 512}}
capacity:
  slo: p90 ttft 0.5s
  tolerance: 0.02
  requests: 200
  replications: {{least: {count}, most: {count}}}
"""
