"""`recommend --policy sarathi`: the chunk size and batch cap that it finds."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest

from sarathi_sim.experiments.report.capacity_answers import chunk_section
from sarathi_sim.experiments.run.machine import FIXED, Machine, advise
from sarathi_sim.experiments.run.traffic import Demand, demand_of
from sarathi_sim.policies.sarathi import Sarathi
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.physics.shard_times import DeviceTimes
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.op_times.modelled import modelled_times
from sarathi_sim.simulator.views.ledger import Spans
from tests.experiments.small_config import called, refused


def machine(device: str, model: str) -> Machine:
    return Machine(modelled_times(DeviceTimes(device, load_model(model), 1)), device)


@pytest.fixture(scope="module")
def a6000() -> Machine:
    return machine("a6000", "llama-13b")


def test_advice_on_the_papers_settings() -> None:
    """1K, B = 18, at the paper's P:D: chunk 256, below the lengths that were read."""
    words = "recommend --policy sarathi --gpus 1 --model llama-13b --device a6000 --workload 1K@14"
    done = called(*words.split(), "--seqs", 18, "--json")
    answer, *_ = done.stderr.splitlines()
    assert answer.startswith("best: chunk 256, batch 18, at most 18 fit, 2,615 tokens/s; next: ")
    found = json.loads(done.stdout)
    assert found["answer"] == answer
    assert found["assumptions"] == [
        "workload: requests of 1,024 tokens in total, P:D 14: prompts: mean 956, P50 956, P99 956 "
        "tokens; outputs: mean 68, P50 68, P99 68"
    ]
    first = {one["chunk"]: one for one in found["verified"][::-1]}
    assert max(first.values(), key=lambda one: one["tokens_per_s"])["chunk"] == 256


def simulated(machine: Machine, demand: Demand, chunk: int, batch: int) -> tuple[float, float]:
    """Tokens/s and P99 of the time between tokens, of a request at a time where it must be."""
    prompt, output = demand.requests(360)
    records = machine.run(Sarathi(chunk, 128, "reserve"), batch, prompt, output)
    gaps, weights = Spans(records.replicas[0]).token_gaps()
    between = np.repeat(gaps, weights.astype(int))
    tbt_s = float(np.quantile(between, 0.99, method="inverted_cdf"))
    return int((prompt + output).sum()) / records.end_s, tbt_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("1K@14", None), ("1K@5..50", 0.09), ("2K@27", None), ("512:64~0.5", 0.085)],
)
def test_nothing_beats_the_advice(a6000: Machine, text: str, limit_s: float | None) -> None:
    """Against every chunk and batch, simulated: the best is found; a larger cap never has less."""
    demand, limit, cap, before = demand_of(text), limit_s or math.inf, 9, 0.0
    every = {}
    for chunk, batch in product((128, 256, 384, 512, 640, 768, 1024), range(2, cap + 1)):
        tokens_per_s, tbt_s = simulated(a6000, demand, chunk, batch)
        if tbt_s <= limit:
            every[chunk, batch] = tokens_per_s
    for most in range(2, cap + 1):
        found = advise(a6000, demand, batch_cap=most, tbt_limit_s=limit_s)
        best = found["verified"][0]
        inside = {key: rate for key, rate in every.items() if key[1] <= most}
        assert best["tokens_per_s"] == pytest.approx(max(inside.values()))
        assert (best["chunk"], best["batch"]) == max(inside, key=inside.__getitem__)
        assert best["tokens_per_s"] >= before and best["tbt_p99_s"] <= limit
        before = best["tokens_per_s"]
    for chunk in FIXED if limit_s is None else ():
        rate = max(rate for key, rate in every.items() if key[0] == chunk)
        of_chunk = [one["tokens_per_s"] for one in found["verified"] if one["chunk"] == chunk]
        assert max(of_chunk) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("limit_s", "cap", "chosen"),
    [
        (0.09, 18, (256, 12)),
        pytest.param(0.09, 12, (256, 12), marks=pytest.mark.slow),
        pytest.param(0.095, 18, (256, 16), marks=pytest.mark.slow),
    ],
)
def test_the_batch_that_just_keeps_the_limit(
    a6000: Machine, limit_s: float, cap: int, chosen: tuple[int, int]
) -> None:
    found = advise(a6000, demand_of("1K@5..50"), batch_cap=cap, tbt_limit_s=limit_s)
    assert (found["verified"][0]["chunk"], found["verified"][0]["batch"]) == chosen


@pytest.mark.slow
def test_a_limit_on_the_time_between_tokens_is_kept(a6000: Machine) -> None:
    demand = demand_of("1K@28")
    free = advise(a6000, demand, batch_cap=18)
    limited = advise(a6000, demand, batch_cap=18, tbt_limit_s=0.11)
    assert free["excluded"] is None and free["verified"][0]["tbt_p99_s"] > 0.11
    assert limited["excluded"]["tbt_p99_s"] > 0.11
    answer = chunk_section(limited | {"model": "llama-13b"}).answer
    assert "; limiting metric: p99 tbt (chunk 512, batch 18, +" in answer
    assert all(one["tbt_p99_s"] <= 0.11 for one in limited["verified"])
    assert limited["verified"][0]["tokens_per_s"] < free["verified"][0]["tokens_per_s"]
    with pytest.raises(UserError, match="no chunk size and batch keep it"):
        advise(a6000, demand, tbt_limit_s=0.001)
    with pytest.raises(UserError, match="--seqs 30: does not fit: at most 20"):
        advise(a6000, demand, batch_cap=30)


@pytest.mark.slow
def test_one_request_at_a_time() -> None:
    """LLaMA-33B leaves an A100 room for a single sequence of 3K."""
    found = advise(machine("a100-80g-sxm", "llama-33b"), demand_of("3K@10"))
    assert found["largest_batch"] == 1
    assert {one["batch"] for one in found["verified"]} == {1}


def test_more_decodes_than_the_chunk_has_tokens(a6000: Machine) -> None:
    found = advise(a6000, demand_of("64@1"))
    assert found["largest_batch"] == found["verified"][0]["batch"] == 256


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rate", "3"], "--rate: has no effect with --policy sarathi"),
        (["--set", "tolerance=0.2"], "--set tolerance: has no effect with --policy sarathi"),
        (["--out", "here"], "--out: has no effect with --policy sarathi"),
        (["--slo", "p99 ttft 1s"], "--slo p99 ttft 1s: must be one clause, as 'p99 tbt 100ms'"),
    ],
)
def test_what_has_no_effect_is_refused(more: list[str], message: str) -> None:
    asked = ("--model", "llama-13b", "--device", "a6000", "--workload", "1K@14", "--gpus", "1")
    assert message in refused("recommend", "--policy", "sarathi", *asked, *more)
