"""Kinds of layers beside dense ones with plain attention: windows, latent and sparse attention,
recurrent layers, experts; and the load of a rank's experts by a layer's tokens.

Loads have the distributions of the measured tables. ``balanced``: every expert has equally many
rows, and rank 0 at least one. A power law: each expert draws its rows from it, from 1 row to 0.8 of
the tokens (from 0.01 to 2 if there are no more rows than experts), scaled to all rows and rounded;
an expert gets each token at most once. The rank with the most rows is timed.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..storage.strict import short, strict_dataclass
from .roofline import Array

MOST = 2**24
"""No size of a model is larger; ModelSpec's own bounds are narrower."""


@strict_dataclass
class Windows:
    """Sliding windows: in ``layers`` layers a token attends to the last ``tokens`` tokens, its own
    included; in the other layers to all. Raises ValueError for sizes that are not positive."""

    tokens: int
    layers: int

    def __post_init__(self) -> None:
        _check_positive(self, ())


@strict_dataclass
class Recurrent:
    """Layers that keep a state of fixed size a sequence instead of a KV cache: all but
    ``full_layers`` (from 0), which have attention.

    ``kind`` is a gated delta net (``gdn``, as in Qwen3-Next) or ``mamba2``. Each of ``value_heads``
    has a state of ``key_dim`` x ``value_dim`` numbers of ``number_bytes``; ``key_heads`` are shared
    by value heads, as KV heads are (Mamba: groups). A convolution sees ``conv`` tokens.
    Raises ValueError for sizes that are not positive or do not divide.
    """

    full_layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    kind: Literal["gdn", "mamba2"] = "gdn"
    number_bytes: Literal[2, 4] = 4

    def __post_init__(self) -> None:
        _check_positive(self, ("full_layers", "kind"))
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads ({self.value_heads}) must be a multiple of key_heads "
                f"({self.key_heads})"
            )

    def heads_per_rank(self, tp: int) -> tuple[int, int]:
        """(value heads, key heads) on one of ``tp`` ranks. Raises ValueError where they do not
        divide."""
        if self.value_heads % tp or (self.key_heads % tp and tp % self.key_heads):
            raise ValueError(
                f"tp {tp} does not divide the {self.value_heads} value heads and "
                f"{self.key_heads} key heads of recurrent layers"
            )
        return self.value_heads // tp, max(1, self.key_heads // tp)

    def channels(self, tp: int = 1) -> int:
        """Channels of the convolution on one rank: queries, keys and values."""
        values, keys = self.heads_per_rank(tp)
        return 2 * keys * self.key_dim + values * self.value_dim

    def projected(self, tp: int = 1) -> int:
        """Columns of a rank's input projection: the channels, the output's gate, and of each head
        its decay (and with ``gdn`` the strength of its write)."""
        values, _ = self.heads_per_rank(tp)
        each = self.value_dim + (2 if self.kind == "gdn" else 1)
        return self.channels(tp) + values * each

    @property
    def plain_parameters(self) -> int:
        """Parameters of a layer beside the two projections."""
        channels, heads = self.channels(), self.value_heads
        if self.kind == "gdn":  # decay and its bias; one norm for all heads
            return channels * self.conv + 2 * heads + self.value_dim
        return channels * (self.conv + 1) + 3 * heads + heads * self.value_dim

    def state_bytes(self, tp: int = 1) -> int:
        """Bytes that a rank keeps of one sequence in one layer: the state, and the last inputs of
        the convolution in bf16."""
        state = self.heads_per_rank(tp)[0] * self.key_dim * self.value_dim
        return self.number_bytes * state + 2 * self.channels(tp) * (self.conv - 1)


@strict_dataclass
class Indexer:
    """Sparse attention (DSA, as in DeepSeek V3.2): ``heads`` of ``dim`` numbers score all cached
    tokens of latent attention, and a query attends to the ``top_k`` best. Every rank has the whole
    indexer. Raises ValueError for sizes that are not positive."""

    heads: int
    dim: int
    top_k: int

    def __post_init__(self) -> None:
        _check_positive(self, ())

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's key in the cache: fp8, and a float32 scale."""
        return self.dim + 4


