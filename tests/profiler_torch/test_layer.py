"""The layer that is timed computes what a decoder layer computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.facts.model import ModelSpec, load_model  # noqa: E402
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, LOCAL  # noqa: E402
from sarathi_sim.profiler.measuring.shard_ops import ShardOps  # noqa: E402
from sarathi_sim.profiler.planning.settings import Limits  # noqa: E402
from sarathi_sim.profiler.shard.attention import (  # noqa: E402
    KVCache,
    choose_attention,
    decode_step,
    prefill_step,
)
from sarathi_sim.profiler.shard.attention_backends import SdpaAttention  # noqa: E402
from sarathi_sim.profiler.shard.layer import ShardLayer  # noqa: E402
from sarathi_sim.profiler.shard.timing import Timer, no_garbage_collection, relative_iqr  # noqa: E402

CPU = torch.device("cpu")
SDPA = SdpaAttention(CPU, torch.float32)
MHA = replace(load_model("tiny-llama-40m"), hidden_size=64, num_heads=4, num_kv_heads=4,
              head_dim=16, ffn_hidden_size=128, vocab_size=96)  # fmt: skip
GQA = replace(MHA, num_kv_heads=2)
NORMED = replace(GQA, qk_norm=True)
PLAIN = replace(MHA, gated_ffn=False, learned_positions=True, norm_bias=True, ffn_bias=True,
                attention_bias="all")  # fmt: skip
MODELS = pytest.mark.parametrize(
    "model", [MHA, GQA, NORMED, PLAIN], ids=["mha", "gqa", "normed", "plain"]
)
TOKENS = 50


class Prompt:
    """A layer with a cache, fed chunk by chunk or token by token."""

    def __init__(self, model: ModelSpec) -> None:
        self.layer = ShardLayer(model, 1, CPU, torch.float32)
        self.attention = SdpaAttention(CPU, torch.float32)
        self.cache = KVCache(4 * TOKENS, self.layer.kv_heads, model.head_dim, CPU, torch.float32)
        self.x = self.layer.random(TOKENS, model.hidden_size)

    def chunk(self, first: int, count: int, start: int = 0) -> torch.Tensor:
        """The layer's output for tokens first .. first + count of the prompt."""
        bias = self.attention.prefill_bias(count, first)
        return self.layer.run(
            self.x[first : first + count],
            self.layer.angles(torch.arange(first, first + count)),
            lambda *new: prefill_step(self.attention, self.cache, start, first, new, bias),
        )


@MODELS
@pytest.mark.parametrize("chunks", [(1, 49), (16, 16, 18), (49, 1), (7,) * 7 + (1,)])
def test_chunks_give_what_the_whole_prompt_gives(model: ModelSpec, chunks: tuple[int, ...]) -> None:
    prompt = Prompt(model)
    whole = prompt.chunk(0, TOKENS)
    pieces, first = [], 0
    for count in chunks:
        pieces.append(prompt.chunk(first, count, start=TOKENS))
        first += count
    assert torch.allclose(torch.cat(pieces), whole, atol=2e-5)


@MODELS
def test_decodes_give_what_the_whole_prompt_gives(model: ModelSpec) -> None:
    """Two sequences that differ, decoded as one batch after 40 tokens each."""
    prompts, known, batch = [Prompt(model), Prompt(model)], 40, 2
    prompts[1].x = prompts[1].x.flip(0)
    prompts[1].layer = prompts[0].layer
    for number, prompt in enumerate(prompts):
        prompt.cache = prompts[0].cache
        prompt.chunk(0, known, start=number * TOKENS)
    layer, attention = prompts[0].layer, prompts[0].attention
    for token in range(known, TOKENS):
        out = layer.run(
            torch.stack([prompt.x[token] for prompt in prompts]),
            layer.angles(torch.full((batch,), token)),
            lambda *new, at=token: decode_step(
                attention, prompts[0].cache, 0, TOKENS, at, new, attention.decode_bias(2, at, 0)
            ),
        )
        last = out
    for number, prompt in enumerate(prompts):
        whole = prompt.chunk(0, TOKENS, start=2 * TOKENS)
        assert torch.allclose(last[number], whole[-1], atol=2e-5)


@MODELS
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shapes_are_those_of_the_model_spec(model: ModelSpec, tp: int) -> None:
    layer = ShardLayer(model, tp, CPU, torch.float32, copies=2)
    for op in LAYER_GEMMS:
        shape = model.gemms(tp)[op]
        assert layer.gemm(op, layer.random(3, shape.k), copy=1).shape == (3, shape.n)
    q, k, v = layer.split(layer.random(3, model.gemms(tp)["preproj"].n))
    assert (q.shape[1], k.shape[1]) == model.heads_per_rank(tp)
    assert v.shape == k.shape
    inner = layer.activation(layer.random(3, model.gemms(tp)["ffn_ln1"].n))
    assert inner.shape == (3, model.gemms(tp)["ffn_ln2"].k)
    weights = sum(m.numel() for m in layer.sets[0].matrix.values())
    if tp == 1:
        biases = sum(b.numel() for b in layer.sets[0].bias.values() if b is not None)
        norms = 2 * model.hidden_size * (2 if model.norm_bias else 1)
        if model.qk_norm:  # its gains of 1 are not stored
            norms += 2 * model.head_dim
        assert weights + biases + norms == sum(model.parameters_in(range(1)))


@MODELS
def test_every_op_runs_at_its_smallest_and_largest(model: ModelSpec) -> None:
    limits = Limits(max_tokens=40, max_context=64, max_batch=4)
    timer = Timer(CPU, repeats=2, patience_s=0.0)
    ops = ShardOps(model, 2, CPU, torch.float32, limits, timer, 1e9, SDPA)
    largest = {"attn_prefill": (32, 32), "attn_decode": (4, 63), "lm_head": (4,)}
    with no_garbage_collection():
        for op in LOCAL:
            for key in ((1, 0) if op.startswith("attn") else (1,), largest.get(op, (40,))):
                timing = ops.measure(op, key)
                assert timing.time_us is not None
                assert timing.time_us > 0
                assert timing.samples >= 2


def test_queries_and_keys_are_normed_by_head() -> None:
    """A rotation keeps the length of a head, so it is that of its norm: sqrt(head_dim)."""
    layer = ShardLayer(NORMED, 1, CPU, torch.float32)
    keys = 7 * layer.random(5, 2, 16)
    lengths = layer.rotate(keys, layer.angles(torch.arange(5))).norm(dim=-1)
    assert lengths.flatten().tolist() == pytest.approx([4.0] * 10, rel=1e-4)


def test_what_does_not_fit_is_skipped_with_a_reason() -> None:
    limits, timer = Limits(64, 4096, 64), Timer(CPU, repeats=1)
    ops = ShardOps(MHA, 1, CPU, torch.float32, limits, timer, 14e6, SDPA)
    assert ops.measure("attn_decode", (64, 4000)).note.startswith("needs 256064 KV slots")
    assert ops.measure("attn_prefill", (4000, 96)).note.startswith("needs 0.1")
    with pytest.raises(ValueError, match="one layer's weights need"):
        ShardOps(MHA, 1, CPU, torch.float32, limits, timer, 1e4, SDPA)


def test_on_a_cpu_attention_is_sdpa_and_the_reason_is_kept() -> None:
    attention, reason = choose_attention(CPU, torch.float32, 4, 2, 16)
    assert attention.name == "torch SDPA, mask"
    assert "CUDA" in reason


def test_relative_iqr() -> None:
    assert relative_iqr([1.0]) == 0.0
    assert relative_iqr([1.0, 2.0, 3.0]) == 0.5
