"""Two pools in a configuration: what each gets, what is refused, and what becomes of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sarathi_sim as sim
from sarathi_sim import capacity
from sarathi_sim.experiments.capacity.answer import (
    Answer,
    as_json,
    binding,
    capacities,
    read_question,
    slower_factors,
)
from sarathi_sim.experiments.capacity.options import Option, plan_of
from sarathi_sim.experiments.capacity.search import Capacity, Probe, Probed
from sarathi_sim.experiments.capacity.sensitivity import factors_of
from sarathi_sim.experiments.capacity.slo import Verdict
from sarathi_sim.experiments.config.deployment import PoolsDeployment
from sarathi_sim.experiments.config.effects import ops_of
from sarathi_sim.experiments.config.loading import load_experiment, stored
from sarathi_sim.experiments.report.run_answers import comparison_section, number_row
from sarathi_sim.experiments.results import to_json
from sarathi_sim.experiments.run.compare import simulate_again
from sarathi_sim.experiments.run.uncertainty import PER_MAKESPAN, PoolsUncertainty, op_factors
from sarathi_sim.experiments.sweeps.jobs import Job, folder_files
from sarathi_sim.experiments.sweeps.plan import plan_sweep, run_key
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, SEND_RECV
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.views.metrics import PARTS, Analysis, Hardware
from tests.experiments.small_config import called, deployed, message, summary_of

TWO = yaml.safe_load("""\
name: two
model: llama-3-8b
device: a100-80g-sxm
workload:
  requests: 60
  lengths: {kind: random, prompt: 500, decode: 20, range_ratio: 0.5}
  arrivals: {kind: poisson, rate: 8}
cluster: {max_length: 4096}
policy: {name: vllm, max_num_batched_tokens: 2048, max_num_seqs: 64}
disaggregation:
  prefill: {cluster: {replicas: 2}}
  decode: {cluster: {tp: 2}, policy: {max_num_seqs: 8}}
