"""From a model, devices and an SLO to a deployment: bounds, prices, command lines, the ranking;
where the best stands next to one that carries much less.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim import capacity
from sarathi_sim.experiments.capacity import recommend as chosen_by
from sarathi_sim.experiments.capacity.answer import Prices, answers, load_prices, per_million_tokens
from sarathi_sim.experiments.capacity.bounds import alone, most_requests_per_s
from sarathi_sim.experiments.capacity.options import Left, Option, Wanted, deployable
from sarathi_sim.experiments.capacity.recommend import (
    Recommendation,
    answer_of,
    far_neighbours,
    servers_90,
    winner,
)
from sarathi_sim.experiments.capacity.screening import SCREENING, Screened, Screening, Worth, whole
from sarathi_sim.experiments.capacity.search import Begun, Crossing, Probe
from sarathi_sim.experiments.capacity.slo import CapacitySection, Replications, parse_slo
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.report.capacity_charts import capacity_charts, front
from sarathi_sim.experiments.sweeps.points import between, halfway, in_order, neighbours
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.routers import ROUTERS, Router
from sarathi_sim.simulator.views.metrics import Analysis
from tests.experiments.small_config import HERE, called
from tests.experiments.small_laboratory import (
    analysed,
    laboratory,
    question,
    recommend,
    served_per_s,
    verdict_of,
)

SLO = "p90 ttft 2s, mean tbt 150ms"
SHORT = {"requests": 400, "replications": Replications(least=2, most=2)}
"""Runs that last long enough for few requests of some tenths of a second."""


wanted = partial(
    question,
    **{"model": "llama-13b", "device": "a6000", "gpus": 2, "slo": SLO, "workload": "200:20"},
    **{"seqs": "2,16", "budget": "256", "dtype": "bf16", "tolerance": 0.3},
)


def regular(asked: Wanted, cv: float = 0.2, **given: object) -> Wanted:
    """With nearly regular arrivals short runs are alike, and capacities precise."""
    section = CapacitySection(slo=asked.section.slo, **given)  # type: ignore[arg-type]
    arrivals = {"kind": "gamma", "rate": 1, "cv": cv}
    return replace(asked, section=section, workload={**asked.workload, "arrivals": arrivals})


@pytest.mark.slow
def test_it_agrees_with_trying_everything(tmp_path: Path) -> None:
    """Same winner, capacities within the tolerance of ``capacity``, and what was left out is
    behind, all judged by an exact search of every deployment."""
    asked = wanted(slo="p90 ttft 500ms, p90 tbt 60ms", workload="200:10", budget="128", seqs="6,8")
    asked, prices, said = regular(asked, **SHORT), load_prices(None), list[str]()
    tolerance, worth = asked.section.tolerance, Worth(asked, prices)
    assert tolerance == 0.03
    found = recommend(laboratory(tmp_path / "a", asked.section), asked, prices, said.append)
    assert said == ["capacity searches begun: 1", "capacity searches to finish: 1"]
    options, _ = deployable(asked)
    every = [whole(one, worth.of(one, 1.0).replicas) for one in options]
    brute = answers(laboratory(tmp_path / "b", asked.section), every, "here", bands=False)
    loads = {one.name: answer.load for one, answer in zip(options, brute, strict=True)}
    best = max(loads.values())
    assert len(loads) == 6 and not any(answer.unsettled for answer in brute)
    first = found.finalists[0]
    assert loads[first.option.name.rpartition(" x ")[0]] == best
    for each in found.finalists:
        exact = loads[each.option.name.rpartition(" x ")[0]]
        assert each.load == pytest.approx(exact, rel=tolerance)
    for one in found.screened:
        near = pytest.approx(loads[one.option.name], rel=SCREENING + tolerance)
        assert one.load * one.replicas == near
    assert {"bound", "race"} <= {left.stage for left in found.dropped.values()}
    for name, left in found.dropped.items():
        assert left.clause in (None, "p90 ttft 500ms") and left.at is not None
        servers = 2 // next(one.gpus for one in options if one.name == name)
        most = best * (1 + SCREENING) * (1 + tolerance)  # what it had to reach was screened, too
        assert loads[name] <= left.at * servers * (1 + tolerance) <= most
    for option in options:
        bound = worth.of(option, most_requests_per_s(option, asked.section.objectives))
        assert loads[option.name] < bound.load * bound.replicas, option.name
    content = answer_of(found, asked, prices)
    assert content["winner"] == first.option.name
    row, cost = content["deployments"][0], price_at(first.load, first.option, prices)
    assert row["per_million_output_tokens"] == pytest.approx(cost, rel=1e-9)
    version, command = content["command"].splitlines()
    assert version == "# The simulated settings, for vllm 0.33."
    assert command.startswith("vllm serve huggyllama/llama-13b --tensor-parallel-size")
    assert content["needs"] is None
    assert f"--request-rate {row['offered']:.6g} --burstiness 25 " in content["load_command"]
    again = winner(content, asked)
    assert again.pop("name") == "winner"
    assert again.pop("capacity")["slo"] == asked.section.slo
    assert check_scenario(again, HERE).cluster.replicas >= 1


def price_at(rate: float, option: Option, prices: Prices) -> float:
    """Of a million output tokens: its GPUs are paid for an hour, in which so many are written."""
    tokens = np.mean([request.output_tokens for request in option.deployment.requests])
    device = option.deployment.device.name
    return prices.of(device) * option.gpus / (3600 * rate * float(tokens)) * 1e6


@pytest.mark.slow
def test_what_only_an_overload_breaks_is_searched(tmp_path: Path) -> None:
    """A race is too short to show an overload, and its SLO holds under any load. The winner is the
    one of an exact search; where no run is long enough, that is said."""
    asked = wanted(slo="p90 tbt_max 10s", workload="200:10", budget="128", seqs="2,8", gpus=1)
    few = Replications(least=2, most=2)
    asked, prices = regular(asked, replications=few), load_prices(None)
    found = recommend(laboratory(tmp_path / "a", asked.section), asked, prices)
    every = [whole(one, 1) for one in deployable(asked)[0]]
    brute = answers(laboratory(tmp_path / "b", asked.section), every, "here", bands=False)
    best = max(brute, key=lambda one: one.load)
    assert found.finalists[0].option.name == best.option.name
    assert found.finalists[0].load == pytest.approx(best.load, rel=asked.section.tolerance)


def test_a_contender_leaves_by_its_first_replications() -> None:
    """Each replication of the third is 5 % below the first's, so it sustains 19 where that one
    sustains 20. The second differs by chance, and stays; the fourth does what the third does."""
    asked = wanted(gpus=2)
    worth, (one, *_) = Worth(asked, load_prices(None)), deployable(asked)[0]
    loads = {"a": (10.0, 8.0, 12.0, 9.0, 11.0), "b": (9.8, 8.0, 12.1, 8.85, 10.9)}
    loads |= dict.fromkeys(("c", "d"), tuple(0.95 * load for load in loads["a"]))
    began, of, nothing = {}, {}, SimpleNamespace()  # errors of op times cancel
    for name, each in loads.items():
        of[name] = worth.of(one.changed(name, one.scenario), 9.0)
        probes: list[Any] = [
            SimpleNamespace(probe=SimpleNamespace(seed=n), verdict=SimpleNamespace(rejected=0.0))
            for n in range(5)
        ]
        plan: Any = SimpleNamespace(keep=0.9, whole=False)
        crossings = [Crossing(load, probes[n], probes[n]) for n, load in enumerate(each)]
        began[of[name]] = Begun(plan, crossings[0], tuple(crossings))
    errors: Any = chosen_by.OpErrors(nothing)  # type: ignore[arg-type]
    left = chosen_by._beaten(began, worth, errors)
    assert left.keys() == {of["c"], of["d"]} and left[of["c"]] == left[of["d"]]
    now = left[of["c"]].at(of["c"], 20.0, worth)
    assert left[of["c"]].than is of["a"] and now.half == pytest.approx(0.0, abs=1e-12)
    assert now.load * now.replicas == pytest.approx(19.0)
    twins = {of[name]: began[of["a"]] for name in ("a", "b")}
    left = chosen_by._beaten(twins, worth, errors)
    assert {one.name: left[one].than.name for one in left} == {of["b"].name: of["a"].name}


def _seen(race: Screening, one: Screened) -> Iterator[list[Screened]]:
    """Screening that sees one deployment."""
    race.found, race.options, race.bounded = [one], [one.option], {one.option: one.load}
    yield race.found


@pytest.mark.slow
def test_the_replicas_for_a_rate_are_the_fewest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, whether screening saw too much (one of them) or too little (three). A run at the rate
    keeps the SLO, and one with one replica fewer breaks it: both are simulated again here."""
    asked = wanted(
        gpus=None, rate=20.0, slo="p90 ttft 500ms", workload="200:10", budget="128", seqs="8"
    )
    asked, prices = regular(asked, **SHORT), load_prices(None)
    worth = Worth(asked, prices)
    (option, *_), _ = deployable(asked)
    for about, replicas in ((20.0, [2, 1]), (7.0, [2, 3])):
        seen = worth.of(option, about)
        monkeypatch.setattr(Screening, "run", partialmethod(_seen, seen))
        found = recommend(laboratory(tmp_path, asked.section), asked, prices)
        assert [one.option.scenario.cluster.replicas for one in found.finalists] == replicas
        content = answer_of(found, asked, prices)
        first, fewer = content["deployments"][0], content["one_fewer"]
        assert first["capacity"] > 20 and (first["carries"], first["settled"]) == (20, True)
        assert first["at_rate"]["holds"] and first["at_rate"]["load"] == fewer["load"] == 20
        low, high = (load / first["replicas"] for load in first["uncertainty"])
        assert first["servers_90"] == [math.ceil(20 / high), math.ceil(20 / low)]
        price = pytest.approx(price_at(20.0, found.finalists[0].option, prices), rel=1e-9)
        assert first["per_million_output_tokens"] == price
        assert winner(content, asked)["workload"]["arrivals"]["rate"] == 20
        for name, holds in ((content["winner"], True), (fewer["name"], False)):
            again = whole(option, int(name.rpartition(" x ")[2]))
            under = again.under(20.0, "rate")
            traffic = under.workload.model_copy(update={"requests": 800})
            under = under.model_copy(update={"workload": traffic, "seed": 77})
            assert verdict_of(under, asked.section.objectives).holds == holds, name


