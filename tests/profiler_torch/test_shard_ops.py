"""What is timed is what the engine runs: the same calls with the same inputs, whole or op by op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, LOCAL, OPS
from sarathi_sim.profiler.measuring.shard_ops import ShardOps, advice
from sarathi_sim.profiler.planning.grid import (
    DESIGNED,
    Limits,
    designed_points,
    skewed_contexts,
)
from sarathi_sim.profiler.shard.attention import (
    Chunk,
    Decodes,
    KVCache,
    Rows,
    SdpaAttention,
)
from sarathi_sim.profiler.shard.layer import LayerState, RandomWeights, ShardLayer
from sarathi_sim.profiler.shard.timing import Timer, no_garbage_collection
from tests.profiler_torch.small import GQA, MHA, PLAIN

CPU = torch.device("cpu")
SDPA = SdpaAttention(CPU, torch.float32)
NORMED = replace(GQA, qk_norm=True)
MODELS = pytest.mark.parametrize(
    "model", [MHA, GQA, NORMED, PLAIN], ids=["mha", "gqa", "normed", "plain"]
)
LIMITS = Limits(max_tokens=64, max_context=96, max_batch=8)


def isolated(model: ModelSpec, tp: int = 1, repeats: int = 1, budget: float = 1e9) -> ShardOps:
    timer = Timer(CPU, repeats, patience_s=0.0)
    return ShardOps(model, tp, CPU, torch.float32, LIMITS, timer, budget, SDPA)


@MODELS
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_are_those_of_the_model_spec(model: ModelSpec, tp: int) -> None:
    ops = isolated(model, tp)
    layer, (first, second, *_) = ops.layer, ops.sets
    for op in LAYER_GEMMS:
        shape = model.gemms(tp)[op]
        state = LayerState(second, ops.cache)
        assert layer.gemm(state, torch.randn(3, shape.k), op).shape == (3, shape.n)
    qkv = torch.randn(3, model.gemms(tp)["preproj"].n)
    q, k, v = layer.split(state, qkv, layer.angles(torch.arange(3)))
    assert (q.shape[1], k.shape[1]) == model.heads_per_rank(tp)
    assert v.shape == k.shape
    if tp == 1:
        held = [*first.matrix.values(), *(b for b in first.bias.values() if b is not None)]
        norms = 2 * model.hidden_size * (2 if model.norm_bias else 1)
        if model.qk_norm:  # its gains of 1 are not stored
            norms += 2 * model.head_dim
        assert sum(each.numel() for each in held) + norms == sum(model.parameters_in(range(1)))


@MODELS
def test_the_calls_of_an_op_alone_are_those_of_the_whole(model: ModelSpec) -> None:
    """By name and shape, of a chunk of 7 tokens; a layer's ops come in the registry's order."""
    ops, ran = isolated(model), []

    def spy(op: str, call: Any, state: Any, *inputs: Any) -> Any:
        ran.append((op, call.__name__, shapes(inputs)))
        return call(state, *inputs)

    rows = ops._rows(7, 0, [], "lm_head")
    ops.layer.forward([LayerState(ops.sets[0], ops.cache)], ops._ends, rows, do=spy)
    for op in (*model.row_ops, "attn_prefill"):
        alone = [(op, call.__name__, shapes(inputs)) for call, inputs in ops._calls(op, rows)]
        assert alone == [one for one in ran if one[0] == op] != []
    order = [op for op in dict.fromkeys(op for op, *_ in ran) if op != "others"]
    assert order == ["embedding", *(op for op in OPS if op in order and op != "embedding")]


def shapes(inputs: Any) -> list[Any]:
    return [tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor)]


@MODELS
@pytest.mark.parametrize("tp", [1, 2])
def test_every_point_runs(model: ModelSpec, tp: int) -> None:
    """Each op's smallest and largest, and all designed points."""
    ops = isolated(model, tp, repeats=2)
    largest = {"attn_prefill": (32, 64), "attn_decode": (8, 95), "lm_head": (8,)}
    points = [(op, (1, 0) if op.startswith("attn") else (1,)) for op in LOCAL]
    points += [(op, largest.get(op, (64,))) for op in LOCAL]
    points += [(op, key) for op in DESIGNED for key in designed_points(op, LIMITS)]
    with no_garbage_collection():
        for op, key in points:
            timing = ops.measure(op, key)
            assert timing.time_us is not None, (op, key, timing.note)
            assert timing.time_us > 0 and timing.samples >= 2


