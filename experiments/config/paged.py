"""The KV cache of policies that act on a pool: its blocks, and their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.scenario import Batching, KvCache, Scenario
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.policy import chunking_of, is_pooled, memory_share_of
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request, Sequence
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.formats import NumberBytes
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.simulator.load.capacity import CapacityError, max_batch
from sarathi_sim.simulator.load.engine_memory import SHARES, EngineMemory, Step, engine_memory
from sarathi_sim.simulator.loop.endings import OutputLengths


def paged_cache(
    scenario: Scenario,
    policy: PoolPolicy,
    model: ModelSpec,
    device: DeviceSpec,
    layers: tuple[int, ...],
    numbers: NumberBytes,
    source: Source,
    kept: float = 1.0,
) -> tuple[KvCache, EngineMemory]:
    """The cache with its blocks counted, and the memory of a GPU that holds the fewest.

    A share ``kept`` of the tokens is in it.

    Raises ConfigError for a share of another engine's, and where blocks or a request do not fit.
    """
    check_left_out(scenario, policy.max_num_seqs, source)
    cache, cluster = scenario.kv_cache or KvCache(), scenario.cluster
    if cache.prompts_cached and not cache.prefix_caching:
        raise source.error("kv_cache.prompts_cached", True, "needs kv_cache.prefix_caching")
    setting = memory_share_of(policy)
    for other in SHARES:
        value = getattr(cache, other)
        if other != setting and value is not None:
            problem = f"must be left out: {scenario.policy.name} takes kv_cache.{setting}"
            raise source.error(f"kv_cache.{other}", value, problem)
    max_length = cluster.max_length or model.max_position_embeddings
    chunking = chunking_of(policy)
    step = Step(
        chunking.rows if chunking is not None else max_length,
        policy.max_num_seqs,
        cache.activation_bytes,
        cache.non_torch_bytes,
        cache.cuda_graph_bytes,
    )
    try:
        memory = engine_memory(
            model,
            device,
            cluster.tp,
            layers,
            cache.block_size,
            setting,
            getattr(cache, setting) or cluster.usable_memory,
            step,
            numbers,
            kept,
        )
        blocks = cache.num_blocks or memory.num_blocks
        max_batch(max(blocks, memory.num_blocks) * cache.block_size, max_length)
    except CapacityError as error:
        raise ConfigError(f"{source.name(('kv_cache',))}: {error}") from None
    if blocks > memory.most_blocks:
        problem = f"must be at most {memory.most_blocks}, what the memory holds beside the weights"
        raise source.error("kv_cache.num_blocks", blocks, problem)
    return cache.model_copy(update={"num_blocks": blocks}), memory


def check_left_out(scenario: Scenario, max_num_seqs: int, source: Source) -> None:
    """Refuse settings that have no effect for a policy that acts on a pool."""
    batching, standard = scenario.batching, Batching()
    if batching.max_batch == max_num_seqs:  # a resolved configuration says so
        standard = Batching(max_batch=max_num_seqs)
    for key in ("max_batch", "formation", "micro_batches", "kv_reservation"):
        value = getattr(batching, key)
        if value != getattr(standard, key):
            problem = f"must be left out: {scenario.policy.name} decides this itself"
            raise source.error(f"batching.{key}", value, problem)


def pool_settings(scenario: Scenario, policy: PoolPolicy, max_length: int) -> dict[str, int]:
    """Keyword arguments of a pool. One micro-batch a stage is in flight, and one more where they
    are formed ahead."""
    pp = scenario.cluster.pp
    depth = scenario.batching.max_in_flight or pp + policy.ahead
    return {"max_in_flight": depth, "max_length": max_length, "stages": pp}


def with_own_prompts(requests: Iterable[Request]) -> list[Request]:
    """The requests, each with a name for its whole prompt, to be found in the cache."""
    return [
        each
        if each.prefix and each.prefix[-1][1] >= each.prompt_tokens
        else replace(each, prefix=(*each.prefix, (("prompt", each.id), each.prompt_tokens)))
        for each in requests
    ]


def pools_of(
    scenario: Scenario, max_length: int, requests: Collection[Request], count: int = 1
) -> list[Pool]:
    """Fresh pools that serve these requests in the simulator; their blocks are counted."""
    lengths = {request.id: request.output_tokens for request in requests}
    return [_pool_of(scenario, max_length, requests, lengths) for _ in range(count)]


def _pool_of(
    scenario: Scenario, max_length: int, requests: Collection[Request], lengths: Mapping[int, int]
) -> Pool:
    policy, cache = scenario.policy.build(), scenario.kv_cache
    assert is_pooled(policy) and cache is not None and cache.num_blocks
    kind = CachedBlocks if cache.prefix_caching else Blocks
    blocks = kind(cache.num_blocks, cache.block_size)
    if isinstance(blocks, CachedBlocks) and cache.prompts_cached:
        for each in requests:
            blocks.preload(
                Sequence(each.id, each.prompt_tokens, each.max_tokens, 0, prefix=each.prefix)
            )
    return Pool(
        policy,
        blocks,
        endings=OutputLengths(lengths),
        **pool_settings(scenario, policy, max_length),
    )