@pytest.mark.parametrize(
    ("uncertainty", "replicas", "rate", "servers"),
    [
        ((20.0, 45.0), 3, 30.0, [2, 5]),  # 15 and 6.7 requests/s each: 2 and 4.5 of them
        ((25.0, 36.0), 2, 10.0, [1, 2]),  # 12.5 each at the worst: one would do, but is too few
        ((20.0, 45.0), 3, 60.0, [4, 9]),  # the three do not carry it
        (None, 3, 30.0, None),
    ],
)
def test_the_fewest_and_the_most_servers_for_a_rate(
    uncertainty: tuple[float, float] | None, replicas: int, rate: float, servers: list[int] | None
) -> None:
    assert servers_90(uncertainty, replicas, rate) == servers


def test_a_rate_beyond_the_gpus_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bounds alone; or by screening, where the bounds left a hope."""
    message = "keeps it under {} requests/s:\n  {} requests/s need at least [0-9]+ GPUs"
    for rate, about in ((100_000, None), (20, 0.1)):
        asked = wanted(gpus=None, rate=float(rate), slo="p90 ttft 2s", budget="128", seqs="16")
        worth, (option, *_) = Worth(asked, load_prices(None)), deployable(asked)[0]
        if about is not None:
            seen = worth.of(option, about)
            monkeypatch.setattr(Screening, "run", partialmethod(_seen, seen))
        with pytest.raises(UserError, match=message.format(f"{rate:g}", f"{rate:g}")):
            recommend(laboratory(tmp_path, asked.section), asked, load_prices(None))


@pytest.mark.parametrize("given", [{"gpus": 8}, {"gpus": None, "rate": 7.0}])
def test_what_a_replica_must_carry(given: dict[str, object]) -> None:
    asked = wanted(**given)
    options, _ = deployable(asked)
    worth = Worth(asked, load_prices(None))
    for option in (one for one in options if one.gpus <= 8):
        value = worth.of(option, 2.0).value
        load = worth.load_for(option, value)
        assert worth.of(option, load).value == pytest.approx(value)
        assert worth.of(option, 0.9 * load).value < value


def test_one_replica_gets_its_share_of_the_arrivals() -> None:
    """Every fourth of Poisson arrivals: gaps that are the sums of four."""
    (option, *_), _ = deployable(wanted())
    one = whole(option, 4).at(Probe(20.0, 3, 50), "rate").scenario
    assert (one.cluster.replicas, one.seed, one.workload.requests) == (1, 3, 50)
    assert (one.workload.every, one.workload.arrivals.kind) == (4, "poisson")
    alone = option.at(Probe(20.0, 3, 50), "rate").scenario.workload
    assert (alone.every, alone.arrivals.kind) == (1, "poisson")


@pytest.mark.parametrize("router", ROUTERS)
def test_only_behind_a_router_that_takes_turns_one_replica_stands_for_all(router: Router) -> None:
    """Behind any other a probe has all replicas, all of the traffic, and as many requests each."""
    (option, *_), _ = deployable(wanted())
    several = whole(option, 4)
    several = several.changed(router, several.scenario.having("cluster", router=router))
    one = several.at(Probe(20.0, 3, 50), "rate").scenario
    alike = 4 if router == "round_robin" else 1
    assert (several.alike, one.workload.every, one.cluster.replicas) == (alike, alike, 4 // alike)
    assert one.cluster.router == router
    at = analysed(one).requests
    assert sorted(set(at["replica"])) == list(range(4 // alike)) and len(at) == 50


TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{0.1 * n + 0.05 * (n % 3)},{100 + 7 * (n % 50)},{1 + n % 20}\n" for n in range(300)
)
ARRIVALS: dict[str, dict[str, object]] = {
    "poisson": {"kind": "poisson", "rate": 1},
    "bursty": {"kind": "gamma", "rate": 1, "cv": 2},
    "varying": {
        "kind": "varying", "repeat": True,
        "rates": [{"at_s": 0, "rate": 1}, {"at_s": 5, "rate": 9}, {"at_s": 10, "rate": 1}],
    },
    "trace": {"kind": "trace"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ARRIVALS)
def test_one_replica_is_served_as_behind_a_router_that_takes_turns(
    kind: str, tmp_path: Path
) -> None:
    """To the last bit: its requests are those that a run of all four hands to the first."""
    asked = wanted(workload="200:5~0.5", budget="256", seqs="4", max_length=1024)
    workload = asked.workload | {"arrivals": ARRIVALS[kind]}
    if kind == "trace":
        (tmp_path / "trace.csv").write_text(TRACE)
        workload["lengths"] = {"kind": "trace", "path": str(tmp_path / "trace.csv")}
        del workload["requests"]
    (option, *_), _ = deployable(replace(asked, workload=workload))
    several = whole(option, 4)
    assert several.alike == 4
    one = several.at(Probe(30.0, 3, 400), "rate").scenario
    under = several.under(30.0, "rate")
    traffic = under.workload.model_copy(update={"requests": 1600})
    four = under.model_copy(update={"workload": traffic, "seed": 3})
    alone, behind = (analysed(each).requests for each in (one, four))
    first = behind[behind["replica"] == 0]
    assert len(first) == len(alone) == 400
    for column in ("arrival_s", "prompt_tokens", "ttft_s", "latency_s"):
        assert first[column].tolist() == alone[column].tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_exceeds_its_bound(shared: bool) -> None:
    """Also where a cache holds most of every prompt."""
    asked = wanted(max_length=2048)
    if shared:
        rules = {"rules": {"tokens": 1000, "share": 1.0}}
        asked = replace(asked, workload={**asked.workload, "system_prompts": rules})
    options, _ = deployable(asked)
    assert options
    for option in options:
        assert 0.1 < served_per_s(option, 400) / most_requests_per_s(option) <= 1.0, option.name


def test_a_limit_between_tokens_bounds_the_batch_and_the_chunks() -> None:
    """Chunks of 256 take longer than 60 ms here, those of 128 do not."""
    (small, large), _ = deployable(wanted(gpus=1, budget="128,256", seqs="16"))
    usual, limit = most_requests_per_s(small), parse_slo("p99 tbt 60ms")
    assert usual == most_requests_per_s(small, limit) > 10 * most_requests_per_s(large, limit)
    for slo in ("mean tbt 40ms", "p99 tpot 40ms", "attainment 95% tpot 40ms"):
        assert most_requests_per_s(small, parse_slo(slo)) < 0.9 * usual, slo
    assert most_requests_per_s(small, parse_slo("p99 ttft 1s")) == usual


def test_what_breaks_the_slo_alone_needs_no_simulation(tmp_path: Path) -> None:
    (option, *_), _ = deployable(wanted())
    assert alone(option, parse_slo(SLO))[1] == ""
    for slo, what in (
        ("p99 tpot 1ms", "each token of a single request"),
        ("p99 ttft 1ms", "a single prompt"),
    ):
        assert alone(option, parse_slo(slo))[1].startswith(what)
    asked = wanted(slo="p99 tpot 1ms")
    with pytest.raises(UserError, match="keeps it under any load") as refused:
        recommend(laboratory(tmp_path, asked.section), asked, load_prices(None))
    (line,) = str(refused.value).splitlines()[1:]
    said = re.fullmatch(
        r"  each token .* takes at least (\d+) ms, .*, with (.*); with all others .* longer", line
    )
    assert said is not None
    took = {}  # a single request, simulated
    for one in deployable(asked)[0]:
        own = replace(one.deployment, requests=one.deployment.requests[:1])
        took[one.name] = float(Analysis(own.simulate()).requests["tpot_s"].iloc[0]) * 1e3
    assert took[said[2]] == min(took.values()) and max(took.values()) > 1.5 * took[said[2]]
    assert 0.9 * took[said[2]] < int(said[1]) <= took[said[2]] + 0.5


def test_what_does_not_fit_is_dropped_with_the_reason() -> None:
    _, dropped = deployable(wanted(model="llama-2-70b", device="a100-80g-sxm", gpus=1))
    assert dropped
    assert {left.stage for left in dropped.values()} == {"unfit"}
    assert all("70b" in str(o.clause) or "does not fit" in str(o.clause) for o in dropped.values())


def test_prices(tmp_path: Path) -> None:
    assert per_million_tokens(3.6, 2, 100.0) == pytest.approx(20.0)
    assert load_prices(None).mark == "assumed"
    path = tmp_path / "prices.yaml"
    path.write_text("date: 2026-01-01\ngpu_hour: {h100: 2.5}\n")
    mine = load_prices(str(path))
    assert (mine.of("h100"), mine.mark) == (2.5, "given")
    with pytest.raises(UserError, match=r"gpu_hour\.h200"):
        mine.of("h200")
    path.write_text("date: 2026-01-01\ngpu_hour: {h100: -2}\n")
    with pytest.raises(UserError, match="h100"):
        load_prices(str(path))


def test_fronts() -> None:
    table = pd.DataFrame({"tokens_per_s_per_user": [10.0, 20, 15], "ttft_p99_s": [1.0, 2, 3]})
    table["output_tokens_per_s_per_gpu"], table["tbt_p99_s"] = [9.0, 5, 4], [3.0, 2, 1]
    table["load"], table["run"], table["deployment"] = 1.0, "r", "d"
    table["full"] = [False, True, True]
    both = front(table, "tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
    assert both.index.tolist() == [0, 1]
    # Two latencies are compared at the capacities only.
    assert front(table, "ttft_p99_s", "tbt_p99_s").index.tolist() == [1, 2]
    nothing = {"deployments": [], "load": "rate", "prices": {"currency": "USD"}}
    assert capacity_charts(nothing) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--gpus and --rate: give exactly one of them"),
        (["--gpus", "2", "--rate", "1"], "--gpus and --rate: give exactly one of them"),
        (["--gpus", "2", "--slo", "fast"], "--slo: 'fast': expected clauses"),
        (["--gpus", "2", "--stack", "vlm"], "--stack vlm: 'vlm': one of vllm, sglang, trtllm"),
        (["--gpus", "2", "--budget", "0"], "--budget 0: expected whole numbers"),
        (["--gpus", "2", "--workload", "none"], "none: no such file"),
        (["--gpus", "2", "--workload", "t.csv"], "t.csv: No such file"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str) -> None:
    words = ("recommend", "--model", "llama-13b", "--device", "a6000", "--slo", SLO, *options)
    assert message in called(*words, code=2).stderr


# Next to the best -------------------------------------------------------------------------------


GRID = [
    {"scenario": "a", "pp": pp, "policy.chunk_size": chunk}
    for pp in (1, 2)
    for chunk in (512, 256, 1024)
]
CLIFF = """
name: cliff
model: llama-13b
device: a6000
workload:
  requests: 500
  lengths: {kind: fixed, prompt: 600, decode: 10}
  arrivals: {kind: gamma, rate: 1, cv: 0.1}
