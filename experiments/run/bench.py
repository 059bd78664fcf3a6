"""How fast the event loop is, as a multiple of a textbook SimPy simulation in the same process.

Absolute times depend on the machine and on what else it does; the ratio of two loops timed in turn
hardly does.
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
from experiments.config.errors import ConfigError
from experiments.config.loading import Experiment
from policies.policy import of_micro_batches
from policies.scheduler import Scheduler
from simulator.load.workload import at_once, make_requests
from simulator.loop.pipeline import stage_times
from simulator.loop.records import Records
from simulator.loop.simulation import simulate
from simulator.loop.textbook import TextbookReplica, simulate_textbook

BATCHES = (8, 32, 128, 512)
SCENARIOS = {"orca": "orca_pp", "sarathi": "sarathi_pp"}

Progress = Callable[[str, int, int], None]


def benchmark(experiment: Experiment, repeats: int, progress: Progress) -> dict[str, Any]:
    """Time both schedulers on the experiment's workload; medians over ``repeats``.

    Returns ``loop_s`` (records included), ``oracle_s``, ``speedup_vs_oracle`` and its range over
    the repeats ``speedup_range``, ``trace_share`` (what it takes beside the loop to recover when
    every micro-batch was on every stage), ``stage_executions_per_s``, ``iteration_us`` (by batch),
    ``peak_rss_mb`` (of this whole process, the textbook simulation included) and
    ``peak_rss_before_oracle_mb``.
    """
    for name in SCENARIOS.values():
        if name not in experiment.scenarios:
            raise ConfigError(f"{experiment.file}: scenarios: bench times {name}, which is missing")
    deployments = {
        policy: deploy(experiment.scenarios[name], experiment.sources[name])
        for policy, name in SCENARIOS.items()
    }
    # The first pass warms the predictor's tables, and counts what there is to do.
    executions, trace_s = {}, {}
    for policy, deployment in deployments.items():
        records = _fast(deployment)
        executions[policy] = sum(r.num_iterations * r.num_stages for r in records.replicas)
        trace_s[policy] = _trace_s(records)
        del records
    iteration_us = {policy: _by_batch(d, progress) for policy, d in deployments.items()}
    lean_mb = _peak_rss_mb()

    loop: dict[str, list[float]] = {policy: [] for policy in SCENARIOS}
    oracle: dict[str, list[float]] = {policy: [] for policy in SCENARIOS}
    for repeat in range(repeats):
        for number, (policy, deployment) in enumerate(deployments.items()):
            progress("against textbook SimPy", repeat * len(SCENARIOS) + number, 2 * repeats)
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


def _textbook(deployment: Deployment) -> list[TextbookReplica]:
    """The same system, with every switch that the configuration sets."""
    scenario = deployment.scenario
    cluster, batching = scenario.cluster, scenario.batching
    return simulate_textbook(
        deployment.requests,
        of_micro_batches(scenario.policy.build()),
        deployment.predictor,
        deployment.layers,
        replicas=cluster.replicas,
        switches=deployment.switches,
        router=cluster.router,
        seed=scenario.seed,
        max_batch=batching.max_batch,
        max_in_flight=batching.max_in_flight,
        kv_capacity=deployment.kv_capacity,
        max_length=cluster.max_length,
        reserve_declared=batching.kv_reservation == "declared",
        free_pool=batching.micro_batches == "free",
    )


def _by_batch(deployment: Deployment, progress: Progress) -> dict[str, float]:
    """Microseconds per iteration with micro-batches of each size in :data:`BATCHES`.

    Prompts are short and outputs long, so that the micro-batches are full nearly all the time;
    memory is not what limits them here.
    """
    prompt, output = 16, 4096
    length = prompt + output
    groups = deployment.scenario.cluster.pp
    found = {}
    for number, batch in enumerate(BATCHES):
        progress(f"{deployment.scenario.policy.name} by batch", number, len(BATCHES))
        count = batch * groups
        requests = make_requests(
            at_once(count), np.full(count, prompt), np.full(count, output), max_length=length
        )
        scheduler = Scheduler(
            of_micro_batches(deployment.scenario.policy.build()),
            max_batch=batch,
            max_in_flight=groups,
            kv_capacity=batch * groups * length,
            max_length=length,
        )
        scenario = deployment.scenario
        wide = scenario.model_copy(
            update={
                "batching": scenario.batching.model_copy(update={"max_batch": batch}),
                "cluster": scenario.cluster.model_copy(update={"max_length": length}),
            }
        )
        predict = replace(deployment, scenario=wide, requests=requests).predictor
        gc.collect()
        began = time.perf_counter()
        records = simulate(requests, [scheduler], predict, deployment.layers)
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
