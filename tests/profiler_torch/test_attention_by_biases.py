"""What we ask of xformers' biases, by a stand-in that computes with them: it agrees with SDPA."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sarathi_sim.profiler.shard.attention import KVCache, SdpaAttention, XformersAttention
from sarathi_sim.profiler.shard.rows import Chunk, Decodes

CPU = torch.device("cpu")


class BottomRight:
    """xformers' causal mask, aligned to the last key."""

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class PaddedKeys:
    """xformers' mask over packed sequences whose keys are padded to equal lengths."""

    def __init__(self, q_seqlen: list[int], kv_padding: int, kv_seqlen: list[int]) -> None:
        self.queries, self.padding, self.keys = q_seqlen, kv_padding, kv_seqlen

    @classmethod
    def from_seqlens(cls, *, q_seqlen: list[int], kv_padding: int, kv_seqlen: list[int]) -> Any:
        assert len(q_seqlen) == len(kv_seqlen) and max(kv_seqlen) <= kv_padding
        return cls(q_seqlen, kv_padding, kv_seqlen)

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        assert queries == sum(self.queries) and keys == self.padding * len(self.keys)
        found = torch.zeros(queries, keys, dtype=torch.bool)
        row = 0
        for number, (new, held) in enumerate(zip(self.queries, self.keys, strict=True)):
            block = torch.ones(new, held, dtype=torch.bool).tril(held - new)
            start = number * self.padding
            found[row : row + new, start : start + held] = block
            row += new
        return found


class GappyKeys:
    """xformers' mask over sequences whose keys lie anywhere in one cache, in ascending order."""

    def __init__(self, starts: list[int], lengths: list[int]) -> None:
        self.starts, self.lengths = starts, lengths

    @classmethod
    def from_seqlens(
        cls, *, q_seqlen: list[int], kv_seqstarts: list[int], kv_seqlen: list[int]
    ) -> Any:
        assert set(q_seqlen) == {1}
        assert len(kv_seqstarts) == len(kv_seqlen) + 1 == len(q_seqlen) + 1
        assert kv_seqstarts == sorted(kv_seqstarts)
        return cls(kv_seqstarts, kv_seqlen)

    def allowed(self, queries: int, keys: int) -> torch.Tensor:
        assert queries == len(self.lengths) and keys == self.starts[-1]
        found = torch.zeros(queries, keys, dtype=torch.bool)
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=False)):
            found[row, start : start + length] = True
        return found


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: Any) -> torch.Tensor:
    """What memory_efficient_attention_forward computes; BMHK, or BMGHK with K and V expanded."""
    assert q.shape[0] == 1 and q.dim() in (4, 5) and q.dim() == k.dim() == v.dim()
    if q.dim() == 5:
        assert k.stride(3) == v.stride(3) == 0, "K and V of a group must not be copied"
    heads = [part.flatten(2, -2)[0].transpose(0, 1) for part in (q, k, v)]
    mask = attn_bias.allowed(q.shape[1], k.shape[1])
    scores = heads[0] @ heads[1].transpose(1, 2) / q.shape[-1] ** 0.5
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ heads[2]
    return out.transpose(0, 1).reshape(q.shape)


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the parts of xformers that are used."""
    biases = SimpleNamespace(
        LowerTriangularFromBottomRightMask=BottomRight,
        BlockDiagonalCausalWithOffsetPaddedKeysMask=PaddedKeys,
        BlockDiagonalCausalWithOffsetGappyKeysMask=GappyKeys,
    )
    fmha = SimpleNamespace(
        attn_bias=biases,
        memory_efficient_attention_forward=attend,
        Inputs=lambda **inputs: SimpleNamespace(normalize_bmhk=lambda: None),
        dispatch=SimpleNamespace(_dispatch_fw=lambda inp, grad: SimpleNamespace(NAME="stand-in")),
    )
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__version__, ops.fmha = "0.0", fmha  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    return fmha


def new(tokens: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, n, 8) for n in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_xformers_and_sdpa_agree(xformers: Any, kv_heads: int) -> None:
    cache = KVCache(200, kv_heads, 8, CPU, torch.float32)
    both = (XformersAttention(), SdpaAttention(CPU, torch.float32))
    chunk, batch = new(7, kv_heads), new(3, kv_heads)
    for context in (0, 5):
        outs = [Chunk(a, 7, context, 3).run(cache, *chunk) for a in both]
        assert torch.allclose(*outs, atol=1e-6)
    for contexts, first in (([6] * 3, 20), ([9, 4, 0], 60)):
        outs = [Decodes.in_a_row(a, contexts, CPU, first).run(cache, *batch) for a in both]
        assert torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_decodes_in_any_blocks_agree(xformers: Any, kv_heads: int) -> None:
    """The engine's decodes: blocks out of order, lengths so different that SDPA needs two calls."""
    batch, decodes = new(3, kv_heads), [(2, 9), (0, 4), (3, 0)]
    outs, caches = [], []
    for attention in (XformersAttention(), SdpaAttention(CPU, torch.float32)):
        torch.manual_seed(0)
        caches.append(KVCache(4 * 12, kv_heads, 8, CPU, torch.float32))
        plan = Decodes.in_blocks(attention, decodes, 4, 12, CPU)
        outs.append(plan.run(caches[-1], *batch))
    assert torch.allclose(*outs, atol=1e-6)
    assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].k[2 * 12 + 9], batch[1][0])
