"""`bench` times two simulations of one and the same system."""

from __future__ import annotations

from experiments.config.deployment import deploy
from experiments.config.loading import load_experiment
from experiments.run.bench import _fast, _textbook
from tests.simulator.test_textbook import assert_bitwise_equal

SWITCHES = (
    "workload.requests=40",
    "workload.arrivals={kind: poisson, rate: 2}",
    "cluster.replicas=2",
    "cluster.router=least_tokens",
    "batching.formation=lazy",
    "batching.micro_batches=free",
    "engine.send=blocking",
    "engine.turnaround_s=0.01",
    "engine.jitter=0.1",
)


def test_both_sides_heed_every_switch() -> None:
    experiment = load_experiment("gpt3_pp", SWITCHES)
    deployment = deploy(experiment.scenarios["orca_pp"], experiment.sources["orca_pp"])
    assert_bitwise_equal(_fast(deployment), _textbook(deployment))