""")


def two(*assignments: str) -> PoolsDeployment:
    (found,) = deployed(TWO, *assignments).values()
    assert isinstance(found, PoolsDeployment)
    return found


def test_each_pool_has_its_own_keys_and_the_scenarios_for_the_rest() -> None:
    found = two("cluster.pp=2", "disaggregation.decode.cluster.pp=1")
    prefill, decode = (pool.scenario for pool in found.pools)
    assert (prefill.cluster.tp, prefill.cluster.pp, prefill.cluster.replicas) == (1, 2, 2)
    assert (decode.cluster.tp, decode.cluster.pp, decode.cluster.replicas) == (2, 1, 1)
    sizes = [pool.policy.described()["max_num_seqs"] for pool in (prefill, decode)]
    budgets = [pool.policy.described()["max_num_batched_tokens"] for pool in (prefill, decode)]
    assert sizes == [64, 8] and budgets == [2048, 2048]
    assert [len(pool.layers) for pool in found.pools] == [2, 1]
    assert found.gpus == {"a100-80g-sxm": 2 * 2 + 2}
    assert all(r.output_tokens == 1 == r.max_tokens for r in found.prefill.requests)
    assert [r.prompt_tokens for r in found.prefill.requests] == [
        r.prompt_tokens for r in found.requests
    ]


def test_the_handover_is_that_of_the_engine_or_what_is_given() -> None:
    over = two().handover
    assert (over.order, over.first_token) == ("prefill_first", "decode_step")
    assert not over.first_token_known
    # 32 layers of 8 heads of 128 keys and values, in two bytes.
    assert over.token_s == 32 * 2 * 8 * 128 * 2 / 50e9
    over = two("policy={name: sglang}", "disaggregation.decode.policy={name: sglang}").handover
    assert (over.order, over.first_token) == ("decode_reserves_first", "on_transfer")
    assert over.first_token_known and (over.setup_s, over.latency_s) == (0.04, 0.035)
    given = ("policy={name: trtllm}", "disaggregation.decode.policy={max_batch_size: 4}")
    over = two(
        *given,
        "disaggregation.handover={order: decode_reserves_first, bandwidth: 1.0e+9, latency_s: 0.0}",
        "disaggregation.frontends=3",
    ).handover
    assert (over.order, over.first_token) == ("decode_reserves_first", "decode_step")
    assert (over.latency_s, over.frontends) == (0.0, 3)
    assert over.token_s == 131072 / 1e9


def test_of_layers_with_windows_what_is_inside_is_sent() -> None:
    """gpt-oss-20b: 12 of 24 layers keep 128 of 2,000 tokens; 8 heads of 64, two bytes."""
    lengths = "workload.lengths={kind: fixed, prompt: 2000, decode: 20}"
    over = two("model=gpt-oss-20b", "device=h100-80g-sxm", "stack=vllm", lengths).handover
    sent = 12 * (2000 + 128) / 2000 * 2 * 8 * 64 * 2

    assert over.token_s == pytest.approx(sent / 50e9)


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("decode.cluster.tp=0", "--set disaggregation.decode.cluster.tp: value 0: must be at l"),
        ("decode.cluster.tpp=2", "disaggregation.decode.cluster.tpp: unknown key (did you mean tp"),
        ("decode.clster={tp: 2}", "disaggregation.decode.clster: unknown key (did you mean clus"),
        ("third={}", "disaggregation.third: unknown key; allowed: prefill, decode, handover"),
        ("prefill=2", "disaggregation.prefill: value 2: must be keys and values"),
        ("prefill.model=gpt3-175b", "disaggregation.prefill.model: value 'gpt3-175b': is the sa"),
        ("prefill.workload={requests: 3}", "disaggregation.prefill.workload: value {'requests'"),
        ("prefill.policy={name: orca}", "disaggregation.prefill.policy.name: value 'orca': take"),
        ("prefill.policy={name: sglang}", "policy.name: value 'vllm': must be that of the prefi"),
        ("handover.first_token=on_transfer", "the decode workers of vllm compute the first tok"),
        ("decode.kv_cache={prompts_cached: true}", "decode.kv_cache.prompts_cached: value true"),
        ("decode.cluster.tp=3", "disaggregation.decode.cluster.tp: value 3: llama-3-8b: tp 3"),
        ("decode.device=[a, b]", "disaggregation.decode.device: value ['a', 'b']: must be one;"),
        ("decode.engine={frontend_s: 0.1}", "decode.engine.frontend_s: value 0.1: has no effect: "),
        ("handover.order=sometimes", "disaggregation.handover.order: value 'sometimes': one of"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(assignment: str, told: str) -> None:
    (line,) = message(TWO, f"disaggregation.{assignment}").splitlines()
    assert told in line


OWN = {"prefill": {"cluster": {"tp": 1}}, "decode": {"cluster": {"tp": 2}}}
"""Both pools have a degree of their own."""


def test_what_both_pools_set_themselves_cannot_be_set_beside_them() -> None:
    tree = TWO | {"disaggregation": OWN}
    why = "has no effect, because both pools set this themselves; change one with --set "
    there = f"{why}disaggregation.decode.cluster.tp=..."
    assert message(tree, "cluster.tp=4") == f"--set cluster.tp: {there}"
    assert message(tree, "cluster={tp: 4}") == f"--set cluster.tp: {there}"
    assert message(tree, "cluster={tp: 4, max_length: 2048}") == f"--set cluster.tp: {there}"
    (found,) = deployed(tree, "cluster.usable_memory=0.8").values()
    assert [pool.scenario.cluster.tp for pool in found.pools] == [1, 2]
    beside = TWO | {"disaggregation": OWN, "cluster": {"tp": 4, "max_length": 999}}
    assert message(beside) == f"configuration: cluster.tp: {there}"
    for own in ("cluster.tp=4", "disaggregation.decode.cluster.tp=4"):
        deployed(tree | {"scenarios": {"a": {}, "b": {"disaggregation": None}}}, own)
    pooled = TWO | {"scenarios": {"a": {"disaggregation": OWN}}}
    for beside in ("cluster.tp", "scenarios.a.cluster.tp"):
        told = f"--set {beside}: {why}scenarios.a.disaggregation.decode.cluster.tp=..."
        assert message(pooled, f"{beside}=4") == told
    drafts = {"method": "ngram", "acceptance": 2.0}
    for pool, seen in (({"speculation": {**drafts, "acceptance": 1.5}}, False), ({}, True)):
        given = tree | {"disaggregation": {"prefill": {}, "decode": pool}, "speculation": drafts}
        if seen:
            (found,) = deployed(given, "speculation.acceptance=3").values()
            assert found.pools[1].scenario.speculation.acceptance == 3
        else:  # the prefill pool has none
            assert why in message(given, "speculation.acceptance=3")


def test_an_axis_that_both_pools_set_themselves_is_refused() -> None:
    tree = TWO | {"disaggregation": OWN}
    space = {"grid": {"cluster.tp": [1, 4]}}
    why = r"cluster\.tp: has no effect, because both pools"
    with pytest.raises(UserError, match=f"configuration: sweep: {why}"):
        plan_sweep(tree | {"sweep": space})
    with pytest.raises(UserError, match=rf"--set {why}"):
        plan_sweep(tree | {"sweep": {"seeds": 2}}, ["cluster.tp=4"])
    asked = {"slo": "p90 ttft 1s", "space": space}
    with pytest.raises(UserError, match=f"capacity.space: {why}"):
        read_question(tree | {"capacity": asked}, [])
    without = {"cases": [{"disaggregation": None, "cluster.tp": 4}, {"cluster.tp": 1}]}
    assert len(plan_sweep(tree | {"sweep": without}).runs) == 2


def test_the_front_end_is_the_prefill_pools_for_clients_too() -> None:
    """Of one client, each request comes a time in it after the answer to the last."""
    own = ("disaggregation.prefill.engine={frontend_s: 0.5}", "workload.requests=400")
    lone = "workload.arrivals={kind: closed_loop, clients: 1}"
    found = two(*own, lone)
    table = Analysis(found.simulate()).requests.sort_values("arrival_s")
    waits = table["arrival_s"].to_numpy()[1:] - table["finish_s"].to_numpy()[:-1]
    assert waits.mean() == pytest.approx(0.5, rel=0.15)
    assert (table["ttft_s"] > 0.5).all()
    # Given beside the pools, it is the prefill pool's, and no mistake of the decode pool's.
    assert two("engine.frontend_s=0.2").prefill.scenario.engine.frontend_s == 0.2


def test_sglangs_decode_workers_have_no_prefix_cache_unless_it_is_given() -> None:
    sglang = ("policy={name: sglang}", "disaggregation.decode.policy={name: sglang}")
    on = "kv_cache={prefix_caching: true}"
    for given, both in (
        (sglang, [True, False]),
        ((*sglang, on), [True, False]),
        ((*sglang, f"disaggregation.decode.{on}"), [True, True]),
        ((), [True, True]),
    ):
        caches = [pool.scenario.kv_cache for pool in two(*given).pools]
        assert [cache.prefix_caching for cache in caches if cache] == both


def test_a_resolved_scenario_gives_the_same_run() -> None:
    """As a result's config.yaml has it; so does a worker of a sweep, under the same key."""
    found = two(
        "seed=3", "disaggregation.frontends=2", "disaggregation.prefill.engine={frontend_s: 0.1}"
    )
    content, _ = stored(found.scenario, "two")
    (other,) = deployed({"name": "two", "scenarios": {"two": content}}).values()
    first, second = (Analysis(each.simulate()).requests for each in (found, other))
    assert first.equals(second)
    assert run_key(found, "two") == run_key(other, "two")
    assert run_key(found, "two") != run_key(two("seed=3"), "two")
    assert run_key(found, "two") != run_key(two("disaggregation.handover.latency_s=0.0"), "two")


