"""The capacity of a replica: its KV cache and batch size, and the pools that have them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from sarathi_sim.policies.catalogue import is_pooled
from sarathi_sim.policies.kv import Blocks
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.simulator.load.engine_memory import (
    CapacityError,
    DrafterBytes,
    EngineMemory,
    Step,
    drafter_bytes,
    engine_memory,
    kept_share,
    kv_capacity_tokens,
    max_batch,
)
from .base import Source
from .inputs import number_bytes_of, running_of
from .pools import DRAFT_MODEL, draft_slots
from .scenario import KvCache, Scenario


def cached_share(
    model: ModelSpec, requests: Collection[Request], tp: int, numbers: NumberBytes
) -> float:
    """The share of the requests' tokens that a mean layer's cache keeps."""
    if model.windows is None and model.recurrent is None:
        return 1.0
    sizes = np.array([(r.prompt_tokens, r.output_tokens) for r in requests], dtype=float)
    prompt, output = sizes.reshape(-1, 2).T
    return kept_share(model, prompt, output, tp, numbers)


def bytes_of_drafter(
    drafts: Scenario,
    drafter: ModelSpec,
    requests: Collection[Request],
    device: DeviceSpec,
    source: Source,
) -> DrafterBytes:
    """The memory of a drafter, sized by its own scenario (:func:`scenario_of_drafter`)."""
    assert drafts.speculation is not None
    tp, kernels = drafts.cluster.tp, drafts.kernels
    numbers = kernels.number_bytes if kernels else number_bytes_of(drafts, drafter, device, source)
    kept = cached_share(drafter, requests, tp, numbers)
    whole = drafts.speculation.method == DRAFT_MODEL
    return drafter_bytes(drafter, tp, numbers, kept, whole=whole)


@dataclass(frozen=True)
class Room:
    """The capacity of a replica: KV ``tokens``, ``in_flight`` micro-batches of ``max_batch``
    sequences each; the paged cache, and the breakdown of a GPU's memory; and what to say of it."""

    tokens: int
    max_batch: int
    in_flight: int
    kv_cache: KvCache | None = None
    memory: EngineMemory | None = None
    note: str = ""


def room_of(
    scenario: Scenario,
    model: ModelSpec,
    device: DeviceSpec,
    numbers: NumberBytes,
    kept: float,
    beside: DrafterBytes,
    source: Source,
) -> Room:
    """The capacity of a replica whose cache keeps a share ``kept`` of the tokens, ``beside`` a
    drafter. Raises UserError if the weights, a request, or the configured batch or blocks do not
    fit."""
    cluster, policy, cache = scenario.cluster, scenario.policy.build(), scenario.kv_cache
    layers, max_length = cluster.layers_per_stage, cluster.max_length
    assert layers and max_length
    on = (model, device, cluster.tp, layers)
    try:
        if not is_pooled(policy):
            tokens = kv_capacity_tokens(*on, cluster.usable_memory, numbers, kept)
            return _reserved(scenario, tokens, max_length, source)
        cache, setting = cache or KvCache(), policy.memory_share
        chunking, share = policy.chunking, getattr(cache, setting) or cluster.usable_memory
        step = Step(
            chunking.rows if chunking is not None else max_length,
            policy.max_num_seqs,
            cache.activation_bytes,
            cache.non_torch_bytes,
            cache.cuda_graph_bytes,
            policy.version,
        )
        memory = engine_memory(*on, cache.block_size, setting, share, step, numbers, kept, beside)
        blocks, states = cache.num_blocks or memory.num_blocks, memory.state_blocks
        if max_length > (max(blocks, memory.num_blocks) - states) * cache.block_size:
            max_batch((memory.num_blocks - 1 - states) * cache.block_size, max_length)
    except CapacityError as error:
        key = "kv_cache" if is_pooled(policy) else "cluster"
        raise source.error(key, None, str(error)) from None
    if blocks > memory.most_blocks:
        problem = f"must be at most {memory.most_blocks}, what the memory holds beside the weights"
        raise source.error("kv_cache.num_blocks", blocks, problem)
    tokens = (blocks - 1) * cache.block_size  # one is the null block
    in_flight = pool_settings(scenario, policy)["max_in_flight"]
    running, note = running_of(policy, cache, memory, source)
    cache = cache.model_copy(update={"num_blocks": blocks})
    return Room(tokens, running, in_flight, cache, memory, note)


def _reserved(scenario: Scenario, tokens: int, max_length: int, source: Source) -> Room:
    """The capacity where each sequence reserves its memory. Raises UserError for a configured
    batch that does not fit, and CapacityError if not one sequence does."""
    batching, pp = scenario.batching, scenario.cluster.pp
    in_flight = batching.max_in_flight or pp
    batch = batching.max_batch or max_batch(tokens, max_length, in_flight)
    micro_batches = min(in_flight, pp)
    most = tokens // (max_length * micro_batches)
    if batching.max_batch and batching.kv_reservation == "max_length" and batch > most:
        raise source.error(
            "batching.max_batch",
            batch,
            f"does not fit: must be at most {most}, because the KV cache holds {tokens} tokens and "
            f"each sequence of {micro_batches} micro-batches reserves {max_length}",
        )
    return Room(tokens, batch, in_flight)


def pool_settings(scenario: Scenario, policy: PoolPolicy) -> dict[str, Any]:
    """Keyword arguments of a pool. One micro-batch per stage is in flight, and one more if the
    policy forms iterations ahead."""
    pp = scenario.cluster.pp
    depth = scenario.batching.max_in_flight or pp + policy.ahead
    found = {"max_in_flight": depth, "max_length": scenario.cluster.max_length, "stages": pp}
    if (spec := scenario.speculation) is not None:
        found["draft_length"] = spec.draft_length
        ahead = policy.looks_ahead and spec.method != "ngram"
        found["lookahead"] = spec.draft_length if ahead else 0
        found["draft_slots"] = draft_slots(scenario)
    return found


def pools_of(
    scenario: Scenario,
    requests: Collection[Request],
    count: int = 1,
    state_blocks: int = 0,
) -> list[Pool]:
    """Fresh pools that serve these requests in the simulator; their blocks are counted."""
    pools, cache = [], scenario.kv_cache
    for _ in range(count):
        policy = scenario.policy.build()
        assert is_pooled(policy) and cache is not None and cache.num_blocks
        kind = policy.cached_blocks if cache.prefix_caching else Blocks
        blocks = kind(cache.num_blocks, cache.block_size, state_blocks)
        if cache.prompts_cached:
            for r in requests:
                own = Sequence(r.id, r.prompt_tokens, r.max_tokens, 0, prefix=r.prefix)
                blocks.preload(own)
        pools.append(Pool(policy, blocks, **pool_settings(scenario, policy)))
    return pools
