"""From a checked scenario to what the simulator takes: memory, batch, schedulers, predictor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import numpy as np

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.host_time import host_of, with_host_time
from sarathi_sim.experiments.config.inputs import (
    device_of,
    link_scope,
    model_of,
    number_bytes_of,
    op_times_of,
    provenance,
    with_formats,
)
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.memory import Need, check_memory, run_needs, workload_needs
from sarathi_sim.experiments.config.paged import (
    paged_cache,
    pool_settings,
    pools_of,
    with_own_prompts,
)
from sarathi_sim.experiments.config.policy_file import policy_errors
from sarathi_sim.experiments.config.requests import Traffic, build_clients, build_requests
from sarathi_sim.experiments.config.scenario import KvCache, Scenario
from sarathi_sim.policies.policy import (
    Longest,
    chunking_of,
    is_pooled,
    of_micro_batches,
    refusal_of,
)
from sarathi_sim.policies.pool import Pool, PoolPolicy
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.physics.op_times import DOUBT
from sarathi_sim.simulator.load.capacity import (
    CapacityError,
    kept_share,
    kv_capacity_tokens,
    max_batch,
    stage_layers,
)
from sarathi_sim.simulator.load.engine_memory import EngineMemory
from sarathi_sim.simulator.loop.records import Records
from sarathi_sim.simulator.loop.replica import Predictor
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.loop.switches import EngineSwitches, Switches
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import CHUNK_BLOCK, BundlePredictor, TableSizes


@dataclass(frozen=True)
class Deployment:
    """A scenario with every default filled in, ready to run.

    ``scenario`` is the resolved one: running it again gives the same result. ``notes`` are messages
    for the user. ``bundle_sha256`` identifies the content of the profile bundle. ``memory`` is what
    a paged KV cache is made of.
    """

    scenario: Scenario
    model: ModelSpec
    device: DeviceSpec
    layers: tuple[int, ...]
    kv_capacity: int
    requests: list[Request]
    ops: OpTimes
    bundle_sha256: str
    notes: tuple[str, ...] = ()
    memory: EngineMemory | None = None

    @property
    def scope(self) -> Literal["intra_node", "inter_node"]:
        """Which link a pipeline's stages send over."""
        return link_scope(self.scenario, self.device)

    @property
    def bundle_name(self) -> str:
        """Which bundle its op times come from."""
        found = f"{self.device.name}/{self.model.name}/tp{self.scenario.cluster.tp}"
        kernels = self.scenario.kernels
        return f"{found}-{kernels.name}" if kernels else found

    @property
    def switches(self) -> Switches:
        """The switches of the simulated engine."""
        engine = self.scenario.engine
        return Switches(
            lazy=self.scenario.batching.formation == "lazy",
            blocking_send=engine.send == "blocking",
            **{each.name: getattr(engine, each.name) for each in fields(EngineSwitches)},
        )

    def schedulers(self, replicas: int | None = None) -> list[Scheduler | Pool]:
        """One fresh scheduler per replica (or so many)."""
        cluster, batching = self.scenario.cluster, self.scenario.batching
        replicas = replicas or cluster.replicas
        assert batching.max_batch and batching.max_in_flight and cluster.max_length
        if self.scenario.kv_cache is not None:
            each = (self.scenario, cluster.max_length, self.requests, replicas)
            return list(pools_of(*each))
        return [
            Scheduler(
                of_micro_batches(self.scenario.policy.build()),
                max_batch=batching.max_batch,
                max_in_flight=batching.max_in_flight,
                kv_capacity=self.kv_capacity,
                max_length=cluster.max_length,
                reserve_declared=batching.kv_reservation == "declared",
                free_pool=batching.micro_batches == "free",
            )
            for _ in range(replicas)
        ]

    @cached_property
    def refused(self) -> tuple[frozenset[int], str]:
        """The ids of the requests that are rejected, and why the longest one is."""
        if not self.requests:
            return frozenset(), ""
        (scheduler,) = self.schedulers(1)
        longest = max(self.requests, key=lambda request: request.prompt_tokens + request.max_tokens)
        why = scheduler.refusal(longest)
        if why is None:  # then no shorter one is
            return frozenset(), ""
        refused = (one.id for one in self.requests if scheduler.refusal(one) is not None)
        return frozenset(refused), why

    @property
    def rejected(self) -> float:
        """The share of the requests that are rejected."""
        return len(self.refused[0]) / max(len(self.requests), 1)

    @property
    def rejections(self) -> str:
        """What share of the requests is rejected, and why, in words; empty without any."""
        share, why = self.rejected, self.refused[1]
        return f"{share:.1%} of the requests are rejected: the longest one {why}" if share else ""

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is in doubt about its op times, by what its profile says of their origin."""
        origins = self.ops.meta.environment
        parts = {op: str(mark).partition(DOUBT) for op, mark in origins.items()}
        return tuple(f"{op}: {doubt}" for op, (_, found, doubt) in parts.items() if found)

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that the user is told of it: its rejections, its doubts, and its notes."""
        return (*filter(None, [self.rejections]), *self.doubts, *self.notes)

    @cached_property
    def table_sizes(self) -> TableSizes:
        """The sizes of the predictor's tables: the largest that this workload can need.

        No micro-batch holds more sequences than there are requests or than reserve their KV
        tokens, and no chunk is longer than a prompt.
        """
        scenario, requests = self.scenario, self.requests
        assert scenario.batching.max_batch and scenario.cluster.max_length
        length = scenario.cluster.max_length
        sequences = min(scenario.batching.max_batch, max(1, len(requests)))
        if scenario.batching.kv_reservation == "declared" and requests:
            least = min(r.prompt_tokens + r.max_tokens for r in requests)
            sequences = min(sequences, max(1, self.kv_capacity // least))
        fitting = (r.prompt_tokens for r in requests if r.prompt_tokens + r.output_tokens <= length)
        longest = max(fitting, default=1)
        chunking = chunking_of(scenario.policy.build())
        if chunking is None:
            if scenario.kv_cache is not None:
                longest = length  # a prompt computed again, with all that was generated
            return TableSizes(longest + sequences, length, sequences, longest)
        if scenario.kv_cache is not None:
            # Any chunk may occur; what is computed again may be longer than a prompt.
            longest = min(chunking.tokens, length)
            different = min(longest, CHUNK_BLOCK * (1 + len(requests)))
            rows = min(chunking.rows, sequences * length)
            return TableSizes(rows, length, sequences, longest, -(-different // CHUNK_BLOCK))
        # Decodes beside chunks of equal size, or those that fill a chunk between them.
        rows = min(chunking.rows, longest) + 2 * sequences
        # What is left of a chunk beside decodes, and of each prompt at its end.
        different = min(chunking.tokens, longest, sequences + CHUNK_BLOCK * (1 + len(requests)))
        return TableSizes(rows, length, sequences, longest, -(-different // CHUNK_BLOCK))

    @property
    def memory_needs(self) -> list[Need]:
        """The memory of a run, without its requests."""
        return run_needs(self.scenario, len(self.requests), self.table_sizes)

    @cached_property
    def predictor(self) -> BundlePredictor:
        """Times of this deployment's batches."""
        scenario, sizes, engine = self.scenario, self.table_sizes, self.scenario.engine
        return BundlePredictor(
            self.ops,
            max_tokens=sizes.tokens,
            max_length=sizes.max_length,
            max_batch=sizes.sequences,
            max_prompt=sizes.max_prompt,
            scope=self.scope,
            num_stages=scenario.cluster.pp,
            include_head=scenario.engine.lm_head,
            layer_time=scenario.engine.layer_time,
            host=host_of(engine),
        )

    def simulate(
        self,
        progress: Callable[[int], None] | None = None,
        predictor: Predictor | None = None,
    ) -> Records:
        """Simulate it. ``progress`` gets the number of finished requests from time to time.
        ``predictor`` replaces :attr:`predictor`.
        """
        scenario = self.scenario
        with policy_errors(scenario.policy):
            records = simulate(
                self.requests,
                self.schedulers(),
                predictor or self.predictor,
                self.layers,
                switches=self.switches,
                router=scenario.cluster.router,
                seed=scenario.seed,
                clients=build_clients(scenario, self.requests),
                progress=progress,
            )
            return replace(records, frontend_s=scenario.engine.frontend_s or 0.0)


Requests = Callable[[Scenario, int, Source], list[Request]]
"""Makes a scenario's requests, given the longest sequence and the source of its values."""


def deploy(
    scenario: Scenario, source: Source, requests_of: Requests = build_requests
) -> Deployment:
    """Check a scenario against its model, device, profiles and workload, and fill in defaults.

    ``requests_of`` lets a sweep share requests between scenarios. Raises ConfigError, naming file,
    key, value and what is allowed.
    """
    cluster, batching = scenario.cluster, scenario.batching
    model, device = model_of(scenario, source), device_of(scenario, source)
    scenario = with_formats(scenario, model, device, source)
    layers = layers_of(scenario, model, source)
    max_length = cluster.max_length or model.max_position_embeddings
    in_flight = batching.max_in_flight or cluster.pp
    size = number_bytes_of(scenario, model, device, source)
    policy, kv_cache, memory = scenario.policy.build(), scenario.kv_cache, None
    kept, requests = 1.0, None
    if model.windows is not None:
        requests = checked_requests(scenario, max_length, source, requests_of)
        sizes = np.array([(r.prompt_tokens, r.output_tokens) for r in requests], dtype=float)
        kept = kept_share(model, *sizes.reshape(-1, 2).T)
    if is_pooled(policy):
        kv_cache, memory = paged_cache(scenario, policy, model, device, layers, size, source, kept)
        assert kv_cache.num_blocks
        kv_capacity = (kv_cache.num_blocks - 1) * kv_cache.block_size  # one is the null block
        batch = policy.max_num_seqs
        in_flight = pool_settings(scenario, policy, max_length)["max_in_flight"]
    elif kv_cache is not None:
        problem = f"must be left out: {scenario.policy.name} reserves memory for whole requests"
        raise source.error("kv_cache", kv_cache.model_dump(exclude_defaults=True), problem)
    elif batching.micro_batches == "free" and of_micro_batches(policy).holds_finished:
        problem = f"must be bound: the batches of {scenario.policy.name} leave together"
        raise source.error("batching.micro_batches", "free", problem)
    if not is_pooled(policy):
        try:
            kv_capacity = kv_capacity_tokens(
                model, device, cluster.tp, layers, cluster.usable_memory, size, kept
            )
            batch = batching.max_batch or max_batch(kv_capacity, max_length, in_flight)
        except CapacityError as error:
            raise ConfigError(f"{source.name(('cluster',))}: {error}") from None
        _check_batch(scenario, kv_capacity, max_length, in_flight, source)
    if batching.kv_reservation == "declared" and scenario.workload.declared == "to_max_length":
        problem = "has no effect: requests declare max_length, unless workload.declared is exact"
        raise source.error("batching.kv_reservation", "declared", problem)
    if requests is None:
        requests = checked_requests(scenario, max_length, source, requests_of)
    if kv_cache is not None and is_pooled(policy):
        _refuse_as_engine(scenario, policy, kv_cache, max_length, requests, source)
    left_out = [requests.note] if isinstance(requests, Traffic) and requests.note else []
    if kv_cache is not None and kv_cache.prompts_cached:
        requests = with_own_prompts(requests)
    ops, digest = op_times_of(scenario, model, device, source)
    limits = {
        f"the context of {model.name}": model.max_position_embeddings,
        f"the longest measured context of {model.name} on {device.name}": ops.longest_context,
    }
    counted = scenario.kv_cache is None or scenario.kv_cache.num_blocks is None
    notes = _notes(max_length, limits, ops, kept, memory if counted else None)
    engine, said = with_host_time(scenario, model, requests)
    notes += (*said, *left_out)
    resolved = scenario.model_copy(
        update={
            "engine": engine,
            "cluster": cluster.model_copy(
                update={"max_length": max_length, "layers_per_stage": list(layers)}
            ),
            "batching": batching.model_copy(
                update={"max_batch": batch, "max_in_flight": in_flight}
            ),
            "kv_cache": kv_cache,
        }
    )
    found = Deployment(
        resolved, model, device, layers, kv_capacity, requests, ops, digest, notes, memory
    )
    check_memory(found.memory_needs, resolved, source)
    _refuse_if_nothing_fits(found, source)
    return found


def _refuse_as_engine(
    scenario: Scenario,
    policy: PoolPolicy,
    kv_cache: KvCache,
    max_length: int,
    requests: list[Request],
    source: Source,
) -> None:
    """Raise ConfigError for a setting with which the engine would not serve the requests."""
    fitting = [one for one in requests if one.prompt_tokens + one.max_tokens <= max_length]
    longest = Longest(
        max((one.prompt_tokens for one in fitting), default=1),
        max_length,
        kv_cache.block_size,
    )
    refusal = refusal_of(policy, longest)
    if refusal is not None:
        key, problem = refusal
        raise source.error(f"policy.{key}", scenario.policy.described().get(key), problem)


def _refuse_if_nothing_fits(found: Deployment, source: Source) -> None:
    """Raise ConfigError where every request is rejected."""
    refused, why = found.refused
    if refused and len(refused) == len(found.requests):
        key, value = "cluster.max_length", found.scenario.cluster.max_length
        kv_cache = found.scenario.kv_cache
        if kv_cache is not None and "KV blocks" in why:
            key, value = "kv_cache.num_blocks", kv_cache.num_blocks
        raise source.error(key, value, f"every request is rejected: the longest one {why}")


def _notes(
    max_length: int,
    limits: dict[str, int],
    ops: OpTimes,
    kept: float,
    memory: EngineMemory | None,
) -> tuple[str, ...]:
    """What the user is told of a deployment; ``memory`` where its blocks were counted here."""
    notes = [
        f"longest sequence: cluster.max_length {max_length} is more than {limit}, {what}"
        for what, limit in limits.items()
        if max_length > limit
    ]
    notes.append(f"op times: {provenance(ops.meta)}")
    if kept < 1:
        notes.append(f"windows: the KV cache keeps {kept:.0%} of this workload's tokens")
    if memory is not None:
        notes.append(f"memory: {memory.num_blocks:,} KV blocks a replica: {memory.text()}")
    return tuple(notes)


def checked_requests(
    scenario: Scenario, max_length: int, source: Source, requests_of: Requests
) -> list[Request]:
    """The requests, if the memory suffices for them."""
    check_memory(workload_needs(scenario), scenario, source)
    return requests_of(scenario, max_length, source)


def layers_of(scenario: Scenario, model: ModelSpec, source: Source) -> tuple[int, ...]:
    cluster = scenario.cluster
    if cluster.pp > model.num_layers:
        problem = f"must be at most {model.num_layers}, the layers of {model.name}"
        raise source.error("cluster.pp", cluster.pp, problem)
    given = cluster.layers_per_stage
    if given is None:
        return stage_layers(model.num_layers, cluster.pp)
    if len(given) != cluster.pp or sum(given) != model.num_layers:
        raise source.error(
            "cluster.layers_per_stage",
            given,
            f"must be {cluster.pp} numbers (cluster.pp) that add up to {model.num_layers}, "
            f"the layers of {model.name}",
        )
    return tuple(given)


def _check_batch(
    scenario: Scenario, kv_capacity: int, max_length: int, in_flight: int, source: Source
) -> None:
    batching = scenario.batching
    if batching.max_batch is None or batching.kv_reservation == "declared":
        return
    micro_batches = min(in_flight, scenario.cluster.pp)
    most = kv_capacity // (max_length * micro_batches)
    if batching.max_batch > most:
        raise source.error(
            "batching.max_batch",
            batching.max_batch,
            f"does not fit: must be at most {most}, because the KV cache holds {kv_capacity} "
            f"tokens and each sequence of {micro_batches} micro-batches reserves {max_length}",
        )
