"""The host's constants fitted to some servers and scored on others, and the bands."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sarathi_sim.experiments.config.inputs import NONE, HostConstants, calls_of_layer, host_times
from sarathi_sim.experiments.lab.servers import host as hosts
from sarathi_sim.experiments.lab.servers import runs, scenarios
from sarathi_sim.experiments.lab.servers.errors import errors, grouped
from sarathi_sim.experiments.lab.servers.host import (
    APART,
    BASE,
    LAUNCHES,
    SCHEMES,
    Slopes,
    fitting,
    grid,
    left_out,
    slopes,
)
from sarathi_sim.experiments.lab.servers.rows import Measured, ServerTimes
from sarathi_sim.experiments.sweeps.backends import InProcess
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.storage.child import silent
from sarathi_sim.profiler.storage.plain_yaml import read_mapping

pytestmark = pytest.mark.lab

ENGINES = ("vllm", "trtllm")
TRUE = HostConstants(0.0008, 2e-5, 0.01)
"""What the made-up servers below have."""
SHARES = runs.OpShares(
    {"ttft": {"gemm": 1.0}, "tpot": {"gemm": 0.5, "host": 0.5}}, {"gemm": 0.02, "host": 0.1}
)


def measured_as(row: Measured, times: ServerTimes) -> Measured:
    return row.model_copy(update={"ttft_ms": times.ttft_ms, "tpot_ms": times.tpot_ms})


def server(number: int, concurrency: int, **more: object) -> Measured:
    """A row whose times follow from :data:`TRUE` exactly, on one of many servers."""
    kind = {"system": f"gpu{number % 3}", "tp": 1 + number, "backend": ENGINES[number % 2]}
    row = Measured.model_validate(
        {"id": f"{number} {concurrency}", "model": "m", "isl": 8, "osl": 8, "ttft_ms": 1.0,
         "tpot_ms": 1.0, "concurrency": concurrency, **kind, **more}
    )  # fmt: skip
    return measured_as(row, simulated(row, TRUE))


def simulated(row: Measured, host: HostConstants) -> ServerTimes:
    step_ms = 1e3 * (host.host_iteration_s + host.host_sequence_s * row.concurrency)
    tp = row.tp or 1
    return ServerTimes(40 + 3 * tp + 2 * step_ms + 1e3 * host.frontend_s, 8 + tp + step_ms)


def some(noise: float = 0.0) -> Slopes:
    rows = [server(number, clients) for number in range(8) for clients in (4, 16, 64, 128)]
    factors = np.exp(noise * np.random.default_rng(0).standard_normal(len(rows))).tolist()
    rows = [row.model_copy(update={"ttft_ms": row.ttft_ms * f}) for row, f in zip(rows, factors)]  # noqa: B905
    known = host_times()
    found = {n: {r.id: simulated(r, h) for r in rows} for n, h in grid(known.measured).items()}
    return slopes(rows, found, {row.id: runs.draws(SHARES) for row in rows}, known)


def test_no_server_is_in_both_halves() -> None:
    rows = some().rows
    split = hosts.parts(rows, "cross_validated")
    assert len(split) == hosts.PARTS
    assert sorted(np.concatenate([out for _, out in split]).tolist()) == list(range(len(rows)))
    for scheme, group in SCHEMES.items():
        for fitted, out in hosts.parts(rows, scheme):
            assert not {group(rows[i]) for i in fitted} & {group(rows[i]) for i in out}
    assert len(hosts.parts(rows, "leave_one_gpu_out")) == 3
    assert hosts.parts(rows, "leave_one_model_out") == []  # there is but one
    assert len({scenarios.server_of(row) for row in rows}) == 8
    dynamo = rows[0].model_copy(update={"source": "nvidia_gap_sweep"})
    assert [scenarios.stack_of(row) for row in (rows[0], dynamo)] == ["vllm", "vllm under dynamo"]


def test_how_far_clients_are_apart_is_what_others_of_their_campaign_say() -> None:
    """Two load tools, told apart by lengths: one keeps clients in lock-step, one lets them drift,
    where TTFT is a fifth and TPOT half as long again. A campaign that is left out is between."""
    rows = [
        server(number, clients, isl=isl, id=f"{isl} {number} {clients}", source="someone's")
        for isl in (1000, 1024) for number in range(4) for clients in (4, 16, 64, 128)
    ]  # fmt: skip
    known = host_times()
    near = {n: {r.id: simulated(r, h) for r in rows} for n, h in grid(known.measured).items()}
    far = {
        name + APART: {id: ServerTimes(t.ttft_ms / 5, t.tpot_ms * 1.5) for id, t in of.items()}
        for name, of in near.items()
    }
    drifted = [measured_as(r, ServerTimes(r.ttft_ms / 5, r.tpot_ms * 1.5)) for r in rows]
    rows = [drifted[n] if row.isl == 1000 else row for n, row in enumerate(rows)]
    found = slopes(rows, near | far, {row.id: runs.draws(SHARES) for row in rows}, known)
    apart, together = "someone's, multiples of 1,000", "someone's, powers of two"
    every = np.arange(len(rows))
    assert [scenarios.campaign_of(rows[0]), scenarios.campaign_of(rows[-1])] == [apart, together]
    assert found.shares(every) == {apart: 1.0, together: 0.0}
    assert found.shares(every[16:]) == {together: 0.0}
    host = grid(known.measured)[BASE]
    ttft = found.settled(every[16:]).predicted(every[:1], host)[0, 0]
    assert ttft == pytest.approx(near[BASE][rows[0].id].ttft_ms * (1 + 1 / 5) / 2)


def test_a_fit_finds_the_constants_and_stays_in_their_ranges() -> None:
    found = some()
    host = found.fitted(found.every)
    assert asdict(host) == pytest.approx(asdict(TRUE), rel=0.02)
    narrow = {name: replace(one, range=(0.0, 1e-5)) for name, one in found.limits.constants.items()}
    bounded = replace(found, limits=replace(found.limits, constants=narrow))
    assert max(asdict(bounded.fitted(found.every)).values()) <= 1e-5


def test_left_out_rows_are_predicted_from_others() -> None:
    """One server's measurements are made three times as long: its own prediction ignores this."""
    found = some()
    strange = found.measured_ms.copy()
    own = [i for i, row in enumerate(found.rows) if row.tp == 1]
    strange[:, own] *= 3
    there = left_out(replace(found, measured_ms=strange), "cross_validated")
    assert set(there) == {row.id for row in found.rows}
    for i in own:
        assert there[found.rows[i].id].tpot_ms == pytest.approx(found.measured_ms[1, i], rel=0.05)