def test_the_summary_counts_both_pools() -> None:
    found = two("disaggregation.decode.device=a40")
    analysis = Analysis(found.simulate())
    summary = found.summary(analysis)
    assert summary["gpus"] == 4 and found.gpus == {"a100-80g-sxm": 2, "a40": 2}
    assert summary["finished"] == summary["requests"] == 60
    table = analysis.requests
    parts = table["queueing_s"] + table["prefill_s"] + table["slot_s"] + table["transfer_s"]
    frontend_s = found.prefill.scenario.engine.frontend_s or 0.0
    rest = table["ttft_s"] - frontend_s - parts
    steps = analysis.iterations[analysis.iterations["replica"] == 2]
    longest = (steps["finish_s"] - steps["start_s"]).max()
    assert (rest > 0).all() and (rest <= 3 * longest).all()  # one under way, one ahead, its own
    for name in ("prefill_s", "slot_s", "transfer_s"):
        assert summary[name]["mean"] == pytest.approx(table[name].mean())
    # What the decode pool computes takes as much longer there as its GPUs' peak is lower.
    prefill, decode = (Hardware(pool.device, pool.scenario.cluster.tp) for pool in found.pools)
    rates = prefill.device.peak_flops, decode.device.peak_flops
    alike = prefill._replace(tp=2)
    slow, fast = (analysis.summary(found.model, prefill, each)["mfu"] for each in (decode, alike))
    one = analysis.summary(found.model, prefill)
    all_on_prefill = one["mfu"] * one["gpus"] / 4
    assert fast == pytest.approx(all_on_prefill)
    prompts = Analysis(replace(analysis.records, output_tokens=np.ones(60, np.int64)))
    of_prompts = prompts.summary(found.model, prefill)["mfu"] * one["gpus"] / 4
    assert slow == pytest.approx(of_prompts + (fast - of_prompts) * rates[0] / rates[1])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pools") / "two"
    sim.run(load_experiment(TWO), out=out, figures=False, timeline=True)
    return out


