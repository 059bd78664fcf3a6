"""Kinds of layers beside dense ones with plain attention: windows, latent attention, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.storage.strict import short, strict_dataclass

_MOST = 2**24


@strict_dataclass
class Windows:
    """Sliding windows: in ``layers`` layers a token attends to the last ``tokens`` tokens, its own
    included; in the other layers to all. Raises ValueError for sizes that are not positive."""

    tokens: int
    layers: int

    def __post_init__(self) -> None:
        _check_positive(self, ())


def mean_layer(
    windows: Windows | None, layers: int, whole: Array, within: Callable[[int], Array]
) -> Array:
    """The mean over ``layers`` of the values for ``whole`` contexts and ``within`` a window."""
    if windows is None:
        return whole
    share = windows.layers / layers
    return np.asarray((1 - share) * whole + share * within(windows.tokens))


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
        _check_positive(self, ("query_rank",))

    @property
    def kernel(self) -> tuple[int, int, int, int]:
        """The sizes of its attention kernel beside the number of heads."""
        return self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim

    @property
    def cached(self) -> int:
        """Numbers per token in the KV cache, in one layer on every rank."""
        return self.kv_rank + self.rope_dim


def _check_positive(spec: Windows | Latent, or_zero: tuple[str, ...]) -> None:
    for key in (field.name for field in fields(spec)):
        value = getattr(spec, key)
        if not (0 if key in or_zero else 1) <= value <= _MOST:
            raise ValueError(f"{key} must be positive and at most {_MOST}, got {value}")


#: No network of a layer is wider.
MOST_WIDE = 2**20


@strict_dataclass
class Experts:
    """A mixture of experts in the place of a layer's feed-forward network.

    A router chooses ``top_k`` of ``num_experts`` for each token; all tokens pass the shared ones,
    which have ``shared_intermediate_size`` together (0: none). The layers ``dense_layers`` (from 0)
    have a dense network of the model's ``ffn_hidden_size`` instead. ``bias``: experts and router
    have one (as in gpt-oss). Raises ValueError for sizes that do not fit each other.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False

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
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise ValueError(
                f"dense_layers must rise, got {short(list(self.dense_layers))}"
            )  # fmt: skip