@strict_dataclass
class Latent:
    """Multi-head latent attention (MLA): the KV cache holds one vector a token for all heads.

    It has ``kv_rank`` numbers, from which keys and values of each head are projected, and
    ``rope_dim`` that carry the position. A head's queries and keys have ``nope_dim`` + ``rope_dim``
    numbers, its values ``value_dim``. Queries are projected from ``query_rank`` numbers (0: from
    the hidden state). Raises ValueError for sizes that are not positive.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, (), ("query_rank",))

    @property
    def kernel(self) -> tuple[int, int, int, int]:
        """The sizes of its attention kernel beside the number of heads."""
        return self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim

    @property
    def cached(self) -> int:
        """Numbers per token in the KV cache, in one layer on every rank."""
        return self.kv_rank + self.rope_dim


def _check_positive(spec: object, free: tuple[str, ...], or_zero: tuple[str, ...] = ()) -> None:
    for key in (field.name for field in fields(spec)):  # type: ignore[arg-type]
        value = getattr(spec, key)
        if key not in free and not (0 if key in or_zero else 1) <= value <= MOST:
            raise ValueError(f"{key} must be positive and at most {MOST}, got {value}")


#: No network of a layer is wider.
MOST_WIDE = 2**20


@strict_dataclass
class Experts:
    """A mixture of experts in the place of a layer's feed-forward network.

    A router chooses ``top_k`` of ``num_experts`` for each token; all tokens pass the shared ones,
    which have ``shared_intermediate_size`` together (0: none). The layers ``dense_layers`` (from 0)
    have a dense network of the model's ``ffn_hidden_size`` instead, and ``bare_layers`` none at
    all. ``bias``: experts and router have one (as in gpt-oss). ``shared_gate``: one number for
    each token weighs the shared experts' output. Raises ValueError for sizes that do not fit each
    other.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    bare_layers: tuple[int, ...] = ()
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for key, least in (("num_experts", 1), ("intermediate_size", 1),
                           ("shared_intermediate_size", 0)):  # fmt: skip
            value, most = getattr(self, key), MOST_WIDE
            if not least <= value <= most:
                raise ValueError(f"{key} must be from {least} to {most}, got {short(value)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be from 1 to num_experts ({self.num_experts}), got {short(self.top_k)}"
            )
        for key in ("dense_layers", "bare_layers"):
            layers = list(getattr(self, key))
            if layers != sorted(set(layers)):
                raise ValueError(f"{key} must rise, got {short(layers)}")
        if both := set(self.dense_layers) & set(self.bare_layers):
            raise ValueError(f"bare_layers and dense_layers share {short(sorted(both))}")


#: Rows of a tile of the grouped GEMM: an expert's rows are computed in whole tiles.
TILE = 64
#: Samples of a power law over which the mean is taken.
_SAMPLES = 16


class Loads(NamedTuple):
    """The busiest rank, by number of tokens: rows, experts with any, rows in whole tiles."""

    rows: Array
    touched: Array
    padded: Array


@lru_cache(maxsize=1024)
def busiest(
    experts: int, top_k: int, ranks: int, tokens: tuple[float, ...], exponent: float
) -> Loads:
    """The load of the busiest rank, for each of ``tokens``; ``ranks`` divide the experts.
    ``exponent`` is the exponent of the power law, 0 for balanced."""
    of = [_skewed(experts, top_k, ranks, t, exponent) for t in tokens] if exponent else [
        _even(experts / ranks, max(t * top_k / ranks, 1.0)) for t in tokens
    ]  # fmt: skip
    return Loads(*np.array(of, np.float64).T)


def _even(experts: float, rows: float) -> tuple[float, float, float]:
    touched = min(experts, rows)
    return rows, touched, touched * TILE * np.ceil(rows / touched / TILE)


def rows_of_experts(
    experts: int, top_k: int, tokens: int, exponent: float
) -> npt.NDArray[np.int64]:
    """Rows of each expert of a layer, ``tokens * top_k`` together: one sample, in whole numbers.
    The rows lost by rounding go, in equal parts if possible, to the experts with the fewest
    rows."""
    wanted = tokens * top_k
    if not exponent:
        return np.asarray(np.diff(np.arange(experts + 1) * wanted // experts), np.int64)
    load: npt.NDArray[np.int64] = _drawn(experts, top_k, tokens, exponent)[0].astype(np.int64)
    while more := wanted - int(load.sum()):
        able = np.flatnonzero(load < tokens if more > 0 else load > 0)
        able = able[np.argsort(load[able] if more > 0 else -load[able], kind="stable")]
        each = max(1, abs(more) // len(able))
        part = able[: abs(more)]
        load[part] = np.clip(
            load[part] + (each if more > 0 else -each),
            0,
            tokens,
        )
    return load


def _drawn(experts: int, top_k: int, tokens: float, exponent: float) -> Array:
    """Rows of each expert, by sample; rounded."""
    wanted, power = tokens * top_k, 1.0 - exponent
    least, most = (1.0, 0.8 * tokens) if wanted > experts else (0.01, 2.0)
    at = _samples(experts) * (most**power - least**power) + least**power
    drawn = at ** (1.0 / power)
    whole = np.round(drawn * wanted / drawn.sum(axis=1, keepdims=True))
    return np.asarray(np.minimum(whole, tokens), np.float64)


def _skewed(
    experts: int, top_k: int, ranks: int, tokens: float, exponent: float
) -> tuple[float, float, float]:
    wanted = tokens * top_k
    load = _drawn(experts, top_k, tokens, exponent).reshape(_SAMPLES, ranks, -1)
    # The rows lost by rounding: in equal parts to the ranks, one row to each expert without any.
    more = (wanted - load.sum(axis=(1, 2))) / ranks
    rows = load.sum(axis=2) + more[:, None]
    which = np.arange(_SAMPLES), rows.argmax(axis=1)
    mine = load[which]
    new = np.clip(more, 0.0, (mine == 0).sum(axis=1))
    touched = (mine > 0).sum(axis=1) + new
    padded = TILE * (np.ceil(mine / TILE).sum(axis=1) + new)
    return float(rows[which].mean()), float(touched.mean()), float(padded.mean())


@lru_cache(maxsize=64)
def _samples(experts: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(0).random((_SAMPLES, experts))
