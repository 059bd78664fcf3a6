"""The highest load under an SLO: its clauses, the search, and the whole command."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pytest

from sarathi_sim import capacity
from sarathi_sim.experiments.capacity import answer as asking
from sarathi_sim.experiments.capacity import search as searching
from sarathi_sim.experiments.capacity import slo as slos
from sarathi_sim.experiments.capacity.answer import answers, read_question
from sarathi_sim.experiments.capacity.options import options_of, plan_of
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.search import Crossing, Probe, Probed, Search, SearchPlan
from sarathi_sim.experiments.capacity.slo import Objective, Verdict, judge, parse_slo
from sarathi_sim.experiments.config.loading import load_experiment
from sarathi_sim.experiments.report.capacity_charts import cheapest, points
from sarathi_sim.experiments.results import TOKEN_GAPS
from sarathi_sim.experiments.run.uncertainty import capacity_error
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.confidence.quantile import quantile
from tests.experiments.small_config import called, summary_of
from tests.experiments.small_laboratory import analysed, opened, verdict_of

T = TypeVar("T")

# One request at a time, all alike: a queue with one server and a fixed service time.
ONE_SERVER = """\
name: one_server
model: llama-13b
device: a6000
workload:
  requests: 10
  lengths: {kind: fixed, prompt: 256, decode: 1}
  arrivals: {kind: poisson, rate: 1}
cluster: {max_length: 512}
batching: {max_batch: 1}
policy: {name: sarathi, chunk_size: 256}
"""
# Nearly regular arrivals, so that short runs are alike.
REGULAR = """\
name: regular
model: llama-13b
device: a6000
workload:
  requests: 10
  lengths: {kind: fixed, prompt: 200, decode: 8}
  arrivals: {kind: gamma, rate: 1, cv: 0.2}
cluster: {max_length: 512}
policy: {name: sarathi, chunk_size: 256}
capacity:
  slo: p90 ttft 500ms, mean tbt 100ms
  requests: 1500
  replications: {least: 3, most: 4}
  space:
    grid: {batching.max_batch: [2, 6]}