def test_what_says_most_of_a_stack() -> None:
    """Its own eight rows, which are off by a tenth; all rows of a stack that has but seven, off by
    three tenths."""
    rows = [server(0, c) for c in range(1, 9)] + [server(1, c) for c in range(1, 8)]
    known = {row.id: {m: np.zeros(runs.DRAWS) for m in ("ttft", "tpot")} for row in rows}
    found = replace(some(), rows=rows, draws=known, measured_ms=np.ones((2, 15)))
    off = np.exp(np.array([1, -1] * 7 + [1]) * np.where(np.arange(15) < 8, 0.1, 0.3))
    own, few = (
        found.errors(np.arange(15), stack, np.stack([off, off])) for stack in ("vllm", "trtllm")
    )
    assert (own.ttft, few.ttft) == pytest.approx((0.1 / 1.75, 0.3 / 1.75), rel=0.1)


def test_an_unknown_stack_is_like_the_median_of_the_others() -> None:
    found = some()
    every = found.every
    each = [found.host_of(every, stack) for stack in ("vllm", "trtllm")]
    middle = np.median([[*asdict(one).values()] for one in (*each, found.limits.measured)], axis=0)
    unknown = found.host_of(every, "sglang under dynamo")
    assert [*asdict(unknown).values()] == pytest.approx(middle.tolist())
    alone = found.host_of(every[:0], "vllm")  # nothing to fit to
    assert alone == found.limits.measured


def shares_of(shares: dict[str, float], **sigmas: float) -> runs.OpShares:
    return runs.OpShares({"ttft": shares, "tpot": shares}, sigmas)


