"""A mixture of experts."""

from __future__ import annotations

from sarathi_sim.profiler.facts.hf_keys import short
from sarathi_sim.profiler.storage.strict import strict_dataclass

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
