"""docs/engines.md: what it says of free micro-batches holds for fewer requests, too."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.simulator.views.metrics import Analysis


@pytest.fixture(scope="module")
def summaries() -> dict[str, dict[str, Any]]:
    experiment = load_experiment("engines_pp", ["workload.requests=80"])
    found = {}
    for name, scenario in experiment.scenarios.items():
        deployment = deploy(scenario, experiment.sources[name])
        analysis = Analysis(deployment.simulate())
        found[name] = analysis.summary(deployment.model, deployment.device, scenario.cluster.tp)
    return found


def test_the_ledgers(summaries: dict[str, dict[str, Any]]) -> None:
    def share(name: str, account: str) -> float:
        ledger = summaries[name]["ledger_s"]
        return float(ledger[account] / ledger["wall"])

    for free in ("vllm", "vllm_async"):
        assert share(free, "pb2") < 0.5 * share("sarathi", "pb2")
        assert share(free, "pb3") > share("sarathi", "pb3")
    assert share("sarathi_serve", "pb2") == pytest.approx(share("sarathi", "pb2"), rel=0.2)
    assert share("vllm_async", "pb3") < share("vllm", "pb3")


def test_latencies_and_empty_iterations(summaries: dict[str, dict[str, Any]]) -> None:
    sarathi, vllm = summaries["sarathi"], summaries["vllm"]
    assert vllm["ttft_s"]["p50"] < 0.7 * sarathi["ttft_s"]["p50"]
    assert vllm["tbt_s"]["p99"] > sarathi["tbt_s"]["p99"]
    assert "empty_iterations" not in sarathi and vllm["empty_iterations"] > 0
