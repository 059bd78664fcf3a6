"""What `recommend` proposes beside plain servers: prefill and decode workers and how many of each,
ranks with attention of their own, draft lengths; their bounds, prices and winners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.capacity.answer import load_prices
from sarathi_sim.experiments.capacity.bounds import (
    Bounds,
    alone,
    as_decode,
    as_prefill,
    most_requests_per_s,
    new_tokens,
    saturation,
    sent_per_s,
)
from sarathi_sim.experiments.capacity.options import Option, Wanted, deployable, layouts, named
from sarathi_sim.experiments.capacity.pool_layouts import MOST_PAIRS, Pair, _described, pool_layouts
from sarathi_sim.experiments.capacity.recommend import answer_of, refined, winner
from sarathi_sim.experiments.capacity.screening import Worth, whole
from sarathi_sim.experiments.capacity.slo import CapacitySection, Replications, parse_slo
from sarathi_sim.experiments.config.deployment import default_handover, deploy
from sarathi_sim.experiments.config.loading import check_scenario, load_experiment
from sarathi_sim.experiments.config.pools import pool_of
from sarathi_sim.experiments.config.scenario import POOLS
from sarathi_sim.profiler.facts.ops import MOE
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import HERE
from tests.experiments.small_laboratory import (
    opened,
    question,
    recommend,
    served_per_s,
    verdict_of,
)

SLO = "p90 ttft 1s, p90 tbt 60ms"
# A chunk of 2,048 tokens makes a gap longer than 60 ms: only pools keep this limit under load.
GAPS = {"slo": "p90 ttft 1s, p90 tbt_max 60ms", "budget": "2048"}
# Few clients wait for tokens whose drafts nearly always hold: drafts win.
HOLD = {"speculation": "mtp:0.9,0.8", "drafts": "0,2", "seqs": "8"}
TWO, DRAFTS = (
    (" prefill TP ", "kv_consumer"),
    ("drafts 2", '"num_speculative_tokens": 2'),
)


wanted = partial(
    question,
    **{"model": "llama-3.1-8b", "device": "a100-80g-sxm", "gpus": 4, "slo": SLO, "pools": True},
    **{"workload": "2000:100", "seqs": "32", "budget": "512,2048", "stack": "vllm"},
)
mixture = partial(
    question,
    **{
        "model": "qwen3-30b-a3b",
        "device": "h100-80g-sxm",
        "gpus": 8,
        "slo": "p90 ttft 1s, p90 tpot 30ms",
    },
    **{"workload": "1000:60", "seqs": "32", "budget": "2048", "stack": "vllm"},
)


def pooled(asked: Wanted) -> tuple[list[Option], list[Option]]:
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
    deployment = deploy(check_scenario(tree, HERE), HERE)
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
    most = most_requests_per_s(one)
    assert 0.5 < served_per_s(one, 300) / most <= 1.0
    prefill, decode = one.deployment.pools
    sent = sent_per_s(prefill, default_handover(prefill), one.deployment.requests)
    assert most == min(saturation(prefill), saturation(as_decode(decode)), sent)
    # Llama 3 8B's 8 heads of 128 keys and values in 32 layers; SGLang's one GPU sends 1.5 GB/s.
    alone_s = np.mean([0.04 + r.prompt_tokens * 131072 / 1.5e9 for r in one.deployment.requests])
    assert (most == pytest.approx(1 / alone_s)) == (stack == "sglang")
    assert saturation(prefill) == saturation(as_prefill(decode))
    assert "a single prompt of" in alone(one, parse_slo("p99 ttft 1ms"))[1]
    assert "each token of" in alone(one, parse_slo("p99 tpot 1ms"))[1]


@pytest.mark.parametrize("given", [{}, {"gpus": None, "rate": 4.0}])
def test_what_two_pools_must_carry(given: dict[str, object]) -> None:
    asked = wanted(**given)
    worth = Worth(asked, load_prices(None))
    options = pooled(replace(asked, gpus=3))[1]
    assert options
    for option in options:
        value = worth.of(option, 4.0).value
        assert worth.of(option, worth.load_for(option, value)).value == pytest.approx(value)
        assert worth.of(option, 3.9).value < value and worth.of(option, 4.0).replicas == 1


def test_between_two_pools_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the largest budget and limit, so another round would be the same."""
    best = SimpleNamespace(option=SimpleNamespace(point={"budget": 2048, "seqs": 32}), load=4.0)
    found, asked = SimpleNamespace(finalists=[best]), list[tuple[int, ...]]()
    monkeypatch.setattr(
        "sarathi_sim.experiments.capacity.recommend.recommendations",
        lambda _, w, *__: (asked.append(w.budgets), [found])[1],
    )
    for pooled, rounds in ((True, [(512, 2048)]), (False, [(512, 2048), (512, 1280, 2048)])):
        best.option.pooled = pooled
        asked.clear()
        lab: Any = None
        *_, last = refined(lab, wanted(), load_prices(None), silent, 1)
        assert last is found
        assert asked == rounds


# Ranks and drafts ------------------------------------------------------------------------------


