"""What one tensor-parallel rank holds, and the shapes and traffic of its ops."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_sim.profiler.facts.attention_kinds import Latent


@dataclass(frozen=True)
class GemmShape:
    """``out[m, n] = activations[m, k] x weights[k, n]``; m is the number of tokens."""

    n: int
    k: int


@dataclass(frozen=True)
class Shard:
    """The shard of one tensor-parallel rank; ``vocab_columns`` are those of its padded LM head.

    ``ffn`` is 0 without dense layers. ``experts`` are all that the router chooses from (0: no
    mixture), ``shared_ffn`` the rank's part of the shared ones. ``sparse_share`` of the layers are
    mixtures. ``norms`` are those of hidden states in a layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_columns: int
    gated_ffn: bool
    attention_bias: str
    ffn_bias: bool
    norm_bias: bool
    qk_norm: bool
    learned_positions: bool
    experts: int = 0
    shared_ffn: int = 0
    expert_bias: bool = False
    sparse_share: float = 0.0
    norms: int = 2
    latent: Latent | None = None


@dataclass(frozen=True)
class Stream:
    """``times`` elementwise kernels that move ``numbers`` values a token each.

    ``kernel`` is its name in a device file.
    """

    kernel: str
    numbers: int
    times: float = 1


def _activation(shard: Shard, ffn: int, layers: float) -> Stream:
    """In a share ``layers`` of the layers."""
    kernel, numbers = ("act", 3 * ffn) if shard.gated_ffn else ("act_plain", 2 * ffn)
    return Stream(kernel, numbers, times=layers)


def elementwise(shard: Shard) -> tuple[Stream, ...]:
    """Norms, residual additions, activation and rotary of one layer."""
    norm = Stream("layer_norm" if shard.norm_bias else "norm", 2 * shard.hidden, times=shard.norms)
    found = [norm, Stream("add", 3 * shard.hidden, times=2)]
    if shard.ffn:
        found.append(_activation(shard, shard.ffn, 1 - shard.sparse_share))
    if shard.shared_ffn:  # and their output is added to that of the routed experts
        found.append(_activation(shard, shard.shared_ffn, shard.sparse_share))
        found.append(Stream("add", 3 * shard.hidden, times=shard.sparse_share))
    queries_and_keys = 2 * (shard.heads + shard.kv_heads) * shard.head_dim
    if shard.latent is not None:
        found.append(Stream("norm", 2 * (shard.latent.query_rank + shard.latent.kv_rank)))
        queries_and_keys = 2 * (shard.heads + 1) * shard.latent.rope_dim
    if shard.qk_norm:
        found.append(Stream("norm", queries_and_keys))
    if not shard.learned_positions:
        found.append(Stream("rope", queries_and_keys))
    return tuple(found)


def latent(shard: Shard) -> bool:
    """Whether its attention is latent."""
    return shard.latent is not None


def latent_queries(shard: Shard) -> bool:
    """Whether its queries, too, are projected from a vector for all heads."""
    return shard.latent is not None and shard.latent.query_rank > 0


def preproj(shard: Shard) -> GemmShape:
    """Queries, keys and values; with latent attention what every rank projects for itself."""
    if shard.latent is None:
        return GemmShape(n=(shard.heads + 2 * shard.kv_heads) * shard.head_dim, k=shard.hidden)
    queries = shard.latent.query_rank or shard.heads * shard.head_dim
    return GemmShape(n=queries + shard.latent.cached, k=shard.hidden)


def q_up(shard: Shard) -> GemmShape:
    """Queries of the rank's heads, with latent attention."""
    assert shard.latent is not None
    return GemmShape(n=shard.heads * shard.head_dim, k=shard.latent.query_rank)


def kv_up(shard: Shard) -> GemmShape:
    """Keys and values of the rank's heads, with latent attention."""
    assert shard.latent is not None
    each = shard.latent.nope_dim + shard.latent.value_dim
    return GemmShape(n=shard.heads * each, k=shard.latent.kv_rank)


def postproj(shard: Shard) -> GemmShape:
    """From the values of all heads to the hidden state."""
    values = shard.latent.value_dim if shard.latent is not None else shard.head_dim
    return GemmShape(n=shard.hidden, k=shard.heads * values)
