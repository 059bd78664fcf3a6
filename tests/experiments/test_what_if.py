"""Op times multiplied, lengths by percentile, numbers after the warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.profiler.facts.ops import OPS
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import SMALL, message


def deployed(folder: Path, *assignments: str) -> Deployment:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    experiment = load_experiment(path, assignments)
    return deploy(experiment.scenarios["sarathi"], experiment.sources["sarathi"])


def test_all_ops_twice_as_long_take_twice_as_long(tmp_path: Path) -> None:
    """But for the links' share of it, and what whole layers add, here nothing."""
    once = deployed(tmp_path)
    twice = deployed(tmp_path, *(f"engine.op_scale.{op}=2" for op in OPS))
    makespans = [each.simulate().end_s for each in (once, twice)]
    assert makespans[1] == pytest.approx(2 * makespans[0], rel=1e-3)
    assert twice.ops is deployed(tmp_path, *(f"engine.op_scale.{op}=2" for op in OPS)).ops
    for op in ("attn_prefill", "all_reduce", "lm_head"):
        slower = deployed(tmp_path, f"engine.op_scale.{op}=3").simulate().end_s
        assert makespans[0] < slower < 2 * makespans[0], op


def test_an_unknown_op_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    assert "engine.op_scale" in message(path, "engine.op_scale.attention=2")


def test_lengths_by_percentile(tmp_path: Path) -> None:
    lengths = "{kind: quantiles, prompt: {p0: 10, p50: 100, p100: 500}, decode: {p0: 5, p100: 5}}"
    given = ("workload.requests=4000", f"workload.lengths={lengths}", "workload.pd_ratio=null")
    requests = deployed(tmp_path, *given).requests
    prompt = np.array([request.prompt_tokens for request in requests])
    assert np.percentile(prompt, [0, 50, 75, 100]) == pytest.approx([10, 100, 300, 500], rel=0.08)
    assert {request.output_tokens for request in requests} == {5}


@pytest.mark.parametrize("prompt", ["{p0: 10, p50: 5, p100: 500}", "{p10: 10, p100: 500}"])
def test_percentiles_rise_from_0_to_100(prompt: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    lengths = f"{{kind: quantiles, prompt: {prompt}, decode: {{p0: 1, p100: 9}}}}"
    given = (f"workload.lengths={lengths}", "workload.pd_ratio=null")
    assert "must have p0 and p100" in message(path, *given)


def test_numbers_after_the_warm_up(tmp_path: Path) -> None:
    """By hand, from the tables: the requests after MSER-5's first ones, and the tokens since."""
    arrivals = ("workload.arrivals={kind: poisson, rate: 2}", "workload.requests=200")
    analysis = Analysis(deployed(tmp_path, *arrivals).simulate())
    found, requests = analysis.after_warmup(), analysis.requests
    rest = requests.sort_values("arrival_s").iloc[found["warmup_requests"] :]
    for name in ("ttft_s", "tbt_max_s", "latency_s"):
        assert found[name]["mean"] == pytest.approx(rest[name].mean())
        assert found[name]["p90"] == pytest.approx(np.percentile(rest[name], 90))
    everything = analysis.tbt_quantiles((0.5, 0.9, 0.99))
    if not found["warmup_requests"]:
        assert [found["tbt_s"][q] for q in ("p50", "p90", "p99")] == everything
    gaps, counts = analysis.spans[0].token_gaps()
    since = float(requests["finish_s"].max())
    late, few = analysis.spans[0].token_gaps(since)
    assert 1 <= few.sum() < counts.sum()
    assert set(late) <= set(gaps)
