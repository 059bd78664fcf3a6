"""Prefill and decode workers that `recommend` proposes: how many of each, bounds, the winner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.capacity.answer import load_prices
from sarathi_sim.experiments.capacity.bounds import (
    alone,
    as_decode,
    as_prefill,
    most_requests_per_s,
    new_tokens,
    saturation,
    sent_per_s,
)
from sarathi_sim.experiments.capacity.options import (
    Option,
    Wanted,
    deployable,
    layouts,
    named,
)
from sarathi_sim.experiments.capacity.pool_layouts import (
    MOST_PAIRS,
    Pair,
    _described,
    pool_layouts,
)
from sarathi_sim.experiments.capacity.recommend import (
    Worth,
    answer_of,
    recommend,
    recommend_files,
    whole,
    winner,
)
from sarathi_sim.experiments.capacity.search import AT_ONCE, Probe
from sarathi_sim.experiments.capacity.slo import CapacitySection, Replications, parse_slo
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import default_handover, deploy
from sarathi_sim.experiments.config.loading import check_scenario, load_experiment
from sarathi_sim.experiments.config.scenario import POOLS
from sarathi_sim.experiments.config.two_pools import pool_of
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_laboratory import opened, question, verdict_of

HERE = Source("", "x", {}, ())
SLO = "p90 ttft 1s, p90 tbt 60ms"
GAPS = "p90 ttft 1s, p90 tbt_max 60ms"


wanted = partial(
    question,
    **{"model": "llama-3.1-8b", "device": "a100-80g-sxm", "gpus": 4, "slo": SLO, "pools": True},
    **{"workload": "2000:100", "seqs": "32", "budget": "512,2048", "stack": "vllm"},
)


def pooled(asked: Wanted) -> tuple[list[Option], list[Option]]:
    """The deployments without pools, and those with."""
    options, _ = deployable(asked)
    prices = load_prices(None)
    described = pool_layouts(asked, options, parse_slo(asked.section.slo), prices.of)
    found, dropped = deployable(asked, described)
    assert not dropped
    return options, found


def test_the_workers_by_hand() -> None:
    """A prefill worker of one GPU that 2 requests/s saturate, and a decode worker of two that 5 do.

    Eight GPUs take 4 and 2 of them, 8 requests/s; 5 and 1 make 5, 3 and 2 make 6. At 6 requests/s
    3 prefill workers are saturated, and 1.2 decode workers; at three quarters of their load it
    takes 4 and 1.6, at half 6 and 2.4, which are twelve GPUs.
    """
    worker: Any = (SimpleNamespace(gpus=1), SimpleNamespace(gpus=2))
    pair = Pair(*worker, rates=(2.0, 5.0))
    assert pair.on(8) == [(4, 2), (5, 1), (3, 2)]
    assert [pair.saturation(each) for each in pair.on(8)] == [8.0, 5.0, 6.0]
    assert pair.for_rate(6.0, 12) == [(3, 2), (4, 2), (6, 3)]
    assert pair.for_rate(6.0, 11) == [(3, 2), (4, 2)]
    assert pair.on(2) == [] and pair.on(3) == [(1, 1)]


@pytest.mark.slow
def test_few_deployments_with_pools_on_the_gpus() -> None:
    asked = wanted()
    _, found = pooled(asked)
    assert 0 < len(found) <= 3 * MOST_PAIRS
    assert all(one.pooled and one.gpus <= 4 and one.alike == 1 for one in found)
    assert {one.point["budget"] for one in found} == {2048}
    names = [one.name for one in found]
    assert "3 prefill TP 1 + 1 decode TP 1 budget 2048 seqs 32" in names
    for one in found:
        prefill, decode = (pool.scenario.cluster for pool in one.deployment.pools)
        layout = f"{prefill.replicas} prefill TP {prefill.tp} + {decode.replicas} decode TP "
        assert one.point["layout"] == f"{layout}{decode.tp} budget 2048"
        assert whole(one, 3) is one and one.gpus == (
            prefill.replicas * prefill.tp + decode.replicas * decode.tp
        )
    # A limit that no prompt keeps alone leaves none.
    assert pooled(replace(asked, section=CapacitySection(slo="p90 ttft 20ms")))[1] == []


@pytest.mark.slow
def test_the_bound_is_of_what_both_pools_serve() -> None:
    """The decode workers refuse the longer half of the requests, so that the prefill workers serve
    more a second than of all that they could."""
    tree = {
        "model": "llama-3-8b",
        "device": "a100-80g-sxm",
        "workload": {
            "requests": 200,
            "lengths": {"kind": "uniform", "min": 100, "max": 3900},
            "pd_ratio": 20,
            "too_long": "reject",
            "arrivals": {"kind": "at_once"},
        },
        "policy": {"name": "vllm"},
        "disaggregation": {
            "prefill": {"cluster": {"max_length": 4096}},
            "decode": {"cluster": {"max_length": 1000, "replicas": 2}},
        },
    }
    source = Source("", "x", {}, ())
    deployment = deploy(check_scenario(tree, source), source)
    option = Option("x", {}, deployment)
    prefill, _ = deployment.pools
    assert not prefill.refused[0] and 0.5 < deployment.rejected < 1
    served = deployment.summary(Analysis(deployment.simulate()))["requests_per_s"]
    assert saturation(prefill) < 0.6 * served < 0.6 * most_requests_per_s(option)
    longest = new_tokens(prefill).max()
    slo = parse_slo(f"p99 ttft {1e3 * saturation(prefill) ** -1:.0f}ms")
    assert longest > 3000 and not alone(option, slo)[1]


def test_each_pool_has_its_own_layout() -> None:
    """A prefill worker of one GPU shares its experts with no other, whatever decode workers do."""
    asked = wanted(model="qwen3-30b-a3b", device="h100-80g-sxm", budget="512")
    trees = {named(point): tree for point, tree in layouts(asked)}
    names = ["TP 1 budget 512 seqs 32", "TP 2 EP budget 512 seqs 32"]
    one, spread = (
        SimpleNamespace(name=name, gpus=1, point=point, scenario=check_scenario(tree, HERE))
        for point, tree in layouts(asked)
        for name in names
        if named(point) == name
    )
    found = {}
    for pair in ((one, spread), (spread, one)):
        both: Any = pair
        _, tree = _described(asked, Pair(*both, rates=(1.0, 1.0)), (2, 1), trees)
        scenario = check_scenario(tree, HERE)
        pools = [pool_of(scenario, pool, HERE)[0].cluster for pool in POOLS]
        found[pair[0].name] = [(pool.tp, pool.expert_parallel, pool.replicas) for pool in pools]
    assert found == {
        names[0]: [(1, None, 2), (2, True, 1)],
        names[1]: [(2, True, 2), (1, None, 1)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_workers_never_exceed_their_saturation(stack: str) -> None:
    """All requests at once keep every worker busy; the bound of the first pool to saturate is
    near."""
    _, found = pooled(wanted(stack=stack, gpus=2, workload="1000:50", budget="2048"))
    (one,) = found
    full = one.at(Probe(AT_ONCE, 0, 300), "rate").scenario
    deployment = deploy(full, Source("", "x", {}, ()))
    served = deployment.summary(Analysis(deployment.simulate()))["requests_per_s"]
    most = most_requests_per_s(one)
    assert 0.5 < served / most <= 1.0
    prefill, decode = one.deployment.pools
    sent = sent_per_s(prefill, default_handover(prefill), one.deployment.requests)
    assert most == min(saturation(prefill), saturation(as_decode(decode)), sent)
    # Llama 3 8B's 8 heads of 128 keys and values in 32 layers; SGLang's one GPU sends 1.5 GB/s.
    alone_s = np.mean([0.04 + r.prompt_tokens * 131072 / 1.5e9 for r in one.deployment.requests])
    assert (most == pytest.approx(1 / alone_s)) == (stack == "sglang")
    assert saturation(prefill) == saturation(as_prefill(decode))
    assert "a prompt of" in alone(one, parse_slo("p99 ttft 1ms"))[1]
    assert "a token of" in alone(one, parse_slo("p99 tpot 1ms"))[1]


@pytest.mark.parametrize("given", [{}, {"gpus": None, "rate": 4.0}])
def test_what_two_pools_must_carry(given: dict[str, object]) -> None:
    asked = wanted(**given)
    worth = Worth(asked, load_prices(None))
    for option in pooled(replace(asked, gpus=3))[1]:
        value = worth.of(option, 4.0).value
        assert worth.of(option, worth.load_for(option, value)).value == pytest.approx(value)
        assert worth.of(option, 3.9).value < value and worth.of(option, 4.0).replicas == 1


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"gpus": None, "rate": 6.0}])
def test_the_winner_keeps_the_slo_with_another_seed(
    given: dict[str, object], tmp_path: Path
) -> None:
    """A chunk of 2,048 tokens makes a gap longer than 60 ms: only pools keep this limit under
    load."""
    asked = wanted(slo=GAPS, budget="2048", **given)
    section = CapacitySection(
        slo=GAPS, tolerance=0.1, requests=400, replications=Replications(least=2, most=3)
    )
    asked, prices = replace(asked, section=section), load_prices(None)
    with opened(tmp_path, section) as lab:
        found = recommend(lab, asked, prices, silent)
    content = answer_of(found, asked, prices)
    best = found.finalists[0]
    row = content["deployments"][0]
    assert best.option.pooled and content["winner"] == best.option.name == row["name"]
    assert row["per_hour"] == pytest.approx(
        prices.of("a100-80g-sxm") * (best.option.gpus if given else 4)
    )
    # By hand: every request has 100 output tokens, and all GPUs are paid for.
    a_second = row["carries"] * 100
    assert row["per_million_output_tokens"] == pytest.approx(
        row["per_hour"] / 3600 / a_second * 1e6, rel=0.01
    )
    table = recommend_files(asked, content)["recommend.csv"].decode().splitlines()
    first = dict(zip(table[0].split(","), table[1].split(","), strict=False))
    clusters = [pool.scenario.cluster for pool in best.option.deployment.pools]
    assert [first[f"{pool}_replicas"] for pool in POOLS] == [
        str(each.replicas) for each in clusters
    ]
    assert [first[f"{pool}_tp"] for pool in POOLS] == [str(each.tp) for each in clusters]
    assert "prefill worker" in content["answer"] and "kv_consumer" in content["command"]
    again = winner(content, asked)
    load_experiment(
        again
    )  # no key that both pools set stands above them, where it would be refused
    assert again.pop("name") == "winner" and again.pop("capacity")["slo"] == GAPS
    scenario = check_scenario(again, Source("", "x", {}, ()))
    if given:
        assert scenario.workload.arrivals.rate == 6.0  # type: ignore[union-attr]
    else:
        rate = 0.9 * best.load
        scenario = best.option.under(rate, "rate").having("workload", requests=800)
    other = scenario.model_copy(update={"seed": 77})
    assert verdict_of(other, section.objectives).holds