cluster: {max_length: 1024}
batching: {max_batch: 4}
policy: {name: sarathi, chunk_size: 256}
capacity:
  slo: p90 ttft 1s, p90 tbt_max 150ms
  tolerance: 0.5
  requests: 200
  replications: {least: 2, most: 2}
  space:
    grid: {policy.chunk_size: [128, 1024]}
"""


def test_neighbours_differ_in_one_key() -> None:
    assert neighbours(0, GRID) == [("pp", 3), ("policy.chunk_size", 1), ("policy.chunk_size", 2)]
    assert neighbours(5, GRID) == [("pp", 2), ("policy.chunk_size", 3)]
    kinds = [{"name": "a", "eager": True}, {"name": "b", "eager": True}, {"name": "a"}]
    assert neighbours(0, kinds) == [], "neither a word nor a switch is an axis"
    assert neighbours(0, [{"tp": 1, "pp": 2}, {"tp": 2, "pp": 1}]) == [], "two keys differ"
    mixed = [{"requests": 5}, {"requests": None}, {"requests": 9}]
    assert neighbours(0, mixed) == [("requests", 2)]


@pytest.mark.parametrize(
    ("one", "other", "middle"),
    [
        (512, 1024, 768),
        (1024, 512, 768),
        (512, 768, 640),
        (512, 704, 640),  # 608 lies as near to 576
        (512, 576, None),
        (100, 512, 306),
        (1, 2, None),
        (1, 4, 2),
        (0.8, 0.9, 0.85),
        (1, 1.5, 1.25),
    ],
)
def test_half_way(one: float, other: float, middle: float | None) -> None:
    assert halfway(one, other) == middle


def test_new_points_lie_between_the_best_and_its_neighbours() -> None:
    best = {"scenario": "a", "pp": 1}
    chunks = [{**best, "policy.chunk_size": chunk} for chunk in (384, 768)]
    assert between(0, GRID) == chunks, "nothing lies between 1 and 2 stages"
    points = GRID + chunks
    ordered = [points[place] for place in in_order(points)]
    assert [(one["pp"], one["policy.chunk_size"]) for one in ordered] == [
        *((1, chunk) for chunk in (256, 384, 512, 768, 1024)),
        *((2, chunk) for chunk in (256, 512, 1024)),
    ]
    points = [{"policy": {"name": "b"}}, {"policy": {"name": "a"}}, {}, {"policy": None}]
    assert in_order(points) == [2, 0, 1, 3], "the order of words stays"


def asked(tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    (path := tmp_path / "cliff.yaml").write_text(CLIFF)
    given = ("--out", tmp_path / "out", "--workers", "1", "--no-bands", "--json")
    done = called("capacity", path, *given, *words)
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_capacity_refines_on_request(tmp_path: Path) -> None:
    content, printed = asked(tmp_path)
    best, far = (one["capacity"] for one in content["deployments"])
    assert best > 2 * far, "a chunk of 600 tokens takes longer than 150 ms"
    (warning,) = (line for line in content["warnings"] if "its neighbour" in line)
    assert warning.startswith("chunk 128 is the best, but its neighbour chunk 1024 sustains much ")
    assert "give --refine" in warning and f"  {warning}\n" in printed
    runs = tmp_path / "out" / "probes" / "runs"
    before = {path.name: path.stat().st_mtime_ns for path in runs.iterdir()}

    finer, _ = asked(tmp_path, "--refine", "2")
    names = [one["name"] for one in finer["deployments"]]
    assert names == [f"chunk {chunk}" for chunk in (128, 384, 576, 768, 1024)]
    assert [finer["deployments"][place] for place in (0, 4)] == content["deployments"]
    assert finer["answer"].startswith("best: chunk 384, ")
    assert max(one["capacity"] for one in finer["deployments"]) > 1.2 * best
    assert not any("its neighbour" in line for line in finer["warnings"]), "576 carries 94 % of it"
    kept = {path.name: path.stat().st_mtime_ns for path in runs.iterdir()}
    assert before.items() < kept.items(), "finished probes are kept"

    table = capacity(tmp_path / "cliff.yaml", out=tmp_path / "out", bands=False, refine=2).table
    assert list(table["name"]) == names
    assert list(table["capacity"]) == [one["capacity"] for one in finer["deployments"]]
    assert len(list(runs.iterdir())) == len(kept)


@pytest.mark.slow
def test_what_cannot_be_deployed_is_left_out(tmp_path: Path) -> None:
    """Between TP 2 and TP 4 lies 3, which divides no heads."""
    space = "capacity.space={cases: [{cluster.tp: 2}, {cluster.tp: 4}]}"
    content, printed = asked(tmp_path, "--refine", "1", "--set", space)
    assert [one["name"] for one in content["deployments"]] == ["TP 2", "TP 4"]
    assert "not between: " in printed and "cluster.tp" in printed


def test_a_search_that_failed_has_no_winner() -> None:
    asked = wanted()
    options, _ = deployable(asked)
    found = Recommendation([chosen_by.Answer(options[0], None, None, "lost")], [], {}, {}, options)
    content = answer_of(found, asked, load_prices(None))
    assert content["deployments"][0]["error"] == "lost"
    assert not any(content[key] for key in ("winner", "command", "load_command", "needs"))


def far(best: Option, others: dict[str, Left], options: list[Option]) -> list[str]:
    """The neighbours of a deployment whose two servers sustain 20 requests/s that are far off."""
    two = best.changed(f"{best.name} x 2", best.scenario.having("cluster", replicas=2))
    first: Any = SimpleNamespace(option=two, load=20.0)
    found = Recommendation([first], [], others, {}, options)
    return [one["name"] for one in far_neighbours(found)]


@pytest.mark.parametrize(
    ("name", "left", "told"),
    [
        ("budget 1024 seqs 128", Left("race", "X", 7.0, "p99 tbt 50ms"), True),
        ("budget 1024 seqs 128", Left("race", None, 0.01, "p99 tbt 50ms"), True),
        ("budget 1024 seqs 128", Left("race", "X", 7.1, "p99 tbt 50ms"), False),
        ("budget 1024 seqs 128", Left("bound", "X", 4.9), True),
        ("budget 1024 seqs 128", Left("bound", "X", 6.5), False),
        ("budget 1024 seqs 128", Left("alone", clause="a token takes 60 ms"), True),
        ("budget 1024 seqs 128", Left("failed", clause="RuntimeError"), False),
        ("budget 576 seqs 128", Left("race", "X", 7.0, "p99 tbt 50ms"), False),
        ("budget 1024 seqs 64", Left("race", "X", 7.0, "p99 tbt 50ms"), False),
    ],
)
def test_what_breaks_next_to_the_best(name: str, left: Left, told: bool) -> None:
    """Where values lie between, and all else is alike."""
    asked = wanted(gpus=1, budget="512,576,1024", seqs="64,128", max_length=1024)
    options, _ = deployable(asked)
    named = {one.name: one for one in options}
    there = [named["TP 1 budget 512 seqs 128"], named[f"TP 1 {name}"]]
    assert far(there[0], {there[1].name: left}, there) == [there[1].name] * told
