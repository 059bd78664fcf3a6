"""The judge of answers, against closed forms, counts by hand, and full runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.config.scenario import POOLS
from sarathi_sim.simulator.loop.routers import ROUTERS
from sarathi_sim.simulator.views.metrics import Analysis
from tests.answers import judge
from tests.answers.asking import SHOWS, one_fewer
from tests.answers.questions import SPECIAL, Trace, limited, question


def scenario(**workload: Any) -> dict[str, Any]:
    usual = {"requests": 4000, "lengths": {"kind": "fixed", "prompt": 256, "decode": 1}}
    usual |= {"arrivals": {"kind": "poisson", "rate": 1.0}, "declared": "exact"}
    policy = {"policy": {"name": "sarathi", "chunk_size": 256}, "batching": {"max_batch": 1}}
    about = {"model": "llama-13b", "device": "a6000", "cluster": {"max_length": 1024}}
    return {**about, **policy, "workload": usual | workload}


def deployed(of: dict[str, Any]) -> Any:
    where = Source("test", "", {}, ())
    return deploy(check_scenario(of, where), where)


def service_s() -> float:
    alone = Analysis(deployed(scenario(requests=1)).simulate())
    return float(alone.request_columns["ttft_s"][0])


def test_clauses_of_an_slo() -> None:
    first, second, third = judge.read_slo(
        "p99 ttft 1.5s, mean itl 50ms, attainment 95% e2e 2s tpot 800us"
    )
    assert (first.statistic, first.limits) == ("p99", {"ttft_s": 1.5})
    assert (second.statistic, second.limits) == ("mean", {"tbt_s": pytest.approx(0.05)})
    assert third.share == pytest.approx(0.95)
    assert third.limits == {"latency_s": 2.0, "tpot_s": pytest.approx(0.0008)}


@pytest.mark.slow
def test_one_server_with_fixed_service_is_an_md1_queue(tmp_path: Path) -> None:
    takes, part = service_s(), 0.5
    asked = scenario(arrivals={"kind": "poisson", "rate": part / takes})
    mean = takes * (1 + part / (2 * (1 - part)))  # Pollaczek and Khinchine
    slo = f"mean ttft {1e3 * mean:.6f}ms"
    found = judge.judged("one", slo, asked, 1.0, (1, 2, 3), tmp_path)
    assert found.parts[slo] == pytest.approx(1, abs=0.03)
    assert found.nearly and not found.growing and found.seeds == 3
    assert found.requests == pytest.approx(0.9 * 3 * 5 * 4000, rel=0.01)
    over = judge.judged("one", "mean ttft 20s", asked, 2.4, (1,), tmp_path, times=1)
    assert over.growing == 1 and not over.keeps and not over.nearly
    assert over.load == pytest.approx(1.2 / takes)
    high = judge.judged("one", "mean ttft 20s", asked, 1.8, (1,), tmp_path, times=1)
    assert not high.growing and high.keeps


def test_values_by_hand() -> None:
    nan = np.nan
    seen = judge.Observed(
        {
            "ttft_s": np.array([1.0, 2.0, 3.0, nan]),
            "tpot_s": np.array([0.1, nan, 0.3, nan]),
            "tbt_max_s": np.array([0.2, nan, 0.4, nan]),
            "latency_s": np.array([2.0, 2.0, 5.0, nan]),
        },
        np.array([False, False, False, True]),
        np.array([0.1, 0.2, 0.3]),
        np.array([5, 3, 2]),
    )
    expected = {
        "mean ttft 1s": 2.0,
        "p50 latency 1s": 2.0,
        "p90 ttft 1s": 2.8,
        "mean tbt 1s": 0.17,
        "p50 tbt 1s": 0.1,
        "p90 tbt 1s": 0.3,
        "p50 tpot 1s": 0.2,
        "attainment 50% ttft 2s tpot 200ms": 0.5,  # the second has no tpot; the fourth is rejected
        "attainment 50% latency 9s": 0.75,
    }
    for text, there in expected.items():
        (clause,) = judge.read_slo(text)
        assert judge.value(clause, seen) == pytest.approx(there), text


def test_a_rejected_request_breaks_an_slo_unless_it_is_allowed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{at},{900 if at % 2 else 100},2" for at in range(400)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    asked = scenario(lengths={"kind": "trace", "path": str(trace)}, requests=None)
    asked["workload"] |= {"too_long": "reject", "arrivals": {"kind": "trace"}}
    asked["cluster"]["max_length"] = 512
    found = judge.judged("half", "p90 ttft 2s", asked, 1.0, (1,), tmp_path, times=1)
    assert found.rejected == pytest.approx(0.5, abs=0.02)
    assert found.parts["p90 ttft 2s"] < 1 and not found.keeps and not found.nearly
    found = judge.judged("half", "p90 ttft 2s", asked, 1.0, (1,), tmp_path, times=1, allowed=0.6)
    assert found.keeps


@pytest.mark.parametrize("arrivals", [{"kind": "poisson"}, {"kind": "gamma", "cv": 2.0}])
def test_every_third_request_on_one_replica_is_the_full_run(arrivals: dict[str, Any]) -> None:
    asked = scenario(
        requests=600,
        lengths={"kind": "uniform", "min": 100, "max": 900},
        pd_ratio=8,
        arrivals={**arrivals, "rate": 6.0},
        system_prompts={"common": {"share": 0.5, "tokens": 64}},
    )
    asked["cluster"]["replicas"] = 3
    asked["policy"] = {"name": "vllm", "max_num_batched_tokens": 512, "max_num_seqs": 16}
    del asked["batching"]
    whole = deployed(asked)
    full = Analysis(whole.simulate()).request_columns
    for place in range(3):
        alone = Analysis(judge.one_of(whole, place).simulate()).request_columns
        for name in (*judge.REQUEST_METRICS, "arrival_s"):
            np.testing.assert_array_equal(alone[name], full[name][place::3])


def test_only_replicas_that_take_turns_are_independent() -> None:
    assert judge.independent(scenario())
    assert not judge.independent(scenario(arrivals={"kind": "closed_loop", "clients": 3}))
    assert not judge.independent(scenario(sessions={"max_turns": 2, "think_s": 1}))
    assert not judge.independent({**scenario(), "disaggregation": {}})
    routed = scenario()
    for router in ROUTERS:
        routed["cluster"]["router"] = router
        assert judge.independent(routed) == (router == "round_robin")


def two_pools(prefill: int, decode: int) -> dict[str, Any]:
    counts = zip(POOLS, (prefill, decode), strict=True)
    return {"disaggregation": {pool: {"cluster": {"replicas": count}} for pool, count in counts}}


SHORT = {
    "pools": two_pools(1, 1),
    "ranks": {"model": "qwen3-30b-a3b", "cluster": {"dp": 2, "max_length": 1024}},
    "drafts": {"speculation": {"method": "eagle3", "draft_length": 1, "acceptance": [0.5]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
def test_at_a_low_load_a_request_is_as_fast_as_alone(kind: str, tmp_path: Path) -> None:
    lengths = {"kind": "fixed", "prompt": 256, "decode": 4}
    asked = scenario(lengths=lengths, arrivals={"kind": "poisson", "rate": 0.5})
    asked |= {"model": "llama-3.1-8b", "device": "h100-80g-sxm", "stack": "vllm"}
    asked |= {"policy": limited("vllm", 512, 16), "batching": {}, **SHORT[kind]}
    assert SHOWS[kind](asked)
    one = {**asked, "workload": {**asked["workload"], "requests": 1}}
    alone = Analysis(deployed(one).simulate()).request_columns["ttft_s"][0]
    slo = f"p50 ttft {1e3 * alone:.6f}ms"
    found = judge.judged(kind, slo, asked, 1.0, (1,), tmp_path, times=1)
    assert found.parts[slo] == pytest.approx(1, abs=1e-3)


def test_one_replica_or_worker_fewer() -> None:
    asked = scenario()
    for replicas, expected in ((1, []), (3, [2])):
        asked["cluster"]["replicas"] = replicas
        assert [fewer["cluster"]["replicas"] for fewer in one_fewer(asked)] == expected
    for workers, less in (((2, 3), [(1, 3), (2, 2)]), ((1, 2), [(1, 1)]), ((1, 1), [])):
        assert list(one_fewer(two_pools(*workers))) == [two_pools(*each) for each in less]


def test_a_rerun_lasts_many_times_the_largest_limit(tmp_path: Path) -> None:
    asked = scenario(requests=100, arrivals={"kind": "poisson", "rate": 2.0})
    asked["batching"]["max_batch"] = 16
    seen, shortened = judge.rerun(asked, 1, 5.0, tmp_path, least_s=3000.0)
    assert seen.requests == pytest.approx(0.9 * 3000 * 2, rel=0.1) and not shortened
    seen, shortened = judge.rerun(asked, 1, 5.0, tmp_path)
    assert seen.requests == pytest.approx(0.9 * judge.FLOOR, rel=0.05) and not shortened


def test_load_and_one_client_more() -> None:
    asked = scenario(arrivals={"kind": "closed_loop", "clients": 4})
    assert judge.load_of(judge.loaded(asked, 1.0)) == 4
    assert judge.load_of(judge.loaded(asked, 1.1)) == 5
    assert judge.load_of(judge.loaded(asked, 1.5)) == 6
    assert judge.load_of(judge.loaded(scenario(), 1.5)) == 1.5
    assert judge.load_of(asked) == 4


def test_a_resampled_trace_has_the_trace_s_lengths_and_rate() -> None:
    source = Trace(1, 4000, prompt=500, output=80, sigma=0.6, longest=4096, cv=2.0)
    lines = source.csv().split()
    table = np.array([line.split(",") for line in lines[1:]], float)
    trace = pd.DataFrame(table, columns=lines[0].split(","))
    found = judge.resample(trace, 40_000, seed=2)
    assert len(found) == 40_000
    assert not found.equals(judge.resample(trace, 40_000, seed=3))
    for name in ("prompt_tokens", "output_tokens"):
        for q in (0.1, 0.5, 0.9, 0.99):
            assert found[name].quantile(q) == pytest.approx(trace[name].quantile(q), rel=0.05)
    assert found["arrival_s"].is_monotonic_increasing
    rate = len(trace) / trace["arrival_s"].iloc[-1]
    assert len(found) / found["arrival_s"].iloc[-1] == pytest.approx(rate, rel=1e-6)
    gaps = np.diff(found["arrival_s"])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)
    # Neighbours stay neighbours.
    pairs = set(zip(trace["prompt_tokens"], trace["prompt_tokens"].shift(-1), strict=True))
    kept = zip(found["prompt_tokens"], found["prompt_tokens"].shift(-1), strict=True)
    assert np.mean([pair in pairs for pair in kept]) > 0.99


def test_the_first_sixty_are_of_all_kinds_and_each_has_a_seed_of_its_own() -> None:
    asked = [question(number) for number in range(60)]
    assert asked[7] == question(7) != question(7, seed=1)
    kinds = Counter(word for one in asked for word in one.kind.split(", "))
    assert [kinds[special] for special in SPECIAL] == [5, 5, 5]
    assert min(kinds[kind] for kind in ("trace", "clients", "bursty", "sessions", "rate")) >= 2
    both = {(one.command, special) for one in asked for special in SPECIAL if special in one.kind}
    assert len(both) == 2 * len(SPECIAL)  # by either command
    for one in asked:
        assert judge.read_slo(one.slo)
        assert 0.05 <= one.tolerance <= 0.5
