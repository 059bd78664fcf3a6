"""Random weights that are the same however they are sharded. Imports torch.

Every matrix is drawn whole from a seed of its own, and a rank keeps its slice: a model split over
TP or PP computes what the unsplit one does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS

_EPSILON = 1e-5


def normed(x: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """The RMS norm over the last axis; with a ``shift`` the layer norm."""
    if shift is not None:
        return F.layer_norm(x, x.shape[-1:], gain, shift, _EPSILON)
    return F.rms_norm(x, x.shape[-1:], gain, _EPSILON)


@dataclass(frozen=True)
class Weights:
    """One layer's: a matrix (n, k) and maybe a bias (n,) per GEMM; two norms' gains, and a shift.

    ``experts`` of a mixture are the matrices (experts, n, k) of gate and up (or up), and of down.
    """

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
    of no whole matrix.

    ``fp8``: the layers' matrices are float8_e4m3fn. Only with None there are mixtures, whose
    experts are one set for all layers, as they are larger than any cache.
    """

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
        """One decoder layer.

        The bias of a row-parallel GEMM is added once, hence kept by rank 0 alone.
        """
        model = self.model
        shapes = model.gemms(self.tp if self.rank is None else 1)
        matrix, bias = {}, {}
        for part, op in enumerate(op for op in shapes if OPS[op].part == "layer"):
            shape = shapes[op]
            full = self._draw(index, part, shape.n, shape.k, scale=shape.k**-0.5)
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
        """What a rank has of every expert: a part."""
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
        """What is beside the layers of a stage that is the ``first``, the ``last``."""
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