def shapes(**given: object) -> list[str]:
    found = (str(point["layout"]) for point, _ in layouts(mixture(**given)))
    return [layout.partition(" budget ")[0] for layout in found]


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        # Four KV heads: among eight GPUs two would hold the same.
        ({}, ["TP 1 DP 8 EP", "TP 2 DP 4 EP", "TP 4 DP 2 EP"]),
        ({"gpus": 4}, []),
        ({"stack": "trtllm"}, ["TP 1 DP 8 EP"]),
        (
            {"model": "deepseek-r1", "gpus": 4},
            ["TP 1 DP 2 EP", "TP 1 DP 4 EP", "TP 2 DP 2 EP"],
        ),
        ({"model": "llama-3.1-8b"}, []),
        ({"model": "mixtral-8x7b"}, []),
        (
            {"model": "mixtral-8x7b", "gpus": 16},
            ["TP 1 DP 16 EP", "TP 2 DP 8 EP", "TP 4 DP 4 EP", "TP 8 DP 2 EP"],
        ),
    ],
)
def test_ranks_are_tried_where_gpus_would_hold_the_same_kv(
    given: dict[str, object], ranks: list[str]
) -> None:
    assert [shape for shape in shapes(**given) if " DP " in shape] == ranks


def test_drafts_are_tried_where_there_is_one_stage() -> None:
    asked = {"speculation": "mtp:0.8,0.6", "gpus": 2}
    assert shapes(**asked) == [
        *("TP 1", "TP 1 drafts 1", "TP 1 drafts 2", "TP 1 PP 2"),
        *("TP 2", "TP 2 drafts 1", "TP 2 drafts 2"),
        *("TP 2 EP", "TP 2 EP drafts 1", "TP 2 EP drafts 2"),
    ]
    trees = {point["layout"]: tree for point, tree in layouts(mixture(**asked, drafts="0,1"))}
    assert len(trees) == 7 and "speculation" not in trees["TP 1 budget 2048"]
    given = trees["TP 1 drafts 1 budget 2048"]["speculation"]
    assert given == {"method": "mtp", "draft_length": 1, "acceptance": [0.8]}
    told = mixture(**asked).not_tried
    assert "draft lengths of mtp other than 0, 1, 2" in told and "(--speculation)" not in told
    assert "speculation (--speculation)" in mixture().not_tried


