"""The registry of ops: every op of a transformer on one tensor-parallel rank, shape and traffic.

To add an op, add an entry of :data:`OPS` and its call (``profiler/shard/layer.py``), which the
engine runs and the profiler times. The profiler's plan, the bundle format, the device models,
regressions, the predictor, breakdown, explanation, error bands and figures read the entry. An op
with a CSV of its own is a change of the bundle format too (``profiler/bundle/``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .layer_kinds import Indexer, Latent, Recurrent


@dataclass(frozen=True)
class GemmShape:
    """``out[m, n] = activations[m, k] x weights[k, n]``; m is the number of tokens."""

    n: int
    k: int


@dataclass(frozen=True)
class Shard:
    """The shard of one tensor-parallel rank; ``vocab_columns`` are the columns of its LM head.

    ``ffn`` is 0 without dense layers. ``experts`` is the number of routed experts (0: no mixture),
    ``shared_ffn`` the rank's part of the shared experts. ``sparse_share`` of the layers are
    mixtures, ``recurrent_share`` have no attention, ``bare_share`` no feed-forward network.
    ``norms`` is the number of norms of hidden states in a layer; ``tp`` the number of ranks.
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
    shared_gate: bool = False
    expert_bias: bool = False
    sparse_share: float = 0.0
    recurrent_share: float = 0.0
    bare_share: float = 0.0
    norms: int = 2
    latent: Latent | None = None
    indexer: Indexer | None = None
    recurrent: Recurrent | None = None
    output_gate: bool = False
    tp: int = 1


@dataclass(frozen=True)
class Stream:
    """``times`` elementwise kernels that move ``numbers`` values a token each. ``kernel`` is its
    name in a device file. ``reduced``: a fused all-reduce does it, too."""

    kernel: str
    numbers: int
    times: float = 1
    reduced: bool = False


def _activation(shard: Shard, ffn: int, layers: float) -> Stream:
    """The activation of an FFN, which a share ``layers`` of the layers has."""
    kernel, numbers = ("act", 3 * ffn) if shard.gated_ffn else ("act_plain", 2 * ffn)
    return Stream(kernel, numbers, times=layers)


def elementwise(shard: Shard) -> tuple[Stream, ...]:
    """Norms, residual additions, activation and rotary of one layer."""
    both = 1 - shard.bare_share  # a bare layer has one norm and one addition
    kernel = "layer_norm" if shard.norm_bias else "norm"
    found = [Stream(kernel, 2 * shard.hidden, times=shard.norms - 1 + both)]
    found.append(Stream("add", 3 * shard.hidden, 1 + both, reduced=True))
    if shard.ffn:
        found.append(_activation(shard, shard.ffn, both - shard.sparse_share))
    if shard.shared_ffn:  # and their output is added to that of the routed experts
        found.append(_activation(shard, shard.shared_ffn, shard.sparse_share))
        found.append(Stream("add", 3 * shard.hidden, times=shard.sparse_share))
    if shard.shared_gate:  # its projection, and the product with the output
        found.append(Stream("norm", shard.hidden, times=shard.sparse_share))
        found.append(Stream("act", 2 * shard.hidden, times=shard.sparse_share))
    if shard.recurrent is not None:
        # What was projected is divided into heads, and its decays are projected apart; norms of
        # queries and keys, and of the gated output.
        values, keys = shard.recurrent.heads_per_rank(shard.tp)
        split = 2 * shard.recurrent.projected(shard.tp)
        found.append(Stream("norm", split, times=shard.recurrent_share))
        found.append(Stream("norm", shard.hidden, times=shard.recurrent_share))
        numbers = 3 * values * shard.recurrent.value_dim + 4 * keys * shard.recurrent.key_dim
        found.append(Stream("norm", numbers, times=shard.recurrent_share))
    full = 1 - shard.recurrent_share
    if shard.output_gate:
        found.append(Stream("act", 3 * shard.heads * shard.head_dim, times=full))
    queries_and_keys = 2 * (shard.heads + shard.kv_heads) * shard.head_dim
    if shard.latent is not None:
        found.append(Stream("norm", 2 * (shard.latent.query_rank + shard.latent.kv_rank)))
        queries_and_keys = 2 * (shard.heads + 1) * shard.latent.rope_dim
    if shard.qk_norm:
        found.append(Stream("norm", queries_and_keys, times=full))
    if not shard.learned_positions:
        found.append(Stream("rope", queries_and_keys, times=full))
    return tuple(found)