@MODELS
def test_a_mixed_layer_is_the_layer_of_its_parts(model: ModelSpec) -> None:
    """The same tokens, cache and weights, the chunk and the decodes in layers of their own."""
    chunk, context, contexts = 7, 5, [11, 3, 11]
    layer = ShardLayer(model, 1, CPU, torch.float32)
    weights = RandomWeights(model, 1, None, CPU, torch.float32).layer(0)
    x = torch.randn(chunk + 3, model.hidden_size)
    positions = torch.cat([torch.arange(context, context + chunk), torch.tensor(contexts)])
    outputs = []
    for some in (slice(0, 10), slice(0, 7), slice(7, 10)):
        torch.manual_seed(0)  # the cache's content
        cache = KVCache(12 + 3 * 12, layer.kv_heads, model.head_dim, CPU, torch.float32)
        rows = Rows(
            layer.angles(positions[some]),
            [Chunk(SDPA, chunk, context)] if some.start == 0 else [],
            Decodes.in_a_row(SDPA, contexts, CPU, 12) if some.stop == 10 else None,
        )
        outputs.append(layer.run(LayerState(weights, cache), x[some], rows))
    mixed, of_chunk, of_decodes = outputs
    assert mixed.shape == (chunk + 3, model.hidden_size)
    assert torch.allclose(mixed[:chunk], of_chunk, atol=1e-5)
    assert torch.allclose(mixed[chunk:], of_decodes, atol=1e-5)


def test_a_skewed_batch_is_each_of_its_sequences_alone() -> None:
    contexts = skewed_contexts(4, 6, 13)
    assert contexts == [13, 6, 3, 2]
    cache = KVCache(4 * 14, 2, 16, CPU, torch.float32)
    new = tuple(torch.randn(4, n, 16) for n in (4, 2, 2))
    alone = []
    for i, context in enumerate(contexts):
        one = Decodes.in_a_row(SDPA, [context], CPU, 14 * i)
        alone.append(one.run(cache, *(part[i : i + 1] for part in new)))
    together = Decodes.in_a_row(SDPA, contexts, CPU).run(cache, *new)
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)


def test_queries_and_keys_are_normed_by_head() -> None:
    """A rotation keeps the length of a head, so it is that of its norm: sqrt(head_dim)."""
    layer = ShardLayer(NORMED, 1, CPU, torch.float32)
    qkv, state = 7 * torch.randn(5, 8 * 16), isolated(NORMED).sets[0]
    _, keys, values = layer.split(state, qkv, layer.angles(torch.arange(5)))
    assert keys.norm(dim=-1).flatten().tolist() == pytest.approx([4.0] * 10, rel=1e-4)
    assert torch.equal(values.flatten(1), qkv[:, -2 * 16 :])


def test_points_that_do_not_fit_say_so() -> None:
    ops = isolated(MHA)
    room = ops.cache.tokens
    assert room == 8 * 96
    for op, key, need in (
        ("attn_decode", (64, 40), 64 * 41),
        ("attn_decode_skew", (8, 40, 200), 8 * 201),
        ("mixed", (32, 64, 8, 95), 32 + 64 + 8 * 96),
    ):
        note = f"needs {need} KV slots, and memory holds {room}"
        assert ops.measure(op, key).note == note
        assert ops.probe(op, key).note == note
    small = isolated(MHA, budget=2e6)
    assert small.measure("attn_prefill", (1000, 96)).note.startswith("needs 0.01 GB beside")
    with pytest.raises(ValueError, match="one layer's weights need"):
        isolated(MHA, budget=1e4)


def test_others_in_one_function_are_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler gets, once for all sizes: inputs change, calls and gains do not."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, dynamic: compiled.append(call) or call)
    ops = isolated(GQA)
    with no_garbage_collection():
        assert all(ops.fused_others((tokens,)).time_us for tokens in (1, 5))
    (others,) = compiled
    inputs = [each for _, each in ops._others(5)]
    state = LayerState(ops.sets[0], ops.cache)
    expected = [call(state, *each) for call, each in ops._others(5)]
    for one, other in zip(others(inputs), expected, strict=True):
        assert all(map(torch.equal, one, other)) if isinstance(one, tuple) else one.equal(other)


def test_advice_by_hand() -> None:
    times = {"layer_run": 100.0, "layer_launch": 150.0, "layer_graph_launch": 20.0}
    assert "40 layers wait 0.002 s" in (text := advice("cuda", 40, times))
    assert "engine.turnaround_s 0.002" in text
    assert text.endswith("with graphs 0 (a layer runs 100 us in one)")
    hidden = advice("cuda", 40, {"layer_run": 100.0, "layer_launch": 90.0})
    assert "wait 0 s" in hidden and "graphs 0" not in hidden
    assert "takes 100 us, of which 150 are dispatch" in advice("cpu", 40, times)