def test_acceptance_is_published_or_given() -> None:
    asked = mixture(model="qwen3.5-397b-a17b", speculation="mtp", drafts="5")
    assert asked.drafts == (5,)
    assert asked.drafting(5)["speculation"]["acceptance"] == "golden"
    off = mixture(model="qwen3.5-397b-a17b", speculation="mtp:golden_thinking_off")
    assert off.drafts == (0, 1, 2, 3)
    assert off.drafting(2)["speculation"]["acceptance"] == "golden_thinking_off"
    assert off.drafting(0) == mixture().drafting(0) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafts": "1"}, "--set drafts=1: needs --speculation"),
        ({"speculation": "mtp"}, "no acceptance of mtp of qwen3-30b-a3b"),
        ({"speculation": "eagle"}, "--speculation eagle: expected mtp, eagle3 or ngram"),
        ({"speculation": "mtp:2.4"}, "--speculation mtp:2.4: expected mtp"),
        ({"speculation": "mtp:fast"}, "--speculation mtp:fast: expected mtp"),
        ({"speculation": "mtp:0.8", "drafts": "0,2"}, "the probabilities of 1 drafts"),
        ({"speculation": "mtp:0.8", "drafts": "-1"}, "--set drafts -1: expected whole numbers"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        mixture(**given)


def options(*names: str, **given: object) -> dict[str, Option]:
    """The deployments by their shapes (those with these words)."""
    asked = mixture(**given)
    described = [
        one for one in layouts(asked) if any(name in str(one[0]["layout"]) for name in names)
    ]
    found, _ = deployable(asked, described)
    return {str(one.point["layout"]).partition(" budget ")[0]: one for one in found}


def test_all_ranks_are_paid_for() -> None:
    asked = mixture(gpus=16)
    one = options("TP 2 DP 4", gpus=16, speculation="mtp:0.8")["TP 2 DP 4 EP drafts 1"]
    assert (one.gpus, one.drafts) == (8, 1)
    price = load_prices(None).of("h100-80g-sxm")
    worth = Worth(asked, load_prices(None)).of(one, 5.0)
    assert (worth.replicas, worth.per_hour) == (2, 8 * price)
    assert worth.value == pytest.approx(10.0 / (16 * price))


def test_the_bounds_of_ranks_and_drafts_by_hand() -> None:
    """Where the experts cost nothing, ranks share all work; drafts that never hold only add rows,
    and drafts that always hold halve the iterations."""
    found = options("DP 8", "DP 4", speculation="mtp:1.0", workload="2:2001")
    one, two = (Bounds(found[name].deployment) for name in ("TP 1 DP 8 EP", "TP 2 DP 4 EP"))
    assert (one.ranks, two.ranks) == (8, 4)
    # A step has the experts at the tokens of all ranks: here at the best rate of any number.
    sizes = one.sizes
    shared = one.cost.op_s(MOE, sizes)
    assert one.shared == pytest.approx(shared) and (one.linear > shared).all()
    drafts = Bounds(found["TP 1 DP 8 EP drafts 1"].deployment)
    assert drafts.decodes == pytest.approx(1000.0) and one.decodes == pytest.approx(2000.0)
    assert drafts.decode_rows == pytest.approx(1999.0)
    vain = options("DP 8", speculation="mtp:0.0", workload="2:2001")["TP 1 DP 8 EP drafts 1"]
    assert Bounds(vain.deployment).decodes == pytest.approx(2000.0)
    assert Bounds(vain.deployment).requests_per_s() < one.requests_per_s()
    assert one.requests_per_s() < drafts.requests_per_s()


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("workload", ["1000:30", "200:100", "60:3"])
def test_ranks_and_drafts_never_exceed_their_bound(stack: str, workload: str) -> None:
    asked = {"stack": stack, "workload": workload, "max_length": 2048}
    found = options("DP", "drafts", **asked, speculation="mtp:0.8,0.6,0.5", drafts="0,1,3")
    tried = [*found.values()]
    assert len(tried) > 8
    for one in tried:
        assert 0.05 < served_per_s(one, 1500) / most_requests_per_s(one) <= 1.0, one.name


@pytest.mark.slow
def test_each_pool_has_ranks_and_only_decode_workers_draft() -> None:
    asked = mixture(speculation="mtp:0.8,0.6", drafts="0,2", gpus=16, pools=True)
    alone, _ = deployable(asked)
    prices = load_prices(None)
    described = pool_layouts(asked, alone, parse_slo(asked.section.slo), prices.of)
    found, dropped = deployable(asked, described)
    assert not dropped and {one.drafts for one in found} == {0, 2}
    assert any(" DP " in one.name for one in found)
    for one in found:
        prefill, decode = one.deployment.pools
        assert prefill.scenario.speculation is None and "drafts" not in one.name.partition("+")[0]
        assert (one.deployment.pools[1].scenario.speculation is not None) == (one.drafts > 0)
        assert f"drafts {one.drafts} budget" in one.name or not one.drafts
        for name, pool in zip(one.name.split(" + "), (prefill, decode), strict=True):
            cluster = pool.scenario.cluster
            assert (f" DP {cluster.dp} EP" in name) == (cluster.dp > 1)
            if cluster.dp > 1:
                assert cluster.rank_router == "least_requests" and cluster.expert_parallel
        gpus = [
            pool.scenario.cluster.gpus * pool.scenario.cluster.replicas
            for pool in (prefill, decode)
        ]
        assert one.gpus == sum(gpus) <= 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "gpus", "words"),
    [
        (partial(wanted, **GAPS), 4, TWO),
        (partial(wanted, **GAPS, gpus=None, rate=6.0), None, TWO),
        (partial(mixture, **HOLD, gpus=1), 1, DRAFTS),
        (partial(mixture, **HOLD, gpus=2, pools=True), 2, DRAFTS),
    ],
    ids=["pools", "pools for a rate", "drafts", "drafts in pools"],
)
def test_the_winner_keeps_the_slo_with_another_seed(
    ask: Callable[[], Wanted], gpus: int | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    asked, prices = ask(), load_prices(None)
    few = {"tolerance": 0.1, "requests": 400, "replications": Replications(least=2, most=3)}
    section = CapacitySection(slo=asked.section.slo, **few)  # type: ignore[arg-type]
    asked = replace(asked, section=section)
    with opened(tmp_path, section) as lab:
        found = recommend(lab, asked, prices)
    content, best = answer_of(found, asked, prices), found.finalists[0]
    option, row = best.option, content["deployments"][0]
    assert content["winner"] == option.name == row["name"]
    assert (option.pooled, option.drafts) == ((True, 0) if words is TWO else (option.pooled, 2))
    # By hand: all GPUs are paid for, and every request has as many output tokens.
    price = prices.of(option.deployment.device.name)
    assert row["per_hour"] == pytest.approx(price * (gpus or option.gpus))
    tokens = row["carries"] * np.mean([r.output_tokens for r in option.deployment.requests])
    cost = row["per_hour"] / 3600 / tokens * 1e6
    assert row["per_million_output_tokens"] == pytest.approx(cost, rel=0.01)
    text = f"{option.name} {content['command']}"
    assert all(word in text for word in words)
    again = winner(content, asked)
    load_experiment(again)  # no key that both pools set stands above them
    assert again.pop("name") == "winner" and again.pop("capacity")["slo"] == section.slo
    scenario = check_scenario(again, HERE)
    if gpus is None:
        assert scenario.workload.arrivals.rate == 6.0  # type: ignore[union-attr]
    else:
        scenario = option.under(0.9 * best.load, "rate").having("workload", requests=800)
    assert verdict_of(scenario.model_copy(update={"seed": 77}), section.objectives).holds
