"""The ops of a model on one tensor-parallel rank, in the order in which they run. Imports torch.

The engine's stages run them, and the profiler times them, whole or one by one. Both do so through
``do``, which gets every call: ``do(op, call, state, *inputs)`` runs ``call(state, *inputs)`` as a
part of ``op``. To add an op, add its call here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, DECODE, EDGE_OPS, MOE, OTHERS, PREFILL
from sarathi_sim.profiler.shard.attention import KVCache
from sarathi_sim.profiler.shard.rows import Chunk, Decodes, Routing, Rows
from sarathi_sim.profiler.shard.weights import Ends, Weights, normed

EMBEDDING, LM_HEAD = EDGE_OPS


class LayerState(NamedTuple):
    """What one layer holds."""

    weights: Weights
    cache: KVCache


Do = Callable[..., Any]
"""See above."""


def at_once(op: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
    """The :data:`Do` that does no more."""
    return call(state, *inputs)


class ShardLayer:
    """The ops on one of ``tp`` ranks. Activations are (tokens, width).

    ``reduce`` sums a tensor over the ranks, in place; without it the sums are those of one rank.
    ``fp8``: the inputs of a layer's GEMMs are float8_e4m3fn, as their weights, with one scale a
    tensor, as a GPU from compute capability 8.9 on takes them; sums are accumulated in the fast way
    of its fp8 units, as engines have it. Raises ValueError where ``tp`` does not divide the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        tp: int,
        device: torch.device,
        dtype: torch.dtype,
        reduce: Callable[[Tensor], object] | None = None,
        fp8: bool = False,
    ) -> None:
        self.model, self.reduce, self.fp8 = model, reduce, fp8
        self.heads, self.kv_heads = model.heads_per_rank(tp)
        self.shapes = model.gemms(tp)
        self.device, self.dtype = device, dtype
        self._one = torch.ones((), device=device, dtype=torch.float32)

    def forward(
        self,
        layers: Iterable[LayerState],
        ends: Ends,
        rows: Rows,
        x: Tensor | None = None,
        do: Do = at_once,
    ) -> Tensor:
        """Activations (tokens, hidden) after the layers; where there are ``outputs`` logits
        (outputs, columns).

        ``x`` comes from the stage before; without it the tokens are embedded.
        """
        if x is None:
            x = do(EMBEDDING, self.embed, ends, rows.tokens, rows.positions)
        for layer in layers:
            x = self.run(layer, x, rows, do)
        if rows.outputs is None:
            return x
        assert ends.norm is not None
        x = normed(x.index_select(0, rows.outputs), *ends.norm)
        logits: Tensor = do(LM_HEAD, self.head, ends, x)
        return logits

    def run(self, layer: LayerState, x: Tensor, rows: Rows, do: Do = at_once) -> Tensor:
        """One layer on (tokens, hidden)."""

        def linear(op: str, x: Tensor) -> Any:
            return do(op, self.gemm, layer, x, op)

        def network(name: str, x: Tensor) -> Any:
            inner = do(OTHERS, self.activation, layer, linear(f"{name}_ln1", x))
            return linear(f"{name}_ln2", inner)

        def summed(out: Tensor) -> Tensor:
            if self.reduce is not None:
                do(ALL_REDUCE, self.all_reduce, layer, out)
            return out

        fused = linear("preproj", do(OTHERS, self.norm, layer, x))
        q, k, v = do(OTHERS, self.split, layer, fused, rows.angles)
        attended = do(OTHERS, self.join, layer, *self._attend(layer, (q, k, v), rows, do))
        out = summed(linear("postproj", attended))
        x, y = do(OTHERS, self.add_and_norm, layer, x, out)
        if self.model.experts is None:
            out = network("ffn", y)
        else:
            linear("moe_router", y)  # the experts are those of ``routing``
            out = do(MOE, self.moe, layer, y, rows.routing)
            if "shared_ln1" in self.shapes:
                out = do(OTHERS, self.add, layer, out, network("shared", y))
        found: Tensor = do(OTHERS, self.add, layer, x, summed(out))
        return found

    def _attend(
        self, layer: LayerState, new: tuple[Tensor, ...], rows: Rows, do: Do
    ) -> list[Tensor]:
        """Of the chunks, then of the decodes."""
        first, parts = sum(chunk.tokens for chunk in rows.chunks), []
        if rows.decodes is not None:  # before the chunks, which may share a block that this fills
            last = (part[first:] for part in new)
            parts.append(do(DECODE, self.decode, layer, *last, rows.decodes))
        for chunk in reversed(rows.chunks):
            end, first = first, first - chunk.tokens
            mine = (part[first:end] for part in new)
            parts.append(do(PREFILL, self.prefill, layer, *mine, chunk))
        return parts[::-1]

    # The ops: state, then inputs ----------------------------------------------------------------

    def embed(self, ends: Ends, tokens: Tensor, positions: Tensor) -> Tensor:
        """The rows of the tokens, and of their positions where those are learned."""
        assert ends.table is not None
        x = F.embedding(tokens, ends.table)
        return x if ends.positions is None else x + F.embedding(positions, ends.positions)

    def norm(self, layer: LayerState, x: Tensor) -> Tensor:
        """The norm before attention."""
        return normed(x, layer.weights.norm[0], layer.weights.norm_bias)

    def gemm(self, layer: LayerState, x: Tensor, op: str) -> Tensor:
        """One of a layer's: (tokens, k) to (tokens, n); q, k and v, or gate and up, are fused."""
        matrix, bias = layer.weights.matrix[op], layer.weights.bias[op]
        if not self.fp8:
            return F.linear(x, matrix, bias)
        out: Tensor = torch._scaled_mm(
            self.as_input(x), matrix.t(), self._one, self._one,
            bias=bias, out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip
        return out

    def as_input(self, x: Tensor) -> Tensor:
        """``x`` in the format that a GEMM of a layer takes."""
        return x.to(torch.float8_e4m3fn) if self.fp8 else x

    def split(
        self, layer: LayerState, qkv: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, fused) to q (tokens, heads, dim) and k, v (tokens, kv_heads, dim), q and k
        normed and rotated as the model does."""
        parts = qkv.view(qkv.shape[0], self.heads + 2 * self.kv_heads, self.model.head_dim)
        end = self.heads + self.kv_heads
        q, k, v = parts[:, : self.heads], parts[:, self.heads : end], parts[:, end:]
        return self._rotate(q, angles), self._rotate(k, angles), v

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (tokens, 1, head_dim / 2)."""
        half = self.model.head_dim // 2
        steps = torch.arange(half, device=self.device, dtype=torch.float32) / half
        turn = positions.to(torch.float32)[:, None, None] * 10_000.0**-steps
        return turn.cos().to(self.dtype), turn.sin().to(self.dtype)

    def _rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        if self.model.qk_norm:  # with gains of 1
            x = normed(x)
        if self.model.learned_positions:
            return x
        cos, sin = angles
        half = cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

    def prefill(self, layer: LayerState, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Tensor:
        """Attention of one chunk, its K and V written; like q."""
        return chunk.run(layer.cache, q, k, v)

    def decode(
        self, layer: LayerState, q: Tensor, k: Tensor, v: Tensor, decodes: Decodes
    ) -> Tensor:
        """Attention of all decodes, their K and V written; like q."""
        return decodes.run(layer.cache, q, k, v)

    def join(self, layer: LayerState, *parts: Tensor) -> Tensor:
        """(rows, heads, dim) of each call to (tokens, heads * dim)."""
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def all_reduce(self, layer: LayerState, x: Tensor) -> None:
        """The sum over the ranks, in place."""
        assert self.reduce is not None
        self.reduce(x)

    def add_and_norm(self, layer: LayerState, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The residual addition after attention, and the norm behind it."""
        x = x + y
        return x, normed(x, layer.weights.norm[1], layer.weights.norm_bias)

    def activation(self, layer: LayerState, x: Tensor) -> Tensor:
        """The activation between the two GEMMs of a network: SwiGLU of (gate, up), or GELU."""
        if not self.model.gated_ffn:
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def moe(self, layer: LayerState, x: Tensor, routing: Routing) -> Tensor:
        """The chosen experts' part of (tokens, hidden): rows are sorted by expert, two grouped
        GEMMs with the activation between them, and the outputs brought back and added up."""
        assert layer.weights.experts is not None
        (chosen, weights), (up, down) = routing, layer.weights.experts
        numbers, order = chosen.flatten().sort()
        every = torch.arange(len(up), device=self.device)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        rows = x.index_select(0, order // chosen.shape[1])
        inner = self.activation(layer, F.grouped_mm(rows, up.transpose(1, 2), offs=ends))
        out = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
        back = torch.empty_like(out).index_copy_(0, order, out)
        return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def add(self, layer: LayerState, x: Tensor, y: Tensor) -> Tensor:
        """A residual addition, or that of the experts that all tokens share."""
        return x + y

    def head(self, ends: Ends, x: Tensor) -> Tensor:
        """(rows, hidden) to logits of this rank's part of the vocabulary."""
        assert ends.head is not None
        return F.linear(x, ends.head)[:, : ends.columns]
