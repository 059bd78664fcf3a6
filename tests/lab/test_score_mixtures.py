"""How measured mixtures of experts are named and grouped, and the constants that only they have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sarathi_sim.experiments.config.inputs import NONE, HostConstants, calls_of_layer, host_times
from sarathi_sim.experiments.lab.servers.errors import grouped
from sarathi_sim.experiments.lab.servers.host import LAUNCHES, fitting, grid, launching, slopes
from sarathi_sim.experiments.lab.servers.rows import Measured, ServerTimes
from sarathi_sim.experiments.lab.servers.runs import OpShares
from sarathi_sim.experiments.lab.servers.scenarios import mean_prompt, scenario_of, server_of
from sarathi_sim.profiler.facts.model import load_model

pytestmark = pytest.mark.lab

DEEPSEEK = {"model": "deepseek-ai/DeepSeek-R1", "precision": "fp4", "system": "b200_sxm", "tp": 8}
GPT_OSS = {"model": "openai/gpt-oss-120b", "precision": "fp4", "system": "h100_sxm", "tp": 2}
MINIMAX = {"model": "MiniMaxAI/MiniMax-M2.5", "precision": "fp8", "system": "b200_sxm", "tp": 4}
SHARES = OpShares({"ttft": {"gemm": 1.0}, "tpot": {"gemm": 1.0}}, {"gemm": 0.02})


def row(**given: object) -> Measured:
    usual = {"id": "a", "backend": "trtllm", "source": "inferencex", "isl": 1024, "osl": 1024,
             "concurrency": 4, "length_range_ratio": 0.8, "dense": False, "ttft_ms": 1.0,
             "tpot_ms": 1.0, "measured_date": "2026-03-25"}  # fmt: skip
    return Measured.model_validate(usual | given)


def test_minimax_has_its_tp_in_dp_where_its_experts_are_spread() -> None:
    """One server under two names: it is left out of a fit with both."""
    vllm = {**MINIMAX, "backend": "vllm"}
    twice, once = row(**vllm, dp=4, moe_ep=16), row(**vllm, moe_ep=4)
    assert scenario_of(twice, NONE) == scenario_of(once, NONE)
    assert scenario_of(twice, NONE)["cluster"]["expert_parallel"] is True
    assert server_of(twice) == server_of(once)


def test_a_server_measured_cold_is_answered_and_not_fitted_to() -> None:
    early, later = (
        row(**DEEPSEEK, backend="sglang", measured_date=date) for date in ("2025-11-10", "2026-02")
    )
    assert scenario_of(early, NONE) == scenario_of(later, NONE)
    assert [fitting(one, mixtures=True) for one in (early, later)] == [False, True]
    found = grouped([early, later])
    assert found["measured cold"] == [early] and found["all"] == [early, later]


def test_launching_and_the_prompts_tokens_are_an_engines_times() -> None:
    """gpt-oss in bf16: three GEMMs, two norms, the experts' three calls and four others. MiniMax
    quantises for two of its GEMMs, and has norms of queries and keys."""
    oss, minimax = row(**GPT_OSS), row(**MINIMAX)
    calls = [
        calls_of_layer(load_model(given["model"]), given["dtype"])
        for given in (scenario_of(oss, NONE), scenario_of(minimax, NONE))
    ]
    assert calls == [12, 15]
    host = HostConstants(0.001, 0.0, 0.01, frontend_token_s=1e-5, launch_s=1e-5)
    found = scenario_of(oss, host)["engine"]
    assert found["frontend_s"] == pytest.approx(0.01 + 0.9 * 1024 * 1e-5)
    assert found["launch_layer_s"] == pytest.approx(12e-5)
    assert scenario_of(oss, NONE)["engine"]["launch_layer_s"] == 0


def test_which_rows_are_fitted_to() -> None:
    some = row(**MINIMAX)
    assert fitting(some, mixtures=True) and not fitting(some)
    for change in ({"concurrency": 32}, {"osl": 8192}, {"flags": "doubtful"}, {"dense": True}):
        assert not fitting(row(**{**MINIMAX, **change}), mixtures=True)


TRUE = HostConstants(0.0004, 1e-5, 0.02, 2e-6, 5e-5)


def times(one: Measured, host: HostConstants) -> ServerTimes:
    """A layer launches 20 kernels; launching shows above 400 us a layer."""
    step_ms = 1e3 * (host.host_iteration_s + host.host_sequence_s * one.concurrency)
    late_ms = 60 * 1e3 * max(0.0, 20 * host.launch_s - 2e-6 * one.isl)
    frontend_ms = 1e3 * (host.frontend_s + host.frontend_token_s * mean_prompt(one))
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
    hosts = grid(limits.measured) | launching(limits.measured)
    simulated = {name: {one.id: times(one, host) for one in rows} for name, host in hosts.items()}
    truth = {one.id: times(one, TRUE) for one in rows}
    rows = [
        one.model_copy(update={"ttft_ms": truth[one.id].ttft_ms, "tpot_ms": truth[one.id].tpot_ms})
        for one in rows
    ]
    found = slopes(rows, simulated, {one.id: SHARES for one in rows}, limits, mixtures=True)
    every = np.arange(len(rows))
    for name, launch_s in LAUNCHES.items():
        at = found.predicted(every, replace(limits.measured, launch_s=launch_s))
        expected = [[simulated[name][one.id].ttft_ms, simulated[name][one.id].tpot_ms]
                    for one in rows]  # fmt: skip
        assert np.allclose(at.T, expected)
    off = found.predicted(every, found.fitted(every)) / found.measured_ms
    assert np.abs(off - 1).max() < 0.02


def test_the_shipped_constants_of_mixtures_are_plausible() -> None:
    known = host_times(mixtures=True)
    for part in (known, *known.folds):
        for host in part.stacks.values():
            for name, constant in known.constants.items():
                assert constant.range[0] <= getattr(host, name) <= constant.range[1]
    servers = [name for fold in known.folds for name in fold.servers]
    assert len(servers) == len(set(servers)) > 10 and "mixtures" in known.fitted_to
