"""A fused layer computes what its parts compute; a skewed batch what each sequence does alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.facts.model import ModelSpec, load_model  # noqa: E402
from sarathi_sim.profiler.measuring.fused import fused_layer, slots_of  # noqa: E402
from sarathi_sim.profiler.measuring.overhead import advice, overheads  # noqa: E402
from sarathi_sim.profiler.measuring.shard_ops import ShardOps  # noqa: E402
from sarathi_sim.profiler.planning.designed import DESIGNED, designed_points, skewed_contexts  # noqa: E402
from sarathi_sim.profiler.planning.settings import Limits  # noqa: E402
from sarathi_sim.profiler.shard.attention import KVCache, decode_step  # noqa: E402
from sarathi_sim.profiler.shard.attention_backends import SdpaAttention  # noqa: E402
from sarathi_sim.profiler.shard.layer import ShardLayer  # noqa: E402
from sarathi_sim.profiler.shard.timing import Timer, no_garbage_collection  # noqa: E402

CPU = torch.device("cpu")
SDPA = SdpaAttention(CPU, torch.float32)
MHA = replace(load_model("tiny-llama-40m"), hidden_size=64, num_heads=4, num_kv_heads=4,
              head_dim=16, ffn_hidden_size=128, vocab_size=96)  # fmt: skip
GQA = replace(MHA, num_kv_heads=2)
MODELS = pytest.mark.parametrize("model", [MHA, GQA], ids=["mha", "gqa"])
LIMITS = Limits(max_tokens=64, max_context=96, max_batch=8)


@MODELS
def test_a_mixed_layer_is_the_layer_of_its_parts(model: ModelSpec) -> None:
    """The same tokens, cache and weights, the chunk and the decodes in layers of their own."""
    chunk, context, batch, held = 7, 5, 3, 11
    slots = slots_of(chunk, context, batch, held)
    outputs = []
    for parts in ((chunk, batch), (chunk, 0), (0, batch)):
        torch.manual_seed(0)  # the cache's content
        layer = ShardLayer(model, 1, CPU, torch.float32)
        cache = KVCache(slots, layer.kv_heads, model.head_dim, CPU, torch.float32)
        x = layer.random(chunk + batch, model.hidden_size)
        rows = slice(0 if parts[0] else chunk, chunk + batch if parts[1] else chunk)
        layer.random = lambda *_, x=x, rows=rows, **__: x[rows]  # type: ignore[method-assign]
        if not parts[0]:  # the decodes' slots come after the chunk's
            cache.k, cache.v = cache.k[chunk + context :], cache.v[chunk + context :]
            cache.tokens = len(cache.k)
        attention = SdpaAttention(CPU, torch.float32)
        sizes = (parts[0], context if parts[0] else 0, parts[1], held if parts[1] else 0)
        outputs.append(fused_layer(layer, attention, cache, *sizes)(0))
    mixed, of_chunk, of_decodes = outputs
    assert mixed.shape == (chunk + batch, model.hidden_size)
    assert torch.allclose(mixed[:chunk], of_chunk, atol=1e-5)
    assert torch.allclose(mixed[chunk:], of_decodes, atol=1e-5)


@MODELS
def test_a_skewed_batch_is_each_of_its_sequences_alone(model: ModelSpec) -> None:
    contexts = skewed_contexts(4, 6, 13)
    assert contexts == [13, 6, 3, 2]
    layer = ShardLayer(model, 1, CPU, torch.float32)
    attention = SdpaAttention(CPU, torch.float32)
    cache = KVCache(4 * 14, layer.kv_heads, model.head_dim, CPU, torch.float32)
    new = tuple(layer.random(4, n, model.head_dim) for n in (layer.heads, *[layer.kv_heads] * 2))
    alone = []
    for i, context in enumerate(contexts):
        one = tuple(part[i : i + 1] for part in new)
        alone.append(decode_step(attention, cache, 14 * i, 14, context, one, None))
    bias = attention.skewed_bias(contexts, 14)
    together = decode_step(attention, cache, 0, 14, torch.tensor(contexts), new, bias)
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)


@MODELS
@pytest.mark.parametrize("tp", [1, 2])
def test_all_designed_points_run(model: ModelSpec, tp: int) -> None:
    ops = ShardOps(model, tp, CPU, torch.float32, LIMITS, Timer(CPU, 1, patience_s=0.0), 1e9, SDPA)
    with no_garbage_collection():
        for op in DESIGNED:
            for key in designed_points(op, LIMITS):
                timing = ops.measure(op, key)
                assert timing.time_us is not None, (op, key, timing.note)


def test_points_that_do_not_fit_say_so() -> None:
    ops = ShardOps(MHA, 1, CPU, torch.float32, LIMITS, Timer(CPU, 1), 1e9, SDPA)
    room = ops.cache.tokens
    assert room == 8 * 96
    for op, key, need in (
        ("attn_decode_skew", (8, 40, 200), 8 * 201),
        ("mixed", (32, 64, 8, 95), 32 + 64 + 8 * 96),
    ):
        note = f"needs {need} KV slots, and memory holds {room}"
        assert ops.measure(op, key).note == note
        assert ops.probe(op, key).note == note


def test_launch_overhead_on_a_cpu_is_dispatch() -> None:
    ops = ShardOps(GQA, 1, CPU, torch.float32, LIMITS, Timer(CPU, 3), 1e9, SDPA)
    times = {what: measure() for what, measure in overheads(ops).items()}
    assert set(times) == {"layer_run", "layer_launch"}
    assert all(timing.time_us is not None and timing.time_us > 0 for timing in times.values())


def test_advice_by_hand() -> None:
    times = {"layer_run": 100.0, "layer_launch": 150.0, "layer_graph_launch": 20.0}
    assert "40 layers wait 0.002 s" in (text := advice("cuda", 40, times))
    assert "engine.turnaround_s 0.002" in text
    assert text.endswith("with graphs 0 (a layer runs 100 us in one)")
    hidden = advice("cuda", 40, {"layer_run": 100.0, "layer_launch": 90.0})
    assert "wait 0 s" in hidden and "graphs 0" not in hidden
    assert "takes 100 us, of which 150 are dispatch" in advice("cpu", 40, times)