def test_a_result_of_two_pools(ran: Path) -> None:
    (summary,) = summary_of(ran)["scenarios"].values()
    assert summary["slot_s"]["mean"] > 0
    for metric in ("makespan_s", "tokens_per_s"):
        low, high = summary[f"{metric}_band"]
        assert low < summary[metric] < high
    again = simulate_again(ran, "two", "two")
    assert not again.notes
    assert again.analysis.records.called(1) == "prefill 1"
    assert again.analysis.records.called(2) == "decode 0"


def test_the_bands_of_two_pools_are_runs_with_slower_and_faster_ops(ran: Path) -> None:
    """The wider band of the two pools' ops, in both: configured by hand, and simulated again."""
    (summary,) = summary_of(ran)["scenarios"].values()
    found = two()
    factors = op_factors(found, Analysis(found.simulate()))
    assert factors[0] < 0.99 and factors[1] > 1.01
    ends = []
    for times in factors:
        scale = json.dumps(dict.fromkeys(ops_of(found.decode), times))
        one = two(f"engine.op_scale={scale}")
        ends.append(one.summary(Analysis(one.simulate())))
    for name, quantile in (("ttft_s", "p50"), ("ttft_s", "p99"), ("tbt_s", "p99")):
        band = [end[name][quantile] for end in ends]
        assert summary[name][f"{quantile}_band"] == pytest.approx(band)
        assert band[0] < summary[name][quantile] < band[1]
    assert summary["tokens_per_s_band"] == pytest.approx([e["tokens_per_s"] for e in ends[::-1]])


def test_a_band_has_no_upper_end_where_the_slower_run_is_overloaded() -> None:
    """And it holds the run's own number, of whose steady part other requests may be left out."""

    def summary(latency: float, steady: float, throughput: float) -> dict[str, Any]:
        of_makespan = dict.fromkeys(("makespan_s", *PER_MAKESPAN), throughput)
        return of_makespan | {"ttft_s": {"p50": latency}, "steady": {"ttft_s": {"p50": steady}}}

    slow, own, fast = summary(9.0, np.nan, 1.0), summary(3.0, 3.0, 2.0), summary(4.0, 4.0, 4.0)
    found = PoolsUncertainty((slow, fast), []).as_json(own)
    assert found["ttft_s"] == {"p50": 3.0, "p50_band": [3.0, 9.0]}
    assert found["steady"]["ttft_s"] == {"p50": 3.0, "p50_band": [3.0, np.inf]}
    assert found["makespan_s_band"] == [1.0, 4.0]
    overloaded = PoolsUncertainty((slow, slow), []).as_json(slow)
    assert overloaded["steady"]["ttft_s"].keys() == {"p50"}
    shown = to_json({"steady": found["steady"] | {"state": "steady"}})
    assert number_row("ttft_s.p50_band", [shown]) == [
        "time to first token, median, 90 % band", "s", "3.00 to overload"
    ]  # fmt: skip


