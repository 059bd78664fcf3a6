"""The host's constants in a configuration: defaults by stack, and what a frontend adds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.inputs import host_of, host_times
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.run.experiment import deploy_all
from sarathi_sim.simulator.op_times.iteration import NO_HOST
from sarathi_sim.simulator.views.metrics import Analysis

TEXT = """\
name: hosts
model: llama-3.1-8b
device: h100-80g-sxm
workload:
  requests: 12
  lengths: {kind: random, prompt: 64, decode: 8, tool: sglang, range_ratio: 0.8}
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
    assert engine.launch_layer_s == 0
    assert found.predictor.cost.host.iteration_s == shipped["host_iteration_s"]
    (note,) = (note for note in found.notes if note.startswith("host time: vllm's, "))
    assert host_times().fitted_to in note and "host_sequence_s" in note
    again = deploy(found.scenario, Source("config.yaml of a result", "it", {}, ()))
    assert note in again.notes, "what is simulated again says it, too"


def test_a_mixture_has_the_constants_of_mixtures(tmp_path: Path) -> None:
    """A frontend's time a token counts for the mean prompt, a launch for each call of a layer."""
    sizes = ("model=gpt-oss-20b", "workload.lengths.range_ratio=1", "workload.lengths.prompt=100")
    found = deployed(tmp_path, *sizes)
    shipped, engine = host_times(mixtures=True).stacks["vllm"], found.scenario.engine
    assert shipped != host_times().stacks["vllm"]
    assert engine.host_sequence_s == shipped.host_sequence_s
    prompts = [request.prompt_tokens for request in found.requests]
    tokens_s = shipped.frontend_token_s * sum(prompts) / len(prompts)
    assert tokens_s > 0 and engine.frontend_s == pytest.approx(shipped.frontend_s + tokens_s)
    assert engine.launch_layer_s == pytest.approx(12 * shipped.launch_s)
    assert found.predictor.cost.host == host_of(engine)
    (note,) = (note for note in found.notes if note.startswith("host time: vllm's, "))
    assert "launch_layer_s" in note and host_times(mixtures=True).fitted_to in note
    given = deployed(tmp_path, *sizes, "engine.launch_layer_s=0", "engine.frontend_s=0.25")
    assert (given.scenario.engine.launch_layer_s, given.scenario.engine.frontend_s) == (0, 0.25)


def test_what_is_given_stays(tmp_path: Path) -> None:
    given = ("engine.host_iteration_s=0", "engine.host_sequence_s=0.001", "engine.frontend_s=0")
    found = deployed(tmp_path, *given)
    assert (found.scenario.engine.host_iteration_s, found.scenario.engine.frontend_s) == (0, 0)
    assert found.scenario.engine.host_sequence_s == 0.001
    (note,) = (note for note in found.notes if note.startswith("host time: as configured, "))
    assert note.endswith(", host_sequence_s 1 ms")


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
