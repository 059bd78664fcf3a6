"""The host's constants in a configuration: defaults by stack, and what a frontend adds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from experiments.config.deployment import Deployment
from experiments.config.host_time import host_times
from experiments.config.loading import load_experiment
from experiments.run.experiment import deploy_all
from simulator.op_times.iteration import NO_HOST
from simulator.views.metrics import Analysis

TEXT = """\
name: hosts
model: llama-3.1-8b
device: h100-80g-sxm
workload:
  requests: 12
  lengths: {kind: random, prompt: 64, decode: 8, range_ratio: 0.8}
  arrivals: {kind: closed_loop, clients: 4}
  declared: exact
cluster: {max_length: 128}
policy: {name: vllm}
scenarios: {it: {}}
"""


def deployed(folder: Path, *assignments: str) -> Deployment:
    path = folder / "hosts.yaml"
    path.write_text(TEXT)
    return deploy_all(load_experiment(path, ("stack=vllm", *assignments)))["it"]


def test_a_stack_has_its_constants_and_says_so(tmp_path: Path) -> None:
    found = deployed(tmp_path)
    shipped = asdict(host_times().stacks["vllm"])
    assert shipped["host_iteration_s"] > 0 and shipped["host_sequence_s"] > 0
    engine = found.scenario.engine
    assert all(getattr(engine, key) == shipped[key] for key in host_times().constants)
    assert found.predictor.cost.host.iteration_s == shipped["host_iteration_s"]
    (note,) = (note for note in found.notes if note.startswith("host time of vllm: "))
    assert host_times().fitted_to in note and "frontend_s" in note


def test_what_is_given_stays(tmp_path: Path) -> None:
    given = ("engine.host_iteration_s=0", "engine.host_sequence_s=0.001", "engine.frontend_s=0")
    found = deployed(tmp_path, *given)
    assert (found.scenario.engine.host_iteration_s, found.scenario.engine.frontend_s) == (0, 0)
    assert found.scenario.engine.host_sequence_s == 0.001
    assert not any(note.startswith("host time") for note in found.notes)


def test_without_a_stack_there_is_none() -> None:
    run = deploy_all(load_experiment("first_experiment"))["sarathi"]
    engine = run.scenario.engine
    assert (engine.host_iteration_s, engine.host_sequence_s, engine.frontend_s) == (0, 0, 0)
    assert run.predictor.cost.host == NO_HOST


def test_a_frontend_counts_in_ttft_and_latency_and_delays_the_next_request(tmp_path: Path) -> None:
    plain, later = (
        Analysis(deployed(tmp_path, f"engine.frontend_s={s}").simulate()).request_columns
        for s in (0.0, 0.25)
    )
    first = slice(0, 4)  # the burst: the same schedule
    assert later["ttft_s"][first] == pytest.approx(plain["ttft_s"][first] + 0.25, abs=1e-8)
    within = later["finish_s"] - later["arrival_s"]
    assert later["latency_s"] == pytest.approx(within + 0.25, abs=1e-8)
    finish = np.sort(later["finish_s"])[:8]
    assert np.sort(later["arrival_s"])[4:] == pytest.approx(finish + 0.25, abs=1e-8)
