"""Random weights that are the same however they are sharded. Imports torch.

Every matrix is drawn whole from a seed of its own, and a rank keeps its slice: a model split over
TP or PP computes what the unsplit one does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import LAYER_GEMMS, OPS
from sarathi_sim.profiler.shard.layer import Weights


@dataclass(frozen=True)
class RandomWeights:
    """The weights of ``model`` on rank ``rank`` of ``tp``."""

    model: ModelSpec
    tp: int
    rank: int
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

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
        whole = model.gemms(1)
        matrix, bias = {}, {}
        for part, op in enumerate(LAYER_GEMMS):
            shape = whole[op]
            full = self._draw(index, part, shape.n, shape.k, scale=shape.k**-0.5)
            shift = self._draw(index, 10 + part, shape.n) if op in model.biased_gemms else None
            if OPS[op].split == "columns":
                rows = self._fused_rows(op)
                matrix[op] = full[rows]
                bias[op] = None if shift is None else shift[rows]
            else:
                width = shape.k // self.tp
                columns = slice(self.rank * width, (self.rank + 1) * width)
                matrix[op] = full[:, columns].contiguous()
                bias[op] = shift if self.rank == 0 else None
        hidden = model.hidden_size
        gains = tuple(1 + self._draw(index, 20 + i, hidden, scale=0.1) for i in range(2))
        norm_bias = self._draw(index, 22, hidden, scale=0.1) if model.norm_bias else None
        return Weights(matrix, bias, (gains[0], gains[1]), norm_bias)

    def _fused_rows(self, op: str) -> Tensor:
        """Which rows of a fused, column-parallel matrix are this rank's."""
        model, tp, rank = self.model, self.tp, self.rank
        if op == "ffn_ln1":
            share = model.ffn_hidden_size // tp
            starts = [rank * share]
            if model.gated_ffn:
                starts.append(model.ffn_hidden_size + rank * share)
            return torch.cat([torch.arange(s, s + share) for s in starts]).to(self.device)
        heads, kv_heads = model.heads_per_rank(tp)
        # Beyond one KV head a rank they are replicated.
        first_kv = rank * model.num_kv_heads // tp
        runs = [
            (rank * heads, heads),
            (model.num_heads + first_kv, kv_heads),
            (model.num_heads + model.num_kv_heads + first_kv, kv_heads),
        ]
        dim = model.head_dim
        rows = [torch.arange(first * dim, (first + count) * dim) for first, count in runs]
        return torch.cat(rows).to(self.device)

    def embedding(self) -> Tensor:
        """The token table (vocabulary, hidden), whole on every rank."""
        return self._draw(-1, 0, self.model.vocab_size, self.model.hidden_size)

    def positions(self) -> Tensor | None:
        """The table of learned positions, if the model has one."""
        model = self.model
        if not model.learned_positions:
            return None
        return self._draw(-1, 1, model.max_position_embeddings, model.hidden_size)

    def head(self) -> tuple[Tensor, int]:
        """This rank's rows of the LM head, padded as in ``ModelSpec.gemms``; how many are real."""
        model = self.model
        rows = model.gemms(self.tp)["lm_head"].n
        if model.tied_embeddings:
            full = self.embedding() * model.hidden_size**-0.5
        else:
            full = self._draw(
                -1, 2, model.vocab_size, model.hidden_size, scale=model.hidden_size**-0.5
            )
        mine = full[self.rank * rows : (self.rank + 1) * rows]
        padding = torch.zeros(rows - len(mine), model.hidden_size).to(mine)
        return torch.cat([mine, padding]), len(mine)

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """Gain and maybe bias of the norm before the LM head."""
        hidden = self.model.hidden_size
        shift = self._draw(-1, 4, hidden, scale=0.1) if self.model.norm_bias else None
        return 1 + self._draw(-1, 3, hidden, scale=0.1), shift