"""


def asked(folder: Path, text: str) -> Path:
    path = folder / "asked.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Laboratory]:
    _, section, _ = read_question(asked(tmp_path, REGULAR), [])
    with opened(tmp_path / "probes", section) as found:
        yield found


# The SLO -------------------------------------------------------------------------------------


def test_an_slo_is_read() -> None:
    said = "P99 TTFT < 1 s, mean itl 50ms, attainment 95% ttft 1s tpot 50 ms, TTFT p95 < 2s"
    found = parse_slo(f"{said}, p99.9 latency 9s")
    assert found == (
        Objective("p99 ttft 1s", {"ttft_s": 1.0}, "p99"),
        Objective("mean itl 50ms", {"tbt_s": 0.05}, "mean"),
        Objective("attainment 95% ttft 1s tpot 50ms", {"ttft_s": 1.0, "tpot_s": 0.05}, "", 0.95),
        Objective("p95 ttft 2s", {"ttft_s": 2.0}, "p95"),
        Objective("p99.9 latency 9s", {"latency_s": 9.0}, "p99.9"),
    )
    assert [one.fewest for one in found] == [1000, 20, 200, 200, 10_000]


@pytest.mark.parametrize(
    "text",
    ["", "p99 ttft", "p0.9 ttft 1s", "p99.95 ttft 1s", "p99 speed 1s", "p99 ttft 0s",
     "p99 ttft 1h", "ttft 1s", "attainment 95% tbt 1s", "attainment 100% ttft 1s",
     "attainment 95%", "p99 ttft 1s,", "p99 ttft 1s, p99 ttft 2s"],
)  # fmt: skip
def test_what_is_no_slo(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected clauses|more than 0|between 0|twice"):
        parse_slo(text)
    path = asked(tmp_path, REGULAR.replace("p90 ttft 500ms, mean tbt 100ms", f'"{text}"'))
    with pytest.raises(UserError, match=r"capacity\.slo"):
        read_question(path, [])


def attainment(objective: slos.Objective, requests: pd.DataFrame, warmup: int) -> float:
    """The share of the judged requests after the warm-up that kept every limit."""
    return slos._share(slos._kept(objective, slos._after(requests, warmup)))


def test_attainment_counts_requests_that_keep_all_limits() -> None:
    (one,) = parse_slo("attainment 50% ttft 1s tpot 50ms")
    table = pd.DataFrame(
        {
            "arrival_s": [0.0, 1, 2, 3, 4],
            "ttft_s": [9.0, 0.5, 1.5, 0.5, 0.5],
            "tpot_s": [0.01, 0.06, 0.01, np.nan, 0.05],  # one of a single token has none
            "latency_s": [1.0, 1, 1, 1, 1],
        }
    )
    assert attainment(one, table, warmup=1) == pytest.approx(1 / 3)
    assert attainment(one, table, warmup=0) == 0.25
    (one,) = parse_slo("attainment 50% tpot 50ms")
    assert attainment(one, table, warmup=0) == 0.75
    assert np.isnan(attainment(one, table[3:4], warmup=0))


def test_a_percentile_that_no_summary_has_comes_from_the_tables(tmp_path: Path) -> None:
    """Of 101 requests whose TTFTs are 0 to 100 s, P37 is 37 s; and 37 % of the gaps are 1 s."""
    table = pd.DataFrame({"arrival_s": range(101), "ttft_s": range(101), "latency_s": 1.0})
    table.to_parquet(tmp_path / "requests.parquet")
    gaps = pd.DataFrame({"tbt_s": [1.0, 2.0], "tokens": [37.0, 63.0]})
    gaps.to_parquet(tmp_path / "token_gaps.parquet")
    run = ran(), slos.RunTables(tmp_path)
    run[0]["after_warmup"]["tbt_s"] = {"p99": 2.0}
    said = "p37 ttft 37s, p36.9 tbt 1s, p37.1 tbt 1s"
    verdict = slos.judge(parse_slo(said), [run], open_loop=False)
    assert list(verdict.values.values()) == [pytest.approx(37.0), 1.0, 2.0]
    assert not verdict.holds and verdict.worst == "p37.1 tbt 1s"


def ran(state: str = "steady", rejected: int = 0, **after: Any) -> dict[str, Any]:
    """The summary of a run of four requests; ``after``: numbers after its warm-up."""
    usual = {"warmup_requests": 0, "ttft_s": {"p99": 0.5}, "latency_trend": 0, "arrivals_s": 100.0}
    usual |= {"latency_s": {"mean": 0.1}, "offered_per_s": 1.0, "served_per_s": 1.0}
    about = {"steady": {"state": state}, "requests": 4, "rejected": rejected}
    return {"after_warmup": usual | after, **about}


def test_overload_and_rejected_requests_break_an_slo() -> None:
    """Overload does where requests arrive by themselves, rejections where none are allowed."""
    slo, over, some = parse_slo("p99 ttft 1s"), ran("overloaded", served_per_s=0.9), ran(rejected=1)
    verdict = judge(slo, [(over, None)], open_loop=True)
    assert (verdict.stress, verdict.holds, verdict.worst) == (0.5, False, "overload")
    assert judge(slo, [(over, None)], open_loop=False).holds
    verdict = judge(slo, [(some, None)], open_loop=True)
    assert (verdict.holds, verdict.rejected, verdict.worst) == (False, 0.25, slos.REJECTED)
    assert judge(slo, [(some, None)], open_loop=True, may_reject=0.25).holds


@pytest.mark.parametrize(
    ("trend", "served", "latency_s", "overloaded"),
    [(45, 9.5, 1.0, True), (45, 9.95, 0.1, False), (5, 9.5, 1.0, False), (45, 9.5, 6.0, False)],
)
def test_a_batch_that_fills_up_is_an_overload(
    trend: int, served: float, latency_s: float, overloaded: bool
) -> None:
    """Nobody waits yet, but latencies rise, and fewer leave than come: in 100 s 50 requests, where
    10 are under way; not where 60 are."""
    latencies = {"tpot_s": {"mean": 0.04}, "latency_s": {"mean": latency_s}}
    summary = ran(**latencies, latency_trend=trend, offered_per_s=10.0, served_per_s=served)
    verdict = judge(parse_slo("mean tpot 50ms"), [(summary, None)], open_loop=True)
    assert verdict.overloaded is overloaded


def test_runs_are_pooled_request_by_request(tmp_path: Path) -> None:
    """Percentiles of all requests together, and of all tokens; not the means of the runs'."""
    rng, runs, ttft, gaps = np.random.default_rng(0), [], [], []
    for number, times in enumerate((1.0, 5.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        table = {"arrival_s": np.arange(100.0), "ttft_s": times * rng.random(100)}
        table |= {"latency_s": np.ones(100), "tpot_s": np.full(100, np.nan)}
        pd.DataFrame(table).to_parquet(folder / "requests.parquet")
        gap = times * rng.random(1000)
        pd.DataFrame({"tbt_s": gap, "tokens": np.ones(1000)}).to_parquet(folder / TOKEN_GAPS)
        runs.append((ran(warmup_requests=20), slos.RunTables(folder)))
        ttft.append(table["ttft_s"][20:])
        gaps.append(gap)
    slo = parse_slo("p90 ttft 1s, p90 tbt 1s, mean tbt 1s, p99 tpot 1s, attainment 50% ttft 1s")
    found = judge(slo, runs, open_loop=True)
    late, apart = np.concatenate(ttft), np.concatenate(gaps)
    assert found.values["p90 ttft 1s"] == pytest.approx(np.percentile(late, 90))
    assert found.values["p90 tbt 1s"] == pytest.approx(np.percentile(apart, 90), rel=0.01)
    assert found.values["mean tbt 1s"] == pytest.approx(apart.mean())
    assert found.values["attainment 50% ttft 1s"] == (late <= 1).mean()
    assert found.stresses["p99 tpot 1s"] == 0  # single tokens have none


# The search ----------------------------------------------------------------------------------


def answer(
    search: Search[T],
    limits: dict[int, float],
    power: float,
    floor: float = 0.0,
    *,
    saturation: float = 1e9,
    latency_s: float = 0.0,
    scatter: float = 0.0,
) -> tuple[T, list[Probe]]:
    """Answer every probe from a stress of (load x slower / limit) ** power, and of another clause
    that has ``floor`` at any load; and what was asked for.

    A run's limit scatters around its seed's with ``scatter`` over the root of its requests.
    """
    asked: list[Probe] = []
    wanted = next(search)
    while True:
        asked += wanted
        found = []
        for probe in wanted:
            limit = limits[probe.seed] if probe.seed in limits else limits[0]
            noise = np.random.default_rng([probe.seed, 7]).normal()
            limit *= math.exp(scatter * noise / math.sqrt(probe.requests))
            part = probe.load * probe.slower / limit
            stresses = {"x": 50.0 if math.isinf(part) else part**power, "floor": floor}
            over = probe.load > saturation > 0 and math.isfinite(probe.load)
            verdict = Verdict(stresses, stresses, overloaded=over)
            lasts = 0.0 if math.isinf(probe.load) else probe.requests / probe.load
            after = {"arrivals_s": lasts, "latency_s": {"mean": latency_s}}
            after |= {"offered_per_s": probe.load, "served_per_s": min(probe.load, saturation)}
            summary = {"requests_per_s": 12.0, "after_warmup": after}
            found.append(Probed(probe, "", summary, verdict))
        try:
            wanted = search.send(found)
        except StopIteration as done:
            return done.value, asked


def averaged(probes: Sequence[Probed]) -> Verdict:
    """The mean of the probes' verdicts, which have no tables to pool."""
    stress = float(np.mean([probed.verdict.stress for probed in probes]))
    most = 2 * sum(probed.verdict.overloaded for probed in probes) > len(probes)
    return Verdict({"x": stress}, {"x": stress}, most)


def plan(tolerance: float, least: int, most: int, **given: Any) -> SearchPlan:
    return SearchPlan(tolerance, least, most, 1000, 1000, 0, averaged, **given)


def searched(
    given: SearchPlan, limits: dict[int, float], power: float, **how: float
) -> tuple[searching.Capacity, list[Probe]]:
    return answer(searching.capacity(given), limits, power, **how)


@pytest.mark.parametrize("power", [0.5, 3.0, 30.0])
def test_the_capacity_is_what_nine_of_ten_carry(power: float) -> None:
    limits = {0: 10.0, 1: 10.1, 2: 9.9, 3: 10.05, 4: 9.95}
    found, probes = searched(plan(0.03, 5, 5), limits, power)
    assert [one.load for one in found.crossings] == pytest.approx(list(limits.values()), rel=1e-3)
    loads = np.array(list(limits.values()))
    expected = quantile(loads.tolist(), 0.1)
    assert found.load == pytest.approx(expected.value, rel=1e-3)
    assert found.interval == pytest.approx(expected.interval, rel=1e-3)
    assert expected.value == pytest.approx(10 - 1.28 * loads.std(ddof=1), rel=0.005)
    assert found.spread == pytest.approx(loads.std(ddof=1) / 10, rel=1e-2)
    assert len(probes) < 50
    assert found.verdict is not None and found.verdict.holds
    assert [one.probe.seed for one in found.at] == [0, 1, 2, 3, 4]
    assert {one.probe.load for one in found.at} == {found.load}


def test_the_capacity_does_not_depend_on_the_number_of_replications() -> None:
    """The least of them falls with it; the mean of many searches of each size shows no trend."""
    means = {}
    for count in (3, 10, 40):
        found = []
        for start in range(0, 60 * 40, 40):
            seeds = np.random.default_rng(start).normal(0, 0.05, count)
            limits = {number: 10 * math.exp(each) for number, each in enumerate(seeds)}
            found.append(searched(plan(0.002, count, count), limits, 4.0)[0].load)
        means[count] = np.mean(found)
    true = 10 * math.exp(-1.2816 * 0.05)
    assert means[40] == pytest.approx(true, rel=0.006)
    assert means[3] == pytest.approx(true, rel=0.02)
    assert means[10] == pytest.approx(true, rel=0.01)


def test_replications_come_until_the_interval_is_narrow() -> None:
    limits = {seed: 10 + 0.2 * (-1) ** seed for seed in range(30)}
    found, _ = searched(plan(0.06, 3, 30), limits, 4.0)
    low, high = found.interval
    assert 3 < len(found.crossings) < 30
    assert (high - low) / found.load <= 0.0601
    narrow, _ = searched(plan(0.002, 2, 5), limits, 4.0)
    assert len(narrow.crossings) == 5


@pytest.mark.parametrize(("power", "floor"), [(6.0, 0.0), (30.0, 0.0), (30.0, 0.9)])
def test_a_replication_takes_one_probe_near_the_others(power: float, floor: float) -> None:
    """Its own crossing follows from the slope of the clause that breaks, although another has the
    largest stress below it; where the others say too little, it takes two probes or bisection."""
    limits = {seed: 10 * (1 + 0.01 * each) for seed, each in enumerate((0, 1, -2, 3, -3, 2, -1, 4))}
    found, probes = searched(plan(0.03, 8, 8), limits, power, floor=floor)
    assert [one.load for one in found.crossings] == pytest.approx(list(limits.values()), rel=1e-3)
    apart = [probe for probe in probes if probe.load != found.load and probe.seed >= 3]
    assert Counter(probe.seed for probe in apart) == dict.fromkeys(range(3, 8), 1)
    twice = Counter(probe.seed for probe in probes if probe.load != found.load)
    assert twice[1] == twice[2] == 2, "two of the first three tell a slope, too"
    far, probes = searched(plan(0.03, 8, 8), limits | {7: 14.0, 6: 7.0}, power, floor=floor)
    assert [far.crossings[seed].load for seed in (6, 7)] == pytest.approx([7.0, 14.0], rel=0.01)
    assert far.load < 0.9 * found.load


def test_runs_are_lengthened_before_they_are_replicated() -> None:
    """Arrivals must last 20 times 10 s: of 10 requests/s 2,000. The first replication shows it; no
    other one has a shorter run."""
    found, probes = searched(plan(0.03, 5, 5), {0: 10.0}, 4.0, latency_s=10.0)
    assert {one.probe.requests for one in found.at} == {2200} and not found.unsettled
    assert {probe.requests for probe in probes if probe.seed} == {2200}


def test_clients_are_whole_and_some_slo_no_load_keeps() -> None:
    found, _ = searched(plan(0.03, 2, 2, whole=True), {0: 41.7, 1: 40.2}, 2)
    assert [one.load for one in found.crossings] == [41, 40]
    assert found.load == 39  # a tenth of such replications has less than 39.6
    few, _ = searched(plan(0.03, 2, 2, whole=True), {0: 1.5, 1: 1.2}, 2)
    assert few.load == 1
    none, probes = searched(plan(0.03, 2, 2), {0: 1e-9, 1: 1e-9}, 0.01)
    assert (none.load, none.carried, none.crossings) == (0.0, 0.0, ())
    assert len(probes) < 40


def test_a_capacity_is_at_most_the_saturation() -> None:
    """What short runs are seen to keep counts for nothing above what is served under overload."""
    found, _ = searched(plan(0.03, 5, 5), {0: 30.0}, 4.0, saturation=20.0)
    assert found.saturation == 20.0
    assert found.load == pytest.approx(20.0, rel=0.03)
    assert found.load <= 20.0
    near = plan(0.03, 5, 5, variance=0.1)  # the load that 1,000 requests offer scatters by 1 %
    found, _ = searched(near, {0: 30.0}, 4.0, saturation=20.0)
    assert found.load == pytest.approx(0.98 * 20.0, rel=0.001)
    assert found.interval[1] <= 20.0
    short, _ = searched(near, {0: 30.0}, 4.0, saturation=0.0)  # nothing ends by the last arrival
    assert short.saturation == math.inf and short.load == pytest.approx(30.0, rel=0.03)


@pytest.mark.parametrize(("limit_s", "latency_s"), [(20.0, 0.0), (0.1, 20.0)])
def test_arrivals_last_many_times_what_they_judge(limit_s: float, latency_s: float) -> None:
    """Whatever the tolerance: 20 times the SLO's largest limit, and the mean latency."""
    for tolerance in (0.02, 0.5):
        wanted = plan(tolerance, 3, 3, limit_s=limit_s)
        found, probes = searched(wanted, {0: 10.0}, 4.0, latency_s=latency_s)
        assert not found.unsettled
        assert all(one.arrivals_s >= 20 * 20 for one in found.at)
        assert max(probe.requests for probe in probes) < 20_000


def test_a_budget_that_is_too_small_settles_nothing() -> None:
    wanted = plan(0.05, 3, 3, limit_s=20.0, budget=2000)
    found, probes = searched(wanted, {0: 10.0}, 4.0)
    assert "runs of 2,000 requests last 2" in found.unsettled
    assert "less than 20 times 20.0 s" in found.unsettled
    assert found.carried == 0
    assert max(probe.requests for probe in probes) == 2000


def test_a_search_with_fewer_requests_than_any_needs_settles_nothing(tmp_path: Path) -> None:
    """1,000 where 2,500 are needed, whatever the tolerance; but as many as are asked for settle."""
    found, _ = searched(plan(0.05, 3, 3, budget=1000, fewest=2500), {0: 10.0}, 4.0)
    told = "runs have 1,000 requests: 2,500 are needed for any tolerance"
    assert (found.unsettled, found.carried) == (told, 0)
    found, probes = searched(plan(0.05, 3, 3, fewest=2500), {0: 10.0}, 4.0)
    assert not found.unsettled and found.at[0].probe.requests >= 2500
    assert max(probe.requests for probe in probes) >= 2500
    for limits, fewest in (("most_requests: 300", 2500), ("requests: 300", 0)):
        text = REGULAR.replace("requests: 1500", f"tolerance: 0.5\n  {limits}")
        _, section, (option, _) = read_question(asked(tmp_path, text), [])
        planned = plan_of(option, section, "here")
        assert (planned.fewest, planned.requests) == (fewest, 300)


def test_runs_are_longer_where_they_scatter() -> None:
    limits = dict.fromkeys(range(5), 10.0)
    few, _ = searched(plan(0.05, 5, 5), limits, 4.0, scatter=0.5)
    many, _ = searched(plan(0.05, 5, 5), limits, 4.0, scatter=4.0)
    assert few.at[0].probe.requests == 1000
    assert many.at[0].probe.requests == 4000  # four times as many, once
    assert many.spread == pytest.approx(4 * few.spread, rel=0.1)  # and not eight times


def test_the_curve_shows_where_the_slo_breaks() -> None:
    found, _ = searched(plan(0.05, 3, 3), {0: 10.0}, 4.0)
    parts = [one.probe.load / found.load for one in found.curve]
    assert parts == pytest.approx([0.5, 0.7, 0.85, 0.95, 1.05], rel=1e-3)
    assert [one.verdict.holds for one in found.curve] == [True, True, True, True, False]


def test_an_slo_that_no_load_breaks_ends_the_search(laboratory: Laboratory, tmp_path: Path) -> None:
    for whole in (False, True):
        with pytest.raises(searching.UnbreakableError, match="holds under any load"):
            searched(plan(0.03, 2, 2, whole=whole, budget=4000), {0: 1e30, 1: 1e30}, 1.0)
    text = REGULAR.replace("p90 ttft 500ms, mean tbt 100ms", "mean tbt 100s, p50 ttft 300s")
    text = text.replace("requests: 1500", "requests: 40\n  most_requests: 40\n  load: clients")
    _, section, options = read_question(asked(tmp_path, text), [])
    (found,) = answers(replace(laboratory, section=section), options[:1], "here", bands=False)
    assert found.error.startswith("the SLO holds under any load: limit ttft or latency, too, or")


def test_a_band_compares_searches_that_are_alike() -> None:
    """Also where the clause that breaks is not the one that comes next to its limit below."""
    limit = {0: 10.0}
    rough, _ = answer(searching.pilot(plan(0.03, 2, 2)), limit, 60.0, floor=0.9)
    assert isinstance(rough, Crossing)
    for factor in (1.01, 1.02, 1.04):
        search = asking._scaled_pilots(plan(0.03, 2, 2), rough, [1 / factor, factor])
        found, probes = answer(search, limit, 60.0, floor=0.9)
        assert found == pytest.approx((1 / factor, factor), rel=1e-3)
        assert len(probes) < 30


@pytest.mark.parametrize(("goal", "probes"), [(10.5, 1), (8.0, 6), (0.0, 8)])
def test_a_race_searches_only_what_reaches_the_goal(goal: float, probes: int) -> None:
    found, asked = answer(searching.race(plan(0.05, 3, 3), goal, 3.0), {0: 10.0}, 4.0)
    assert len(asked) <= probes
    if goal > 10:
        assert isinstance(found, Probed)
        assert found.probe == Probe(goal, 0, 1000)
    else:
        assert isinstance(found, Crossing)
        assert found.load == pytest.approx(10.0, rel=1e-3)


def test_a_race_ends_with_the_throughput_if_no_load_breaks_the_slo() -> None:
    """The laboratory above serves 12 requests a second when all come at once."""
    for goal in (0.0, 8.0):
        found, asked = answer(searching.race(plan(0.05, 3, 3), goal, 3.0), {0: 1e12}, 4.0)
        assert found == 12.0 and math.isinf(asked[-1].load)


# Simulated -----------------------------------------------------------------------------------


def served_s(path: Path) -> float:
    """The time of a request that is alone."""
    experiment = load_experiment(path, ["workload.requests=1"])
    return float(analysed(experiment.scenarios["one_server"]).requests["latency_s"].iloc[0])


@pytest.mark.slow
def test_a_queue_with_one_server_carries_what_theory_says(tmp_path: Path) -> None:
    """M/D/1: the mean time in the system is D (1 + load D / (2 (1 - load D)))."""
    path = asked(tmp_path, ONE_SERVER)
    service_s = served_s(path)
    limit = f"{1.5 * service_s * 1e6:.0f}us"
    asks = f"capacity={{slo: mean ttft {limit}, tolerance: 0.06}}"
    draft, section, options = read_question(path, [asks])
    with opened(tmp_path / "probes", section) as lab:
        (found,) = answers(lab, options, "here", bands=False)
    assert found.found is not None
    assert found.load == pytest.approx(0.5 / service_s, rel=0.08)
    assert found.load < 0.51 / service_s
    assert draft.header.name == "one_server"
    assert asking.as_json(found, "rate")["binds"]["because"] in ("queueing", "iterations")


@pytest.mark.slow
def test_slower_ops_cost_what_theory_says(tmp_path: Path) -> None:
    """The band of a capacity: with f times the service time D the mean time in the system,
    f D (1 + x / (2 (1 - x))) at a utilisation of x = f load D, is 1.5 D at another load."""

    def load(factor: float) -> float:
        waits = 1.5 / factor - 1
        return 2 * waits / (1 + 2 * waits) / factor

    path = asked(tmp_path, ONE_SERVER)
    asks = f"capacity={{slo: mean ttft {served_s(path) * 1.5e6:.0f}us, requests: 2000}}"
    draft, section, (option,) = read_question(path, [asks])
    plan = plan_of(option, section, draft.source.file)
    assert plan.pilot_requests == 1000
    plan = replace(plan, pilot_requests=8000)  # means as good as those of theory

    def ratios() -> Search[tuple[float, float]]:
        rough = yield from searching.pilot(plan)
        assert isinstance(rough, Crossing)
        return (yield from asking._scaled_pilots(plan, rough, [0.9, 1.1]))

    with opened(tmp_path / "probes", section) as lab:
        found = lab.pursue({option: ratios()})
    expected = (load(1.1) / load(1.0), load(0.9) / load(1.0))
    assert found[option] == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_a_little_less_holds_and_a_little_more_breaks(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    """Independent runs: other seeds, through the configuration as a user would write it."""
    _, section, options = read_question(tmp_path / "asked.yaml", [])
    found = answers(laboratory, options, "here", bands=False)
    assert found[1].load > 1.5 * found[0].load > 0
    for one in found:
        for part, holds in ((0.99, True), (1.06, False)):
            for seed in (100, 101, 102):
                probe = Probe(part * one.load, seed, 5 * (section.requests or 0))
                scenario = one.option.at(probe, "rate").scenario
                verdict = verdict_of(scenario, section.objectives)
                assert verdict.holds is holds, (one.option.name, part, verdict)


def test_runs_are_too_short_for_the_percentile_or_longer_than_usual(tmp_path: Path) -> None:
    text = REGULAR.replace("p90 ttft", "p99 ttft").replace("requests: 1500", "requests: 100")
    draft, section, options = read_question(asked(tmp_path, text), [])
    with pytest.raises(UserError, match=r"capacity\.requests: 100 requests .* at least 1000"):
        plan_of(options[0], section, draft.source.file)
    many = "capacity={slo: mean ttft 1s, requests: 10000000, most_requests: 10000000}"
    draft, section, (option,) = read_question(asked(tmp_path, ONE_SERVER), [many])
    assert plan_of(option, section, draft.source.file).requests == 10_000_000


def test_runs_are_as_long_as_the_tolerance_asks(tmp_path: Path) -> None:
    text = REGULAR.replace("  requests: 1500\n", "")
    path = asked(tmp_path, text)
    _, section, options = read_question(path, [])
    assert plan_of(options[0], section, "").requests == 2500  # regular arrivals, equal lengths
    gaps = {"kind": "poisson", "rate": 1.0}
    _, section, options = read_question(path, [f"workload.arrivals={gaps}"])
    found = plan_of(options[0], section, "")
    assert found.requests == pytest.approx(1 / (0.03 / 2) ** 2, rel=0.3)  # by 1,000 gaps
    _, section, options = read_question(
        path, [f"workload.arrivals={gaps}", "capacity.tolerance=0.3", "cluster.replicas=4"]
    )
    found = plan_of(options[0], section, "")
    assert (found.requests, found.scale, found.budget) == (2500, 4, 100_000)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("capacity:", "capacities:", "capacity: this section is missing"),
        ("{least: 3, most: 4}", "{least: 5, most: 4}", "must be at most replications.most"),
        ("{batching.max_batch: [2, 6]}", "{workload.requests: [2]}", "is not part of a deployment"),
        ("    grid:", "    gird:", "gird: unknown key"),
        ("[2, 6]", "[2, 0]", "batching.max_batch: value 0"),
        ("least: 3", "least: 1", "capacity.replications.least: value 1"),
        ("1500", "10000000", "value 10000000: must be at most 100000, capacity.most_requests"),
        (
            "prompt: 200, decode: 8}",
            "prompt: 600, decode: 8}\n  too_long: reject",
            "max_length: value 512: every request is rejected: the longest one needs 608 tokens",
        ),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = asked(tmp_path, REGULAR.replace(old, new))
    done = called("capacity", path, "--out", tmp_path / "out", code=2)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path, out = asked(tmp_path, REGULAR), tmp_path / "out"
    words = ("capacity", path, "--out", out, "--workers", "1", "--json")
    done = called(*words)
    content = json.loads(done.stdout)
    assert content == summary_of(out)
    for one in content["deployments"]:
        assert one["interval"][0] <= one["capacity"] <= one["interval"][1]
        assert one["capacity"] <= one["saturation"]
        assert one["at_capacity"]["holds"] and one["settled"]
        assert len(one["at_capacity"]["runs"]) == len(one["replications"])
        assert max(one["curve"], key=lambda probe: probe["load"])["holds"] is False
        less, more = (bound / one["capacity"] for bound in one["band"])
        assert less < 0.97 < 1.03 < more, "ops are known to about 5 %"
        shares = [[end / one["capacity"] for end in one[key]] for key in ("interval", "band")]
        logs = np.log([*shares, np.exp(np.array([-1, 1]) * capacity_error().half_width["dense"])])
        whole = np.hypot.reduce(logs, axis=0) * [-1, 1]
        assert one["uncertainty"] == pytest.approx(one["capacity"] * np.exp(whole))
    assert pd.read_csv(out / "headroom.csv")["p90 ttft 500ms, part of the limit"].max() > 1
    assert (out / "figures" / "pareto_cost_slo.svg").is_file()
    probes = pd.read_parquet(out / "probes" / "results.parquet")
    assert len(probes) == content["probes"]

    # The same question again takes every probe from the folder, and gives the same bytes.
    before = (out / "summary.json").read_bytes()
    called(*words, "--quiet")
    assert (out / "summary.json").read_bytes() == before
    (tmp_path / "mine.yaml").write_text("date: 2026-01-01\ngpu_hour: {h100: 2.5}\n")
    mine = called(*words, "--no-bands", "--prices", tmp_path / "mine.yaml")
    assert "per_million_output_tokens" not in json.loads(mine.stdout)["deployments"][0]
    assert not (out / "figures" / "pareto_cost_slo.svg").exists()
    assert len(list((out / "probes" / "runs").iterdir())) == len(probes)
    (out / "mine.txt").write_text("mine")
    assert "mine.txt" in called(*words, code=2).stderr


def test_a_relaxed_slo_costs_less() -> None:
    """Each load by what its limits would have to be; none helps a queue that grows."""

    def probe(load: float, stress: float, overloaded: bool = False) -> dict[str, Any]:
        about = {"run": "r", "holds": stress <= 1, "overloaded": overloaded, "load": load}
        numbers = {"requests_per_s": 0.9 * load, "output_tokens_per_s": 9.0 * load}
        numbers["input_tokens_per_s"] = 90.0 * load
        drawn = dict.fromkeys(("ttft_p99_s", "tbt_p99_s", "tokens_per_s_per_user"), 1.0)
        gpu = {"output_tokens_per_s_per_gpu": load}
        return {**about, **numbers, **drawn, **gpu, "stress": {"a": stress, "b": 0.1}}

    curve = [probe(1.0, 0.5), probe(2.0, 0.4), probe(4.0, 2.0), probe(9.0, 0.6, overloaded=True)]
    row: dict[str, Any] = {"name": "one", "curve": curve, "at_capacity": probe(2.0, 0.4)}
    row |= {"settled": True, "capacity": 2.0}
    asking.add_costs(row, 3.6)
    assert row["per_million_output_tokens"] == pytest.approx(1e3 / 18)
    assert row["per_million_input_tokens"] == pytest.approx(100 / 18)
    table = points([row])
    assert table["stress"].isna().tolist() == [False, False, False, True]
    limits, costs = cheapest(table.dropna())
    assert limits.tolist() == [0.4, 0.5, 2.0]
    assert costs == pytest.approx([1e3 / 18, 1e3 / 18, 1e3 / 36])
    none: dict[str, Any] = {"name": "none", "at_capacity": None}
    asking.add_costs(none, 3.6)
    assert none["per_million_output_tokens"] is None


def test_a_run_that_fails_is_said(laboratory: Laboratory, tmp_path: Path) -> None:
    draft, section, _ = read_question(tmp_path / "asked.yaml", [])
    options = options_of(draft, section)

    def broken() -> Search[searching.Capacity]:
        (probed,) = yield [Probe(-1.0, 0, 1500)]
        raise AssertionError(probed)

    found = laboratory.pursue({options[0]: broken()})
    why = found[options[0]]
    assert isinstance(why, str)
    row = asking.as_json(asking.Answer(options[0], None, None, why), "rate")
    assert row["capacity"] is None


def test_a_crossing_knows_its_slope() -> None:
    def probed(load: float, stress: float) -> Probed:
        verdict = Verdict({}, {"x": stress}, overloaded=False)
        return Probed(Probe(load, 0, 1), "", {}, verdict)

    assert Crossing(1.0, probed(1.0, 0.9), probed(1.1, 0.9 * 1.1**4)).slope == pytest.approx(4)


@pytest.mark.slow
def test_the_number_of_replications_moves_no_capacity(tmp_path: Path) -> None:
    """Once 23.0 of 3, 20.9 of 10 and 17.4 of 100 replications, beside the interval of the mean."""
    lengths = {"kind": "uniform", "min": 100, "max": 900}
    tree = {"name": "cap", "model": "llama-3-8b", "device": "a100-80g-sxm",
            "workload": {"lengths": lengths, "pd_ratio": 4}, "cluster": {"max_length": 1024},
            "policy": {"name": "vllm", "max_num_batched_tokens": 512}}  # fmt: skip
    asked, found = {"slo": "p90 ttft 0.5s", "tolerance": 0.02, "requests": 200}, {}
    for count in (5, 10, 30):
        section = {**asked, "replications": {"least": count, "most": count}}
        (one,) = capacity(tree | {"capacity": section}, bands=False)["deployments"]
        low, high = one["interval"]
        assert low <= one["capacity"] <= high
        found[count] = one["capacity"], low, high
    assert found[5][0] == pytest.approx(found[30][0], rel=0.05)
    assert found[10][0] == pytest.approx(found[30][0], rel=0.03)
    assert found[10][1] <= found[30][0] <= found[10][2]
