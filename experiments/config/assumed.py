"""What an answer rests on that nobody may have stated: the lines of its block "Assumed"."""

from __future__ import annotations

from typing import Any

from experiments.config.deployment import Deployment
from experiments.config.workload import Closed, Gamma, TraceArrivals, Varying, Workload
from profiler.kernels.reduce_curves import CAPTURED_TOKENS
from simulator.load.describe import traffic_line, without_times

NOT_MODELLED = "data-parallel attention, multi-token prediction (MTP): docs/limits.md"
"""Of mixtures, which are often served with both."""


def assumed(deployment: Deployment, searched: str | None = None) -> list[str]:
    """``topic: text`` lines: the traffic, its arrivals, the engine's settings that were not given,
    number formats, what is not modelled, and the notes of the deployment (op times, memory, host's
    time).

    ``searched`` is the kind of load that is looked for (rate or clients; None: the run has its
    own).
    """
    found = {
        "traffic": traffic_line(deployment.requests),
        "arrivals": _arrivals(deployment.scenario.workload, searched),
        "engine": _defaults(deployment),
        "formats": _formats(deployment),
        "not modelled": NOT_MODELLED if deployment.model.experts is not None else "",
    }
    return [*(f"{topic}: {text}" for topic, text in found.items() if text), *deployment.notes]


def _arrivals(workload: Workload, searched: str | None) -> str:
    """When requests arrive, in words."""
    given = workload.arrivals
    if searched == "clients":
        return "clients, each with a next request when it has its answer; their number is searched"
    if isinstance(given, Closed) and searched is None:
        return without_times(given.clients)
    if given.kind == "at_once" and searched is None:
        stated = "arrivals" in workload.model_fields_set
        return without_times(None) + ("" if stated else ", as none were given")
    each = "" if workload.sessions is None else " sessions"
    rate = f"; the rate{' of' + each if each else ''} is searched"
    if searched is None:
        rate = f", {given.rate:g}{each or ' requests'}/s" if hasattr(given, "rate") else ""
    if isinstance(given, Gamma):
        return f"Gamma-distributed gaps, coefficient of variation {given.cv:g}{rate}"
    if isinstance(given, Varying):
        return f"independent, at a rate that varies{rate}"
    return f"{'as in the trace' if isinstance(given, TraceArrivals) else 'Poisson'}{rate}"


def _defaults(deployment: Deployment) -> str:
    """The settings of the engine that have their default, in words; empty if all were given."""
    scenario, memory = deployment.scenario, deployment.memory
    policy, cache, cluster = scenario.policy, scenario.kv_cache, scenario.cluster
    found = {
        key: getattr(policy, key)
        for key in type(policy).model_fields
        if key not in policy.model_fields_set
    }
    if cache is not None and "prefix_caching" not in cache.model_fields_set:
        found["prefix_caching"] = cache.prefix_caching
    if "usable_memory" not in cluster.model_fields_set:
        if memory is None:
            found["usable_memory"] = cluster.usable_memory
        elif cache is not None and getattr(cache, memory.setting) is None:
            found[memory.setting] = cluster.usable_memory
    if deployment.model.experts is not None and cluster.tp > 1 and cluster.expert_parallel is None:
        found["expert_parallel"] = False
    words = [f"{key} {_word(value)}" for key, value in found.items() if value is not None]
    if scenario.stack is not None:
        words.append(f"CUDA graphs up to {CAPTURED_TOKENS} tokens")
        if cache is not None and not cache.cuda_graph_bytes:
            words[-1] += " (their memory is not counted)"
    return f"by default {', '.join(words)}" if words else ""


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _formats(deployment: Deployment) -> str:
    """The number formats, in words."""
    kernels = deployment.scenario.kernels
    if kernels is None:
        return f"{deployment.ops.bundle.meta.dtype} throughout, as in the profile"
    found = f"weights {kernels.dtype}, KV cache {kernels.kv_cache_dtype}"
    if deployment.model.experts is None:
        return found
    return (
        f"{found}, experts {kernels.experts_in}; tokens over experts {kernels.expert_distribution}"
    )
