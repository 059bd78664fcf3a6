"""From a checked scenario to what the simulator takes: memory, batch, schedulers, predictor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from experiments.config import Scenario
from experiments.errors import ConfigError
from experiments.inputs import device_of, dtype_bytes_of, link_scope, model_of, op_times_of
from experiments.loading import Source
from experiments.policy_file import blamed
from experiments.requests import build_requests
from policies.request import Request
from policies.scheduler import Scheduler
from profiler.device import DeviceSpec
from profiler.model import ModelSpec
from simulator.capacity import CapacityError, kv_capacity_tokens, max_batch, stage_layers
from simulator.predictor import BundlePredictor
from simulator.records import Records
from simulator.regression import OpTimes
from simulator.replica import Predictor
from simulator.simulation import simulate
from simulator.switches import Switches


@dataclass(frozen=True)
class Deployment:
    """A scenario with every default filled in, ready to run.

    ``scenario`` is the resolved one: running it again gives the same result. ``notes`` is what its
    user should know. ``bundle_sha256`` identifies the content of the profile bundle.
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

    @property
    def scope(self) -> Literal["intra_node", "inter_node"]:
        """Which link a pipeline's stages send over."""
        return link_scope(self.scenario, self.device)

    @property
    def bundle_name(self) -> str:
        """Which bundle its op times come from."""
        return f"{self.device.name}/{self.model.name}/tp{self.scenario.cluster.tp}"

    @property
    def switches(self) -> Switches:
        """The switches of the simulated engine."""
        engine = self.scenario.engine
        return Switches(
            lazy=self.scenario.batching.formation == "lazy",
            blocking_send=engine.send == "blocking",
            turnaround_s=engine.turnaround_s,
            jitter=engine.jitter,
        )

    def schedulers(self) -> list[Scheduler]:
        """One fresh scheduler per replica."""
        cluster, batching = self.scenario.cluster, self.scenario.batching
        assert batching.max_batch and batching.max_in_flight and cluster.max_length
        return [
            Scheduler(
                self.scenario.policy.build(),
                max_batch=batching.max_batch,
                max_in_flight=batching.max_in_flight,
                kv_capacity=self.kv_capacity,
                max_length=cluster.max_length,
                reserve_declared=batching.kv_reservation == "declared",
                free_pool=batching.micro_batches == "free",
            )
            for _ in range(cluster.replicas)
        ]

    @cached_property
    def predictor(self) -> BundlePredictor:
        """Times of this deployment's batches."""
        scenario = self.scenario
        assert scenario.batching.max_batch and scenario.cluster.max_length
        cluster = scenario.cluster
        return BundlePredictor(
            self.ops,
            max_tokens=_rows(scenario, self.requests),
            max_length=scenario.cluster.max_length,
            max_batch=scenario.batching.max_batch,
            scope=self.scope,
            num_stages=cluster.pp,
            include_head=scenario.engine.lm_head,
            layer_time=scenario.engine.layer_time,
        )

    def simulate(
        self,
        progress: Callable[[int], None] | None = None,
        predictor: Predictor | None = None,
    ) -> Records:
        """Run it. ``progress`` gets the number of finished requests now and then; batches take as
        long as ``predictor`` says, else :attr:`predictor`.
        """
        scenario = self.scenario
        with blamed(scenario.policy):
            return simulate(
                self.requests,
                self.schedulers(),
                predictor or self.predictor,
                self.layers,
                switches=self.switches,
                router=scenario.cluster.router,
                seed=scenario.seed,
                progress=progress,
            )


Requests = Callable[[Scenario, int, Source], list[Request]]
"""Makes a scenario's requests, given the longest a sequence may be and whom to blame."""


def deploy(
    scenario: Scenario, source: Source, requests_of: Requests = build_requests
) -> Deployment:
    """Check a scenario against its model, device, profiles and workload, and fill in defaults.

    ``requests_of`` lets who deploys many scenarios share requests between them. Raises ConfigError,
    naming file, key, value and what is allowed.
    """
    cluster, batching = scenario.cluster, scenario.batching
    model, device = model_of(scenario, source), device_of(scenario, source)
    layers = _stage_layers(scenario, model, source)
    max_length = cluster.max_length or model.max_position_embeddings
    in_flight = batching.max_in_flight or cluster.pp
    size = dtype_bytes_of(scenario, model, device)
    try:
        kv_capacity = kv_capacity_tokens(
            model, device, cluster.tp, layers, cluster.usable_memory, size
        )
        batch = batching.max_batch or max_batch(kv_capacity, max_length, in_flight)
    except CapacityError as error:
        raise ConfigError(f"{source.name(('cluster',))}: {error}") from None
    _check_batch(scenario, kv_capacity, max_length, in_flight, source)
    if batching.micro_batches == "free" and scenario.policy.build().holds_finished:
        problem = f"must be bound: the batches of {scenario.policy.name} leave together"
        raise source.error("batching.micro_batches", "free", problem)
    if batching.kv_reservation == "declared" and scenario.workload.declared == "to_max_length":
        problem = (
            "has no effect: every request declares max_length, unless workload.declared is exact"
        )
        raise source.error("batching.kv_reservation", "declared", problem)
    requests = requests_of(scenario, max_length, source)
    ops, longest, digest = op_times_of(scenario, model, device, source)
    limits = {
        f"the context of {model.name}": model.max_position_embeddings,
        f"the longest context that the profiles of {model.name} on {device.name} hold": longest,
    }
    notes = tuple(
        f"cluster.max_length {max_length} is more than {limit}, {what}"
        for what, limit in limits.items()
        if max_length > limit
    )
    resolved = scenario.model_copy(
        update={
            "cluster": cluster.model_copy(
                update={"max_length": max_length, "layers_per_stage": list(layers)}
            ),
            "batching": batching.model_copy(
                update={"max_batch": batch, "max_in_flight": in_flight}
            ),
        }
    )
    return Deployment(resolved, model, device, layers, kv_capacity, requests, ops, digest, notes)


def _stage_layers(scenario: Scenario, model: ModelSpec, source: Source) -> tuple[int, ...]:
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


def _rows(scenario: Scenario, requests: list[Request]) -> int:
    """Token rows of a typical large iteration: what the predictor tabulates beforehand."""
    batch = scenario.batching.max_batch or 1
    chunk: int | None = getattr(scenario.policy, "chunk_size", None)
    if chunk is not None:
        return max(chunk, getattr(scenario.policy, "tile", 1)) + 2 * batch
    limit = scenario.cluster.max_length or 1
    fitting = (r.prompt_tokens for r in requests if r.prompt_tokens + r.output_tokens <= limit)
    return max(fitting, default=1) + batch
