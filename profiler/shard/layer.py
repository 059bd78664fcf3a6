"""The ops of a model on one tensor-parallel rank, in the order in which they run, and their random
weights, which are the same however they are sharded. Imports torch.

The engine's stages run the ops, and the profiler times them, whole or one by one. Both do so
through ``do``, which gets every call: ``do(op, call, state, *inputs)`` runs ``call(state,
*inputs)`` as a part of ``op``. To add an op, add its call here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..facts.model import ModelSpec
from ..facts.ops import (
    ALL_REDUCE,
    DECODE,
    EDGE_OPS,
    MOE,
    OPS,
    OTHERS,
    PREFILL,
)
from .attention import Chunk, Decodes, KVCache, Routing, Rows

_EPSILON = 1e-5


def normed(x: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """The RMS norm over the last axis; with a ``shift`` the layer norm."""
    if shift is not None:
        return F.layer_norm(x, x.shape[-1:], gain, shift, _EPSILON)
    return F.rms_norm(x, x.shape[-1:], gain, _EPSILON)


@dataclass(frozen=True)
class Weights:
    """One layer's: a matrix (n, k) and maybe a bias (n,) per GEMM; two norms' gains, and a shift.
    ``experts`` of a mixture are the matrices (experts, n, k) of gate and up (or up), and of
    down."""

    matrix: dict[str, Tensor]
    bias: dict[str, Tensor | None]
    norm: tuple[Tensor, Tensor]
    norm_bias: Tensor | None
    experts: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Ends:
    """What the first stage has beside its layers: the token table (vocabulary, hidden), and that of
    learned positions; and the last one: gain and shift of the final norm, and the LM head (rows,
    hidden), of which ``columns`` are no padding."""

    table: Tensor | None = None
    positions: Tensor | None = None
    norm: tuple[Tensor, Tensor | None] | None = None
    head: Tensor | None = None
    columns: int = 0


@dataclass(frozen=True)
class RandomWeights:
    """The weights of ``model`` on rank ``rank`` of ``tp``; with None as many numbers as a rank has,
    of no whole matrix. ``fp8``: the layers' matrices are float8_e4m3fn. Only with None there are
    mixtures, whose experts are one set for all layers, as they are larger than any cache."""

    model: ModelSpec
    tp: int
    rank: int | None
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    fp8: bool = field(default=False, kw_only=True)

    def _draw(self, layer: int, part: int, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers with the seed of one tensor: ``part`` of layer ``layer``, -1: no layer."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed((self.seed << 24) + ((layer + 1) << 8) + part)
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return drawn.mul_(scale).to(self.dtype)

    def layer(self, index: int) -> Weights:
        """One decoder layer. The bias of a row-parallel GEMM is added once, hence kept by rank 0
        alone."""
        model = self.model
        shapes = model.gemms(self.tp if self.rank is None else 1)
        matrix, bias = {}, {}
        for part, op in enumerate(op for op in shapes if OPS[op].part == "layer"):
            shape = shapes[op]
            full = self._draw(
                index,
                part,
                shape.n,
                shape.k,
                scale=shape.k**-0.5,
            )
            shift = self._draw(index, 10 + part, shape.n) if op in model.biased_gemms else None
            if self.rank is not None and OPS[op].split == "columns":
                rows = self._fused_rows(op)
                full, shift = full[rows], None if shift is None else shift[rows]
            elif self.rank is not None and OPS[op].split == "rows":
                width = shape.k // self.tp
                full = full[:, self.rank * width : (self.rank + 1) * width].contiguous()
                shift = shift if self.rank == 0 else None
            matrix[op] = full.to(torch.float8_e4m3fn) if self.fp8 else full
            bias[op] = shift
        hidden = model.hidden_size
        gains = tuple(1 + self._draw(index, 20 + i, hidden, scale=0.1) for i in range(2))
        norm_bias = self._draw(index, 22, hidden, scale=0.1) if model.norm_bias else None
        return Weights(matrix, bias, (gains[0], gains[1]), norm_bias, self._experts)

    def _fused_rows(self, op: str) -> Tensor:
        """Which rows of a column-parallel matrix are this rank's; it may be several in one."""
        model, tp, rank = self.model, self.tp, self.rank or 0
        if op == "preproj":
            heads, kv_heads = model.heads_per_rank(tp)
            # Beyond one KV head a rank they are replicated.
            first_kv = model.num_heads + rank * model.num_kv_heads // tp
            runs = [(rank * heads, heads), (first_kv, kv_heads),
                    (first_kv + model.num_kv_heads, kv_heads)]  # fmt: skip
            dim = model.head_dim
        else:
            halves = 2 if op == "ffn_ln1" and model.gated_ffn else 1
            whole = model.gemms(1)[op].n // halves
            runs, dim = [(half * tp + rank, 1) for half in range(halves)], whole // tp
        rows = [torch.arange(first * dim, (first + count) * dim) for first, count in runs]
        return torch.cat(rows).to(self.device)

    @cached_property
    def _experts(self) -> tuple[Tensor, Tensor] | None:
        model, mix = self.model, self.model.experts
        if mix is None:
            return None
        if mix.intermediate_size % self.tp:
            raise ValueError(
                f"{model.name}: tp {self.tp} does not divide the experts' intermediate_size "
                f"({mix.intermediate_size})"
            )
        width, hidden = mix.intermediate_size // self.tp, model.hidden_size
        wide = width * (2 if model.gated_ffn else 1)
        return (
            self._draw(-1, 5, mix.num_experts, wide, hidden, scale=hidden**-0.5),
            self._draw(-1, 6, mix.num_experts, hidden, width, scale=width**-0.5),
        )

    def ends(self, first: bool = True, last: bool = True) -> Ends:
        """The weights beside the layers of a stage that is the ``first``, the ``last``."""
        model, hidden = self.model, self.model.hidden_size
        table = positions = None
        if first:
            table = self._draw(-1, 0, model.vocab_size, hidden)
            if model.learned_positions:
                positions = self._draw(-1, 1, model.max_position_embeddings, hidden)
        if not last:
            return Ends(table, positions)
        gain = 1 + self._draw(-1, 3, hidden, scale=0.1)
        shift = self._draw(-1, 4, hidden, scale=0.1) if model.norm_bias else None
        return Ends(table, positions, (gain, shift), *self._head())

    def _head(self) -> tuple[Tensor, int]:
        """This rank's rows of the LM head, padded as in ``ModelSpec.gemms``; how many are real."""
        model, hidden = self.model, self.model.hidden_size
        rows = model.gemms(self.tp)["lm_head"].n
        if self.rank is None:
            return self._draw(-1, 2, rows, hidden, scale=hidden**-0.5), rows
        if model.tied_embeddings:
            full = self._draw(-1, 0, model.vocab_size, hidden) * hidden**-0.5
        else:
            full = self._draw(-1, 2, model.vocab_size, hidden, scale=hidden**-0.5)
        mine = full[self.rank * rows : (self.rank + 1) * rows]
        padding = torch.zeros(rows - len(mine), hidden).to(mine)
        return torch.cat([mine, padding]), len(mine)


EMBEDDING, LM_HEAD = EDGE_OPS


class LayerState(NamedTuple):
    """The weights of one layer."""

    weights: Weights
    cache: KVCache


Do = Callable[..., Any]
"""See above."""


def at_once(op: str, call: Callable[..., Any], state: object, *inputs: Any) -> Any:
    """The :data:`Do` that does no more."""
    return call(state, *inputs)


class ShardLayer:
    """The ops on one of ``tp`` ranks. Activations are (tokens, width).

    ``reduce`` sums a tensor over the ranks, in place; without it sums are of one rank only.
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
        (outputs, columns). ``x`` comes from the stage before; without it the tokens are
        embedded."""
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
        attended = do(
            OTHERS,
            self.join,
            layer,
            *self._attend(layer, (q, k, v), rows, do),
        )
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
        """The embeddings of the tokens, plus learned positions, if any."""
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
        parts = qkv.view(
            qkv.shape[0],
            self.heads + 2 * self.kv_heads,
            self.model.head_dim,
        )
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
