"""How a model's attention differs from that of whole heads over the whole context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from sarathi_sim.profiler.facts.roofline import Array
from sarathi_sim.profiler.storage.strict import strict_dataclass

_MOST = 2**24


@strict_dataclass
class Windows:
    """Sliding windows: a token of ``layers`` layers attends to the last ``tokens`` tokens, its own
    included, and one of the other layers to all. Raises ValueError for what is not positive."""

    tokens: int
    layers: int

    def __post_init__(self) -> None:
        _check_positive(self, ())


def mean_layer(
    windows: Windows | None, layers: int, whole: Array, within: Callable[[int], Array]
) -> Array:
    """The mean over ``layers`` of what holds for ``whole`` contexts and ``within`` a window."""
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
        """What its attention kernel depends on beside the number of heads."""
        return self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim

    @property
    def cached(self) -> int:
        """Numbers that the KV cache holds of a token, in one layer on every rank."""
        return self.kv_rank + self.rope_dim


def _check_positive(spec: Windows | Latent, or_zero: tuple[str, ...]) -> None:
    for key in (field.name for field in fields(spec)):
        value = getattr(spec, key)
        if not (0 if key in or_zero else 1) <= value <= _MOST:
            raise ValueError(f"{key} must be positive and at most {_MOST}, got {value}")