def latent(shard: Shard) -> bool:
    """Whether the shard's attention is latent."""
    return shard.latent is not None


def latent_queries(shard: Shard) -> bool:
    """Whether the shard's queries, too, are projected from one vector for all heads."""
    return shard.latent is not None and shard.latent.query_rank > 0


def preproj(shard: Shard) -> GemmShape:
    """Queries, keys and values (and the output's gate); with latent attention the projections that
    every rank repeats, and an indexer's key and the weights of its heads."""
    if shard.latent is None:
        heads = shard.heads * (2 if shard.output_gate else 1) + 2 * shard.kv_heads
        return GemmShape(n=heads * shard.head_dim, k=shard.hidden)
    queries = shard.latent.query_rank or shard.heads * shard.head_dim
    index = shard.indexer.dim + shard.indexer.heads if shard.indexer else 0
    return GemmShape(n=queries + shard.latent.cached + index, k=shard.hidden)


def q_up(shard: Shard) -> GemmShape:
    """Queries of the rank's heads, with latent attention, and of a whole indexer."""
    assert shard.latent is not None
    index = shard.indexer.heads * shard.indexer.dim if shard.indexer else 0
    return GemmShape(n=shard.heads * shard.head_dim + index, k=shard.latent.query_rank)


def kv_up(shard: Shard) -> GemmShape:
    """Keys and values of the rank's heads, with latent attention."""
    assert shard.latent is not None
    each = shard.latent.nope_dim + shard.latent.value_dim
    return GemmShape(n=shard.heads * each, k=shard.latent.kv_rank)


def postproj(shard: Shard) -> GemmShape:
    """From the values of all heads to the hidden state."""
    values = shard.latent.value_dim if shard.latent is not None else shard.head_dim
    return GemmShape(n=shard.hidden, k=shard.heads * values)


def recurrent_in(shard: Shard) -> GemmShape:
    """Queries, keys, values, gates and decays of a recurrent layer."""
    assert shard.recurrent is not None
    return GemmShape(n=shard.recurrent.projected(shard.tp), k=shard.hidden)


def recurrent_out(shard: Shard) -> GemmShape:
    """From the values of a recurrent layer's heads to the hidden state."""
    assert shard.recurrent is not None
    heads, _ = shard.recurrent.heads_per_rank(shard.tp)
    return GemmShape(n=shard.hidden, k=heads * shard.recurrent.value_dim)


SCOPES = ("inter_node", "intra_node")

Part = Literal["layer", "first", "last", "transfer"]
#: The place of an op: each layer, the first or the last stage, or between two stages.
PARTS: tuple[Part, ...] = ("layer", "first", "last", "transfer")


@dataclass(frozen=True)
class Size:
    """A size that an op's time depends on: a bundle's column, its name in messages and on an
    axis."""

    column: str
    name: str
    axis: str


TOKENS = Size("num_tokens", "size", "tokens")
BYTES = Size("num_bytes", "size", "bytes")
CHUNK = Size("chunk_tokens", "chunk", "chunk (tokens)")
CACHED = Size("context_tokens", "context", "cached")
BATCH = Size("batch_size", "batch", "batch (sequences)")
CONTEXT = Size("context_tokens", "context", "context")

Family = Literal["gemm", "piecewise", "prefill", "decode"]


#: Kinds of layers: all; those with attention, or recurrent; those with a dense feed-forward
#: network, with a mixture, or with neither.
Layers = Literal["all", "attention", "recurrent", "dense", "sparse", "bare"]


def _never(shard: Shard) -> bool:
    return False


def _always(shard: Shard) -> bool:
    return True


