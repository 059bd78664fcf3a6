"""Ranks with attention of their own and draft lengths that `recommend` proposes: which layouts have
them, bounds, prices, the winner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sarathi_sim.experiments.capacity.answer import load_prices
from sarathi_sim.experiments.capacity.bounds import Bounds, most_requests_per_s
from sarathi_sim.experiments.capacity.options import (
    Option,
    deployable,
    layouts,
)
from sarathi_sim.experiments.capacity.pool_layouts import pool_layouts
from sarathi_sim.experiments.capacity.recommend import (
    Worth,
    answer_of,
    recommend,
    recommend_files,
    winner,
)
from sarathi_sim.experiments.capacity.search import AT_ONCE, Probe
from sarathi_sim.experiments.capacity.slo import CapacitySection, Replications, parse_slo
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.profiler.facts.ops import MOE
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_laboratory import opened, question, verdict_of

SLO = "p90 ttft 1s, p90 tpot 30ms"
HERE = Source("", "x", {}, ())


wanted = partial(
    question,
    **{"model": "qwen3-30b-a3b", "device": "h100-80g-sxm", "gpus": 8, "slo": SLO},
    **{"workload": "1000:60", "seqs": "32", "budget": "2048", "stack": "vllm"},
)


def shapes(**given: object) -> list[str]:
    found = (str(point["layout"]) for point, _ in layouts(wanted(**given)))
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
    trees = {point["layout"]: tree for point, tree in layouts(wanted(**asked, drafts="0,1"))}
    assert len(trees) == 7 and "speculation" not in trees["TP 1 budget 2048"]
    given = trees["TP 1 drafts 1 budget 2048"]["speculation"]
    assert given == {"method": "mtp", "draft_length": 1, "acceptance": [0.8]}
    told = wanted(**asked).not_tried
    assert "draft lengths of mtp but 0, 1, 2" in told and "(--speculation)" not in told
    assert "speculation (--speculation)" in wanted().not_tried


def test_acceptance_is_published_or_given() -> None:
    asked = wanted(model="qwen3.5-397b-a17b", speculation="mtp", drafts="5")
    assert asked.drafts == (5,)
    assert asked.drafting(5)["speculation"]["acceptance"] == "golden"
    off = wanted(model="qwen3.5-397b-a17b", speculation="mtp:golden_thinking_off")
    assert off.drafts == (0, 1, 2, 3)
    assert off.drafting(2)["speculation"]["acceptance"] == "golden_thinking_off"
    assert off.drafting(0) == wanted().drafting(0) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafts": "1"}, "--set drafts=1: needs --speculation"),
        ({"speculation": "mtp"}, "no acceptance of mtp of qwen3-30b-a3b"),
        ({"speculation": "eagle"}, "--speculation eagle: expected mtp, eagle3 or ngram"),
        ({"speculation": "mtp:2.4"}, "--speculation mtp:2.4: expected mtp"),
        ({"speculation": "mtp:fast"}, "--speculation mtp:fast: expected mtp"),
        ({"speculation": "mtp:0.8", "drafts": "0,2"}, "the probabilities of 1 drafts"),
        ({"speculation": "mtp:0.8", "drafts": "-1"}, "--set drafts -1: expected counts from 0 on"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        wanted(**given)


def options(*names: str, **given: object) -> dict[str, Option]:
    """The deployments by their shapes (those with these words)."""
    asked = wanted(**given)
    described = [
        one for one in layouts(asked) if any(name in str(one[0]["layout"]) for name in names)
    ]
    found, _ = deployable(asked, described)
    return {str(one.point["layout"]).partition(" budget ")[0]: one for one in found}


def test_all_ranks_are_paid_for() -> None:
    asked = wanted(gpus=16)
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
def test_nothing_exceeds_its_bound(stack: str, workload: str) -> None:
    asked = {"stack": stack, "workload": workload, "max_length": 2048}
    found = options("DP", "drafts", **asked, speculation="mtp:0.8,0.6,0.5", drafts="0,1,3")
    tried = [*found.values()]
    assert len(tried) > 8
    for one in tried:
        deployment = deploy(one.at(Probe(AT_ONCE, 0, 1500), "rate").scenario, HERE)
        served = deployment.summary(Analysis(deployment.simulate()))["requests_per_s"]
        assert 0.05 < served / most_requests_per_s(one) <= 1.0, one.name


@pytest.mark.slow
def test_each_pool_has_ranks_and_only_decode_workers_draft() -> None:
    asked = wanted(speculation="mtp:0.8,0.6", drafts="0,2", gpus=16, pools=True)
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
@pytest.mark.parametrize("pools", [False, True])
def test_the_winner_keeps_the_slo_with_another_seed(pools: bool, tmp_path: Path) -> None:
    """Few clients wait for tokens whose drafts nearly always hold: drafts win."""
    gpus = 2 if pools else 1
    asked = wanted(speculation="mtp:0.9,0.8", drafts="0,2", pools=pools, gpus=gpus, seqs="8")
    section = CapacitySection(
        slo=SLO, tolerance=0.1, requests=400, replications=Replications(least=2, most=3)
    )
    asked, prices = replace(asked, section=section), load_prices(None)
    counted = list[tuple[str, int, int]]()
    with opened(tmp_path, section) as lab:
        lab.progress = lambda *step: counted.append(step)
        found = recommend(lab, asked, prices, silent)
    for what in {what for what, _, _ in counted}:
        steps = [(done, total) for name, done, total in counted if name == what]
        assert all(0 <= done <= total for done, total in steps), what
    steps = [(done, total) for name, done, total in counted if name == "bounds"]
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] == len({*steps}) - 1
    content = answer_of(found, asked, prices)
    best, row = found.finalists[0], content["deployments"][0]
    assert row["drafts"] == best.option.drafts == 2 and "drafts 2" in row["name"]
    assert "2 drafts a decode" in content["answer"]
    assert '"num_speculative_tokens": 2' in content["command"]
    assert row["per_hour"] == pytest.approx(gpus * prices.of("h100-80g-sxm"))
    cost = row["per_hour"] / 3600 / (row["carries"] * 60) * 1e6
    assert row["per_million_output_tokens"] == pytest.approx(cost, rel=0.01)
    table = recommend_files(asked, content)["recommend.csv"].decode().splitlines()
    assert {"dp", "drafts"} <= {*table[0].split(",")}
    scenario = check_scenario({k: v for k, v in winner(content, asked).items()
                               if k not in ("name", "capacity")}, HERE)  # fmt: skip
    assert scenario.speculation is not None and scenario.speculation.draft_length == 2
    lower = best.option.under(0.9 * best.load, "rate").having("workload", requests=800)
    assert verdict_of(lower.model_copy(update={"seed": 77}), section.objectives).holds
