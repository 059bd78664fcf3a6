"""Attention of a mean layer: those with a sliding window beside those that see the whole context.

A bundle holds one layer, so it holds their mean by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sarathi_sim.profiler.facts.layer_kinds import mean_layer
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.roofline import KEY_BLOCK, Array, attended, attended_within

#: Keys beyond the window that a row of queries costs, as if it read them: kernels mask whole blocks
#: of queries and keys. Fitted to vLLM's and TensorRT-LLM's rows with windows of 128 and 1,024.
WINDOW_EDGE = 600.0

#: Microseconds by (chunk, context) or (batch, context), of a model's rank.
PairTime = Callable[[Array, Array, ModelSpec, int], Array]


def mean_time(
    whole: PairTime, within: PairTime, size: Array, context: Array, model: ModelSpec, tp: int
) -> Array:
    """The mean over the layers of times over the ``whole`` context and ``within`` the window."""
    inputs = (size, context, model, tp)
    return mean_layer(
        model.windows, model.num_layers, whole(*inputs), lambda window: within(*inputs)
    )


def composed_prefill(
    time: PairTime, chunk: Array, context: Array, model: ModelSpec, tp: int
) -> Array:
    """A chunk within the model's window, from its ``time`` without one: by the share of the
    query-key pairs that the window leaves."""
    assert model.windows is not None
    window = model.windows.tokens
    near = np.minimum(context, window)
    left = attended_within(chunk, context, window, WINDOW_EDGE)
    share = left / attended(chunk, near, 0.5, KEY_BLOCK)[1]
    return np.asarray(time(chunk, near, model, tp) * np.minimum(share, 1.0))


def composed_decode(
    time: PairTime, batch: Array, context: Array, model: ModelSpec, tp: int
) -> Array:
    """Decodes within the model's window: as with contexts of its length."""
    assert model.windows is not None
    return time(batch, np.minimum(context, model.windows.tokens), model, tp)