@dataclass(frozen=True)
class Op:
    """One op of one rank.

    ``part``      its place (:data:`Part`); ops of the layer run in each layer
    ``sizes``     the sizes that its time depends on, as columns of its table
    ``family``    its regression: piecewise linear, beyond the points with a roofline (``gemm``) or
                  in proportion (``piecewise``); or over two sizes (``prefill``, ``decode``)
    ``account``   its account in the explanation of a run's time
    ``table``     the CSV of a bundle with its times: one for all ops by token rows, or its own
    ``outputs``   whether its rows are only those that yield a token
    ``calls``     its calls in a layer
    ``rest``      whether it takes the remaining time of its part, beyond all other ops
    ``shape``     the shape of a GEMM
    ``split``     the side of a layer's GEMM that the ranks share; None: every rank has all of it
    ``biased``    whether the GEMM has a bias
    ``streams``   the memory traffic of elementwise ops
    ``fitted``    the fits of a device file behind it, ``{tp}`` being the ranks; empty: its name
    ``layers``    the layers that run an op of the layer
    ``present``   whether a model has it
    """

    name: str
    part: Part
    sizes: tuple[Size, ...]
    family: Family
    account: str
    table: str = "linear"
    outputs: bool = False
    calls: int = 1
    rest: bool = False
    shape: Callable[[Shard], GemmShape] | None = None
    split: Literal["columns", "rows"] | None = None
    biased: Callable[[Shard], bool] = _never
    streams: Callable[[Shard], tuple[Stream, ...]] | None = None
    fitted: tuple[str, ...] = ()
    layers: Layers = "all"
    present: Callable[[Shard], bool] = _always

    @property
    def columns(self) -> tuple[str, ...]:
        """The key columns of its times in a bundle."""
        return tuple(size.column for size in self.sizes)


def _embedding(shard: Shard) -> tuple[Stream, ...]:
    """The token table; learned positions cost a second look-up."""
    return (Stream("embedding", 2 * shard.hidden, times=2 if shard.learned_positions else 1),)


def _gemm(
    name: str,
    shape: Callable[[Shard], GemmShape],
    split: Literal["columns", "rows"] | None,
    biased: Callable[[Shard], bool] = _never,
    layers: Layers = "all",
    present: Callable[[Shard], bool] = _always,
) -> Op:
    return Op(
        name, "layer", (TOKENS,), "gemm", "linear", shape=shape, split=split, biased=biased,
        fitted=("gemm",), layers=layers, present=present,
    )  # fmt: skip


def _dense(shard: Shard) -> bool:
    return shard.ffn > 0


def _mixture(shard: Shard) -> bool:
    return shard.experts > 0


def _recurring(shard: Shard) -> bool:
    return shard.recurrent is not None


def _sharing(shard: Shard) -> bool:
    return shard.shared_ffn > 0


_LIST = (
    # A layer, in the order in which it runs. QKV are one GEMM, and so are gate and up.
    _gemm(
        "preproj", preproj, "columns", lambda s: s.attention_bias != "none", layers="attention",
    ),
    # Latent attention: a head's queries, keys and values. Decodes multiply with the same matrix on
    # both sides of attention, instead of projecting all cached tokens: as many FLOPs and bytes.
    _gemm("q_up", q_up, "columns", layers="attention", present=latent_queries),
    _gemm("kv_up", kv_up, "columns", layers="attention", present=latent),
    Op(
        "attn_prefill", "layer", (CHUNK, CACHED), "prefill", "prefill_attention",
        table="attn_prefill", fitted=("attn_prefill", "attn_context"),
    ),
    Op(
        "attn_decode", "layer", (BATCH, CONTEXT), "decode", "decode_attention",
        table="attn_decode", fitted=("attn_decode", "attn_decode_mha", "attn_decode_gqa"),
    ),
    _gemm(
        "postproj", postproj, "rows", lambda s: s.attention_bias == "all", layers="attention",
    ),
    # Instead of attention, a recurrent layer: its convolution and its state are in ``attn_prefill``
    # and ``attn_decode``, whose times are those of a mean layer.
    _gemm("recurrent_in", recurrent_in, "columns", layers="recurrent", present=_recurring),
    _gemm("recurrent_out", recurrent_out, "rows", layers="recurrent", present=_recurring),
    _gemm(
        "ffn_ln1", lambda s: GemmShape(n=s.ffn * (2 if s.gated_ffn else 1), k=s.hidden), "columns",
        lambda s: s.ffn_bias, "dense", _dense,
    ),
    _gemm(
        "ffn_ln2", lambda s: GemmShape(n=s.hidden, k=s.ffn), "rows",
        lambda s: s.ffn_bias, "dense", _dense,
    ),
    # Instead of a dense FFN, a mixture: the router, the chosen experts, and the shared experts.
    _gemm(
        "moe_router", lambda s: GemmShape(n=s.experts, k=s.hidden), None,
        lambda s: s.expert_bias, "sparse", _mixture,
    ),
    Op("moe", "layer", (TOKENS,), "piecewise", "linear", layers="sparse", present=_mixture),
    # Dispatch and combine, which replace the layer's all-reduce after the experts; a bundle has it
    # or not, whatever the model.
    Op(
        "all_to_all", "layer", (TOKENS,), "piecewise", "all_reduce", layers="sparse",
        present=_never,
    ),
    _gemm(
        "shared_ln1", lambda s: GemmShape(n=s.shared_ffn * (2 if s.gated_ffn else 1), k=s.hidden),
        "columns", layers="sparse", present=_sharing,
    ),
    _gemm(
        "shared_ln2", lambda s: GemmShape(n=s.hidden, k=s.shared_ffn), "rows", layers="sparse",
        present=_sharing,
    ),
    # All norms, activation, residual additions and rotary together; with several ranks, no more.
    Op(
        "others", "layer", (TOKENS,), "piecewise", "linear",
        rest=True, streams=elementwise, fitted=("norm", "add", "act", "rope"),
    ),
    # After each GEMM that is split by rows, with tp > 1: one call over all ranks.
    Op(
        "all_reduce", "layer", (BYTES,), "piecewise", "all_reduce",
        table="all_reduce", calls=2, fitted=("all_reduce_{tp}",),
    ),
    # Outside of the layers: times of whole ops.
    Op("embedding", "first", (TOKENS,), "piecewise", "embedding_and_head", streams=_embedding),
    Op(
        "lm_head", "last", (TOKENS,), "gemm", "embedding_and_head",
        outputs=True, shape=lambda s: GemmShape(n=s.vocab_columns, k=s.hidden), fitted=("gemm",),
    ),
    Op("send_recv", "transfer", (BYTES,), "piecewise", "transfers", table="send_recv"),
)  # fmt: skip

