"""The assumptions about a deployment, in words: the block "Assumed" of every answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sarathi_sim.profiler.kernels.message_curves import CAPTURED_TOKENS
from sarathi_sim.simulator.load.requests import traffic_line, without_times
from .deployment import Deployment
from .inputs import prompts_captured, version_defaults
from .scenario import FUSED, POOLS
from .workload import Closed, Gamma, TraceArrivals, Varying, Workload


def assumed(
    deployment: Deployment, searched: str | None = None, varied: Collection[str] = ()
) -> list[str]:
    """``topic: text`` lines: the traffic, its arrivals, the engine's settings at their default
    (without ``varied`` ones, which are no assumption), number formats, what is not modelled, and
    the notes of the deployment (op times, memory, host time).

    ``searched`` is the kind of load that is searched (rate or clients; None: the load is given).
    """
    found = {
        "traffic": traffic_line(deployment.requests),
        "arrivals": arrivals_line(deployment.scenario.workload, searched),
        **_by_pool(deployment, "engine", lambda pool: _defaults(pool, varied)),
        **_by_pool(deployment, "formats", _formats),
    }
    return [*(f"{topic}: {text}" for topic, text in found.items() if text), *deployment.notes]


def _by_pool(
    deployment: Deployment, topic: str, text: Callable[[Deployment], str]
) -> dict[str, str]:
    """A line of a topic; of two pools that differ, one each."""
    found = [text(pool) for pool in deployment.pools]
    if len(set(found)) == 1:
        return {topic: found[0]}
    return {f"{pool} {topic}": said for pool, said in zip(POOLS, found, strict=True)}


def arrivals_line(workload: Workload, searched: str | None) -> str:
    """When requests arrive, in words."""
    given = workload.arrivals
    if searched == "clients":
        return "closed loop: each client waits for its answer; the number of clients is searched"
    if isinstance(given, Closed) and searched is None:
        return without_times(given.clients)
    if given.kind == "at_once" and searched is None:
        return without_times(None)
    each = "" if workload.sessions is None else " sessions"
    rate = f"; the rate{' of' + each if each else ''} is searched"
    if searched is None:
        rate = f", {given.rate:g}{each or ' requests'}/s" if hasattr(given, "rate") else ""
    if isinstance(given, Gamma):
        return f"Gamma-distributed gaps, coefficient of variation {given.cv:g}{rate}"
    if isinstance(given, Varying):
        return f"Poisson with a rate that varies{rate}"
    return f"{'as in the trace' if isinstance(given, TraceArrivals) else 'Poisson'}{rate}"


def _defaults(deployment: Deployment, varied: Collection[str]) -> str:
    """The settings of the engine at their default, in words; empty if none is. A run from a
    resolved configuration gets the same text."""
    scenario, memory = deployment.scenario, deployment.memory
    policy, cache, cluster = scenario.policy, scenario.kv_cache, scenario.cluster
    usual = {key: one.default for key, one in type(policy).model_fields.items()}
    of_version = version_defaults(scenario, deployment.device)
    usual |= of_version["policy"]
    found = {
        key: value
        for key, value in policy.model_dump().items()
        if key not in varied and usual[key] == value
    }
    if cache is not None and cache.prefix_caching:
        found["prefix_caching"] = True
    share = type(cluster).model_fields["usable_memory"].default
    if memory is None and cluster.usable_memory == share:
        found["usable_memory"] = share
    elif memory is not None and memory.share == of_version["kv_cache"].get(memory.setting, share):
        found[memory.setting] = memory.share
    if (
        deployment.model.experts is not None
        and cluster.tp * cluster.dp > 1
        and cluster.expert_parallel is None
    ):
        found["expert_parallel"] = False
    words = [f"{key} {_word(value)}" for key, value in found.items() if value is not None]
    if scenario.stack is not None:
        largest = scenario.engine.fi_allreduce_fusion_max_size_mb
        if largest and largest == of_version["engine"].get(FUSED):
            words.append(f"additions fused with all-reduces up to {largest:g} MiB")
        decodes = "" if prompts_captured(scenario.engine) else " of decodes"
        words.append(f"CUDA graphs{decodes} up to {CAPTURED_TOKENS} tokens")
        if cache is not None and not cache.cuda_graph_bytes:
            words[-1] += " (their memory is not counted)"
    return f"equal to the default: {', '.join(words)}" if words else ""


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _formats(deployment: Deployment) -> str:
    kernels = deployment.scenario.kernels
    if kernels is None:
        return f"{deployment.ops.meta.dtype} throughout, as in the profile"
    found = f"weights {kernels.dtype}, KV cache {kernels.kv_cache_dtype}"
    if deployment.model.experts is None:
        return found
    return (
        f"{found}, experts {kernels.experts_in}; tokens over experts {kernels.expert_distribution}"
    )