@pytest.mark.slow
def test_pools_and_servers_are_compared_by_their_numbers(ran: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    tree = TWO | {"disaggregation": None}
    sim.run(load_experiment(tree), out=alone, figures=False)
    found = json.loads(called("compare", alone, ran, "--json").stdout)
    stored = [summary_of(each) for each in (alone, ran)]
    both = [each["scenarios"]["two"] for each in stored]
    assert list(found["summaries"].values()) == both and found["same_requests"]
    rows = {row[0]: row[2:] for row in comparison_section(found).tables[0].rows}
    a, b = (each["output_tokens_per_s"] for each in both)
    assert rows["output token throughput"][2] == f"{100 * (b / a - 1):+.1f} %"
    assert rows["wait for a decode slot, p99"][::2] == ["-", "-"]
    assert any("two pools: only metrics are compared" in line for line in found["warnings"])


@pytest.mark.slow
def test_what_moves_two_pools(tmp_path: Path) -> None:
    """Each op's time is changed in both pools; the time of a transfer without a latency is
    inversely proportional to the bandwidth, also that of waiting for the link, at a low rate."""
    (path := tmp_path / "two.yaml").write_text(json.dumps(TWO))
    words = (
        "--sensitivity --json --replications 1 --metric transfer_s.mean --metric prefill_s.mean "
    )
    words += "--metric tpot_s.mean --set disaggregation.handover.latency_s=0 "
    words += "--set workload.arrivals.rate=0.5"
    asked = ("--out", tmp_path / "out", "--only", "all ops,handover bandwidth")
    found = json.loads(called("capacity", path, *words.split(), *asked).stdout)
    moved = {(row["factor"], row["measure"]): row["elasticity"] for row in found["rows"]}
    assert moved["handover bandwidth", "transfer_s.mean"] == pytest.approx(-1, abs=0.01)
    assert moved["handover bandwidth", "prefill_s.mean"] == 0
    assert moved["all ops", "prefill_s.mean"] == pytest.approx(1, abs=0.01)
    assert moved["all ops", "tpot_s.mean"] == pytest.approx(1, abs=0.05)
    names = [factor.name for factor in factors_of(two("disaggregation.decode.cluster.pp=2"))]
    assert {ALL_REDUCE, SEND_RECV, "link speed", "handover bandwidth"} <= {*names}
    assert ALL_REDUCE not in [factor.name for factor in factors_of(two().prefill)]


def test_a_sweep_over_the_workers_of_a_pool() -> None:
    axis = "disaggregation.decode.cluster.replicas"
    tree = TWO | {"sweep": {"grid": {axis: [1, 2]}}}
    plan = plan_sweep(tree)
    assert plan.axes == (axis,) and len({run.key for run in plan.runs}) == 2
    gpus = []
    for run in plan.runs:
        files = folder_files(Job(run, "."))
        (summary,) = json.loads(files["summary.json"])["scenarios"].values()
        gpus.append(summary["gpus"])
    assert gpus == [4, 6]


MIXTURE = yaml.safe_load("""\
name: ranks
model: qwen3-30b-a3b
device: h100-80g-sxm
stack: vllm
workload:
  requests: 40
  lengths: {kind: fixed, prompt: 100, decode: 20}
  arrivals: {kind: poisson, rate: 8}
cluster: {max_length: 1024}
policy: {name: vllm}
disaggregation:
  prefill: {cluster: {tp: 2, replicas: 3}}
  decode: {cluster: {dp: 4, replicas: 2, expert_parallel: true, moe_a2a_backend: nccl}}
""")


def test_ranks_of_a_pool_in_an_answer() -> None:
    """Three prefill workers of two GPUs, two decode workers of four ranks. A run has the requests
    of three workers; one simulated deployment stands for itself."""
    tree = MIXTURE | {"capacity": {"slo": "p90 ttft 1s", "tolerance": 0.1}}
    _, section, (option,) = read_question(tree, [])
    assert option.gpus == 3 * 2 + 2 * 4
    assert option.replicas == 3
    plan = plan_of(option, section, "here")
    one_each = [f"disaggregation.{pool}.cluster.replicas=1" for pool in ("prefill", "decode")]
    _, _, (small,) = read_question(tree, one_each)
    assert plan.requests == 3 * plan_of(small, section, "here").requests >= 3 * 2500
    assert plan.budget == 3 * 100_000
    decode = Option("decode", {}, option.deployment.pools[1])
    assert plan_of(decode, section, "here").scale == decode.replicas == 2
    row = as_json(Answer(option, None, None, "not asked"), "rate")
    assert row["pools"]["decode"] == {"tp": 1, "pp": 1, "dp": 4, "replicas": 2, "gpus": 8}
    assert row["pools"]["prefill"] == {"tp": 2, "pp": 1, "dp": 1, "replicas": 3, "gpus": 6}
    found = {**row, "capacity": 2.0, "rejected_share": 0.0}
    one = {**found, "name": "one", "tp": 4, "pp": 2, "replicas": 1, "gpus": 8}
    del one["pools"]
    table = capacities([found, one])[["tp", "gpus", "prefill_replicas", "decode_tp", "decode_dp"]]
    rows = table.to_csv(index=False).splitlines()[1:]
    assert rows == [",14,3,1,4", "4,8,,,"]


def test_the_way_through_the_pools_after_the_warm_up() -> None:
    """Shares of the time to first token are of the requests after the warm-up, both parts."""
    found = two("disaggregation.decode.policy.max_num_seqs=2")
    analysis = Analysis(found.simulate())
    after, table = analysis.after_warmup(), analysis.requests.sort_values("arrival_s")[12:]
    summary = found.summary(analysis) | {"after_warmup": after}
    p99 = {name: np.percentile(table[name], 99) for name in ("ttft_s", *PARTS)}
    verdict = Verdict({}, {"p99 ttft 1s": 1.1}, False)
    probed = Probed(Probe(1, 0, 1), "", summary, verdict)
    shares = binding(Answer(Option("", {}, found), Capacity(pilot=probed)))
    assert shares["slot_share_of_ttft"] == pytest.approx(p99["slot_s"] / p99["ttft_s"])
    assert shares["transfer_share_of_ttft"] == pytest.approx(p99["transfer_s"] / p99["ttft_s"])
    of_service = p99["slot_s"] / (p99["prefill_s"] + p99["slot_s"] + p99["transfer_s"])
    assert shares["slot_share_of_service"] == pytest.approx(of_service)
    assert p99["slot_s"] != summary["slot_s"]["p99"]
    assert "slot_s" not in Analysis(found.prefill.simulate()).after_warmup()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"disaggregation.decode.policy.max_num_seqs": 2}, "slot"),
        ({"disaggregation.handover.bandwidth": 2e8}, "transfer"),
        ({"disaggregation.prefill.cluster.replicas": 1}, "queueing"),
    ],
)
def test_capacity_names_the_slot_and_the_transfer(
    changed: dict[str, float], because: str, tmp_path: Path
) -> None:
    slo = {"slo": "p90 ttft 1s", "tolerance": 0.1, "requests": 400}
    tree = TWO | {"capacity": slo | {"replications": {"least": 2, "most": 2}}}
    few = {"disaggregation.decode.policy.max_num_seqs": 64}
    capacity(tree, few | changed, out=tmp_path, bands=False)
    (found,) = summary_of(tmp_path)["deployments"]
    assert found["binds"]["slo"] == "p90 ttft 1s" and found["binds"]["because"] == because
    assert found["capacity"] > 0 and found["gpus"] == (3 if because == "queueing" else 4)


@pytest.mark.slow
def test_the_band_of_a_capacity_of_pools(tmp_path: Path) -> None:
    """Its ends are about the capacities that a search finds with slower, and with faster, ops."""
    slo = {"slo": "p90 ttft 1s", "tolerance": 0.02, "requests": 600}
    tree = TWO | {"capacity": slo | {"replications": {"least": 2, "most": 2}}}
    _, section, (option,) = read_question(tree, ())
    factors = slower_factors(option, plan_of(option, section, ""))  # those of a saturated run
    ends = []
    for number, times in enumerate((1.0, *factors)):
        scale = {"engine": {"op_scale": dict.fromkeys(ops_of(option.deployment.pools[1]), times)}}
        out = tmp_path / str(number)
        capacity(tree | scale, {}, out=out, bands=number == 0)
        (one,) = summary_of(out)["deployments"]
        ends.append(one)
    first, fast, slow = ends
    low, high = first["band"]
    assert low < first["capacity"] < high
    assert low == pytest.approx(slow["capacity"], rel=0.04)
    assert high == pytest.approx(fast["capacity"], rel=0.04)