OPS: dict[str, Op] = {op.name: op for op in _LIST}


def names(where: Callable[[Op], bool]) -> tuple[str, ...]:
    """The ops for which ``where`` holds, in the registry's order."""
    return tuple(op.name for op in _LIST if where(op))


_PLAIN = Shard(
    hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab_columns=1, gated_ffn=True,
    attention_bias="none", ffn_bias=False, norm_bias=False, qk_norm=False, learned_positions=False,
)  # fmt: skip
#: The ops of ``linear.csv`` of any model, and of a plain dense one: those of one layer, then whole
#: ones.
ALL_ROW_OPS = names(lambda op: op.table == "linear")
ALL_LAYER_OPS = tuple(name for name in ALL_ROW_OPS if OPS[name].part == "layer")
LAYER_OPS = tuple(name for name in ALL_LAYER_OPS if OPS[name].present(_PLAIN))
EDGE_OPS = names(lambda op: op.table == "linear" and op.part != "layer")
ROW_OPS = (*LAYER_OPS, *EDGE_OPS)
#: Of a plain dense model: the GEMMs of one layer in the order they run, and all.
LAYER_GEMMS = tuple(name for name in LAYER_OPS if OPS[name].shape is not None)
GEMMS = tuple(name for name in ROW_OPS if OPS[name].shape is not None)
#: The GEMMs of a block of attention.
ATTENTION_GEMMS = names(lambda op: op.layers == "attention")
ATTENTION = names(lambda op: op.family in ("prefill", "decode"))
PREFILL, DECODE = ATTENTION
MESSAGES = names(lambda op: op.sizes == (BYTES,))
ALL_REDUCE, SEND_RECV = MESSAGES
#: The rest of a layer that is no op of its own.
(OTHERS,) = names(lambda op: op.rest)
#: Projects each head's keys and values from the cached vector of latent attention.
(KV_UP,) = names(lambda op: op.shape is kv_up)
#: The chosen experts of a mixture: both GEMMs, activation, and permutation of the tokens.
MOE, ALL_TO_ALL = names(lambda op: op.layers == "sparse" and op.shape is None)
#: The ops that one rank of a plain dense model computes alone.
LOCAL = (*ROW_OPS, *ATTENTION)
#: Transfers between two stages as separate ops, and their kind of link.
SENDS = {f"{SEND_RECV}_{scope}": scope for scope in SCOPES}  # fmt: skip


def op_of(name: str) -> Op:
    """The op called ``name``, or ``<op>_<scope>``; raises KeyError."""
    return OPS[name.removesuffix(f"_{SENDS[name]}") if name in SENDS else name]


#: Names of the accounts in tables.
ACCOUNTS = {
    "linear": "linear ops",
    "prefill_attention": "attention of prompts",
    "decode_attention": "attention of decodes",
    "all_reduce": "all-reduce",
    "embedding_and_head": "embedding and LM head",
    "transfers": "transfers between stages",
}


def with_account(account: str) -> tuple[str, ...]:
    """The ops of one account of an explanation."""
    return names(lambda op: op.account == account)
