"""Keys that cannot act: what a user writes must act in one of the deployments that it is for.

A key of one scenario is for this one, a key above all scenarios for each that does not set it
itself, an axis for all its points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sarathi_sim.policies.catalogue import is_pooled, needs_of
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, ATTENTION, OPS, SEND_RECV
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.engine_memory import SHARES
from sarathi_sim.simulator.op_times.op_times import SUM
from .base import KeyPath, Source, has
from .deployment import Deployment, PoolsDeployment
from .inputs import node_gpus
from .scenario import OF_VLLM, POOLS, Scenario
from .workload import AtOnce, Closed

_GPUS, _FLIGHT = "cluster.tp or cluster.pp above 1", "several micro-batches in flight"
_FACTS: dict[str, tuple[str, Callable[[Deployment], bool]]] = {
    "priorities": (
        "requests of several priorities",
        lambda one: len({request.priority for request in one.requests}) > 1,
    ),
    "users": (
        "requests of several users (a trace's column user)",
        lambda one: len({request.user for request in one.requests}) > 1,
    ),
    "ranks": ("cluster.dp above 1", lambda one: one.scenario.cluster.dp > 1),
}
"""What a policy's parameter may need beside other parameters."""
_NEEDS: dict[str, tuple[str, Callable[[Deployment], bool]]] = {
    "cluster.router": (
        "cluster.replicas above 1",
        lambda one: one.scenario.cluster.replicas > 1,
    ),
    "cluster.gpus_per_node": (_GPUS, lambda one: one.scenario.cluster.gpus > 1),
    "cluster.intra_node": (_GPUS, lambda one: one.scenario.cluster.gpus > 1),
    "cluster.inter_node": (
        "a replica on several nodes",
        lambda one: one.scenario.cluster.gpus > node_gpus(one.scenario, one.device),
    ),
    "batching.formation": (_FLIGHT, lambda one: one.scenario.batching.max_in_flight != 1),
    "batching.micro_batches": (_FLIGHT, lambda one: one.scenario.batching.max_in_flight != 1),
    "kv_cache.activation_bytes": ("an engine that counts them", lambda one: _counts_peak(one)),
    "kv_cache.cuda_graph_bytes": ("an engine that counts them", lambda one: _counts_peak(one)),
    "engine.send": ("cluster.pp above 1", lambda one: one.scenario.cluster.pp > 1),
    **{f"engine.{key}": ("stack: vllm", lambda one: _of_vllm(one)) for key in OF_VLLM},
    "engine.layer_time": (
        "a profile that holds whole layers",
        lambda one: one.ops.whole_layer != SUM,
    ),
    "workload.shift.burstiness": (
        "requests that arrive one after the other",
        lambda one: not isinstance(one.scenario.workload.arrivals, AtOnce | Closed),
    ),
}


class Effects:
    """The keys that are set in some deployments, and whether they act in one of them."""

    def __init__(self) -> None:
        self._errors: dict[str, UserError | None] = {}

    def add(self, source: Source, deployment: Deployment) -> None:
        """Take a deployment of this source into account."""
        for key, value, need in _effects(deployment):
            name = source.name(key)
            if not need:
                self._errors[name] = None
            elif name not in self._errors:
                problem = f"has no effect here: needs {need}"
                self._errors[name] = source.error(".".join(key), value, problem)

    def check(self) -> None:
        """Raise UserError for a key that acts nowhere."""
        for error in filter(None, self._errors.values()):
            raise error


def refuse_without_effect(found: Iterable[tuple[Source, Deployment]]) -> None:
    """Raise UserError for a key that is set and acts in none of the deployments it is for."""
    effects = Effects()
    for one in found:
        effects.add(*one)
    effects.check()


def ops_of(deployment: Deployment) -> list[str]:
    """The ops that take time in the deployment's batches."""
    cluster, ops = deployment.scenario.cluster, deployment.ops
    there = {*ops.by_rows, *ATTENTION}
    if ops.all_reduce is not None and cluster.tp > 1:
        there.add(ALL_REDUCE)
    if cluster.pp > 1:
        there.add(SEND_RECV)
    head = deployment.scenario.engine.lm_head
    return [op for op in OPS if op in there and (head or not OPS[op].outputs)]


def _effects(deployment: Deployment) -> Iterator[tuple[KeyPath, object, str]]:
    """Keys that are set and may have no effect: path, value, and what they lack (empty: they
    act)."""
    if not isinstance(deployment, PoolsDeployment):
        yield from _effects_of_one(deployment)
        return
    for name, pool in zip(POOLS, deployment.pools, strict=True):
        for key, value, need in _effects_of_one(pool):
            own = has(getattr(deployment.given, name), key)
            yield ("disaggregation", name, *key) if own else key, value, need
    frontends = deployment.given.frontends
    if frontends > 1:
        several = sum(pool.scenario.cluster.replicas for pool in deployment.pools) > len(POOLS)
        need = "" if several else "several workers in a pool"
        yield ("disaggregation", "frontends"), frontends, need


def _effects_of_one(deployment: Deployment) -> Iterator[tuple[KeyPath, object, str]]:
    scenario, there = deployment.scenario, ops_of(deployment)
    for path, (need, acts) in _NEEDS.items():
        key = tuple(path.split("."))
        if (value := _set(scenario, key)) is not None:
            yield key, value, "" if acts(deployment) else need
    for op, factor in scenario.engine.op_scale.items():
        if factor != 1:
            need = "" if op in there else f"one of the ops {', '.join(there)}"
            yield ("engine", "op_scale", op), factor, need
    policy = scenario.policy.build()
    for name, (need, met) in needs_of(policy).items():
        if (value := _set(scenario, ("policy", name))) is not None:
            said, acts = _FACTS.get(need, (f"policy.{need}", lambda _, met=met: met))
            yield ("policy", name), value, "" if acts(deployment) else said


def _set(scenario: Scenario, key: KeyPath) -> object:
    """The value of a key that is not its default; else None."""
    section: object = scenario
    for part in key[:-1]:
        section = getattr(section, part)
        if section is None:
            return None
    field = type(section).model_fields.get(key[-1])  # type: ignore[attr-defined]
    value = None if field is None else getattr(section, key[-1])
    return None if field is None or value == field.default else value


def _of_vllm(deployment: Deployment) -> bool:
    kernels = deployment.scenario.kernels
    return kernels is not None and kernels.stack == "vllm"


def _counts_peak(deployment: Deployment) -> bool:
    policy = deployment.scenario.policy.build()
    return not (is_pooled(policy) and SHARES[policy.memory_share].keeps_peak)
