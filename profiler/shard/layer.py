"""One tensor-parallel shard of one decoder layer in torch, with random weights. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_sim.profiler.facts.expert_loads import rows_of_experts
from sarathi_sim.profiler.facts.formats import Distribution, exponent_of
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS

_EPSILON = 1e-5


@dataclass(frozen=True)
class Weights:
    """One layer's weights: a matrix (n, k) and maybe a bias (n,) per GEMM; two norms' gains."""

    matrix: dict[str, Tensor]
    bias: dict[str, Tensor | None]
    norm: tuple[Tensor, Tensor]
    norm_bias: Tensor | None


Routing = tuple[Tensor, Tensor]
"""Of each token, (tokens, top_k): the numbers of its experts, and the weights of their outputs."""


class ShardLayer:
    """The ops of one layer on one of ``tp`` ranks.

    Activations are (tokens, width). ``copies`` sets of weights allow timings to meet cold ones:
    every op takes the number of the set; ``sets`` are given ones, such as those of a stage's
    layers. The two all-reduces of tensor parallelism are left out. ``fp8``: the GEMMs' weights and
    inputs are float8_e4m3fn with one scale a tensor, as a GPU from compute capability 8.9 on takes
    them; sums are accumulated in the fast way of its fp8 units, as engines have it.
    ``experts`` of a mixture, in place of the dense network, are the matrices (experts, n, k) of a
    rank, which has a part of each: one set, as they are larger than any cache.
    Raises ValueError where ``tp`` does not divide the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        tp: int,
        device: torch.device,
        dtype: torch.dtype,
        copies: int = 1,
        sets: list[Weights] | None = None,
        fp8: bool = False,
    ) -> None:
        self.model, self.fp8 = model, fp8
        self.heads, self.kv_heads = model.heads_per_rank(tp)
        self.shapes = model.gemms(tp)
        self.gemms = tuple(op for op in self.shapes if OPS[op].part == "layer")
        self.device, self.dtype = device, dtype
        self._one = torch.ones((), device=device, dtype=torch.float32)
        self._generator = torch.Generator(device=device).manual_seed(0)
        self.sets = [self._weights() for _ in range(copies)] if sets is None else sets
        self.experts = self._experts(tp) if model.experts else None

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers on the layer's device, in its dtype."""
        drawn = torch.randn(
            shape, generator=self._generator, device=self.device, dtype=torch.float32
        )
        return (drawn * scale).to(self.dtype)

    def _weights(self) -> Weights:
        model = self.model
        matrix = {
            op: self.random(self.shapes[op].n, self.shapes[op].k, scale=self.shapes[op].k ** -0.5)
            for op in self.gemms
        }
        if self.fp8:
            matrix = {op: weights.to(torch.float8_e4m3fn) for op, weights in matrix.items()}
        biased = model.biased_gemms
        bias = {op: self.random(self.shapes[op].n) if op in biased else None for op in self.gemms}
        gains = tuple(1 + self.random(model.hidden_size, scale=0.1) for _ in range(2))
        shift = self.random(model.hidden_size, scale=0.1) if model.norm_bias else None
        return Weights(matrix, bias, (gains[0], gains[1]), shift)

    def _experts(self, tp: int) -> tuple[Tensor, Tensor]:
        """What a rank has of gate and up (or up), and of down."""
        model, mix = self.model, self.model.experts
        assert mix is not None
        if mix.intermediate_size % tp:
            raise ValueError(
                f"{model.name}: tp {tp} does not divide the experts' intermediate_size "
                f"({mix.intermediate_size})"
            )
        width, hidden = mix.intermediate_size // tp, model.hidden_size
        wide = width * (2 if model.gated_ffn else 1)
        return (
            self.random(mix.num_experts, wide, hidden, scale=hidden**-0.5),
            self.random(mix.num_experts, hidden, width, scale=width**-0.5),
        )

    def routing(self, tokens: int, distribution: Distribution) -> Routing:
        """Experts for each of ``tokens``, spread as ``distribution`` says; weights that add to 1.

        A run of as many rows as an expert has is dealt to the tokens in turn, so a token never
        meets it twice.
        """
        mix = self.model.experts
        assert mix is not None
        rows = rows_of_experts(mix.num_experts, mix.top_k, tokens, exponent_of(distribution))
        dealt = np.repeat(np.arange(mix.num_experts), rows).reshape(mix.top_k, tokens)
        chosen = torch.from_numpy(np.ascontiguousarray(dealt.T)).to(self.device)
        weights = self.random(tokens, mix.top_k).softmax(-1)
        return chosen, weights

    # The ops ------------------------------------------------------------------------------------

    def gemm(self, op: str, x: Tensor, copy: int = 0) -> Tensor:
        """One of ``gemms``: (tokens, k) to (tokens, n); q, k and v, or gate and up, are fused."""
        weights = self.sets[copy]
        if not self.fp8:
            return F.linear(x, weights.matrix[op], weights.bias[op])
        out: Tensor = torch._scaled_mm(
            self.as_input(x), weights.matrix[op].t(), self._one, self._one,
            bias=weights.bias[op], out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip
        return out

    def as_input(self, x: Tensor) -> Tensor:
        """``x`` in the format that a GEMM of the layer takes."""
        return x.to(torch.float8_e4m3fn) if self.fp8 else x

    def moe(self, x: Tensor, routing: Routing) -> Tensor:
        """The chosen experts' part of (tokens, hidden): rows are sorted by expert, two grouped
        GEMMs with the activation between them, and the outputs brought back and added up."""
        assert self.experts is not None
        (chosen, weights), (up, down) = routing, self.experts
        numbers, order = chosen.flatten().sort()
        every = torch.arange(len(up), device=self.device)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        rows = x.index_select(0, order // chosen.shape[1])
        inner = self.activation(F.grouped_mm(rows, up.transpose(1, 2), offs=ends))
        out = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
        back = torch.empty_like(out).index_copy_(0, order, out)
        return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def norm(self, which: int, x: Tensor, copy: int = 0) -> Tensor:
        """The norm before attention (0) or before the FFN (1)."""
        weights = self.sets[copy]
        shape = [self.model.hidden_size]
        if self.model.norm_bias:
            return F.layer_norm(x, shape, weights.norm[which], weights.norm_bias, _EPSILON)
        return F.rms_norm(x, shape, weights.norm[which], _EPSILON)

    def activation(self, x: Tensor) -> Tensor:
        """The activation between the two FFN GEMMs: SwiGLU of (gate, up), or GELU."""
        if not self.model.gated_ffn:
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, fused) to q (tokens, heads, dim) and k, v (tokens, kv_heads, dim)."""
        parts = qkv.view(qkv.shape[0], self.heads + 2 * self.kv_heads, self.model.head_dim)
        end = self.heads + self.kv_heads
        return parts[:, : self.heads], parts[:, self.heads : end], parts[:, end:]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (tokens, 1, head_dim / 2)."""
        half = self.model.head_dim // 2
        steps = torch.arange(half, device=self.device, dtype=torch.float32) / half
        turn = positions.to(torch.float32)[:, None, None] * 10_000.0**-steps
        return turn.cos().to(self.dtype), turn.sin().to(self.dtype)

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys (tokens, heads, dim), normed and rotated as the model does."""
        if self.model.qk_norm:  # with gains of 1
            x = F.rms_norm(x, [self.model.head_dim], None, _EPSILON)
        if self.model.learned_positions:
            return x
        cos, sin = angles
        half = cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

    def others(
        self, x: Tensor, ffn: Tensor, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], copy: int
    ) -> tuple[Tensor, ...]:
        """Everything of a layer that is neither GEMM nor attention, on stand-in activations.

        Two norms, two residual additions, norm and rotary of q and k, the activation; a call each.
        The activation of a mixture is that of the experts which all tokens share, whose output is
        added, too; that of the others is in :meth:`moe`.
        """
        first, second = self.norm(0, x, copy), self.norm(1, x, copy)
        found = [x + first, x + second, self.rotate(q, angles), self.rotate(k, angles)]
        if self.ffn_width:
            found.append(self.activation(ffn))
        if self.experts is not None and self.ffn_width:
            found.append(first + second)
        return tuple(found)

    @property
    def ffn_width(self) -> int:
        """Columns that the activation of all tokens takes; 0 where only chosen experts have one."""
        op = "ffn_ln1" if self.experts is None else "shared_ln1"
        return self.shapes[op].n if op in self.shapes else 0

    def run(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        copy: int = 0,
        routing: Routing | None = None,
    ) -> Tensor:
        """The whole layer on (tokens, hidden); ``attend(q, k, v)`` gives (tokens, heads, dim).

        An engine makes the ``angles`` of its tokens' positions once for all layers. A mixture's
        router runs, but its experts are those of ``routing``.

        With tp > 1 it takes a layer's time (but for the all-reduces), and computes no layer.
        """
        q, k, v = self.split(self.gemm("preproj", self.norm(0, x, copy), copy))
        attended = attend(self.rotate(q, angles), self.rotate(k, angles), v)
        x = x + self.gemm("postproj", attended.reshape(x.shape[0], -1), copy)
        normed = self.norm(1, x, copy)
        if routing is None:
            return x + self._ffn("ffn", normed, copy)
        self.gemm("moe_router", normed, copy)
        out = self.moe(normed, routing)
        if self.ffn_width:
            out = out + self._ffn("shared", normed, copy)
        return x + out

    def _ffn(self, name: str, x: Tensor, copy: int) -> Tensor:
        """A network that all tokens pass."""
        return self.gemm(f"{name}_ln2", self.activation(self.gemm(f"{name}_ln1", x, copy)), copy)
