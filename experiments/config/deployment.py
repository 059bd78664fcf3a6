"""From a checked scenario to the simulator's inputs: KV cache, batch size, schedulers, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, Self

import numpy as np

from sarathi_sim.policies.catalogue import is_pooled, of_micro_batches
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.policy import Longest
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import OutputLengths, Scheduler
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.facts.ops import OPS, op_label
from sarathi_sim.profiler.physics.shard_times import DOUBT
from sarathi_sim.profiler.storage.child import available_bytes, size_text
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import NO_DRAFTER, SHARES, EngineMemory, stage_layers
from sarathi_sim.simulator.loop.group import StepPredictor
from sarathi_sim.simulator.loop.handover import Handover, simulate_pools
from sarathi_sim.simulator.loop.records import EngineSwitches, Records, Switches
from sarathi_sim.simulator.loop.replica import Predictor
from sarathi_sim.simulator.loop.simulation import Clients, Replicas, simulate
from sarathi_sim.simulator.op_times.iteration import NO_HOST, HostTime
from sarathi_sim.simulator.op_times.op_times import OpTimes
from sarathi_sim.simulator.op_times.predictor import (
    CHUNK_BLOCK,
    BundlePredictor,
    Drafter,
    GroupPredictor,
    OfEach,
    TableSizes,
    beside_experts,
)
from sarathi_sim.simulator.views.metrics import Analysis, Hardware
from .base import Source, get
from .inputs import (
    calibration_of,
    device_of,
    host_of,
    link_scope,
    model_of,
    number_bytes_of,
    of_its_version,
    op_times_of,
    provenance,
    with_formats,
    with_host_time,
    with_running,
)
from .policy import policy_errors
from .pools import (
    DRAFT_MODEL,
    EngineHandover,
    acceptance_of,
    check_alike,
    draft_slots,
    drafter_of,
    handover_of,
    own_keys,
    pool_of,
    scenario_of_drafter,
    speculation_note,
)
from .requests import Lengths, Traffic, build_clients, build_requests
from .room import Room, bytes_of_drafter, cached_share, pools_of, room_of
from .scenario import POOLS, Batching, Disaggregation, KvCache, Scenario, Transfers
from .workload import ZipfLengths

# Bytes of this machine's memory (docs/lab/performance.md): of a request, of its records and
# metrics, and of a turn of a session in addition; of a class of Zipf lengths.
REQUEST_BYTES, RECORD_BYTES, TURN_BYTES, CLASS_BYTES = 300, 1100, 230, 40
# Of a micro-batch's records; of a stage's idle times and row of the ledger; of a replica's rest.
GROUP_BYTES, STAGE_BYTES, REPLICA_BYTES = 700, 1000, 6000
# Of a row count in the predictor's table; of a point of its attention tables that are computed at
# once, and of those of chunks, computed block by block.
TOKEN_BYTES, POINT_BYTES, CHUNK_POINT_BYTES = 350, 330, 60
ALWAYS_FREE = 16_000_000
"""Needs below this are not checked: a sweep's small runs need no more, and asking the system for
free memory would take a tenth of their time."""


def workload_bytes(scenario: Scenario) -> Counter[str]:
    """This machine's memory for a scenario's requests: bytes by the key that causes them. A trace's
    reader checks its own (``simulator/load/trace.py``)."""
    workload, lengths = scenario.workload, scenario.workload.lengths
    each = REQUEST_BYTES + RECORD_BYTES + (TURN_BYTES if workload.sessions else 0)
    found = Counter({"workload.requests": each * (workload.requests or 0)})
    if isinstance(lengths, ZipfLengths):
        classes = max(0, lengths.max - lengths.min) // lengths.step + 1
        found["workload.lengths.max"] = CLASS_BYTES * classes
    return found


def check_memory(needs: Counter[str], scenario: Scenario, source: Source) -> None:
    """Raise UserError, naming the key that needs most, if this machine has too little."""
    if problem := shortage(needs):
        key = needs.most_common(1)[0][0]
        raise source.error(
            key,
            get(scenario.model_dump(), tuple(key.split("."))),
            problem,
        )


def shortage(needs: Counter[str]) -> str:
    """The needed and the free memory as text; empty if there is enough."""
    total = needs.total()
    if total <= ALWAYS_FREE or total <= (free := available_bytes()):
        return ""
    parts = ", ".join(f"{what} {size_text(size)}" for what, size in needs.most_common(3) if size)
    needed = f"would need about {size_text(total)} of memory ({parts})"
    return f"{needed}, but only {size_text(free)} is free"


def check_together(needs: Mapping[str, Counter[str]], file: str) -> None:
    """Raise UserError if scenarios, by name, together need more memory than is free."""
    if problem := shortage(Counter({f"scenario {n}": c.total() for n, c in needs.items()})):
        raise UserError(f"{file}: scenarios: together they {problem}; run fewer at a time")


@dataclass(frozen=True)
class Deployment:
    """A scenario with every default filled in, ready to run.

    ``scenario`` is the resolved scenario: running it again gives the same result. ``notes`` are
    messages for the user. ``bundle_sha256`` identifies the content of the profile bundle.
    ``memory`` is the breakdown of a GPU's memory, with a paged KV cache. ``drafter`` are the op
    times of the drafter's layers, with speculation by one.
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
    drafter: OpTimes | None = None

    @property
    def scope(self) -> Literal["intra_node", "inter_node"]:
        """The kind of link between a pipeline's stages."""
        return link_scope(self.scenario, self.device)

    @property
    def pools(self) -> tuple[Deployment, ...]:
        """Its pools: itself, or the prefill and the decode pool."""
        return (self,)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of all replicas, by device."""
        found: dict[str, int] = {}
        for pool in self.pools:
            cluster, device = pool.scenario.cluster, pool.device.name
            gpus = cluster.gpus * cluster.replicas
            found[device] = found.get(device, 0) + gpus
        return found

    @property
    def bundle_name(self) -> str:
        """The name of the bundle of the op times."""
        found = f"{self.device.name}/{self.model.name}/tp{self.scenario.cluster.tp}"
        kernels = self.scenario.kernels
        return f"{found}-{kernels.name}" if kernels else found

    def slowed(self, times: float) -> Self:
        """The same deployment, where every op takes ``times`` as long."""
        factors, drafter = dict.fromkeys(OPS, times), self.drafter
        drafts = drafter.scaled(factors) if drafter is not None else None
        return replace(self, ops=self.ops.scaled(factors), drafter=drafts)

    def summary(self, analysis: Analysis) -> dict[str, Any]:
        """A run of it in numbers (docs/reference/metrics.md)."""
        pools = (
            Hardware(pool.device, pool.scenario.cluster.tp, pool.scenario.kernels)
            for pool in self.pools
        )
        return analysis.summary(self.model, *pools)

    @property
    def switches(self) -> Switches:
        """The switches of the simulated engine."""
        engine = self.scenario.engine
        return Switches(
            lazy=self.scenario.batching.formation == "lazy",
            blocking_send=engine.send == "blocking",
            **{each.name: getattr(engine, each.name) for each in fields(EngineSwitches)},
        )

    def schedulers(self, count: int | None = None) -> list[Scheduler]:
        """One fresh scheduler per rank of each replica, or ``count`` of them."""
        cluster, batching = self.scenario.cluster, self.scenario.batching
        count = count or cluster.replicas * cluster.dp
        assert batching.max_batch and batching.max_in_flight and cluster.max_length
        if self.scenario.kv_cache is not None:
            pools = pools_of(
                self.scenario,
                self.requests,
                count,
                self.memory.state_blocks if self.memory is not None else 0,
            )
            if self.scenario.speculation is not None:
                for pool in pools:
                    pool.endings = OutputLengths(acceptance_of(self.scenario, self.model))
            return [*pools]
        return [
            MicroBatches(
                of_micro_batches(self.scenario.policy.build()),
                max_batch=batching.max_batch,
                max_in_flight=batching.max_in_flight,
                kv_capacity=self.kv_capacity,
                max_length=cluster.max_length,
                reserve_declared=batching.kv_reservation == "declared",
                free_pool=batching.micro_batches == "free",
            )
            for _ in range(count)
        ]

    @cached_property
    def refused(self) -> tuple[frozenset[int], str]:
        """The ids of the requests that are rejected, and why the longest one is."""
        if not self.requests:
            return frozenset(), ""
        (scheduler,) = self.schedulers(1)
        lengths = Lengths.of(self.requests)
        longest = self.requests[int(np.argmax(lengths.prompt + lengths.most))]
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
        """The share of rejected requests and the reason, in words; empty if none is rejected."""
        share, why = self.rejected, self.refused[1]
        return f"{share:.1%} of the requests are rejected: the longest one {why}" if share else ""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Doubts about the op times, from their origins in the profile; each once."""
        ops_of: dict[str, list[str]] = {}
        for op, mark in self.ops.meta.environment.items():
            if doubt := str(mark).partition(DOUBT)[2]:
                ops_of.setdefault(doubt, []).append(op_label(op))
        return tuple(f"{', '.join(ops)}: {doubt}" for doubt, ops in ops_of.items())

    @property
    def remarks(self) -> tuple[str, ...]:
        """All messages for the user: rejections, doubts and notes."""
        return (*filter(None, [self.rejections]), *self.doubts, *self.notes)

    @cached_property
    def table_sizes(self) -> TableSizes:
        """The sizes of the predictor's tables: the largest that this workload can need. No
        micro-batch holds more sequences than there are requests or than reserve their KV tokens,
        and no chunk is longer than a prompt."""
        scenario, requests, lengths = self.scenario, self.requests, Lengths.of(self.requests)
        assert scenario.batching.max_batch and scenario.cluster.max_length
        length = scenario.cluster.max_length
        sequences = min(scenario.batching.max_batch, max(1, len(requests)))
        if scenario.batching.kv_reservation == "declared" and requests:
            least = int((lengths.prompt + lengths.most).min())
            sequences = min(sequences, max(1, self.kv_capacity // least))
        fitting = lengths.prompt[lengths.prompt + lengths.output <= length]
        longest = int(fitting.max(initial=1))
        chunking = scenario.policy.build().chunking
        if chunking is None:
            if scenario.kv_cache is not None:
                longest = length  # a prompt computed again, with its generated tokens
            return TableSizes(longest + sequences, length, sequences, longest)
        if scenario.kv_cache is not None:
            # Any chunk may occur; recomputed tokens may be longer than a prompt.
            longest = min(chunking.tokens, length)
            different = min(longest, CHUNK_BLOCK * (1 + len(requests)))
            rows = min(chunking.rows, sequences * length)
            return TableSizes(rows, length, sequences, longest, -(-different // CHUNK_BLOCK))
        # Decodes beside chunks of equal size, or the decodes that share a chunk's tokens with it.
        rows = min(chunking.rows, longest) + 2 * sequences
        # The tokens left in a chunk beside decodes, and the last chunk of each prompt.
        different = min(chunking.tokens, longest, sequences + CHUNK_BLOCK * (1 + len(requests)))
        return TableSizes(rows, length, sequences, longest, -(-different // CHUNK_BLOCK))

    @property
    def memory_bytes(self) -> Counter[str]:
        """This machine's memory for a run, without its requests: bytes by the key that causes
        them."""
        cluster, flying = self.scenario.cluster, self.scenario.batching.max_in_flight or 1
        replica = REPLICA_BYTES + STAGE_BYTES * cluster.pp + GROUP_BYTES * flying
        tables = self.table_sizes
        return Counter(
            {
                "workload.requests": RECORD_BYTES * len(self.requests),
                "cluster.replicas": replica * cluster.replicas * cluster.dp,
                "workload.lengths": TOKEN_BYTES * tables.token_rows * cluster.dp,
                "cluster.max_length": POINT_BYTES * tables.whole_prompts,
                "batching.max_batch": POINT_BYTES * tables.decode_points,
                "policy.chunk_size": CHUNK_POINT_BYTES * tables.chunk_points,
            }
        )

    @cached_property
    def predictor(self) -> BundlePredictor:
        """Times of this deployment's batches; of a rank's, as if no other had one."""
        drafter = None
        if self.drafter is not None:
            drafter = self._drafter(self._predictor(self.drafter).of_each)
        return self._predictor(self.ops, host_of(self.scenario.engine), drafter)

    @cached_property
    def step_predictor(self) -> GroupPredictor:
        """Times of the steps of this deployment's ranks."""
        host, drafter = host_of(self.scenario.engine), None
        if self.drafter is not None:
            drafter = self._drafter(self._of_steps(self.drafter, NO_HOST).of_each)
        return self._of_steps(self.ops, host, drafter)

    def _of_steps(
        self, ops: OpTimes, host: HostTime, drafter: Drafter | None = None
    ) -> GroupPredictor:
        alone = self._predictor(beside_experts(ops), replace(host, launch_layer_s=0.0))
        return GroupPredictor(replace(alone.cost, ops=ops, host=host), alone, drafter)

    def _drafter(self, of_each: OfEach) -> Drafter:
        spec = self.scenario.speculation
        assert self.drafter is not None and spec is not None
        slots = draft_slots(self.scenario)
        return Drafter(of_each, self.drafter.model.num_layers, spec.draft_length, slots)

    def _predictor(
        self, ops: OpTimes, host: HostTime = NO_HOST, drafter: Drafter | None = None
    ) -> BundlePredictor:
        scenario, sizes = self.scenario, self.table_sizes
        return BundlePredictor(
            ops,
            max_tokens=sizes.tokens,
            max_length=sizes.max_length,
            max_batch=sizes.sequences,
            max_prompt=sizes.max_prompt,
            scope=self.scope,
            num_stages=scenario.cluster.pp,
            include_head=scenario.engine.lm_head,
            layer_time=scenario.engine.layer_time,
            host=host,
            drafter=drafter,
        )

    def workers(self, predictor: Predictor | StepPredictor | None = None) -> Replicas:
        """Its replicas, with fresh schedulers."""
        cluster = self.scenario.cluster
        return Replicas(
            self.schedulers(),
            predictor or (self.step_predictor if cluster.dp > 1 else self.predictor),
            self.layers,
            self.switches,
            cluster.router,
            self.scenario.engine.admission_s or 0.0,
            cluster.dp,
            cluster.rank_router,
        )

    def simulate(
        self,
        progress: Callable[[int], None] | None = None,
        predictor: Predictor | StepPredictor | None = None,
    ) -> Records:
        """Simulate it. ``progress`` gets the number of finished requests from time to time.
        ``predictor`` replaces :attr:`predictor`, with several ranks :attr:`step_predictor`."""
        engine = self.pools[0].scenario.engine  # requests come in and go out at its front end
        scenario = self.scenario.model_copy(update={"engine": engine})
        clients = build_clients(scenario, self.requests)
        with policy_errors(scenario.policy):
            records = self._served(predictor, scenario.seed, clients, progress)
            return replace(records, frontend_s=engine.frontend_s or 0.0)

    def _served(self, predictor: Any, seed: int, clients: Clients | None, progress: Any) -> Records:
        workers = self.workers(predictor)
        return simulate(self.requests, workers, seed=seed, clients=clients, progress=progress)


@dataclass(frozen=True)
class PoolsDeployment(Deployment):
    """A deployment of two pools, each a deployment of its own: ``prefill``, whose requests end with
    their first token, and ``decode``. ``given`` is the section before its defaults were filled in.
    What is of one pool only, such as its layers and its KV capacity, is the decode pool's here."""

    prefill: Deployment = field(kw_only=True)
    decode: Deployment = field(kw_only=True)
    handover: Handover = field(kw_only=True)
    given: Disaggregation = field(kw_only=True)

    @property
    def pools(self) -> tuple[Deployment, ...]:
        return self.prefill, self.decode

    def slowed(self, times: float) -> Self:
        return replace(
            self,
            prefill=self.prefill.slowed(times),
            decode=self.decode.slowed(times),
        )

    @property
    def bundle_name(self) -> str:
        return " and ".join(dict.fromkeys(pool.bundle_name for pool in self.pools))

    @cached_property
    def refused(self) -> tuple[frozenset[int], str]:
        (first, why), (second, other) = (pool.refused for pool in self.pools)
        return first | second, why or other

    @property
    def doubts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(doubt for pool in self.pools for doubt in pool.doubts))

    @property
    def memory_bytes(self) -> Counter[str]:
        return self.prefill.memory_bytes + self.decode.memory_bytes

    def _served(self, predictor: Any, seed: int, clients: Clients | None, progress: Any) -> Records:
        return simulate_pools(
            self.requests,
            self.prefill.workers(predictor),
            self.decode.workers(predictor),
            self.handover,
            seed=seed,
            clients=clients,
            progress=progress,
        )


Requests = Callable[[Scenario, int, Source], list[Request]]
"""Makes a scenario's requests, given the longest sequence and the source of its values."""


def deploy(
    scenario: Scenario,
    source: Source,
    requests_of: Requests = build_requests,
    remote: bool = False,
) -> Deployment:
    """Check a scenario against its model, device, profiles and workload, and fill in defaults.
    ``requests_of`` lets a sweep share requests between scenarios. With ``remote`` prompts are
    computed elsewhere. Raises UserError, naming file, key, value and what is allowed."""
    if scenario.disaggregation is not None:
        return _deploy_pools(scenario, source, requests_of)
    # 1. The names: model, device and number formats; and the layers of each stage.
    model, device, given = model_of(scenario, source), device_of(scenario, source), scenario.device
    if f"{device.name}-".startswith(f"{given.lower()}-"):  # else it is a path
        scenario = scenario.model_copy(update={"device": device.name})
    scenario = with_formats(scenario, model, device, source)
    layers = layers_of(scenario, model, source)
    max_length = scenario.cluster.max_length or model.max_position_embeddings
    scenario = scenario.having("cluster", max_length=max_length, layers_per_stage=list(layers))
    numbers = number_bytes_of(scenario, model, device, source)
    scenario, notes = of_its_version(scenario, device)
    check_policy(scenario, source)
    drafter = drafter_of(scenario, model, source)
    # 2. The requests.
    check_memory(workload_bytes(scenario), scenario, source)
    requests = requests_of(scenario, max_length, source)
    notes = [*notes, *(requests.notes if isinstance(requests, Traffic) else [])]
    if len(scenario.device) > len(given):
        notes.append(f"device: {given} is {scenario.device}")
    # 3. The memory beside the weights: KV cache and batch size.
    kept = cached_share(model, requests, scenario.cluster.tp, numbers)
    spec, beside = scenario.speculation, NO_DRAFTER
    if drafter is not None:
        drafts = scenario_of_drafter(scenario, drafter, device, source)
        beside = bytes_of_drafter(drafts, drafter, requests, device, source)
    room = room_of(scenario, model, device, numbers, kept, beside, source)
    if room.kv_cache is not None:
        _refuse_as_engine(scenario, room.kv_cache, Lengths.of(requests), remote, source)
        requests = with_own_prompts(requests) if room.kv_cache.prompts_cached else requests
    # 4. The times of its ops and of its host.
    ops, digest = op_times_of(scenario, model, device, source)
    drafting = None
    if drafter is not None:
        try:
            drafting, of_drafter = op_times_of(drafts, drafter, device, source)
        except UserError as error:
            raise UserError(f"{error} (for the drafter, {drafter.name})") from None
        digest += of_drafter
    if spec is not None:  # what was published may change, too
        known = f"{digest} {acceptance_of(scenario, model).held}"
        digest = sha256(known.encode()).hexdigest()
    engine, said = with_host_time(scenario, model, requests, calibration_of(scenario, source))
    limits = {
        f"the context of {model.name}": model.max_position_embeddings,
        f"the longest measured context of {model.name} on {device.name}": ops.longest_context,
    }
    if drafter is not None and drafter.max_position_embeddings < model.max_position_embeddings:
        limits[f"the context of {drafter.name}"] = drafter.max_position_embeddings
    notes[:0] = [*_notes(scenario, limits, ops, kept, room), *said]
    if spec is not None:
        notes.append(speculation_note(scenario, model, drafter))
        if drafting is not None and spec.method == DRAFT_MODEL:
            notes.append(f"op times of the draft model: {provenance(drafting.meta)}")
    # 5. The deployment. This machine must be able to simulate it, and it must serve a request.
    scenario = with_running(scenario, room.max_batch, room.memory)
    scenario = scenario.having("batching", max_batch=room.max_batch, max_in_flight=room.in_flight)
    scenario = scenario.model_copy(update={"engine": engine, "kv_cache": room.kv_cache})
    inputs = (model, device, layers, room.tokens, requests, ops, digest)
    found = Deployment(scenario, *inputs, tuple(notes), room.memory, drafting)
    check_memory(found.memory_bytes, scenario, source)
    _refuse_if_nothing_fits(found, source)
    return found


def _deploy_pools(scenario: Scenario, source: Source, requests_of: Requests) -> Deployment:
    given = scenario.disaggregation
    assert given is not None
    (first, prefills), (second, decodes) = (pool_of(scenario, pool, source) for pool in POOLS)
    decode = deploy(second, decodes, requests_of, remote=True)
    prefill = deploy(first, prefills, lambda *_: [prompt_of(each) for each in decode.requests])
    read, written = decode.scenario.kv_cache_dtype, prefill.scenario.kv_cache_dtype
    check_alike("kv_cache_dtype", read, written, decodes)
    if decode.model.recurrent is not None:
        problem = "has recurrent layers: the transfer of their states between pools is not modelled"
        raise source.error("model", scenario.model, problem)
    over = handover_of(second.policy.name, _senders(prefill), given.handover)
    token_bytes = _token_bytes(decode, decodes)
    later = decode.scenario.having("engine", frontend_s=None)  # it acts in the prefill pool alone
    pools = {"prefill": own_keys(prefill.scenario), "decode": own_keys(later)}
    filled = Transfers.model_validate({key: getattr(over, key) for key in Transfers.model_fields})
    resolved = given.model_copy(update={**pools, "handover": filled})
    cache = prefill.scenario.kv_cache
    cached = cache is not None and cache.prompts_cached
    found = PoolsDeployment(
        scenario.model_copy(update={"disaggregation": resolved}),
        decode.model,
        decode.device,
        decode.layers,
        decode.kv_capacity,
        with_own_prompts(decode.requests) if cached else decode.requests,
        decode.ops,
        f"{prefill.bundle_sha256} {decode.bundle_sha256}",
        (_handover_note(over, token_bytes), *_notes_of_pools(prefill, decode)),
        prefill=prefill,
        decode=decode,
        handover=_handover(over, token_bytes, given.frontends),
        given=given,
    )
    check_memory(found.memory_bytes, scenario, source)
    return found


def default_handover(prefill: Deployment) -> Handover:
    """How a replica would hand over as a prefill worker, by its engine's defaults."""
    over = handover_of(prefill.scenario.policy.name, _senders(prefill), Transfers())
    return _handover(over, _token_bytes(prefill, Source("", "", {}, ())))


def _handover(over: EngineHandover, token_bytes: float, frontends: int = 1) -> Handover:
    return Handover(
        over.order,
        over.first_token,
        over.token_known,
        token_bytes / over.bandwidth,
        over.setup_s,
        over.latency_s,
        frontends,
    )


def _token_bytes(deployment: Deployment, source: Source) -> float:
    """The KV bytes of a mean prompt token, on all GPUs of a rank together. Of layers with a window
    those inside it are sent, as the cache keeps no others: vLLM from its pull requests 35758 and
    41847 on (March and May 2026; earlier versions turned windows off between pools), SGLang as its
    pull request 24857 allocates them."""
    model, scenario = deployment.model, deployment.scenario
    numbers = number_bytes_of(scenario, model, deployment.device, source)
    whole = float(model.kv_bytes_per_token(numbers.kv))
    if model.windows is None or not deployment.requests:
        return whole
    prompts = np.array([request.prompt_tokens for request in deployment.requests], float)
    return float(model.kept_tokens(prompts).sum() / prompts.sum()) * whole


def _senders(prefill: Deployment) -> int:
    """The GPUs of a prefill worker's rank that send KV: each its layers and KV heads. Latent KV is
    the same on all GPUs of a stage, and one sends it."""
    cluster, model = prefill.scenario.cluster, prefill.model
    return cluster.pp * (1 if model.latent is not None else min(cluster.tp, model.num_kv_heads))


def _handover_note(over: EngineHandover, token_bytes: float) -> str:
    order, first = (word.replace("_", " ") for word in (over.order, over.first_token))
    return (
        f"handover: {order}, first token at {first}; KV transfer of {token_bytes / 1e3:.1f} kB per "
        f"prompt token at {over.bandwidth / 1e9:g} GB/s and {1e3 * over.setup_s:g} ms per prompt, "
        f"one prompt at a time on each prefill rank; latency {1e3 * over.latency_s:g} ms"
    )


def _notes_of_pools(prefill: Deployment, decode: Deployment) -> list[str]:
    """The notes of both pools; those that differ after the pool's name."""
    same = [note for note in prefill.notes if note in decode.notes]
    pools = zip(POOLS, (prefill, decode), strict=True)
    own = [f"{pool} {note}" for pool, one in pools for note in one.notes if note not in same]
    return [*same, *own]


def prompt_of(request: Request) -> Request:
    """A request as the prefill pool sees it: it ends with its first token."""
    return replace(request, output_tokens=1, max_tokens=1)


# 1. ------------------------------------------------------------------------------------------


def layers_of(scenario: Scenario, model: ModelSpec, source: Source) -> tuple[int, ...]:
    """The layers of each stage. Raises UserError where they do not add up to the model's."""
    cluster, given = scenario.cluster, scenario.cluster.layers_per_stage
    if cluster.pp > model.num_layers:
        problem = f"must be at most {model.num_layers}, the layers of {model.name}"
        raise source.error("cluster.pp", cluster.pp, problem)
    if given is None:
        return stage_layers(model.num_layers, cluster.pp)
    if len(given) != cluster.pp or sum(given) != model.num_layers:
        problem = f"must be {cluster.pp} numbers (cluster.pp) that add up to {model.num_layers}, "
        problem += f"the layers of {model.name}"
        raise source.error("cluster.layers_per_stage", given, problem)
    return tuple(given)


def check_policy(scenario: Scenario, source: Source) -> None:
    """Raise UserError for a setting that the policy does not allow."""
    policy, batching, cache = scenario.policy.build(), scenario.batching, scenario.kv_cache
    name = scenario.policy.name
    if is_pooled(policy):
        check_left_out(scenario, policy.max_num_seqs, source)
        cache, setting = cache or KvCache(), policy.memory_share
        if cache.prompts_cached and not cache.prefix_caching:
            raise source.error("kv_cache.prompts_cached", True, "needs kv_cache.prefix_caching")
        for other in SHARES:
            if other != setting and (value := getattr(cache, other)) is not None:
                problem = f"must be left out: {name} takes kv_cache.{setting}"
                raise source.error(f"kv_cache.{other}", value, problem)
    elif cache is not None:
        problem = f"must be left out: {name} reserves memory for whole requests"
        raise source.error("kv_cache", cache.model_dump(exclude_defaults=True), problem)
    elif batching.micro_batches == "free" and of_micro_batches(policy).holds_finished:
        problem = f"must be bound: the batches of {name} leave together"
        raise source.error("batching.micro_batches", "free", problem)
    if batching.kv_reservation == "declared" and scenario.workload.declared == "to_max_length":
        problem = "has no effect: requests declare max_length, unless workload.declared is exact"
        raise source.error("batching.kv_reservation", "declared", problem)


def check_left_out(scenario: Scenario, max_num_seqs: int, source: Source) -> None:
    """Refuse settings that have no effect for a policy that acts on a pool."""
    usual = {**dict(Batching()), "max_in_flight": scenario.batching.max_in_flight}
    for key, value in scenario.batching:
        resolved = key == "max_batch" and value == max_num_seqs  # a result's configuration says so
        if value != usual[key] and not resolved:
            problem = f"must be left out: {scenario.policy.name} decides this itself"
            raise source.error(f"batching.{key}", value, problem)


# 2. and 3. -----------------------------------------------------------------------------------


def with_own_prompts(requests: Iterable[Request]) -> list[Request]:
    """The requests, each with its whole prompt as a prefix that the cache can hold."""
    return [
        each
        if each.prefix and each.prefix[-1][1] >= each.prompt_tokens
        else replace(each, prefix=(*each.prefix, (("prompt", each.id), each.prompt_tokens)))
        for each in requests
    ]


def _refuse_as_engine(
    scenario: Scenario,
    kv_cache: KvCache,
    lengths: Lengths,
    remote: bool,
    source: Source,
) -> None:
    """Raise UserError for a setting with which the engine would not serve the requests."""
    policy, max_length = scenario.policy.build(), scenario.cluster.max_length
    assert is_pooled(policy) and max_length
    fitting = lengths.prompt[lengths.prompt + lengths.most <= max_length]
    prompt = int(fitting.max(initial=1))
    longest = Longest(prompt, max_length, kv_cache.block_size, remote)
    if refusal := policy.refusal(longest):
        key, problem = refusal
        raise source.error(f"policy.{key}", scenario.policy.described().get(key), problem)


# 4. and 5. -----------------------------------------------------------------------------------


def _notes(
    scenario: Scenario, limits: dict[str, int], ops: OpTimes, kept: float, room: Room
) -> list[str]:
    """Messages about a deployment for the user; of the memory if its blocks were computed here."""
    max_length, cache, memory = scenario.cluster.max_length, scenario.kv_cache, room.memory
    assert max_length
    notes = [
        f"longest sequence: cluster.max_length {max_length} is more than {limit}, {what}"
        for what, limit in limits.items()
        if max_length > limit
    ]
    notes.append(f"op times: {provenance(ops.meta)}")
    if ops.model.recurrent is not None:
        full = len(ops.model.kinds["attention"])
        notes.append(
            room.note
            or f"recurrent layers: states and KV cache take {kept:.0%} of the memory of a KV cache "
            "in all layers"
        )
        notes[-1] += f"; {full} of {ops.model.num_layers} layers have a KV cache"
        if room.kv_cache is not None and room.kv_cache.prefix_caching:
            notes.append(
                "prefix caching: a hit is possible at any block; engines keep recurrent states at "
                "some only, and have fewer hits (docs/model/memory.md)"
            )
    elif kept < 1:
        notes.append(f"sliding windows: the KV cache keeps {kept:.0%} of this workload's tokens")
    if memory is not None and (cache is None or cache.num_blocks is None):
        holder = "replica" if scenario.cluster.dp == 1 else "rank"
        notes.append(f"memory: {memory.num_blocks:,} KV blocks per {holder}: {memory.text()}")
    return notes


def _refuse_if_nothing_fits(found: Deployment, source: Source) -> None:
    refused, why = found.refused
    if refused and len(refused) == len(found.requests):
        key, value = "cluster.max_length", found.scenario.cluster.max_length
        kv_cache = found.scenario.kv_cache
        if kv_cache is not None and "KV blocks" in why:
            key, value = "kv_cache.num_blocks", kv_cache.num_blocks
        raise source.error(key, value, f"every request is rejected: the longest one {why}")
