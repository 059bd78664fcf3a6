"""A closed loop and random lengths, asked for in a configuration."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.simulator.views.metrics import Analysis

RANDOM = "workload.lengths={kind: random, prompt: 100, decode: 20, tool: sglang, range_ratio: 0.8}"
CLOSED = "workload.arrivals={kind: closed_loop, clients: 4, think_s: 0.5}"


def deployed(*changes: str) -> Deployment:
    base = ("workload.pd_ratio=null", "workload.requests=60", RANDOM, *changes)
    experiment = load_experiment("first_experiment", base)
    return deploy(experiment.scenarios["sarathi"], experiment.sources["sarathi"])


def test_random_lengths_are_drawn_apart() -> None:
    requests = deployed("workload.requests=5000").requests
    prompt = np.array([request.prompt_tokens for request in requests])
    output = np.array([request.output_tokens for request in requests])
    assert (prompt.min(), prompt.max()) == (80, 100) and (output.min(), output.max()) == (16, 20)
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.05
    assert prompt.mean() == pytest.approx(90, abs=0.5)


def test_clients_wait_for_their_answers_and_think() -> None:
    found = Analysis(deployed(CLOSED).simulate()).requests
    arrival, finish = found["arrival_s"].to_numpy(), found["finish_s"].to_numpy()
    assert (arrival[:4] == 0).all() and (np.diff(arrival[4:]) >= 0).sum() < 56
    sent = np.sort(arrival)
    # When the n-th request after the first four is sent, at least n have finished.
    assert (np.sort(finish)[:56] <= sent[4:]).all()
    thought = np.sort(arrival[4:]) - np.sort(finish)[:56]
    assert 0.25 < thought.mean() < 1.0
    again = Analysis(deployed(CLOSED).simulate()).requests
    assert again.equals(found)
    other = Analysis(deployed(CLOSED, "seed=1").simulate()).requests
    assert not np.array_equal(other["arrival_s"], arrival)


def test_a_run_twice_from_one_deployment_is_the_same() -> None:
    deployment = deployed(CLOSED)
    first, second = (Analysis(deployment.simulate()).requests for _ in range(2))
    assert first.equals(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.arrivals={kind: closed_loop, clients: 0}", "arrivals.clients"),
        ("workload.arrivals={kind: closed_loop}", "arrivals.clients: this key is missing"),
        ("workload.pd_ratio=3", "workload.pd_ratio: value 3"),
        ("workload.lengths.range_ratio=0", "lengths.range_ratio"),
    ],
)
def test_mistakes(change: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployed(CLOSED, change)
    assert message in str(caught.value)


def test_sessions_are_no_closed_loop() -> None:
    with pytest.raises(ConfigError, match="turns wait for answers already"):
        deployed(CLOSED, "workload.sessions={max_turns: 3, think_s: 1}")
