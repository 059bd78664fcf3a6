"""What follows from an engine's version: its defaults, and how many states it keeps."""

from __future__ import annotations

from typing import Any

from sarathi_sim.policies.pool import PoolPolicy
from sarathi_sim.policies.request import release_of
from sarathi_sim.profiler.facts.device import DeviceSpec
from sarathi_sim.profiler.facts.engines import capability, engine_facts
from sarathi_sim.profiler.facts.formats import STACKS, Stack, named_stack
from sarathi_sim.simulator.load.engine_memory import MORE_GPUS, SHARES, STACK_SHARES, EngineMemory
from .base import Source
from .inputs import node_gpus
from .scenario import FUSED, KvCache, Scenario


def version_defaults(scenario: Scenario, device: DeviceSpec) -> dict[str, dict[str, Any]]:
    """The defaults of ``policy``, ``kv_cache`` and ``engine`` that depend on the engine's version:
    its policy's; and the kernels' where the stack names one."""
    policy, version = scenario.policy, scenario.policy.model_dump().get("version")
    cluster, spec = scenario.cluster, scenario.speculation
    about = {key: "several" if getattr(cluster, key) > 1 else "one" for key in ("pp", "dp")}
    inside = cluster.tp <= node_gpus(scenario, device)
    inside &= cluster.intra_node is None or cluster.intra_node.kind in (None, "nvlink")
    about |= {"tp": str(cluster.tp) if inside else "", "capability": capability(device)}
    about |= {} if spec is None else {"speculation": spec.method}
    wanted = list[tuple[Stack, str, str, str]]()
    if policy.name in STACKS and version:
        wanted.append((policy.name, version, "policy", "async_scheduling"))
        wanted.append((policy.name, version, "kv_cache", STACK_SHARES[policy.name]))
    if scenario.stack is not None:
        stack, own = named_stack(scenario.stack)
        own = own or (version if stack == policy.name else None) or ""
        wanted.append((stack, own, "engine", FUSED))
    found: dict[str, dict[str, Any]] = {"policy": {}, "kv_cache": {}, "engine": {}}
    for engine, of, section, key in wanted:
        if key in engine_facts(engine).facts:
            value = engine_facts(engine).at(key, of, **about)
            # A key of a run is the same however often it is resolved: a share is no whole number.
            found[section][key] = value if isinstance(value, bool) else float(value)
    return found


def of_its_version(scenario: Scenario, device: DeviceSpec) -> tuple[Scenario, list[str]]:
    """The scenario with the defaults of its engine's version for what it leaves open, and what to
    say of a version whose decisions were not compared."""
    policy, version = scenario.policy, scenario.policy.model_dump().get("version")
    found, cache = version_defaults(scenario, device), scenario.kv_cache or KvCache()
    if "usable_memory" in scenario.cluster.model_fields_set:
        found["kv_cache"] = {}
    for section, of in (("policy", policy), ("kv_cache", cache), ("engine", scenario.engine)):
        given = of.model_fields_set  # and null is not given
        left = {k: v for k, v in found[section].items() if k not in given or getattr(of, k) is None}
        if left:
            scenario = scenario.model_copy(update={section: of.model_copy(update=left)})
    if policy.name not in STACKS or not version:
        return scenario, []
    compared = engine_facts(policy.name).lockstep
    own, oldest, newest = map(release_of, (version, compared[0], compared[-1]))
    if own[: len(oldest)] >= oldest and own[: len(newest)] <= newest:
        return scenario, []
    near = compared[0] if own < oldest else compared[-1]
    told = f"{policy.name} {version}: here it decides as {near}, the nearest version that was "
    return scenario, [f"{told}compared decision by decision"]


def running_of(
    policy: PoolPolicy, cache: KvCache, memory: EngineMemory, source: Source
) -> tuple[int, str]:
    """The sequences that may run, as far as states of recurrent layers allow, and what to say of
    it. Raises UserError where the engine would not start.

    Sources: vllm-project/vllm, pull request 38270 (a block of the cache for each sequence); SGLang
    0.5.23, ``mem_cache/kv_cache_configurator.py`` (a pool of states, several a request).
    """
    most, version = policy.max_num_seqs, policy.version
    if not memory.state_bytes:
        return most, ""
    facts = engine_facts(SHARES[memory.setting].engine)
    size = f"recurrent layers: a sequence's states take {memory.state_bytes / 1e6:.1f} MB of a GPU"
    if memory.states is None:
        limit = "states_limit_sequences"
        refuses = limit in facts.facts and facts.at(limit, version)
        if refuses and most > memory.most_states:
            problem = f"must be at most {memory.most_states}: each needs a block for its states, "
            problem += f"or vLLM {version} does not start"
            raise source.error("policy.max_num_seqs", most, problem)
        return most, f"{size}, {memory.state_blocks} KV blocks"
    each = 1
    if cache.prefix_caching:
        each = facts.at("states_cached", version)
        each += facts.at("states_overlap", version) if policy.ahead else 0
    running = min(most, memory.states // each)
    told = f"{size}; {memory.states:,} of them fit, {each} a request: {running:,} run at once"
    if not running:
        raise source.error("kv_cache", None, f"{told}; use {MORE_GPUS}")
    return running, told


def with_running(scenario: Scenario, running: int, memory: EngineMemory | None) -> Scenario:
    """The scenario with SGLang's limit of running requests, where a pool of states lowers it."""
    key = "max_running_requests"
    if memory is None or memory.states is None or key not in type(scenario.policy).model_fields:
        return scenario
    return scenario.having("policy", **{key: running})