def test_draws_have_the_width_of_their_ops() -> None:
    alone = runs.draws(shares_of({"gemm": 1.0}, gemm=0.1))["tpot"]
    assert len(alone) == runs.DRAWS
    assert np.quantile(alone, 0.95) == pytest.approx(0.1645, rel=0.1)
    half = runs.draws(shares_of({"gemm": 0.5, "host": 0.5}, gemm=0.1, host=0.0))["tpot"]
    assert np.quantile(half, 0.95) == pytest.approx(0.0825, rel=0.12)


def test_a_stacks_error_covers_what_ops_do_not() -> None:
    known = [np.zeros(runs.DRAWS)] * 200
    off = 0.1 * np.random.default_rng(1).standard_normal(200)
    assert runs.stack_sigma(off, known) == pytest.approx(0.1, rel=0.15)
    wide = [runs.draws(shares_of({"gemm": 1.0}, gemm=0.3))["ttft"]] * 200
    assert runs.stack_sigma(off, wide) == 0.0
    assert runs.stack_sigma(np.array([]), []) > 0.1  # nothing is known


def test_coverage_by_hand() -> None:
    """Bands of a factor of e^0.1645 hold +10 %, and miss +30 %."""
    rows = [server(0, 4), server(0, 16)]
    exact = {row.id: ServerTimes(row.ttft_ms, row.tpot_ms, 100.0) for row in rows}
    off = [row.model_copy(update={"ttft_ms": f * row.ttft_ms}) for row, f in zip(rows, (1.1, 1.3))]  # noqa: B905
    sure = runs.draws(shares_of({"a": 1.0}, a=0.0))
    sigma = {row.id: {"ttft": 0.1, "tpot": 0.0} for row in rows}
    found = runs.with_bands(rows, exact, {row.id: sure for row in rows}, sigma)
    ttft, tpot = errors(off, found, "ttft"), errors(off, found, "tpot")
    assert ttft is not None and ttft["coverage"] == 50.0
    assert tpot is not None and tpot["coverage"] == 100.0
    row, times = rows[0], found[rows[0].id]
    low, high = times.bands["latency"]  # TTFT's share of the latency is what may be off
    latency = row.latency_of(row.ttft_ms, row.tpot_ms)
    assert high - latency == pytest.approx(times.bands["ttft"][1] - row.ttft_ms)
    slow, fast = times.bands["throughput"]  # in a closed loop: one over the latency
    assert slow == pytest.approx(100 * latency / high, rel=1e-3)
    assert fast == pytest.approx(100 * latency / low, rel=1e-3)


