"""The fused iteration: one layer over a chunk and decodes at once, as an engine runs it.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sarathi_sim.profiler.facts.formats import Distribution, Kernels
from sarathi_sim.profiler.shard.attention import Attention, KVCache, decode_step, prefill_step
from sarathi_sim.profiler.shard.layer import ShardLayer


def slots_of(chunk: int, context: int, batch: int, decode_context: int) -> int:
    """KV slots that :func:`fused_layer` takes."""
    return chunk + context + batch * (decode_context + 1)


def fused_layer(
    layer: ShardLayer,
    attention: Attention,
    cache: KVCache,
    chunk: int,
    context: int,
    batch: int,
    decode_context: int,
    distribution: Distribution = Kernels.expert_distribution,
) -> Callable[[int], Tensor]:
    """``call(i)`` runs a layer on ``chunk`` prompt tokens and ``batch`` decodes, on fresh weights.

    The linear ops and the elementwise ones see all tokens as one matrix; the chunk attends to
    ``context`` cached tokens and itself, each decode to ``decode_context`` and itself, in calls of
    their own. Either part may be 0. Biases and rotary angles are made beforehand, as for all layers
    of an iteration; so is the choice of a mixture's experts.
    """
    tokens = chunk + batch
    x = layer.random(tokens, layer.model.hidden_size)
    positions = torch.cat(
        [torch.arange(context, context + chunk), torch.full((batch,), decode_context)]
    )
    angles = layer.angles(positions.to(layer.device))
    routing = layer.routing(tokens, distribution) if layer.experts else None
    stride = decode_context + 1
    chunk_bias = attention.prefill_bias(chunk, context) if chunk else None
    decode_bias = attention.decode_bias(batch, decode_context, stride) if batch else None
    decodes_at = chunk + context
    copies = len(layer.sets)
    slots = slots_of(chunk, context, batch, decode_context)

    def call(index: int) -> Tensor:
        # Calls walk through the pool, so that the KV cache is as cold as the weights.
        start = index * slots % (cache.tokens - slots + 1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = []
            if chunk:
                new = (q[:chunk], k[:chunk], v[:chunk])
                parts.append(prefill_step(attention, cache, start, context, new, chunk_bias))
            if batch:
                new = (q[chunk:], k[chunk:], v[chunk:])
                first = start + decodes_at
                parts.append(
                    decode_step(attention, cache, first, stride, decode_context, new, decode_bias)
                )
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        return layer.run(x, angles, attend, index % copies, routing)

    return call
