"""The experts of a mixture in torch: their numbers, and what a profile of them holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.bundle.schema import load_bundle
from sarathi_sim.profiler.facts.formats import Distribution
from sarathi_sim.profiler.facts.layer_kinds import Experts
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.measuring import measure
from sarathi_sim.profiler.measuring.measure import profile
from sarathi_sim.profiler.measuring.shard_ops import ShardOps, memory_needs, overheads
from sarathi_sim.profiler.planning.grid import Limits, ProfileError, Settings
from sarathi_sim.profiler.shard.attention import Chunk, Rows, SdpaAttention
from sarathi_sim.profiler.shard.layer import LayerState, RandomWeights, ShardLayer
from sarathi_sim.profiler.shard.timing import Timer, no_garbage_collection
from sarathi_sim.simulator.op_times.regression import bundle_times
from tests.profiler_torch import fake_cuda
from tests.profiler_torch.small import GQA

CPU = torch.device("cpu")
MIX = Experts(num_experts=6, top_k=2, intermediate_size=32)
TINY = replace(GQA, ffn_hidden_size=0, num_layers=2, experts=MIX)
SHARED = replace(TINY, experts=replace(MIX, shared_intermediate_size=48))
LIMITS = Limits(max_tokens=16, max_context=32, max_batch=2)


def isolated(model: ModelSpec, tp: int = 1, distribution: Distribution = "balanced") -> ShardOps:
    timer, attention = Timer(CPU, repeats=1, patience_s=0.0), SdpaAttention(CPU, torch.float32)
    return ShardOps(
        model, tp, CPU, torch.float32, LIMITS, timer, 1e9, attention, distribution=distribution
    )


def by_a_loop(layer: ShardLayer, state: LayerState, x: Any, routing: Any) -> Any:
    """Every token through each of its experts, one after the other."""
    assert state.weights.experts is not None
    (chosen, weights), (up, down) = routing, state.weights.experts
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for place in range(chosen.shape[1]):
            expert = int(chosen[token, place])
            inner = layer.activation(state, (up[expert] @ x[token])[None])[0]
            out[token] += weights[token, place] * (down[expert] @ inner)
    return out


@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.2"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_grouped_gemms_are_a_loop(distribution: Distribution, tp: int, tokens: int) -> None:
    ops = isolated(TINY, tp, distribution)
    x, state = torch.randn(tokens, 64), LayerState(ops.sets[0], ops.cache)
    routing = ops.routing(tokens)
    expected = by_a_loop(ops.layer, state, x, routing)
    assert torch.allclose(ops.layer.moe(state, x, routing), expected, atol=1e-5)


def test_a_layer_of_a_mixture() -> None:
    """Norm, the experts and those that all tokens share, added to what came before."""
    ops = isolated(SHARED, distribution="power_law_1.2")
    layer, state, angles = ops.layer, LayerState(ops.sets[0], ops.cache), ops.layer.angles
    x, routing, at = torch.randn(7, 64), ops.routing(7), angles(torch.arange(7))
    attended: list[Any] = []

    def keep(op: str, call: Any, *inputs: Any) -> Any:
        out = call(*inputs)
        attended.extend([out] * (op == "attn_prefill"))
        return out

    chunk = Chunk(ops.attention, 7, 0)
    found = layer.run(state, x, Rows(at, [chunk], routing=routing), keep)
    x = x + layer.gemm(state, attended[0].flatten(1), "postproj")
    y = layer.add_and_norm(state, x, torch.zeros_like(x))[1]
    inner = layer.activation(state, layer.gemm(state, y, "shared_ln1"))
    shared = layer.gemm(state, inner, "shared_ln2")
    assert torch.allclose(found, x + by_a_loop(layer, state, y, routing) + shared, atol=1e-5)


@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.01", "power_law_1.2"])
def test_no_token_meets_an_expert_twice(distribution: Distribution) -> None:
    ops = isolated(replace(TINY, experts=replace(MIX, top_k=3)), distribution=distribution)
    for tokens in (1, 2, 17, 500):
        chosen, weights = ops.routing(tokens)
        assert chosen.shape == (tokens, 3)
        assert all(len(set(row)) == 3 for row in chosen.tolist())
        assert torch.allclose(weights.sum(1), torch.ones(tokens), atol=1e-5)
    rows = torch.bincount(chosen.flatten(), minlength=6)
    assert (int(rows.max()) == int(rows.min()) == 250) is (distribution == "balanced")


@pytest.mark.parametrize("model", [TINY, SHARED], ids=["mixture", "shared"])
def test_every_op_runs_on_a_cpu(model: ModelSpec) -> None:
    ops = isolated(model, 2)
    with no_garbage_collection():
        for op in model.row_ops:
            for tokens in (1, 16):
                assert (ops.measure(op, (tokens,)).time_us or 0) > 0
        assert (ops.measure("mixed", (6, 10, 2, 16)).time_us or 0) > 0
        assert all(time().time_us for time in overheads(ops).values())


@pytest.mark.parametrize("model", [TINY, SHARED], ids=["mixture", "shared"])
def test_the_memory_is_that_of_all_experts(model: ModelSpec) -> None:
    """Once, however many sets of the other weights there are."""
    drawn = RandomWeights(model, 2, None, CPU, torch.float32)
    sets = [drawn.layer(index) for index in range(3)]
    experts = {id(each): each for one in sets for each in one.experts or ()}
    held = sum(each.numel() for each in experts.values())
    held += sum(m.numel() for one in sets for m in one.matrix.values())
    assert memory_needs(model, 2, 4, LIMITS, copies=3)["weights"] == 4 * held


@pytest.mark.slow
def test_a_mixture_on_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are what a simulation takes. (Of every op the first and the last point.)"""
    for name in ("coarse_grid", "designed_points"):
        points = getattr(measure, name)
        monkeypatch.setattr(
            measure, name, lambda *a, points=points: points(*a)[:: len(points(*a)) - 1]
        )
    settings = Settings(
        TINY, (1,), "cuda", "bfloat16", tmp_path, LIMITS, budget_s=0, repeats=1,
        attention="sdpa", sustained_s=0.01, expert_distribution="balanced",
    )  # fmt: skip
    with fake_cuda.pretend():
        folder, _ = profile(settings, lambda _: None, lambda *_: None)
    bundle = load_bundle(folder)
    assert set(bundle.linear["op"]) == set(TINY.row_ops) >= {"moe", "moe_router"}
    assert bundle.meta.environment["expert_distribution"] == "balanced"
    assert bundle.meta.environment["skipped_points"] == 0
    assert bundle_times(bundle).by_rows["moe"](12) == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("mix", "weights", "says"),
    [
        (replace(MIX, bias=True), "dtype", "has experts with biases, not supported by the prof"),
        (replace(MIX, dense_layers=(0,)), "dtype", "dense layers beside sparse ones"),
        (MIX, "fp8", "weights fp8: experts are measured in --dtype only"),
        (replace(MIX, intermediate_size=33), "dtype", r"tp 2 does not divide the experts'"),
    ],
)
def test_mixtures_that_are_not_measured(tmp_path: Path, mix: Any, weights: Any, says: str) -> None:
    model = replace(TINY, experts=mix, ffn_hidden_size=32 if mix.dense_layers else 0)
    settings = Settings(
        model, (2,), "cuda", "bfloat16", tmp_path, LIMITS, weights=weights, attention="sdpa"
    )
    with fake_cuda.pretend(count=2), pytest.raises(ProfileError, match=says):
        profile(settings, lambda _: None, lambda *_: None)