def test_a_full_cache_is_drawn_with_its_ops_and_its_host() -> None:
    """Draws are pairs of opposite sign: the products of each pair's factors are 1."""
    row = server(0, 4, model="Qwen/Qwen3-32B", system="h100_sxm", tp=4)
    described = scenarios.scenario_of(row, TRUE)
    outcome = runs.RowOutcome({"num_blocks": 1e6}, SHARES)
    up, down = (runs.draw(described, outcome, n) for n in (0, runs.REDRAWS // 2))
    assert up is not None and down is not None
    assert up["workload"] == down["workload"] == described["workload"]
    host = {f"host_{of}_s": getattr(TRUE, f"host_{of}_s") for of in ("iteration", "sequence")}
    bases = [("engine", *one) for one in host.items()]
    for section, key, base in (*bases, ("kv_cache", "num_blocks", 1e6)):
        assert up[section][key] != down[section][key]
        assert up[section][key] * down[section][key] == pytest.approx(base**2, rel=1e-5)
    factors = up["engine"]["op_scale"]["gemm"], down["engine"]["op_scale"]["gemm"]
    assert factors[0] * factors[1] == pytest.approx(1.0) and factors[0] != 1.0


def test_rows_with_a_full_cache_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each draw here takes twice as long as the one before; one that has no outcome spoils all."""
    rows = [server(0, clients) for clients in (4, 16, 64)]
    base = {"ttft_ms": 10.0, "tpot_ms": 5.0, "kv_peak_share": 1.0, "num_blocks": 9.0}
    outcomes = {row.id: runs.RowOutcome(base, SHARES) for row in rows}
    outcomes[rows[0].id] = runs.RowOutcome({**base, "kv_peak_share": 0.9}, SHARES)

    def simulate(full: list[Measured], variants: dict[str, Any], at: runs.Bench) -> Any:
        assert full == rows[1:] and len(variants) == runs.REDRAWS
        times = [{"ttft_ms": 10.0 * 2**n, "tpot_ms": 5.0} for n in range(runs.REDRAWS)]
        outcomes = [{rows[1].id: runs.RowOutcome(one, SHARES)} for one in times]
        return dict(zip(variants, outcomes, strict=True)), {}

    monkeypatch.setattr("sarathi_sim.experiments.lab.servers.runs.simulate_rows", simulate)
    at = runs.Bench(Store(tmp_path), InProcess(), silent, silent)
    found = runs.redrawn(rows, lambda _: {}, outcomes, at)
    assert list(found) == [rows[1].id]
    again = found[rows[1].id]
    assert len(again["ttft"]) == runs.DRAWS and not again["tpot"].any()
    twice = np.log(2) * np.array([*range(runs.REDRAWS), 0])
    assert again["ttft"][: runs.REDRAWS + 1] == pytest.approx(twice)


def test_what_ships_can_be_read_again_and_leaves_servers_out(tmp_path: Path) -> None:
    found = some(noise=0.05)
    fit = hosts.host_fit(found, {scheme: left_out(found, scheme) for scheme in SCHEMES}, "rows.csv")
    times, folds = fit.times, fit.folds
    assert times.fitted_to.startswith("fitted to 32 dense rows of 8 servers of rows.csv; on ")
    fit.write(tmp_path, mixtures=False)
    written, left = (read_mapping(tmp_path / f"host_time{name}.yaml") for name in ("", "_folds"))
    assert written["stacks"]["vllm"] == asdict(times.stacks["vllm"]) and "folds" not in written
    assert left["folds"][0]["servers"] == folds[0].servers
    assert sorted(name for fold in folds for name in fold.servers) == sorted(
        {scenarios.server_of(row) for row in found.rows}
    )
    assert folds[0].of(found.rows[0])[0] == folds[0].stacks["vllm"]


@pytest.mark.parametrize("mixtures", [False, True])
def test_the_shipped_constants_are_plausible_and_say_what_they_are(mixtures: bool) -> None:
    known, folds = host_times(mixtures), hosts.shipped_folds(mixtures)
    assert "fitted to" in known.fitted_to and known.measured != NONE and known.measured_origin
    for part in (known, *folds):
        assert {"vllm", "sglang", "trtllm"} <= part.stacks.keys() == part.errors.keys()
        for host in part.stacks.values():
            for name, constant in known.constants.items():
                assert constant.range[0] <= getattr(host, name) <= constant.range[1]
    servers = [name for fold in folds for name in fold.servers]
    assert len(servers) == len(set(servers)) > 10
    unknown = server(0, 4, dense=not mixtures, source="nvidia_gap_sweep")
    assert hosts.fitted_without(unknown).of(unknown)[0] in known.stacks.values()


# Mixtures ---------------------------------------------------------------------------------------

DEEPSEEK = {"model": "deepseek-ai/DeepSeek-R1", "precision": "fp4", "system": "b200_sxm", "tp": 8}
GPT_OSS = {"model": "openai/gpt-oss-120b", "precision": "fp4", "system": "h100_sxm", "tp": 2}
MINIMAX = {"model": "MiniMaxAI/MiniMax-M2.5", "precision": "fp8", "system": "b200_sxm", "tp": 4}


def row(**given: object) -> Measured:
    usual = {"id": "a", "backend": "trtllm", "source": "inferencex", "isl": 1024, "osl": 1024,
             "concurrency": 4, "length_range_ratio": 0.8, "dense": False, "ttft_ms": 1.0,
             "tpot_ms": 1.0, "measured_date": "2026-03-25"}  # fmt: skip
    return Measured.model_validate(usual | given)


def test_minimax_has_its_tp_in_dp_where_its_experts_are_spread() -> None:
    """One server under two names: it is left out of a fit with both."""
    vllm = {**MINIMAX, "backend": "vllm"}
    twice, once = row(**vllm, dp=4, moe_ep=16), row(**vllm, moe_ep=4)
    assert scenarios.scenario_of(twice, NONE) == scenarios.scenario_of(once, NONE)
    assert scenarios.scenario_of(twice, NONE)["cluster"]["expert_parallel"] is True
    assert scenarios.server_of(twice) == scenarios.server_of(once)


def test_a_server_measured_cold_is_answered_and_not_fitted_to() -> None:
    early, later = (
        row(**DEEPSEEK, backend="sglang", measured_date=date) for date in ("2025-11-10", "2026-02")
    )
    assert scenarios.scenario_of(early, NONE) == scenarios.scenario_of(later, NONE)
    assert [fitting(one, mixtures=True) for one in (early, later)] == [False, True]
    found = grouped([early, later])
    assert found["measured cold"] == [early] and found["all"] == [early, later]


def test_launching_and_the_prompts_tokens_are_an_engines_times() -> None:
    """gpt-oss in bf16: three GEMMs, two norms, the experts' three calls and four others. MiniMax
    quantises for two of its GEMMs, and has norms of queries and keys."""
    oss, minimax = row(**GPT_OSS), row(**MINIMAX)
    calls = [
        calls_of_layer(load_model(given["model"]), given["dtype"])
        for given in (scenarios.scenario_of(oss, NONE), scenarios.scenario_of(minimax, NONE))
    ]
    assert calls == [12, 15]
    host = HostConstants(0.001, 0.0, 0.01, frontend_token_s=1e-5, launch_s=1e-5)
    found = scenarios.scenario_of(oss, host)["engine"]
    assert found["frontend_s"] == pytest.approx(0.01 + 0.9 * 1024 * 1e-5)
    assert found["launch_layer_s"] == pytest.approx(12e-5)
    assert scenarios.scenario_of(oss, NONE)["engine"]["launch_layer_s"] == 0


def test_which_rows_are_fitted_to() -> None:
    some = row(**MINIMAX)
    assert fitting(some, mixtures=True) and not fitting(some)
    for change in ({"concurrency": 32}, {"osl": 8192}, {"flags": "doubtful"}, {"dense": True}):
        assert not fitting(row(**{**MINIMAX, **change}), mixtures=True)


OF_MIXTURES = HostConstants(0.0004, 1e-5, 0.02, 2e-6, 5e-5)


def times(one: Measured, host: HostConstants) -> ServerTimes:
    """A layer launches 20 kernels; launching shows above 400 us a layer."""
    step_ms = 1e3 * (host.host_iteration_s + host.host_sequence_s * one.concurrency)
    late_ms = 60 * 1e3 * max(0.0, 20 * host.launch_s - 2e-6 * one.isl)
    frontend_ms = 1e3 * (host.frontend_s + host.frontend_token_s * scenarios.mean_prompt(one))
    tp = one.tp or 1
    busy = one.concurrency / one.osl * late_ms
    return ServerTimes(40 + tp + 2 * step_ms + late_ms + frontend_ms, 8 + tp + step_ms + busy)


def test_launches_are_linear_between_those_simulated() -> None:
    """At the values that were simulated the prediction is the simulation."""
    rows = [
        row(id=f"{tp} {isl} {n}", **{**MINIMAX, "tp": tp}, isl=isl, concurrency=n)
        for tp in (1, 2, 4) for isl in (100, 400) for n in (4, 16)
    ]  # fmt: skip
    limits = host_times(mixtures=True)
    tried = grid(limits.measured)
    simulated = {name: {one.id: times(one, host) for one in rows} for name, host in tried.items()}
    rows = [measured_as(one, times(one, OF_MIXTURES)) for one in rows]
    drawn = {one.id: runs.draws(SHARES) for one in rows}
    found = slopes(rows, simulated, drawn, limits, mixtures=True)
    every = found.every
    for name, launch_s in LAUNCHES.items():
        at = found.predicted(every, replace(limits.measured, launch_s=launch_s))
        expected = [[simulated[name][one.id].ttft_ms, simulated[name][one.id].tpot_ms]
                    for one in rows]  # fmt: skip
        assert np.allclose(at.T, expected)
    off = found.predicted(every, found.fitted(every)) / found.measured_ms
    assert np.abs(off - 1).max() < 0.02
