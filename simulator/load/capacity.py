"""How many KV tokens and sequences fit: the paper's B = floor((M_G - M_S) / (L * m_kv))."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import TWO_BYTES, NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.records import Floats


class CapacityError(UserError):
    """A model, or one request of it, does not fit the memory."""


def stage_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each of ``pp`` pipeline stages: as even as possible, the longer stages first.

    Raises :class:`CapacityError` when there are more stages than layers.
    """
    if not 1 <= pp <= num_layers:
        raise CapacityError(f"pp is {pp}, but a model of {num_layers} layers allows 1 to that many")
    short, longer = divmod(num_layers, pp)
    return tuple(short + (stage < longer) for stage in range(pp))


def stage_weight_bytes(
    model: ModelSpec,
    layers: Sequence[int],
    stage: int,
    numbers: NumberBytes = TWO_BYTES,
    tp: int = 1,
) -> int:
    """Bytes of the weights one stage holds, over all its ``tp`` tensor-parallel ranks.

    The embedding table is on the first stage and the LM head on the last; with one stage, tied
    tables count once. Every rank has learned positions, routers and norms whole, and these are not
    quantized.
    """
    parameters = 0
    table = model.vocab_size * model.hidden_size
    last = len(layers) - 1
    if stage == 0:
        parameters += table
        if model.learned_positions:
            parameters += tp * model.max_position_embeddings * model.hidden_size
    if stage == last and not (model.tied_embeddings and last == 0):
        parameters += table
    first = sum(layers[:stage])
    inside = model.parameters_in(range(first, first + layers[stage]), tp)
    weights = inside.matrices * numbers.weight + inside.routed * numbers.expert_weight
    return int(weights + (inside.plain + parameters) * numbers.activation)


def kv_capacity_tokens(
    model: ModelSpec,
    device: DeviceSpec,
    tp: int,
    layers: Sequence[int],
    usable_memory: float = 0.9,
    numbers: NumberBytes = TWO_BYTES,
    kept: float = 1.0,
) -> int:
    """KV tokens that one replica holds: those of its fullest stage.

    A stage has ``tp`` GPUs, of whose memory M_G the fraction ``usable_memory`` may hold weights
    M_S and KV cache; a token takes m_kv bytes for the stage's layers. Where ``tp`` exceeds the KV
    heads these are replicated, and so are their bytes. A share ``kept`` of the tokens is in the
    cache (:func:`kept_share`). Raises :class:`CapacityError` when the
    weights alone do not fit.
    """
    memory = usable_memory * device.memory_bytes * tp
    replication = model.heads_per_rank(tp)[1] * tp / model.num_kv_heads
    capacity = []
    for stage, count in enumerate(layers):
        weights = stage_weight_bytes(model, layers, stage, numbers, tp)
        if weights >= memory:
            raise CapacityError(
                f"{model.name} does not fit: stage {stage} of {len(layers)} holds "
                f"{weights / 1e9:.1f} GB of weights, and {tp} x {device.name} have "
                f"{memory / 1e9:.1f} GB usable ({usable_memory:.0%}); use a larger tp or pp"
            )
        per_token = model.kv_bytes_per_token(numbers.kv) * replication * count / model.num_layers
        capacity.append(int((memory - weights) // (kept * per_token)))
    return min(capacity)


def kept_share(model: ModelSpec, prompt: Floats, output: Floats) -> float:
    """The share of running sequences' tokens that the KV cache keeps; 1 without windows.

    A layer with a window keeps the tokens inside it. The mean is over the iterations of requests
    with so many prompt and output tokens, whose contexts grow from the one to the sum of both.
    """
    if model.windows is None or not len(prompt):
        return 1.0
    context = prompt + output * np.linspace(0, 1, 17)[:, None]
    kept = (model.kept_tokens(context) * output).sum()
    return float(kept / (context * output).sum())


def max_batch(capacity_tokens: int, max_length: int, micro_batches: int = 1) -> int:
    """Sequences of up to ``max_length`` tokens that each of ``micro_batches`` may hold.

    For GPT-3 on A100s with 0.9 of 80e9 bytes and 4096 tokens this gives the paper's 11 (TP 8) and
    27 (TP 8, PP 8, eight micro-batches). Raises :class:`CapacityError` when not even one fits.
    """
    total = capacity_tokens // max_length
    if total < micro_batches:
        raise CapacityError(
            f"the KV cache holds {total} sequences of {max_length} tokens, too few for "
            f"{micro_batches} micro-batches: lower max_length or micro-batches in flight, "
            "or use more GPUs"
        )
    return total // micro_batches
