"""The speed of the event loop, as a multiple of a textbook SimPy simulation in one process.

Absolute times depend on the machine and its other work; the ratio of two loops timed in turn hardly
does.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from experiments.config.deployment import Deployment, deploy
from experiments.config.loading import Experiment
from experiments.config.requests import build_clients
from policies.policy import is_pooled
from profiler.storage.progress import Progress
from simulator.load.workload import at_once, make_requests
from simulator.loop.pipeline import stage_times
from simulator.loop.records import Records
from simulator.loop.simulation import simulate
from simulator.loop.textbook import simulate_textbook
from simulator.loop.textbook_pipeline import TextbookPipeline

BATCHES = (8, 32, 128, 512)
SCENARIOS = {"orca": "orca_pp", "sarathi": "sarathi_pp"}


def benchmark(experiment: Experiment, repeats: int, progress: Progress) -> dict[str, Any]:
    """Time both schedulers on the experiment's workload; medians over ``repeats``.

    Returns ``loop_s`` (records included), ``oracle_s``, ``speedup_vs_oracle`` and its range over
    the repeats ``speedup_range``, ``trace_share`` (what it takes beside the loop to recover when
    every micro-batch was on every stage), ``stage_executions_per_s``, ``iteration_us`` (by batch),
    ``peak_rss_mb`` (of this whole process, the textbook simulation included) and
    ``peak_rss_before_oracle_mb``.
    """
    deployments = {
        timed: deploy(experiment.scenarios[name], experiment.sources[name])
        for timed, name in _timed_scenarios(experiment).items()
    }
    # The first pass fills the predictor's tables, and counts the work.
    executions, trace_s = {}, {}
    for policy, deployment in deployments.items():
        records = _fast(deployment)
        executions[policy] = sum(r.num_iterations * r.num_stages for r in records.replicas)
        trace_s[policy] = _trace_s(records)
        del records
    iteration_us = {policy: _by_batch(d, progress) for policy, d in deployments.items()}
    lean_mb = _peak_rss_mb()

    loop: dict[str, list[float]] = {policy: [] for policy in deployments}
    oracle: dict[str, list[float]] = {policy: [] for policy in deployments}
    total = repeats * len(deployments)
    for repeat in range(repeats):
        for number, (policy, deployment) in enumerate(deployments.items()):
            progress("against textbook SimPy", repeat * len(deployments) + number, total)
            loop[policy].append(_timed(_fast, deployment))
            oracle[policy].append(_timed(_textbook, deployment))
    loop_s = {policy: median(times) for policy, times in loop.items()}
    oracle_s = {policy: median(times) for policy, times in oracle.items()}
    return {
        "loop_s": loop_s,
        "oracle_s": oracle_s,
        "speedup_vs_oracle": {policy: oracle_s[policy] / loop_s[policy] for policy in loop_s},
        "speedup_range": {p: _range(oracle[p], loop[p]) for p in loop_s},
        "trace_share": {p: trace_s[p] / loop_s[p] for p in loop_s},
        "stage_executions_per_s": {p: executions[p] / loop_s[p] for p in loop_s},
        "iteration_us": iteration_us,
        "peak_rss_mb": _peak_rss_mb(),
        "peak_rss_before_oracle_mb": lean_mb,
        "repeats": repeats,
    }


def _timed_scenarios(experiment: Experiment) -> dict[str, str]:
    """The timed scenarios by their names in the numbers: those that the demo compares, or all."""
    if all(name in experiment.scenarios for name in SCENARIOS.values()):
        return SCENARIOS
    return {name: name for name in experiment.scenarios}


def _range(oracle: list[float], loop: list[float]) -> list[float]:
    ratios = [slow / fast for slow, fast in zip(oracle, loop, strict=True)]
    return [min(ratios), max(ratios)]


def _trace_s(records: Records) -> float:
    """Seconds to recover the time of every micro-batch on every stage; median of three."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        for log in records.replicas:
            stage_times(log)
        taken.append(time.perf_counter() - began)
    return median(taken)


def _fast(deployment: Deployment) -> Records:
    return deployment.simulate()


def _textbook(deployment: Deployment) -> list[TextbookPipeline]:
    """The same system, with every switch that the configuration sets."""
    scenario = deployment.scenario
    cluster, batching, kv_cache = scenario.cluster, scenario.batching, scenario.kv_cache
    options: dict[str, Any]
    if kv_cache is not None:
        options = {
            "num_blocks": kv_cache.num_blocks,
            "block_size": kv_cache.block_size,
            "caching": kv_cache.prefix_caching,
        }
    else:
        options = {
            "max_batch": batching.max_batch,
            "kv_capacity": deployment.kv_capacity,
            "reserve_declared": batching.kv_reservation == "declared",
            "free_pool": batching.micro_batches == "free",
        }
    return simulate_textbook(
        deployment.requests,
        scenario.policy.build(),
        deployment.predictor,
        deployment.layers,
        replicas=cluster.replicas,
        switches=deployment.switches,
        router=cluster.router,
        seed=scenario.seed,
        clients=build_clients(scenario, deployment.requests),
        max_in_flight=batching.max_in_flight,
        max_length=cluster.max_length,
        **options,
    )


def _by_batch(deployment: Deployment, progress: Progress) -> dict[str, float]:
    """Microseconds per iteration with micro-batches of each size in :data:`BATCHES`.

    Prompts are short and outputs long, so that the micro-batches are full nearly all the time;
    memory is not what limits them here. Sizes that a policy does not allow are left out.
    """
    prompt, output = 16, 4096
    length = prompt + output
    groups = deployment.scenario.cluster.pp
    policy = deployment.scenario.policy.build()
    found = {}
    for number, batch in enumerate(BATCHES):
        progress(f"{deployment.scenario.policy.name} by batch", number, len(BATCHES))
        count = batch * groups
        if is_pooled(policy) and policy.max_num_seqs < count:
            continue
        requests = make_requests(
            at_once(count), np.full(count, prompt), np.full(count, output), max_length=length
        )
        scenario = deployment.scenario
        room = {"max_batch": batch, "micro_batches": "bound", "kv_reservation": "max_length"}
        changes = {
            "batching": scenario.batching.model_copy(update=room),
            "cluster": scenario.cluster.model_copy(update={"max_length": length, "replicas": 1}),
        }
        if scenario.kv_cache is not None:
            blocks = count * (length // scenario.kv_cache.block_size + 2)
            changes["kv_cache"] = scenario.kv_cache.model_copy(update={"num_blocks": blocks})
        wide = replace(
            deployment,
            scenario=scenario.model_copy(update=changes),
            requests=requests,
            kv_capacity=count * length,
        )
        predict, schedulers = wide.predictor, wide.schedulers()
        gc.collect()
        began = time.perf_counter()
        records = simulate(requests, schedulers, predict, deployment.layers)
        took = time.perf_counter() - began
        found[str(batch)] = 1e6 * took / records.replicas[0].num_iterations
    return found


def _timed(work: Callable[[Deployment], object], deployment: Deployment) -> float:
    gc.collect()
    began = time.perf_counter()
    result = work(deployment)
    took = time.perf_counter() - began
    del result
    return took


def _peak_rss_mb() -> float:
    """Largest resident size of this process so far, in units of 2**20 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
