"""What only a GPU can tell: ``python -m pytest -m gpu``. Skipped without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.bundle.check import check_folder
from sarathi_sim.profiler.bundle.schema import load_bundle
from sarathi_sim.profiler.facts.device import shipped_device
from sarathi_sim.profiler.facts.layer_kinds import Experts
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.measuring.measure import profile
from sarathi_sim.profiler.measuring.shard_ops import ShardOps, overheads
from sarathi_sim.profiler.planning.grid import Limits, Settings
from sarathi_sim.profiler.shard.attention import Chunk, Decodes, KVCache, choose_attention
from sarathi_sim.profiler.shard.layer import LayerState
from sarathi_sim.profiler.shard.timing import Sampler, Timer, guarded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MODEL = replace(load_model("tiny-llama-40m"), hidden_size=1024, num_heads=8, num_kv_heads=2,
                head_dim=128, ffn_hidden_size=2048, vocab_size=2048, num_layers=2)  # fmt: skip
LIMITS = Limits(64, 96, 4)
CHOICES = ("xformers", "sdpa", "cudnn", "fa3")


def chosen(choice: Any, heads: int = 8, kv_heads: int = 2, dim: int = 128) -> Any:
    try:
        return choose_attention(CUDA, torch.bfloat16, heads, kv_heads, dim, choice)[0]
    except ValueError as error:
        pytest.skip(str(error))


def exact(q: Any, keys: Any, values: Any, context: int) -> Any:
    """Attention in float64: q (chunk, heads, dim) after ``context`` tokens."""
    share = q.shape[1] // keys.shape[1]
    q, keys, values = (part.double().cpu() for part in (q, keys, values))
    keys, values = (part.repeat_interleave(share, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[0], keys.shape[0], dtype=torch.bool).tril(context)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_is_that_of_float64(choice: str, kv_heads: int) -> None:
    attention = chosen(choice, kv_heads=kv_heads)
    cache = KVCache(512, kv_heads, 128, CUDA, torch.bfloat16)
    for chunk, context in ((64, 0), (17, 33)):
        q, k, v = new(chunk, 8, kv_heads, kv_heads)
        out = Chunk(attention, chunk, context, 5).run(cache, q, k, v)
        held = slice(5, 5 + context + chunk)
        expected = exact(q, cache.k[held], cache.v[held], context)
        assert torch.allclose(out.double().cpu(), expected, atol=2e-2)
    q, k, v = new(3, 8, kv_heads, kv_heads)
    contexts = [40, 7, 0]
    out = Decodes.in_a_row(attention, contexts, CUDA, 100).run(cache, q, k, v)
    for row, context in enumerate(contexts):
        held = slice(100 + 41 * row, 101 + 41 * row + context)
        expected = exact(q[row : row + 1], cache.k[held], cache.v[held], context)
        assert torch.allclose(out[row].double().cpu(), expected[0], atol=2e-2)


def new(tokens: int, *heads: int) -> list[Any]:
    return [torch.randn(tokens, n, 128, device=CUDA, dtype=torch.bfloat16) for n in heads]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_chunked_prompt_is_a_whole_one(choice: str) -> None:
    attention = chosen(choice)
    cache = KVCache(256, 2, 128, CUDA, torch.bfloat16)
    prompt = new(96, 8, 2, 2)
    whole = Chunk(attention, 96, 0).run(cache, *prompt)
    parts = []
    for first, end in ((0, 32), (32, 50), (50, 96)):
        part = (each[first:end] for each in prompt)
        parts.append(Chunk(attention, end - first, first, 128).run(cache, *part))
    assert torch.allclose(torch.cat(parts).float(), whole.float(), atol=2e-2)


def test_fp8_gemms_are_those_of_their_rounded_numbers() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 units")
    found = ops(fp8=True)
    layer, state = found.layer, LayerState(found.sets[0], found.cache)
    x = layer.as_input(torch.randn(48, 1024, device=CUDA, dtype=torch.bfloat16))
    out = layer.gemm(state, x, "preproj")
    expected = x.float() @ state.weights.matrix["preproj"].float().t()
    assert torch.allclose(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_grouped_gemms_are_those_of_each_expert(tokens: int) -> None:
    """The same rows through all experts in float32, of which the chosen ones count."""
    found = ops(replace(MODEL, ffn_hidden_size=0, experts=Experts(8, 2, 512)))
    layer, state = found.layer, LayerState(found.sets[0], found.cache)
    x = torch.randn(tokens, 1024, device=CUDA, dtype=torch.bfloat16)
    routing, experts = found.routing(tokens), state.weights.experts
    assert experts is not None
    (chosen, weights), (up, down) = routing, (each.float() for each in experts)
    inner = layer.activation(state, torch.einsum("th,enh->ten", x.float(), up))
    every = torch.einsum("ten,ehn->teh", inner, down)
    picked = every.gather(1, chosen[:, :, None].expand(-1, -1, 1024))
    expected = (picked * weights.float()[..., None]).sum(1)
    assert torch.allclose(layer.moe(state, x, routing).float(), expected, rtol=3e-2, atol=3e-2)


def ops(model: ModelSpec = MODEL, **more: Any) -> ShardOps:
    timer, attention = Timer(CUDA, 5), chosen("auto")
    return ShardOps(model, 1, CUDA, torch.bfloat16, LIMITS, timer, 4e9, attention, **more)


def test_a_layer_is_captured_into_a_graph() -> None:
    found = {what: guarded(measure, CUDA) for what, measure in overheads(ops()).items()}
    assert {what: timing.note for what, timing in found.items()} == dict.fromkeys(found, "")


@pytest.mark.parametrize("flush", ["write", "read", "rotate"])
def test_cold_weights_are_read_no_faster_than_memory(flush: Any) -> None:
    """One row times 256 MiB of weights, against the data sheet's bandwidth."""
    device = shipped_device("", torch.cuda.get_device_name())
    if device is None:
        pytest.skip("no data sheet of this GPU is shipped")
    timer = Timer(CUDA, 5, flush=flush)
    weights = [torch.randn(16384, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(1, 8192, device=CUDA, dtype=torch.bfloat16)
    timing = timer(lambda index: torch.nn.functional.linear(x, weights[index % 4]))
    assert timing.time_us is not None
    assert 0.3 < 16384 * 8192 * 2e6 / timing.time_us / device.memory_bandwidth < 1.02


def test_an_empty_pair_of_events_takes_microseconds() -> None:
    floor = Timer(CUDA, 20).event_floor()
    assert floor.time_us is not None and 0 < floor.time_us < 50


def test_nvml_tells_the_clock_under_load() -> None:
    with Sampler() as sampler:
        timer = Timer(CUDA, 5, sampler=sampler)
        x = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
        timing = timer.without_pause(lambda index: x @ x, 1.0)
    if not sampler.facts:
        pytest.skip("NVML does not answer")
    assert timing.clock_mhz > 500
    assert timing.power_w > 0


def test_a_point_out_of_memory_leaves_the_next_one_whole() -> None:
    timer = Timer(CUDA, 1)
    free = torch.cuda.mem_get_info()[1]
    failed = guarded(
        lambda: timer(lambda _: torch.empty(2 * free, dtype=torch.int8, device=CUDA)), CUDA
    )
    assert failed.note.startswith("OutOfMemoryError") and not failed.lost
    assert timer(lambda _: torch.ones(8, device=CUDA)).time_us is not None


@pytest.mark.parametrize("choice", ["xformers", "sdpa"])
def test_a_small_profile_passes_its_check(tmp_path: Path, choice: Any) -> None:
    chosen(choice)
    settings = Settings(
        MODEL, (1,), "cuda", "bfloat16", tmp_path, LIMITS, budget_s=5, repeats=3,
        attention=choice, sustained_s=1.0,
    )  # fmt: skip
    folder, device = profile(settings, lambda _: None, lambda *_: None)
    bundle = load_bundle(folder)
    assert bundle.meta.environment["skipped_points"] == 0
    assert not check_folder(folder).failed
    assert device.is_file()
