"""The parts of a run's time, and the one declaration of every metric."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import SHAPE, load_experiment
from sarathi_sim.simulator.views.explain import (
    LATENCY_PARTS,
    STAGE_PARTS,
    Explanation,
    breakdown,
    explain,
)
from sarathi_sim.simulator.views.metric_registry import (
    METRICS,
    STEADY,
    Better,
    known,
    number_text,
    quantity,
)
from sarathi_sim.simulator.views.metrics import Analysis

GPT3 = ("workload.requests=60", "batching.max_batch=4")
CASES = {
    "as the demo": (),
    "jitter": ("engine.jitter=0.2",),
    "blocking": ("engine.send=blocking", "engine.turnaround_s=0.004"),
    "lazy, free": ("batching.formation=lazy", "batching.micro_batches=free"),
    "host": ("engine.host_iteration_s=0.001", "engine.host_sequence_s=3.0e-5"),
    "frontend": ("engine.frontend_s=0.05",),
    "arrivals": ("workload.arrivals={kind: poisson, rate: 0.5}",),
    "uneven": ("cluster.layers_per_stage=[12,12,12,12,12,12,12,12]",),
}


def run(scenario: str, *changes: str) -> tuple[Deployment, Analysis, Explanation]:
    experiment = load_experiment("gpt3_pp", [*GPT3, *changes])
    deployment = deploy(experiment.scenarios[scenario], experiment.sources[scenario])
    analysis = Analysis(deployment.simulate())
    return deployment, analysis, explain(analysis, deployment.predictor)


@pytest.mark.parametrize("scenario", ["orca_pp", "sarathi_pp"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_parts_add_up_exactly(scenario: str, changes: tuple[str, ...]) -> None:
    _, analysis, parts = run(scenario, *changes)
    assert tuple(parts.stages) == STAGE_PARTS
    assert set(parts.latency) == set(LATENCY_PARTS)
    assert sum(parts.stages.values()) == parts.wall == Fraction(analysis.records.end_s)
    assert sum(parts.latency.values()) == parts.mean_latency
    latency = analysis.requests["latency_s"].to_numpy()
    # (Latencies are rounded when the frontend's time, no whole number of quanta, is added.)
    mean = sum(map(Fraction, latency), Fraction()) / len(latency)
    assert abs(parts.mean_latency - mean) < 1e-13
    frontend = analysis.records.frontend_s
    assert parts.latency["frontend"] == Fraction(frontend)
    assert frontend or parts.mean_latency == mean
    queueing = analysis.requests["queueing_s"].to_numpy()
    assert parts.latency["queueing"] == sum(map(Fraction, queueing), Fraction()) / len(queueing)
    signed = {"jitter", "chunking", "mixing"}
    for name, value in (parts.stages | parts.latency).items():
        assert value >= 0 or name in signed, name


def test_free_micro_batches_with_empty_ones_among_them() -> None:
    """Prompts are longer than any chunk, and empty iterations take no time of any op."""
    changes = ("workload.requests=40", "cluster.pp=2", "workload.arrivals.rate=2")
    experiment = load_experiment("vllm_llama3_8b", changes)
    deployment = deploy(experiment.scenarios["vllm"], experiment.sources["vllm"])
    analysis = Analysis(deployment.simulate())
    log = analysis.records.replicas[0]
    empty = log.iterations["prefill_tokens"] + log.iterations["decodes"] == 0
    assert empty.any()
    for op, use in breakdown(log, deployment.predictor).items():
        assert not use.time_s[empty].any(), op
    parts = explain(analysis, deployment.predictor)
    assert sum(parts.stages.values()) == parts.wall == Fraction(analysis.records.end_s)
    assert sum(parts.latency.values()) == parts.mean_latency
    assert max(request.prompt_tokens for request in deployment.requests) > 2048


def test_parts_are_what_they_say() -> None:
    deployment, analysis, parts = run("sarathi_pp")
    log = analysis.records.replicas[0]
    tokens = log.iterations["prefill_tokens"] + log.iterations["decodes"]
    layers = sum(log.layers)
    linear = sum(op(tokens).sum() for op in deployment.ops.linear.values()) * layers / 8
    assert float(parts.stages["linear"]) == pytest.approx(linear, rel=1e-6)
    ledger = analysis.ledger
    assert parts.stages["pb1"] == Fraction(ledger["pb1_s"].sum()) / 8
    assert parts.stages["jitter"] == 0
    # Prompts processed whole have no chunking; in chunks they read their cache again and again.
    assert parts.stages["chunking"] > 0
    _, _, whole = run("orca_pp")
    assert abs(float(whole.stages["chunking"])) < 1e-6
    assert float(whole.stages["prefill_attention"]) == pytest.approx(
        float(parts.stages["prefill_attention"]), rel=1e-6
    )


def test_host_time_is_on_top_on_the_first_stage() -> None:
    """2 ms an iteration and 0.25 ms a sequence in it."""
    given = ("engine.host_iteration_s=0.002", "engine.host_sequence_s=2.5e-4")
    _, analysis, parts = run("sarathi_pp", *given)
    columns = analysis.records.replicas[0].iterations
    sequences = columns["decodes"] + columns["chunks"]
    spent = 0.002 * len(sequences) + 2.5e-4 * sequences.sum()
    assert float(parts.stages["host"]) == pytest.approx(spent / 8, rel=1e-5)
    _, plain, without = run("sarathi_pp")
    assert without.stages["host"] == 0
    first = plain.records.replicas[0].iterations["first_s"][0]  # one chunk, the same in both
    assert columns["first_s"][0] - first == pytest.approx(0.00225, rel=1e-6)


def test_one_request_alone() -> None:
    """Nothing waits for anything, so the latency is the ops and the transfers."""
    _, analysis, parts = run("orca_pp", "workload.requests=1")
    assert parts.latency["queueing"] == parts.latency["waiting_for_stages"] == 0
    assert parts.latency["between_iterations"] == 0
    sends = 7 * analysis.records.replicas[0].iterations["send_s"].sum()
    assert parts.latency["transfers"] == Fraction(float(sends))
    busy = np.sum(analysis.records.replicas[0].stage_durations())
    assert parts.mean_latency == Fraction(float(busy)) + Fraction(float(sends))


# The one declaration of every metric: complete, documented, and what all others read


def _paths(node: object, before: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [before.rstrip(".")]
    return [path for key, below in node.items() for path in _paths(below, f"{before}{key}.")]


def test_every_number_of_a_summary_has_a_name_and_the_path_it_is_found_by() -> None:
    for path in _paths(SHAPE):
        found = quantity(path)
        assert (found is None) == (path == "steady.state"), path
        if found is not None:
            assert found.path == path
            assert "_" not in found.axis, "no raw key on an axis"


@pytest.mark.parametrize("path", ["", "steady", "steady.tbt_s.p50", "tbt_s.mean", "mfu.p50", "x"])
def test_what_is_no_metric(path: str) -> None:
    assert quantity(path) is None
    with pytest.raises(KeyError):
        known(path)


def test_directions_and_texts() -> None:
    better = {key: metric.better for key, metric in METRICS.items()}
    for key in ("makespan_s", "tbt_s", "bubble_s", "bubble_share", "rejected", "gpus", *STEADY):
        assert better[key] is Better.LESS
    for key in ("requests_per_s", "tokens_per_s", "output_tokens_per_s", "mfu", "finished"):
        assert better[key] is Better.MORE
    assert better["mean_batch"] is Better.NEITHER
    # A share is printed in percent, and a count whole.
    assert known("mfu").text(0.1314) == "13.14"
    assert known("gpus").text(64) == "64"
    texts = [number_text(value) for value in (0.0, 0.04849, 0.5, 5.988, 100.26, 1234.5, 12345)]
    assert texts == ["0", "0.0485", "0.5", "5.99", "100.3", "1,234", "12,345"]
